"""Formatting: every number in the terminal's and the Markdown's tables reads as meant."""

import base64
import html
import io
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console

from dagster_datamask.reporting.tables import human, markdown_table, png_markdown, summary_table


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, "–"),
        (0, "0"),
        (1, "1"),
        (999, "999"),
        (1_234, "1,234"),
        (9_999, "9,999"),
        (10_000, "10k"),
        (12_345, "12.3k"),
        (999_949, "999.9k"),
        (999_950, "1M"),
        (4_500_000, "4.5M"),
        (15_000_000_000_000, "15T"),
        (-12_345, "-12.3k"),
        (0.00123456, "0.00123"),
        (12.345, "12.3"),
        (999.4, "999"),
        (999.6, "1,000"),
        (1234.5, "1,234"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_human(number: float | None, text: str) -> None:
    assert human(number) == text


@given(st.integers(0, 10**16))
def test_human_is_within_its_last_digit(number: int) -> None:
    text = human(number)
    scale = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1], 1.0)
    digits = text.rstrip("kMBT").replace(",", "")
    assert abs(float(digits) * scale - number) <= (0.0501 * scale if scale > 1 else 0)
    assert float(digits) < 1000 or scale in (1.0, 1e12)


def test_png_markdown_is_an_image_with_the_bytes() -> None:
    tokens = MarkdownIt().disable("text_join").parseInline(png_markdown(b"\x89PNG", "a [b]\nc"))[0].children
    assert tokens is not None
    assert [t.type for t in tokens] == ["image"]
    assert tokens[0].content == "a (b) c"
    source = re.search(r"base64,([^)]*)\)", png_markdown(b"\x89PNG", "a"))
    assert source is not None
    assert base64.b64decode(source[1]) == b"\x89PNG"


def test_markdown_table() -> None:
    rows = [
        {"name": "a|b\nc", "n": 1_234_567, "x": 0.25, "ok": True},
        {"name": None, "n": None, "x": 1e-9, "ok": False},
    ]
    assert markdown_table(rows, ["name", "n", "x", "ok"]).split("\n") == [
        "| name | n | x | ok |",
        "| --- | ---: | ---: | --- |",
        "| a\\|b c | 1,234,567 | 0.25 | yes |",
        "| – | – | 1e-09 | no |",
    ]


def test_markdown_table_without_rows_and_without_a_column() -> None:
    assert markdown_table([], ["a", "b"]) == "| a | b |\n| --- | --- |"
    with pytest.raises(KeyError, match="row 1 has no 'b'; it has: a"):
        markdown_table([{"a": 1, "b": 1}, {"a": 1}], ["a", "b"])


@given(st.lists(st.text(alphabet='ab|\\\n`*_[]<>&;#"~!', max_size=12), min_size=1, max_size=4))
@example(["__init__", "_a_", "a_b_c", "a &lt; b", "~~a~~", "![a](b)"])
def test_any_text_stays_in_its_cell_and_reads_as_it_is(cells: list[str]) -> None:
    text = markdown_table([{"a": c, "b": 1} for c in cells], ["a", "b"])
    rendered = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).render(text)
    assert rendered.count("<tr>") == len(cells) + 1
    shown = re.findall(r"<td>(.*?)</td>", rendered)
    assert [html.unescape(cell) for cell in shown] == [" ".join(c.splitlines()).strip() for c in cells]


def test_a_word_with_underscores_is_not_littered_with_escapes() -> None:
    assert "| e5_embeddings |" in markdown_table([{"a": "e5_embeddings"}], ["a"])


def _printed(rows: list[dict], width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, record=True, force_terminal=False)
    console.print(summary_table(rows))
    return console.export_text()


ROW = {
    "snapshot": "CC-MAIN-2024-18",
    "readable": 1_000_000,
    "unscored": 12,
    "pruned": 450_000,
    "kept": 100_000,
    "budget": 100_000,
    "value": -0.00583021,
    "upper_bound": -0.0058256,
    "gap": 4.61e-6,
    "share": 0.99906,
    "tokens_kept": 712_345_678,
}


def test_summary_of_one_snapshot() -> None:
    text = _printed([ROW])
    for part in ("CC-MAIN-2024-18", "1M", "450k", " 100,000 ", "-0.005830", "4.6e-06", "99.91%", "712.3M"):
        assert part in text
    assert " all " not in text
    assert " of 100,000" not in text


def test_a_budget_that_was_not_met_stands_beside_what_was_kept() -> None:
    assert "99,990 of 100,000" in _printed([{**ROW, "kept": 99_990}])


def test_unscored_documents_show_where_there_are_any() -> None:
    assert "scored" in _printed([ROW])
    assert "scored" not in _printed([{**ROW, "unscored": 0}])
    assert "scored" in _printed([{**ROW, "unscored": 0}, ROW])


def test_summary_adds_counts_and_nothing_else() -> None:
    last = _printed([ROW, {**ROW, "kept": 5, "share": None, "gap": None}]).splitlines()[-2]
    assert "2M" in last
    assert "100,005 of 200,000" in last
    assert "1.4B" in last
    assert last.count("–") == 3


def test_summary_without_rows_or_values() -> None:
    assert "snapshot" in _printed([])
    assert _printed([{"snapshot": "DEMO-2026-01"}]).count("–") == 7
    # A sum over rows of which one is unknown would be a wrong number.
    assert "1M" not in _printed([ROW, {"snapshot": "b"}]).splitlines()[-2]


def test_eighty_columns_hold_a_row_on_one_line() -> None:
    rows = [ROW, {**ROW, "snapshot": "CC-MAIN-2024-22"}]
    lines = _printed(rows, width=80).splitlines()
    assert all(len(line) <= 80 for line in lines)
    for snapshot in ("CC-MAIN-2024-18", "CC-MAIN-2024-22"):
        (line,) = (line for line in lines if snapshot in line)
        for part in ("1M", "12", "450k", "100,000", "-0.005830", "4.6e-06", "99.91%", "712.3M"):
            assert part in line


def test_a_narrow_terminal_cuts_nothing_off() -> None:
    wide, narrow = _printed([ROW]), _printed([ROW], width=60)
    assert "…" not in narrow
    assert "CC-MAIN-2024-18" in narrow
    assert sorted("".join(wide.split()).replace("─", "")) == sorted("".join(narrow.split()).replace("─", ""))


def test_a_long_name_folds_and_no_number_is_lost() -> None:
    name = "CC-MAIN-2024-18." + "of-a-long-name-" * 6
    lines = _printed([{**ROW, "snapshot": name}], width=80).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert "".join(line[1:].split(" ")[0] for line in lines if line.startswith(" ")).endswith(name)
    for part in ("1M", "450k", "100,000", "99.91%", "712.3M"):
        assert part in "\n".join(lines)
