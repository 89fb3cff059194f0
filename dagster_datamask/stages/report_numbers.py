"""What the reports count: a snapshot in one pass over its published side files, and a keyed sample of its documents.

Here: counts that add up over snapshots, the sample (which is the corpus's, too: the least keyed hashes of all
snapshots are the least of each), and what other masks would choose of the sample. Not here: the documents that a report
shows one by one (`report_examples`), and the page (`report_pages`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from threadpoolctl import threadpool_limits

from dagster_datamask.keyed import hash64
from dagster_datamask.scoring.text import decode_column
from dagster_datamask.selection.objectives import QualityDiversity
from dagster_datamask.selection.solve import Selection, solve
from dagster_datamask.shards.cursor import Cursor, read_batches, scatter
from dagster_datamask.shards.documents import DocumentReader
from dagster_datamask.shards.generations import Published
from dagster_datamask.shards.schemas import MANIFEST
from dagster_datamask.shards.source import Source
from dagster_datamask.shards.writer import table_file
from dagster_datamask.stages.base import called
from dagster_datamask.stages.candidates import domain
from dagster_datamask.stages.embeddings import EMBEDDING_ROWS, vectors_of
from dagster_datamask.stages.quality import QUALITY_BINS, integer_histogram

SAMPLE = 2000
# hosts that are kept of a snapshot, so that the largest of the corpus are among them
HOSTS = 1000
# {group: its decisions}, in the order in which selection narrows them down
GROUPS = {
    "scored": ("kept", "not_selected", "pruned", "bad_embedding"),
    "choosable": ("kept", "not_selected"),
    "kept": ("kept",),
}
# half octaves up to 16 million tokens
LENGTHS = 2.0 ** (np.arange(49) / 2)
EVERYTHING = "All that could be chosen"
QUALITY, DIVERSITY, RANDOM = "Quality only", "Diversity only", "Random"
_HOSTS_MEMORY = "512MB"
_HOST_ROWS = pa.schema([("host", pa.string()), ("scored", pa.bool_()), ("kept", pa.bool_())])
_OF_MASKS = {"rank": pa.int64(), "kept_id": pa.string(), "similarity": pa.float64()}


@dataclass
class Group:
    """Documents counted together: how many, their quality, and their tokens where the source tells them."""

    documents: int = 0
    quality_sum: float = 0.0
    tokens: int = 0
    uncounted: int = 0
    quality: np.ndarray = field(default_factory=lambda: np.zeros(QUALITY_BINS, np.int64))
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(len(LENGTHS) - 1, np.int64))

    def count(self, rows: pa.Table) -> None:
        quality = rows["quality"].to_numpy()
        tokens = rows["token_count"].drop_null().to_numpy()
        self.documents += len(rows)
        self.quality_sum += float(quality.sum())
        self.quality += integer_histogram(quality)
        self.tokens += int(tokens.sum())
        self.uncounted += len(rows) - len(tokens)
        bins = np.searchsorted(LENGTHS, tokens, side="right") - 1
        self.lengths += np.bincount(np.clip(bins, 0, len(self.lengths) - 1), minlength=len(self.lengths))

    def add(self, other: "Group") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def mean_quality(self) -> float | None:
        return self.quality_sum / self.documents if self.documents else None

    @property
    def mean_tokens(self) -> float | None:
        counted = self.documents - self.uncounted
        return self.tokens / counted if counted else None


@dataclass
class Numbers:
    """What adds up over snapshots: decisions, groups, sums of unit vectors, documents by cluster, published selections.

    vectors: {group: float64[d]}, the sum of ẑ over the choosable, over the kept and over each selection; embedded: of
    how many documents that sum is; clusters: float64[3, k], of the choosable documents of each cluster how many there
    are, how many are kept, and the sum of their quality. selections: names of published selections, the manifest's own
    strategy first, each of which is in `groups` too; shared: int64[m, m], documents that two of them have in common.
    """

    decisions: Counter[str]
    groups: dict[str, Group]
    vectors: dict[str, np.ndarray]
    embedded: dict[str, int]
    clusters: np.ndarray
    selections: tuple[str, ...]
    shared: np.ndarray

    @classmethod
    def empty(cls, dimension: int, k: int, selections: Iterable[str] = ()) -> "Numbers":
        names = tuple(selections)
        summed = ("choosable", "kept", *names)
        return cls(
            Counter(),
            {name: Group() for name in (*GROUPS, *names)},
            {name: np.zeros(dimension) for name in summed},
            dict.fromkeys(summed, 0),
            np.zeros((3, k)),
            names,
            np.zeros((len(names), len(names)), np.int64),
        )

    def add(self, other: "Numbers") -> None:
        """Add what another has of the same groups, and of selections that are counted here."""
        self.decisions.update(other.decisions)
        for name, group in self.groups.items():
            group.add(other.groups[name])
        for name, total in self.vectors.items():
            self.vectors[name] = total + other.vectors[name]
            self.embedded[name] += other.embedded[name]
        self.clusters = self.clusters + other.clusters
        places = [other.selections.index(name) for name in self.selections]
        self.shared = self.shared + other.shared[np.ix_(places, places)]

    def cosine(self, group: str) -> float | None:
        """Mean cosine of two different documents of a group that have a vector, None where there are no two."""
        return mean_cosine(self.embedded[group], self.vectors[group])

    def selected(self) -> list[dict[str, Any]]:
        """Of each published selection: documents, tokens, and means."""
        return [
            {
                "selection": name,
                "documents": group.documents,
                "tokens": None if group.uncounted else group.tokens,
                "mean tokens": group.mean_tokens,
                "mean quality": group.mean_quality,
                "mean cosine": self.cosine(name),
                "with a vector": self.embedded[name],
            }
            for name, group in ((name, self.groups[name]) for name in self.selections)
        ]

    def overlaps(self) -> list[dict[str, Any]]:
        """Of each pair of published selections: the documents in both, Jaccard's index, and their share of either."""
        sizes = np.diag(self.shared).tolist()
        return [
            {
                "a": self.selections[i],
                "b": self.selections[j],
                "in both": both,
                "jaccard": both / (sizes[i] + sizes[j] - both) if sizes[i] + sizes[j] else None,
                "share of a": both / sizes[i] if sizes[i] else None,
                "share of b": both / sizes[j] if sizes[j] else None,
            }
            for i in range(len(sizes))
            for j in range(i + 1, len(sizes))
            for both in [int(self.shared[i, j])]
        ]

    def as_dict(self) -> dict[str, Any]:
        groups = {
            name: {key: _plain(value) for key, value in vars(group).items()} for name, group in self.groups.items()
        }
        return {
            "decisions": dict(self.decisions),
            "groups": groups,
            "vectors": {name: total.tolist() for name, total in self.vectors.items()},
            "embedded": self.embedded,
            "clusters": self.clusters.tolist(),
            "selections": list(self.selections),
            "shared": self.shared.tolist(),
        }

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> "Numbers":
        groups = {
            name: Group(**group | {key: np.array(group[key], np.int64) for key in ("quality", "lengths")})
            for name, group in told["groups"].items()
        }
        sums = {name: np.array(total) for name, total in told["vectors"].items()}
        return cls(
            Counter(told["decisions"]),
            groups,
            sums,
            dict(told["embedded"]),
            np.array(told["clusters"]).reshape(3, -1),
            tuple(told["selections"]),
            np.array(told["shared"], np.int64).reshape((len(told["selections"]),) * 2),
        )


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def mean_cosine(n: int, total: np.ndarray) -> float | None:
    """Mean cosine of two different documents of n whose unit vectors add up to `total`; None where there are no two."""
    return float(total @ total - n) / (n * (n - 1)) if n > 1 else None


