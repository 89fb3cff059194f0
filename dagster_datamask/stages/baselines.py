"""The baselines: selections by one score, by chance, by deduplication, by quality or by diversity alone, at one budget.

Here: the table of them, and filling a budget in an order of documents that do not fit into memory. Not here: the scores
(`scores`), comparing documents (`near_duplicates`), the certified solver (`selection.corpus`).

All count the budget as datamask_masks does, n being the scored documents before pruning. Those by score or by chance
choose of all n, as their authors do; those by vectors choose of what datamask_masks chooses from. Quotas are not for
them.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dagster_datamask.keyed import hash64
from dagster_datamask.scoring.regression import SCALE_MAX
from dagster_datamask.selection.corpus import Corpus, solve_corpus, zeros_on_disk
from dagster_datamask.selection.semdedup import representatives
from dagster_datamask.settings import SelectSettings, Settings, SettingsError
from dagster_datamask.shards import shuffle
from dagster_datamask.shards.cursor import Cursor, read_batches
from dagster_datamask.shards.engine import Reader, map_shards
from dagster_datamask.shards.generations import Generation, Published
from dagster_datamask.shards.schemas import MASKS
from dagster_datamask.shards.source import Source
from dagster_datamask.shards.writer import table_file, write_json
from dagster_datamask.stages import corpus, gneissweb
from dagster_datamask.stages.base import STAGES, Check, Outcome, Run, Stage, fingerprints, finish
from dagster_datamask.stages.candidates import Candidates, Census, Plan, check_tokens, is_scored, plan_budget
from dagster_datamask.stages.near_duplicates import PLACE, Clusters, compared, in_place, instead, unit
from dagster_datamask.stages.scores import SIDE_ROWS

BELOW = "below the threshold"
# solvers whose order is that of a draw, whatever the score
DRAWN = ("random", "threshold")
# documents with what the order goes by: whatever does not pass has a lower priority than all that does
_ORDERED = pa.schema(
    [
        ("doc_id", pa.string()),
        ("quality", pa.float64()),
        ("tokens", pa.int64()),
        ("score", pa.float64()),
        ("passes", pa.bool_()),
        ("priority", pa.float64()),
        ("reason", pa.string()),
    ]
)
# the score of the first document of a cluster, which nothing precedes: as in `selection.semdedup`
_FIRST = 2.0


@dataclass(frozen=True, eq=False)
class Judged:
    """What a rule says of n documents: score, float64[n], NaN for none; passes, bool[n]; reason, n texts that say why a
    document does not pass, or None."""

    score: np.ndarray
    passes: np.ndarray
    reason: list[str | None]


# of the ids of scored documents and, of each side file, their rows
Judge = Callable[[pa.Array, Mapping[str, pa.Table]], Judged]


@dataclass(frozen=True)
class Work:
    """What a baseline is chosen with; `folder` is scratch space."""

    run: Run
    source: Source
    snapshot: str
    stage: Stage
    inputs: Mapping[str, Published]
    folder: Path

    @property
    def select(self) -> SelectSettings:
        """The budget alone: a snapshot by itself, without quotas."""
        return self.run.settings.select.model_copy(update={"quota": "none", "scope": "snapshot"})

    @property
    def shards(self) -> tuple[str, ...]:
        return self.inputs["pruned_documents"].shards

    def candidates(self) -> Candidates:
        return Candidates(self.snapshot, self.inputs, self.select, self.source, self.folder)


@dataclass(frozen=True, eq=False)
class Chosen:
    """A selection: what is published of it, and its rows, tables of `schemas.MASKS` by shard, in the shards' order."""

    facts: dict[str, Any]
    rows: Reader = field(repr=False)


Baseline = Callable[[Work], Chosen]


