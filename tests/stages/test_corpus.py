"""The corpus as one pool: the mask of the solver in memory, rounds that leave earlier masks alone, and kills."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from dagster_datamask.compute.local import Processes
from dagster_datamask.keyed import hash64
from dagster_datamask.selection import corpus as solver
from dagster_datamask.selection.objectives import Given, QualityDiversity
from dagster_datamask.selection.solve import Selection, solve
from dagster_datamask.settings import SettingsError
from dagster_datamask.shards.cursor import read_batches
from dagster_datamask.shards.generations import NotPublished
from dagster_datamask.shards.schemas import InconsistentFiles
from dagster_datamask.stages import corpus as stage
from dagster_datamask.stages.base import Outcome
from dagster_datamask.stages.corpus import STATE, named, outdated_masks, ranked, unsolved
from tests.conftest import EMBEDDED, SNAPSHOTS
from tests.project import Project, write_shard
from tests.stages.conftest import copied, failed, rows_of, tree
from tests.stages.test_masks import pool_of, publish_vectors

FIRST, SECOND = SNAPSHOTS
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def corpus(embedded: Project, tmp_path: Path) -> Project:
    """Both snapshots embedded, on a root of its own, scope corpus."""
    return copied(embedded, tmp_path / "root")


def solved(project: Project) -> Outcome:
    outcome = project.stage("corpus_selection_state", "")
    assert outcome.published is not None, failed(outcome)
    return outcome


def hide(project: Project, snapshot: str) -> Path:
    """Take the pointer of a snapshot's embeddings away: as if it were not embedded yet."""
    pointer = project.store.folder("e5_embeddings", snapshot) / "current.json"
    return pointer.rename(pointer.with_name("hidden.json"))


def show(hidden: Path) -> None:
    hidden.rename(hidden.with_name("current.json"))


def in_memory(project: Project, snapshots: tuple[str, ...], size: int, given: Given | None = None) -> Selection:
    """The mask of the snapshots' candidates, by the solver that has them all in memory."""
    pools = [pool_of(project, snapshot) for snapshot in snapshots]
    stored = [
        np.array(table["embedding"].to_pylist(), np.float16)
        for embedded in (project.store.current("e5_embeddings", snapshot) for snapshot in snapshots)
        for shard in embedded.shards
        for table in read_batches(embedded.path(shard), ["embedding"], 100)
    ]
    facts = project.store.current("quality_calibration").facts
    objective = QualityDiversity(
        np.concatenate(stored),
        np.concatenate([quality for _, _, quality in pools]),
        project.settings.select.lambda_,
        "minmax",
        (facts["q_lo"], facts["q_hi"]),
        given=given,
    )
    return solve(
        objective,
        size,
        solver="certified",
        ids=[f"{snapshot}/{i}" for snapshot, (ids, _, _) in zip(snapshots, pools, strict=True) for i in ids],
    )


def mask_of(outcome: Outcome, snapshots: tuple[str, ...]) -> tuple[list[int], list[float]]:
    """(places in the mask, scores) over the shards of these snapshots in order."""
    published = outcome.published
    assert published is not None
    shards = [shard for shard in published.shards if shard.partition("@")[0] in snapshots]
    rows = pl.concat([pl.read_parquet(published.path(shard)) for shard in shards])
    return rows["selected"].arg_true().to_list(), rows["score"].to_list()


def state(outcome: Outcome) -> dict:
    assert outcome.published is not None
    return json.loads((outcome.published.folder / "state.json").read_text())


@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_the_mask_is_that_of_the_solver_in_memory_bit_for_bit(corpus: Project, lam: float) -> None:
    corpus = corpus.with_settings(**{"select.lambda": lam})
    outcome = solved(corpus)
    expected = in_memory(corpus, SNAPSHOTS, 13)
    rows, scores = mask_of(outcome, SNAPSHOTS)
    assert rows == expected.indices.tolist()
    assert scores == expected.scores.tolist()
    facts = outcome.facts
    assert (facts["n"], facts["budget"], facts["kept"], facts["short_by"]) == (130, 13, 13, 0)
    assert facts["value"] == expected.value
    assert facts["certificate"]["upper_bound"] == expected.certificate.upper_bound
    assert facts["certificate"]["feasible_set"]["scope"] == "corpus"
    assert not failed(outcome)