class Least:
    """The `size` rows with the least keys of all that were offered; a row is made only where it can be among them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._rows: pa.Table | None = None
        self._below = np.uint64(2**64 - 1)

    def offer(self, keys: np.ndarray, positions: np.ndarray, make: Callable[[np.ndarray], pa.Table]) -> None:
        """Offer the rows at `positions` of a batch; make(positions) gives them, with their uint64 `key`."""
        positions = positions[keys[positions] <= self._below]
        if not positions.size:
            return
        rows = make(positions)
        self._rows = rows if self._rows is None else pa.concat_tables([self._rows, rows])
        if len(self._rows) > 2 * self._size:
            self._rows = self._best()
            self._below = self._rows["key"][-1].as_py()

    def _best(self) -> pa.Table:
        assert self._rows is not None
        order = [("key", "ascending"), ("snapshot", "ascending"), ("doc_id", "ascending")]
        return self._rows.sort_by(order).slice(0, self._size).combine_chunks()

    def rows(self) -> pa.Table | None:
        """Those rows by key, None where nothing was offered."""
        return None if self._rows is None else self._best()


@dataclass(frozen=True)
class Gathered:
    """One pass over a snapshot: its numbers, the sample of what could be chosen, documents to show of every decision,
    and how many documents were kept of each split."""

    numbers: Numbers
    sample: pa.Table | None
    examples: dict[str, pa.Table]
    kept_of_split: Counter[int]


def gather(
    inputs: Mapping[str, Published], own: Published, others: Mapping[str, Published], per_decision: int
) -> Gathered:
    """Read manifest, vectors and masks of a snapshot once, side by side, in flat memory.

    own: the mask that the manifest keeps; others: {name: another published selection of the snapshot}.
    """
    manifest, embedded = inputs["fineweb_mask_manifest"], inputs["e5_embeddings"]
    numbers = Numbers.empty(
        embedded.facts["dimension"],
        inputs["kmeans_clusters"].facts["clusters"],
        (called(manifest.facts["strategy"]), *others),
    )
    sample, examples, kept_of_split = Least(SAMPLE), dict[str, Least](), Counter[int]()
    for shard in manifest.shards:
        vectors = Cursor(embedded.path(shard), None, EMBEDDING_ROWS)
        masks = Cursor(own.path(shard), ["doc_id", *_OF_MASKS], EMBEDDING_ROWS)
        marks = {
            name: Cursor(other.path(shard), ["doc_id", "selected"], EMBEDDING_ROWS) for name, other in others.items()
        }
        for table in read_batches(manifest.path(shard), None, EMBEDDING_ROWS):
            batch = _Batch(table, vectors, masks, marks)
            _count(numbers, batch)
            kept_of_split.update(table.filter(pa.array(batch.kept))["split"].to_pylist())
            sample.offer(batch.keys, np.flatnonzero(batch.choosable & batch.embedded), batch.rows)
            for decision in set(batch.decisions.tolist()):
                least = examples.setdefault(decision, Least(per_decision))
                least.offer(batch.keys, np.flatnonzero(batch.decisions == decision), batch.rows)
    shown = {decision: least.rows() for decision, least in sorted(examples.items())}
    return Gathered(
        numbers, sample.rows(), {name: rows for name, rows in shown.items() if rows is not None}, kept_of_split
    )


class _Batch:
    """Rows of the manifest with what the other files say of them."""

    def __init__(self, table: pa.Table, vectors: Cursor, masks: Cursor, marks: Mapping[str, Cursor]) -> None:
        ids = table["doc_id"].combine_chunks()
        names = [f"{snap}/{i}" for snap, i in zip(table["snapshot"].to_pylist(), ids.to_pylist(), strict=True)]
        self.table = table
        self.keys = hash64(names, 0, "report")
        self.decisions = np.array(table["decision"].to_pylist(), dtype=object)
        self.kept = self.decisions == "kept"
        self.choosable = self.kept | (self.decisions == "not_selected")
        self._found, self._at = vectors.take(ids)
        self.embedded = np.zeros(len(ids), dtype=bool)
        self.embedded[self._at] = self._found["embedding"].is_valid().to_numpy()
        chosen, at = masks.take(ids)
        self._of_masks = {name: scatter(chosen[name], at, len(ids)) for name in _OF_MASKS}
        # of the published selections, in the order of `Numbers.selections`: whether they hold a document
        self.selected = [self.kept]
        for cursor in marks.values():
            other, at = cursor.take(ids)
            held = np.zeros(len(ids), dtype=bool)
            held[at] = other["selected"].to_numpy()
            self.selected.append(held)

    def unit(self, mask: np.ndarray) -> np.ndarray:
        """float64[m, d]: ẑ of the documents of a mask that have a vector."""
        z = vectors_of(self._found.filter(pa.array((mask & self.embedded)[self._at]))).astype(np.float64)
        return z / np.linalg.norm(z, axis=1, keepdims=True)

    def rows(self, positions: np.ndarray) -> pa.Table:
        """The rows at these positions, with key, vector (null where there is none), and what the masks say."""
        where = np.full(len(self.table), -1, np.int64)
        where[self._at] = np.arange(len(self._at))
        at = pa.array(where[positions], mask=where[positions] < 0)
        rows = self.table.take(pa.array(positions))
        for name, values in self._of_masks.items():
            rows = rows.append_column(name, values.take(pa.array(positions)))
        rows = rows.append_column("embedding", self._found["embedding"].combine_chunks().take(at))
        return rows.append_column("key", pa.array(self.keys[positions]))


def _count(numbers: Numbers, batch: _Batch) -> None:
    numbers.decisions.update(batch.decisions.tolist())
    for name, decisions in GROUPS.items():
        inside = pc.is_in(batch.table["decision"], value_set=pa.array(decisions))
        numbers.groups[name].count(batch.table.filter(inside))
    selected = dict(zip(numbers.selections, batch.selected, strict=True))
    for name, mask in selected.items():
        numbers.groups[name].count(batch.table.filter(pa.array(mask)))
    masks = np.array(batch.selected, dtype=np.int64)
    numbers.shared += masks @ masks.T
    z = batch.unit(np.ones(len(batch.table), dtype=bool))
    for name, mask in ({"choosable": batch.choosable, "kept": batch.kept} | selected).items():
        numbers.vectors[name] += z[mask[batch.embedded]].sum(axis=0)
        numbers.embedded[name] += int((mask & batch.embedded).sum())
    clustered = batch.choosable & batch.embedded
    chosen = batch.table.filter(pa.array(clustered))
    cluster, k = chosen["cluster"].to_numpy(), numbers.clusters.shape[1]
    numbers.clusters[0] += np.bincount(cluster, minlength=k)
    numbers.clusters[1] += np.bincount(cluster[batch.kept[clustered]], minlength=k)
    numbers.clusters[2] += np.bincount(cluster, weights=chosen["quality"].to_numpy(), minlength=k)


def sample_schema(dimension: int) -> pa.Schema:
    """What is published of the sample."""
    own = [MANIFEST.field(name) for name in ("snapshot", "doc_id", "quality", "cluster", "token_count")]
    return pa.schema(
        [
            ("key", pa.uint64()),
            *own,
            ("selected", pa.bool_()),
            ("embedding", pa.list_(pa.float16(), dimension)),
        ]
    )


def sample_table(rows: pa.Table | None, schema: pa.Schema) -> pa.Table:
    """The sample as it is published."""
    if rows is None:
        return schema.empty_table()
    return rows.append_column("selected", pc.equal(rows["decision"], "kept")).select(schema.names).cast(schema)


def merged(samples: Iterable[pa.Table]) -> pa.Table | None:
    """The sample of several snapshots together."""
    least = Least(SAMPLE)
    for table in samples:
        least.offer(table["key"].to_numpy(), np.arange(len(table)), partial(_taken, table))
    return least.rows()


def _taken(table: pa.Table, positions: np.ndarray) -> pa.Table:
    return table.take(pa.array(positions))


@dataclass(frozen=True)
class Strategies:
    """Masks of one size over the sample, each as bool[n]: the published one (`own`), and others chosen of the sample
    alone.

    places: float64[n, 2] of a map of the sample (t-SNE), None where it is too small; solved: {mask solved here: how}.
    """

    own: str
    masks: dict[str, np.ndarray]
    solved: dict[str, Selection]
    places: np.ndarray | None
    table: pa.Table

    @property
    def unit(self) -> np.ndarray:
        z = vectors_of(self.table).astype(np.float64)
        return z / np.linalg.norm(z, axis=1, keepdims=True)

    def worth(self) -> list[dict[str, Any]]:
        """Of the whole sample and of each mask: name, documents, mean quality, mean cosine of two, mean tokens."""
        quality, z = self.table["quality"].to_numpy(), self.unit
        tokens = self.table["token_count"].to_numpy().astype(np.float64)
        masks = {EVERYTHING: np.ones(len(quality), bool), **self.masks}
        return [
            {
                "name": name,
                "documents": int(mask.sum()),
                "quality": float(quality[mask].mean()) if mask.any() else None,
                "cosine": mean_cosine(int(mask.sum()), z[mask].sum(axis=0)),
                "tokens": float(tokens[mask].mean()) if mask.any() and np.isfinite(tokens[mask]).all() else None,
            }
            for name, mask in masks.items()
        ]

    def overlap(self) -> np.ndarray:
        """float64[m, m]: the share of mask i that mask j holds, NaN for an empty mask i."""
        masks = np.array(list(self.masks.values()), dtype=np.float64)
        sizes = masks.sum(axis=1, keepdims=True)
        return np.divide(masks @ masks.T, sizes, out=np.full((len(masks),) * 2, np.nan), where=sizes > 0)


def strategies(table: pa.Table, own: str) -> Strategies:
    """The masks of the sample, `own` being what the published one is called."""
    selected = table["selected"].to_numpy().astype(bool)
    size, n = int(selected.sum()), len(selected)
    solved: dict[str, Selection] = {}
    if n:
        ids = [f"{s}/{i}" for s, i in zip(table["snapshot"].to_pylist(), table["doc_id"].to_pylist(), strict=True)]
        z, quality = vectors_of(table), table["quality"].to_numpy()
        for name, lam, solver in ((QUALITY, 1.0, "certified"), (DIVERSITY, 0.0, "certified"), (RANDOM, 0.0, "random")):
            objective = QualityDiversity(z, quality, lam, "raw")
            solved[name] = solve(objective, size, solver=solver, seed=0, split="report", ids=ids)
    masks = {own: selected}
    for name in (QUALITY, DIVERSITY, RANDOM):
        masks[name] = np.zeros(n, bool)
        if name in solved:
            masks[name][solved[name].indices] = True
    return Strategies(own, masks, solved, _map(table), table)


def _map(table: pa.Table) -> np.ndarray | None:
    """float64[n, 2]: t-SNE (van der Maaten and Hinton 2008) of the sample's vectors; None below five different ones."""
    n = len(table)
    if n < 5:
        return None
    # loading it takes a second, which the definitions have no use for
    from sklearn.manifold import TSNE

    z = vectors_of(table).astype(np.float64)
    # sums in one order, whatever the number of threads
    with threadpool_limits(limits=1):
        centred = z - z.mean(axis=0)
        _, _, axes = np.linalg.svd(centred, full_matrices=False)
        # the sign of a singular vector is arbitrary
        axes = axes[:2] * np.sign(axes[:2, np.abs(axes[:2]).argmax(axis=1)].diagonal())[:, None]
        start = centred @ axes.T
        spread = start.std(axis=0)[0]
        if not spread > 1e-6 or start.shape[1] < 2:
            return None
        model = TSNE(perplexity=min(30.0, (n - 1) / 3), init=start / spread * 1e-4, random_state=0, max_iter=500)
        return np.asarray(model.fit_transform(z), dtype=np.float64)


