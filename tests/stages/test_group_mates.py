"""Group-MATES stage by stage: what is probed, fitted, chosen and trained on, and what is refused."""

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_datamask.influence.language_model import NoOptimizerState
from dagster_datamask.influence.reference import OverlapError, text_key
from dagster_datamask.influence.relational import InfluenceModel
from dagster_datamask.keyed import hash64
from dagster_datamask.scoring.models import content_revision
from dagster_datamask.selection.budgets import largest_remainder
from dagster_datamask.settings import GroupMatesSettings, SettingsError
from dagster_datamask.shards.generations import NotPublished
from dagster_datamask.stages import language_model, rollouts
from dagster_datamask.stages.base import Outcome
from dagster_datamask.stages.freshness import unfitted
from dagster_datamask.stages.group_selection import fitting
from dagster_datamask.stages.influence import read_clusters
from tests.conftest import SNAPSHOTS
from tests.project import Project, settings_for, text_of, write_shard

from .conftest import copied, failed, rows_of, tree
from .group_mates import on_a_copy, run_stage, through_stages, tiny, write_reference

FIRST = SNAPSHOTS[0]
Staged = tuple[Project, Mapping[str, Outcome]]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reference(tmp_path_factory.mktemp("reference") / "reference.parquet")


@pytest.fixture(scope="session")
def ready(tmp_path_factory: pytest.TempPathFactory, embedded: Project, labels: Path, reference: Path) -> Project:
    """Both snapshots embedded, nothing probed yet. Copy it, never write into it."""
    root = tmp_path_factory.mktemp("ready") / "root"
    project = copied(embedded, root)
    overrides = tiny(reference, "select.compare_steps=0", "select.strategy=group_mates")
    return Project(settings_for(Path(project.settings.source.url), root, labels, *overrides))


@pytest.fixture(scope="session")
def staged(tmp_path_factory: pytest.TempPathFactory, ready: Project) -> Staged:
    """Two stages over both snapshots. Read it, never write into it."""
    project = copied(ready, tmp_path_factory.mktemp("staged") / "root")
    return project, through_stages(project)


def chosen(outcome: Outcome) -> set[str]:
    assert outcome.published is not None
    return set(rows_of(outcome.published).filter("selected")["doc_id"])


def probed(outcome: Outcome) -> pl.DataFrame:
    with pa.memory_map(str(outcome.published.folder / "documents.arrow")) as file:
        return pl.from_arrow(pa.ipc.open_file(file).read_all())


class TestLanguageModel:
    def test_one_run_goes_through_all_stages(self, staged: Staged) -> None:
        _, done = staged
        models = [done[name].facts for name in ("warmup_model", "stage_1/continued_model", "stage_2/continued_model")]
        assert [facts["step"] for facts in models] == [20, 25, 30]
        assert {facts["planned_steps"] for facts in models} == {30}
        # warmup-stable-decay: the last tenth of 30 steps falls to a hundredth
        assert [facts["lr"] for facts in models] == [1e-3, 1e-3, pytest.approx(1e-5)]
        for stage, start in ((1, models[0]), (2, models[1])):
            assert done[f"stage_{stage}/rollout_sets"].facts["checkpoint"] == start["checkpoint"]
            assert done[f"stage_{stage}/continued_model"].facts["snapshots"] == list(SNAPSHOTS)
        losses = [models[1]["held_out_loss_before"], models[1]["held_out_loss_after"], models[2]["held_out_loss_after"]]
        assert losses[0] > losses[1] > losses[2]
        assert models[2]["held_out_loss_before"] == losses[1]

    def test_it_is_trained_on_exactly_what_was_chosen(self, staged: Staged) -> None:
        _, done = staged
        for stage in (1, 2):
            kept = sum(done[f"stage_{stage}/group_mates_selection {s}"].facts["kept"] for s in SNAPSHOTS)
            assert done[f"stage_{stage}/continued_model"].counts == {"trained_on": kept}

    def test_nothing_chosen_yet_names_the_job(self, ready: Project, staged: Staged, tmp_path: Path) -> None:
        project = on_a_copy(staged[0], tmp_path / "root", "group_mates_selection", "continued_model")
        with pytest.raises(NotPublished, match=r"stage 1 has chosen nothing yet .*run the job group_mates_select_1"):
            run_stage(project, "stage_1/continued_model")
        with pytest.raises(NotPublished, match=r"warmup_model is not published .*run the job group_mates_fit_1 first"):
            run_stage(ready, "stage_1/rollout_sets")

    def test_a_given_checkpoint_is_taken_as_it_is(self, staged: Staged, ready: Project, tmp_path: Path) -> None:
        given = staged[1]["warmup_model"].published.folder / "checkpoint"
        project = copied(ready, tmp_path / "root").with_settings(
            **{"group_mates.checkpoint": str(given), "group_mates.tokenizer": str(given)}
        )
        facts = run_stage(project, "warmup_model").facts
        assert facts["checkpoint"] == staged[1]["warmup_model"].facts["checkpoint"]
        assert (facts["step"], facts["steps"], facts["planned_steps"]) == (20, 0, 30)

    def test_the_schedule_of_a_given_checkpoint_begins_where_it_is(self) -> None:
        asked = GroupMatesSettings(checkpoint="there", tokenizer="there", stages=2, continue_steps=10, lr=1e-3)
        # the last tenth of the 20 steps that are taken here falls, not the last tenth of 1020
        rates = [language_model.training_options(asked, 1020).rate(step) for step in range(1001, 1021)]
        assert rates == pytest.approx([*[1e-3] * 18, 1e-3 * (0.01 + 0.99 / 2), 1e-5])
        own = asked.model_copy(update={"checkpoint": "", "warmup_steps": 1000})
        rates = [language_model.training_options(own, 1020).rate(step) for step in (25, 50, 918, 969, 1020)]
        assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3 * (0.01 + 0.99 / 2), 1e-5])

    def test_a_checkpoint_without_optimizer_state_is_refused_by_the_probe(
        self, staged: Staged, ready: Project, tmp_path: Path
    ) -> None:
        bare = tmp_path / "bare"
        shutil.copytree(staged[1]["warmup_model"].published.folder / "checkpoint", bare)
        (bare / "optimizer.safetensors").unlink()
        project = copied(ready, tmp_path / "root").with_settings(
            **{"group_mates.checkpoint": str(bare), "group_mates.tokenizer": str(bare)}
        )
        assert run_stage(project, "warmup_model").facts["optimizer"] == "no optimizer state"
        with pytest.raises(NoOptimizerState, match="without optimizer state"):
            run_stage(project, "stage_1/rollout_sets")

    @pytest.mark.parametrize(("name", "step"), [("warmup_model", 20), ("stage_1/continued_model", 25)])
    def test_checkpoints_half_saved_by_a_killed_run_stand_in_nobody_s_way(
        self, staged: Staged, tmp_path: Path, name: str, step: int
    ) -> None:
        made = staged[1][name].published
        project = on_a_copy(staged[0], tmp_path / "root", name.rpartition("/")[2])
        folder = project.store.root / name / made.folder.name
        for half in (folder / f".work/training/.step-{step:08d}.7.tmp", folder / ".checkpoint.7.tmp"):
            half.mkdir(parents=True)
            (half / "model.safetensors").write_bytes(b"half")
        again = run_stage(project, name)
        assert again.published.folder == folder
        assert tree(folder) == tree(made.folder)


