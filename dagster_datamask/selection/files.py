"""From a file of documents to a file with their mask: what `datamask solve` does.

Here: reading ids, scores and vectors from one parquet or Arrow IPC file, with every fault named, and writing the mask.
Not here: the selection itself (`solve`), and how a file reaches the disk whole (`shards.writer`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dagster_datamask.accelerator import Accelerator
from dagster_datamask.selection.budgets import Budget, parse_budget, parse_tokens, quotas
from dagster_datamask.selection.exact import MOST_TOKENS
from dagster_datamask.selection.objectives import BadInput, QualityDiversity, name_documents
from dagster_datamask.selection.policy_gradient import Progress
from dagster_datamask.selection.solve import Options, Selection, solve
from dagster_datamask.shards.schemas import MASKS
from dagster_datamask.shards.writer import table_file

COLUMNS = ("id", "score", "embedding", "token_count")
_SHOWN = 5


@dataclass(frozen=True, eq=False)
class Documents:
    """ids: N distinct strings; scores: float64[N], or None where there are none; embeddings: [N, d] in the stored
    dtype; tokens: int64[N] and groups: N texts, or None where they were not asked for."""

    ids: list[str]
    scores: np.ndarray | None = field(repr=False)
    embeddings: np.ndarray = field(repr=False)
    tokens: np.ndarray | None = field(repr=False, default=None)
    groups: list[str] | None = field(repr=False, default=None)

    def budget(self, asked: str | int | float) -> Budget:
        """What is asked for, of these documents: a share or a number of them or, as "2e9tok", of tokens; shared out
        where there are groups. Raises ValueError for what cannot be read or exceeds what there is."""
        amount = parse_tokens(asked)
        if amount is None:
            amount = parse_budget(asked, len(self.ids))
        if self.groups is not None:
            return quotas(amount, self.groups, self.tokens)
        return Budget((amount,), self.tokens)


def solve_file(
    source: Path,
    out: Path | None,
    *,
    budget: str | int | float,
    lam: float,
    solver: str = "certified",
    scale: str = "per_pool",
    constants: tuple[float, float] | None = None,
    seed: int = 0,
    columns: Mapping[str, str] | None = None,
    diversity: Mapping[str, float] | None = None,
    quota: str | None = None,
    accelerator: Accelerator = Accelerator(),  # noqa: B008
    progress: Progress | None = None,
    options: Options | None = None,
) -> dict[str, Any]:
    """Select from `source` and write the mask to `out` (.parquet or .arrow; None writes nothing).

    columns: {"id" | "score" | "embedding" | "token_count": the file's own name}. The score column is read where λ > 0
    or the solver ranks by it, and is optional otherwise; token counts where the budget is in tokens. diversity:
    {metric: weight}, pair-wise similarity by default; quota: the column by whose values the budget is shared out, in
    proportion to what each has. Returns the JSON-able figures of `Selection.summary` and the settings.

    Raises ValueError or BadInput naming the file, and the first ids or rows at fault.
    """
    if out is not None and out.suffix not in (".parquet", ".arrow"):
        raise ValueError(f"{out}: write the mask to a file that ends in .parquet or .arrow")
    if out is not None and not out.absolute().parent.is_dir():
        raise ValueError(f"{out}: there is no folder {out.absolute().parent}; make it first")
    documents = read_documents(
        source,
        columns or {},
        scores_needed=lam > 0 or solver == "top_k",
        tokens_needed=parse_tokens(budget) is not None,
        quota=quota,
    )
    diversity = {"pws": 1.0} if diversity is None else diversity
    with of_file(source):
        kept = documents.budget(budget)
        objective = QualityDiversity(documents.embeddings, documents.scores, lam, scale, constants, diversity)
        selection = solve(
            objective,
            kept,
            solver=solver,
            seed=seed,
            ids=documents.ids,
            accelerator=accelerator,
            progress=progress,
            options=options,
        )
    if out is not None:
        write_mask(out, documents.ids, selection)
    return {
        **selection.summary(),
        **({} if quota is None else {"quota": quota, "quotas": dict(zip(kept.names, kept.amounts, strict=False))}),
        "lambda": lam,
        "scale": scale,
        "seed": seed,
        "source": str(source),
        "out": None if out is None else str(out),
    }


@contextmanager
def of_file(source: Path) -> Iterator[None]:
    """Errors of what a file holds name the file."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{source}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def write_mask(out: Path, ids: list[str], selection: Selection) -> None:
    """One row per document, in the order of the input, with the columns of `MASKS` and `id` for `doc_id`."""
    n = len(ids)
    selected = np.zeros(n, bool)
    selected[selection.indices] = True
    kept = np.full(n, -1) if selection.kept is None else selection.kept
    similarity = np.full(n, np.nan) if selection.similarity is None else selection.similarity
    instead = kept >= 0
    schema = pa.schema([f.with_name("id") if f.name == "doc_id" else f for f in MASKS])
    table = pa.table(
        {
            "id": pa.array(ids, pa.string()),
            "selected": selected,
            "score": selection.scores,
            "rank": selection.rank,
            "split": np.zeros(n, np.int32),
            "reason": pa.array(["near_duplicate" if other else None for other in instead.tolist()], pa.string()),
            "kept_id": pa.array([ids[k] if k >= 0 else None for k in kept.tolist()], pa.string()),
            "similarity": pa.array(similarity, mask=~instead),
        },
        schema=schema,
    )
    with table_file(out, schema) as writer:
        writer.write(table)


def read_documents(
    source: Path,
    columns: Mapping[str, str],
    *,
    scores_needed: bool,
    tokens_needed: bool = False,
    quota: str | None = None,
) -> Documents:
    """Ids, scores and vectors of a parquet or Arrow IPC file, and what a budget needs: tokens, the column of quotas.

    Vectors are lists or fixed-size lists of float16, float32 or float64 (float16 stays float16). Raises ValueError for
    a file that cannot be read or columns that are missing or of another type, BadInput for rows at fault.
    """
    unknown = set(columns) - set(COLUMNS)
    if unknown:
        raise ValueError(f"no columns are called {sorted(unknown)} here; rename any of: {', '.join(COLUMNS)}")
    names = {column: columns.get(column, column) for column in COLUMNS}
    required = [names["id"], names["embedding"]]
    required += [names["score"]] if scores_needed else []
    required += [names["token_count"]] if tokens_needed else []
    # a column can be asked for twice: by its role, and for quotas
    required += [quota] if quota is not None and quota not in required else []
    table = _read(source, required, names["score"])
    ids = _ids(source, table.column(names["id"]))
    scores = tokens = groups = None
    if names["score"] in table.column_names:
        scores = _scores(source, table.column(names["score"]), ids, scores_needed)
    if tokens_needed:
        tokens = _tokens(source, table.column(names["token_count"]), ids)
    if quota is not None:
        # a document without a value is of the group that has none
        groups = pc.fill_null(_as_text(source, quota, table.column(quota)), "").to_pylist()
    return Documents(ids, scores, _embeddings(source, table.column(names["embedding"]), ids), tokens, groups)


def _read(source: Path, required: list[str], score: str) -> pa.Table:
    with source.open("rb") as file:
        magic = file.read(6)
    try:
        if magic[:4] == b"PAR1":
            parquet = pq.ParquetFile(source)
            return parquet.read(columns=_wanted(source, parquet.schema_arrow.names, required, score))
        if magic == b"ARROW1":
            table = pa.ipc.open_file(pa.memory_map(str(source))).read_all()
            return table.select(_wanted(source, table.column_names, required, score))
    except pa.ArrowInvalid as error:
        raise ValueError(f"{source}: cannot be read, it may be cut short ({error})") from error
    raise ValueError(f"{source}: is neither a parquet nor an Arrow IPC file")


def _wanted(source: Path, have: list[str], required: list[str], score: str) -> list[str]:
    missing = [name for name in required if name not in have]
    if missing:
        raise ValueError(
            f"{source}: has no column {', '.join(map(repr, missing))}; its columns are: {', '.join(have)}. "
            "Name the right ones with --columns"
        )
    return required if score in required or score not in have else [*required, score]


def _as_text(source: Path, name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    try:
        return pc.cast(column, pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise ValueError(f"{source}: column {name!r} is {column.type}, and groups have names or numbers") from None


def _tokens(source: Path, column: pa.ChunkedArray, ids: list[str]) -> np.ndarray:
    if not pa.types.is_integer(column.type):
        raise ValueError(f"{source}: token counts are {column.type}, not whole numbers")
    counts = pc.fill_null(pc.cast(column, pa.int64(), safe=False), 0).to_numpy()
    bad = np.flatnonzero((counts < 1) | (counts > MOST_TOKENS))
    if bad.size:
        raise BadInput(
            f"{source}: {name_documents(ids, bad)}: the token count is not in 1 to {MOST_TOKENS:,}; leave these out "
            "or count again"
        )
    return counts


def _ids(source: Path, column: pa.ChunkedArray) -> list[str]:
    if pa.types.is_dictionary(column.type):
        column = pc.cast(column, column.type.value_type)
    kind = column.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)):
        raise ValueError(f"{source}: ids are {kind}, not text or integers")
    if column.null_count:
        rows = np.flatnonzero(pc.is_null(column).to_numpy())
        raise BadInput(f"{source}: {_rows(rows)}: the id is null; every document needs its own")
    return pc.cast(column, pa.string()).to_pylist()


def _scores(source: Path, column: pa.ChunkedArray, ids: list[str], needed: bool) -> np.ndarray | None:
    kind = column.type
    if not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
        if not needed:
            return None
        raise ValueError(f"{source}: scores are {kind}, not numbers")
    if column.null_count and needed:
        rows = np.flatnonzero(pc.is_null(column).to_numpy())
        raise BadInput(f"{source}: {name_documents(ids, rows)}: the score is null; leave these out or score them")
    # a whole number beyond 2**53 is rounded, as any score is
    return pc.cast(column, pa.float64(), safe=False).to_numpy()


def _embeddings(source: Path, column: pa.ChunkedArray, ids: list[str]) -> np.ndarray:
    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not (is_list and pa.types.is_floating(kind.value_type)):
        raise ValueError(f"{source}: embeddings are {kind}, not lists of float16, float32 or float64")
    if column.null_count:
        rows = np.flatnonzero(pc.is_null(column).to_numpy())
        raise BadInput(f"{source}: {name_documents(ids, rows)}: the embedding is null; leave these out or embed them")
    dtype = kind.value_type.to_pandas_dtype()
    if not ids:
        return np.zeros((0, 1), dtype)
    lengths = pc.list_value_length(column).to_numpy()
    dimension = int(np.bincount(lengths).argmax())
    odd = np.flatnonzero(lengths != dimension)
    if odd.size:
        raise BadInput(
            f"{source}: {name_documents(ids, odd)}: the embedding has {lengths[odd[0]]} dimensions, "
            f"where most have {dimension}"
        )
    if not dimension:
        raise BadInput(f"{source}: {name_documents(ids, np.arange(len(ids)))}: the embedding is empty")
    flat = [chunk.flatten() for chunk in column.chunks]
    position = 0
    for chunk in flat:
        if chunk.null_count:
            rows = np.unique(np.flatnonzero(chunk.is_null().to_numpy(zero_copy_only=False)) // dimension)
            raise BadInput(f"{source}: {name_documents(ids, rows + position)}: the embedding holds a null")
        position += len(chunk) // dimension
    parts = [chunk.to_numpy().reshape(-1, dimension) for chunk in flat]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _rows(rows: np.ndarray) -> str:
    shown = ", ".join(str(i) for i in rows[:_SHOWN].tolist())
    return f"{'rows' if rows.size > 1 else 'row'} {shown}{' …' if rows.size > _SHOWN else ''}"
