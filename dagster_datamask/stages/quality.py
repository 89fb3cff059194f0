"""quality_scores and pruned_documents: the scores as one quality, and what survives.

Quality joins the scorers' side files by doc_id; pruning cuts what raw_shards and cleaning left of the snapshot at an
exact rank. The scores themselves are `scores`'s, what cleaning finds is `cleaning`'s.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dagster_datamask.keyed import hash64
from dagster_datamask.reporting.figures import quality_histogram
from dagster_datamask.reporting.scorers import correlation_figure
from dagster_datamask.scoring.agreement import correlations, nearly_constant
from dagster_datamask.scoring.quality import PARTS, Combination, Standard, combine
from dagster_datamask.shards.cursor import Cursor, read_batches
from dagster_datamask.shards.engine import Counts
from dagster_datamask.shards.generations import total_counts
from dagster_datamask.shards.order import Cut, cut, descending, tie_hash
from dagster_datamask.shards.schemas import PRUNED, SCORES
from dagster_datamask.stages.base import STAGES, Check, Outcome, Run, fingerprints, finish
from dagster_datamask.stages.scores import SIDE_ROWS

QUALITY_BINS = 16
# rows of several side files at once: what is decided of a row are Python objects, which together take a kilobyte
JOIN_ROWS = 4096
# the scored sample of quality_calibration
SAMPLE_FILE = "sample.parquet"
_SAMPLED = 10_000
_KEYS = np.dtype([("value", "<u8"), ("tie", "<u8")])


def quality_scores(run: Run, snapshot: str) -> Outcome:
    """Publish the 0..15 quality of every row, and the scorer's reason where a part is missing: then quality is null, or
    with score.missing = others of the other parts alone.

    As facts and figures also how the scorers agree, on the 10,000 documents of least keyed hash; a check warns of one
    that hardly tells them apart.
    """
    stage = STAGES["quality_scores"]
    inputs = run.inputs(stage, snapshot)
    raw = inputs["raw_shards"]
    score = run.settings.score
    calibration = inputs.get("quality_calibration")
    standard = None if calibration is None else standard_of(score.combine, calibration.path(SAMPLE_FILE))

    def kernel(batch: tuple[pa.Array, dict[str, pa.Table]]) -> tuple[pa.Table, int, Counts]:
        ids, parts = batch
        quality, reasons = combine(
            *(parts[part]["score"].to_numpy() for part in PARTS),
            reasons={part: parts[part]["reason"].to_pylist() for part in PARTS},
            weights=(score.weights[0], score.weights[1], score.weights[2]),
            standard=standard,
            missing=score.missing,
        )
        table = pa.table(
            {"doc_id": ids, "score": pa.array(quality, from_pandas=True), "reason": reasons}, schema=SCORES
        )
        scored, whole = np.isfinite(quality), np.array([reason is None for reason in reasons], dtype=bool)
        counts = {"scored": scored & whole, "scored_in_part": scored & ~whole, "unscored": ~scored}
        return table, len(ids), {name: int(rows.sum()) for name, rows in counts.items()}

    def read(shard: str) -> Iterator[tuple[pa.Array, dict[str, pa.Table]]]:
        cursors = {part: Cursor(inputs[f"{part}_scores"].path(shard), None, JOIN_ROWS) for part in PARTS}
        for table in read_batches(raw.path(shard), ["doc_id"], JOIN_ROWS):
            ids = table["doc_id"].combine_chunks()
            yield ids, {part: cursor.take_all(ids) for part, cursor in cursors.items()}
        for cursor in cursors.values():
            cursor.end()

    with run.generation(stage, snapshot, fingerprints(inputs)) as generation:
        records = run.map_shards(
            stage,
            generation,
            raw.shards,
            read,
            lambda: kernel,
            SCORES,
            ext=".parquet",
            total_rows=raw.rows,
        )
        histogram = np.zeros(QUALITY_BINS, dtype=np.int64)
        total = 0.0
        for shard in raw.shards:
            for batch in read_batches(generation.path(shard, ".parquet"), ["score"], SIDE_ROWS):
                values = batch["score"].drop_null().to_numpy()
                histogram += integer_histogram(values)
                total += float(values.sum())
        scored = int(histogram.sum())
        sample = _sample(batch for shard in raw.shards for batch in read(shard))
        pairs, constant = correlations(sample), nearly_constant(sample)
        return finish(
            generation,
            records,
            ".parquet",
            facts={
                "mean": total / scored if scored else None,
                "histogram": histogram.tolist(),
                "correlations": pairs,
            },
            expected_rows=raw.rows,
            figures=lambda published: {
                "quality by integer score": quality_histogram(
                    histogram.tolist(), f"Quality of {snapshot}", beside_paper=standard is None
                ),
                "how the scorers agree": correlation_figure(pairs, f"How the scorers of {snapshot} agree"),
            },
            checks=(
                Check(
                    "scorers_vary",
                    not constant,
                    False,
                    {"nearly_constant": "; ".join(f"{part}: {why}" for part, why in constant.items()) or "none"},
                ),
            ),
        )


def standard_of(combination: Combination, sample: Path) -> Standard:
    """What z-scores or ranks are measured against: the recorded sample, so that quality means the same everywhere."""
    columns = pq.read_table(sample, columns=list(PARTS))
    return Standard.of(combination, {part: columns[part].to_numpy() for part in PARTS})


def integer_histogram(quality: np.ndarray) -> np.ndarray:
    """int64[16]: documents by rounded quality 0..15 (halves to even), the paper's Table 7; the first and the last hold
    what a z-score puts beyond."""
    rounded = np.clip(np.rint(quality), 0, QUALITY_BINS - 1)
    return np.bincount(rounded.astype(np.int64), minlength=QUALITY_BINS)


def _sample(batches: Iterable[tuple[pa.Array, dict[str, pa.Table]]]) -> dict[str, np.ndarray]:
    """{part: scores of the _SAMPLED documents of least keyed hash}, NaN where there is none."""
    kept = np.empty((0, len(PARTS)))
    keys = np.empty(0, np.uint64)
    for ids, parts in batches:
        keys = np.concatenate([keys, hash64(ids.to_pylist(), 0, "correlation")])
        kept = np.concatenate([kept, np.column_stack([parts[part]["score"].to_numpy() for part in PARTS])])
        if len(keys) > _SAMPLED:
            least = np.argpartition(keys, _SAMPLED)[:_SAMPLED]
            keys, kept = keys[least], kept[least]
    order = np.argsort(keys, kind="stable")
    return {part: kept[order, k] for k, part in enumerate(PARTS)}


def pruned_documents(run: Run, snapshot: str) -> Outcome:
    """Publish every row's decision so far and the asset that took it, first come first served: duplicate or bad_row by
    raw_shards, duplicate by text_duplicates, contaminated, unscored, pruned; null where the row survives.

    Of the n rows with a quality of which nothing is decided before, ⌊ratio·n + ½⌋ are pruned, lowest quality first,
    ties by the stable hash of the id; with prune.threshold = frozen, those below quality_calibration's threshold.
    """
    stage = STAGES["pruned_documents"]
    prune = run.settings.prune
    frozen = prune.threshold == "frozen"
    names = [name for name in stage.needs(run.settings) if frozen or name != "quality_calibration"]
    inputs = run.inputs(stage, snapshot, names)
    raw, quality = inputs["raw_shards"], inputs["quality_scores"]
    with run.generation(stage, snapshot, fingerprints(inputs)) as generation:

        def pairs(shard: str) -> Iterator[tuple[pa.Table, pa.Table]]:
            scored = Cursor(quality.path(shard), None, JOIN_ROWS)
            cleaned = {name: Cursor(inputs[name].path(shard), None, JOIN_ROWS) for name in CLEANING if name in inputs}
            for table in read_batches(raw.path(shard), None, JOIN_ROWS):
                ids = table["doc_id"].combine_chunks()
                found = {name: cursor.take(ids) for name, cursor in cleaned.items()}
                yield _decided(table, snapshot, found), scored.take_all(ids)
            for cursor in (scored, *cleaned.values()):
                cursor.end()

        def lines() -> Callable[[str], Cut | float]:
            if frozen:
                threshold: float = inputs["quality_calibration"].facts["prune_threshold"]
                return lambda shard: threshold
            spill = generation.work / "keys.bin"
            n = _spill_keys(spill, (pair for shard in raw.shards for pair in pairs(shard)))
            rank = cut(lambda: _spilled(spill), n - int(np.floor(prune.ratio * n + 0.5)))
            return lambda shard: rank

        records = run.map_shards(
            stage,
            generation,
            raw.shards,
            lambda shard, line: ((*pair, line) for pair in pairs(shard)),
            lambda: _prune,
            PRUNED,
            ext=".parquet",
            total_rows=raw.rows,
            given=lines,
        )
        counts = Counter(total_counts(records))
        lowest = min(
            (low for shard in raw.shards for low in _lowest_survivors(generation.path(shard, ".parquet"))),
            default=None,
        )
        facts = {
            "n": counts["survives"] + counts["pruned"],
            "survivors": counts["survives"],
            "lowest_surviving_quality": lowest,
            "threshold": prune.threshold,
        }
        return finish(generation, records, ".parquet", facts=facts, expected_rows=raw.rows)


def _decided(raw: pa.Table, snapshot: str, found: Mapping[str, tuple[pa.Table, np.ndarray]]) -> pa.Table:
    """`doc_id, decision, stage, reason` by raw_shards and, of what it left, by cleaning; nulls where neither decided.

    found: {asset of cleaning: (its rows, their positions)}.
    """
    decisions = np.array(raw["decision"].to_pylist(), dtype=object)
    reasons = np.array(raw["reason"].to_pylist(), dtype=object)
    stages = np.array([None if decision is None else "raw_shards" for decision in decisions], dtype=object)
    for name, (rows, positions) in found.items():
        if name == "text_duplicates":
            later = rows["kept_id"].is_valid()
            rows, positions = rows.filter(later), positions[later.to_numpy()]
        free = np.array([decisions[k] is None for k in positions], dtype=bool)
        decision, why = CLEANING[name]
        at = positions[free]
        decisions[at], stages[at] = decision, name
        reasons[at] = [why(row, snapshot) for row in rows.filter(pa.array(free)).to_pylist()]
    return pa.table(
        {"doc_id": raw["doc_id"], "decision": decisions.tolist(), "stage": stages.tolist(), "reason": reasons.tolist()},
        schema=pa.schema([field for field in PRUNED if field.name != "quality"]),
    )


def _duplicate(row: Mapping[str, Any], snapshot: str) -> str:
    elsewhere = "" if row["kept_snapshot"] == snapshot else f" of {row['kept_snapshot']}"
    return f"same text as {row['kept_id']}{elsewhere}"


def _contaminated(row: Mapping[str, Any], snapshot: str) -> str:
    words = len(row["words"].split(" "))
    return f"{words} words of {row['evaluation_set']}, item {row['item']}, at characters {row['start']} to {row['end']}"


# {asset: (its decision, its reason for a row of its side file)}, in the order in which they decide
CLEANING: dict[str, tuple[str, Callable[[Mapping[str, Any], str], str]]] = {
    "text_duplicates": ("duplicate", _duplicate),
    "contaminated_documents": ("contaminated", _contaminated),
}


def _prune(batch: tuple[pa.Table, pa.Table, Cut | float]) -> tuple[pa.Table, int, Counts]:
    """The kernel: what is decided already first, then the score, by its rank or a threshold."""
    decided, quality, line = batch
    values = quality["score"].to_numpy()
    decisions, stages, reasons = (
        np.array(decided[name].to_pylist(), dtype=object) for name in ("decision", "stage", "reason")
    )
    in_play = decided["decision"].is_null().to_numpy()
    unscored = in_play & np.isnan(values)
    decisions[unscored], stages[unscored] = "unscored", "quality_scores"
    reasons[unscored] = np.array(quality["reason"].to_pylist(), dtype=object)[unscored]
    scored = np.flatnonzero(in_play & ~unscored)
    if isinstance(line, Cut):
        ties = tie_hash(decided["doc_id"].take(pa.array(scored)).to_pylist())
        survives = line.inside(descending(values[scored]), ties)
    else:
        survives = values[scored] >= line
    decisions[scored[~survives]], stages[scored[~survives]] = "pruned", "pruned_documents"
    reasons[scored[~survives]] = "quality below the cut"
    table = pa.table(
        {
            "doc_id": decided["doc_id"],
            "quality": pa.array(values, from_pandas=True),
            "decision": decisions.tolist(),
            "stage": stages.tolist(),
            "reason": reasons.tolist(),
        },
        schema=PRUNED,
    )
    return table, len(table), Counter(decision or "survives" for decision in decisions)


def _spill_keys(path: Path, pairs: Iterator[tuple[pa.Table, pa.Table]]) -> int:
    n = 0
    with path.open("wb") as file:
        for decided, quality in pairs:
            values = quality["score"].to_numpy()
            inside = np.flatnonzero(decided["decision"].is_null().to_numpy() & ~np.isnan(values))
            keys = np.empty(len(inside), dtype=_KEYS)
            keys["value"] = descending(values[inside])
            keys["tie"] = tie_hash(decided["doc_id"].take(pa.array(inside)).to_pylist())
            file.write(keys.tobytes())
            n += len(inside)
    return n


def _spilled(path: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    with path.open("rb") as file:
        while block := file.read(_KEYS.itemsize * SIDE_ROWS):
            keys = np.frombuffer(block, dtype=_KEYS)
            yield keys["value"], keys["tie"]


def _lowest_survivors(path: Path) -> Iterator[float]:
    for batch in read_batches(path, ["quality", "decision"], SIDE_ROWS):
        survived = batch["quality"].filter(batch["decision"].is_null())
        if len(survived):
            yield pc.min(survived).as_py()
