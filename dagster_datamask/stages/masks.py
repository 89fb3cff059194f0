"""datamask_masks: the snapshot's survivors into splits, each split solved and certified, the union certified.

A split is a unit of work: its result has a completion record, so a killed run goes on at the split it was in. What a
solver or a certificate is belongs to `selection`; how splits are made to `shards.shuffle`.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dagster_datamask.reporting.figures import trajectory_figure
from dagster_datamask.selection.corpus import certify_corpus, solve_corpus
from dagster_datamask.selection.objectives import QualityDiversity, Score
from dagster_datamask.selection.policy_gradient import PolicyGradientOptions
from dagster_datamask.selection.solve import Selection, solve
from dagster_datamask.settings import SelectSettings
from dagster_datamask.shards import shuffle
from dagster_datamask.shards.engine import Reader, map_shards
from dagster_datamask.shards.generations import Generation, Published, ShardRecord
from dagster_datamask.shards.schemas import MASKS
from dagster_datamask.shards.source import Source
from dagster_datamask.shards.writer import table_file, write_json
from dagster_datamask.stages import corpus
from dagster_datamask.stages.base import STAGES, Check, Outcome, Run, fingerprints, finish
from dagster_datamask.stages.candidates import Candidates, Plan, plan_budget
from dagster_datamask.stages.classifiers import precision
from dagster_datamask.stages.embeddings import vectors_of
from dagster_datamask.stages.scores import SIDE_ROWS

_RESULT = pa.schema([("shard", pa.int32()), ("ordinal", pa.int64()), *MASKS])
# what a person looks for comes first
_FIRST = ("value", "certificate", "quality_raw", "diversity", "kept", "budget", "n", "pool")


def datamask_masks(run: Run, source: Source, snapshot: str) -> Outcome:
    """Publish the mask of one snapshot: a row for every surviving document with a vector, in the shards' order.

    S = ⌊b·n + ½⌋ of the n scored documents before pruning, or T tokens, is met from the survivors: of each split, of
    the snapshot as one pool, or as `corpus_selection_state` has it.
    Raises ValueError where the budget exceeds n or, with a threshold per snapshot, the survivors.
    """
    if run.settings.select.scope == "corpus":
        return _of_corpus(run, snapshot)
    stage = STAGES["datamask_masks"]
    inputs = run.inputs(stage, snapshot)
    scale = corpus.constants_of(inputs), corpus.further_terms(run.settings, inputs)
    keys = {**fingerprints(inputs), "precision": precision(run.accelerator)}
    with run.generation(stage, snapshot, keys) as generation:
        pool = Candidates(snapshot, inputs, run.settings.select, source, generation.work)
        solve_pool = _as_one if run.settings.select.scope == "snapshot" else _in_splits
        records, facts = solve_pool(run, generation, pool, scale)
        if scale[1]:
            facts["influence_raw"] = _mean_influence(generation, pool)
        return _finish(generation, records, facts)


def _finish(generation: Generation, records: list[ShardRecord], facts: dict[str, Any]) -> Outcome:
    facts = {name: facts[name] for name in _FIRST} | facts
    kept = sum(record.counts.get("kept", 0) for record in records)
    amount = facts["kept"] if facts["tokens"] is None else facts["tokens"]
    exact = Check(
        "budget_met_exactly",
        kept == facts["kept"] and corpus.met(facts["budget"] - facts["short_by"], amount, facts["slack"]),
        True,
        {"asked": facts["budget"], "kept": kept, "pool": facts["pool"], "unit": facts["unit"], "met": amount},
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
        expected_rows=facts["documents"],
        figures=mask_figures,
        checks=(exact, certified),
    )


# quality's frozen constants, and the further terms of the objective
Scale = tuple[tuple[float, float] | None, corpus.Further]


def _mean_influence(generation: Generation, pool: Candidates) -> float | None:
    """The mean predicted influence of what the masks keep."""
    total, kept = 0.0, 0
    for shard in pool.shards:
        selected, at = _marks(generation, shard), 0
        # a published sum: its parts stay as they are, whatever else is read at once
        for table in pool.counted(shard, SIDE_ROWS):
            values = table["influence"].to_numpy()[selected[at : at + len(table)]]
            total, kept, at = total + float(values.sum()), kept + values.size, at + len(table)
    return total / kept if kept else None


def _common(run: Run, scale: Scale) -> dict[str, Any]:
    select, (constants, further) = run.settings.select, scale
    return {
        "lambda": select.lambda_,
        "objective": select.objective,
        "scale": select.scale,
        "constants": list(constants) if constants else None,
        "scores": {name: term.weight for name, term in further.items()},
        "solver": select.solver,
        "scope": select.scope,
        "seed": select.seed,
        "beside": None,
    }


def _of_corpus(run: Run, snapshot: str) -> Outcome:
    """The snapshot's part of corpus_selection_state, ranked within the snapshot; the certificate is the corpus's."""
    stage = STAGES["datamask_masks"]
    inputs = run.inputs(stage, snapshot, stage.inputs)
    state, entry, round_ = corpus.part_of(run, snapshot, inputs)
    frozen = run.inputs(STAGES[corpus.STATE], None)
    scale = corpus.constants_of(frozen), corpus.further_terms(run.settings, frozen)
    keys = {**fingerprints(inputs), corpus.STATE: corpus.part_identity(snapshot, entry)}
    with run.generation(stage, snapshot, keys) as generation:
        records = _write_one_pool(
            run,
            generation,
            snapshot,
            inputs["e5_embeddings"].shards,
            entry["documents"],
            lambda shard: corpus.mask_shard(state, snapshot, shard),
        )
        alone = ("value", "quality", "quality_raw", "diversity")
        in_corpus = ("n", "pool", "budget", "short_by", "amount", "given")
        facts = {
            **{name: round_[name] for name in (*corpus.WORTH, "unit", "passes", "trajectories", "certificate")},
            **_common(run, scale),
            **{name: entry[name] for name in ("n", "documents", "kept", "tokens")},
            "pool": entry["pool"],
            "budget": entry["amount"],
            "short_by": 0,
            "slack": 0,
            "splits": 1,
            "snapshot_alone": {name: entry[name] for name in alone},
            "corpus": {**{name: round_[name] for name in in_corpus}, "snapshots": len(round_["covers"])},
            "quotas": None,
            "redistributed": None,
        }
        return _finish(generation, records, facts)


def _as_one(
    run: Run, generation: Generation, pool: Candidates, scale: Scale
) -> tuple[list[ShardRecord], dict[str, Any]]:
    """The snapshot solved as one pool, whose shards never sit in memory together."""
    plan = plan_budget(run.settings.select, pool.census())
    summary = generation.folder / "facts.json"
    shards = corpus.new_corpus(generation.work / "corpus", run.settings, *scale)
    missing = [shard for shard in pool.shards if generation.record(shard, ".parquet") is None]
    if missing or not summary.exists():
        corpus.add_shards(shards, pool, plan, run)
    if not summary.exists():
        told = corpus.told_every(run, f"datamask_masks {pool.snapshot}")
        solved = solve_corpus(
            shards,
            plan.amounts,
            progress=told,
            compute=run.compute,
            requests=run.requests(STAGES["datamask_masks"]),
            log=run.log,
        )
        held, largest = corpus.kept_of(shards, pool, plan)
        facts = {
            **corpus.worth_of(solved, "snapshot"),
            **_common(run, scale),
            **plan.facts(held),
            "documents": shards.n,
            "kept": solved.evaluation.documents,
            "tokens": solved.evaluation.tokens if plan.unit == "tokens" else None,
            "slack": plan.slack(largest),
            "splits": 1,
        }
        write_json(summary, facts)
        generation.keep(summary.name)
    stored = json.loads(summary.read_text("utf-8"))
    records = _write_one_pool(
        run,
        generation,
        pool.snapshot,
        pool.shards,
        stored["documents"],
        lambda shard: corpus.masked(shards, pool, shard),
    )
    return records, stored


def _write_one_pool(
    run: Run,
    generation: Generation,
    snapshot: str,
    shards: Sequence[str],
    documents: int,
    scored: Reader,
) -> list[ShardRecord]:
    """The masks of a snapshot without splits. scored(shard) yields `doc_id, selected, score`."""
    ranks: dict[str, np.ndarray] = {}

    def read(shard: str) -> Iterator[pa.Table]:
        if not ranks:
            tied_with = snapshot if run.settings.select.scope == "corpus" else None
            ranks.update(corpus.ranked(generation.work, shards, scored, tied_with))
        at = 0
        for table in scored(shard):
            rows = len(table)
            columns = {name: table[name] for name in table.column_names} | {
                "rank": ranks[shard][at : at + rows],
                "split": np.zeros(rows, np.int32),
                "reason": pa.nulls(rows, pa.string()),
                "kept_id": pa.nulls(rows, pa.string()),
                "similarity": pa.nulls(rows, pa.float64()),
            }
            yield pa.table(columns, schema=MASKS)
            at += rows

    return _write_masks(run, generation, snapshot, shards, documents, read)


def _write_masks(
    run: Run,
    generation: Generation,
    snapshot: str,
    shards: Sequence[str],
    documents: int,
    read: Reader,
) -> list[ShardRecord]:
    def kernel(table: pa.Table) -> tuple[pa.Table, int, dict[str, int]]:
        kept = pa.compute.sum(table["selected"]).as_py() or 0
        return table.cast(MASKS), len(table), {"kept": kept, "not_selected": len(table) - kept}

    # in this process: masks lie in this machine's scratch or memory, and are only to be put in order
    return map_shards(
        generation,
        shards,
        read,
        lambda: kernel,
        MASKS,
        ext=".parquet",
        total_rows=documents,
        progress=run.progress(STAGES["datamask_masks"], snapshot),
    )


def _in_splits(
    run: Run, generation: Generation, pool: Candidates, scale: Scale
) -> tuple[list[ShardRecord], dict[str, Any]]:
    """The snapshot in random splits, each solved in memory; their union certified as one pool where that can be."""
    splits = _plan_splits(generation, pool, run.settings.select)
    census = pool.census(splits)
    plan = plan_budget(run.settings.select, census)
    solved = _solve_splits(run, generation, pool, splits, plan, plan.shares(census), scale)
    gathered = shuffle.Gather([result for result, _ in solved])
    numbers = {shard: number for number, shard in enumerate(pool.shards)}
    records = _write_masks(
        run,
        generation,
        pool.snapshot,
        pool.shards,
        sum(splits.sizes),
        lambda shard: gathered.shard(numbers[shard], MASKS.names),
    )
    summary = generation.folder / "facts.json"
    if not summary.exists():
        each = [json.loads(path.read_text("utf-8")) for _, path in solved]
        write_json(summary, _facts(run, generation, pool, plan, scale, each))
    return records, json.loads(summary.read_text("utf-8"))


def _plan_splits(generation: Generation, pool: Candidates, select: SelectSettings) -> shuffle.Splits:
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
    pool: Candidates,
    splits: shuffle.Splits,
    plan: Plan,
    amounts: list[tuple[int, ...]],
    scale: Scale,
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
    schema = pa.schema([("shard", pa.int32()), ("ordinal", pa.int64()), *pool.schema])
    paths = shuffle.scatter(generation.work, schema, splits, lambda: _numbered(pool, schema))
    for k, (path, (result, facts)) in enumerate(zip(paths, files, strict=True)):
        if not done[k]:
            run.log(
                f"datamask_masks {pool.snapshot}: split {k + 1} of {len(paths)}, {sum(amounts[k]):,} {plan.unit} of "
                f"{splits.sizes[k]:,} documents"
            )
            with pa.memory_map(str(path)) as file:
                table = pa.ipc.open_file(file).read_all()
                _solve_split(run, pool.snapshot, table, k, plan, amounts[k], scale, result, facts)
            generation.keep("splits")
        path.unlink()
    return files


def _numbered(pool: Candidates, schema: pa.Schema) -> Iterator[pa.Table]:
    """The candidates with their shard's number and their place among its candidates."""
    for number, shard in enumerate(pool.shards):
        ordinal = 0
        for table in pool.batches(shard):
            rows = len(table)
            columns = {"shard": np.full(rows, number, np.int32), "ordinal": np.arange(ordinal, ordinal + rows)}
            yield pa.table({**columns, **{name: table[name] for name in pool.schema.names}}, schema=schema)
            ordinal += rows


