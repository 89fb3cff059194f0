"""One page that needs nothing but itself: headings, Markdown, pictures inside.

Here: the page. Not here: the text and the pictures of its sections.
"""

import base64
from collections.abc import Sequence
from html import escape

from markdown_it import MarkdownIt

Section = tuple[str, str, bytes | None]

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, sans-serif; color: #1c1c1c; background: #fff; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
img { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .9rem; display: block; overflow-x: auto; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #e3e3e3; white-space: nowrap; }
th { text-align: left; border-bottom: 2px solid #999; }
code, pre { background: #f4f4f4; font-size: .88rem; } pre { padding: .7rem; overflow-x: auto; }
nav ul { columns: 2; }
"""


def self_contained_page(title: str, sections: Sequence[Section]) -> str:
    """An HTML page from (heading, Markdown, PNG or None) sections, in order, with links to them at the top.

    Raw HTML in the Markdown is shown as text, never run: documents and ids may end up in it. The page loads nothing
    from anywhere, and equal sections give equal bytes.
    """
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    body: list[str] = []
    links: list[str] = []
    for number, (heading, text, png) in enumerate(sections, 1):
        links.append(f'<li><a href="#s{number}">{escape(heading)}</a></li>')
        body.append(f'<section id="s{number}">\n<h2>{escape(heading)}</h2>\n{markdown.render(text)}')
        if png is not None:
            data = base64.b64encode(png).decode("ascii")
            body.append(f'<img src="data:image/png;base64,{data}" alt="{escape(heading, quote=True)}">')
        body.append("</section>")
    contents = f"<nav><ul>{''.join(links)}</ul></nav>\n" if len(sections) > 1 else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{contents}" + "\n".join(body) + "\n</body>\n</html>\n"
    )
