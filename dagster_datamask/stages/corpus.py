"""corpus_selection_state: the masks of all embedded snapshots, chosen as one pool whose shards never sit together.

Here: shards into the solver's scratch, what a snapshot that comes later is chosen beside, and how a snapshot's own
`datamask_masks` finds its part. The state is made in rounds: the first solves all snapshots there are; with
on_new_snapshot = extend each later one solves those that are new or replaced, given what is kept, and leaves the masks
of the others as they are, byte for byte. Not here: the solver (`selection.corpus`).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from dagster_datamask.compute.base import Poisoned, Told
from dagster_datamask.keyed import digest
from dagster_datamask.selection.certificates import evaluate
from dagster_datamask.selection.corpus import (
    Block,
    Corpus,
    CorpusSelection,
    ScoreTerm,
    ScratchUnseen,
    Sight,
    solve_corpus,
    zeros_on_disk,
)
from dagster_datamask.selection.objectives import Given
from dagster_datamask.settings import Settings, SettingsError
from dagster_datamask.shards.cursor import read_batches
from dagster_datamask.shards.engine import Reader, every_seconds, map_shards
from dagster_datamask.shards.generations import Generation, NotPublished, Published, ShardRecord, Store
from dagster_datamask.shards.order import tie_hash
from dagster_datamask.shards.schemas import InconsistentFiles
from dagster_datamask.shards.source import Source
from dagster_datamask.shards.writer import table_file, write_json
from dagster_datamask.stages.base import STAGES, Check, Outcome, Run, candidate_inputs, fingerprints, finish
from dagster_datamask.stages.candidates import Candidates, Plan, plan_budget, tie_keys, together
from dagster_datamask.stages.embeddings import vectors_of
from dagster_datamask.stages.scores import SIDE_ROWS

STATE = "corpus_selection_state"
STATE_FILE = "state.json"
# what a mask is worth, certificate included
WORTH = ("value", "certificate", "quality_raw", "quality", "diversity", "metrics")
_MASK = pa.schema([("doc_id", pa.string()), ("selected", pa.bool_()), ("score", pa.float64())])
_ORDER = pa.schema([("score", pa.float64()), ("tie", pa.uint64()), ("row", pa.int64())])
# what DuckDB may hold while it sorts a snapshot's scores
_SORT_MEMORY = "128MB"
# candidates whose reading, at some 20 µs each, takes longer than processes take to start
_WORTH_WORKERS = 300_000
_NAMED = 10
_POINTS_IN_FIGURE = 200


def corpus_selection_state(run: Run, source: Source) -> Outcome:
    """Publish, for every snapshot with published embeddings, a mask per shard (`doc_id, selected, score`), and
    `state.json`: rounds with value, certificate and history, and per snapshot what it was solved from.

    Raises SettingsError for another scope than corpus, for a budget that the documents cannot meet and, where new
    snapshots are to be added to a fixed number of documents or tokens; NotPublished where nothing is embedded.
    """
    stage = STAGES[STATE]
    select = run.settings.select
    if select.scope != "corpus":
        raise SettingsError(f"select.scope = {select.scope}: {STATE} is what scope = corpus chooses from; set it")
    frozen = run.inputs(stage, None)
    constants = constants_of(frozen)
    found, skipped = embedded_snapshots(run.store, run.settings)
    if not found:
        raise NotPublished(f"no snapshot under {run.store.where} has published e5_embeddings; run the job embed first")
    made_from = {name: fingerprints(inputs) for name, inputs in found.items()}
    before = run.store.published(STATE)
    further = further_terms(run.settings, frozen)
    kept = _kept(run, before, made_from, fingerprints(frozen))
    new = sorted(found.keys() - kept.keys())
    this_round = digest(
        stage.version,
        json.dumps({k: v for k, v in stage.identity(run.settings).items() if k != _ON_NEW}, sort_keys=True),
        json.dumps([fingerprints(frozen), {name: made_from[name] for name in new}], sort_keys=True),
        json.dumps({name: entry["round"] for name, entry in kept.items()}, sort_keys=True),
        size=12,
    ).hex()
    rounds = {name: kept[name]["round"] if name in kept else this_round for name in sorted(found)}
    keys = {f"{asset} {name}": made for name, each in made_from.items() for asset, made in each.items()}
    keys |= fingerprints(frozen) | {f"round {name}": round_ for name, round_ in rounds.items()}
    with run.generation(stage, None, keys) as generation:
        solver = _Round(run, source, generation, {name: found[name] for name in new}, (constants, further), kept)
        state = _still(before, kept)
        if new:
            told = solver.result(this_round)
            state["rounds"].append(told["round"])
            state["snapshots"] = {**kept, **told["snapshots"]}
        write_json(generation.folder / STATE_FILE, state)

        def origin(flat: str) -> str:
            return digest(STATE, rounds[flat.partition("@")[0]], flat).hex()

        records = map_shards(
            generation,
            [flat_name(name, shard) for name in sorted(found) for shard in found[name]["e5_embeddings"].shards],
            solver.mask,
            lambda: _account,
            _MASK,
            ext=".parquet",
            total_rows=sum(entry["documents"] for entry in state["snapshots"].values()),
            progress=run.progress(stage, None),
            origin=origin,
        )
        return _finish(generation, state, skipped, records)


_ON_NEW = "select.on_new_snapshot"


def _finish(
    generation: Generation, state: dict[str, Any], skipped: dict[str, str], records: list[ShardRecord]
) -> Outcome:
    snapshots = state["snapshots"]
    last = state["rounds"][-1]
    worth = {name: last[name] for name in WORTH}
    if set(last["covers"]) != set(snapshots):
        why = "snapshots went since the last round; select.on_new_snapshot = 'resolve' certifies what is left"
        worth = dict.fromkeys(WORTH) | {"certificate": uncertified(why)}
    facts = {
        **worth,
        "kept": sum(entry["kept"] for entry in snapshots.values()),
        "n": sum(entry["n"] for entry in snapshots.values()),
        "budget": (last["given"] or 0) + last["budget"],
        "short_by": last["short_by"],
        "snapshots_solved": len(snapshots),
        "snapshots_new": sum(entry["round"] == last["id"] for entry in snapshots.values()),
        "rounds": len(state["rounds"]),
        **{name: last[name] for name in ("unit", "quotas", "redistributed", "lambda", "scale", "passes")},
        "solver": "certified",
        "scope": "corpus",
    }
    written = sum(record.counts.get("kept", 0) for record in records)
    checks = (
        Check(
            "budget_met_exactly",
            written == facts["kept"] and met(last["asked"], last["amount"], last["slack"]),
            True,
            {"kept": written, "asked": last["asked"], "met": last["amount"], "unit": last["unit"]},
        ),
        Check(
            "value_below_bound",
            worth["certificate"]["gap"] is None or worth["certificate"]["gap"] >= 0,
            True,
            {"value": worth["value"], "upper_bound": worth["certificate"]["upper_bound"]},
        ),
        Check("every_snapshot_embedded", not skipped, False, {"skipped": named(skipped) or "none"}),
    )
    return finish(
        generation,
        records,
        ".parquet",
        facts=facts,
        expected_rows=sum(entry["documents"] for entry in snapshots.values()),
        checks=checks,
    )


def uncertified(why: str) -> dict[str, Any]:
    """The certificate of a mask that has none."""
    return {"upper_bound": None, "gap": None, "share": None, "baseline": None, "reason": why}


def met(asked: int, amount: int, slack: int) -> bool:
    """Whether what was kept is what was asked for: never more, and less by no more than `Plan.slack`."""
    return 0 <= asked - amount <= slack


def named(reasons: Mapping[str, str]) -> str:
    """The first few of {snapshot: why} in words."""
    told = [f"{name} ({why})" for name, why in sorted(reasons.items())]
    return "; ".join(told[:_NAMED]) + (f" and {len(told) - _NAMED} more" if len(told) > _NAMED else "")


def flat_name(snapshot: str, shard: str) -> str:
    """One name for a snapshot's shard: no snapshot has an @ in it."""
    return f"{snapshot}@{shard}"


