"""Reading parts of a file on an object store: few requests, and hardly a byte that is not needed.

Here: which requests serve the ranges that will be read. Which ranges those are is `source`'s matter.
"""

import errno
import io
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from typing import BinaryIO

# a request costs a store about the time of a megabyte, so what lies nearer than that is not worth a second one
_GAP_BYTES = 1 << 18
# what one request brings: long enough for a store's full speed, short enough to hold one a column
_PIECE_BYTES = 1 << 23


def pieces(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """[start, end) of the requests that bring all `ranges`: near ones joined, and none longer than 8 MiB."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        for first in range(start, end, _PIECE_BYTES):
            last = min(first + _PIECE_BYTES, end)
            before = joined[-1] if joined else (0, 0)
            if joined and first <= before[1] + _GAP_BYTES and last - before[0] <= _PIECE_BYTES:
                joined[-1] = (before[0], max(before[1], last))
            else:
                joined.append((first, last))
    return joined


class RangedFile(io.RawIOBase):
    """A seekable view of `file`: ranges that are `expect`ed come piece by piece, all others as they are asked for.

    file: opened so that each read is one request of just these bytes. Of expected ranges one piece a stream is held.
    Raises OSError where the store gives fewer bytes than it said the file has.
    """

    def __init__(self, file: BinaryIO, size: int, name: str) -> None:
        self._file = file
        self._size = size
        self._name = name
        self._at = 0
        self._pieces: list[tuple[int, int]] = []
        self._starts: list[int] = []
        self._streams = 0
        self._held: OrderedDict[int, bytes] = OrderedDict()

    def expect(self, ranges: Iterable[tuple[int, int]], streams: int) -> None:
        """Ranges that will be read, each forward, by `streams` readers in turn."""
        self._pieces = pieces(ranges)
        self._starts = [start for start, _ in self._pieces]
        # a stream that leaves a piece may come back for a byte before the next is through
        self._streams = streams + 1

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        end = self._size if size is None or size < 0 else min(self._at + size, self._size)
        found = []
        while self._at < end:
            found.append(self._some(self._at, end))
            self._at += len(found[-1])
        return found[0] if len(found) == 1 else b"".join(found)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _some(self, start: int, end: int) -> bytes:
        """Bytes from `start` on, at least one and at most up to `end`."""
        number = bisect_right(self._starts, start) - 1
        if number < 0 or start >= self._pieces[number][1]:
            upto = self._starts[number + 1] if number + 1 < len(self._starts) else end
            return self._fetched(start, min(upto, end))
        if number not in self._held:
            self._held[number] = self._fetched(*self._pieces[number])
            if len(self._held) > self._streams:
                self._held.popitem(last=False)
        self._held.move_to_end(number)
        first = self._pieces[number][0]
        return self._held[number][start - first : end - first]

    def _fetched(self, start: int, end: int) -> bytes:
        self._file.seek(start)
        found = self._file.read(end - start)
        if len(found) != end - start:
            raise OSError(errno.EIO, f"{self._name}: {len(found)} of the bytes {start} to {end} came")
        return found
