"""Who each document is: `doc_id`s that are unique within a snapshot, decided on disk.

CONTRACT, Documents: a row's id is its `id`; where that is null or blank, `<shard>#<row>`; a later duplicate (shards by
name, then row) gets `#<row>` appended and the decision `duplicate`. Ids are compared by 128-bit hash, in partitions
small enough for memory, so a snapshot of any size needs one partition's worth.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa

from dagster_datamask.keyed import hash128

# 2 million records of 32 bytes: a partition and its sort take about 200 MB
_PARTITION_ROWS = 2_000_000
_MAX_PARTITIONS = 512
# what is divided among partitions at once
_SPILLED_ROWS = 65_536
_RECORD = np.dtype([("high", "<u8"), ("low", "<u8"), ("shard", "<i8"), ("row", "<i8")])
OWN_ROW, SAME_ROW = 0, 1


class IdCollision(ValueError):
    """An id made for a duplicate is another document's own id."""


def base_ids(ids: pa.Array | None, shard: str, first_row: int, rows: int) -> tuple[list[str], np.ndarray]:
    """(ids before duplicates are renamed, bool[rows] where the row had none and got `<shard>#<row>`)."""
    given = [None] * rows if ids is None or pa.types.is_null(ids.type) else [_decoded(i) for i in _bytes(ids)]
    made = np.array([i is None or not i.strip() for i in given], dtype=bool)
    named = [f"{shard}#{first_row + k}" if made[k] or i is None else i for k, i in enumerate(given)]
    return named, made


def _bytes(ids: pa.Array) -> list[bytes | None]:
    return list(ids.cast(pa.large_binary()).to_pylist())


def _decoded(value: bytes | None) -> str | None:
    # replacing broken bytes would make distinct ids equal; escaping them keeps them apart
    return None if value is None else value.decode("utf-8", "backslashreplace")


def renamed(doc_id: str, row: int, shard: str, kind: int) -> str:
    """The id of a duplicate row: `#<row>` appended, and the shard too where that row repeats across shards."""
    return f"{doc_id}#{row}" if kind == OWN_ROW else f"{doc_id}#{row}#{shard}"


def hashes(batches: Iterable[tuple[int, list[str]]]) -> np.ndarray:
    """uint64[rows, 2]: the 128-bit hashes of a shard's ids by its rows, from its (first row, ids) batches."""
    found = [hash128(ids) for _, ids in batches]
    return np.concatenate(found) if found else np.empty((0, 2), np.uint64)


