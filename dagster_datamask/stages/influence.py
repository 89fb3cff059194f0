"""stage_n/influence_model, stage_n/influence_scores and influence_scores: from rollouts to a figure for every document.

Here: fitting and publishing an influence model with its card and the clusters in its space, and the kernel that
predicts over shards. Not here: what an influence model is (`influence.relational`), where rollouts come from
(`stages.rollouts`) and what is chosen (`stages.group_selection`).

Clusters and the constants of influence's scale are fitted on the probed documents and published with the model: a
snapshot's run cannot move them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dagster_datamask.influence.clusters import Clusters, fit_clusters, relatedness
from dagster_datamask.influence.relational import Card, Correlations, InfluenceModel, fit
from dagster_datamask.scoring.quality import HIGH_QUANTILE, LOW_QUANTILE
from dagster_datamask.scoring.text import decode_column
from dagster_datamask.shards.cursor import Cursor, read_batches
from dagster_datamask.shards.documents import DocumentReader
from dagster_datamask.shards.engine import Counts
from dagster_datamask.shards.generations import Generation, Published, ShardRecord
from dagster_datamask.shards.schemas import SCORES
from dagster_datamask.shards.source import Source
from dagster_datamask.shards.writer import atomic, table_file, write_json
from dagster_datamask.stages.base import STAGES, Check, Outcome, Run, fingerprints, finish
from dagster_datamask.stages.calibration import selection_encoder
from dagster_datamask.stages.candidates import Candidates
from dagster_datamask.stages.classifiers import precision
from dagster_datamask.stages.embeddings import EMBEDDING_ROWS, vectors_of
from dagster_datamask.stages.language_model import reference_identities, reference_texts
from dagster_datamask.stages.rollouts import (
    fitting_progress,
    influence_keys,
    influence_options,
    put_folder,
    read_rollouts,
)
from dagster_datamask.stages.scores import SIDE_ROWS

MODEL_FILES = ("influence_model.json", "weights.safetensors")
CARD_FILE, CARD_PAGE, CLUSTERS_FILE = "card.json", "card.md", "clusters.arrow"
_CENTROID = "centroid"


def influence_model(run: Run, number: int) -> Outcome:
    """Publish the model fitted to all rollouts of the stage, from the base encoder on, its card, and clusters.

    Raises ValueError where too few rollouts can be trained on or held out.
    """
    stage = STAGES[f"stage_{number}/influence_model"]
    inputs = run.inputs(stage, None)
    with run.generation(stage, None, {**fingerprints(inputs), **influence_keys(run)}) as generation:
        record = generation.record(CARD_FILE, "")
        if record is None:
            rollouts = read_rollouts(inputs[f"stage_{number}/rollout_sets"])
            model, card = fit(
                rollouts.features,
                rollouts.trajectories,
                rollouts.increments,
                influence_options(run.settings),
                rollouts.names,
                encoder=selection_encoder(run.settings),
                policies=rollouts.policies,
                accelerator=run.accelerator,
                progress=fitting_progress(run, stage.name),
            )
            h = model.embed(rollouts.features)
            relation, f = model.relation(h), model.influence(h)
            clusters = fit_clusters(
                relation, run.settings.group_mates.clusters, ids=rollouts.names, seed=run.settings.group_mates.seed
            )
            facts = _facts(card, clusters, relation, f)
            put_folder(generation, model.save)
            _write_clusters(generation.folder / CLUSTERS_FILE, clusters)
            with atomic(generation.folder / CARD_PAGE) as temp:
                temp.write_text(_page(stage.name, card, facts), "utf-8")
            write_json(generation.folder / CARD_FILE, {"card": card.to_dict(), "facts": facts})
            for name in (*MODEL_FILES, CLUSTERS_FILE):
                generation.complete(name, "", rows=0, rows_in=0, counts={})
            generation.keep(CARD_PAGE)
            used = sum(count["training"] + count["held_out"] for count in card.trajectories.values())
            record = generation.complete(
                CARD_FILE,
                "",
                rows=1,
                rows_in=len(rollouts.trajectories),
                counts={"fitted_or_measured_on": used, "left_out": len(rollouts.trajectories) - used},
            )
        told = json.loads((generation.folder / CARD_FILE).read_text("utf-8"))
        files = [
            generation.record(name, "") or generation.complete(name, "", rows=0, rows_in=0, counts={})
            for name in (*MODEL_FILES, CLUSTERS_FILE)
        ]
        return finish(
            generation,
            [record, *files],
            "",
            facts=told["facts"],
            expected_rows=record.rows_in,
            checks=(_ranks(told["facts"]),),
        )


def _ranks(facts: dict[str, Any]) -> Check:
    """A model that ranks unseen documents no better than chance chooses at random."""
    return Check(
        "ranks_unseen_documents",
        (facts["spearman_pooled"] or 0.0) > 0,
        False,
        {name: facts[name] for name in ("spearman_pooled", "spearman_within", "spearman_shuffled")},
    )


def _facts(card: Card, clusters: Clusters, relation: np.ndarray, f: np.ndarray) -> dict[str, Any]:
    """What is published of the model beside its files: the card's figures, and what selection needs of it."""
    lo, hi = np.quantile(f, [LOW_QUANTILE, HIGH_QUANTILE]).tolist()
    labels, _ = clusters.assign(relation)
    related = relatedness(relation, labels)
    return {
        "spearman_pooled": card.held_out.pooled,
        "spearman_within": card.held_out.within,
        "spearman_per_policy": card.held_out.per_policy,
        "spearman_shuffled": card.shuffled.pooled,
        "spearman_shuffled_within": card.shuffled.within,
        "held_out_labels": card.held_out.labels,
        **{name: getattr(card, name) for name in ("mode", "similarity", "alpha", "beta", "label_mean", "label_sd")},
        "trajectories_of": card.trajectories,
        "not_finite": card.not_finite,
        "documents_of": card.documents,
        "best_epoch": card.best_epoch,
        "width": relation.shape[1],
        "clusters": clusters.k,
        "clusters_asked": clusters.asked,
        "empty_clusters": clusters.empty,
        "relation_inside": related.inside_mean,
        "relation_across": related.across_mean,
        "influence_lo": lo,
        "influence_hi": hi,
        "model": card.identity,
    }


