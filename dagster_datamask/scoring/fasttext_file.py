"""Whether a file is a whole, consistent fastText model, found out before fastText's own reader has it.

That reader believes every number in the file: cut short it loops for ever or answers with probabilities of 1, and
counts that contradict each other make it read and write outside of its memory. Here: its format (versions 11 and 12),
walked once. Not here: what the model says.
"""

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

_MAGIC = 793712314
_VERSIONS = (11, 12)
_WORD, _LABEL = 0, 1
_MODELS = range(1, 4)
_LOSSES = range(1, 5)
# of each part of a quantised row
_CENTROIDS = 256


class _Damaged(Exception):
    """Why the file cannot be a model."""


class _Arguments(NamedTuple):
    dim: int
    ws: int
    epoch: int
    min_count: int
    neg: int
    word_ngrams: int
    loss: int
    model: int
    bucket: int
    minn: int
    maxn: int
    lr_update_rate: int


class _Matrix(NamedTuple):
    rows: int
    columns: int


def check_file(path: Path) -> None:
    """Raise ValueError, naming the file, unless it is as long as its own counts say and these agree with each other."""
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{path}: an empty file; fetch the model again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
        walk = _Walk(raw)
        try:
            if walk.numbers("<ii") not in {(_MAGIC, version) for version in _VERSIONS}:
                raise ValueError(f"{path}: not a fastText model of version 11 or 12")
            walk.model()
        except (struct.error, EOFError):
            raise ValueError(f"{path}: cut short at {size} bytes; fetch the model again") from None
        except _Damaged as error:
            raise ValueError(
                f"{path}: not a fastText model that can be read ({error}); fetch the model again"
            ) from None


class _Walk:
    """A place in the file, and what was read on the way to it."""

    def __init__(self, raw: mmap.mmap) -> None:
        self._raw = raw
        self._at = 0

    def numbers(self, layout: str) -> tuple[int, ...]:
        found = struct.unpack_from(layout, self._raw, self._at)
        self._at += struct.calcsize(layout)
        return found

    def skip(self, count: int) -> None:
        self._at += count
        if self._at > len(self._raw):
            raise EOFError

    def model(self) -> None:
        """Arguments, dictionary, input and output matrix: as FastText::loadModel reads them."""
        arguments = _Arguments(*self.numbers("<12i"))
        self.skip(8)
        _check(arguments.model in _MODELS and arguments.loss in _LOSSES, "no known model or loss")
        _check(arguments.dim > 0 and arguments.bucket >= 0, "a dimension or number of buckets below one")
        words, labels, pruned = self._dictionary()
        hashed = arguments.word_ngrams > 1 or arguments.maxn > 0
        _check(not hashed or arguments.bucket > 0 or pruned == 0, "n-grams without a bucket")
        (quantised,) = self.numbers("<?")
        rows = words + (arguments.bucket if pruned < 0 else pruned)
        self._matrix(bool(quantised), rows, arguments.dim, "input")
        (quantised_output,) = self.numbers("<?")
        supervised = arguments.model == _MODELS[-1]
        self._matrix(bool(quantised and quantised_output), labels if supervised else words, arguments.dim, "output")

    def _dictionary(self) -> tuple[int, int, int]:
        """Words, labels, and how many hashed n-grams a pruned model kept (-1: not pruned)."""
        entries, words, labels, tokens, pruned = self.numbers("<iiiqq")
        _check(min(words, labels, tokens) >= 0 and entries == words + labels, "counts of words that do not add up")
        _check(pruned >= -1, "fewer than no n-grams kept")
        for number in range(entries):
            end = self._raw.find(b"\0", self._at)
            if end < 0:
                raise EOFError
            # the entry's count, then its kind
            self._at = end + 1 + 8
            (kind,) = self.numbers("<b")
            _check(kind == (_WORD if number < words else _LABEL), f"entry {number} of another kind than its place says")
        for _ in range(max(pruned, 0)):
            _, place = self.numbers("<ii")
            _check(0 <= place < pruned, "an n-gram whose vector is not there")
        return words, labels, pruned

    def _matrix(self, quantised: bool, rows: int, columns: int, which: str) -> None:
        found = self._quantised() if quantised else self._dense()
        _check(found.columns == columns, f"an {which} matrix of {found.columns} columns for {columns} dimensions")
        _check(found.rows >= rows, f"an {which} matrix of {found.rows} rows for {rows}")

    def _dense(self) -> _Matrix:
        found = _Matrix(*self.numbers("<qq"))
        _check(min(found) >= 0, "a matrix of fewer than no rows or columns")
        self.skip(4 * found.rows * found.columns)
        return found

    def _quantised(self) -> _Matrix:
        norms, rows, columns, codes = self.numbers("<?qqi")
        _check(min(rows, columns, codes) >= 0, "a matrix of fewer than no rows or columns")
        self.skip(codes)
        parts = self._quantiser(columns)
        _check(codes == rows * parts, f"{codes} codes for {rows} rows of {parts}")
        if norms:
            self.skip(rows)
            _check(self._quantiser(1) == 1, "norms of more than one part")
        return _Matrix(rows, columns)

    def _quantiser(self, columns: int) -> int:
        """How many parts a row of so many columns has."""
        dimension, parts, length, last = self.numbers("<4i")
        _check(
            dimension == columns and min(parts, length, last) > 0 and (parts - 1) * length + last == columns,
            f"{parts} parts that do not make {columns} columns",
        )
        _check(last <= length, "a last part longer than the others")
        self.skip(4 * _CENTROIDS * dimension)
        return parts


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _Damaged(otherwise)