class Duplicates:
    """Rows of a snapshot that are later duplicates of an id, found through spill files in `folder`."""

    def __init__(self, folder: Path, total_rows: int) -> None:
        self.folder = folder
        self.partitions = min(_MAX_PARTITIONS, max(1, -(-total_rows // _PARTITION_ROWS)))

    def find(
        self,
        shards: Sequence[str],
        read: Callable[[str], Iterable[tuple[int, list[str]]]],
        hashed: Iterable[tuple[str, np.ndarray]],
    ) -> None:
        """Spill the hashes of every shard's ids and write each shard's duplicate rows.

        hashed: `hashes` of every shard, in any order. read(shard): (first row, ids) batches, of a shard with
        duplicates alone. Raises IdCollision if an id made for a duplicate is also some document's own id.
        """
        for old in self.folder.glob("*.bin"):
            old.unlink()
        numbers = {shard: number for number, shard in enumerate(shards)}
        self._spill(
            "ids",
            (
                (numbers[shard], first, found[first : first + _SPILLED_ROWS])
                for shard, found in hashed
                for first in range(0, len(found), _SPILLED_ROWS)
            ),
        )
        for p in range(self.partitions):
            self._resolve(p, shards)
        self._spill("made", self._made(shards, read))
        for p in range(self.partitions):
            self._check_made(p, shards, read)

    def of(self, shard: str) -> dict[int, int]:
        """{row: kind} of the shard's duplicates; kind 1 where `#<row>` alone would collide with an earlier shard's."""
        path = self._rows_file(shard)
        if not path.exists():
            return {}
        return {int(row): int(kind) for row, kind in np.fromfile(path, dtype="<i8").reshape(-1, 2)}

    def _spill(self, kind: str, batches: Iterable[tuple[int, int, np.ndarray]]) -> None:
        with ExitStack() as stack:
            files = [stack.enter_context(self._spilled(kind, p).open("wb")) for p in range(self.partitions)]
            for shard, first, found in batches:
                for p, records in enumerate(self._split(shard, first, found)):
                    files[p].write(records.tobytes())

    def _spilled(self, kind: str, p: int) -> Path:
        return self.folder / f"{kind}_{p:03d}.bin"

    def _made(
        self, shards: Sequence[str], read: Callable[[str], Iterable[tuple[int, list[str]]]]
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        for number, shard in enumerate(shards):
            rows = self.of(shard)
            for first, ids in read(shard) if rows else ():
                for row in range(first, first + len(ids)):
                    if row in rows:
                        yield number, row, hash128([renamed(ids[row - first], row, shard, rows[row])])

    def _check_made(
        self, p: int, shards: Sequence[str], read: Callable[[str], Iterable[tuple[int, list[str]]]]
    ) -> None:
        made = np.fromfile(self._spilled("made", p), dtype=_RECORD)
        if not len(made):
            return
        own = np.fromfile(self._spilled("ids", p), dtype=_RECORD)
        own = own[np.isin(own["low"], made["low"])]
        taken = set(zip(own["high"].tolist(), own["low"].tolist(), strict=True))
        for record in made:
            if (int(record["high"]), int(record["low"])) in taken:
                shard, row = shards[record["shard"]], int(record["row"])
                first, ids = next(b for b in read(shard) if b[0] <= row < b[0] + len(b[1]))
                doc_id = renamed(ids[row - first], row, shard, self.of(shard)[row])
                raise IdCollision(
                    f"shard {shard}, row {row}: the id {doc_id!r} made for this duplicate row is another document's "
                    "own id; rename that id at its source"
                )

    def _split(self, shard: int, first: int, found: np.ndarray) -> Iterator[np.ndarray]:
        records = np.empty(len(found), dtype=_RECORD)
        records["high"], records["low"] = found[:, 0], found[:, 1]
        records["shard"] = shard
        records["row"] = np.arange(first, first + len(found))
        parts = self._partition(found)
        for p in range(self.partitions):
            yield records[parts == p]

    def _partition(self, hashes: np.ndarray) -> np.ndarray:
        return (hashes[:, 0] % np.uint64(self.partitions)).astype(np.int64)

    def _resolve(self, p: int, shards: Sequence[str]) -> None:
        records = np.fromfile(self._spilled("ids", p), dtype=_RECORD)
        if len(records) < 2:
            return
        records = records[np.lexsort((records["row"], records["shard"], records["low"], records["high"]))]
        same = (records["high"][1:] == records["high"][:-1]) & (records["low"][1:] == records["low"][:-1])
        later = np.flatnonzero(same) + 1
        group = np.cumsum(np.concatenate(([True], ~same)))[later]
        row, number = records["row"][later], records["shard"][later]
        # the same row of two shards (a shard copied whole) would get one and the same appended row
        order = np.lexsort((number, row, group))
        repeated = (np.diff(group[order]) == 0) & (np.diff(row[order]) == 0)
        kind = np.full(len(later), OWN_ROW)
        kind[order[1:]] = np.where(repeated, SAME_ROW, OWN_ROW)
        for shard in np.unique(number):
            mine = number == shard
            with self._rows_file(shards[shard]).open("ab") as file:
                file.write(np.stack([row[mine], kind[mine]], axis=1).astype("<i8").tobytes())

    def _rows_file(self, shard: str) -> Path:
        return self.folder / f"duplicates_{shard}.bin"