def _solve_split(
    run: Run,
    snapshot: str,
    table: pa.Table,
    split: int,
    plan: Plan,
    amounts: tuple[int, ...],
    scale: Scale,
    result: Path,
    facts: Path,
) -> None:
    select = run.settings.select
    ids = table["doc_id"].to_pylist()
    (constants, further), values_of = scale, corpus.further_scores(table)
    objective = QualityDiversity(
        vectors_of(table),
        table["quality"].to_numpy(),
        select.lambda_,
        select.scale,
        constants if select.scale == "minmax" else None,
        select.diversity,
        {name: Score(values, further[name].weight, further[name].constants) for name, values in values_of.items()},
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
        return solve(
            objective,
            plan.budget(amounts, table),
            solver=solver,
            seed=select.seed,
            split=split,
            ids=ids,
            accelerator=run.accelerator,
            progress=corpus.told_every(run, f"datamask_masks {snapshot}: split {split + 1}, {solver}", "steps"),
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
            **_near_duplicates(table["doc_id"].combine_chunks(), chosen),
        },
        schema=_RESULT,
    ).sort_by([("shard", "ascending"), ("ordinal", "ascending")])
    with table_file(result, _RESULT) as writer:
        writer.write(rows)
    counts = table["tokens"].to_numpy()
    slack = plan.slack(int(counts.max(initial=1)))
    write_json(facts, _split_facts(split, len(ids), chosen, beside, slack))


