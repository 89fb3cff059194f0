"""text_duplicates and contaminated_documents: what documents repeat, and what they hold of evaluation sets.

Both read texts and write side files; neither decides. pruned_documents does, where clean.duplicates and
clean.evaluation_sets ask for it. How texts are compared is `cleaning`'s.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dagster_datamask.cleaning.contamination import EvaluationIndex, EvaluationSet, read_evaluation_sets
from dagster_datamask.cleaning.duplicates import HASH, TextGroups, text_hashes
from dagster_datamask.keyed import digest
from dagster_datamask.scoring.text import decode_column
from dagster_datamask.settings import Settings
from dagster_datamask.shards.cursor import read_batches
from dagster_datamask.shards.documents import DocumentReader
from dagster_datamask.shards.engine import Counts, map_shards
from dagster_datamask.shards.generations import Generation, Published, Store, total_counts
from dagster_datamask.shards.schemas import CONTAMINATED, TEXT_DUPLICATES
from dagster_datamask.shards.source import Source
from dagster_datamask.shards.writer import table_file
from dagster_datamask.stages.base import STAGES, Check, Outcome, Run, finish
from dagster_datamask.stages.scores import SIDE_ROWS

DUPLICATES = "text_duplicates"
CONTAMINATION = "contaminated_documents"
_DECIDED = "decided_before"
_HASHED = pa.schema([("doc_id", pa.string()), ("hash", HASH), ("token_count", pa.int64())])


def text_duplicates(run: Run, source: Source, snapshot: str) -> Outcome:
    """Publish, for every row, the hash of its text and, where a document before it has the same text, that one's id
    and snapshot. Before it are those above it, those of shards before its own by name, and all of the snapshots before
    its own by name whose text_duplicates are published; a check names those that are not. Rows that raw_shards has
    decided of take no part.
    """
    stage = STAGES[DUPLICATES]
    raw = run.inputs(stage, snapshot)["raw_shards"]
    earlier = _before(run.store, snapshot)
    keys = {"raw_shards": raw.fingerprint, **{_compared_with(str(p.snapshot)): p.fingerprint for p in earlier}}
    reader = DocumentReader(source, raw)
    with run.generation(stage, snapshot, keys) as generation:
        sources = [*(str(published.snapshot) for published in earlier), snapshot]
        groups = TextGroups(generation.work, sources, raw.rows + sum(published.rows for published in earlier))
        mark = _Mark(sources)

        def kernel() -> _Mark:
            for shard in raw.shards:
                _hash(generation, reader, shard)
            groups.find(_hashes(generation, raw, earlier))
            return mark

        def read(shard: str) -> Iterator[tuple[str, pa.Table, pa.Table]]:
            found = groups.of(raw.shards.index(shard))
            first = 0
            for table in read_batches(_hash_file(generation, shard), None, SIDE_ROWS):
                inside = np.searchsorted(found["ordinal"].to_numpy(), [first, first + len(table)])
                rows = found.slice(inside[0], inside[1] - inside[0])
                yield shard, table, rows.set_column(0, "ordinal", pc.subtract(rows["ordinal"], first))
                first += len(table)

        # in this process: hashes and groups lie in this machine's scratch, and are only to be put in order
        records = map_shards(
            generation,
            raw.shards,
            read,
            kernel,
            TEXT_DUPLICATES,
            ext=".parquet",
            total_rows=raw.rows,
            progress=run.progress(stage, snapshot),
            source=lambda shard: mark.of(shard),
        )
        counts = Counter(total_counts(records))
        tokens = [record.source["tokens_saved"] for record in records]
        facts = {
            "documents": sum(counts.values()) - counts[_DECIDED],
            "duplicates_within": counts["duplicate_within"],
            "duplicates_of_earlier": counts["duplicate_of_earlier"],
            "groups": sum(record.source["groups"] for record in records),
            "tokens_saved": None if None in tokens else sum(tokens),
            "earlier_snapshots": len(earlier),
        }
        waiting = _uncompared(run.store, snapshot)
        compared = Check(
            "every_earlier_snapshot_compared",
            not waiting,
            False,
            {"waiting": "; ".join(f"{name}: {why}" for name, why in waiting.items()) or "none"},
        )
        later = _later(run.store, snapshot, generation.fingerprint)
        in_order = Check(
            "no_later_snapshot_compared_before",
            not later,
            False,
            {"materialise_again": ", ".join(later) or "none", "order": "by name"},
        )
        return finish(generation, records, ".parquet", facts=facts, expected_rows=raw.rows, checks=(compared, in_order))


def _before(store: Store, snapshot: str) -> list[Published]:
    """What is published of text_duplicates for the snapshots before one by name, in their order."""
    return [store.current(DUPLICATES, name) for name in store.snapshots(DUPLICATES) if name < snapshot]


def _compared_with(snapshot: str) -> str:
    """The name under which a snapshot is among the inputs of a later one's text_duplicates."""
    return f"{DUPLICATES} {snapshot}"