def constants_of(inputs: Mapping[str, Published]) -> tuple[float, float] | None:
    """Quality's frozen scale, None where nothing reads it."""
    if "quality_calibration" not in inputs:
        return None
    facts = inputs["quality_calibration"].facts
    return facts["q_lo"], facts["q_hi"]


Further = dict[str, ScoreTerm]


def further_terms(settings: Settings, inputs: Mapping[str, Published]) -> Further:
    """{"influence": its term} where the objective weighs influence, on the scale that its model was published with.

    Less is better of influence, so the term is that of −f.
    """
    if not settings.select.influence:
        return {}
    (facts,) = (found.facts for found in inputs.values() if "influence_lo" in found.facts)
    return {"influence": ScoreTerm(settings.select.influence, (-facts["influence_hi"], -facts["influence_lo"]))}


def further_scores(table: pa.Table) -> dict[str, np.ndarray]:
    """The values of those terms, of a table of candidates."""
    return {"influence": -table["influence"].to_numpy()} if "influence" in table.column_names else {}


def embedded_snapshots(store: Store, settings: Settings) -> tuple[dict[str, dict[str, Published]], dict[str, str]]:
    """({snapshot: what its candidates are read from}, {snapshot that was begun: why it has no part})."""
    found: dict[str, dict[str, Published]] = {}
    skipped: dict[str, str] = {}
    model = store.published(f"stage_{settings.group_mates.stages}/influence_model")
    for snapshot in store.snapshots("raw_shards"):
        inputs = {name: store.published(name, snapshot) for name in candidate_inputs(settings)}
        there = {name: published for name, published in inputs.items() if published is not None}
        if len(there) < len(inputs):
            skipped[snapshot] = f"{', '.join(inputs.keys() - there.keys())} not published"
            continue
        other = [
            f"{name} made from another generation of {ancestor}"
            for name, published in there.items()
            for ancestor, fingerprint in published.inputs.items()
            if ancestor in there and there[ancestor].fingerprint != fingerprint
        ]
        if "influence_scores" in there and (
            model is None or there["influence_scores"].facts["model"] != model.facts["model"]
        ):
            other.append("influence scored by another model than the published one")
        if other:
            skipped[snapshot] = other[0]
            continue
        found[snapshot] = there
    return found, skipped


