"""Planning and running without the UI: the limit's cut, the dry run's counts, runs in order."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_datamask import running
from dagster_datamask.definitions import build_definitions
from dagster_datamask.settings import SettingsError, load_settings
from dagster_datamask.shards.source import Source, SourceError
from tests.conftest import SNAPSHOTS
from tests.project import Project, settings_for, write_shard


def identified(project: Project, snapshots: tuple[str, ...] = SNAPSHOTS) -> list[str]:
    """doc_ids that raw_shards publishes under the project's settings."""
    return [
        doc
        for snapshot in snapshots
        for doc in pl.read_parquet(project.stage("raw_shards", snapshot).published.folder / "*_00000.parquet")["doc_id"]
    ]


def cut(project: Project, limit: int) -> Project:
    return Project(running.limited(project.settings, project.source, SNAPSHOTS, limit))


class TestLimit:
    @pytest.mark.parametrize("limit", [1, 2, 64, 129])
    def test_keeps_exactly_that_many_over_all_snapshots(self, project: Project, limit: int) -> None:
        ids = identified(cut(project, limit))
        assert len(ids) == len(set(ids)) == limit

    def test_a_smaller_limit_keeps_a_part_of_a_larger_ones(self, project: Project) -> None:
        smaller, larger = identified(cut(project, 20)), identified(cut(project, 50))
        assert set(smaller) < set(larger)

    def test_the_cut_depends_on_the_documents_and_not_on_their_order_or_shards(
        self, project: Project, tmp_path: Path, labels: Path
    ) -> None:
        other = tmp_path / "other"
        for snapshot in SNAPSHOTS:
            folder = Path(project.settings.source.url) / "data" / snapshot
            rows = pa.concat_tables(pq.read_table(path) for path in sorted(folder.iterdir()))
            rows = rows.take(pa.array(np.random.default_rng(3).permutation(len(rows))))
            (other / "data" / snapshot).mkdir(parents=True)
            for k, (start, count) in enumerate(((0, 7), (7, 20), (27, 38))):
                pq.write_table(rows.slice(start, count), other / "data" / snapshot / f"{k:03d}_00000.parquet")
        shuffled = Project(settings_for(other, tmp_path / "other_root", labels))
        assert sorted(identified(cut(shuffled, 40))) == sorted(identified(cut(project, 40)))

    @pytest.mark.parametrize("limit", [130, 131, 10**9])
    def test_all_or_more_changes_nothing(self, project: Project, limit: int) -> None:
        assert cut(project, limit).settings == project.settings

    @pytest.mark.parametrize("limit", [0, -1])
    def test_nothing_is_refused(self, project: Project, limit: int) -> None:
        with pytest.raises(SettingsError, match=f"--limit {limit} keeps nothing"):
            cut(project, limit)

    def test_a_limit_between_rows_of_one_id_names_the_two_that_work(self, tmp_path: Path, labels: Path) -> None:
        write_shard(tmp_path / "source", "CC-A", "000_00000", 4, ids=["a", "a", "b", "b"])
        settings = settings_for(tmp_path / "source", tmp_path / "root", labels)
        with pytest.raises(SettingsError, match=r"--limit 1 falls between two rows of one id; take 2$"):
            running.limited(settings, Source(settings.source.url), ["CC-A"], 1)


class TestDryRun:
    def test_counts_by_hand(self, project: Project) -> None:
        told = running.dry_run(project.settings, project.source, SNAPSHOTS)
        assert told["rows"] == 130
        assert told["documents_embedded"] == round(130 * 0.55)
        assert told["embedding_bytes"] == told["documents_embedded"] * 384 * 2
        assert told["gpu_hours"]["datamask_masks"] == 0.0

    def test_a_million_documents_by_the_papers_recipe(self, project: Project) -> None:
        """E5-base: 12 layers of 12·768² weights, two FLOPs each and token, 512 tokens."""
        paper = project.settings.replace(
            {"models.encoder": "intfloat/e5-base-v2", "embed.max_tokens": None, "select.solver": "policy_gradient"}
        )
        one = running.dry_run(paper, project.source, SNAPSHOTS[:1])
        per_document = 2 * 12 * 12 * 768**2 * 512 / (0.4 * 312e12) / 3600
        assert one["gpu_hours"]["e5_embeddings"] == pytest.approx(36 * per_document, abs=1e-4)
        assert one["embedding_bytes"] == 36 * 768 * 2


