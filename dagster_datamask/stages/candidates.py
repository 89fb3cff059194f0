"""The documents that can be chosen of a snapshot, survivors with a vector, and how much of them a budget asks for.

Here: reading candidates shard by shard with what a budget counts (documents or tokens) and the group a quota puts them
in, and the plan made of it. Not here: which of them are chosen (`masks`, `corpus`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dagster_datamask.scoring.text import decode_column
from dagster_datamask.selection.budgets import Budget, largest_remainder, parse_budget, parse_tokens
from dagster_datamask.selection.exact import MOST_TOKENS
from dagster_datamask.settings import SelectSettings, SettingsError
from dagster_datamask.shards import shuffle
from dagster_datamask.shards.cursor import Cursor, read_batches
from dagster_datamask.shards.documents import DocumentReader
from dagster_datamask.shards.generations import Published
from dagster_datamask.shards.source import Source
from dagster_datamask.shards.writer import table_file
from dagster_datamask.stages.embeddings import EMBEDDING_ROWS
from dagster_datamask.stages.quality import JOIN_ROWS

_DOMAINS = pa.schema([("doc_id", pa.string()), ("group", pa.string())])
_QUOTAS_SHOWN = 50
# who reads vectors widens them and copies them more than once
_VECTOR_ROWS = 2048


@dataclass(frozen=True)
class Census:
    """What there is of a snapshot, or of several: n scored documents before pruning, and {group: documents or tokens}
    of them (`scored`) and of those that can be chosen, by split (`choosable`, one where there are no splits). Without
    a quota there is the one group "". `exact`: pruning cut an exact share."""

    name: str
    n: int
    scored: Mapping[str, int]
    choosable: Sequence[Mapping[str, int]]
    exact: bool

    @property
    def room(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for part in self.choosable:
            total.update(part)
        return total


def together(censuses: Sequence[Census]) -> Census:
    """One census of several snapshots."""
    scored: Counter[str] = Counter()
    room: Counter[str] = Counter()
    for census in censuses:
        scored.update(census.scored)
        room.update(census.room)
    names = "the corpus" if len(censuses) > 1 else censuses[0].name
    return Census(names, sum(c.n for c in censuses), scored, [room], all(c.exact for c in censuses))


@dataclass(frozen=True)
class Plan:
    """What is asked for and what can be given: of every group (in the order of their names) and in all.

    asked_of: each group's share of what is asked for; amounts: what it gets, once what the small ones cannot give has
    gone to the others. n: scored documents; pool: what can be chosen, in the unit.
    """

    unit: str
    n: int
    pool: int
    asked: int
    groups: tuple[str, ...]
    asked_of: tuple[int, ...]
    amounts: tuple[int, ...]

    @property
    def met(self) -> int:
        return sum(self.amounts)

    @property
    def short_by(self) -> int:
        return self.asked - self.met

    def shares(self, census: Census) -> list[tuple[int, ...]]:
        """The amounts of every split, each group's by largest remainder over what the splits hold of it."""
        columns = []
        for group, amount in zip(self.groups, self.amounts, strict=True):
            held = [part.get(group, 0) for part in census.choosable]
            columns.append(largest_remainder(amount, held, held))
        return list(zip(*columns, strict=True))

    @cached_property
    def _places(self) -> dict[str, int]:
        return {group: place for place, group in enumerate(self.groups)}

    def numbers(self, groups: pa.ChunkedArray) -> np.ndarray:
        """int64[n]: the group of each document as a place in `groups`."""
        encoded = groups.combine_chunks().dictionary_encode()
        places = np.array([self._places[group] for group in encoded.dictionary.to_pylist()], np.int64)
        return places[encoded.indices.to_numpy()]

    def budget(self, amounts: tuple[int, ...], table: pa.Table) -> Budget:
        """The budget of these amounts for the documents of a table of candidates."""
        costs = table["tokens"].to_numpy() if self.unit == "tokens" else None
        if self.groups == ("",):
            return Budget(amounts, costs)
        return Budget(amounts, costs, self.numbers(table["group"]), self.groups)

    def held(self, table: pa.Table, selected: np.ndarray) -> np.ndarray:
        """int64[G]: what the selected documents of a table of candidates hold of each group, in the unit."""
        weights = table["tokens"].to_numpy()[selected] if self.unit == "tokens" else None
        counts = np.bincount(self.numbers(table["group"])[selected], weights=weights, minlength=len(self.groups))
        return counts.astype(np.int64)

    def slack(self, largest: int) -> int:
        """What may be missing of what is asked for: exact in documents; in tokens a document of each group."""
        return 0 if self.unit == "documents" else largest * len(self.groups)

    def facts(self, kept: np.ndarray) -> dict[str, Any]:
        """What is published of the plan: budget, shortfall and, of the largest quotas, what was asked for and kept.

        kept: int64[G], what was kept of each group.
        """
        told: dict[str, Any] = {
            "unit": self.unit,
            "n": self.n,
            "pool": self.pool,
            "budget": self.asked,
            "short_by": self.short_by,
            "quotas": None,
            "redistributed": None,
        }
        if self.groups == ("",):
            return told
        largest = sorted(range(len(self.groups)), key=lambda g: (-self.asked_of[g], self.groups[g]))[:_QUOTAS_SHOWN]
        told["quotas"] = [
            {"group": self.groups[g], "asked": self.asked_of[g], "kept": int(kept[g])} for g in sorted(largest)
        ]
        told["redistributed"] = sum(max(0, got - asked) for got, asked in zip(self.amounts, self.asked_of, strict=True))
        return told