def test_where_shards_are_worked_on_leaves_no_trace_in_what_is_published(
    corpus: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, run = copied(Project(corpus.settings), tmp_path / "other"), Project.run
    solved(corpus)
    monkeypatch.setattr(solver, "_SPREAD", 0)
    monkeypatch.setattr(stage, "_WORTH_WORKERS", 0)
    with Processes(2, threads=1) as processes:
        asked = []

        def session(worker: Any, **more: Any) -> Any:
            asked.append("passes")
            return Processes.session(processes, worker, **more)

        def each(worker: Any, items: Any, **more: Any) -> Any:
            asked.append("shards")
            return Processes.each(processes, worker, items, **more)

        monkeypatch.setattr(processes, "session", session)
        monkeypatch.setattr(processes, "each", each)
        monkeypatch.setattr(Project, "run", lambda self: replace(run(self), compute=processes))
        solved(other)
        assert asked == ["shards", "shards", "passes"]
    own, theirs = (tree(project.store.folder(STATE, None)) for project in (corpus, other))
    assert own == theirs and any(name.endswith("state.json") for name in own)


def test_documents_of_one_name_in_two_snapshots_are_two(corpus: Project, tmp_path: Path) -> None:
    """Equal texts under equal names, in all: only the snapshot tells them apart."""
    for snapshot in ("A", "B"):
        write_shard(tmp_path, snapshot, "000", 5, ids=[None] * 5, texts=["the river carries cold water"] * 5)
    both = corpus.with_settings(**{"source.url": str(tmp_path), "select.budget": "30%"})
    for snapshot in SNAPSHOTS:
        hide(corpus, snapshot)
    for snapshot in ("A", "B"):
        for name in EMBEDDED:
            both.stage(name, snapshot)
    outcome = solved(both)
    assert outcome.facts["kept"] == len(mask_of(outcome, ("A", "B"))[0]) == 3
    for snapshot in ("A", "B"):
        rows = rows_of(both.stage("datamask_masks", snapshot).published)
        assert set(rows.filter("selected")["rank"]) == set(range(1, rows["selected"].sum() + 1))


def test_a_later_snapshot_is_chosen_beside_the_earlier_ones_whose_masks_stay(corpus: Project) -> None:
    hidden = hide(corpus, SECOND)
    first = solved(corpus)
    assert failed(first) == {"every_snapshot_embedded": {"skipped": f"{SECOND} (e5_embeddings not published)"}}
    assert mask_of(first, (FIRST,))[0] == in_memory(corpus, (FIRST,), 7).indices.tolist()
    mask = corpus.stage("datamask_masks", FIRST)
    manifest = corpus.stage("fineweb_mask_manifest", FIRST)
    assert not failed(mask)
    assert not failed(manifest)

    show(hidden)
    assert unsolved(corpus.store, corpus.settings) == {SECOND: "new"}
    second = solved(corpus)
    assert unsolved(corpus.store, corpus.settings) == {}
    for shard in first.published.shards:
        assert second.published.path(shard).samefile(first.published.path(shard))
    entry = state(first)["snapshots"][FIRST]
    given = Given(entry["amount"], np.array(entry["mean_vector"]), entry["quality"])
    expected = in_memory(corpus, (SECOND,), 7, given)
    assert mask_of(second, (SECOND,))[0] == expected.indices.tolist()
    assert second.facts["value"] == expected.value
    assert second.facts["certificate"]["upper_bound"] == expected.certificate.upper_bound
    assert second.facts["certificate"]["feasible_set"]["given"] == 7
    assert (second.facts["kept"], second.facts["rounds"], second.facts["snapshots_new"]) == (14, 2, 1)

    # the first one's masks are made from their round, so nothing of it has to be made again
    assert outdated_masks(corpus.store, corpus.settings).keys() == {SECOND}
    assert corpus.stage("datamask_masks", FIRST).published.fingerprint == mask.published.fingerprint
    assert corpus.stage("fineweb_mask_manifest", FIRST).published.fingerprint == manifest.published.fingerprint
    before = tree(corpus.store.root)
    assert solved(corpus).published.fingerprint == second.published.fingerprint
    assert tree(corpus.store.root) == before


def test_resolve_chooses_all_anew_as_if_all_had_been_there(corpus: Project, tmp_path: Path) -> None:
    anew = corpus.with_settings(**{"select.on_new_snapshot": "resolve"})
    twin = copied(anew, tmp_path / "twin")
    hidden = hide(anew, SECOND)
    solved(anew)
    show(hidden)
    outcome = solved(anew)
    assert (outcome.facts["rounds"], outcome.facts["snapshots_new"], outcome.facts["kept"]) == (1, 2, 13)
    assert tree(outcome.published.folder) == tree(solved(twin).published.folder)


def test_a_snapshot_embedded_anew_is_solved_again_beside_the_others(corpus: Project) -> None:
    first = solved(corpus)
    corpus.stage("datamask_masks", SECOND)
    publish_vectors(corpus, {}, SECOND)
    assert unsolved(corpus.store, corpus.settings) == {SECOND: "published anew since"}
    with pytest.raises(InconsistentFiles, match=rf"generation of e5_embeddings of {SECOND} .* job solve_corpus"):
        corpus.stage("datamask_masks", SECOND)
    again = solved(corpus)
    assert again.facts["snapshots_new"] == 1
    kept_of_first = state(first)["snapshots"][FIRST]["kept"]
    assert again.facts["budget"] == again.facts["kept"] == kept_of_first + 7
    assert mask_of(again, (FIRST,)) == mask_of(first, (FIRST,))
    assert sorted(state(again)["rounds"][1]["covers"]) == list(SNAPSHOTS)
    assert corpus.stage("datamask_masks", SECOND).published is not None


def test_other_settings_choose_all_anew(corpus: Project) -> None:
    solved(corpus)
    other = corpus.with_settings(**{"select.lambda": 0.3})
    assert unsolved(other.store, other.settings) == dict.fromkeys(SNAPSHOTS, "solved under other settings or code")
    assert solved(other).facts["snapshots_new"] == 2


def test_a_snapshot_that_went_leaves_no_certificate(corpus: Project) -> None:
    solved(corpus)
    hide(corpus, SECOND)
    outcome = solved(corpus)
    assert outcome.facts["value"] is None
    assert "resolve" in outcome.facts["certificate"]["reason"]
    assert outcome.facts["snapshots_solved"] == 1


def test_each_snapshots_masks_are_its_part_ranked_by_themselves(corpus: Project) -> None:
    outcome = solved(corpus)
    kept = 0
    for snapshot in SNAPSHOTS:
        masks = corpus.stage("datamask_masks", snapshot)
        assert not failed(masks)
        rows = rows_of(masks.published)
        chosen, scores = mask_of(outcome, (snapshot,))
        assert rows["selected"].arg_true().to_list() == chosen
        assert rows["score"].to_list() == scores
        assert rows.sort("rank")["score"].to_list() == sorted(scores, reverse=True)
        assert sorted(rows["rank"]) == list(range(1, 37))
        assert masks.facts["certificate"] == outcome.facts["certificate"]
        assert masks.facts["corpus"]["budget"] == 13
        kept += masks.facts["kept"]
        manifest = corpus.stage("fineweb_mask_manifest", snapshot)
        assert not failed(manifest)
        sidecar = json.loads((manifest.published.folder / "manifest.json").read_text())
        assert (sidecar["scope"], sidecar["solver"]) == ("corpus", "certified")
        assert sidecar["corpus"]["snapshots"] == 2
        assert sidecar["fingerprints"]["corpus_selection_state"] == outcome.published.fingerprint
        assert sidecar["certificate"]["gap"] >= 0
    assert kept == 13


def test_masks_of_an_earlier_state_are_refused_by_the_manifest(corpus: Project) -> None:
    solved(corpus)
    corpus.stage("datamask_masks", FIRST)
    anew = corpus.with_settings(**{"select.on_new_snapshot": "resolve"})
    publish_vectors(anew, {}, SECOND)
    solved(anew)
    outcome = anew.stage("fineweb_mask_manifest", FIRST)
    assert outcome.published is None
    assert "another generation of corpus_selection_state" in failed(outcome)["made_under_these_settings"]["different"]


def test_what_is_missing_says_which_job_makes_it(corpus: Project) -> None:
    with pytest.raises(NotPublished, match=r"corpus_selection_state is not published .* job solve_corpus first"):
        corpus.stage("datamask_masks", FIRST)
    hidden = hide(corpus, SECOND)
    solved(corpus)
    show(hidden)
    with pytest.raises(NotPublished, match=f"{SECOND} is not in corpus_selection_state; run the job solve_corpus"):
        corpus.stage("datamask_masks", SECOND)
    for snapshot in SNAPSHOTS:
        hide(corpus, snapshot)
    with pytest.raises(NotPublished, match=r"no snapshot .* has published e5_embeddings; run the job embed first"):
        solved(corpus)
    with pytest.raises(SettingsError, match=r"select\.scope = split: corpus_selection_state is what scope = corpus"):
        solved(corpus.with_settings(**{"select.scope": "split"}))


def test_a_number_of_documents_is_shared_out_once(corpus: Project) -> None:
    fixed = corpus.with_settings(**{"select.budget": "20"})
    hidden = hide(fixed, SECOND)
    assert solved(fixed).facts["kept"] == 20
    show(hidden)
    with pytest.raises(SettingsError, match=r"= 20 was shared out among 1 snapshots already; .* 'resolve'"):
        solved(fixed)
    assert solved(fixed.with_settings(**{"select.on_new_snapshot": "resolve"})).facts["kept"] == 20


def test_a_budget_that_the_corpus_cannot_meet_names_it(corpus: Project) -> None:
    with pytest.raises(SettingsError, match=r"asks for 73 of the 130 documents of the corpus, but .* left 72; lower"):
        solved(corpus.with_settings(**{"select.budget": "73"}))


@pytest.mark.parametrize(("quota", "budget"), [("snapshot", "10%"), ("cluster", "2000tok"), ("domain", "2000tok")])
def test_quotas_of_the_corpus(corpus: Project, quota: str, budget: str) -> None:
    shared = corpus.with_settings(**{"select.quota": quota, "select.budget": budget})
    outcome = solved(shared)
    assert not failed(outcome)
    told = {row["group"]: (row["asked"], row["kept"]) for row in outcome.facts["quotas"] or []}
    if quota == "snapshot":
        assert told == {FIRST: (7, 7), SECOND: (6, 6)}
    elif quota == "cluster":
        assert sum(asked for asked, _ in told.values()) == 2000
        assert all(kept <= asked for asked, kept in told.values())
    for snapshot in SNAPSHOTS:
        assert not failed(shared.stage("datamask_masks", snapshot))
        manifest = shared.stage("fineweb_mask_manifest", snapshot)
        assert not failed(manifest)
        if budget.endswith("tok"):
            assert manifest.facts["tokens_kept"] == state(outcome)["snapshots"][snapshot]["tokens"]


def test_ranks_of_many_shards_are_those_of_one_sorted_list(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shards = {f"s{k}": rng.integers(0, 5, size) / 4 - 0.5 for k, size in enumerate((7, 0, 1, 40))}
    tables = {
        name: pl.DataFrame({"doc_id": [f"{name}/{k}" for k in range(len(s))], "score": s}).to_arrow()
        for name, s in shards.items()
    }
    # a folder whose name SQL would take for the end of a string
    work = tmp_path / "somebody's"
    work.mkdir()
    found = ranked(work, list(shards), lambda name: [tables[name].cast(tables["s0"].schema)])
    ids = [f"{name}/{k}" for name, s in shards.items() for k in range(len(s))]
    order = np.lexsort((hash64(ids, 0, "tie"), -np.concatenate(list(shards.values()))))
    ranks = np.empty(len(ids), int)
    ranks[order] = np.arange(1, len(ids) + 1)
    assert np.concatenate([found[name] for name in shards]).tolist() == ranks.tolist()


def test_names_of_many_snapshots_stay_one_line() -> None:
    told = named({f"S{k:03d}": "new" for k in range(110)})
    assert told.startswith("S000 (new); S001 (new)")
    assert told.endswith("and 100 more")


def test_killed_while_it_is_solved_it_goes_on_and_ends_with_the_same_bytes(
    corpus: Project, small_source: Path, labels: Path, tmp_path: Path
) -> None:
    twin = copied(corpus, tmp_path / "clean")
    solved(twin)
    for snapshot in SNAPSHOTS:
        twin.stage("datamask_masks", snapshot)
    clean = tree(twin.store.root)

    def run(order: str) -> str:
        command = [sys.executable, "-m", "tests.stages.killing", small_source, corpus.store.root, labels]
        command += [",".join(SNAPSHOTS), "select.compare_steps=0", "select.scope=corpus"]
        done = subprocess.run(
            [str(part) for part in command],
            cwd=REPOSITORY,
            input=order,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return done.stdout

    moments = (
        f"{SECOND}@000_00000/shard.json",
        "400",  # among the passes over the scratch shards
        f"{SECOND}@000_00000.parquet.done.json",
        "corpus_selection_state/current.json",
    )
    codes = [line.split()[0] for line in run("".join(f"{moment}\n" for moment in (*moments, ""))).splitlines()]
    assert codes == [str(-signal.SIGKILL)] * len(moments) + ["0"]
    assert tree(corpus.store.root) == clean
    shutil.rmtree(twin.store.root)