def hosts(source: Source, inputs: Mapping[str, Published], scratch: Path) -> tuple[list[dict[str, Any]], int, int]:
    """(the HOSTS hosts with the most scored documents, hosts with scored documents, hosts with kept documents).

    An entry has `host`, `scored` and `kept` documents. One pass over the source's `url` column; counted on disk. All
    empty where the source has no such column, or one that holds no texts.
    """
    raw, manifest = inputs["raw_shards"], inputs["fineweb_mask_manifest"]
    reader = DocumentReader(source, raw)
    path = scratch / "hosts.parquet"
    with table_file(path, _HOST_ROWS) as writer:
        for shard in raw.shards:
            cursor = Cursor(manifest.path(shard), ["doc_id", "decision"], EMBEDDING_ROWS)
            for batch in reader.batches(shard, ["url"], EMBEDDING_ROWS):
                decisions = cursor.take_all(batch.ids)["decision"]
                if "url" not in batch.rows.column_names:
                    continue
                try:
                    urls = decode_column(batch.rows["url"])[0]
                except TypeError:
                    # the source's other columns are whatever they are, and no reason to have no page
                    continue
                rows = {
                    "host": [domain(url) for url in urls],
                    "scored": pc.is_in(decisions, value_set=pa.array(GROUPS["scored"])),
                    "kept": pc.equal(decisions, "kept"),
                }
                writer.write(pa.table(rows, schema=_HOST_ROWS).filter(pc.field("scored")))
            cursor.end()
    with duckdb.connect(config={"memory_limit": _HOSTS_MEMORY, "temp_directory": str(scratch / "sorting")}) as con:
        con.execute(
            "CREATE TABLE hosts AS SELECT host, count(*) AS scored, count(*) FILTER (kept) AS kept "
            "FROM read_parquet(?) GROUP BY host",
            [str(path)],
        )
        largest = con.execute(f"SELECT * FROM hosts ORDER BY scored DESC, host LIMIT {HOSTS}").fetchall()
        there, left = con.execute("SELECT count(*), count(*) FILTER (kept > 0) FROM hosts").fetchall()[0]
    path.unlink()
    return [{"host": h, "scored": s, "kept": k} for h, s, k in largest], there, left
