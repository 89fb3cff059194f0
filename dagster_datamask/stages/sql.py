"""The published files as tables: views for DuckDB, each with a `snapshot` column, and one query over them.

Here: which asset is which view, and what a query may do. It reads what was current when it began and nothing else:
DuckDB itself opens no file, the views are Arrow data sets over the published ones.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from dagster_datamask.shards.formats import as_json
from dagster_datamask.shards.generations import Published, Store
from dagster_datamask.shards.schemas import ColumnClash
from dagster_datamask.stages.base import MASKS_OF_A_SNAPSHOT

_OF_CLEANING = ("text_duplicates", "contaminated_documents", "near_duplicates")
VIEWS = {
    "manifest": "fineweb_mask_manifest",
    "masks": "datamask_masks",
    "raw": "raw_shards",
    "scores_dclm": "dclm_scores",
    "scores_edu": "edu_scores",
    "scores_wiki": "wiki_scores",
    "scores_quality": "quality_scores",
    "pruned": "pruned_documents",
    "clusters": "kmeans_clusters",
    "embeddings": "e5_embeddings",
    "fineweb_mask": "fineweb_mask",
    # what a manifest may keep instead of `masks`, or what there is beside it
    **{name: name for name in (*MASKS_OF_A_SNAPSHOT, *_OF_CLEANING) if name != "datamask_masks"},
}
_SNAPSHOT = pa.field("snapshot", pa.string())
_QUERIES = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
_FETCHED = 10_000
# nothing of the machine is in reach of a query but the views
_LOCKED = (
    "SET python_enable_replacements = false",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)


@dataclass(frozen=True)
class Answer:
    """What a query gives: column names, the first rows in JSON's types, and how many there are."""

    columns: list[str]
    rows: list[list[Any]]
    count: int


def query(store: Store, text: str | None, limit: int | None = None) -> Answer:
    """The answer to one SELECT over `VIEWS`, at most `limit` rows of it kept; without a query, views and columns.

    Vectors of `embeddings` are lists of float32. Numbers that are not finite become null.
    Raises ValueError, in one line, for what is no single query, cannot be read or asks for what is not there.
    """
    with _connected(store) as con:
        if text is None:
            text = (
                "SELECT table_name AS view, column_name AS column, data_type AS type FROM duckdb_columns() "
                "WHERE NOT internal ORDER BY table_oid, column_index"
            )
        try:
            statements = con.extract_statements(text)
            if len(statements) != 1 or statements[0].type not in _QUERIES:
                raise ValueError("a query reads and changes nothing: give one SELECT")
            cursor = con.execute(statements[0])
            rows: list[list[Any]] = []
            count = 0
            while batch := cursor.fetchmany(_FETCHED):
                kept = batch if limit is None else batch[: max(0, limit - len(rows))]
                rows += [[as_json(value) for value in row] for row in kept]
                count += len(batch)
            return Answer([column[0] for column in cursor.description or ()], rows, count)
        except duckdb.Error as error:
            raise ValueError(_one_line(error, [row[0] for row in con.execute("SHOW TABLES").fetchall()])) from error


def _one_line(error: duckdb.Error, views: Sequence[str]) -> str:
    # what follows shows the query's line again, with a caret below it
    told = " ".join(str(error).partition("\nLINE ")[0].split())
    if isinstance(error, duckdb.CatalogException):
        told += f" The views are: {', '.join(views) or 'none, for nothing is published'}."
    return told


@contextmanager
def _connected(store: Store) -> Iterator[duckdb.DuckDBPyConnection]:
    with tempfile.TemporaryDirectory(prefix="datamask-sql-") as scratch:
        config: dict[str, str | bool | int | float | list[str]] = {
            "temp_directory": scratch,
            "autoload_known_extensions": False,
            "autoinstall_known_extensions": False,
        }
        with duckdb.connect(":memory:", config=config) as con:
            for view, asset in VIEWS.items():
                found = [store.current(asset, snapshot) for snapshot in store.snapshots(asset)]
                rows = _rows_of([published for published in found if published.shards])
                if rows is not None:
                    con.register(view, rows)
            for setting in _LOCKED:
                con.execute(setting)
            yield con


def _rows_of(found: Sequence[Published]) -> ds.Dataset | None:
    """All rows of an asset's generations, their snapshot as a column, or None where there are no files."""
    if not found:
        return None
    arrow = found[0].ext == ".arrow"
    format = ds.IpcFileFormat() if arrow else ds.ParquetFileFormat()
    fragments = [
        format.make_fragment(*published.place(shard), partition_expression=ds.field("snapshot") == published.snapshot)
        for published in found
        for shard in published.shards
    ]
    _, system = found[0].place(found[0].shards[0])
    try:
        # all shards of a generation have one schema
        union = pa.unify_schemas([_schema(published) for published in found], promote_options="permissive")
    except pa.ArrowTypeError as error:
        raise ColumnClash(f"{found[0].asset}: snapshots have columns of one name but other types ({error})") from error
    schema = pa.schema([_SNAPSHOT, *(_readable(field) for field in union if field.name != _SNAPSHOT.name)])
    return ds.FileSystemDataset(fragments, schema, format, system)


def _schema(published: Published) -> pa.Schema:
    schema = published.schema()
    assert schema is not None
    return schema.remove_metadata()


def _readable(field: pa.Field) -> pa.Field:
    """DuckDB has no 16-bit floats."""
    kind = field.type
    if pa.types.is_fixed_size_list(kind) and pa.types.is_float16(kind.value_type):
        return field.with_type(pa.list_(pa.float32(), kind.list_size))
    return field
