"""Numbers for people: human-readable figures, Markdown tables and pictures, and the terminal's summary.

Here: formatting alone. Not here: what the numbers are, or how a figure is drawn.
"""

import base64
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

# Columns of the summary: key of a row, heading, and how the value reads. Narrow, so that 80 columns hold it.
_SUMMARY = (
    ("snapshot", "snapshot", "text"),
    ("readable", "rows", "large"),
    ("unscored", "un-\nscored", "large"),
    ("pruned", "pruned", "large"),
    ("kept", "kept", "kept"),
    ("value", "value", "value"),
    ("gap", "gap to\nbound", "gap"),
    ("share", "share\nof gain", "share"),
    ("tokens_kept", "tokens\nkept", "large"),
)
# links, pictures, code, emphasis, entities and HTML all begin with one of these; a cell ends at a pipe. An underscore
# within a word is none
_MARKUP = re.compile(r"[\\|<>\[\]`*&~]|(?<![^\W_])_|_(?![^\W_])")
_NAME_CHARACTERS = len("CC-MAIN-2024-10")
_SUMMED = ("readable", "unscored", "pruned", "kept", "budget", "tokens_kept")


def human(number: float | None) -> str:
    """A number as a person reads it: 1,234; 12.3k; 4.5M; 0.00123; a dash for None, and NaN said outright."""
    if number is None:
        return "–"
    if not math.isfinite(number):
        return str(number)
    size = abs(number)
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        # 999,950 rounds to 1000.0k: the next unit takes over where rounding would reach it.
        if size >= limit * (1 - 5e-5 if limit > 1e4 else 1):
            scale = 1e3 if suffix == "k" else limit
            return f"{number / scale:.1f}".removesuffix(".0") + suffix
    if float(number).is_integer():
        return f"{int(number):,}"
    return f"{number:.3g}" if size < 999.5 else f"{number:,.0f}"


def png_markdown(png: bytes, alt: str) -> str:
    """A picture as a Markdown image with a base64 data URI: what Dagster's Markdown metadata shows."""
    safe = alt.replace("\\", "").replace("[", "(").replace("]", ")").replace("\n", " ")
    return f"![{safe}](data:image/png;base64,{base64.b64encode(png).decode('ascii')})"


class Markdown(str):
    """A cell that is Markdown already, of this project's own making."""

    __slots__ = ()


def markdown_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """A GitHub-flavoured Markdown table; numbers are right-aligned, and text reads as it is.

    What Markdown or HTML would take for markup is escaped: names of columns and hosts are whatever the web wrote.
    A column is right-aligned where every value present is a number. Raises KeyError naming the row and the column where
    a row lacks one.
    """
    for i, row in enumerate(rows):
        missing = [c for c in columns if c not in row]
        if missing:
            raise KeyError(f"row {i} has no {missing[0]!r}; it has: {', '.join(map(str, row))}")
    numeric = {c: bool(rows) and all(r[c] is None or _is_number(r[c]) for r in rows) for c in columns}
    lines = [
        "| " + " | ".join(_cell(c) for c in columns) + " |",
        "| " + " | ".join("---:" if numeric[c] else "---" for c in columns) + " |",
        *("| " + " | ".join(_cell(row[c]) for c in columns) + " |" for row in rows),
    ]
    return "\n".join(lines)


def summary_table(rows: Sequence[Mapping[str, Any]], title: str = "Selection by snapshot") -> Table:
    """The terminal's summary, one row per snapshot, with a last row of sums where there are several.

    Keys of a row: `snapshot, readable, unscored, pruned, kept, budget, value, gap, share, tokens_kept`; an absent or
    null value is a dash. What was kept stands alone where it is the budget, else as "kept of budget"; `unscored` shows
    where there are any. `share` is the share of the achievable gain over a uniform mask. Values and gaps are not
    summed: they are not of one problem. A row takes about 80 columns; where the terminal is narrower or a name longer,
    cells fold and none is cut.
    """
    columns = [column for column in _SUMMARY if column[0] != "unscored" or any(row.get("unscored") for row in rows)]
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=0)
    for key, heading, _ in columns:
        if key == "snapshot":
            # Common Crawl's names stay whole; a longer one must leave room for the numbers
            whole = all(len(str(row[key])) <= _NAME_CHARACTERS for row in rows)
            table.add_column(heading, no_wrap=whole, overflow="fold", vertical="bottom")
        else:
            table.add_column(heading, justify="right", overflow="fold", vertical="bottom")
    for i, row in enumerate(rows):
        table.add_row(*(_summary_cell(row, key, how) for key, _, how in columns), end_section=i == len(rows) - 1)
    if len(rows) > 1:
        sums = {key: sum(row[key] for row in rows) for key in _SUMMED if all(row.get(key) is not None for row in rows)}
        table.add_row(*(_summary_cell({"snapshot": "all", **sums}, k, how) for k, _, how in columns), style="bold")
    return table


def sweep_table(rows: Sequence[Mapping[str, Any]], title: str = "Certified front over λ") -> Table:
    """The terminal's table of a sweep, one row for each λ: what the mask is, how far it can be from the best, and how
    much of it the λ before chose too."""
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("λ", "quality", "raw", "diversity", "value", "gap to\nbound", "share\nof gain", "as λ\nbefore"):
        table.add_column(heading, justify="right", vertical="bottom")
    for row in rows:
        table.add_row(
            f"{row['lambda']:g}",
            *(_told(row[key], ".6f") for key in ("quality", "quality_raw", "diversity", "value")),
            _told(row["gap"], ".1e"),
            *(_told(row[key], ".2%") for key in ("share", "overlap")),
        )
    return table


def diff_table(changes: Sequence[Mapping[str, Any]], title: str) -> Table:
    """The terminal's table of documents whose decision changed: what A and B decided, and why."""
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("document", "A", "B", "why"):
        table.add_column(heading, overflow="fold")
    for row in changes:
        table.add_row(*(Text(_visible(row[key] or "–")) for key in ("doc_id", "decision_a", "decision_b", "why")))
    return table


def _visible(value: Any) -> str:
    """A text of the web for a terminal, which would obey some characters."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(value))


def _told(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _summary_cell(row: Mapping[str, Any], key: str, how: str) -> str:
    value = row.get(key)
    if value is None:
        return "–"
    if how == "text":
        return str(value)
    if how == "kept":
        budget = row.get("budget")
        return f"{int(value):,}" if budget in (None, value) else f"{int(value):,} of {int(budget):,}"
    if how == "value":
        return f"{value:.6f}"
    if how == "gap":
        return f"{value:.1e}"
    if how == "share":
        return f"{100 * value:.2f}%"
    return human(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, Markdown):
        return value
    return _MARKUP.sub(r"\\\g<0>", " ".join(str(value).splitlines()))