def read_state(published: Published) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(published.file(STATE_FILE).read_text("utf-8"))
    return state


def unsolved(store: Store, settings: Settings) -> dict[str, str]:
    """{embedded snapshot: why the published state does not speak of it}."""
    found, _ = embedded_snapshots(store, settings)
    published = store.published(STATE)
    if published is None:
        return dict.fromkeys(found, "nothing is solved yet")
    if published.code_version != STAGES[STATE].version or published.settings != STAGES[STATE].identity(settings):
        return dict.fromkeys(found, "solved under other settings or code")
    solved = read_state(published)["snapshots"]
    why = {}
    for snapshot, inputs in found.items():
        if snapshot not in solved:
            why[snapshot] = "new"
        elif solved[snapshot]["inputs"] != fingerprints(inputs):
            why[snapshot] = "published anew since"
    return why


def outdated_masks(store: Store, settings: Settings) -> dict[str, str]:
    """{snapshot in the state: a name of its part} of those whose published masks are not the state's."""
    published = store.published(STATE)
    if published is None:
        return {}
    masks = STAGES["datamask_masks"]
    outdated = {}
    for snapshot, entry in read_state(published)["snapshots"].items():
        part = part_identity(snapshot, entry)
        made = store.published("datamask_masks", snapshot)
        version, identity = masks.version, masks.identity(settings)
        if made is None or (made.inputs.get(STATE), made.code_version, made.settings) != (part, version, identity):
            outdated[snapshot] = f"{part}:{settings.hash(masks.reads)}"
    return outdated


def part_of(
    run: Run, snapshot: str, inputs: Mapping[str, Published]
) -> tuple[Published, dict[str, Any], dict[str, Any]]:
    """(the state, its entry of the snapshot, the round that solved it).

    Raises NotPublished where the state does not speak of the snapshot, InconsistentFiles where it speaks of another
    generation of `inputs`.
    """
    published = run.store.published(STATE)
    if published is None:
        raise NotPublished(f"{STATE} is not published under {run.store.where}; run the job solve_corpus first")
    state = read_state(published)
    entry = state["snapshots"].get(snapshot)
    if entry is None:
        raise NotPublished(f"{snapshot} is not in {STATE}; run the job solve_corpus")
    other = [name for name, published_ in inputs.items() if entry["inputs"].get(name) != published_.fingerprint]
    if other:
        raise InconsistentFiles(
            f"{STATE} was solved from another generation of {', '.join(other)} of {snapshot} than the published one; "
            "run the job solve_corpus"
        )
    return published, entry, next(r for r in state["rounds"] if r["id"] == entry["round"])