def _later(store: Store, snapshot: str, fingerprint: str) -> list[str]:
    """Snapshots after this one whose documents were compared with none of its, or not with those of `fingerprint`."""
    key = _compared_with(snapshot)
    after = (name for name in store.snapshots(DUPLICATES) if name > snapshot)
    return [name for name in after if store.current(DUPLICATES, name).inputs.get(key) != fingerprint]


def overtaken(store: Store, made: Published) -> list[str]:
    """Snapshots before that of `made`, a generation of text_duplicates, that were published or withdrawn since it
    compared its documents with theirs, so that both may keep one text. By name."""
    now = {_compared_with(str(p.snapshot)): p.fingerprint for p in _before(store, str(made.snapshot))}
    then = {key: value for key, value in made.inputs.items() if key != "raw_shards"}
    changed = {key for key in now.keys() | then.keys() if now.get(key) != then.get(key)}
    return sorted(key.removeprefix(_compared_with("")) for key in changed)


def _uncompared(store: Store, snapshot: str) -> dict[str, str]:
    """{earlier snapshot that was begun: why its documents are not those that were compared with}."""
    waiting = {}
    for name in store.snapshots("raw_shards"):
        published = store.published(DUPLICATES, name) if name < snapshot else None
        if name < snapshot and published is None:
            waiting[name] = f"{DUPLICATES} not published"
        elif published is not None and published.inputs["raw_shards"] != store.current("raw_shards", name).fingerprint:
            waiting[name] = "its documents were published anew"
    return waiting


def _hash_file(generation: Generation, shard: str) -> Path:
    return generation.work / f"hashes_{shard}.arrow"


def _hash(generation: Generation, reader: DocumentReader, shard: str) -> None:
    """The one pass over the texts: a hash for each document, null where raw_shards has decided of it."""
    path = _hash_file(generation, shard)
    if path.exists():
        return
    with table_file(path, _HASHED) as writer:
        for batch in reader.batches(shard, ["text"]):
            hashes = text_hashes(batch.rows["text"])
            free = batch.raw["decision"].is_null()
            writer.write(
                pa.table(
                    {
                        "doc_id": batch.raw["doc_id"],
                        "hash": pc.if_else(free, hashes, pa.scalar(None, HASH)),
                        "token_count": batch.raw["token_count"],
                    },
                    schema=_HASHED,
                )
            )


def _hashes(
    generation: Generation, raw: Published, earlier: list[Published]
) -> Iterator[tuple[int, int, int, pa.Array, pa.Array]]:
    """Documents with their hashes: of the earlier snapshots, then of this one, as TextGroups takes them."""
    for number, published in enumerate(earlier):
        for k, shard in enumerate(published.shards):
            first = 0
            for table in read_batches(published.path(shard), ["doc_id", "text_hash"], SIDE_ROWS):
                columns = (table[name].combine_chunks() for name in ("doc_id", "text_hash"))
                yield number, k, first, *columns
                first += len(table)
    for k, shard in enumerate(raw.shards):
        first = 0
        for table in read_batches(_hash_file(generation, shard), ["doc_id", "hash"], SIDE_ROWS):
            columns = (table[name].combine_chunks() for name in ("doc_id", "hash"))
            yield len(earlier), k, first, *columns
            first += len(table)


