"""datamask_masks: the snapshot's survivors into splits, each split solved and certified, the union certified.

A split is a unit of work: its result has a completion record, so a killed run goes on at the split it was in. What a
solver or a certificate is belongs to `selection`; how splits are made to `shards.shuffle`.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dagster_datamask.reporting.figures import trajectory_figure
from dagster_datamask.selection.budgets import largest_remainder, parse_budget
from dagster_datamask.selection.certificates import uniform_value
from dagster_datamask.selection.objectives import QualityDiversity
from dagster_datamask.selection.policy_gradient import PolicyGradientOptions
from dagster_datamask.selection.solve import Selection, solve
from dagster_datamask.selection.streaming import union_bound
from dagster_datamask.settings import SelectSettings, SettingsError
from dagster_datamask.shards import shuffle
from dagster_datamask.shards.cursor import Cursor, read_batches
from dagster_datamask.shards.engine import every_seconds, map_shards
from dagster_datamask.shards.generations import Generation, Published, ShardRecord
from dagster_datamask.shards.schemas import MASKS
from dagster_datamask.shards.writer import table_file, write_json
from dagster_datamask.stages.base import STAGES, Check, Outcome, Run, fingerprints, finish
from dagster_datamask.stages.classifiers import precision
from dagster_datamask.stages.embeddings import EMBEDDING_ROWS, vectors_of
from dagster_datamask.stages.scores import SIDE_ROWS

_RESULT = pa.schema([("shard", pa.int32()), ("ordinal", pa.int64()), *MASKS])
_POINTS_IN_FIGURE = 200
_NO_GAIN = 1e-9
# what a person looks for comes first
_FIRST = ("value", "certificate", "quality_raw", "diversity", "kept", "budget", "n", "pool")


@dataclass(frozen=True)
class Budget:
    """S of n documents, met from a pool: `short_by` more were asked for than there are survivors."""

    asked: int
    n: int
    pool: int

    @property
    def met(self) -> int:
        return min(self.asked, self.pool)

    @property
    def short_by(self) -> int:
        return self.asked - self.met


def datamask_masks(run: Run, snapshot: str) -> Outcome:
    """Publish the mask of one snapshot: a row for every surviving document with a vector, in the shards' order.

    S = ⌊b·n + ½⌋ of the n scored documents before pruning is met exactly from the survivors.
    Raises ValueError where the budget exceeds n or, with a threshold per snapshot, the survivors.
    """
    stage = STAGES["datamask_masks"]
    select = run.settings.select
    needed = ["pruned_documents", "e5_embeddings"]
    if select.scale == "minmax" and select.lambda_ > 0:
        needed.append("quality_calibration")
    inputs = run.inputs(stage, snapshot, needed)
    pruned, embedded = inputs["pruned_documents"], inputs["e5_embeddings"]
    constants = None
    if "quality_calibration" in inputs:
        facts = inputs["quality_calibration"].facts
        constants = (facts["q_lo"], facts["q_hi"])
    pool = _Pool(pruned, embedded)
    keys = {**fingerprints(inputs), "precision": precision(run.accelerator)}
    with run.generation(stage, snapshot, keys) as generation:
        splits = _plan(generation, pool, select)
        budget = _budget(select, pruned, sum(splits.sizes), snapshot)
        solved = _solve_splits(run, generation, pool, splits, budget, constants, snapshot)
        records = _write_masks(run, generation, embedded, sum(splits.sizes), solved, snapshot)
        summary = generation.folder / "facts.json"
        if not summary.exists():
            each = [json.loads(path.read_text("utf-8")) for _, path in solved]
            write_json(summary, _facts(select, pool, budget, constants, each))
        stored = json.loads(summary.read_text("utf-8"))
        facts = {name: stored[name] for name in _FIRST} | stored
        kept = sum(record.counts.get("kept", 0) for record in records)
        exact = Check(
            "budget_met_exactly", kept == budget.met, True, {"asked": budget.asked, "kept": kept, "pool": budget.pool}
        )
        certified = Check(
            "value_below_bound",
            facts["certificate"]["gap"] is None or facts["certificate"]["gap"] >= 0,
            True,
            {"value": facts["value"], "upper_bound": facts["certificate"]["upper_bound"]},
        )
        return finish(
            generation,
            records,
            ".parquet",
            facts=facts,
            expected_rows=sum(splits.sizes),
            figures=mask_figures,
            checks=(exact, certified),
        )


class _Pool:
    """The documents that can be chosen: survivors with a vector, streamed shard by shard."""

    def __init__(self, pruned: Published, embedded: Published) -> None:
        self.pruned = pruned
        self.embedded = embedded
        self.dimension = embedded.facts["dimension"]
        self.schema = pa.schema(
            [
                ("shard", pa.int32()),
                ("ordinal", pa.int64()),
                ("doc_id", pa.string()),
                ("quality", pa.float64()),
                ("embedding", pa.list_(pa.float16(), self.dimension)),
            ]
        )

    def batches(self) -> Iterator[pa.Table]:
        """Tables of `schema`; the ordinal is a document's place among its shard's choosable ones."""
        for number, shard in enumerate(self.embedded.shards):
            ordinal = 0
            vectors = Cursor(self.embedded.path(shard), ["doc_id", "embedding"], EMBEDDING_ROWS)
            for batch in read_batches(self.pruned.path(shard), ["doc_id", "quality", "decision"], EMBEDDING_ROWS):
                found, positions = vectors.take(batch["doc_id"].combine_chunks())
                rows = batch.take(pa.array(positions))
                wanted = pa.compute.and_(found["embedding"].is_valid(), rows["decision"].is_null())
                found, rows = found.filter(wanted), rows.filter(wanted)
                count = len(found)
                yield pa.table(
                    {
                        "shard": np.full(count, number, dtype=np.int32),
                        "ordinal": np.arange(ordinal, ordinal + count),
                        "doc_id": found["doc_id"],
                        "quality": rows["quality"],
                        "embedding": found["embedding"],
                    },
                    schema=self.schema,
                )
                ordinal += count
            vectors.end()

    def ids(self) -> Iterator[list[str]]:
        """Ids of `batches()`, without touching a vector."""
        for shard in self.embedded.shards:
            embedded = Cursor(self.embedded.path(shard), ["doc_id", "reason"], SIDE_ROWS)
            for batch in read_batches(self.pruned.path(shard), ["doc_id", "decision"], SIDE_ROWS):
                found, positions = embedded.take(batch["doc_id"].combine_chunks())
                survives = batch["decision"].take(pa.array(positions)).is_null()
                yield found["doc_id"].filter(pa.compute.and_(found["reason"].is_null(), survives)).to_pylist()

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(float16[n, d], float64[n]) blocks for the union's bound."""
        for table in self.batches():
            if len(table):
                yield vectors_of(table), table["quality"].to_numpy()


