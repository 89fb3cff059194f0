"""Planned reads give the file's own bytes, each piece once."""

import io
import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dagster_datamask.shards import ranges
from dagster_datamask.shards.ranges import RangedFile, pieces

MIB = 1 << 20
spans = st.lists(
    st.tuples(st.integers(0, 40 * MIB), st.integers(1, 12 * MIB)).map(lambda s: (s[0], s[0] + s[1])), max_size=12
)


@given(spans)
def test_pieces_cover_what_is_wanted_and_no_wide_gap(wanted: list[tuple[int, int]]) -> None:
    found = pieces(wanted)
    assert found == sorted(found)
    assert all(end - start <= 8 * MIB for start, end in found)
    edges = sorted({edge for span in (*wanted, *found) for edge in span})
    for start, end in pairwise(edges):
        inside = any(a <= start and end <= b for a, b in found)
        asked = any(a <= start and end <= b for a, b in wanted)
        assert inside if asked else not inside or end - start <= 256 * 1024


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 30)), max_size=6), st.randoms(use_true_random=False))
def test_any_reads_give_the_file_s_bytes(wanted: list[tuple[int, int]], order: random.Random) -> None:
    data = bytes(range(100))
    file = RangedFile(io.BytesIO(data), len(data), "a")
    file.expect([(start, min(start + size, 100)) for start, size in wanted], streams=2)
    for _ in range(20):
        start, size = order.randrange(0, 110), order.randrange(0, 40)
        file.seek(start)
        assert file.read(size) == data[start : start + size]
        assert file.tell() == (start if start > 100 else min(start + size, 100))
    file.seek(-5, io.SEEK_END)
    assert file.read() == data[-5:]


def test_streams_side_by_side_fetch_each_piece_once(monkeypatch) -> None:
    monkeypatch.setattr(ranges, "_PIECE_BYTES", 64)
    monkeypatch.setattr(ranges, "_GAP_BYTES", 0)

    class Counted(io.BytesIO):
        fetched = 0

        def read(self, size: int | None = -1) -> bytes:
            Counted.fetched += 1
            return super().read(size)

    data = random.Random(0).randbytes(1000)
    file = RangedFile(Counted(data), len(data), "a")
    file.expect([(0, 320), (400, 720)], streams=2)
    # two columns, read in turns of 16 bytes
    for at in range(0, 320, 16):
        for first in (0, 400):
            file.seek(first + at)
            assert file.read(16) == data[first + at : first + at + 16]
    assert Counted.fetched == 10
