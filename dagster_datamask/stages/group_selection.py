"""stage_n/group_mates_selection and group_mates_selection: what a Group-MATES stage chooses of a snapshot, and all do.

Here: a snapshot's scored documents into splits, each chosen from in memory cluster by cluster, and the stages' choices
as one mask. Not here: the greedy and its controls (`influence.selection`), clusters and scores (`stages.influence`).

A document is chosen once: a stage chooses from what the stages before it left, and has its part of select.budget. As
with datamask_masks a snapshot is chosen from in random splits of select.split documents, whose results have completion
records, so a killed run goes on at the split it was in; with select.scope = snapshot it is one split.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from dagster_datamask.influence.selection import (
    Picks,
    budgets,
    fill_clusters,
    fill_clusters_individually,
    gumbel_top_k,
    individual,
    individual_in_clusters,
    select_in_clusters,
    token_budgets,
)
from dagster_datamask.keyed import hash64
from dagster_datamask.selection.budgets import largest_remainder
from dagster_datamask.selection.vectors import nearest
from dagster_datamask.settings import GroupMatesSettings, SettingsError
from dagster_datamask.shards import shuffle
from dagster_datamask.shards.cursor import Cursor, read_batches
from dagster_datamask.shards.engine import Counts, map_shards
from dagster_datamask.shards.generations import Generation, Published
from dagster_datamask.shards.schemas import MASKS
from dagster_datamask.shards.source import Source
from dagster_datamask.shards.writer import table_file, write_json
from dagster_datamask.stages import corpus
from dagster_datamask.stages.base import STAGES, Check, Outcome, Run, fingerprints, finish
from dagster_datamask.stages.candidates import Candidates, Plan, plan_budget
from dagster_datamask.stages.embeddings import vectors_of
from dagster_datamask.stages.influence import candidates_of, read_clusters
from dagster_datamask.stages.scores import SIDE_ROWS

CHOSEN = pa.schema([*MASKS, ("cluster", pa.int32())])
_RESULT = pa.schema([("shard", pa.int32()), ("ordinal", pa.int64()), *CHOSEN])
# a place in the order of one stage's choice is below this
_PLACES = 2**40


def stage_selection(run: Run, source: Source, snapshot: str, number: int) -> Outcome:
    """Publish the stage's choice: a row for every document that can be chosen, in the shards' order.

    Mask columns and the cluster; score is the influence predicted at the pick (f for what was not picked), rank the
    place within its split, and what an earlier stage chose has neither. The stage's part of the budget is an equal
    share by largest remainder, of documents or of tokens.

    Raises SettingsError where the budget is a number for the corpus: a stage chooses of each snapshot by itself.
    """
    stage = STAGES[f"stage_{number}/group_mates_selection"]
    select = run.settings.select
    if select.scope == "corpus" and not select.budget.strip().endswith("%"):
        raise SettingsError(
            f"select.budget = {select.budget} is for the corpus, and {stage.name} chooses each snapshot by itself; "
            "take a share ('10%')"
        )
    inputs = run.inputs(stage, snapshot)
    with run.generation(stage, snapshot, fingerprints(inputs)) as generation:
        pool = candidates_of(run, snapshot, inputs, source, generation.work)
        choice = _Choice(run, generation, pool, inputs, number)
        solved = choice.splits()
        gathered = shuffle.Gather([result for result, _ in solved])
        numbers = {shard: k for k, shard in enumerate(pool.shards)}
        # in this process: what was chosen lies in this machine's scratch, and is only to be put in order
        records = map_shards(
            generation,
            pool.shards,
            lambda shard: gathered.shard(numbers[shard], CHOSEN.names),
            lambda: _account,
            CHOSEN,
            ext=".parquet",
            total_rows=inputs[f"stage_{number}/influence_scores"].rows,
            progress=run.progress(stage, snapshot),
        )
        facts = choice.facts([json.loads(path.read_text("utf-8")) for _, path in solved])
        kept = sum(record.counts.get("kept", 0) for record in records)
        amount = facts["kept"] if facts["tokens"] is None else facts["tokens"]
        met = Check(
            "budget_met_exactly",
            kept == facts["kept"] and corpus.met(facts["stage_budget"], amount, facts["slack"]),
            True,
            {"asked": facts["stage_budget"], "met": amount, "unit": facts["unit"], "kept": kept},
        )
        return finish(
            generation,
            records,
            ".parquet",
            facts=facts,
            expected_rows=inputs[f"stage_{number}/influence_scores"].rows,
            checks=(met,),
        )


def _account(table: pa.Table) -> tuple[pa.Table, int, Counts]:
    kept = pa.compute.sum(table["selected"]).as_py() or 0
    before = len(table) - table["reason"].null_count
    return table, len(table), {"kept": kept, "chosen_before": before, "not_selected": len(table) - kept - before}


class _Choice:
    """One stage's choice of one snapshot."""

    def __init__(
        self, run: Run, generation: Generation, pool: Candidates, inputs: dict[str, Published], number: int
    ) -> None:
        self._run, self._generation, self._pool, self._number = run, generation, pool, number
        self._scores = inputs[f"stage_{number}/influence_scores"]
        self._fitted = inputs[f"stage_{number}/influence_model"]
        self._earlier = {m: inputs[f"stage_{m}/group_mates_selection"] for m in range(1, number)}
        self._asked: GroupMatesSettings = run.settings.group_mates
        self._plan: Plan = plan_budget(run.settings.select, pool.census())
        self._schema = pa.schema(
            [
                *(("shard", pa.int32()), ("ordinal", pa.int64()), ("doc_id", pa.string())),
                *(("quality", pa.float64()), ("tokens", pa.int64()), ("stage", pa.int32())),
                *(("influence", pa.float64()), ("embedding", pa.list_(pa.float16(), self._scores.facts["width"]))),
            ]
        )

    def splits(self) -> list[tuple[Path, Path]]:
        """(result, facts) files of every split, computing those that are missing."""
        folder = self._generation.folder / "splits"
        planned, shares = self._planned(folder)
        files = [(folder / f"{k:05d}.parquet", folder / f"{k:05d}.json") for k in range(len(shares))]
        missing = [k for k, (result, facts) in enumerate(files) if not (result.exists() and facts.exists())]
        if not missing:
            return files
        largest, width = max(planned.sizes), self._scores.facts["width"]
        smaller = "set select.scope = split" if self._whole else "lower select.split"
        # the split as stored and, cluster by cluster, in float32
        self._run.accelerator.plan(f"a split of {largest:,} influence vectors", largest * width * (2 + 4), smaller)
        centroids = read_clusters(self._fitted)
        paths = shuffle.scatter(self._generation.work, self._schema, planned, self._rows)
        for k, path in enumerate(paths):
            if k in missing:
                self._run.log(
                    f"{self._generation.asset} {self._pool.snapshot}: split {k + 1} of {len(paths)}, {shares[k]:,} "
                    f"{self._plan.unit} of {planned.sizes[k]:,} documents"
                )
                with pa.memory_map(str(path)) as file:
                    self._choose(pa.ipc.open_file(file).read_all(), k, shares[k], centroids, *files[k])
                self._generation.keep("splits")
            path.unlink()
        return files

    def _planned(self, folder: Path) -> tuple[shuffle.Splits, list[int]]:
        """The splits, and what each is to give of the stage's part of the budget; planned once, by two passes."""
        path = folder / "plan.json"
        if not path.exists():
            folder.mkdir(exist_ok=True)
            most = sys.maxsize if self._whole else self._run.settings.select.split
            planned = shuffle.plan(self._pool.ids(), most, self._asked.seed)
            held = [0] * len(planned.sizes)
            for table in self._rows():
                left = table.filter(pa.compute.equal(table["stage"], 0))
                costs = left["tokens"].to_numpy() if self._plan.unit == "tokens" else None
                counted = np.bincount(planned.of(left["doc_id"].to_pylist()), weights=costs, minlength=len(held))
                held = [there + int(more) for there, more in zip(held, counted.tolist(), strict=True)]
            budget = min(largest_remainder(self._plan.met, [1] * self._asked.stages)[self._number - 1], sum(held))
            write_json(
                path,
                {
                    "seed": planned.seed,
                    "edges": planned.edges,
                    "sizes": planned.sizes,
                    "shares": largest_remainder(budget, held, held),
                },
            )
        found = json.loads(path.read_text("utf-8"))
        return shuffle.Splits(found["seed"], tuple(found["edges"]), tuple(found["sizes"])), found["shares"]

    def _rows(self) -> Iterator[pa.Table]:
        """The documents with their scores and, where one chose them already, the stage that did."""
        for number, shard in enumerate(self._pool.shards):
            scores = Cursor(self._scores.path(shard), None, SIDE_ROWS)
            chosen = {m: Cursor(p.path(shard), ["doc_id", "selected"], SIDE_ROWS) for m, p in self._earlier.items()}
            ordinal = 0
            for table in self._pool.counted(shard):
                ids, rows = table["doc_id"].combine_chunks(), len(table)
                found = scores.take_all(ids)
                stage = np.zeros(rows, np.int32)
                for m, cursor in chosen.items():
                    stage[cursor.take_all(ids)["selected"].to_numpy()] = m
                columns = {
                    "shard": np.full(rows, number, np.int32),
                    "ordinal": np.arange(ordinal, ordinal + rows),
                    **{name: table[name] for name in ("doc_id", "quality", "tokens")},
                    "stage": stage,
                    **{name: found[name] for name in ("influence", "embedding")},
                }
                yield pa.table(columns, schema=self._schema)
                ordinal += rows
            for cursor in (scores, *chosen.values()):
                cursor.end()

    def _choose(
        self, table: pa.Table, split: int, amount: int, centroids: np.ndarray, result: Path, facts: Path
    ) -> None:
        stage = table["stage"].to_numpy()
        left = np.flatnonzero(stage == 0)
        there = table.take(pa.array(left)) if left.size < len(table) else table
        ids: list[str] = there["doc_id"].to_pylist()
        h, f = vectors_of(there), there["influence"].to_numpy()
        labels, _ = nearest(h, centroids)
        costs = there["tokens"].to_numpy() if self._plan.unit == "tokens" else None
        picks = self._filled(h, f, labels, amount, ids, costs)
        order = _order(picks.rows, f, ids)
        selected, scores, places = (np.zeros(len(ids), kind) for kind in (bool, np.float64, np.int64))
        selected[picks.rows] = True
        scores[:] = f
        scores[picks.rows] = picks.scores
        places[order] = np.arange(1, len(ids) + 1)
        rows = pa.table(
            {
                **{name: table[name] for name in ("shard", "ordinal", "doc_id")},
                "selected": _spread(selected, left, len(table)).fill_null(False),
                "score": _spread(scores, left, len(table)),
                "rank": _spread(places, left, len(table)),
                "split": np.full(len(table), split, np.int32),
                "reason": pa.array([f"chosen in stage {m}" if m else None for m in stage.tolist()], pa.string()),
                "kept_id": pa.nulls(len(table), pa.string()),
                "similarity": pa.nulls(len(table), pa.float64()),
                "cluster": _spread(labels.astype(np.int32), left, len(table)),
            },
            schema=_RESULT,
        ).sort_by([("shard", "ascending"), ("ordinal", "ascending")])
        with table_file(result, _RESULT) as writer:
            writer.write(rows)
        quality = there["quality"].to_numpy()
        write_json(
            facts,
            {
                "documents": len(ids),
                "kept": len(picks.rows),
                "tokens": None if costs is None else int(costs[picks.rows].sum()),
                "slack": 0 if costs is None else int(costs.max(initial=1)),
                "quality": float(quality[picks.rows].sum()),
                "influence": float(f[picks.rows].sum()),
                "influence_of_pool": float(f.sum()),
                "clusters_used": np.unique(picks.clusters).size if self._in_clusters else None,
                **self._controls(picks, f, labels, ids),
            },
        )

    @property
    def _whole(self) -> bool:
        """Whether the snapshot is chosen from as one."""
        return self._run.settings.select.scope == "snapshot"

    @property
    def _in_clusters(self) -> bool:
        return self._asked.method in ("relational", "individual_in_clusters")

    def _filled(
        self, h: np.ndarray, f: np.ndarray, labels: np.ndarray, amount: int, ids: list[str], costs: np.ndarray | None
    ) -> Picks:
        """The choice of `amount` documents; of tokens, as many documents as fit in the order they are chosen in, in
        each cluster as far as its budget goes."""
        if costs is None:
            return self._chosen(h, f, labels, amount, ids)
        asked, alpha, beta = self._asked, self._fitted.facts["alpha"], self._fitted.facts["beta"]
        if self._has_budgets:
            shares = token_budgets(f, labels, amount, costs, ids=ids, rule=self._rule)
            if asked.method == "individual_in_clusters":
                return fill_clusters_individually(f, labels, shares, costs, ids=ids)
            return fill_clusters(h, f, labels, shares, costs, alpha=alpha, beta=beta, ids=ids)
        most = min(len(ids), math.ceil(1.05 * amount / max(1.0, costs.mean()))) if len(ids) else 0
        while True:
            picks = self._chosen(h, f, labels, most, ids)
            if most == len(ids) or costs[picks.rows].sum() >= amount:
                break
            most = min(len(ids), 2 * most + 1)
        fits = fitting(costs[picks.rows], amount)
        return Picks(picks.rows[fits], picks.scores[fits], picks.ranks[fits], picks.clusters[fits])

    def _chosen(self, h: np.ndarray, f: np.ndarray, labels: np.ndarray, n: int, ids: list[str]) -> Picks:
        asked = self._asked
        if asked.method == "individual":
            return individual(f, n, ids=ids)
        if asked.method == "gumbel":
            return gumbel_top_k(f, n, tau=asked.tau, ids=ids, seed=asked.seed)
        if asked.method == "individual_in_clusters":
            return individual_in_clusters(f, labels, budgets(f, labels, n, ids=ids, rule=self._rule), ids=ids)
        alpha, beta = self._fitted.facts["alpha"], self._fitted.facts["beta"]
        return select_in_clusters(h, f, labels, n, alpha=alpha, beta=beta, ids=ids, rule=asked.budgets)

    @property
    def _has_budgets(self) -> bool:
        """Whether each cluster has a budget of its own; one merge of all has none."""
        return self._in_clusters and (self._asked.method != "relational" or self._asked.budgets != "global")

    @property
    def _rule(self) -> Literal["proportional", "influence"]:
        # a merge of clusters by f alone takes the lowest f there are
        return "proportional" if self._asked.budgets == "proportional" else "influence"

    def _controls(self, picks: Picks, f: np.ndarray, labels: np.ndarray, ids: list[str]) -> dict[str, int]:
        """How many of the picks the individual selections would have picked as well: of the whole split, and of the
        same clusters with the same budgets."""
        n = len(picks.rows)
        plain = individual(f, n, ids=ids)
        amounts = np.bincount(labels[picks.rows], minlength=int(labels.max(initial=0)) + 1).tolist()
        inside = individual_in_clusters(f, labels, amounts, ids=ids)
        return {
            "as_individual": np.intersect1d(picks.rows, plain.rows).size,
            "as_individual_in_clusters": np.intersect1d(picks.rows, inside.rows).size,
        }

    def facts(self, splits: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What is published of the choice."""
        plan, asked = self._plan, self._asked
        sums = {
            name: sum(split[name] for split in splits)
            for name in ("documents", "kept", "slack", "as_individual", "as_individual_in_clusters")
        }
        kept, documents = sums["kept"], sums["documents"]
        _, shares = self._planned(self._generation.folder / "splits")
        used = [split["clusters_used"] for split in splits if split["clusters_used"] is not None]

        def mean(name: str, of: int) -> float | None:
            return math.fsum(split[name] for split in splits) / of if of else None

        return {
            "stage": self._number,
            "of_stages": asked.stages,
            "method": asked.method,
            "budgets": asked.budgets if self._in_clusters else None,
            "kept": kept,
            "stage_budget": sum(shares),
            **{name: value for name, value in plan.facts(np.zeros(0)).items() if name not in ("quotas",)},
            "tokens": sum(split["tokens"] for split in splits) if plan.unit == "tokens" else None,
            "slack": sums["slack"],
            "documents": documents,
            "splits": len(splits),
            "quality_raw": mean("quality", kept),
            "influence_kept": mean("influence", kept),
            "influence_of_pool": mean("influence_of_pool", documents),
            "clusters": self._fitted.facts["clusters"],
            "clusters_used": max(used, default=None),
            "overlap_individual": sums["as_individual"] / kept if kept else None,
            "overlap_individual_in_clusters": sums["as_individual_in_clusters"] / kept if kept else None,
            **{name: self._fitted.facts[name] for name in ("alpha", "beta", "model")},
        }


def fitting(costs: np.ndarray, amount: int) -> np.ndarray:
    """int64, ascending: the places of int64 costs that are taken in order, passing over what does not fit any more."""
    ends = np.cumsum(costs)
    whole = int(np.searchsorted(ends, amount, side="right"))
    taken, room = list(range(whole)), amount - (int(ends[whole - 1]) if whole else 0)
    for k in (whole + np.flatnonzero(costs[whole:] <= room)).tolist():
        if costs[k] <= room:
            taken.append(k)
            room -= int(costs[k])
    return np.array(taken, np.int64)


def _order(picked: np.ndarray, f: np.ndarray, ids: list[str]) -> np.ndarray:
    """int64[n]: rows from the best: what was picked, in that order, then the others by influence."""
    rest = np.delete(np.arange(f.size), picked)
    ties = hash64(ids, 0, "tie")[rest]
    return np.concatenate([picked, rest[np.lexsort((ties, f[rest]))]])


def _spread(values: np.ndarray, rows: np.ndarray, n: int) -> pa.Array:
    """An array of n values, null but at `rows`."""
    empty = np.ones(n, bool)
    empty[rows] = False
    spread = np.zeros(n, values.dtype)
    spread[rows] = values
    return pa.array(spread, mask=empty)


def group_mates_selection(run: Run, snapshot: str) -> Outcome:
    """Publish what all stages chose of the snapshot as one mask.

    `split` is the stage that chose a document, for those that none did the last; score is that stage's, and rank the
    place in what it chose, those that none did behind.
    """
    stage = STAGES["group_mates_selection"]
    inputs = run.inputs(stage, snapshot)
    chosen = [inputs[f"stage_{n}/group_mates_selection"] for n in range(1, run.settings.group_mates.stages + 1)]
    last = chosen[-1]

    def read(shard: str) -> Iterator[pa.Table]:
        cursors = [Cursor(published.path(shard), None, SIDE_ROWS) for published in chosen[:-1]]
        for table in read_batches(last.path(shard), None, SIDE_ROWS):
            ids = table["doc_id"].combine_chunks()
            yield _joined([*(cursor.take_all(ids) for cursor in cursors), table])

    with run.generation(stage, snapshot, fingerprints(inputs)) as generation:
        ranks: dict[str, np.ndarray] = {}
        # places are found over all stages, which come one after another
        before = np.cumsum([0, *(published.facts["kept"] for published in chosen)])

        def ranked(shard: str) -> Iterator[pa.Table]:
            if not ranks:
                ranks.update(corpus.ranked(generation.work, last.shards, lambda name: map(_placed, read(name))))
            at = 0
            for table in read(shard):
                rows = ranks[shard][at : at + len(table)] - before[table["split"].to_numpy() - 1]
                yield table.set_column(table.schema.get_field_index("rank"), "rank", pa.array(rows))
                at += len(table)

        records = map_shards(
            generation,
            last.shards,
            ranked,
            lambda: _decided,
            MASKS,
            ext=".parquet",
            total_rows=last.rows,
            progress=run.progress(stage, snapshot),
        )
        facts = _facts_of_all([published.facts for published in chosen], run.settings.group_mates)
        kept = sum(record.counts.get("kept", 0) for record in records)
        amount = facts["kept"] if facts["tokens"] is None else facts["tokens"]
        met = Check(
            "budget_met_exactly",
            kept == facts["kept"] and corpus.met(facts["budget"] - facts["short_by"], amount, facts["slack"]),
            True,
            {"asked": facts["budget"], "kept": kept, "pool": facts["pool"], "unit": facts["unit"], "met": amount},
        )
        return finish(generation, records, ".parquet", facts=facts, expected_rows=last.rows, checks=(met,))


def _joined(tables: list[pa.Table]) -> pa.Table:
    """The stages' rows of the same documents as one: of each document those of the stage that chose it, or the last."""
    rows, stages = len(tables[0]), len(tables)
    where = np.full(rows, stages - 1)
    for n, table in enumerate(tables):
        where[table["selected"].to_numpy()] = n
    taken = pa.concat_tables(tables).take(pa.array(where * rows + np.arange(rows)))
    columns = {name: taken[name] for name in MASKS.names} | {
        "split": (where + 1).astype(np.int32),
        "reason": pa.nulls(rows, pa.string()),
    }
    return pa.table(columns, schema=MASKS)


def _placed(table: pa.Table) -> pa.Table:
    """doc_id and a score that falls from stage to stage, and in each from place to place; what was not chosen last."""
    behind = np.where(table["selected"].to_numpy(), table["split"].to_numpy(), np.iinfo(np.int32).max // 2**20)
    places = behind.astype(np.float64) * _PLACES + table["rank"].to_numpy()
    return pa.table({"doc_id": table["doc_id"], "score": -places})


def _decided(table: pa.Table) -> tuple[pa.Table, int, Counts]:
    counts = Counter("kept" if kept else "not_selected" for kept in table["selected"].to_pylist())
    return table.cast(MASKS), len(table), counts


def _facts_of_all(stages: Sequence[dict[str, Any]], asked: GroupMatesSettings) -> dict[str, Any]:
    """The selection's figures under the names that datamask_masks uses; it has no objective and so no certificate."""
    first = stages[0]
    kept = sum(stage["kept"] for stage in stages)
    weighted = [(stage["quality_raw"] or 0.0) * stage["kept"] for stage in stages]
    tokens = sum(stage["tokens"] for stage in stages) if first["unit"] == "tokens" else None
    return {
        "kept": kept,
        **{name: first[name] for name in ("budget", "n", "pool", "unit", "short_by")},
        "tokens": tokens,
        "slack": sum(stage["slack"] for stage in stages),
        "documents": first["documents"],
        "splits": max(stage["splits"] for stage in stages),
        "value": None,
        "certificate": corpus.uncertified("a selection by predicted influence has no objective that bounds it"),
        "quality_raw": math.fsum(weighted) / kept if kept else None,
        "quality": None,
        "diversity": None,
        "metrics": {},
        "lambda": None,
        "objective": None,
        "scale": None,
        "constants": None,
        "solver": asked.method,
        "scope": "split" if first["splits"] > 1 else "snapshot",
        "seed": asked.seed,
        "quotas": None,
        "redistributed": None,
        "trajectories": {},
        "beside": None,
        "passes": None,
        "by_stage": [
            {
                name: stage[name]
                for name in (
                    *("stage", "method", "kept", "stage_budget", "quality_raw", "influence_kept"),
                    *("influence_of_pool", "overlap_individual", "overlap_individual_in_clusters"),
                )
            }
            for stage in stages
        ],
    }