def plan_budget(select: SelectSettings, census: Census) -> Plan:
    """How much of every group is to be kept.

    S = ⌊b·n + ½⌋ of the n scored documents, or T tokens, is shared among the groups by largest remainder over their
    scored documents (for clusters, which only embedded documents have, over those that can be chosen).
    Raises SettingsError for a budget above what was scored or, where pruning cut an exact share, above what it left.
    """
    room = census.room
    holds, left = sum(census.scored.values()), sum(room.values())
    tokens = parse_tokens(select.budget)
    what = "documents" if tokens is None else "tokens"
    try:
        asked = parse_budget(select.budget, census.n) if tokens is None else tokens
    except ValueError as error:
        raise SettingsError(f"select.budget, {_of(census)}: {error}") from error
    if asked > holds:
        raise SettingsError(
            f"select.budget, {_of(census)}: budget {select.budget!r} asks for more than the {holds} tokens of its "
            f"{census.n} documents; ask for at most {holds}"
        )
    if asked > left and census.exact:
        raise SettingsError(
            f"select.budget = {select.budget} asks for {asked} of the {holds} {what} of {census.name}, but pruning "
            f"and embedding left {left}; lower select.budget or prune.ratio"
        )
    sizes = room if select.quota == "cluster" else census.scored
    names = sorted(sizes.keys() | room.keys()) or [""]
    weights = [sizes.get(name, 0) for name in names]
    return Plan(
        what,
        census.n,
        left,
        asked,
        tuple(names),
        tuple(largest_remainder(asked, weights)),
        tuple(largest_remainder(min(asked, left), weights, [room.get(name, 0) for name in names])),
    )


def tie_keys(snapshot: str | None, ids: pa.ChunkedArray) -> list[str]:
    """The ids, unique among all snapshots where one is given."""
    own: list[str] = ids.to_pylist()
    return own if snapshot is None else [f"{snapshot}/{id_}" for id_ in own]


def _of(census: Census) -> str:
    return census.name if census.name.startswith("the ") else f"snapshot {census.name}"