def baseline(run: Run, source: Source, snapshot: str, name: str) -> Outcome:
    """Publish the mask of a baseline of one snapshot: a row for every document that it chooses from.

    A threshold draws the budget from what passes, in the order of a hash keyed by select.seed; where too few pass, all
    are kept and `short_by` says how many are missing. `rank` is the place in the order that fills the budget.
    Raises SettingsError where the budget exceeds what there is to choose from.
    """
    stage = STAGES[name]
    select = run.settings.select
    if select.scope == "corpus" and not select.budget.strip().endswith("%"):
        raise SettingsError(
            f"select.budget = {select.budget} is for the corpus, and {name} chooses each snapshot by itself; take a "
            "share ('10%')"
        )
    inputs = run.inputs(stage, snapshot)
    keys = fingerprints(inputs) | gneissweb.content_of_categories(stage, run.settings)
    with run.generation(stage, snapshot, keys) as generation:
        summary = generation.folder / "facts.json"
        work = Work(run, source, snapshot, stage, inputs, generation.work)
        chosen = cache(lambda: BASELINES[name](work))
        if not summary.exists():
            write_json(summary, chosen().facts)
            generation.keep(summary.name)
        return _publish(run, generation, work, json.loads(summary.read_text("utf-8")), lambda s: chosen().rows(s))


def _publish(run: Run, generation: Generation, work: Work, facts: dict[str, Any], rows: Reader) -> Outcome:
    def kernel(table: pa.Table) -> tuple[pa.Table, int, dict[str, int]]:
        kept = pa.compute.sum(table["selected"]).as_py() or 0
        return table, len(table), {"kept": kept, "not_selected": len(table) - kept}

    # in this process: what was chosen lies in this machine's scratch, and is only to be put in order
    records = map_shards(
        generation,
        work.shards,
        rows,
        lambda: kernel,
        MASKS,
        ext=".parquet",
        total_rows=facts["documents"],
        progress=run.progress(work.stage, work.snapshot),
    )
    kept = sum(record.counts.get("kept", 0) for record in records)
    amount = facts["kept"] if facts["tokens"] is None else facts["tokens"]
    checks = (
        Check(
            "budget_met_exactly",
            kept == facts["kept"] and corpus.met(facts["budget"] - facts["short_by"], amount, facts["slack"]),
            True,
            {"asked": facts["budget"], "kept": kept, "pool": facts["pool"], "unit": facts["unit"], "met": amount},
        ),
        Check(
            "value_below_bound",
            facts["certificate"]["gap"] is None or facts["certificate"]["gap"] >= 0,
            True,
            {"value": facts["value"], "upper_bound": facts["certificate"]["upper_bound"]},
        ),
    )
    return finish(generation, records, ".parquet", facts=facts, expected_rows=facts["documents"], checks=checks)


def _draws(ids: list[str], seed: int, name: str) -> np.ndarray:
    """float64[n] in [0, 1), of each id under the key (seed, name)."""
    return (hash64(ids, seed, name) >> np.uint64(11)) * 2.0**-53


def of_scores(
    judge: Callable[[Work], Judge], sides: tuple[str, ...] = (), *, drawn: bool = False, solver: str = "top_k"
) -> Baseline:
    """A baseline over all scored documents: those that pass, best score first or drawn in a keyed random order.

    judge(work) may read whole inputs before it judges a document; sides: inputs with a row for every row of raw_shards.
    """

    def choose(work: Work) -> Chosen:
        rule = judge(work)
        seed, in_tokens = work.run.settings.select.seed, work.select.in_tokens
        held = 0
        for shard in work.shards:
            with table_file(_ordered(work, shard), _ORDERED) as writer:
                for table, rows in _scored(work, shard, sides):
                    ids = table["doc_id"].combine_chunks()
                    judged = rule(ids, rows)
                    never = np.isnan(judged.score)
                    priority = np.where(never, -np.inf, judged.score)
                    if drawn:
                        draws = _draws(ids.to_pylist(), seed, work.stage.name)
                        priority = np.where(judged.passes, draws, draws - 1)
                    held += int(pa.compute.sum(table["tokens"]).as_py() or 0) if in_tokens else len(table)
                    columns = {
                        **{name: table[name] for name in ("doc_id", "quality", "tokens")},
                        "score": pa.array(judged.score, from_pandas=True),
                        "passes": judged.passes,
                        "priority": priority,
                        "reason": pa.array(judged.reason, pa.string()),
                    }
                    writer.write(pa.table(columns, schema=_ORDERED))
        n = int(work.inputs["pruned_documents"].facts["n"])
        plan = plan_budget(work.select, Census(work.snapshot, n, {"": held}, [{"": held}], True))
        filled = Filled(work, plan)

        def masks(shard: str) -> Iterator[pa.Table]:
            for table, selected, rank in filled.tables(shard):
                yield _mask(table, selected, rank, table["reason"], _nothing(len(table)))

        return Chosen(filled.facts(solver) | _uncertified(work.stage), masks)

    return choose


