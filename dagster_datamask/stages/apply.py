"""From ids back to documents: the kept rows of a source, for people who hold it.

Here: which rows of a source a list of ids means, and writing them in the source's own layout. Not here: how the list
came about (`export`, `manifest`).

A document is found by its id alone, wherever in its snapshot it lies. The join of ids is DuckDB's and spills to disk;
texts are read shard by shard, and only row groups that hold something kept.
"""

import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from dagster_datamask.shards.engine import BATCH_ROWS
from dagster_datamask.shards.generations import POINTER
from dagster_datamask.shards.identity import base_ids
from dagster_datamask.shards.layout import TEXT_GROUP_ROWS, laid_out
from dagster_datamask.shards.schemas import ADDED, BadShard, InconsistentFiles, joined
from dagster_datamask.shards.source import SNAPSHOT_KEY, Shard, Source, SourceError
from dagster_datamask.shards.writer import atomic, file_sha256, table_file
from dagster_datamask.stages.export import FOLDER, IDS_FOLDER
from dagster_datamask.stages.manifest import SIDECAR, conform

_ID_ROWS = 65_536
_MEMORY = "1GB"
_NAMED = 20
_FINGERPRINT = re.compile("[0-9a-f]+")
# a row's place in its snapshot as one number: the shard's, then the row's
_ROW_BITS = 40
_PLACES = pa.schema([("doc_id", pa.string()), ("place", pa.int64()), ("made", pa.bool_())])


