"""Text as the models must see it: decoded, without lone surrogates, in each classifier's canonical form.

Here belong: decoding of Arrow columns and the normalisers that a classifier was trained behind. Not here:
prefixes and truncation (`encoders`), which are the model's own, and any filtering of documents.
"""

import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

if TYPE_CHECKING:
    import pyarrow as pa

_SURROGATE = re.compile("[\ud800-\udfff]")

NULL_TEXT = "null_text"
NO_TOKENS = "no_tokens"
NON_FINITE = "non_finite"
ZERO_VECTOR = "zero_vector"
SURROGATES = "surrogates_replaced"


def decode_column(column: "pa.Array | pa.ChunkedArray") -> tuple[list[str | None], int]:
    """The texts of a (large_)string or (large_)binary column, and how many rows had bytes replaced.

    Invalid UTF-8, encoded lone surrogates included, becomes U+FFFD; null stays None; no bytes raise. An
    all-null column (Arrow type null) is a column of None. Raises TypeError naming the type of any other
    column.
    """
    # scoring processes read texts alone and fork, which Arrow's own threads forbid
    import pyarrow as pa

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


class UltraFineWeb:
    """Ultra-FineWeb's canonical form, one line (OpenBMB's released inference code, Wang et al. 2025).

    Three and more newlines become two; lower case; NFKD without its non-spacing marks; the tokens' texts joined by
    spaces; newline, carriage return and tab as their two-character escapes; runs of spaces one space, ends stripped.
    A token that holds a part of a character reads as U+FFFD, as it does there. A text of more than a million characters
    goes through the tokenizer in parts, which takes over 100 bytes a character: each ends before a space between two
    letters, where a tokenizer that splits at words first, as the release's does, splits as well.

    tokenizer: the `tokenizer.json` of the model's training, DeepSeek-V2's in the release; ValueError naming the file
    where it is none.
    """

    _part_characters = 1_000_000

    def __init__(self, tokenizer: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(tokenizer))
        # the library raises no narrower class
        except Exception as error:
            raise ValueError(
                f"{tokenizer}: not a tokenizer.json ({error}); give models.ultra_tokenizer one that the tokenizers "
                "library reads"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._words: dict[int, str] = {}

    def __call__(self, text: str) -> str:
        text = unicodedata.normalize("NFKD", _MANY_NEWLINES.sub("\n\n", text).lower())
        if not text.isascii():
            text = text.translate(_marks())
        tokens = (self._tokenizer.encode(part, add_special_tokens=False).ids for part in self._parts(text))
        line = " ".join(map(self._word, chain.from_iterable(tokens)))
        return _SPACES.sub(" ", line.translate(_ESCAPES)).strip()

    def _parts(self, text: str) -> Iterator[str]:
        start = 0
        while cut := _BETWEEN_WORDS.search(text, start + self._part_characters):
            yield text[start : cut.start()]
            start = cut.start()
        yield text[start:]

    def _word(self, token: int) -> str:
        word = self._words.get(token)
        if word is None:
            word = self._words[token] = self._tokenizer.decode([token], skip_special_tokens=False)
        return word


_BETWEEN_WORDS = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")
_MANY_NEWLINES = re.compile("\n{3,}")
_SPACES = re.compile(" +")
_ESCAPES = str.maketrans({"\n": "\\n", "\r": "\\r", "\t": "\\t"})


@cache
def _marks() -> dict[int, None]:
    """Every non-spacing mark, for `str.translate` to drop."""
    return {code: None for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) == "Mn"}


NORMALISERS = ("dclm", "ultra_fineweb")


def normaliser_of(name: str, tokenizer: Path | None = None) -> Callable[[str], str]:
    """The canonical form `name`, a key of NORMALISERS, of a text; `ultra_fineweb` needs its tokenizer's file.

    Raises ValueError for another name, and for a tokenizer that is missing or none.
    """
    if name == "dclm":
        return join_lines
    if name != "ultra_fineweb":
        raise ValueError(f"normaliser {name!r} is none of: {', '.join(NORMALISERS)}")
    if tokenizer is None:
        raise ValueError("normaliser 'ultra_fineweb' needs the model's tokenizer.json; set models.ultra_tokenizer")
    return UltraFineWeb(tokenizer)


def _encodes(text: str) -> bool:
    """Whether a text has a UTF-8 form, faster than a search for the surrogates that deny it one."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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
        if not _encodes(text):
            text = replace_surrogates(text)
            notes[SURROGATES] += 1
        blank = not text or text.isspace()
        clean.append("" if blank else text)
        reasons.append(NO_TOKENS if blank else None)
    return clean, reasons, notes