class TestRollouts:
    def test_records_add_up_and_sides_do_not_mix(self, staged: Staged) -> None:
        outcome = staged[1]["stage_1/rollout_sets"]
        assert outcome.counts == {"bootstrap": 24, "probed": outcome.facts["documents"], "random": 36}
        rows = pl.concat(pl.read_parquet(path) for path in sorted(outcome.published.folder.glob("*_0*.parquet"))).sort(
            "policy", "trajectory_id", "position"
        )
        assert rows["doc_id"].n_unique() > 10
        for (_, _), trajectory in rows.group_by("policy", "trajectory_id"):
            assert trajectory["doc_id"].n_unique() == 3
            assert trajectory["influence"].cum_sum().to_list() == pytest.approx(trajectory["cumulative"].to_list())
            held = rollouts.sides(trajectory["doc_id"].to_list(), 0, 0.4)
            assert held.all() or not held.any()
        assert set(rows["base_loss"]) == {outcome.facts["base_loss"]}

    def test_what_is_probed_survived_and_was_not_trained_on(self, staged: Staged) -> None:
        project, done = staged
        found = probed(done["stage_1/rollout_sets"]).select("snapshot", "doc_id")
        sample = pl.read_parquet(project.store.current("quality_calibration").folder / "sample.parquet")
        threshold = project.store.current("quality_calibration").facts["prune_threshold"]
        warm = pl.read_parquet(done["warmup_model"].published.folder / "sample.parquet")
        survivors = sample.filter(pl.col("quality") >= threshold).select("snapshot", "doc_id")
        expected = survivors.join(warm, on=["snapshot", "doc_id"], how="anti")
        assert sorted(found.rows()) == sorted(expected.rows())
        assert warm.height == 20

    def test_a_stage_does_not_probe_what_an_earlier_one_trained_on(self, staged: Staged) -> None:
        _, done = staged
        first, second = (probed(done[f"stage_{number}/rollout_sets"]) for number in (1, 2))
        trained = {
            (snapshot, doc_id)
            for snapshot in SNAPSHOTS
            for doc_id in chosen(done[f"stage_1/group_mates_selection {snapshot}"])
        }
        names = [set(zip(rows["snapshot"], rows["doc_id"], strict=True)) for rows in (first, second)]
        assert names[1] == names[0] - trained
        assert len(names[0] & trained) == len(names[0]) - len(names[1]) > 0
        read = {"warmup_model", "stage_1/continued_model", "quality_calibration"}
        assert read <= done["stage_2/rollout_sets"].published.inputs.keys()

    def test_equal_texts_and_equal_ids_are_probed_once(self, tmp_path: Path, labels: Path, reference: Path) -> None:
        source = tmp_path / "source"
        # each text twice, with other white space; and behind them rows of one id and other texts
        texts = [text if k % 2 else text.replace(" ", "  ") for k in range(60) for text in [text_of(f"text {k // 2}")]]
        write_shard(source, FIRST, "000_00000", 60, texts=texts)
        write_shard(source, FIRST, "001_00000", 20, ids=[f"id {k // 2}" for k in range(20)])
        overrides = ("score.calibration_sample=80", "group_mates.warmup_documents=5", "prune.ratio=0.0")
        project = Project(settings_for(source, tmp_path / "root", labels, *tiny(reference, *overrides)))
        project.fit_global()
        run_stage(project, "warmup_model")
        outcome = run_stage(project, "stage_1/rollout_sets")
        rows = probed(outcome)
        keys = [text_key(text) for text in rows["text"]]
        warm = pl.read_parquet(outcome.published.folder.parents[2] / "warmup_model/*/sample.parquet")
        warmed = {text_key(text) for text in warm["text"]}
        assert len(set(keys)) == len(keys) and not set(keys) & warmed
        # of one id the first row, as raw_shards has it
        firsts = [text_of(f"{FIRST}/001_00000/{k}") for k in range(0, 20, 2)]
        every = {text_key(text) for text in [*texts, *firsts]}
        assert set(keys) == every - warmed
        facts = {name: outcome.facts[name] for name in ("repeated_ids", "trained_on", "repeated_texts")}
        twice = len(warmed & {text_key(text) for text in texts})
        once = len(warmed & {text_key(text) for text in firsts})
        assert facts == {"repeated_ids": 10, "trained_on": 2 * twice + once, "repeated_texts": 30 - twice}
        held = rollouts.sides([f"{row['snapshot']}/{row['doc_id']}" for row in rows.to_dicts()], 0, 0.4)
        assert 0 < held.sum() < len(held)
        records = pl.read_parquet(outcome.published.folder / "random_00000.parquet")
        assert set(records["doc_id"]) <= {f"{row['snapshot']}/{row['doc_id']}" for row in rows.to_dicts()}

    @pytest.mark.parametrize(("setting", "processes"), [(1, 1), (2, 2), (0, len(os.sched_getaffinity(0)))])
    def test_so_many_processes_as_are_asked_for_roll_out(
        self, staged: Staged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: int, processes: int
    ) -> None:
        used: list[int] = []
        roll_out = rollouts.Prober.roll_out

        def counted(self: rollouts.Prober, documents: list, trajectories: np.ndarray, ids: list) -> object:
            used.append(self.processes)
            return roll_out(self, documents, trajectories, ids)

        monkeypatch.setattr(rollouts.Prober, "roll_out", counted)
        project = on_a_copy(staged[0], tmp_path / "root", "stage_1", "stage_2")
        outcome = run_stage(project.with_settings(**{"compute.processes": setting}), "stage_1/rollout_sets")
        assert set(used) == {processes}
        assert outcome.published.fingerprint == staged[1]["stage_1/rollout_sets"].published.fingerprint

    def test_an_individual_model_s_bootstrap_draws_the_extremes_of_f(self, staged: Staged, tmp_path: Path) -> None:
        project = on_a_copy(staged[0], tmp_path / "root", "stage_1", "stage_2").with_settings(
            **{"group_mates.mode": "individual", "group_mates.method": "individual"}
        )
        outcome = run_stage(project, "stage_1/rollout_sets")
        found = rollouts.read_rollouts(outcome.published)
        names = found.names
        model = InfluenceModel.load(outcome.published.folder / "initial")
        f = dict(zip(names, model.influence(model.embed(found.features)), strict=True))
        held = dict(zip(names, rollouts.sides(names, 0, 0.4), strict=True))
        for policy, trajectory in zip(found.policies, found.trajectories.tolist(), strict=True):
            if policy == "random":
                continue
            ids = [names[i] for i in trajectory]
            for t, name in enumerate(ids):
                # by value: documents that begin alike have one vector
                left = sorted(f[x] for x in names if held[x] == held[name] and x not in ids[:t])
                assert f[name] in left[:2] + left[-2:]

    def test_a_killed_run_goes_on_at_its_chunk_and_gives_the_same_bytes(
        self, staged: Staged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rollouts, "CHUNK", 4)
        whole = on_a_copy(staged[0], tmp_path / "whole", "stage_1", "stage_2")
        run_stage(whole, "stage_1/rollout_sets")
        broken = on_a_copy(staged[0], tmp_path / "broken", "stage_1", "stage_2")
        done: list[int] = []
        roll_out = rollouts.Prober.roll_out

        def counted(self: rollouts.Prober, documents: list, trajectories: np.ndarray, ids: list) -> object:
            if len(done) == 4:
                raise KeyboardInterrupt
            done.append(len(trajectories))
            return roll_out(self, documents, trajectories, ids)

        monkeypatch.setattr(rollouts.Prober, "roll_out", counted)
        with pytest.raises(KeyboardInterrupt):
            run_stage(broken, "stage_1/rollout_sets")
        assert broken.store.published("stage_1/rollout_sets") is None
        assert done == [4, 4, 4, 4]
        done[:] = []
        run_stage(broken, "stage_1/rollout_sets")
        # three random chunks and one of two bootstrap chunks were there
        assert done == [4]
        assert tree(whole.store.root / "stage_1") == tree(broken.store.root / "stage_1")

    def test_losses_that_are_no_numbers_are_recorded_and_counted(self, staged: Staged, tmp_path: Path) -> None:
        project = on_a_copy(staged[0], tmp_path / "root", "stage_1", "stage_2").with_settings(
            **{"group_mates.probe_lr": 1e30, "group_mates.bootstrap_trajectories": 0}
        )
        outcome = run_stage(project, "stage_1/rollout_sets")
        rows = pl.read_parquet(outcome.published.folder / "random_00000.parquet")
        lost = rows.filter(pl.col("reason") == "non_finite_loss")
        assert outcome.counts["not_finite"] == outcome.facts["not_finite"] == lost.height > 0
        assert lost["influence"].null_count() == lost.height
        assert failed(outcome) == {"every_loss_finite": {"not_finite": lost.height, "steps": 36}}

    def test_too_few_documents_say_what_to_raise(self, staged: Staged, tmp_path: Path) -> None:
        project = on_a_copy(staged[0], tmp_path / "root", "stage_1", "stage_2").with_settings(
            **{"group_mates.probe_documents": 4}
        )
        with pytest.raises(SettingsError, match=r"4 documents can be probed, .*raise score.calibration_sample"):
            run_stage(project, "stage_1/rollout_sets")