def _page(name: str, card: Card, facts: dict[str, Any]) -> str:
    """The card for people, in Markdown."""

    def figure(value: float | None) -> str:
        return "none" if value is None else f"{value:.3f}"

    def row(what: str, found: Correlations) -> str:
        return f"| {what} | {figure(found.pooled)} | {figure(found.within)} | {figure(found.per_policy)} |"

    policies = [
        f"| {policy} | {count['training']} | {count['held_out']} | {count['left_out']} |"
        for policy, count in card.trajectories.items()
    ]
    return "\n".join(
        [
            f"# {name}",
            "",
            f"Mode {card.mode}, similarity {card.similarity}, α {card.alpha:.4f}, β {card.beta:.4f}; width "
            f"{facts['width']}, {facts['clusters']} clusters ({facts['empty_clusters']} empty in the sample), mean "
            f"relation inside them {figure(facts['relation_inside'])} and across {figure(facts['relation_across'])}.",
            "",
            "Spearman's ρ of predicted and measured increments on trajectories of documents not trained on:",
            "",
            "| context | pooled | within position | per policy |",
            "|---|---|---|---|",
            row("as it was", card.held_out),
            row("of another trajectory (control)", card.shuffled),
            "",
            "| policy | trained on | held out | left out |",
            "|---|---|---|---|",
            *policies,
            "",
            f"Labels: mean {card.label_mean:.3e}, sd {card.label_sd:.3e} of the training increments; {card.not_finite} "
            f"increments were not finite. Encoder `{card.encoder}`; best epoch {card.best_epoch} of {card.epochs}; "
            f"seed {card.seed}. The lower the influence, the better.",
            "",
            "The epoch was chosen by the same held-out figure, so it is a little too good.",
            "",
        ]
    )


def _write_clusters(path: Path, clusters: Clusters) -> None:
    width = clusters.centroids.shape[1]
    schema = pa.schema([(_CENTROID, pa.list_(pa.float32(), width)), ("size", pa.int64())])
    with table_file(path, schema) as writer:
        flat = pa.FixedSizeListArray.from_arrays(pa.array(clusters.centroids.ravel()), width)
        writer.write(pa.table({_CENTROID: flat, "size": clusters.sizes}, schema=schema))


def read_clusters(published: Published) -> np.ndarray:
    """float32[k, width]: the centroids of a published influence model."""
    with pa.memory_map(str(published.path(CLUSTERS_FILE))) as file:
        column = pa.ipc.open_file(file).read_all()[_CENTROID].combine_chunks()
        return column.flatten().to_numpy().reshape(len(column), -1).copy()


def scored(width: int) -> pa.Schema:
    """doc_id, influence and the vector whose products are R (h; of similarity ffn, what its network makes of h)."""
    return pa.schema(
        [("doc_id", pa.string()), ("influence", pa.float64()), ("embedding", pa.list_(pa.float16(), width))]
    )


def candidates_of(run: Run, snapshot: str, inputs: dict[str, Published], source: Source, scratch: Path) -> Candidates:
    """The documents that can be chosen, in one group: Group-MATES knows no quotas."""
    return Candidates(snapshot, inputs, run.settings.select.model_copy(update={"quota": "none"}), source, scratch)