class Candidates:
    """The candidates of one snapshot, streamed shard by shard in the shards' order.

    inputs: `base.candidate_inputs`, published; scratch: a folder that receives what is read of the source once.
    """

    def __init__(
        self, snapshot: str, inputs: Mapping[str, Published], select: SelectSettings, source: Source, scratch: Path
    ) -> None:
        self.snapshot = snapshot
        self._inputs, self._select, self._source, self._scratch = inputs, select, source, scratch
        self.dimension: int = inputs["e5_embeddings"].facts["dimension"]

    def keys(self, ids: pa.ChunkedArray) -> list[str]:
        """The ids that ties go by. Rows without one of their own are named alike in every snapshot."""
        return tie_keys(self.snapshot if self._select.scope == "corpus" else None, ids)

    @property
    def n(self) -> int:
        """Scored documents, before pruning."""
        return int(self._inputs["pruned_documents"].facts["n"])

    @property
    def shards(self) -> tuple[str, ...]:
        return self._inputs["e5_embeddings"].shards

    @property
    def schema(self) -> pa.Schema:
        """doc_id, quality, group, tokens (0 where nobody counts them), influence where it is read, embedding."""
        return pa.schema(
            [
                ("doc_id", pa.string()),
                ("quality", pa.float64()),
                ("group", pa.string()),
                ("tokens", pa.int64()),
                *((("influence", pa.float64()),) if "influence_scores" in self._inputs else ()),
                ("embedding", pa.list_(pa.float16(), self.dimension)),
            ]
        )

    def batches(self, shard: str) -> Iterator[pa.Table]:
        """Tables of `schema`."""
        for rows, found in self._rows(shard, "embedding", _VECTOR_ROWS):
            yield rows.append_column("embedding", found["embedding"]).select(self.schema.names)

    def counted(self, shard: str, at_once: int = JOIN_ROWS) -> Iterator[pa.Table]:
        """The tables without the vectors, of what at_once rows of the shard hold."""
        for rows, _ in self._rows(shard, "reason", at_once):
            yield rows.select(self.schema.names[:-1])

    def clustered(self, shard: str) -> Iterator[pa.Table]:
        """Tables of `schema` with each document's cluster and its cosine to the centroid (`closeness`)."""
        for rows, found in self._rows(shard, "embedding", EMBEDDING_ROWS):
            yield rows.append_column("embedding", found["embedding"])

    def ids(self) -> Iterator[list[str]]:
        for shard in self.shards:
            for table in self.counted(shard):
                yield table["doc_id"].to_pylist()

    def census(self, splits: shuffle.Splits | None = None) -> Census:
        """One pass over the side files. Raises SettingsError where a token budget meets a document without a count."""
        choosable: list[Counter[str]] = [Counter() for _ in range(1 if splits is None else len(splits.sizes))]
        scored: Counter[str] = Counter()
        pruned = self._inputs["pruned_documents"]
        for shard in self.shards:
            for table in self._scored(shard, JOIN_ROWS):
                self._add(scored, table)
            for table in self.counted(shard):
                if splits is None:
                    self._add(choosable[0], table)
                    continue
                where = splits.of(table["doc_id"].to_pylist())
                for k in np.unique(where).tolist():
                    self._add(choosable[k], table.filter(pa.array(where == k)))
        exact = pruned.facts["threshold"] == "per_snapshot"
        return Census(self.snapshot, self.n, scored, choosable, exact)

    def _add(self, counter: Counter[str], table: pa.Table) -> None:
        column = "tokens" if self._select.in_tokens else "doc_id"
        sums = table.group_by("group").aggregate([(column, "sum" if self._select.in_tokens else "count")])
        counter.update(dict(zip(sums["group"].to_pylist(), sums.column(1).to_pylist(), strict=True)))

    def _rows(self, shard: str, of_vectors: str, rows: int) -> Iterator[tuple[pa.Table, pa.Table]]:
        """(candidates with doc_id, quality, group, tokens and, where clusters are read, cluster and closeness; their
        rows of the embeddings), of scored documents."""
        embedded = self._inputs["e5_embeddings"]
        clusters, alike = self._inputs.get("kmeans_clusters"), self._inputs.get("near_duplicates")
        vectors = Cursor(embedded.path(shard), ["doc_id", of_vectors], rows)
        nearest = None if clusters is None else Cursor(clusters.path(shard), None, rows)
        removed = None if alike is None else Cursor(alike.path(shard), ["doc_id", "kept_id"], rows)
        influence = self._inputs.get("influence_scores")
        scores = None if influence is None else Cursor(influence.path(shard), ["doc_id", "score"], rows)
        for ids, table in self._every(shard, rows):
            found, positions = vectors.take(ids)
            at = table.take(pa.array(positions))
            wanted = found[of_vectors].is_valid() if of_vectors == "embedding" else found[of_vectors].is_null()
            wanted = pc.and_(wanted, at["decision"].is_null())
            if removed is not None:
                looked_at, _ = removed.take(ids)
                gone = looked_at.filter(looked_at["kept_id"].is_valid())["doc_id"].combine_chunks()
                wanted = pc.and_not(wanted, pc.is_in(at["doc_id"], value_set=gone))
            found, at = found.filter(wanted), at.filter(wanted)
            if scores is not None:
                at = at.append_column("influence", scores.take_all(at["doc_id"].combine_chunks())["score"])
            if nearest is not None:
                # every document with a vector has a cluster, candidates or not
                assigned, _ = nearest.take(ids)
                assigned = assigned.filter(pc.is_in(assigned["doc_id"], value_set=at["doc_id"].combine_chunks()))
                at = at.append_column("cluster", assigned["cluster"])
                at = at.append_column("closeness", assigned["similarity"])
                if self._select.quota == "cluster":
                    names = assigned["cluster"].cast(pa.string())
                    at = at.set_column(at.schema.get_field_index("group"), "group", names)
            yield at, found
        for cursor in (vectors, *(() if scores is None else (scores,))):
            cursor.end()

    def _scored(self, shard: str, rows: int) -> Iterator[pa.Table]:
        """The documents with a quality that are no duplicates, pruned or not."""
        for _, table in self._every(shard, rows):
            table = table.filter(is_scored(table))
            if self._select.in_tokens:
                check_tokens(self._select.budget, self.snapshot, shard, table)
            yield table

    def _every(self, shard: str, rows: int) -> Iterator[tuple[pa.Array, pa.Table]]:
        """(ids, doc_id, quality, decision, group, tokens) of all rows of a shard."""
        select, raw = self._select, self._inputs.get("raw_shards")
        counts = None if raw is None else Cursor(raw.path(shard), ["doc_id", "token_count"], rows)
        domains = Cursor(self._domains(shard), None, rows) if select.quota == "domain" else None
        name = self.snapshot if select.quota == "snapshot" else ""
        for table in read_batches(
            self._inputs["pruned_documents"].path(shard), ["doc_id", "quality", "decision"], rows
        ):
            ids = table["doc_id"].combine_chunks()
            tokens = pa.array(np.zeros(len(ids), np.int64)) if counts is None else counts.take_all(ids)["token_count"]
            group = pa.array([name] * len(ids), pa.string()) if domains is None else domains.take_all(ids)["group"]
            yield ids, table.append_column("group", group).append_column("tokens", tokens)

    def _domains(self, shard: str) -> Path:
        """A file of the doc_id and domain of every row, written once: the source may be far away."""
        path = self._scratch / f"{self.snapshot}@{shard}.domains.parquet"
        if not path.exists():
            reader = DocumentReader(self._source, self._inputs["raw_shards"])
            with table_file(path, _DOMAINS) as writer:
                for batch in reader.batches(shard, ["url"], EMBEDDING_ROWS):
                    writer.write(pa.table({"doc_id": batch.ids, "group": _hosts(batch.rows, len(batch.ids))}))
        return path