def _ordered(work: Work, shard: str) -> Path:
    return work.folder / f"{shard}.ordered.parquet"


def _scored(work: Work, shard: str, sides: tuple[str, ...]) -> Iterator[tuple[pa.Table, dict[str, pa.Table]]]:
    """(scored documents with doc_id, quality and tokens, 0 where nobody counts them; their rows of the side files)."""
    raw = work.inputs.get("raw_shards")
    counts = None if raw is None else Cursor(raw.path(shard), ["doc_id", "token_count"], SIDE_ROWS)
    cursors = {name: Cursor(work.inputs[name].path(shard), None, SIDE_ROWS) for name in sides}
    pruned = work.inputs["pruned_documents"].path(shard)
    for table in read_batches(pruned, ["doc_id", "quality", "decision"], SIDE_ROWS):
        ids = table["doc_id"].combine_chunks()
        tokens = pa.array(np.zeros(len(ids), np.int64)) if counts is None else counts.take_all(ids)["token_count"]
        scored = is_scored(table)
        rows = {name: cursor.take_all(ids).filter(scored) for name, cursor in cursors.items()}
        table = table.append_column("tokens", tokens).filter(scored)
        if counts is not None:
            check_tokens(work.select.budget, work.snapshot, shard, table)
        yield table, rows


class Filled:
    """The budget filled in the order of priority, by files on disk: an order of 16 bytes a document, sorted there.

    `_ordered` files of all shards are there. Ties go by the ids' hash. Under a token budget a document that does not
    fit any more is passed over, so the budget is never exceeded and falls short by less than the smallest left out.
    """

    def __init__(self, work: Work, plan: Plan) -> None:
        self._work, self._plan = work, plan
        self._documents = self._passing = held = 0
        self._slack = 1
        for _, table in self._read(["tokens", "passes"]):
            self._documents += len(table)
            self._passing += pa.compute.sum(table["passes"]).as_py() or 0
            tokens = table["tokens"].to_numpy()
            held += int(tokens[table["passes"].to_numpy()].sum())
            self._slack = max(self._slack, int(tokens.max(initial=1)))
        self._met = min(plan.met, held if plan.unit == "tokens" else self._passing)
        self._ranks = corpus.ranked(work.folder, work.shards, self._by_priority)
        self._marks = self._within_tokens() if plan.unit == "tokens" else None

    def _read(self, columns: list[str]) -> Iterator[tuple[str, pa.Table]]:
        for shard in self._work.shards:
            for table in read_batches(_ordered(self._work, shard), columns, SIDE_ROWS):
                yield shard, table

    def _by_priority(self, shard: str) -> Iterator[pa.Table]:
        for table in read_batches(_ordered(self._work, shard), ["doc_id", "priority"], SIDE_ROWS):
            yield table.rename_columns(["doc_id", "score"])

    def _within_tokens(self) -> np.ndarray:
        """bool[documents], on disk: which places of the order are kept."""
        if not self._documents:
            return np.zeros(0, bool)
        costs = zeros_on_disk(self._work.folder / "costs.bin", np.int64, self._documents)
        marks = zeros_on_disk(self._work.folder / "marks.bin", np.bool_, self._documents)
        at = dict.fromkeys(self._work.shards, 0)
        for shard, table in self._read(["tokens"]):
            places = self._ranks[shard][at[shard] : at[shard] + len(table)] - 1
            costs[places] = table["tokens"].to_numpy()
            at[shard] += len(table)
        fill(costs[: self._passing], self._met, marks)
        return marks

    def selected(self, ranks: np.ndarray) -> np.ndarray:
        """bool[n]: whether documents of these places are kept."""
        if self._marks is None:
            return np.asarray(ranks <= self._met)
        return np.asarray(self._marks[ranks - 1])

    def ranks(self, shard: str) -> np.ndarray:
        """int64[n] of a shard's documents, 1 for the best."""
        return self._ranks[shard]

    def tables(self, shard: str, columns: list[str] | None = None) -> Iterator[tuple[pa.Table, np.ndarray, np.ndarray]]:
        """(documents, whether they are kept, their places) of a shard."""
        at = 0
        for table in read_batches(_ordered(self._work, shard), columns, SIDE_ROWS):
            ranks = np.asarray(self._ranks[shard][at : at + len(table)])
            yield table, self.selected(ranks), ranks
            at += len(table)

    def facts(self, solver: str) -> dict[str, Any]:
        """What is published of it: budget and shortfall, what passed, what is kept and its mean quality."""
        in_tokens = self._plan.unit == "tokens"
        kept = amount = 0

        def qualities() -> Iterator[float]:
            nonlocal kept, amount
            for shard in self._work.shards:
                for table, selected, _ in self.tables(shard, ["quality", "tokens"]):
                    weights = table["tokens"].to_numpy()[selected] if in_tokens else np.ones(selected.sum(), np.int64)
                    kept, amount = kept + int(selected.sum()), amount + int(weights.sum())
                    yield from (table["quality"].to_numpy()[selected] * weights).tolist()

        # one exact sum, so that how the documents were sharded leaves no trace
        quality = math.fsum(qualities())
        return {
            **self._plan.facts(np.zeros(1, np.int64)),
            "short_by": self._plan.asked - self._met,
            "passing": self._passing,
            "documents": self._documents,
            "kept": kept,
            "tokens": amount if in_tokens else None,
            "slack": self._slack if in_tokens else 0,
            "solver": solver,
            "quality_raw": quality / amount if amount else None,
        }