def test_chosen_snapshots(project: Project) -> None:
    warned: list[str] = []
    assert running.chosen_snapshots(project.source, [], warned.append) == list(SNAPSHOTS)
    assert running.chosen_snapshots(project.source, [SNAPSHOTS[1]], warned.append) == [SNAPSHOTS[1]]
    # text_duplicates compares a snapshot with those before it by name
    assert running.chosen_snapshots(project.source, SNAPSHOTS[::-1], warned.append) == list(SNAPSHOTS)
    with pytest.raises(SourceError, match=f"no snapshot 'x'; there are: {', '.join(SNAPSHOTS)}"):
        running.chosen_snapshots(project.source, [SNAPSHOTS[0], "x"], warned.append)


def test_dagster_home_is_made_with_the_projects_settings_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DAGSTER_HOME", "")  # so that what is set here is undone
    home = running.dagster_home()
    assert home == tmp_path / ".dagster_home"
    own = home / "dagster.yaml"
    assert "free_slots_after_run_end_seconds" in own.read_text()
    own.write_text("telemetry: {enabled: false}\n")
    assert running.dagster_home() == home
    assert own.read_text() == "telemetry: {enabled: false}\n"


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


class TestMaterialise:
    def test_a_failed_snapshot_does_not_stop_the_next(
        self, project: Project, tmp_path: Path, labels: Path, instance: dg.DagsterInstance
    ) -> None:
        source = tmp_path / "source"
        shutil.copytree(project.settings.source.url, source)
        bad = source / "data" / SNAPSHOTS[0] / "000_00000.parquet"
        bad.write_bytes(b"")
        told: list[str] = []
        settings = settings_for(source, project.store.root, labels)
        runs = running.materialise(
            settings, Source(str(source)), SNAPSHOTS, instance, lambda run: told.append(run.name)
        )
        assert [(run.name, run.success) for run in runs] == [(SNAPSHOTS[0], False), (SNAPSHOTS[1], True)]
        assert told == list(SNAPSHOTS)
        assert f"{bad}: is empty (0 bytes)" in (runs[0].failure or "")
        assert runs[1].failure is None
        assert set(runs[1].seconds) > {"raw_shards", "fineweb_mask"}
        assert list(instance.get_dynamic_partitions("cc_snapshot")) == list(SNAPSHOTS)
        summary = running.summary(project.store, SNAPSHOTS)
        assert [row["snapshot"] for row in summary] == [SNAPSHOTS[1]]
        assert summary[0]["readable_rows"] == 65

    def test_with_scope_corpus_all_are_embedded_then_solved_then_selected(
        self, project: Project, tmp_path: Path, labels: Path, instance: dg.DagsterInstance
    ) -> None:
        source = tmp_path / "source"
        shutil.copytree(project.settings.source.url, source)
        write_shard(source, "CC-BAD", "000_00000", 2).write_bytes(b"")
        settings = settings_for(source, project.store.root, labels, "select.scope=corpus", "select.compare_steps=0")
        names = ["CC-BAD", *SNAPSHOTS]
        runs = running.materialise(settings, Source(str(source)), names, instance)
        assert [(run.name, run.success) for run in runs] == [
            ("CC-BAD embed", False),
            *((f"{snapshot} embed", True) for snapshot in SNAPSHOTS),
            ("solve_corpus", True),
            *((f"{snapshot} select", True) for snapshot in SNAPSHOTS),
        ]
        summary = running.summary(project.store, names)
        assert [row["snapshot"] for row in summary] == list(SNAPSHOTS)
        assert sum(row["kept"] for row in summary) == 13

    def test_a_failed_fit_runs_no_snapshot(
        self, small_source: Path, tmp_path: Path, labels: Path, instance: dg.DagsterInstance
    ) -> None:
        broken = tmp_path / "dclm.parquet"
        pq.write_table(pa.table({"text": ["a", "b"]}), broken)
        settings = settings_for(small_source, tmp_path / "root", labels, f"score.dclm_labels={broken}")
        runs = running.materialise(settings, Source(settings.source.url), SNAPSHOTS, instance)
        assert [(run.name, run.success) for run in runs] == [("fit_global", False)]
        assert str(broken) in (runs[0].failure or "")
        assert not instance.get_dynamic_partitions("cc_snapshot")


