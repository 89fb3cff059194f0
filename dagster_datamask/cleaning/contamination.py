"""Documents that hold what a model will be evaluated on: shared runs of words, found by hash and proved word by word.

GPT-3's rule (Brown et al. 2020, appendix C): a document is contaminated if it shares n words in a row, n = 13, with a
text of an evaluation set, after both are normalised. A text of fewer words, down to the 8 that GPT-3 took at least,
counts where the document holds all of it; a shorter one says too little and is left out. Here: words, evaluation sets,
matches. Not here: which sets, and what becomes of a document (`stages.cleaning`).

Words: Unicode's compatibility forms (NFKC) with case folded; letters, digits and their marks. Apostrophes and invisible
characters within a word are passed over, all else separates. A Han or Kana character is a word by itself, for such text
has no spaces; what other scripts write without spaces (Thai, Khmer) is one word. A sign that stands for several (½, ㎏)
is read as those, without a break.
"""

import gzip
import json
import posixpath
import unicodedata
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dagster_datamask.keyed import digest

FEWEST_WORDS = 8
_JSON_LINES = (".jsonl", ".json", ".ndjson")
# characters that are read at once: a long document is cut between words
_PIECE = 1 << 20
_SEPARATOR, _LETTER, _ALONE, _JOINER = range(4)
_APOSTROPHES = "'\u2019\u02bc\uff07"
_ZERO_WIDTH_SPACE = "\u200b"
_SELECTORS = (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0), 0x034F)
_UNSPACED = ("CJK", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA")
# odd multipliers of the two polynomial hashes modulo 2^64; a chance collision costs a comparison and no more
_OF_LETTERS, _OF_WORDS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_POWERS = np.multiply.accumulate(np.full(1024, _OF_LETTERS))
# places of a first sieve for each n-gram of a set, and the most bits that name a place
_SIEVE, _MOST_BITS = 16, 26


class EvaluationSet(NamedTuple):
    """What must not be trained on. items: the texts of each row; revision: 32 hex digits over the file's content."""

    name: str
    items: list[list[str]]
    revision: str


class Match(NamedTuple):
    """The first run of words that a document shares with a text: of which set and row, characters, words."""

    evaluation_set: str
    item: int
    start: int
    end: int
    words: str


def read_evaluation_sets(refs: Sequence[str]) -> list[EvaluationSet]:
    """The sets in parquet or JSON-lines files (also `.gz`), on a disk or any fsspec URL, named by their files.

    Every string of a row is a text, those in lists and records included. Raises ValueError naming the file, and the
    line where there is one: missing, another format, not readable, two files of one name.
    """
    sets = [_read(ref) for ref in refs]
    names = [found.name for found in sets]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"clean.evaluation_sets: two files are called {twice}; rename one, reasons name the set by it")
    return sets


def _read(ref: str) -> EvaluationSet:
    where = f"clean.evaluation_sets: {ref}"
    name = posixpath.basename(ref.rstrip("/"))
    kind = posixpath.splitext(name.removesuffix(".gz"))[1]
    if kind not in (".parquet", *_JSON_LINES):
        raise ValueError(f"{where} is neither parquet nor JSON lines; name a file *.parquet or *.jsonl")
    try:
        with fsspec.open(ref, "rb", compression="infer") as file:
            content = file.read()
        rows = pq.read_table(pa.BufferReader(content)).to_pylist() if kind == ".parquet" else _lines(content, where)
    except FileNotFoundError as error:
        raise ValueError(f"{where} does not exist; correct the path, or remove it from the list") from error
    except (pa.ArrowException, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{where} cannot be read ({' '.join(str(error).split())}); replace the file") from error
    return EvaluationSet(name, [list(_texts(row)) for row in rows], digest(content, size=16).hex())


def _lines(content: bytes, where: str) -> list[Any]:
    rows = []
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{where}, line {number} is not JSON ({error}); write a JSON value a line") from error
    return rows


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


class Words(NamedTuple):
    """The words of a batch of texts, in order: 64-bit hashes, the text each is of, and its first character there."""

    hashes: np.ndarray
    texts: np.ndarray
    starts: np.ndarray


def words_of(texts: Sequence[str]) -> Words:
    """Words of `texts`, whose hashes depend on the normalised word alone. Memory holds a piece of the texts."""
    found = [_words_of_pieces(pieces) for pieces in _grouped(texts)]
    none = Words(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64))
    return Words(*(np.concatenate(columns) for columns in zip(none, *found, strict=True)))


def _grouped(texts: Sequence[str]) -> Iterator[list[tuple[int, int, str]]]:
    """Groups of (text, first character, piece) of about _PIECE characters together."""
    group: list[tuple[int, int, str]] = []
    size = 0
    for number, text in enumerate(texts):
        first = 0
        while first < len(text):
            piece = text[first : first + _PIECE]
            if first + len(piece) < len(text):
                # a megabyte without a space is no text, and may be cut anywhere
                piece = piece[: max(piece.rfind(" "), piece.rfind("\n")) + 1] or piece
            group.append((number, first, piece))
            first, size = first + len(piece), size + len(piece)
            if size >= _PIECE:
                yield group
                group, size = [], 0
    if group:
        yield group