def _budget(select: SelectSettings, pruned: Published, pool: int, snapshot: str) -> Budget:
    n = pruned.facts["n"]
    try:
        budget = Budget(parse_budget(select.budget, n), n, pool)
    except ValueError as error:
        raise SettingsError(f"select.budget, snapshot {snapshot}: {error}") from error
    if budget.short_by and pruned.facts["threshold"] == "per_snapshot":
        raise SettingsError(
            f"select.budget = {select.budget} asks for {budget.asked} of the {n} documents of {snapshot}, but pruning "
            f"and embedding left {pool}; lower select.budget or prune.ratio"
        )
    return budget


def _plan(generation: Generation, pool: _Pool, select: SelectSettings) -> shuffle.Splits:
    """The splits of this generation, planned once: a pass over the ids."""
    path = generation.folder / "splits" / "plan.json"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        splits = shuffle.plan(pool.ids(), select.split, select.seed)
        write_json(path, {"seed": splits.seed, "edges": splits.edges, "sizes": splits.sizes})
    found = json.loads(path.read_text("utf-8"))
    return shuffle.Splits(found["seed"], tuple(found["edges"]), tuple(found["sizes"]))


def _solve_splits(
    run: Run,
    generation: Generation,
    pool: _Pool,
    splits: shuffle.Splits,
    budget: Budget,
    constants: tuple[float, float] | None,
    snapshot: str,
) -> list[tuple[Path, Path]]:
    """(result, facts) files of every split, computing those that are missing."""
    # kept beside the masks, not in the scratch folder: they are the certificate's evidence
    folder = generation.folder / "splits"
    files = [(folder / f"{k:05d}.parquet", folder / f"{k:05d}.json") for k in range(len(splits.sizes))]
    done = [result.exists() and facts.exists() for result, facts in files]
    if all(done):
        return files
    largest = max(splits.sizes)
    # the split as stored, and what the certified solver holds: 1.3 times the embeddings in float32
    run.accelerator.plan(
        f"a split of {largest:,} documents", round(largest * pool.dimension * (2 + 1.3 * 4)), "lower select.split"
    )
    budgets = largest_remainder(budget.met, splits.sizes, splits.sizes)
    paths = shuffle.scatter(generation.work, pool.schema, splits, pool.batches)
    for k, (path, (result, facts)) in enumerate(zip(paths, files, strict=True)):
        if not done[k]:
            run.log(f"datamask_masks {snapshot}: split {k + 1} of {len(paths)}, {budgets[k]:,} of {splits.sizes[k]:,}")
            _solve_split(run, snapshot, path, k, budgets[k], constants, result, facts)
        path.unlink()
    return files