class TestReference:
    def test_one_that_overlaps_what_is_probed_is_refused_by_row(self, staged: Staged, tmp_path: Path) -> None:
        sample = pq.read_table(staged[0].store.current("quality_calibration").folder / "sample.parquet")
        best = sample.sort_by([("quality", "descending")])["text"].to_pylist()
        path = tmp_path / "overlap.parquet"
        # the same text to whoever reads it, though not the same bytes
        pq.write_table(pa.table({"text": [f"  {text.upper()}" for text in best]}), path)
        project = on_a_copy(staged[0], tmp_path / "root", "stage_1", "stage_2").with_settings(
            **{"group_mates.reference": str(path), "group_mates.held_out": "", "group_mates.reference_documents": 40}
        )
        with pytest.raises(OverlapError, match="rows have the text of a reference row"):
            run_stage(project, "stage_1/rollout_sets")

    def test_none_and_one_that_is_not_there(self, staged: Staged, tmp_path: Path) -> None:
        project = on_a_copy(staged[0], tmp_path / "root", "stage_1", "stage_2")
        with pytest.raises(SettingsError, match=r"group_mates.reference is not set"):
            run_stage(project.with_settings(**{"group_mates.reference": ""}), "stage_1/rollout_sets")
        gone = project.with_settings(**{"group_mates.held_out": "/nowhere/held.parquet"})
        with pytest.raises(SettingsError, match=r"group_mates.held_out: /nowhere/held.parquet does not exist"):
            run_stage(gone, "stage_1/rollout_sets")

    def test_two_sets_that_share_a_text_are_refused(self, staged: Staged, reference: Path, tmp_path: Path) -> None:
        other = tmp_path / "other.parquet"
        pq.write_table(pq.read_table(reference), other)
        project = on_a_copy(staged[0], tmp_path / "root", "stage_1", "stage_2").with_settings(
            **{"group_mates.held_out": str(other)}
        )
        with pytest.raises(OverlapError, match=r"group_mates.held_out: 4 rows have the text of a reference row"):
            run_stage(project, "stage_1/rollout_sets")

    @pytest.mark.parametrize("backbone", ["frozen", "fine_tuned"])
    def test_a_candidate_that_was_never_sampled_is_refused_by_name(
        self, staged: Staged, tmp_path: Path, backbone: str
    ) -> None:
        project, _ = staged
        sampled = [project.store.current("quality_calibration"), project.store.current("warmup_model")]
        seen = {text for made in sampled for text in pl.read_parquet(made.folder / "sample.parquet")["text"]}
        rows = pl.read_parquet(f"{project.settings.source.url}/data/{FIRST}/*.parquet").select("id", "text")
        candidates = rows_of(project.store.current("pruned_documents", FIRST)).filter(pl.col("decision").is_null())
        free = rows.filter(pl.col("id").is_in(candidates["doc_id"]) & ~pl.col("text").is_in(seen))
        path = tmp_path / "leak.parquet"
        pq.write_table(pa.table({"text": [free["text"][0].upper()]}), path)
        project = on_a_copy(project, tmp_path / "root", "stage_1", "stage_2").with_settings(
            **{"group_mates.reference": str(path), "group_mates.held_out": ""}
        )
        for name in ("rollout_sets", "influence_model"):
            run_stage(project, f"stage_1/{name}")
        if backbone == "fine_tuned":
            project = project.with_settings(**{"group_mates.backbone": backbone})
        with pytest.raises(
            OverlapError, match=rf"the documents of {FIRST} that can be chosen: 1 rows .*{free['id'][0]}"
        ):
            run_stage(project, "stage_1/influence_scores", FIRST)
        assert project.store.published("stage_1/influence_scores", FIRST) is None