def _near_duplicates(ids: pa.Array, chosen: Selection) -> dict[str, pa.Array]:
    """Which document was kept instead of each near-duplicate, and how alike the two are."""
    if chosen.kept is None or chosen.similarity is None:
        empty = np.ones(len(ids), dtype=bool)
        kept, similarity = np.zeros(len(ids), np.int64), np.zeros(len(ids))
    else:
        kept, similarity = chosen.kept, chosen.similarity
        empty = kept < 0
    return {
        "reason": pa.array(["near_duplicate"] * len(ids), pa.string(), mask=empty),
        "kept_id": ids.take(pa.array(kept, mask=empty)),
        "similarity": pa.array(similarity, mask=empty),
    }


def _split_facts(split: int, documents: int, chosen: Selection, beside: Selection | None, slack: int) -> dict[str, Any]:
    """What is published of a solved split: values, certificate, trajectories; no times."""
    facts: dict[str, Any] = {
        "split": split,
        "documents": documents,
        "kept": len(chosen.indices),
        "tokens": chosen.tokens,
        "slack": slack,
        "value": chosen.value,
        "quality": chosen.quality,
        "quality_raw": chosen.quality_raw,
        "diversity": chosen.diversity,
        "metrics": chosen.metrics,
        "facts": chosen.facts,
        "certificate": corpus.certified_in("split", chosen.certificate.as_dict()),
        "passes": chosen.passes,
        "trajectories": {chosen.solver: corpus.points(chosen.trajectory)},
    }
    if beside is not None:
        facts["beside"] = {
            "solver": beside.solver,
            "value": beside.value,
            "gap": beside.certificate.gap,
            "share": beside.certificate.share,
        }
        facts["trajectories"][beside.solver] = corpus.points(beside.trajectory)
    return facts