class TestDeadSlots:
    """A killed `datamask run` must not make the next one wait for ever."""

    @pytest.fixture
    def disk(self, tmp_path: Path) -> Iterator[dg.DagsterInstance]:
        with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
            instance.event_log_storage.set_concurrency_slots("gpu", 1)
            yield instance

    def claim(self, instance: dg.DagsterInstance, run_id: str) -> None:
        assert instance.event_log_storage.claim_concurrency_slot("gpu", run_id, "e5_embeddings").is_claimed

    def free(self, instance: dg.DagsterInstance) -> bool:
        return not instance.event_log_storage.get_concurrency_info("gpu").claimed_slots

    def started(self, instance: dg.DagsterInstance, process: str) -> str:
        run = instance.create_run_for_job(
            build_definitions(load_settings(os.devnull, env={})).resolve_job_def("fit_global"),
            tags={"datamask/process": process},
        )
        return run.run_id

    def test_of_a_run_nobody_knows(self, disk: dg.DagsterInstance) -> None:
        self.claim(disk, "0123")
        told: list[str] = []
        running.free_dead_slots(disk, told.append)
        assert self.free(disk)
        assert told == ["freed the slot of pool gpu that the dead run 0123 held"]

    def test_of_a_run_whose_process_is_gone(self, disk: dg.DagsterInstance) -> None:
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        run_id = self.started(disk, f"{platform.node()}:{gone.pid}")
        self.claim(disk, run_id)
        running.free_dead_slots(disk, lambda text: None)
        assert self.free(disk)
        run = disk.get_run_by_id(run_id)
        assert run is not None
        assert run.is_failure

    def test_of_a_run_whose_number_another_process_has(self, disk: dg.DagsterInstance) -> None:
        """As in a container that was started again: every process has the number that it had before."""
        run_id = self.started(disk, f"{platform.node()}:{os.getpid()}:1")
        self.claim(disk, run_id)
        running.free_dead_slots(disk, lambda text: None)
        assert self.free(disk)

    @pytest.mark.parametrize(
        ("process", "remedy"),
        [
            (f"{platform.node()}:{os.getpid()}:{running._started('self')}", ""),
            # as earlier versions wrote it
            (f"{platform.node()}:{os.getpid()}", ""),
            ("another-machine:1:1", " (if another-machine, where it runs, is gone, cancel it in the UI)"),
            ("", ""),
        ],
        ids=["ours", "earlier", "another", "none"],
    )
    def test_of_a_run_that_may_live_is_left_and_told(self, disk: dg.DagsterInstance, process: str, remedy: str) -> None:
        run_id = self.started(disk, process)
        self.claim(disk, run_id)
        told: list[str] = []
        running.free_dead_slots(disk, told.append)
        assert not self.free(disk)
        assert told == [f"pool gpu is held by run {run_id}, which has not ended; waiting for its slot{remedy}"]


def test_folders_left_out_are_told(project: Project, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(project.settings.source.url, source)
    (source / "data" / "CC MAIN").mkdir()
    (source / "data" / "ZZ-empty").mkdir()
    warned: list[str] = []
    assert running.chosen_snapshots(Source(str(source)), [], warned.append) == list(SNAPSHOTS)
    assert warned == [
        "folder 'CC MAIN' cannot be a snapshot: use letters, digits, '.', '_' and '-' only",
        "snapshot ZZ-empty is left out: it has no .parquet shards",
    ]


def test_a_limited_run_does_not_take_the_place_of_a_full_one(project: Project) -> None:
    project.stage("raw_shards", SNAPSHOTS[0])
    limited = project.settings.replace({"source.hash_below": 0.5})
    with pytest.raises(SettingsError, match=rf"--limit would replace .* of {SNAPSHOTS[0]} .*another --root"):
        running.refuse_narrowing(project.store, limited, SNAPSHOTS)
    running.refuse_narrowing(project.store, limited, SNAPSHOTS[1:])
    project.with_settings(**{"source.hash_below": 0.5}).stage("raw_shards", SNAPSHOTS[1])
    running.refuse_narrowing(project.store, project.settings, SNAPSHOTS)