def fill(costs: np.ndarray, amount: int, marks: np.ndarray) -> None:
    """Mark which of the documents, in order, are kept within `amount` tokens: each that still fits.

    costs: int64[n], at least 1; marks: bool[>= n], all False, written to. Blocks of both are in memory.
    """
    room = amount
    for a in range(0, len(costs), SIDE_ROWS):
        block = np.asarray(costs[a : a + SIDE_ROWS])
        left = np.flatnonzero(block <= room)
        while left.size:
            # the first of them fits, so every turn keeps one
            fitting = left[: int(np.searchsorted(np.cumsum(block[left]), room, side="right"))]
            marks[a + fitting] = True
            room -= int(block[fitting].sum())
            left = left[fitting.size :]
            left = left[block[left] <= room]


def _mask(
    table: pa.Table, selected: np.ndarray, rank: np.ndarray, reason: Any, others: Mapping[str, pa.Array]
) -> pa.Table:
    columns = {
        "doc_id": table["doc_id"],
        "selected": selected,
        "score": table["score"],
        "rank": rank,
        "split": np.zeros(len(table), np.int32),
        "reason": reason,
        **others,
    }
    return pa.table({name: columns[name] for name in MASKS.names}, schema=MASKS)


def _nothing(rows: int) -> dict[str, pa.Array]:
    return {name: pa.nulls(rows, MASKS.field(name).type) for name in ("kept_id", "similarity")}


def _uncertified(stage: Stage) -> dict[str, Any]:
    """What is published, in datamask_masks' words, of a selection that maximises no objective."""
    return {
        **dict.fromkeys(("value", "quality", "diversity", "metrics", "lambda", "objective", "scale")),
        "certificate": corpus.uncertified(f"{stage.name} maximises no objective"),
        "scope": "snapshot",
        "splits": 1,
        "trajectories": {},
    }


def _any(work: Work) -> Judge:
    """Every document passes; its score is the draw."""
    seed = work.run.settings.select.seed

    def judge(ids: pa.Array, rows: Mapping[str, pa.Table]) -> Judged:
        return Judged(_draws(ids.to_pylist(), seed, work.stage.name), np.ones(len(ids), bool), [None] * len(ids))

    return judge


def by_score(asset: str, passes: Callable[[np.ndarray, Settings], np.ndarray] | None = None) -> Callable[[Work], Judge]:
    """Documents by the score of one asset; with passes(scores, settings), those that it is True of."""

    def rule(work: Work) -> Judge:
        def judge(ids: pa.Array, rows: Mapping[str, pa.Table]) -> Judged:
            score, why = rows[asset]["score"].to_numpy(), rows[asset]["reason"].to_pylist()
            good = ~np.isnan(score)
            if passes is not None:
                good[good] = passes(score[good], work.run.settings)
            reason = [
                None if ok else BELOW if np.isfinite(s) else f"null score: {w}"
                for ok, s, w in zip(good.tolist(), score.tolist(), why, strict=True)
            ]
            return Judged(score, good, reason)

        return judge

    return rule


