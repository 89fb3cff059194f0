"""One page that needs nothing but itself: headings, Markdown, pictures and documents inside.

Here: the page. Not here: the text and the pictures of its sections.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from markdown_it import MarkdownIt


@dataclass(frozen=True)
class Card:
    """A document on the page, as plain text: its id, what became of it and whether that is good news, (name, value)
    facts, an excerpt, and the document to compare it with: (what it is, its excerpt)."""

    doc_id: str
    verdict: str
    good: bool
    facts: Sequence[tuple[str, str]]
    excerpt: str
    beside: tuple[str, str] | None = None


# should anything slip through: no script runs, nothing is loaded, no form is sent
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; form-action 'none'; base-uri 'none'"

Section = tuple[str, str, bytes | Sequence[Card] | None]

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
article { border: 1px solid #ddd; border-left: 4px solid #0072B2; padding: .5rem .9rem; margin: .8rem 0; }
article.bad { border-left-color: #D55E00; }
article.beside { border-left-color: #999; background: #fafafa; margin: .6rem 0 .3rem; }
article header { overflow-wrap: anywhere; } article b { margin-right: .6rem; }
article dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem .9rem; margin: .4rem 0;
  font-size: .9rem; }
article dt { color: #555; } article dd { margin: 0; overflow-wrap: anywhere; }
blockquote { margin: .4rem 0; padding-left: .8rem; border-left: 3px solid #e3e3e3; font-size: .9rem;
  overflow-wrap: anywhere; }
"""


def self_contained_page(title: str, sections: Sequence[Section]) -> str:
    """An HTML page from (heading, Markdown, PNG or cards or None) sections, in order, with links to them at the top.

    Raw HTML in Markdown and cards is shown as text, never run: documents and ids may end up in it. The page loads
    nothing from anywhere, and equal sections give equal bytes.
    """
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    body: list[str] = []
    links: list[str] = []
    for number, (heading, text, shown) in enumerate(sections, 1):
        links.append(f'<li><a href="#s{number}">{escape(heading)}</a></li>')
        body.append(f'<section id="s{number}">\n<h2>{escape(heading)}</h2>\n{markdown.render(text)}')
        if isinstance(shown, bytes):
            data = base64.b64encode(shown).decode("ascii")
            body.append(f'<img src="data:image/png;base64,{data}" alt="{escape(heading, quote=True)}">')
        else:
            body.extend(_card(card) for card in shown or ())
        body.append("</section>")
    contents = f"<nav><ul>{''.join(links)}</ul></nav>\n" if len(sections) > 1 else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{contents}" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _card(card: Card) -> str:
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in card.facts)
    beside = ""
    if card.beside is not None:
        what, excerpt = card.beside
        beside = (
            f'\n<article class="beside"><header>{escape(what)}</header>\n'
            f"<blockquote>{escape(excerpt)}</blockquote></article>"
        )
    return (
        f'<article class="{"good" if card.good else "bad"}"><header><b>{escape(card.verdict)}</b> {escape(card.doc_id)}'
        f"</header>\n<dl>{facts}</dl>\n"
        f"<blockquote>{escape(card.excerpt)}</blockquote>{beside}</article>"
    )