def _facts(
    run: Run,
    generation: Generation,
    pool: Candidates,
    plan: Plan,
    scale: Scale,
    splits: list[dict[str, Any]],
) -> dict[str, Any]:
    """The snapshot's figures: those of its one split, or of the union of its splits."""
    select = run.settings.select
    kept = [split for split in splits if split["kept"]]
    tokens = sum(split["tokens"] for split in splits) if plan.unit == "tokens" else None
    held = _held(generation, pool, plan)
    facts: dict[str, Any] = {
        **plan.facts(held),
        **_common(run, scale),
        "documents": sum(split["documents"] for split in splits),
        "kept": sum(split["kept"] for split in splits),
        "tokens": tokens,
        "slack": sum(split["slack"] for split in splits),
        "splits": len(splits),
        "trajectories": splits[0]["trajectories"],
        "beside": splits[0].get("beside"),
        "solver_facts": splits[0]["facts"] if len(splits) == 1 else {},
    }
    worth = ("value", "quality", "quality_raw", "diversity", "metrics")
    if len(splits) == 1:
        return facts | {name: splits[0][name] for name in (*worth, "certificate", "passes")}
    if not kept:
        feasible = {**splits[0]["certificate"]["feasible_set"], "documents": facts["documents"]}
        return facts | {
            **{name: splits[0][name] for name in worth},
            "passes": 0.0,
            "certificate": {**splits[0]["certificate"], "feasible_set": feasible},
        }
    amounts = [split["kept"] if split["tokens"] is None else split["tokens"] for split in kept]
    weights = [amount / sum(amounts) for amount in amounts]
    gaps = [split["certificate"]["gap"] for split in kept]
    facts["split_gaps_weighted"] = (
        None if None in gaps else math.fsum(w * gap for w, gap in zip(weights, gaps, strict=True))
    )
    facts["passes"] = math.fsum(split["passes"] * split["documents"] for split in splits) / facts["documents"]
    if select.is_pws and select.scale in ("minmax", "raw"):
        return facts | _union(run, generation, pool, plan, held, scale)
    why = f"scale {select.scale} differs between splits, so their union has no one objective"
    if not select.is_pws:
        why = f"objective {select.objective} is valued within a split alone; the certificates are those of the splits"
    raw = [split["quality_raw"] for split in kept]
    return facts | {
        **dict.fromkeys(worth),
        "quality_raw": None if None in raw else math.fsum(w * q for w, q in zip(weights, raw, strict=True)),
        "certificate": corpus.uncertified(why),
    }


