"""The documents that a report shows one by one: which, why, and the kept document that is nearest to each.

Here: choosing them, what is said of each, and their texts. Not here: how they look on the page (`reporting.html`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from threadpoolctl import threadpool_limits

from dagster_datamask.reporting.html import Card
from dagster_datamask.scoring.text import decode_column
from dagster_datamask.shards.cursor import Cursor, read_batches
from dagster_datamask.shards.documents import DocumentReader
from dagster_datamask.shards.engine import BATCH_ROWS
from dagster_datamask.shards.generations import Published
from dagster_datamask.shards.schemas import DECISIONS
from dagster_datamask.shards.source import Source
from dagster_datamask.stages.baselines import DRAWN
from dagster_datamask.stages.embeddings import EMBEDDING_ROWS, vectors_of
from dagster_datamask.stages.report_numbers import Numbers
from dagster_datamask.stages.scores import SIDE_ROWS

SHOWN = 20
_EXCERPT = 300
# of the dropped documents, as many as these at first: what pruning and the mask decide is what there is to judge
_FIRST = {"not_selected": 10, "pruned": 6}
_WORDS = {
    "kept": "kept",
    "not_selected": "dropped: not selected",
    "pruned": "dropped: pruned for its quality",
    "duplicate": "dropped: a duplicate",
    "contaminated": "dropped: contaminated",
    "unscored": "dropped: no quality score",
    "bad_embedding": "dropped: no vector",
    "bad_row": "dropped: no usable text",
}

Place = tuple[str, int]


@dataclass(frozen=True)
class Cut:
    """Where the line between kept and dropped lies: the lowest quality that pruning left, and of each split how many
    are kept, of how many, and the score at that place; drawn: the places are those of a draw, not of the score."""

    quality: float | None
    kept: Mapping[int, int]
    documents: Mapping[int, int]
    score: Mapping[int, float]
    quotas: bool
    drawn: bool


def chosen(examples: Mapping[str, pa.Table]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(kept, dropped): at most SHOWN documents of each, by keyed hash; of the dropped some of every decision."""
    rows = {decision: table.to_pylist() for decision, table in examples.items()}
    kept = rows.pop("kept", [])[:SHOWN]
    order = [name for name in (*_FIRST, *DECISIONS) if name in rows]
    others = [name for name in dict.fromkeys(order) if name not in _FIRST]
    share = (SHOWN - sum(_FIRST.values())) // max(1, len(others))
    wanted = {name: min(len(rows[name]), _FIRST.get(name, share)) for name in dict.fromkeys(order)}
    for name in dict.fromkeys(order):
        wanted[name] += min(len(rows[name]) - wanted[name], SHOWN - sum(wanted.values()))
    return kept, [row for name, number in wanted.items() for row in rows[name][:number]]


def cut_of(pruned: Published, masks: Published, kept_of_split: Counter[int]) -> Cut:
    """The cut, by a pass over the masks."""
    documents: Counter[int] = Counter()
    scores: dict[int, float] = {}
    for shard in masks.shards:
        for table in read_batches(masks.path(shard), ["split", "rank", "score"], SIDE_ROWS):
            split, rank = table["split"].to_numpy(), table["rank"].to_numpy()
            for number in np.unique(split).tolist():
                documents[number] += int((split == number).sum())
                at = np.flatnonzero((split == number) & (rank == kept_of_split[number]))
                if at.size:
                    scores[number] = table["score"][int(at[0])].as_py()
    lowest, drawn = pruned.facts["lowest_surviving_quality"], masks.facts["solver"] in DRAWN
    return Cut(lowest, kept_of_split, documents, scores, masks.facts["quotas"] is not None, drawn)