class TestInfluence:
    def test_the_model_is_fitted_to_all_rollouts_and_has_a_card(self, staged: Staged) -> None:
        outcome = staged[1]["stage_1/influence_model"]
        facts = outcome.facts
        assert sum(sum(counts.values()) for counts in facts["trajectories_of"].values()) == 20
        assert all(counts["left_out"] == 0 for counts in facts["trajectories_of"].values())
        assert facts["beta"] >= 1.0 and facts["clusters"] == 4
        page = (outcome.published.folder / "card.md").read_text("utf-8")
        assert f"α {facts['alpha']:.4f}, β {facts['beta']:.4f}" in page and "of another trajectory (control)" in page
        assert json.loads((outcome.published.folder / "card.json").read_text())["card"]["identity"] == facts["model"]

    def test_a_document_s_score_is_the_model_s_of_its_stored_vector(self, staged: Staged) -> None:
        project, done = staged
        model = InfluenceModel.load(done["stage_1/influence_model"].published.folder)
        scored = done[f"stage_1/influence_scores {FIRST}"].published
        vectors = project.store.current("e5_embeddings", FIRST)
        for shard in scored.shards:
            found, stored = (
                {
                    row["doc_id"]: row
                    for row in pa.ipc.open_file(pa.memory_map(str(p.path(shard)))).read_all().to_pylist()
                }
                for p in (scored, vectors)
            )
            assert found.keys() == {doc_id for doc_id, row in stored.items() if row["embedding"] is not None}
            for doc_id, row in found.items():
                h = model.embed(np.array([stored[doc_id]["embedding"]], np.float16))
                assert row["influence"] == model.influence(h)[0]
                assert row["embedding"] == pytest.approx(h[0].astype(np.float16).tolist())

    def test_the_last_stage_s_scores_are_what_the_joint_objective_reads(self, staged: Staged) -> None:
        last, stage = (staged[1][f"{name} {FIRST}"] for name in ("influence_scores", "stage_2/influence_scores"))
        rows = rows_of(last.published)
        with pa.memory_map(str(stage.published.path(stage.published.shards[0]))) as file:
            first = pa.ipc.open_file(file).read_all()
        assert rows.columns == ["doc_id", "score", "reason"]
        assert rows["score"].to_list()[: len(first)] == first["influence"].to_pylist()
        assert last.facts["model"] == staged[1]["stage_2/influence_model"].facts["model"]

    def test_another_encoder_is_refused(self, staged: Staged, tmp_path: Path) -> None:
        project = on_a_copy(staged[0], tmp_path / "root", "stage_2")
        pointer = project.store.root / "e5_embeddings" / FIRST / "current.json"
        other = json.loads(pointer.read_text())
        other["inputs"]["encoder"] = "another"
        pointer.write_text(json.dumps(other))
        with pytest.raises(ValueError, match="fitted to vectors of another encoder"):
            run_stage(project, "stage_1/influence_scores", FIRST)