def _gneissweb(work: Work) -> Judge:
    def documents() -> Iterator[tuple[pa.Array, Mapping[str, pa.Table]]]:
        for shard in work.shards:
            for table, rows in _scored(work, shard, gneissweb.SIDES):
                yield table["doc_id"].combine_chunks(), rows

    rule = gneissweb.Rule(work.run.settings.baselines, work.folder, documents)
    return lambda ids, rows: Judged(*rule(ids, rows))


def int_scores(score: np.ndarray) -> np.ndarray:
    """FineWeb-Edu's rounding of scores without NaN, as `scoring.regression.int_score` for one: halves to even."""
    return np.rint(np.clip(score, 0.0, SCALE_MAX))


def semdedup(work: Work) -> Chosen:
    """SemDeDup with the epsilon that leaves the budget: of all candidates, those least like an earlier one.

    That epsilon is what bisection converges to: documents are sorted by their largest cosine to an earlier one of their
    cluster, the first of a cluster before all, ties by the hash of the ids (`selection.semdedup`).
    """
    pool = work.candidates()
    plan = plan_budget(work.select, pool.census())
    clusters = Clusters(work.run, pool, work.folder)
    schema = pa.schema([*PLACE, *_ORDERED])
    paths = [work.folder / f"compared_{number:05d}.parquet" for number in range(len(clusters))]
    for number, path in enumerate(paths):
        table = clusters.table(number)
        largest, earlier = compared(table, unit(table))
        np.save(path.with_suffix(".npy"), earlier)
        score = np.where(earlier < 0, _FIRST, -largest)
        columns = {name: table[name] for name in ("shard", "ordinal", "doc_id", "quality", "tokens")}
        columns |= {"score": score, "priority": score, "passes": np.ones(len(table), bool)}
        columns["reason"] = pa.nulls(len(table), pa.string())
        in_place(path, pa.table({name: columns[name] for name in schema.names}, schema=schema))
        work.run.log(f"{work.stage.name} {work.snapshot}: {number + 1} of {len(paths)} parts, {len(table):,} documents")
    gathered = shuffle.Gather(paths)
    for number, shard in enumerate(work.shards):
        with table_file(_ordered(work, shard), _ORDERED) as writer:
            for part in gathered.shard(number, _ORDERED.names):
                writer.write(part)
    filled = Filled(work, plan)
    threshold, results = -1.0, []
    for number, path in enumerate(paths):
        table, earlier = clusters.table(number), np.load(path.with_suffix(".npy"))
        kept_here = _kept_of(work, filled, table)
        z = unit(table)
        kept, similarity = representatives(z, earlier, np.flatnonzero(kept_here))
        columns = {"shard": table["shard"], "ordinal": table["ordinal"], **instead(table["doc_id"], kept, similarity)}
        results.append(work.folder / f"instead_{number:05d}.parquet")
        in_place(results[-1], pa.table(columns))
    for shard in work.shards:
        for part, selected, _ in filled.tables(shard, ["score"]):
            later = selected & (part["score"].to_numpy() < _FIRST)
            threshold = max(threshold, float((-part["score"].to_numpy()[later]).max(initial=-1.0)))
    names = {shard: number for number, shard in enumerate(work.shards)}
    standing = shuffle.Gather(results)

    def rows(shard: str) -> Iterator[pa.Table]:
        others = _Stream(standing.shard(names[shard], ["kept_id", "similarity"]))
        for part, selected, rank in filled.tables(shard):
            named = others.take(len(part))
            reason = pa.array(["near_duplicate"] * len(part), pa.string(), mask=named["kept_id"].is_null().to_numpy())
            yield _mask(part, selected, rank, reason, {name: named[name] for name in named.column_names})

    return Chosen(filled.facts("semdedup") | _uncertified(work.stage) | {"epsilon": 1.0 - threshold}, rows)