def stage_scores(run: Run, source: Source, snapshot: str, number: int) -> Outcome:
    """Publish influence and influence vector (Arrow, float16) of every document of the snapshot that can be chosen.

    The texts are read to prove that none is a reference row's, and by a fine-tuned encoder; a frozen one's vectors are
    stored. Raises OverlapError naming the documents that have a reference row's text, and ValueError where model and
    vectors come from different encoders.
    """
    stage = STAGES[f"stage_{number}/influence_scores"]
    inputs = run.inputs(stage, snapshot)
    fitted, embedded = inputs[f"stage_{number}/influence_model"], inputs["e5_embeddings"]
    fine_tuned = run.settings.group_mates.backbone == "fine_tuned"
    keys = {
        **fingerprints(inputs),
        **reference_identities(run.settings),
        **({"precision": precision(run.accelerator)} if fine_tuned else {}),
    }
    if not fine_tuned and fitted.inputs["encoder"] != embedded.inputs["encoder"]:
        raise ValueError(
            f"{fitted.asset} was fitted to vectors of another encoder than e5_embeddings of {snapshot} has; run the "
            f"job group_mates_fit_{number} again, or embed the snapshot again"
        )
    width = fitted.facts["width"]
    with run.generation(stage, snapshot, keys) as generation:
        pool = candidates_of(run, snapshot, inputs, source, generation.work)
        reader, references = DocumentReader(source, inputs["raw_shards"]), reference_texts(run.settings)

        def read(shard: str) -> Iterator[tuple[pa.ChunkedArray, np.ndarray | list[str]]]:
            for ids, texts in _texts(reader, pool, shard, generation.work):
                references.refuse(
                    f"the documents of {snapshot} that can be chosen", zip(ids.to_pylist(), texts, strict=True)
                )
                if fine_tuned:
                    yield ids, texts
            for table in () if fine_tuned else pool.batches(shard):
                yield table["doc_id"], vectors_of(table)

        def kernel() -> "_Predict":
            return _Predict(InfluenceModel.load(fitted.file(""), run.accelerator))

        records = run.map_shards(
            stage,
            generation,
            pool.shards,
            read,
            kernel,
            scored(width),
            ext=".arrow",
            total_rows=embedded.rows,
        )
        total, lowest, highest = _range(generation, records)
        rows = sum(record.rows for record in records)
        return finish(
            generation,
            records,
            ".arrow",
            facts={
                "documents": rows,
                "mean": total / rows if rows else None,
                "lowest": lowest,
                "highest": highest,
                "width": width,
                **{name: fitted.facts[name] for name in ("influence_lo", "influence_hi", "model")},
            },
            expected_rows=sum(len(table) for shard in pool.shards for table in pool.counted(shard)),
        )


def _range(generation: Generation, records: list[ShardRecord]) -> tuple[float, float | None, float | None]:
    total, lowest, highest = 0.0, None, None
    for record in records:
        for table in read_batches(generation.path(record.shard, ".arrow"), ["influence"], SIDE_ROWS):
            values = table["influence"].to_numpy()
            if values.size:
                total += float(values.sum())
                lowest = float(values.min()) if lowest is None else min(lowest, float(values.min()))
                highest = float(values.max()) if highest is None else max(highest, float(values.max()))
    return total, lowest, highest


def _texts(
    reader: DocumentReader, pool: Candidates, shard: str, scratch: Path
) -> Iterator[tuple[pa.ChunkedArray, list[str]]]:
    """(ids, texts) of the shard's documents that can be chosen."""
    path = scratch / f"{shard}.ids.parquet"
    with table_file(path, pa.schema([("doc_id", pa.string())])) as writer:
        for table in pool.counted(shard):
            writer.write(table.select(["doc_id"]))
    wanted = Cursor(path, ["doc_id"], EMBEDDING_ROWS)
    for batch in reader.batches(shard, ["text"]):
        ids, positions = wanted.take(batch.ids)
        texts, _ = decode_column(batch.rows["text"].take(pa.array(positions)))
        yield ids["doc_id"], [text or "" for text in texts]
    wanted.end()
    path.unlink()


class _Predict:
    def __init__(self, model: InfluenceModel) -> None:
        self._model = model

    def __call__(self, batch: tuple[pa.ChunkedArray, np.ndarray | list[str]]) -> tuple[pa.Table, int, Counts]:
        ids, features = batch
        h = self._model.embed(features)
        flat = self._model.relation(h).astype(np.float16)
        table = pa.table(
            {
                "doc_id": ids,
                "influence": self._model.influence(h),
                "embedding": pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), self._model.width),
            },
            schema=scored(self._model.width),
        )
        return table, len(table), {"scored": len(table)}


def influence_scores(run: Run, snapshot: str) -> Outcome:
    """Publish the last stage's influence as `doc_id, score, reason`, of every document that can be chosen."""
    stage = STAGES["influence_scores"]
    inputs = run.inputs(stage, snapshot)
    (last,) = inputs.values()

    def kernel(table: pa.Table) -> tuple[pa.Table, int, Counts]:
        columns = {"doc_id": table["doc_id"], "score": table["influence"], "reason": pa.nulls(len(table), pa.string())}
        return pa.table(columns, schema=SCORES), len(table), {"scored": len(table)}

    with run.generation(stage, snapshot, fingerprints(inputs)) as generation:
        records = run.map_shards(
            stage,
            generation,
            last.shards,
            lambda shard: read_batches(last.path(shard), ["doc_id", "influence"], SIDE_ROWS),
            lambda: kernel,
            SCORES,
            ext=".parquet",
            total_rows=last.rows,
        )
        facts = {"from": last.asset, **{name: value for name, value in last.facts.items() if name != "width"}}
        return finish(generation, records, ".parquet", facts=facts, expected_rows=last.rows)