def part_identity(snapshot: str, entry: Mapping[str, Any]) -> str:
    """What a snapshot's masks are made from: its round. The state as a whole moves on with every later one."""
    return digest(snapshot, entry["round"], size=12).hex()


def _kept(
    run: Run, before: Published | None, made_from: dict[str, dict[str, str]], frozen: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """{snapshot: its entry} of those whose masks stay as they are."""
    stage = STAGES[STATE]
    if before is None or run.settings.select.on_new_snapshot == "resolve" or before.code_version != stage.version:
        return {}
    settings = {key: value for key, value in before.settings.items() if key != _ON_NEW}
    in_force = {key: value for key, value in stage.identity(run.settings).items() if key != _ON_NEW}
    if settings != in_force or any(before.inputs.get(name) != made for name, made in frozen.items()):
        return {}
    entries = read_state(before)["snapshots"]
    return {name: entry for name, entry in sorted(entries.items()) if made_from.get(name) == entry["inputs"]}


def _still(before: Published | None, kept: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The earlier state without what is solved anew."""
    rounds = {entry["round"] for entry in kept.values()}
    earlier = read_state(before)["rounds"] if before is not None and kept else []
    return {"rounds": [r for r in earlier if r["id"] in rounds], "snapshots": kept}


def _account(table: pa.Table) -> tuple[pa.Table, int, dict[str, int]]:
    kept = pa.compute.sum(table["selected"]).as_py() or 0
    return table, len(table), {"kept": kept, "not_selected": len(table) - kept}


class _Round:
    """The snapshots that are solved now, given those that are kept."""

    def __init__(
        self,
        run: Run,
        source: Source,
        generation: Generation,
        snapshots: Mapping[str, Mapping[str, Published]],
        scale: tuple[tuple[float, float] | None, Further],
        kept: Mapping[str, dict[str, Any]],
    ) -> None:
        select = run.settings.select
        self._run, self._generation, self._kept = run, generation, kept
        self._made_from = {name: fingerprints(inputs) for name, inputs in snapshots.items()}
        self._candidates = {
            name: Candidates(name, inputs, select, source, generation.work) for name, inputs in snapshots.items()
        }
        self._scale = scale
        self._corpus: Corpus | None = None
        self._plan: Plan | None = None
        self._room: dict[str, int] = {}

    def result(self, identity: str) -> dict[str, Any]:
        """{"round": what was solved, "snapshots": {name: its entry}}, solved once."""
        path = self._generation.folder / "round.json"
        if not path.exists():
            write_json(path, self._solve(identity))
            self._generation.keep(path.name)
        told: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return told

    def mask(self, shard: str) -> Iterator[pa.Table]:
        """The mask of a shard that is solved, by its flat name."""
        snapshot, _, own = shard.partition("@")
        corpus, _ = self._filled()
        yield from masked(corpus, self._candidates[snapshot], own)

    def _filled(self) -> tuple[Corpus, Plan]:
        """The corpus with all shards of the round, and what is asked of it."""
        if self._corpus is None or self._plan is None:
            select = self._run.settings.select
            censuses = {name: candidates.census() for name, candidates in self._candidates.items()}
            self._room = {name: sum(census.room.values()) for name, census in censuses.items()}
            if self._kept and not select.budget.strip().endswith("%"):
                raise SettingsError(
                    f"select.budget = {select.budget} was shared out among {len(self._kept)} snapshots already; take a "
                    "share ('10%'), or set select.on_new_snapshot = 'resolve'"
                )
            self._plan = plan_budget(select, together(list(censuses.values())))
            self._corpus = new_corpus(self._generation.work / "corpus", self._run.settings, *self._scale)
            for name, candidates in self._candidates.items():
                self._run.log(f"{STATE}: reading {name}, {self._room[name]:,} {self._plan.unit}")
                add_shards(self._corpus, candidates, self._plan, self._run)
        return self._corpus, self._plan

    def _solve(self, identity: str) -> dict[str, Any]:
        corpus, plan = self._filled()
        given = _given(self._kept)
        told = told_every(self._run, f"{STATE}: {len(self._candidates)} snapshots")
        solved = solve_corpus(
            corpus,
            plan.amounts,
            given=given,
            progress=told,
            compute=self._run.compute,
            requests=self._run.requests(STAGES[STATE]),
            log=self._run.log,
        )
        held = np.zeros(len(plan.groups), np.int64)
        largest, entries = 1, {}
        for name, candidates in self._candidates.items():
            own = new_corpus(self._generation.work / "corpus", self._run.settings, *self._scale)
            add_shards(own, candidates, plan)
            worth = evaluate(own.passes(plan.amounts), own.terms)
            kept_here, longest = kept_of(own, candidates, plan)
            held, largest = held + kept_here, max(largest, longest)
            entries[name] = {
                "round": identity,
                "inputs": self._made_from[name],
                "n": candidates.n,
                "documents": own.n,
                "pool": self._room[name],
                "kept": worth.documents,
                "amount": worth.documents if worth.tokens is None else worth.tokens,
                "tokens": worth.tokens,
                "value": worth.value,
                "quality": worth.quality,
                "quality_raw": worth.quality_raw,
                "diversity": worth.diversity,
                "scores": worth.scores,
                "mean_vector": worth.mean_vector.tolist(),
            }
        facts = {
            **plan.facts(held),
            "id": identity,
            "covers": sorted([*self._kept, *self._candidates]),
            "asked": plan.met,
            "amount": int(held.sum()),
            "slack": plan.slack(largest),
            "given": None if given is None else given.size,
            **worth_of(solved, "corpus"),
            "history": solved.history,
            "lambda": corpus.terms.lam,
            "scale": corpus.scale,
        }
        return {"round": facts, "snapshots": entries}


def _given(kept: Mapping[str, dict[str, Any]]) -> Given | None:
    """What is kept, as the solver takes it into account."""
    size = sum(entry["amount"] for entry in kept.values())
    if not size:
        return None
    shares = {name: entry["amount"] / size for name, entry in sorted(kept.items())}
    means = [shares[name] * np.array(kept[name]["mean_vector"]) for name in shares]
    quality = sum(shares[name] * (kept[name]["quality"] or 0.0) for name in shares)
    terms = {term for name in shares for term in kept[name]["scores"]}
    scores = {term: sum(shares[name] * kept[name]["scores"].get(term, 0.0) for name in shares) for term in terms}
    return Given(size, np.sum(means, axis=0), quality, scores)


def new_corpus(folder: Path, settings: Settings, constants: tuple[float, float] | None, further: Further) -> Corpus:
    select = settings.select
    return Corpus(folder, lam=select.lambda_, scale=select.scale, constants=constants, scores=further)


def told_every(run: Run, what: str, unit: str = "passes") -> Callable[[int, int, dict[str, Any]], None]:
    """A solver's progress callback that tells the log."""
    told = every_seconds(run.log, what, unit)
    return lambda step, steps, entry: told(
        step, steps, ", ".join(f"{name} {entry[name]:.6g}" for name in ("value", "bound", "compared") if name in entry)
    )


def add_shards(corpus: Corpus, candidates: Candidates, plan: Plan, run: Run | None = None) -> None:
    """The candidates' shards into a corpus; those that are there already are not read again. Where there are many
    documents to read, `run`'s workers write them, if they see the scratch folder; shards that end their workers are
    left to this process."""
    add = partial(_add, candidates, plan)
    missing = corpus.missing(flat_name(candidates.snapshot, shard) for shard in candidates.shards)
    if run is not None and min(len(missing), run.compute.workers) > 1 and plan.n >= _WORTH_WORKERS:
        try:
            with corpus.sight() as sight:
                filling = run.compute.each(_Filling(corpus, sight, add), missing, requests=run.requests(STAGES[STATE]))
                for _ in filling:
                    pass
        except (ScratchUnseen, Poisoned) as why:
            run.log(f"shards are read in this process: {why}")
    for shard in candidates.shards:
        add(corpus, shard)


def _add(candidates: Candidates, plan: Plan, corpus: Corpus, shard: str) -> None:
    corpus.add(flat_name(candidates.snapshot, shard), partial(_blocks, candidates, plan, shard))


def _blocks(candidates: Candidates, plan: Plan, shard: str) -> Iterator[Block]:
    for table in candidates.batches(shard):
        budget = plan.budget(plan.amounts, table)
        yield Block(
            candidates.keys(table["doc_id"]),
            table["quality"].to_numpy(),
            vectors_of(table),
            budget.costs,
            budget.groups,
            further_scores(table),
        )


@dataclass(frozen=True, eq=False)
class _Filling:
    """A worker that writes shards, by their flat names, where the driver finds them."""

    corpus: Corpus
    sight: Sight
    add: Callable[[Corpus, str], None]

    def __call__(self) -> Callable[[str, Told], None]:
        self.sight.check()
        return lambda name, told: self.add(self.corpus, name.partition("@")[2])


def masked(corpus: Corpus, candidates: Candidates, shard: str) -> Iterator[pa.Table]:
    """`doc_id, selected, score` of a shard that was solved."""
    selected, scores = corpus.selected(flat_name(candidates.snapshot, shard))
    at = 0
    for table in candidates.counted(shard):
        rows = slice(at, at + len(table))
        columns = {"doc_id": table["doc_id"], "selected": selected[rows], "score": scores[rows]}
        yield pa.table(columns, schema=_MASK)
        at += len(table)


def kept_of(corpus: Corpus, candidates: Candidates, plan: Plan) -> tuple[np.ndarray, int]:
    """(int64[G] of what the mask holds of each group, the largest cost of a document)."""
    held, largest = np.zeros(len(plan.groups), np.int64), 1
    for shard in candidates.shards:
        selected, _ = corpus.selected(flat_name(candidates.snapshot, shard))
        at = 0
        for table in candidates.counted(shard):
            held += plan.held(table, selected[at : at + len(table)])
            largest = max(largest, int(table["tokens"].to_numpy().max(initial=1)))
            at += len(table)
    return held, largest


def certified_in(scope: str, certificate: Mapping[str, Any]) -> dict[str, Any]:
    """A certificate that says what was chosen from at once."""
    return {**certificate, "feasible_set": {**certificate["feasible_set"], "scope": scope}}


def worth_of(solved: CorpusSelection, scope: str) -> dict[str, Any]:
    """What is published of a mask found over shards."""
    worth = solved.evaluation
    return {
        "value": worth.value,
        "quality": worth.quality,
        "quality_raw": worth.quality_raw,
        "diversity": worth.diversity,
        "metrics": worth.metrics,
        "certificate": certified_in(scope, solved.certificate.as_dict()),
        "passes": solved.passes,
        "trajectories": {"certified": points(solved.trajectory)},
    }


def points(trajectory: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A trajectory as it is published and drawn: at most a few hundred of its entries."""
    every = max(1, len(trajectory) // _POINTS_IN_FIGURE)
    return [
        {
            "step": point["step"],
            "value": point.get("mask_value", point["value"]),
            **({"bound": point["bound"]} if "bound" in point else {}),
            **({"note": point["note"]} if point.get("note") else {}),
        }
        for k, point in enumerate(trajectory)
        if k % every == 0 or k == len(trajectory) - 1
    ]


def ranked(work: Path, shards: Sequence[str], scores: Reader, snapshot: str | None = None) -> dict[str, np.ndarray]:
    """{shard: int64[k]}, each document's place by score, 1 for the best, ties by the ids' hash; sorted on disk.

    scores(shard) yields tables with `doc_id` and `score`; snapshot: where ids are unique with it alone.
    """
    path, sizes = work / "order.parquet", []
    total = 0
    with table_file(path, _ORDER) as writer:
        for shard in shards:
            before = total
            for table in scores(shard):
                rows = np.arange(total, total + len(table))
                ties = tie_hash(tie_keys(snapshot, table["doc_id"]))
                writer.write(pa.table({"score": table["score"], "tie": ties, "row": rows}, schema=_ORDER))
                total += len(table)
            sizes.append(total - before)
    ranks = zeros_on_disk(work / "ranks.bin", np.int64, total)
    done = 0
    with duckdb.connect(config={"memory_limit": _SORT_MEMORY, "temp_directory": str(work / "sorting")}) as con:
        ordered = con.sql("SELECT row FROM read_parquet(?) ORDER BY score DESC, tie", params=[str(path)])
        batches: pa.RecordBatchReader = ordered.to_arrow_reader(SIDE_ROWS)
        for batch in batches:
            ranks[batch.column(0).to_numpy()] = np.arange(done + 1, done + len(batch) + 1)
            done += len(batch)
    starts = np.cumsum([0, *sizes])
    return {shard: ranks[a:b] for shard, a, b in zip(shards, starts[:-1].tolist(), starts[1:].tolist(), strict=True)}


def mask_shard(published: Published, snapshot: str, shard: str) -> Iterator[pa.Table]:
    """`doc_id, selected, score` of a snapshot's shard, from the state."""
    return read_batches(published.path(flat_name(snapshot, shard)), None, SIDE_ROWS)