def neighbours(inputs: Mapping[str, Published], rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """{doc_id: the kept document nearest to it, itself left out, with its `cosine`}, by a pass over the kept vectors.

    Ties go to the document that comes first. Documents without a vector are left out.
    """
    asked = [row for row in rows if row["embedding"] is not None]
    if not asked:
        return {}
    queries = _unit(np.array([row["embedding"] for row in asked], np.float32))
    own = np.array([row["doc_id"] for row in asked], dtype=object)
    best = np.full(len(asked), -np.inf)
    nearest: list[dict[str, Any]] = [{} for _ in asked]
    manifest, embedded = inputs["fineweb_mask_manifest"], inputs["e5_embeddings"]
    columns = ["doc_id", "shard", "row", "decision", "quality"]
    with threadpool_limits(limits=1, user_api="blas"):
        for shard in manifest.shards:
            vectors = Cursor(embedded.path(shard), ["doc_id", "embedding"], EMBEDDING_ROWS)
            for table in read_batches(manifest.path(shard), columns, EMBEDDING_ROWS):
                found, at = vectors.take(table["doc_id"].combine_chunks())
                at_kept = pc.equal(table["decision"], "kept").to_numpy()[at] & found["embedding"].is_valid().to_numpy()
                if not at_kept.any():
                    continue
                kept = table.take(pa.array(at[at_kept]))
                cosines = queries @ _unit(vectors_of(found.filter(pa.array(at_kept))).astype(np.float32)).T
                cosines[own[:, None] == np.array(kept["doc_id"].to_pylist(), dtype=object)] = -np.inf
                places = cosines.argmax(axis=1)
                for i in np.flatnonzero(cosines.max(axis=1) > best).tolist():
                    best[i] = cosines[i, places[i]]
                    nearest[i] = kept.slice(int(places[i]), 1).to_pylist()[0]
    return {
        row["doc_id"]: {**other, "cosine": float(cosine)}
        for row, other, cosine in zip(asked, nearest, best.tolist(), strict=True)
        if other
    }


def _unit(z: np.ndarray) -> np.ndarray:
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def excerpts(source: Source, raw: Published, places: Iterable[Place]) -> dict[Place, str]:
    """{(shard, row): the first characters of its text}, reading only the row groups that hold them."""
    reader = DocumentReader(source, raw)
    wanted: dict[str, set[int]] = defaultdict(set)
    for name, row in places:
        wanted[name].add(row)
    texts: dict[Place, str] = {}
    for name, rows in sorted(wanted.items()):
        shard = reader.shard(name)
        with source.open(shard) as parquet:
            sizes = [parquet.metadata.row_group(g).num_rows for g in range(parquet.num_row_groups)]
        firsts = np.cumsum([0, *sizes])
        groups = np.unique(np.searchsorted(firsts, sorted(rows), side="right") - 1)
        for group in groups.tolist():
            first = int(firsts[group])
            for batch in source.batches(shard, ["text"], BATCH_ROWS, [group]):
                inside = sorted(row for row in rows if first <= row < first + len(batch))
                found = batch.column("text").take(pa.array([row - first for row in inside], pa.int64()))
                for row, text in zip(inside, decode_column(found)[0], strict=True):
                    texts[name, row] = _excerpt(text)
                first += len(batch)
    return texts


def _excerpt(text: str | None) -> str:
    if text is None or not text.strip():
        return "(no text)"
    # enough of it to fill the excerpt once its white space has collapsed
    words = " ".join(text[: 20 * _EXCERPT].split())
    return words if len(words) <= _EXCERPT else words[: _EXCERPT - 1] + "…"


def cards(
    rows: Sequence[dict[str, Any]],
    nearest: Mapping[str, dict[str, Any]],
    texts: Mapping[Place, str],
    cut: Cut,
    numbers: Numbers,
) -> list[Card]:
    """The documents as cards, each compared with what is kept on average."""
    kept = numbers.groups["kept"]
    made = []
    for row in rows:
        other = nearest.get(row["doc_id"])
        facts = [
            ("decided by", row["stage"] + (f": {row['reason'].replace('_', ' ')}" if row["reason"] else "")),
            ("scores", _scores(row, kept.mean_quality)),
            ("the cut", _from_the_cut(row, cut)),
        ]
        if row["embedding"] is not None:
            facts.append(("likeness", _likeness(row, numbers)))
        if row["kept_id"] is not None:
            facts.append(("kept instead", f"{row['kept_id']}, cosine {row['similarity']:.3f}"))
        sizes = [f"{row['token_count']:,} tokens"] if row["token_count"] is not None else []
        sizes += [f"cluster {row['cluster']}"] if row["cluster"] is not None else []
        facts.append(("document", ", ".join(sizes)))
        beside = None
        if other is not None:
            what = (
                f"nearest {'other ' if row['decision'] == 'kept' else ''}kept document, cosine {other['cosine']:.3f}, "
                f"quality {other['quality']:.2f}: {other['doc_id']}"
            )
            beside = (what, texts[other["shard"], other["row"]])
        told = [(name, text) for name, text in facts if text]
        excerpt, decision = texts[row["shard"], row["row"]], row["decision"]
        made.append(Card(row["doc_id"], _WORDS[decision], decision == "kept", told, excerpt, beside))
    return made


def _likeness(row: Mapping[str, Any], numbers: Numbers) -> str:
    """How like it is to what is kept, itself left out, as against kept documents among each other."""
    itself = int(row["decision"] == "kept")
    others = numbers.embedded["kept"] - itself
    if not others:
        return ""
    cosines = _unit(np.array([row["embedding"]], np.float64))[0] @ numbers.vectors["kept"]
    usual = numbers.cosine("kept")
    among = "" if usual is None else f"; kept documents among each other: {usual:.3f}"
    return f"mean cosine with what {'else ' if itself else ''}is kept {(cosines - itself) / others:.3f}{among}"


def _scores(row: Mapping[str, Any], usual: float | None) -> str:
    if row["quality"] is None:
        return ""
    named = [(name, row[key]) for name, key in (("DCLM", "dclm"), ("Edu", "edu"), ("Wiki", "wiki"))]
    parts = ", ".join(f"{name} {'none' if score is None else f'{score:.3f}'}" for name, score in named)
    kept = "" if usual is None else f"; kept documents: {usual:.2f} on average"
    return f"quality {row['quality']:.2f} of 15 ({parts}){kept}"


def _from_the_cut(row: Mapping[str, Any], cut: Cut) -> str:
    """How far a document is from being decided otherwise, in words."""
    if row["decision"] == "pruned":
        if cut.quality is None:
            return "nothing survived pruning"
        below = cut.quality - row["quality"]
        return f"quality {below:.2f} below the lowest that survives, {cut.quality:.2f}"
    if row["decision"] not in ("kept", "not_selected") or row["rank"] is None:
        return ""
    split, rank = row["split"], row["rank"]
    kept, every = cut.kept[split], cut.documents[split]
    if cut.drawn:
        return f"place {rank:,} of {every:,} in the order of the draw; {kept:,} are kept"
    if row["score"] is None:
        return f"without a score; {kept:,} of {every:,} are kept"
    where = f"place {rank:,} of {every:,} by the solver's score {row['score']:.4g}"
    if cut.quotas:
        return f"{where}; every quota has a cut of its own"
    if not kept:
        return f"{where}; none is kept"
    places, away = abs(rank - kept), abs(row["score"] - cut.score[split])
    if row["decision"] == "kept":
        if rank > kept:
            return f"{where}; {kept:,} are kept: {places:,} places outside, brought in by the last exchanges or draws"
        return f"{where}; {kept:,} are kept: {places:,} places inside, {away:.3g} above the last"
    if rank <= kept:
        return f"{where}; {kept:,} are kept: {places:,} places inside, put out by the last exchanges or draws"
    return f"{where}; {kept:,} are kept: {places:,} places outside, {away:.3g} below the last"