def apply_manifest(
    manifest: Path,
    source: Source,
    out: Path,
    *,
    allow_missing: bool = False,
    log: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Write the documents that `manifest` keeps to `<out>/data/<snapshot>/<shard>.parquet`, columns as in `source`.

    `manifest`: the exported folder or its `ids/`, a parquet file, or a generation of `fineweb_mask_manifest`, in each
    case with the columns `doc_id, snapshot`; where there is a `decision`, rows are taken that are `kept`. Of several
    rows with one id the first counts, shards by name, as when the snapshot was read. Ids that the source does not have
    are counted and named (`missing.parquet` holds them all), and so are repeated ones (`duplicates.parquet`); unless
    `allow_missing`, nothing else is written where some are missing. Ids made of a shard's name and a row, for documents
    without an id, are told as `by_place`: they cannot prove that it is the same document.

    Raises ValueError for a manifest that cannot be read, is not as its checksums say, repeats an id or names a snapshot
    that is no folder's name, and where `out` holds data already; InconsistentFiles where the source changes meanwhile.
    """
    files = _files(manifest)
    if (out / "data").exists():
        raise ValueError(f"{out} already holds data; name another folder")
    there = source.snapshots()
    out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=".apply-", dir=out) as scratch,
        duckdb.connect(f"{scratch}/apply.db", config={"memory_limit": _MEMORY}) as con,
    ):
        con.execute("SET preserve_insertion_order = false")
        _load(con, manifest, files)
        shards: dict[str, list[Shard]] = {}
        unreadable: dict[str, str] = {}
        for (snapshot,) in con.execute("SELECT DISTINCT snapshot FROM wanted ORDER BY 1").fetchall():
            shards[snapshot] = _shards(source, snapshot) if snapshot in there else []
            log(f"{snapshot}: looking for ids in {len(shards[snapshot])} shards")
            unreadable |= _look_up(con, source, snapshot, shards[snapshot])
        con.execute(_FOUND)
        told = {"manifest": str(manifest), "source": source.url, "out": str(out), **_told(con, out)}
        told |= {"unreadable_shards": unreadable, "rows": 0, "files": 0, "bytes": 0}
        if told["missing"] and not allow_missing:
            return told
        for snapshot, every in shards.items():
            readable = [s for s in every if f"{snapshot}/{s.name}" not in unreadable]
            for path, rows in _write(con, source, snapshot, every, readable, out):
                log(f"{path.relative_to(out)}: {rows:,} rows")
                told["rows"] += rows
                told["files"] += 1
                told["bytes"] += path.stat().st_size
    return told


def _files(manifest: Path) -> list[Path]:
    """The manifest's parquet files, proved to be what its checksums say where it has some."""
    if manifest.is_file():
        return [manifest]
    folder = manifest
    if (folder / POINTER).exists():
        fingerprint = json.loads((folder / POINTER).read_text("utf-8"))["fingerprint"]
        if not _FINGERPRINT.fullmatch(fingerprint):
            raise ValueError(f"{folder / POINTER}: names the generation {fingerprint!r}, which is none")
        folder /= fingerprint
    for inner in (folder / FOLDER / IDS_FOLDER, folder / IDS_FOLDER):
        if inner.is_dir():
            folder = inner
    files = sorted(folder.glob("data/*/*.parquet")) or sorted(folder.glob("*.parquet"))
    sidecar = folder / SIDECAR
    if not files and not sidecar.exists():
        raise ValueError(
            f"{manifest}: no manifest; name an exported folder, its {IDS_FOLDER} folder, a parquet file of ids, or a "
            "generation of fineweb_mask_manifest"
        )
    told = json.loads(sidecar.read_text("utf-8")).get("files") if sidecar.exists() else None
    if told is not None:
        found = {path.relative_to(folder).as_posix(): path for path in files}
        wrong = sorted(
            (told.keys() ^ found.keys())
            | {name for name in told.keys() & found.keys() if file_sha256(found[name]) != told[name]}
        )
        if wrong:
            raise ValueError(f"{folder / wrong[0]} is not as {sidecar} says; get the manifest again")
    return files


def _load(con: duckdb.DuckDBPyConnection, manifest: Path, files: list[Path]) -> None:
    """The tables `wanted`, doc_id and snapshot of what is kept, and `hits`, empty."""
    con.execute("CREATE TABLE wanted (doc_id VARCHAR, snapshot VARCHAR)")
    con.execute("CREATE TABLE hits (snapshot VARCHAR, doc_id VARCHAR, place BIGINT, made BOOLEAN)")
    if not files:
        return
    try:
        rows = ds.dataset([str(path) for path in files], format="parquet")
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{manifest}: cannot be read as parquet ({str(error).splitlines()[0]})") from error
    lacking = [name for name in ("doc_id", "snapshot") if name not in rows.schema.names]
    if lacking:
        raise ValueError(f"{manifest}: has no column {lacking[0]!r}; its columns are: {', '.join(rows.schema.names)}")
    con.register("manifest_rows", rows)
    kept = "WHERE decision = 'kept'" if "decision" in rows.schema.names else ""
    con.execute(f"INSERT INTO wanted SELECT doc_id, snapshot FROM manifest_rows {kept}")
    con.unregister("manifest_rows")
    twice = con.execute(
        "SELECT doc_id, snapshot FROM wanted GROUP BY ALL HAVING count(*) > 1 OR doc_id IS NULL OR snapshot IS NULL "
        "ORDER BY ALL LIMIT 1"
    ).fetchone()
    if twice is not None:
        raise ValueError(
            f"{manifest}: the id {twice[0]!r} of {twice[1]} is null or there twice; it must name one document"
        )
    for (snapshot,) in con.execute("SELECT DISTINCT snapshot FROM wanted ORDER BY 1").fetchall():
        if not SNAPSHOT_KEY.fullmatch(snapshot):
            raise ValueError(f"{manifest}: names the snapshot {snapshot!r}, which cannot be a folder's name")


def _shards(source: Source, snapshot: str) -> list[Shard]:
    try:
        return source.shards(snapshot)
    except SourceError:
        # a folder without shards: all its ids are missing
        return []


def _look_up(con: duckdb.DuckDBPyConnection, source: Source, snapshot: str, shards: list[Shard]) -> dict[str, str]:
    """Add to `hits` every row of the snapshot whose id is wanted; return the shards that cannot be read, and why."""
    unreadable: dict[str, str] = {}
    failed: list[Exception] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for number, shard in enumerate(shards):
            first = 0
            try:
                for batch in source.batches(shard, ["id"], _ID_ROWS):
                    column = batch.column("id") if "id" in batch.schema.names else None
                    ids, made = base_ids(column, shard.name, first, len(batch))
                    places = (number << _ROW_BITS) + np.arange(first, first + len(batch))
                    yield pa.RecordBatch.from_arrays([pa.array(ids), pa.array(places), pa.array(made)], schema=_PLACES)
                    first += len(batch)
            except BadShard as error:
                unreadable[f"{snapshot}/{shard.name}"] = error.why
            except Exception as error:
                # DuckDB would tell it as an error of its own
                failed.append(error)
                raise

    con.register("rows", pa.RecordBatchReader.from_batches(_PLACES, batches()))
    try:
        # the wanted ids are the smaller side, which DuckDB cannot know of a stream
        con.execute("SET disabled_optimizers = 'build_side_probe_side,join_order'")
        con.execute(
            "INSERT INTO hits SELECT ?, rows.* FROM rows JOIN (FROM wanted WHERE snapshot = ?) wanted USING (doc_id)",
            [snapshot, snapshot],
        )
    except duckdb.Error:
        if failed:
            raise failed[0] from None
        raise
    finally:
        con.execute("RESET disabled_optimizers")
        con.unregister("rows")
    for number, shard in enumerate(shards):
        if f"{snapshot}/{shard.name}" in unreadable:
            con.execute(f"DELETE FROM hits WHERE snapshot = ? AND place >> {_ROW_BITS} = ?", [snapshot, number])
    return unreadable


_FOUND = """
    CREATE TABLE found AS
    SELECT snapshot, doc_id, min(place) AS place, bool_or(made) AS made, count(*) AS times FROM hits GROUP BY ALL
"""
_MISSING = "SELECT snapshot, doc_id FROM wanted ANTI JOIN found USING (snapshot, doc_id) ORDER BY ALL"
_DUPLICATES = "SELECT snapshot, doc_id, times FROM found WHERE times > 1 ORDER BY ALL"


def _told(con: duckdb.DuckDBPyConnection, out: Path) -> dict[str, Any]:
    """What was found, counted, with the first names; all names go to files beside the data."""
    told: dict[str, Any] = {
        "wanted": _one(con, "SELECT count(*) FROM wanted"),
        "found": _one(con, "SELECT count(*) FROM found"),
        "by_place": _one(con, "SELECT count(*) FROM found WHERE made"),
    }
    for what, query in (("missing", _MISSING), ("duplicates", _DUPLICATES)):
        told[what] = _one(con, f"SELECT count(*) FROM ({query})")
        rows = con.execute(f"{query} LIMIT {_NAMED}")
        names = [column[0] for column in rows.description or ()]
        told[f"{what}_named"] = [dict(zip(names, row, strict=True)) for row in rows.fetchall()]
        # an earlier try may have left one
        (out / f"{what}.parquet").unlink(missing_ok=True)
        if told[what]:
            with atomic(out / f"{what}.parquet") as temp:
                con.sql(query).write_parquet(str(temp))
    return told


def _one(con: duckdb.DuckDBPyConnection, query: str) -> int:
    row = con.execute(query).fetchone()
    assert row is not None
    return int(row[0])


def _write(
    con: duckdb.DuckDBPyConnection,
    source: Source,
    snapshot: str,
    every: list[Shard],
    readable: list[Shard],
    out: Path,
) -> Iterator[tuple[Path, int]]:
    """(file, rows) of each shard of which something is kept, all with the columns of all readable shards."""
    whole = joined((shard.path, source.footer(shard).schema) for shard in readable)
    schema = pa.schema([field for field in whole if field.name not in ADDED])
    for number, shard in enumerate(every):
        found: pa.Table = con.sql(
            f"SELECT doc_id, place & ((1::BIGINT << {_ROW_BITS}) - 1) AS row FROM found "
            f"WHERE snapshot = ? AND place >> {_ROW_BITS} = ? ORDER BY row",
            params=[snapshot, number],
        ).to_arrow_table()
        if not len(found):
            continue
        path = laid_out(out, snapshot, shard.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with table_file(path, schema, TEXT_GROUP_ROWS) as writer:
            for rows in _rows(source, shard, found):
                writer.write(pa.table({field.name: conform(rows, field) for field in schema}, schema=schema))
        yield path, len(found)


def _rows(source: Source, shard: Shard, found: pa.Table) -> Iterator[pa.Table]:
    """The rows of a shard that were found, their ids proved once more."""
    wanted = found["row"].to_numpy()
    with source.open(shard) as parquet:
        meta = parquet.metadata
        sizes = np.array([meta.row_group(g).num_rows for g in range(meta.num_row_groups)], dtype=np.int64)
    ends = np.cumsum(sizes)
    groups = np.unique(np.searchsorted(ends, wanted, side="right"))
    if len(groups) and groups[-1] == len(ends):
        raise _changed(shard)
    # where a row lies among the rows of the groups that are read
    skipped = (ends - sizes)[groups] - np.concatenate(([0], np.cumsum(sizes[groups])[:-1]))
    places = wanted - skipped[np.searchsorted(groups, np.searchsorted(ends, wanted, side="right"))]
    first = taken = 0
    for batch in source.batches(shard, None, BATCH_ROWS, groups.tolist()):
        upto = int(np.searchsorted(places, first + len(batch)))
        rows = pa.Table.from_batches([batch]).take(pa.array(places[taken:upto] - first))
        column = rows["id"].combine_chunks() if "id" in rows.column_names else None
        ids, made = base_ids(column, shard.name, 0, len(rows))
        told = found["doc_id"][taken:upto].to_pylist()
        own = [
            f"{shard.name}#{row}" if is_made else doc_id
            for doc_id, is_made, row in zip(ids, made, wanted[taken:upto], strict=True)
        ]
        if own != told:
            raise _changed(shard)
        if len(rows):
            yield rows
        first, taken = first + len(batch), upto
    if taken != len(wanted):
        raise _changed(shard)


def _changed(shard: Shard) -> InconsistentFiles:
    return InconsistentFiles(f"{shard.path} changed while it was read; run the command again")
