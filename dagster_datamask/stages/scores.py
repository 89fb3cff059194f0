"""dclm_scores, edu_scores, wiki_scores, ultra_scores: a side file of each scorer.

What the first three make together is `quality`'s.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

import pyarrow as pa

from dagster_datamask.scoring.base import ScoredBatch, Scorer
from dagster_datamask.scoring.batching import ahead
from dagster_datamask.scoring.parallel import FastTextProcesses
from dagster_datamask.scoring.text import decode_column
from dagster_datamask.shards.cursor import read_batches
from dagster_datamask.shards.documents import DocumentReader, Documents
from dagster_datamask.shards.engine import Counts
from dagster_datamask.shards.schemas import SCORES
from dagster_datamask.shards.source import Source
from dagster_datamask.stages.base import STAGES, Outcome, Run, finish
from dagster_datamask.stages.classifiers import classifier_of, made_by, scorer_for, scorer_identity

# side files hold ids and numbers, so far more rows than of text fit one batch
SIDE_ROWS = 65_536
_CONVENTIONS = ("positive_label", "normaliser", "max_tokens", "windows")


def scores(run: Run, source: Source, snapshot: str, part: str) -> Outcome:
    """Publish `doc_id, score, reason` of one scorer ("dclm", "edu", "wiki", "ultra") for every row of raw_shards."""
    stage = STAGES[f"{part}_scores"]
    inputs = run.inputs(stage, snapshot)
    raw, classifier = inputs["raw_shards"], inputs[classifier_of(part)]
    reader = DocumentReader(source, raw)
    keys = {"raw_shards": raw.fingerprint, "classifier": scorer_identity(classifier, run.accelerator)}
    with run.generation(stage, snapshot, keys) as generation, ExitStack() as opened:
        # made for the first shard that is not done yet, by each worker for itself
        made: list[Scoring] = []

        def scoring() -> Scoring:
            scorer = opened.enter_context(scorer_for(classifier, run.settings, run.accelerator, raw.rows))
            made.append(Scoring(scorer))
            return made[0]

        records = run.map_shards(
            stage,
            generation,
            raw.shards,
            lambda shard: made[0].each(reader.batches(shard, ["text"])),
            scoring,
            SCORES,
            ext=".parquet",
            total_rows=raw.rows,
            origin=lambda shard: run.origin(stage, keys["classifier"], *reader.identity(shard)),
        )
        scored, total = 0, 0.0
        for shard in raw.shards:
            for batch in read_batches(generation.path(shard, ".parquet"), ["score"], SIDE_ROWS):
                values = batch["score"].drop_null().to_numpy()
                scored, total = scored + len(values), total + float(values.sum())
        fact = classifier.facts
        return finish(
            generation,
            records,
            ".parquet",
            facts={
                "scored": scored,
                "mean": total / scored if scored else None,
                "model_ref": fact["ref"],
                "model_revision": fact["revision"],
                "model": made_by(fact),
                **{name: fact[name] for name in _CONVENTIONS if name in fact},
            },
            expected_rows=raw.rows,
        )


class Scoring:
    """Documents to rows of SCORES, by one scorer: `each` scores them, the kernel makes rows of them."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def each(self, batches: Iterable[Documents]) -> Iterator[tuple[Documents, ScoredBatch]]:
        """Every batch with its scores. Batches are read while others are scored."""
        scored_yet: deque[Documents] = deque()

        def texts() -> Iterator[list[str | None]]:
            for batch in ahead(batches):
                scored_yet.append(batch)
                yield decode_column(batch.rows["text"])[0]

        scorer = self._scorer
        each = scorer.score_each(texts()) if isinstance(scorer, FastTextProcesses) else map(scorer.score, texts())
        for scored in each:
            yield scored_yet.popleft(), scored

    def __call__(self, batch: tuple[Documents, ScoredBatch]) -> tuple[pa.Table, int, Counts]:
        documents, scored = batch
        table = pa.table(
            {"doc_id": documents.ids, "score": pa.array(scored.scores, from_pandas=True), "reason": scored.reasons},
            schema=SCORES,
        )
        return table, len(table), Counter(reason or "scored" for reason in scored.reasons)