def naive(h: np.ndarray, f: np.ndarray, n: int, ids: list[str], alpha: float, beta: float) -> list[int]:
    """The greedy of Eq. 9–13, similarity by similarity."""
    ties = hash64(ids, 0, "tie")
    picked: list[int] = []
    while len(picked) < n:
        left = [i for i in range(len(f)) if i not in picked]
        if picked:
            score = {i: alpha * max(0.0, 1 - np.mean([h[i] @ h[j] for j in picked]) / beta) * f[i] for i in left}
        else:
            score = {i: f[i] for i in left}
        picked.append(min(left, key=lambda i: (score[i], ties[i])))
    return picked


class TestSelection:
    def test_it_is_the_greedy_in_each_cluster_with_budgets_by_size(self, staged: Staged) -> None:
        done = staged[1]
        fitted = done["stage_1/influence_model"]
        for snapshot in SNAPSHOTS:
            scored = done[f"stage_1/influence_scores {snapshot}"].published
            rows = pa.concat_tables(
                pa.ipc.open_file(pa.memory_map(str(scored.path(shard)))).read_all() for shard in scored.shards
            )
            ids, f = rows["doc_id"].to_pylist(), rows["influence"].to_numpy()
            h = np.array(rows["embedding"].to_pylist(), np.float64)
            labels = (h @ read_clusters(fitted.published).T.astype(np.float64)).argmax(axis=1)
            sizes = np.bincount(labels, minlength=4).tolist()
            expected = set()
            for k, amount in enumerate(largest_remainder(4, sizes, sizes)):
                members = np.flatnonzero(labels == k)
                names = [ids[i] for i in members]
                picked = naive(h[members], f[members], amount, names, fitted.facts["alpha"], fitted.facts["beta"])
                expected |= {names[i] for i in picked}
            assert chosen(done[f"stage_1/group_mates_selection {snapshot}"]) == expected

    def test_documents_are_chosen_once_and_the_budget_is_shared(self, staged: Staged) -> None:
        done = staged[1]
        for snapshot in SNAPSHOTS:
            first, second = (done[f"stage_{n}/group_mates_selection {snapshot}"] for n in (1, 2))
            union = done[f"group_mates_selection {snapshot}"]
            # a tenth of 65 documents is 6.5, and 7 are shared out as 4 and 3
            assert (len(chosen(first)), len(chosen(second))) == (4, 3)
            assert chosen(first) | chosen(second) == chosen(union)
            assert len(chosen(union)) == 7 == union.facts["budget"]
            before = rows_of(second.published).filter(pl.col("reason") == "chosen in stage 1")
            assert set(before["doc_id"]) == chosen(first)
            assert before["rank"].null_count() == before["score"].null_count() == 4
            assert second.counts == {"chosen_before": 4, "kept": 3, "not_selected": second.facts["documents"] - 3}

    def test_the_union_says_which_stage_and_in_which_order(self, staged: Staged) -> None:
        done = staged[1]
        ordered = rows_of(done[f"group_mates_selection {FIRST}"].published).sort("split", "rank")
        union = ordered.filter(split=1), ordered.filter(split=2)
        assert [part["rank"].to_list() for part in union] == [list(range(1, len(part) + 1)) for part in union]
        assert ordered["selected"].to_list() == [True] * 7 + [False] * (len(ordered) - 7)
        assert ordered["split"].to_list() == [1] * 4 + [2] * (len(ordered) - 4)
        for number in (1, 2):
            own = rows_of(done[f"stage_{number}/group_mates_selection {FIRST}"].published).filter("selected")
            assert (
                own.sort("rank")["doc_id"].to_list() == ordered.filter(selected=True, split=number)["doc_id"].to_list()
            )

    @pytest.mark.parametrize(
        "changed",
        [
            {"group_mates.method": "individual"},
            {"group_mates.method": "gumbel"},
            {"group_mates.method": "individual_in_clusters"},
            {"group_mates.budgets": "influence"},
            {"group_mates.budgets": "global"},
            {"select.split": 10},
            {"select.split": 10, "select.scope": "snapshot"},
            {"select.budget": "0"},
            {"select.budget": "100tok"},
            {"select.budget": "1500tok"},
            {"select.budget": "1500tok", "group_mates.method": "individual"},
            {"select.budget": "1500tok", "group_mates.method": "individual_in_clusters"},
        ],
        ids=str,
    )
    def test_every_method_meets_its_budget(self, staged: Staged, changed: dict, tmp_path: Path) -> None:
        project = on_a_copy(staged[0], tmp_path / "root", "stage_2").with_settings(**changed)
        outcome = run_stage(project, "stage_1/group_mates_selection", FIRST)
        assert failed(outcome) == {}
        rows = rows_of(outcome.published)
        kept = rows.filter("selected")
        if "tok" in changed.get("select.budget", ""):
            raw = rows_of(project.store.current("raw_shards", FIRST))
            tokens = kept.join(raw, on="doc_id")["token_count"].sum()
            asked = int(changed["select.budget"].removesuffix("tok")) // 2
            assert asked - raw["token_count"].max() < tokens <= asked
            assert tokens == outcome.facts["tokens"]
            if changed.get("group_mates.method") != "individual":
                held, given = pl.col("token_count"), pl.col("token_count").filter(pl.col("selected"))
                there = rows.join(raw, on="doc_id").group_by("cluster").agg(held=held.sum(), given=given.sum())
                fair = asked * there["held"] / there["held"].sum()
                assert (there["given"] - fair).abs().max() < raw["token_count"].max() + 1
        else:
            assert kept.height == outcome.facts["kept"] == (0 if changed.get("select.budget") == "0" else 4)
        if changed == {"group_mates.method": "individual"}:
            f = rows.sort("score")["doc_id"].to_list()
            assert set(kept["doc_id"]) == set(f[:4]) and outcome.facts["overlap_individual"] == 1.0
        if "select.scope" in changed:
            assert outcome.facts["splits"] == 1 and set(rows["split"]) == {0}
        elif "select.split" in changed:
            assert outcome.facts["splits"] == 4 and set(rows["split"]) == {0, 1, 2, 3}

    def test_a_number_for_the_corpus_is_refused(self, staged: Staged, tmp_path: Path) -> None:
        project = on_a_copy(staged[0], tmp_path / "root").with_settings(
            **{"select.strategy": "joint", "select.influence": 2.0, "select.scope": "corpus", "select.budget": "10"}
        )
        with pytest.raises(SettingsError, match=r"select.budget = 10 is for the corpus, and stage_1/.*take a share"):
            run_stage(project, "stage_1/group_mates_selection", FIRST)

    def test_fitting_passes_over_what_does_not_fit(self) -> None:
        assert fitting(np.array([5, 9, 3, 2, 1]), 10).tolist() == [0, 2, 3]
        assert fitting(np.array([11]), 10).tolist() == []
        assert fitting(np.array([], np.int64), 10).tolist() == []