class _Mark:
    """The kernel: a document's hash, and the document that is kept instead of it."""

    def __init__(self, sources: list[str]) -> None:
        self._sources = np.array(sources, dtype=object)
        self._told: dict[str, dict[str, Any]] = {}

    def of(self, shard: str) -> Mapping[str, Any]:
        """What of a shard adds up, once it is done: groups that it opens, tokens of its duplicates."""
        return self._told.get(shard, {"groups": 0, "tokens_saved": 0})

    def __call__(self, batch: tuple[str, pa.Table, pa.Table]) -> tuple[pa.Table, int, Counts]:
        shard, documents, found = batch
        rows = len(documents)
        at = found["ordinal"].to_numpy()
        kept_id = np.full(rows, None, dtype=object)
        kept_snapshot = np.full(rows, None, dtype=object)
        sources = found["kept_source"].to_numpy()
        kept_id[at] = found["kept_id"].to_pylist()
        kept_snapshot[at] = self._sources[sources]
        told = self._told.setdefault(shard, {"groups": 0, "tokens_saved": 0})
        told["groups"] += pc.sum(found["opens"]).as_py() or 0
        tokens = documents["token_count"].take(pa.array(at))
        unknown = tokens.null_count > 0 or told["tokens_saved"] is None
        told["tokens_saved"] = None if unknown else told["tokens_saved"] + (pc.sum(tokens).as_py() or 0)
        within = int((sources == len(self._sources) - 1).sum())
        free = rows - documents["hash"].null_count
        table = pa.table(
            {
                "doc_id": documents["doc_id"],
                "text_hash": documents["hash"],
                "kept_id": kept_id.tolist(),
                "kept_snapshot": kept_snapshot.tolist(),
            },
            schema=TEXT_DUPLICATES,
        )
        return (
            table,
            rows,
            {
                "first": free - len(found),
                "duplicate_within": within,
                "duplicate_of_earlier": len(found) - within,
                _DECIDED: rows - free,
            },
        )


def evaluation_revision(settings: Settings) -> str:
    """32 hex digits over names and content of the evaluation sets. Raises ValueError for one that cannot be read."""
    return _revision(read_evaluation_sets(settings.clean.evaluation_sets))


def _revision(sets: list[EvaluationSet]) -> str:
    return digest(*(part for found in sets for part in (found.name, found.revision)), size=16).hex()


def contaminated_documents(run: Run, source: Source, snapshot: str) -> Outcome:
    """Publish the documents that share clean.ngram words in a row with a text of clean.evaluation_sets: which set and
    row, the characters of the document, the words. Without sets no text is read and nothing is found.

    Raises ValueError for a set that cannot be read.
    """
    stage = STAGES[CONTAMINATION]
    raw = run.inputs(stage, snapshot)["raw_shards"]
    clean = run.settings.clean
    sets = read_evaluation_sets(clean.evaluation_sets)
    keys = {"raw_shards": raw.fingerprint, "evaluation_sets": _revision(sets)}
    reader = DocumentReader(source, raw)
    with run.generation(stage, snapshot, keys) as generation:
        index = EvaluationIndex(sets, clean.ngram)

        def read(shard: str) -> Iterator[tuple[pa.Table, list[str | None]]]:
            if not sets:
                for table in read_batches(raw.path(shard), None, SIDE_ROWS):
                    yield table, [None] * len(table)
                return
            for batch in reader.batches(shard, ["text"]):
                yield batch.raw, decode_column(batch.rows["text"])[0]

        def kernel(batch: tuple[pa.Table, list[str | None]]) -> tuple[pa.Table, int, Counts]:
            rows, texts = batch
            free = np.flatnonzero(rows["decision"].is_null().to_numpy())
            found = index.matches([texts[k] or "" for k in free])
            at = [int(k) for k, match in zip(free, found, strict=True) if match is not None]
            matches = [match for match in found if match is not None]
            table = pa.table(
                {
                    "doc_id": rows["doc_id"].take(pa.array(at, pa.int64())),
                    **{name: [match[k] for match in matches] for k, name in enumerate(CONTAMINATED.names[1:])},
                },
                schema=CONTAMINATED,
            )
            decided = len(rows) - len(free)
            counts = {"contaminated": len(at), "clean": len(free) - len(at), _DECIDED: decided}
            return table, len(rows), counts

        records = run.map_shards(
            stage,
            generation,
            raw.shards,
            read,
            lambda: kernel,
            CONTAMINATED,
            ext=".parquet",
            total_rows=raw.rows,
            origin=lambda shard: run.origin(stage, keys["evaluation_sets"], *reader.identity(shard)),
        )
        by_set: Counter[str] = Counter()
        for shard in raw.shards:
            for table in read_batches(generation.path(shard, ".parquet"), ["evaluation_set"], SIDE_ROWS):
                by_set.update(table["evaluation_set"].to_pylist())
        facts = {
            "contaminated": sum(record.rows for record in records),
            "ngram": clean.ngram,
            "sets": [{**told, "documents": by_set[told["evaluation_set"]]} for told in index.facts],
        }
        return finish(generation, records, ".parquet", facts=facts, expected_rows=raw.rows)
