"""Two selections side by side: which documents changed, and why.

Here: finding what two masks or manifests hold, joining them by document on disk, and what their settings and inputs
say about the cause. Not here: how a mask is made, and how the result is shown (`reporting`).

The join is DuckDB's and spills to disk, so neither side has to fit in memory; rows are matched by id, never by place.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from dagster_datamask.selection.objectives import BadInput
from dagster_datamask.shards.generations import POINTER
from dagster_datamask.shards.writer import atomic

_SIDECAR = "manifest.json"
_FACTS = "facts.json"
_FORMATS = {"PAR1": "parquet", "ARRO": "ipc"}
# what of a pointer or sidecar can be the cause, the likeliest first
_CAUSES = ("settings", "selection", "models", "code_versions", "quarantined_shards", "fingerprints")
_CHOICES = ("lambda", "scale", "constants", "solver", "seed", "budget", "n", "pool", "splits")
_OPTIONAL = {
    "stage": "VARCHAR",
    "reason": "VARCHAR",
    "kept_id": "VARCHAR",
    "similarity": "DOUBLE",
    "score": "DOUBLE",
    "split": "BIGINT",
    "rank": "BIGINT",
}
_COMPARED = ("decision", "stage", "reason", "score", "score_from_cut", "rank", "places_from_cut")


@dataclass(frozen=True)
class _Side:
    """One of the two inputs: its files, which columns they have, and what is known of how they were made."""

    path: Path
    files: list[Path]
    format: str
    id: str
    columns: frozenset[str]
    made_from: dict[str, Any] | None = field(repr=False)


def diff(a: Path, b: Path, out: Path | None = None, show: int = 20) -> dict[str, Any]:
    """The JSON-able comparison of two selections of documents.

    `a`, `b`: a mask file (`datamask solve --out`), a folder of parquet files such as a generation of `datamask_masks`
    or `fineweb_mask_manifest`, or a folder whose `current.json` names one. `out` (.parquet or .csv) receives every
    changed document, `changes` the first `show` of them. A document has changed where exactly one side keeps it, or
    where both have it and decide differently.

    The cut of a side is the score of the S-th best of a split with S kept; `score_from_cut` is positive above it and
    `places_from_cut` counts ranks, 0 for the last inside. A side without ranks is ranked by its scores.

    Raises ValueError for what is neither, for files that cannot be read or lack columns, and BadInput for ids that
    are null or not unique.
    """
    if out is not None and out.suffix not in (".parquet", ".csv"):
        raise ValueError(f"{out}: write the changes to a file that ends in .parquet or .csv")
    sides = {"a": _side(a), "b": _side(b)}
    with tempfile.TemporaryDirectory(prefix="datamask-diff-") as scratch, duckdb.connect(f"{scratch}/diff.db") as con:
        con.execute("SET preserve_insertion_order = false")
        for name, side in sides.items():
            _load(con, name, side)
        _join(con)
        counts = _rows(con, _COUNTS)[0]
        told = _rows(con, f"SELECT * EXCLUDE (position) FROM changes ORDER BY position LIMIT {show:d}")
        flows = _rows(con, _FLOWS)
        if out is not None:
            with atomic(out) as temp:
                changes = con.sql("SELECT * EXCLUDE (position) FROM changes ORDER BY position")
                changes.write_parquet(str(temp)) if out.suffix == ".parquet" else changes.write_csv(str(temp))
    union = counts["kept_by_both"] + counts["kept_only_by_a"] + counts["kept_only_by_b"]
    return {
        "a": str(a),
        "b": str(b),
        **counts,
        "jaccard": counts["kept_by_both"] / union if union else None,
        "decisions": flows,
        "causes": causes(sides["a"].made_from, sides["b"].made_from),
        "changes": told,
        "out": None if out is None else str(out),
    }


def causes(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> list[dict[str, Any]] | None:
    """What the two were made from that differs: settings, models, code versions, quarantined shards, inputs.

    One entry {kind, name, a, b} for each; None where one side tells nothing of how it was made. Only what both sides
    tell is compared.
    """
    if a is None or b is None:
        return None
    found = []
    for kind in _CAUSES:
        if kind not in a or kind not in b or (kind == "selection" and "settings" in a and "settings" in b):
            continue
        left, right = (made[kind] if isinstance(made[kind], dict) else {kind: made[kind]} for made in (a, b))
        for name in sorted(left.keys() & right.keys()):
            if left[name] != right[name]:
                found.append({"kind": kind, "name": name, "a": left[name], "b": right[name]})
    return found


def _side(path: Path) -> _Side:
    folder, made_from = path, None
    if path.is_dir():
        if (path / POINTER).exists():
            folder = path / json.loads((path / POINTER).read_text("utf-8"))["fingerprint"]
        files = sorted(folder.glob("*.parquet"))
        if not files:
            raise ValueError(
                f"{path}: holds neither parquet files nor a {POINTER}; name a mask file, a generation, or the folder "
                "of one snapshot"
            )
        made_from = _made_from(folder)
    else:
        files = [path]
    kinds, schemas = zip(*(_schema(file) for file in files), strict=True)
    columns = frozenset.intersection(*(frozenset(schema.names) for schema in schemas))
    return _Side(path, files, kinds[0], _id_column(files[0], schemas[0], columns), columns, made_from)


def _schema(file: Path) -> tuple[str, pa.Schema]:
    with file.open("rb") as opened:
        kind = _FORMATS.get(opened.read(4).decode("latin-1"))
    if kind is None:
        raise ValueError(f"{file}: is neither a parquet nor an Arrow IPC file")
    try:
        return kind, ds.dataset(file, format=kind).schema
    except pa.ArrowInvalid as error:
        raise ValueError(f"{file}: cannot be read, it may be cut short ({error})") from error


def _id_column(file: Path, schema: pa.Schema, columns: frozenset[str]) -> str:
    ids = [name for name in ("doc_id", "id") if name in columns]
    lacking = [] if ids else ["'doc_id' or 'id'"]
    if not columns & {"selected", "decision"}:
        lacking.append("'selected' or 'decision'")
    if lacking:
        raise ValueError(
            f"{file}: has no column {', no column '.join(lacking)}; its columns are: {', '.join(schema.names)}"
        )
    return ids[0]


def _made_from(folder: Path) -> dict[str, Any] | None:
    """What a generation's files say it was made from: the manifest's sidecar, or else the figures of a mask, and the
    pointer where it names this generation."""
    if (folder / _SIDECAR).exists():
        sidecar: dict[str, Any] = json.loads((folder / _SIDECAR).read_text("utf-8"))
        return sidecar
    made_from: dict[str, Any] = {}
    if (folder / _FACTS).exists():
        facts = json.loads((folder / _FACTS).read_text("utf-8"))
        made_from["selection"] = {name: facts[name] for name in _CHOICES if name in facts}
    pointer = folder.parent / POINTER
    if pointer.exists():
        current = json.loads(pointer.read_text("utf-8"))
        if current["fingerprint"] == folder.name:
            made_from["settings"], made_from["fingerprints"] = current["settings"], current["inputs"]
            made_from["code_versions"] = {current["asset"]: current["code_version"]}
    return made_from or None


def _load(con: duckdb.DuckDBPyConnection, name: str, side: _Side) -> None:
    """Table `name`: one row a document with its decision, scores, rank and distance from the cut."""
    dataset = ds.dataset([str(file) for file in side.files], format=side.format)
    con.register("source", dataset)
    selected = "CAST(selected AS BOOLEAN)" if "selected" in side.columns else "decision = 'kept'"
    decision = "decision" if "decision" in side.columns else "CASE WHEN selected THEN 'kept' ELSE 'not_selected' END"
    optional = [
        f"CAST({_cell(column, kind) if column in side.columns else 'NULL'} AS {kind}) AS {column}"
        for column, kind in _OPTIONAL.items()
    ]
    try:
        con.execute(
            f"CREATE TABLE given AS SELECT CAST({side.id} AS VARCHAR) AS doc_id, {selected} AS selected, "
            f"CAST({decision} AS VARCHAR) AS decision, {', '.join(optional)} FROM source"
        )
    except duckdb.Error as error:
        raise ValueError(f"{side.path}: cannot be read as a mask or manifest ({str(error).splitlines()[0]})") from error
    con.unregister("source")
    nulls = _rows(con, "SELECT count(*) AS n FROM given WHERE doc_id IS NULL OR selected IS NULL")[0]["n"]
    if nulls:
        raise BadInput(f"{side.path}: {nulls} row{'s' if nulls > 1 else ''} without an id or a decision")
    twice = con.execute(
        "SELECT doc_id, count(*) FROM given GROUP BY doc_id HAVING count(*) > 1 ORDER BY doc_id LIMIT 1"
    ).fetchone()
    if twice is not None:
        raise BadInput(f"{side.path}: the id {twice[0]!r} stands in {twice[1]} rows; every document needs its own")
    rank = "rank"
    if "rank" not in side.columns:
        order = "PARTITION BY split ORDER BY score DESC NULLS LAST, selected DESC, doc_id"
        rank = f"CASE WHEN score IS NOT NULL THEN row_number() OVER ({order}) END"
    con.execute(f"CREATE TABLE ranked AS SELECT * REPLACE ({rank} AS rank) FROM given")
    con.execute(
        f"""CREATE TABLE {name} AS
        WITH sizes AS (SELECT split, count(*) FILTER (selected) AS size FROM ranked GROUP BY split),
        cuts AS (
          SELECT sizes.split, size, max(score) AS cut FROM sizes
          LEFT JOIN ranked ON ranked.split IS NOT DISTINCT FROM sizes.split AND rank = size
          GROUP BY ALL)
        SELECT ranked.*, score - cut AS score_from_cut, size - rank AS places_from_cut
        FROM ranked JOIN cuts ON ranked.split IS NOT DISTINCT FROM cuts.split"""
    )
    con.execute("DROP TABLE given")
    con.execute("DROP TABLE ranked")


def _cell(column: str, kind: str) -> str:
    # a NaN says that there is no number, and would come first in an order
    return f"CASE WHEN isfinite({column}) THEN {column} END" if kind == "DOUBLE" else column


def _join(con: duckdb.DuckDBPyConnection) -> None:
    """View `joined`, a row a document of either side, and table `changes`, those that changed, the telling ones first:
    kept by one side only, then by how far the two cuts were missed."""
    sides = ", ".join(f"{name}.{column} AS {column}_{name}" for column in _COMPARED for name in ("a", "b"))
    con.execute(
        f"""CREATE VIEW joined AS SELECT coalesce(a.doc_id, b.doc_id) AS doc_id,
        coalesce(a.selected, false) AS kept_a, coalesce(b.selected, false) AS kept_b,
        a.doc_id IS NOT NULL AS in_a, b.doc_id IS NOT NULL AS in_b,
        {sides}, a.kept_id AS kept_id_a, a.similarity AS similarity_a, b.kept_id AS kept_id_b,
        b.similarity AS similarity_b
        FROM a FULL JOIN b ON a.doc_id = b.doc_id"""
    )
    told = ", ".join(f"{column}_{name}" for column in _COMPARED for name in ("a", "b"))
    con.execute(
        f"""CREATE TABLE changes AS SELECT doc_id,
        CASE WHEN kept_a THEN 'removed' WHEN kept_b THEN 'added' ELSE 'moved' END AS change,
        CASE WHEN kept_b THEN {_why("a")} WHEN kept_a THEN {_why("b")}
          ELSE concat_ws('; ', {_why("a")}, {_why("b")}) END AS why,
        {told}, kept_id_a, similarity_a, kept_id_b, similarity_b,
        row_number() OVER (ORDER BY kept_a OR kept_b DESC,
          greatest(abs(places_from_cut_a), abs(places_from_cut_b)) DESC NULLS LAST, doc_id) AS position
        FROM joined WHERE kept_a != kept_b OR (in_a AND in_b AND decision_a != decision_b)"""
    )


def _why(name: str) -> str:
    """SQL text: why this side does not keep a document."""
    side, places = name.upper(), f"places_from_cut_{name}"
    count = f"format('{{:,}}', abs({places}))"
    return f"""CASE
      WHEN NOT in_{name} THEN 'not among the documents of {side}'
      WHEN kept_id_{name} IS NOT NULL
        THEN concat('{side} keeps its near-duplicate ', kept_id_{name}, format(' (cosine {{:.3f}})', similarity_{name}))
      WHEN decision_{name} != 'not_selected' OR reason_{name} IS NOT NULL
        THEN concat_ws(', ', '{side}: ' || decision_{name}, reason_{name}, 'at ' || stage_{name})
      WHEN {places} < 0
        THEN concat({count}, ' place', if(abs({places}) = 1, '', 's'), ' below the cut of {side}')
      WHEN {places} >= 0
        THEN 'passed over in {side}, though within its cut by score'
      ELSE 'not selected in {side}' END"""


_COUNTS = """SELECT
  count(*) FILTER (in_a) AS documents_a, count(*) FILTER (in_b) AS documents_b,
  count(*) FILTER (NOT in_b) AS documents_only_in_a, count(*) FILTER (NOT in_a) AS documents_only_in_b,
  count(*) FILTER (kept_a) AS kept_a, count(*) FILTER (kept_b) AS kept_b,
  count(*) FILTER (kept_a AND kept_b) AS kept_by_both,
  count(*) FILTER (kept_a AND NOT kept_b) AS kept_only_by_a,
  count(*) FILTER (kept_b AND NOT kept_a) AS kept_only_by_b,
  (SELECT count(*) FROM changes) AS changed
  FROM joined"""

_FLOWS = """SELECT decision_a AS a, decision_b AS b, count(*) AS documents FROM joined
  GROUP BY ALL ORDER BY documents DESC, a NULLS FIRST, b NULLS FIRST"""


def _rows(con: duckdb.DuckDBPyConnection, query: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = con.sql(query).to_arrow_table().to_pylist()
    return rows