def _words_of_pieces(pieces: list[tuple[int, int, str]]) -> Words:
    kinds, lengths, values, _ = _alphabet()
    codes = np.frombuffer(f" {' '.join(piece for _, _, piece in pieces)}".encode("utf-32-le", "surrogatepass"), "<u4")
    kind = kinds[codes]
    after = kind.copy()
    joiners = np.flatnonzero(kind == _JOINER)
    length, value = lengths[codes], values[codes]
    if len(joiners):
        # a joiner goes with what stands before it, and beside a separator with nothing
        opens = np.concatenate(([True], np.diff(joiners) != 1))
        after[joiners] = kind[joiners[opens][np.cumsum(opens) - 1] - 1]
        lone = joiners[after[joiners] == _SEPARATOR]
        length[lone], value[lone] = 0, 0
    begins = kind == _ALONE
    begins[1:] |= (kind[1:] == _LETTER) & (after[:-1] != _LETTER)
    starts = np.flatnonzero(begins)
    if not len(starts):
        return Words(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64))
    # the place of each letter in its word, counted in normalised letters
    place = np.cumsum(length, dtype=np.int32)[starts[0] :] - length[starts[0] :]
    place -= np.repeat(place[starts - starts[0]], np.diff(np.append(starts, len(codes))))
    terms = value[starts[0] :] * _POWERS[place & np.int32(len(_POWERS) - 1)]
    hashes = _avalanche(np.add.reduceat(terms, starts - starts[0]))
    firsts = np.cumsum([1, *(len(piece) + 1 for _, _, piece in pieces)])[:-1]
    of = np.searchsorted(firsts, starts, side="right") - 1
    numbers, offsets = (np.array([piece[k] for piece in pieces], np.int64) for k in (0, 1))
    return Words(hashes, numbers[of], starts - firsts[of] + offsets[of])


def word_at(text: str, start: int) -> tuple[str, int]:
    """(the normalised word that begins at a character, the character after its last letter)."""
    kinds, _, _, folded = _alphabet()
    letters: list[str] = []
    end = start
    first = kinds[ord(text[start])]
    for k in range(start, len(text)):
        code = ord(text[k])
        ends = kinds[code] in (_SEPARATOR, _ALONE) or (kinds[code] == _LETTER and first == _ALONE)
        if k > start and ends:
            break
        letters.append(folded.get(code, text[k]))
        end = k + 1 if letters[-1] else end
    return "".join(letters), end


@cache
def _alphabet() -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[int, str]]:
    """By code point: (uint8 kind, int32 normalised letters, uint64 hash of those, {code: those, where not itself})."""
    kinds = np.zeros(0x110000, np.uint8)
    lengths = np.zeros(0x110000, np.int32)
    values = np.zeros(0x110000, np.uint64)
    folded: dict[int, str] = {}
    for code in range(0x110000):
        sign = chr(code)
        category = unicodedata.category(sign)
        # neither unassigned, private or surrogate codes nor spaces and controls stand in words
        if category in ("Cn", "Co", "Cs", "Cc", "Zs", "Zl", "Zp") or sign == _ZERO_WIDTH_SPACE:
            continue
        if sign in _APOSTROPHES or category in ("Cf", "Me") or code in _SELECTORS:
            kinds[code], folded[code] = _JOINER, ""
            continue
        # decomposed, so that a letter with its mark and the two in one code are equal
        whole = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", sign).casefold())
        letters = "".join(c for c in whole if unicodedata.category(c)[0] in "LNM")
        if not any(unicodedata.category(c)[0] in "LN" for c in letters):
            if category[0] not in "LM":
                continue
            kinds[code] = _JOINER
        else:
            alone = unicodedata.name(letters[0], "").startswith(_UNSPACED)
            kinds[code] = _ALONE if alone else _LETTER
        if letters != sign:
            folded[code] = letters
        lengths[code] = len(letters)
        values[code] = _of_letters(letters)
    return kinds, lengths, values, folded


def _of_letters(letters: str) -> int:
    total = 0
    for place, letter in enumerate(letters):
        scattered = (ord(letter) + 1) * 0xBF58476D1CE4E5B9 % 2**64
        total += (scattered ^ scattered >> 31) * pow(int(_OF_LETTERS), place, 2**64)
    return total % 2**64


def _avalanche(h: np.ndarray) -> np.ndarray:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        h = (h ^ (h >> np.uint64(shift))) * np.uint64(factor)
    return h ^ (h >> np.uint64(31))


def _grams(hashes: np.ndarray, sizes: Collection[int]) -> Iterator[tuple[int, np.ndarray]]:
    """(n, uint64[w − n + 1] hashes of every n words in a row) for each n of `sizes`, rising; use it before the next."""
    grams = hashes.copy()
    for k in range(1, max(sizes, default=0) + 1):
        if k > 1:
            grams = grams[:-1]
            grams *= _OF_WORDS
            grams += hashes[k - 1 : k - 1 + len(grams)]
        if k in sizes:
            yield k, grams


