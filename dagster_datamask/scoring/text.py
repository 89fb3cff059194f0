"""Text as the models must see it: decoded, without lone surrogates, in each classifier's canonical form.

Here belong: decoding of Arrow columns and the normalisers that a classifier was trained behind. Not here:
prefixes and truncation (`encoders`), which are the model's own, and any filtering of documents.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence

import pyarrow as pa

_SURROGATE = re.compile("[\ud800-\udfff]")

NULL_TEXT = "null_text"
NO_TOKENS = "no_tokens"
NON_FINITE = "non_finite"
ZERO_VECTOR = "zero_vector"
SURROGATES = "surrogates_replaced"


def decode_column(column: pa.Array | pa.ChunkedArray) -> tuple[list[str | None], int]:
    """The texts of a (large_)string or (large_)binary column, and how many rows had bytes replaced.

    Invalid UTF-8, encoded lone surrogates included, becomes U+FFFD; null stays None; no bytes raise. An
    all-null column (Arrow type null) is a column of None. Raises TypeError naming the type of any other
    column.
    """
    kind = column.type
    if pa.types.is_null(kind):
        return [None] * len(column), 0
    # a view as bytes: a string column of a foreign writer may hold any bytes, and Arrow's own decoder would raise
    if pa.types.is_string(kind):
        column = column.cast(pa.binary())
    elif pa.types.is_large_string(kind):
        column = column.cast(pa.large_binary())
    elif not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise TypeError(f"a text column must be string or binary, not {kind}: name the right column in [source]")
    texts: list[str | None] = []
    replaced = 0
    for raw in column.to_pylist():
        if raw is None:
            texts.append(None)
            continue
        try:
            texts.append(raw.decode("utf-8"))
        except UnicodeDecodeError:
            texts.append(raw.decode("utf-8", "replace"))
            replaced += 1
    return texts, replaced


def replace_surrogates(text: str) -> str:
    """The text with every lone surrogate as U+FFFD, so that it has a UTF-8 form."""
    return _SURROGATE.sub("\ufffd", text)


def join_lines(text: str) -> str:
    """DCLM's canonical form, one line: stripped, and every line break, as Python knows them, one space.

    Li et al. 2024 (DataComp-LM); the same form serves RedPajama's wiki-reference classifier. Two ways of
    joining lines can move one text's probability from 0.47 to 0.99, so there is this one.
    """
    return " ".join(text.strip().splitlines())


NORMALISERS: dict[str, Callable[[str], str]] = {"dclm": join_lines}


def screen(texts: Sequence[str | None]) -> tuple[list[str], list[str | None], Counter[str]]:
    """What every scorer does first: (texts without surrogates, reasons, notes), one entry per input.

    A null text has reason `null_text`, an empty or blank one `no_tokens`; both come back as "". Rows with
    surrogates are counted in notes under `surrogates_replaced`. Raises TypeError naming the row of anything
    that is not a text.
    """
    clean: list[str] = []
    reasons: list[str | None] = []
    notes: Counter[str] = Counter()
    for row, text in enumerate(texts):
        if text is None:
            clean.append("")
            reasons.append(NULL_TEXT)
            continue
        if not isinstance(text, str):
            raise TypeError(f"row {row}: a text must be a string or null, not {type(text).__name__}; use decode_column")
        if _SURROGATE.search(text):
            text = replace_surrogates(text)
            notes[SURROGATES] += 1
        blank = not text or text.isspace()
        clean.append("" if blank else text)
        reasons.append(NO_TOKENS if blank else None)
    return clean, reasons, notes
