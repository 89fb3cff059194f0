"""The page parses, holds its pictures, and runs nothing that a document might contain."""

import base64
from html.parser import HTMLParser

from dagster_datamask.reporting.figures import cluster_sizes_figure
from dagster_datamask.reporting.html import Card, self_contained_page
from dagster_datamask.reporting.tables import markdown_table, png_markdown

VOID = {"meta", "img", "br", "hr", "link"}


class _Page(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_sections_in_order_with_pictures_and_tables() -> None:
    png = cluster_sizes_figure([3, 1])
    sections = [
        ("First", markdown_table([{"a": 1}], ["a"]), png),
        ("Second", "Some *text*.", None),
    ]
    html = self_contained_page("Demo", sections)
    page = _Page(html)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("img") == tags.count("table") == tags.count("em") == 1
    source = next(attrs["src"] for tag, attrs in page.tags if tag == "img")
    assert source is not None
    assert base64.b64decode(source.removeprefix("data:image/png;base64,")) == png
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
    assert links == [f"#{attrs['id']}" for tag, attrs in page.tags if tag == "section"]
    assert html == self_contained_page("Demo", sections)


def test_nothing_is_loaded_and_nothing_runs() -> None:
    evil = '<script>alert(1)</script><img src=x onerror="alert(1)">'
    page = _Page(self_contained_page(evil, [(evil, evil + "\n\n[a](javascript:alert(1))", None)]))
    assert not {"script", "img", "link", "iframe", "a"} & {tag for tag, _ in page.tags}
    assert page.text.count("alert(1)") >= 4


def test_a_picture_in_the_markdown_is_shown() -> None:
    page = _Page(self_contained_page("t", [("h", png_markdown(cluster_sizes_figure([1]), "sizes"), None)]))
    assert [attrs["alt"] for tag, attrs in page.tags if tag == "img"] == ["sizes"]


def test_no_sections() -> None:
    page = _Page(self_contained_page("Nothing & more", []))
    assert page.text.count("Nothing & more") == 2
    assert "nav" not in [tag for tag, _ in page.tags]


def test_documents_are_cards_of_plain_text() -> None:
    evil = '<script>alert(1)</script>" onload="alert(1)'
    cards = [
        Card("id-1", "kept", True, [("scores", "9")], "text"),
        Card(evil, evil, False, [(evil, evil)], evil, (evil, evil)),
    ]
    page = _Page(self_contained_page("t", [("Documents", "", cards)]))
    classes = [attrs["class"] for tag, attrs in page.tags if tag == "article"]
    assert classes == ["good", "bad", "beside"]
    assert not {"script", "img"} & {tag for tag, _ in page.tags}
    assert all(set(attrs) <= {"class"} for tag, attrs in page.tags if tag in ("article", "header", "blockquote", "dd"))
    assert page.text.count(evil) == 7