@dataclass(frozen=True)
class _Grams:
    """Sorted hashes of one length, where each stands (text of the index, word), and a sieve by their leading bits."""

    hashes: np.ndarray
    texts: np.ndarray
    words: np.ndarray
    sieve: np.ndarray
    shift: np.uint64

    @classmethod
    def of(cls, hashes: np.ndarray, texts: np.ndarray, words: np.ndarray) -> "_Grams":
        order = np.argsort(hashes, kind="stable")
        bits = min(_MOST_BITS, max(8, (_SIEVE * len(hashes)).bit_length()))
        sieve = np.zeros(1 << bits, dtype=bool)
        shift = np.uint64(64 - bits)
        sieve[hashes >> shift] = True
        return cls(hashes[order], texts[order], words[order], sieve, shift)

    def candidates(self, grams: np.ndarray) -> Iterator[tuple[int, range]]:
        """(gram, entries of its hash), for the grams that have some, in order."""
        passed = np.flatnonzero(self.sieve[grams >> self.shift])
        left, right = (np.searchsorted(self.hashes, grams[passed], side) for side in ("left", "right"))
        for k in np.flatnonzero(left < right):
            yield int(passed[k]), range(int(left[k]), int(right[k]))


class EvaluationIndex:
    """The n-grams of evaluation sets: hashes in order, and their texts to compare words with.

    facts: a record of each set: items, texts, texts matched whole because they have fewer than `ngram` words, texts
    left out because they have fewer than 8 (or `ngram`, where that is less).
    """

    def __init__(self, sets: Sequence[EvaluationSet], ngram: int) -> None:
        self._names = [found.name for found in sets]
        self._ngram = ngram
        self._texts: list[str] = []
        self._of: list[tuple[int, int]] = []
        self._starts: list[np.ndarray] = []
        self.facts: list[dict[str, Any]] = []
        collected: dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
        fewest = min(ngram, FEWEST_WORDS)
        for number, found in enumerate(sets):
            # a context that is repeated for each of its answers is one text
            items = _first_items(found)
            words = words_of(list(items))
            ends = np.searchsorted(words.texts, np.arange(1, len(items) + 1))
            sizes = np.diff(ends, prepend=0)
            self.facts.append(
                {
                    "evaluation_set": found.name,
                    "items": len(found.items),
                    "texts": len(items),
                    "matched_whole": int(((fewest <= sizes) & (sizes < ngram)).sum()),
                    "too_short": int((sizes < fewest).sum()),
                }
            )
            for (text, item), end, size in zip(items.items(), ends, sizes, strict=True):
                if size < fewest:
                    continue
                ((n, grams),) = _grams(words.hashes[end - size : end], (min(ngram, int(size)),))
                at = np.arange(len(grams))
                collected.setdefault(n, []).append((grams, np.full(len(grams), len(self._texts)), at))
                self._texts.append(text)
                self._of.append((number, item))
                self._starts.append(words.starts[end - size : end])
        self._grams = {
            n: _Grams.of(*(np.concatenate(column) for column in zip(*parts, strict=True)))
            for n, parts in collected.items()
        }

    def matches(self, texts: Sequence[str]) -> list[Match | None]:
        """Per text the shared run of words that begins first, as long as it goes on; the longer n-gram, the earlier
        set and the earlier row where several begin there. None where nothing is shared."""
        words = words_of(texts)
        first: dict[int, tuple[int, Match]] = {}
        for n, grams in _grams(words.hashes, self._grams):
            index = self._grams[n]
            for at, entries in index.candidates(grams):
                text = int(words.texts[at])
                if words.texts[at + n - 1] != text or (text in first and first[text][0] < at):
                    continue
                match = self._proved(texts[text], words, at, n, index, entries)
                if match is not None:
                    first[text] = (at, match)
        return [first[k][1] if k in first else None for k in range(len(texts))]

    def _proved(self, text: str, words: Words, at: int, n: int, index: _Grams, entries: range) -> Match | None:
        """The match at a word, if the words of an entry are those of the text and not of their hash alone."""
        last = int(np.searchsorted(words.texts, words.texts[at], side="right"))
        for entry in entries:
            number, word = int(index.texts[entry]), int(index.words[entry])
            other, starts = self._texts[number], self._starts[number]
            shared: list[str] = []
            end = 0
            for k in range(min(last - at, len(starts) - word)):
                mine, stop = word_at(text, int(words.starts[at + k]))
                if mine != word_at(other, int(starts[word + k]))[0]:
                    break
                shared.append(mine)
                end = stop
            if len(shared) >= n:
                of, item = self._of[number]
                return Match(self._names[of], item, int(words.starts[at]), end, " ".join(shared))
        return None


def _first_items(found: EvaluationSet) -> dict[str, int]:
    """{text: the first row that has it}."""
    first: dict[str, int] = {}
    for item, texts in enumerate(found.items):
        for text in texts:
            first.setdefault(text, item)
    return first