@pytest.mark.parametrize("count", [0, 1, 2])
def test_snapshots_of_hardly_any_rows(staged: Staged, tmp_path: Path, count: int) -> None:
    write_shard(tmp_path / "source", "TINY", "000_00000", count)
    project = on_a_copy(staged[0], tmp_path / "root").with_settings(
        **{"source.url": str(tmp_path / "source"), "select.budget": "50%"}
    )
    for name in ("raw_shards", "dclm_scores", "edu_scores", "wiki_scores", "quality_scores", "pruned_documents"):
        project.stage(name, "TINY")
    for name in ("e5_embeddings", "kmeans_clusters"):
        project.stage(name, "TINY")
    survivors = count - math.floor(0.45 * count + 0.5)
    asked = math.floor(0.5 * count + 0.5)
    shares = largest_remainder(min(asked, survivors), [1, 1])
    for number in (1, 2):
        assert run_stage(project, f"stage_{number}/influence_scores", "TINY").rows_in == survivors
        outcome = run_stage(project, f"stage_{number}/group_mates_selection", "TINY")
        assert failed(outcome) == {} and outcome.facts["kept"] == shares[number - 1]
    for name in ("influence_scores", "group_mates_selection"):
        outcome = run_stage(project, name, "TINY")
        assert failed(outcome) == {} and outcome.rows_in == survivors
    assert outcome.facts["kept"] == sum(shares)


def test_two_runs_give_equal_bytes(ready: Project, staged: Staged, tmp_path: Path) -> None:
    again = copied(ready, tmp_path / "root")
    through_stages(again)
    for name in ("warmup_model", "stage_1", "stage_2", "influence_scores", "group_mates_selection"):
        one, other = (tree(project.store.root / name) for project in (staged[0], again))
        assert one.keys() == other.keys()
        assert [path for path in one if one[path] != other[path]] == []


def assert_it_says_what_chose(sidecar: dict, project: Project) -> None:
    """Every model behind the selection, what it was probed and fitted with, and on which reference set."""
    store = project.store
    models = ("warmup_model", "stage_1/continued_model", "stage_1/influence_model", "stage_2/influence_model")
    assert set(sidecar["models"]) == {"dclm", "edu", "wiki", "encoder", *models}
    for name in models[:2]:
        facts = store.current(name).facts
        assert sidecar["models"][name] == {"checkpoint": facts["checkpoint"], "step": facts["step"]}
    for name in models[2:]:
        found, facts = sidecar["models"][name], store.current(name).facts
        assert found == {key: facts[key] for key in ("model", "mode", "similarity", "alpha", "beta")}
    for name in (*models, "stage_1/rollout_sets", "stage_2/rollout_sets"):
        assert sidecar["fingerprints"][name] == store.current(name).fingerprint
        assert sidecar["code_versions"][name] == store.current(name).code_version
    content = content_revision(Path(project.settings.group_mates.reference))
    assert sidecar["reference_sets"] == {"reference": content, "held_out": content}
    asked = ("reference_documents", "lr", "beta1", "similarity", "steps", "trajectories", "warmup_steps")
    assert {key: sidecar["settings"][f"group_mates.{key}"] for key in asked} == {
        key: getattr(project.settings.group_mates, key) for key in asked
    }