def _solve_split(
    run: Run,
    snapshot: str,
    path: Path,
    split: int,
    budget: int,
    constants: tuple[float, float] | None,
    result: Path,
    facts: Path,
) -> None:
    select = run.settings.select
    with pa.memory_map(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
        ids = table["doc_id"].to_pylist()
        quality = table["quality"].to_numpy()
        objective = QualityDiversity(
            vectors_of(table), quality, select.lambda_, select.scale, constants if select.scale == "minmax" else None
        )
        gradient = PolicyGradientOptions(
            group=select.group,
            lr=select.lr,
            steps=select.steps,
            batch=select.batch,
            gradient=select.gradient,
            l_min=select.l_min,
            l_max=select.l_max,
            final=select.final,
        )

        def run_solver(solver: str, options: PolicyGradientOptions | None) -> Selection:
            told = every_seconds(run.log, f"datamask_masks {snapshot}: split {split + 1}, {solver}", "steps")
            return solve(
                objective,
                budget,
                solver=solver,
                seed=select.seed,
                split=split,
                ids=ids,
                accelerator=run.accelerator,
                progress=lambda step, steps, entry: told(step, steps, f"value {entry['value']:.6f}"),
                options=options,
            )

        chosen = run_solver(select.solver, gradient if select.solver == "policy_gradient" else None)
        beside = None
        if select.compare_steps and select.solver != "policy_gradient":
            beside = run_solver("policy_gradient", replace(gradient, steps=select.compare_steps))
        selected = np.zeros(len(ids), dtype=bool)
        selected[chosen.indices] = True
        rows = pa.table(
            {
                "shard": table["shard"],
                "ordinal": table["ordinal"],
                "doc_id": table["doc_id"],
                "selected": selected,
                "score": chosen.scores,
                "rank": chosen.rank,
                "split": np.full(len(ids), split, dtype=np.int32),
                "reason": pa.nulls(len(ids), pa.string()),
                "kept_id": pa.nulls(len(ids), pa.string()),
                "similarity": pa.nulls(len(ids), pa.float64()),
            },
            schema=_RESULT,
        ).sort_by([("shard", "ascending"), ("ordinal", "ascending")])
    with table_file(result, _RESULT) as writer:
        writer.write(rows)
    write_json(facts, _split_facts(split, len(ids), chosen, beside))


def _split_facts(split: int, documents: int, chosen: Selection, beside: Selection | None) -> dict[str, Any]:
    """What is published of a solved split: values, certificate, trajectories; no times."""
    facts: dict[str, Any] = {
        "split": split,
        "documents": documents,
        "kept": len(chosen.indices),
        "value": chosen.value,
        "quality": chosen.quality,
        "quality_raw": chosen.quality_raw,
        "diversity": chosen.diversity,
        "certificate": chosen.certificate.as_dict(),
        "mean_vector": chosen.mean_vector.tolist(),
        "passes": chosen.passes,
        "trajectories": {chosen.solver: _points(chosen)},
    }
    if beside is not None:
        facts["beside"] = {
            "solver": beside.solver,
            "value": beside.value,
            "gap": beside.certificate.gap,
            "share": beside.certificate.share,
        }
        facts["trajectories"][beside.solver] = _points(beside)
    return facts


def _points(selection: Selection) -> list[dict[str, Any]]:
    every = max(1, len(selection.trajectory) // _POINTS_IN_FIGURE)
    return [
        {
            "step": point["step"],
            "value": point.get("mask_value", point["value"]),
            **({"bound": point["bound"]} if "bound" in point else {}),
            **({"note": point["note"]} if point.get("note") else {}),
        }
        for k, point in enumerate(selection.trajectory)
        if k % every == 0 or k == len(selection.trajectory) - 1
    ]


def _write_masks(
    run: Run,
    generation: Generation,
    embedded: Published,
    total: int,
    solved: list[tuple[Path, Path]],
    snapshot: str,
) -> list[ShardRecord]:
    results = [result for result, _ in solved]
    numbers = {shard: number for number, shard in enumerate(embedded.shards)}
    gathered = shuffle.Gather(results)

    def kernel(table: pa.Table) -> tuple[pa.Table, int, dict[str, int]]:
        kept = pa.compute.sum(table["selected"]).as_py() or 0
        return table.cast(MASKS), len(table), {"kept": kept, "not_selected": len(table) - kept}

    return map_shards(
        generation,
        embedded.shards,
        lambda shard: gathered.shard(numbers[shard], MASKS.names),
        lambda: kernel,
        MASKS,
        ext=".parquet",
        total_rows=total,
        progress=run.progress(STAGES["datamask_masks"], snapshot),
    )


def _facts(
    select: SelectSettings,
    pool: _Pool,
    budget: Budget,
    constants: tuple[float, float] | None,
    splits: list[dict[str, Any]],
) -> dict[str, Any]:
    """The snapshot's figures: those of its one split, or of the union of its splits."""
    kept = [split for split in splits if split["kept"]]
    facts: dict[str, Any] = {
        "n": budget.n,
        "budget": budget.asked,
        "kept": budget.met,
        "short_by": budget.short_by,
        "pool": budget.pool,
        "splits": len(splits),
        "lambda": select.lambda_,
        "scale": select.scale,
        "constants": list(constants) if constants else None,
        "solver": select.solver,
        "seed": select.seed,
        "trajectories": splits[0]["trajectories"],
        "beside": splits[0].get("beside"),
    }
    if len(splits) == 1:
        return facts | {
            name: splits[0][name] for name in ("value", "quality", "quality_raw", "diversity", "certificate", "passes")
        }
    if not kept:
        feasible = {"documents": budget.pool, "budget": 0, "lambda": select.lambda_, "scale": select.scale}
        names = ("value", "quality", "quality_raw", "diversity")
        return facts | {
            **{name: splits[0][name] for name in names},
            "passes": 0.0,
            "certificate": {**splits[0]["certificate"], "feasible_set": feasible},
        }
    weights = [split["kept"] / budget.met for split in kept]
    facts["split_gaps_weighted"] = math.fsum(
        w * split["certificate"]["gap"] for w, split in zip(weights, kept, strict=True)
    )
    facts["passes"] = math.fsum(split["passes"] * split["documents"] / budget.pool for split in splits)
    facts["quality_raw"] = _mean(kept, weights, "quality_raw")
    if select.scale not in ("minmax", "raw"):
        why = f"scale {select.scale} differs between splits, so their union has no one objective"
        return facts | {
            "value": None,
            "quality": None,
            "diversity": None,
            "certificate": {"upper_bound": None, "gap": None, "share": None, "reason": why},
        }
    return facts | _union(select, pool, budget, constants, kept, weights)


def _mean(kept: list[dict[str, Any]], weights: list[float], name: str) -> float | None:
    if any(split[name] is None for split in kept):
        return None
    return math.fsum(w * split[name] for w, split in zip(weights, kept, strict=True))


def _union(
    select: SelectSettings,
    pool: _Pool,
    budget: Budget,
    constants: tuple[float, float] | None,
    kept: list[dict[str, Any]],
    weights: list[float],
) -> dict[str, Any]:
    """Value and certificate of the union of the splits' masks against the snapshot as one pool."""
    mean = np.sum([w * np.array(split["mean_vector"]) for w, split in zip(weights, kept, strict=True)], axis=0)
    quality = _mean(kept, weights, "quality")
    lam = select.lambda_
    diversity = -float(mean @ mean)
    value = (1 - lam) * diversity + (lam * quality if lam and quality is not None else 0.0)
    sums = _Sums(embedding_dimension=len(mean))
    bound = union_bound(
        lambda: sums.seen(pool.blocks()), mean, lam=lam, budget=budget.met, constants=constants if lam else None
    )
    gap = bound.upper_bound - value
    start = sums.uniform_value(budget.met, lam, constants)
    gain = bound.upper_bound - start
    certificate = {
        "upper_bound": bound.upper_bound,
        "numerical_error": bound.numerical_error,
        "slack": bound.slack,
        "gap": gap,
        "share": (value - start) / gain if gain >= _NO_GAIN else None,
        "baseline": start,
        "feasible_set": {"documents": bound.rows, "budget": budget.met, "lambda": lam, "scale": select.scale},
        "reason": None,
    }
    return {"value": value, "quality": quality, "diversity": diversity, "certificate": certificate}


class _Sums:
    """Sums over the pool, taken on the way of a pass that is made anyway: what f0 is made of."""

    def __init__(self, embedding_dimension: int) -> None:
        self._total = np.zeros(embedding_dimension)
        self._quality = 0.0
        self._rows = 0

    def seen(self, blocks: Iterator[tuple[np.ndarray, np.ndarray]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for vectors, quality in blocks:
            wide = vectors.astype(np.float64)
            self._total += (wide / np.linalg.norm(wide, axis=1, keepdims=True)).sum(axis=0)
            self._quality += float(quality.sum())
            self._rows += len(vectors)
            yield vectors, quality

    def uniform_value(self, size: int, lam: float, constants: tuple[float, float] | None) -> float:
        """The expected value of a uniform mask of `size` of the documents seen."""
        quality = self._quality / self._rows
        if constants is not None:
            low, high = constants
            quality = (quality - low) / (high - low) if high > low else 0.0
        return uniform_value(self._total / self._rows, self._rows, size, lam * quality, 1 - lam)


def mask_figures(published: Published) -> dict[str, bytes]:
    """The optimisation trajectory with the bound drawn in; of the first split where there are several."""
    facts = published.facts
    if not any(facts["trajectories"].values()):
        return {}
    certificate = facts["certificate"]
    one_pool = facts["splits"] == 1
    title = f"{published.snapshot}: lambda {facts['lambda']:g}, {facts['kept']:,} of {facts['n']:,} documents"
    return {
        "optimisation trajectory and the bound": trajectory_figure(
            facts["trajectories"],
            certificate["upper_bound"] if one_pool else None,
            certificate["baseline"] if one_pool else None,
            title if one_pool else f"{title}, first split",
        )
    }