def _marks(generation: Generation, shard: str) -> np.ndarray:
    """bool[k]: which candidates of a shard are in its published mask."""
    column = pq.read_table(generation.path(shard, ".parquet"), columns=["selected"])["selected"]
    return np.asarray(column.to_numpy())


def _held(generation: Generation, pool: Candidates, plan: Plan) -> np.ndarray:
    """int64[G]: what the masks hold of each group."""
    held = np.zeros(len(plan.groups), np.int64)
    for shard in pool.shards:
        selected, at = _marks(generation, shard), 0
        for table in pool.counted(shard):
            held += plan.held(table, selected[at : at + len(table)])
            at += len(table)
    return held


def _union(
    run: Run,
    generation: Generation,
    pool: Candidates,
    plan: Plan,
    held: np.ndarray,
    scale: Scale,
) -> dict[str, Any]:
    """Value and certificate of the union of the splits' masks, which hold `held`, against the snapshot as one pool."""
    shards = corpus.new_corpus(generation.work / "corpus", run.settings, *scale)
    corpus.add_shards(shards, pool, plan)
    for shard in pool.shards:
        shards.mark(corpus.flat_name(pool.snapshot, shard), _marks(generation, shard))
    # every split may fall short by a document's tokens: the bound is for what the union holds
    evaluation, certificate = certify_corpus(shards, shards.passes(held.tolist()))
    return {
        "value": evaluation.value,
        "quality": evaluation.quality,
        "quality_raw": evaluation.quality_raw,
        "diversity": evaluation.diversity,
        "metrics": evaluation.metrics,
        "certificate": corpus.certified_in("snapshot", certificate.as_dict()),
    }


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