def made_under_this_scope(project: Project) -> None:
    """The project's continued model as one made under its select.scope: of 65 documents, all in one split, a stage
    chooses the same."""
    pointer = project.store.root / "stage_1" / "continued_model" / "current.json"
    made = json.loads(pointer.read_text())
    made["settings"]["select.scope"] = project.settings.select.scope
    pointer.write_text(json.dumps(made))


class TestStrategies:
    def test_the_manifest_keeps_what_the_stages_chose(self, staged: Staged, tmp_path: Path) -> None:
        project = on_a_copy(staged[0], tmp_path / "root")
        outcome = project.stage("fineweb_mask_manifest", FIRST)
        assert failed(outcome) == {}
        rows = rows_of(outcome.published)
        kept = rows.filter(decision="kept")
        assert set(kept["doc_id"]) == chosen(staged[1][f"group_mates_selection {FIRST}"])
        assert set(rows["strategy"]) == {"group_mates"} and set(kept["stage"]) == {"group_mates_selection"}
        assert set(kept["split"]) == {1, 2}
        sidecar = json.loads((outcome.published.folder / "manifest.json").read_text())
        assert sidecar["certificate"]["gap"] is None and "no objective" in sidecar["certificate"]["reason"]
        assert_it_says_what_chose(sidecar, project)
        for name in ("fineweb_mask", "snapshot_report"):
            assert failed(project.stage(name, FIRST)) == {}

    def test_a_selection_under_other_settings_is_refused(self, staged: Staged, tmp_path: Path) -> None:
        project = on_a_copy(staged[0], tmp_path / "root").with_settings(**{"group_mates.steps": 4})
        outcome = project.stage("fineweb_mask_manifest", FIRST)
        assert outcome.published is None
        assert "stage_1/rollout_sets: group_mates.steps = 3 (in force: 4)" in str(failed(outcome))

    def test_another_reference_set_is_refused_though_its_name_is_the_same(
        self, staged: Staged, reference: Path, tmp_path: Path
    ) -> None:
        other = tmp_path / "other.parquet"
        pq.write_table(pq.read_table(reference).slice(0, 12), other)
        project = on_a_copy(staged[0], tmp_path / "root").with_settings(**{"group_mates.reference": str(other)})
        told = failed(project.stage("fineweb_mask_manifest", FIRST))["made_under_these_settings"]["different"]
        assert told == "; ".join(
            f"{name}: made with another reference"
            for name in ("stage_1/continued_model", "stage_1/rollout_sets", "stage_2/rollout_sets")
        )

    def test_near_duplicates_are_not_chosen_and_a_selection_that_did_not_look_is_refused(
        self, staged: Staged, tmp_path: Path
    ) -> None:
        project = on_a_copy(staged[0], tmp_path / "root").with_settings(
            **{"clean.near_duplicates": "remove", "clean.epsilon": 0.5}
        )
        alike = {}
        for snapshot in SNAPSHOTS:
            rows = rows_of(project.stage("near_duplicates", snapshot).published)
            alike[snapshot] = set(rows.filter(pl.col("kept_id").is_not_null())["doc_id"])
        assert alike[FIRST] & chosen(staged[1][f"group_mates_selection {FIRST}"])
        outcome = project.stage("fineweb_mask_manifest", FIRST)
        assert outcome.published is None
        why = failed(outcome)["made_under_these_settings"]["different"].split("; ")
        assert "group_mates_selection: made without near_duplicates" in why
        assert "stage_1/influence_scores: made without near_duplicates" in why
        through_stages(project)
        manifest = project.stage("fineweb_mask_manifest", FIRST)
        assert failed(manifest) == {}
        rows = rows_of(manifest.published)
        assert set(rows.filter(stage="near_duplicates")["doc_id"]) == alike[FIRST]
        assert set(rows.filter(stage="near_duplicates")["decision"]) == {"duplicate"}
        kept = set(rows.filter(decision="kept")["doc_id"])
        assert len(kept) == manifest.facts["kept"] > 0 and not kept & alike[FIRST]
        back = project.with_settings(**{"clean.near_duplicates": "report"}).stage("fineweb_mask_manifest", FIRST)
        assert "group_mates_selection: made with near_duplicates" in str(failed(back))

    def test_a_model_trained_on_what_is_not_chosen_any_more_is_made_anew(self, staged: Staged, tmp_path: Path) -> None:
        first = chosen(staged[1][f"stage_1/group_mates_selection {FIRST}"])
        shards = sorted((Path(staged[0].settings.source.url) / "data" / FIRST).glob("*.parquet"))
        texts = pl.concat(pl.read_parquet(shard) for shard in shards).filter(pl.col("id").is_in(first))["text"]
        questions = tmp_path / "questions.jsonl"
        questions.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        project = on_a_copy(staged[0], tmp_path / "root").with_settings(**{"clean.evaluation_sets": [str(questions)]})
        fitted = ["warmup_model", "stage_1/continued_model", "stage_2/rollout_sets", "stage_2/influence_model"]

        def choose(number: int) -> set[str]:
            run_stage(project, f"stage_{number}/influence_scores", FIRST)
            return chosen(run_stage(project, f"stage_{number}/group_mates_selection", FIRST))

        def manifest() -> Outcome:
            for name in ("influence_scores", "group_mates_selection"):
                run_stage(project, name, FIRST)
            return project.stage("fineweb_mask_manifest", FIRST)

        for name in ("contaminated_documents", "pruned_documents", "e5_embeddings", "kmeans_clusters"):
            project.stage(name, FIRST)
        assert unfitted(project.store, project.settings, project.source, fitted) == {}
        assert not choose(1) & first
        assert unfitted(project.store, project.settings, project.source, fitted) == {
            "stage_1/continued_model": f"trained on another choice of {FIRST} than the published one",
            "stage_2/rollout_sets": "rests on stage_1/continued_model",
            "stage_2/influence_model": "rests on stage_2/rollout_sets",
        }
        choose(2)
        outcome = manifest()
        assert outcome.published is None
        assert failed(outcome)["made_under_these_settings"]["different"] == (
            f"stage_1/continued_model: trained on another choice of {FIRST} than the published one"
        )
        for name in fitted[1:]:
            run_stage(project, name)
        assert unfitted(project.store, project.settings, project.source, fitted) == {}
        choose(2)
        assert failed(manifest()) == {}

    def test_a_snapshot_that_comes_later_leaves_the_models_as_they_are(self, staged: Staged, tmp_path: Path) -> None:
        project = on_a_copy(staged[0], tmp_path / "root")
        name = "stage_1/group_mates_selection"
        shutil.rmtree(project.store.root / name / SNAPSHOTS[1])
        assert run_stage(project, "stage_1/continued_model").facts["snapshots"] == [FIRST]
        run_stage(project, name, SNAPSHOTS[1])
        assert unfitted(project.store, project.settings, project.source, ["stage_1/continued_model"]) == {}

    @pytest.mark.parametrize("scope", ["split", "snapshot"])
    def test_joint_masks_are_certified_and_weigh_influence(self, staged: Staged, tmp_path: Path, scope: str) -> None:
        project = on_a_copy(staged[0], tmp_path / "root").with_settings(
            **{"select.strategy": "joint", "select.influence": 2.0, "select.scope": scope}
        )
        made_under_this_scope(project)
        plain = project.with_settings(**{"select.strategy": "datamask", "select.influence": 0.0})
        without = chosen(plain.stage("datamask_masks", FIRST))
        outcome = project.stage("datamask_masks", FIRST)
        assert failed(outcome) == {}
        certificate, facts = outcome.facts["certificate"], outcome.facts
        assert certificate["gap"] is not None and certificate["gap"] >= 0
        assert certificate["feasible_set"]["scores"] == facts["scores"] == {"influence": 2.0}
        scores = dict(rows_of(project.store.current("influence_scores", FIRST)).select("doc_id", "score").rows())
        kept = chosen(outcome)
        mean = np.mean([scores[doc_id] for doc_id in kept])
        assert facts["influence_raw"] == pytest.approx(mean) and mean < np.mean([scores[i] for i in without])
        lo, hi = (project.store.current("influence_scores", FIRST).facts[f"influence_{end}"] for end in ("lo", "hi"))
        worth = 0.5 * facts["quality"] + 0.5 * facts["diversity"] + 2.0 * (hi - mean) / (hi - lo)
        assert facts["value"] == pytest.approx(worth)
        manifest = project.stage("fineweb_mask_manifest", FIRST)
        assert failed(manifest) == {}
        assert set(rows_of(manifest.published)["strategy"]) == {"joint"}
        assert_it_says_what_chose(json.loads((manifest.published.folder / "manifest.json").read_text()), project)

    def test_joint_over_the_corpus(self, staged: Staged, tmp_path: Path) -> None:
        project = on_a_copy(staged[0], tmp_path / "root").with_settings(
            **{"select.strategy": "joint", "select.influence": 2.0, "select.scope": "corpus"}
        )
        state = project.stage("corpus_selection_state", "")
        assert failed(state) == {} and state.facts["snapshots_solved"] == 2
        assert state.facts["certificate"]["gap"] >= 0
        assert state.facts["certificate"]["feasible_set"]["scores"] == {"influence": 2.0}
        outcome = project.stage("datamask_masks", FIRST)
        refused = project.stage("fineweb_mask_manifest", FIRST)
        assert failed(refused)["made_under_these_settings"]["different"] == (
            "stage_1/continued_model: select.scope = 'split' (in force: 'corpus')"
        )
        made_under_this_scope(project)
        assert failed(outcome) == {} and failed(project.stage("fineweb_mask_manifest", FIRST)) == {}

    def test_snapshots_scored_by_another_model_are_not_in_the_corpus(self, staged: Staged, tmp_path: Path) -> None:
        project = on_a_copy(staged[0], tmp_path / "root").with_settings(
            **{"select.strategy": "joint", "select.influence": 2.0, "select.scope": "corpus"}
        )
        pointer = project.store.root / "influence_scores" / FIRST / "current.json"
        other = json.loads(pointer.read_text())
        other["facts"]["model"] = "another"
        pointer.write_text(json.dumps(other))
        state = project.stage("corpus_selection_state", "")
        assert state.facts["snapshots_solved"] == 1
        assert "scored by another model" in failed(state)["every_snapshot_embedded"]["skipped"]


@pytest.mark.slow
def test_a_fine_tuned_encoder_reads_texts(staged: Staged, tmp_path: Path) -> None:
    project = on_a_copy(staged[0], tmp_path / "root", "stage_1", "stage_2").with_settings(
        **{"group_mates.backbone": "fine_tuned", "group_mates.epochs": 1, "group_mates.bootstrap_trajectories": 0}
    )
    run_stage(project, "stage_1/rollout_sets")
    fitted = run_stage(project, "stage_1/influence_model").published
    assert (fitted.folder / "backbone").is_dir()
    scored = run_stage(project, "stage_1/influence_scores", FIRST)
    assert scored.rows_in == 36
    assert run_stage(project, "stage_1/group_mates_selection", FIRST).facts["kept"] == 4
