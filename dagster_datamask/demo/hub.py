"""A few row groups of real FineWeb, read from the hub by range requests into the demo's layout.

Here: which rows, how they are read without downloading a 2 GB shard, and a plain answer where the hub is not reached.
Not here: models (the encoder of such a demo is E5, loaded by `scoring`), or labels: real rows come with none.
"""

from collections.abc import Sequence
from pathlib import Path

import fsspec
import httpx2
import pyarrow as pa
import pyarrow.parquet as pq

from dagster_datamask.demo.layout import FINEWEB_SCHEMA, CorpusSummary, ExportError, export_once, write_shard
from dagster_datamask.keyed import digest

FINEWEB_URL = "hf://datasets/HuggingFaceFW/fineweb"
# The first, a middle and the last of the paper's snapshots.
FINEWEB_SNAPSHOTS = ("CC-MAIN-2013-20", "CC-MAIN-2019-18", "CC-MAIN-2024-18")
SHARD = "000_00000.parquet"
# FineWeb's row groups hold about a thousand rows; a layout with huge ones would download a whole shard unasked.
MAX_BYTES = 512 * 2**20

_README = """# Real FineWeb rows

The first {row_groups} row group(s) of `{shard}` of each snapshot, from {source}. FineWeb is published under
ODC-By 1.0; its text stands under Common Crawl's terms of use.
"""


def export_fineweb_sample(
    target: Path,
    *,
    row_groups: int = 2,
    snapshots: Sequence[str] = FINEWEB_SNAPSHOTS,
    source: str = FINEWEB_URL,
) -> CorpusSummary:
    """Write `target/data/<snapshot>/000_00000.parquet` with the first row groups of each snapshot's first shard.

    `source` is any fsspec URL of a folder in FineWeb's layout. Only the footer and the row groups asked for are
    transferred. An export of the same source, snapshots and count that is already at `target` is returned without
    touching the network. Raises ExportError in one line naming what failed and how to go on: the hub not reached, a
    missing shard, fewer row groups than asked for, columns that are not FineWeb's. Every request has the hub client's
    timeout (10 s) and a bounded number of tries, so nothing waits for ever. ValueError for `row_groups` < 1.
    """
    if row_groups < 1:
        raise ValueError(f"row_groups is {row_groups}; take at least one")
    inputs = digest("fineweb-sample-1", source, row_groups, *snapshots).hex()

    def write(folder: Path) -> CorpusSummary:
        rows: dict[str, int] = {}
        tokens = 0
        for snapshot in snapshots:
            url = f"{source}/data/{snapshot}/{SHARD}"
            table = _first_row_groups(url, row_groups)
            rows[snapshot] = table.num_rows
            tokens += sum(n or 0 for n in table["token_count"].to_pylist())
            write_shard(table, folder / "data" / snapshot / SHARD, {"datamask.source": url})
        (folder / "README.md").write_text(_README.format(row_groups=row_groups, shard=SHARD, source=source))
        return CorpusSummary(
            root="",
            inputs=inputs,
            documents=sum(rows.values()),
            tokens=tokens,
            rows=rows,
            packages=0,
            labels={},
            skipped={},
        )

    return export_once(Path(target), inputs, write)


def _first_row_groups(url: str, count: int) -> pa.Table:
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
        # Read-ahead would fetch megabytes around each of Arrow's own, exact ranges.
        with filesystem.open(path, "rb", cache_type="none") as file:
            parquet = pq.ParquetFile(file, pre_buffer=True)
            _check(url, parquet, count)
            table = parquet.read_row_groups(range(count), columns=FINEWEB_SCHEMA.names, use_threads=False)
    except (OSError, httpx2.HTTPError, pa.ArrowInvalid) as error:
        reason = str(error).strip().splitlines()
        raise ExportError(
            f"cannot read {url}: {reason[0] if reason else type(error).__name__}. "
            "Run `make demo` without SOURCE=hf for the text that is on this machine, or copy FineWeb shards to a "
            "folder (data/<snapshot>/*.parquet) and set source.url to it."
        ) from error
    return table.select(FINEWEB_SCHEMA.names).cast(FINEWEB_SCHEMA)


def _check(url: str, parquet: pq.ParquetFile, count: int) -> None:
    names = parquet.schema_arrow.names
    missing = [name for name in FINEWEB_SCHEMA.names if name not in names]
    if missing:
        raise ExportError(f"{url} has no column {missing[0]!r}; it has: {', '.join(names)}")
    if count > parquet.metadata.num_row_groups:
        raise ExportError(
            f"{url} has {parquet.metadata.num_row_groups} row group(s) and {count} were asked for: ask for fewer"
        )
    size = sum(parquet.metadata.row_group(i).total_byte_size for i in range(count))
    if size > MAX_BYTES:
        raise ExportError(f"{count} row group(s) of {url} are {size / 2**20:,.0f} MiB: ask for fewer")