def _kept_of(work: Work, filled: Filled, table: pa.Table) -> np.ndarray:
    """bool[n]: which documents of some clusters are kept."""
    shards, ordinals = table["shard"].to_numpy(), table["ordinal"].to_numpy()
    kept = np.zeros(len(table), bool)
    for number in np.unique(shards).tolist():
        at = shards == number
        kept[at] = filled.selected(filled.ranks(work.shards[number])[ordinals[at]])
    return kept


class _Stream:
    """Tables read forward in pieces of any size."""

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables = tables
        self._held: list[pa.Table] = []

    def take(self, rows: int) -> pa.Table:
        while sum(map(len, self._held)) < rows:
            self._held.append(next(self._tables))
        table = pa.concat_tables(self._held) if self._held else pa.table({})
        self._held = [table.slice(rows)]
        return table.slice(0, rows)


def certified(lam: float) -> Baseline:
    """Quality (lam = 1) or diversity (lam = 0) alone, by the certified solver over the snapshot as one pool."""

    def choose(work: Work) -> Chosen:
        pool = work.candidates()
        plan = plan_budget(work.select, pool.census())
        shards = Corpus(work.folder / "corpus", lam=lam, scale="raw", constants=None)
        corpus.add_shards(shards, pool, plan)
        told = corpus.told_every(work.run, f"{work.stage.name} {work.snapshot}")
        solved = solve_corpus(shards, plan.amounts, progress=told)
        held, largest = corpus.kept_of(shards, pool, plan)
        ranks = corpus.ranked(work.folder, work.shards, lambda shard: corpus.masked(shards, pool, shard))
        facts = {
            **corpus.worth_of(solved, "snapshot"),
            **plan.facts(held),
            "lambda": lam,
            "objective": "pws",
            "scale": "raw",
            "solver": "certified",
            "scope": "snapshot",
            "splits": 1,
            "passing": shards.n,
            "documents": shards.n,
            "kept": solved.evaluation.documents,
            "tokens": solved.evaluation.tokens if plan.unit == "tokens" else None,
            "slack": plan.slack(largest),
        }

        def rows(shard: str) -> Iterator[pa.Table]:
            at = 0
            for table in corpus.masked(shards, pool, shard):
                upto = at + len(table)
                selected = table["selected"].to_numpy()
                yield _mask(
                    table, selected, ranks[shard][at:upto], pa.nulls(len(table), pa.string()), _nothing(len(table))
                )
                at = upto

        return Chosen(facts, rows)

    return choose


# {asset: how it chooses}. A further one of scores is a line here, one in `stages.base.STAGES`, one in
# `settings.STRATEGIES` and an asset
BASELINES: dict[str, Baseline] = {
    "baseline_random": of_scores(_any, drawn=True, solver="random"),
    "baseline_fineweb_edu": of_scores(
        by_score("edu_scores", lambda score, settings: int_scores(score) >= settings.baselines.edu_cut),
        ("edu_scores",),
        drawn=True,
        solver="threshold",
    ),
    "baseline_fineweb_edu_top": of_scores(by_score("edu_scores"), ("edu_scores",)),
    # its authors keep what is at least at the cut
    "baseline_dclm": of_scores(
        by_score("dclm_scores", lambda score, settings: score >= settings.baselines.dclm_cut),
        ("dclm_scores",),
        drawn=True,
        solver="threshold",
    ),
    "baseline_dclm_top": of_scores(by_score("dclm_scores"), ("dclm_scores",)),
    "baseline_wiki": of_scores(
        by_score("wiki_scores", lambda score, settings: score >= settings.baselines.wiki_cut),
        ("wiki_scores",),
        drawn=True,
        solver="threshold",
    ),
    "baseline_wiki_top": of_scores(by_score("wiki_scores"), ("wiki_scores",)),
    "baseline_ultra_fineweb": of_scores(
        by_score("ultra_scores", lambda score, settings: score >= settings.baselines.ultra_cut),
        ("ultra_scores",),
        drawn=True,
        solver="threshold",
    ),
    "baseline_gneissweb": of_scores(_gneissweb, gneissweb.SIDES, drawn=True, solver="threshold"),
    "baseline_semdedup": semdedup,
    "baseline_diversity": certified(0.0),
    "baseline_quality": certified(1.0),
}