def is_scored(pruned: pa.Table) -> pa.ChunkedArray:
    """bool[n]: rows of pruned_documents with a quality that nothing but pruning has dropped."""
    open_ = pc.or_kleene(pruned["decision"].is_null(), pc.equal(pruned["decision"], "pruned"))
    return pc.fill_null(pc.and_(pruned["quality"].is_valid(), open_), False)


def check_tokens(budget: str, snapshot: str, shard: str, table: pa.Table) -> None:
    """Raise SettingsError naming the first document whose `tokens` a token budget cannot count."""
    good = pc.fill_null(
        pc.and_(pc.greater_equal(table["tokens"], 1), pc.less_equal(table["tokens"], MOST_TOKENS)), False
    )
    bad = table.filter(pc.invert(good))
    if len(bad):
        raise SettingsError(
            f"select.budget = {budget} counts tokens, but of {snapshot}, shard {shard}, document "
            f"{bad['doc_id'][0].as_py()!r} has token_count {bad['tokens'][0].as_py()}; it has to be 1 to "
            f"{MOST_TOKENS:,} in every document: mend the source's token_count, or budget in documents"
        )


def _hosts(rows: pa.Table, count: int) -> pa.Array:
    urls: list[str | None] = [None] * count
    if "url" in rows.column_names:
        urls = decode_column(rows["url"])[0]
    return pa.array([domain(url) for url in urls], pa.string())


def domain(url: str | None) -> str:
    """The host of a URL, "" where there is none."""
    try:
        return urlsplit(url or "").hostname or ""
    except ValueError:
        return ""
