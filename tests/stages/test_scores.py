"""Side files of scores: the same bytes by any number of processes, a killed one included, and what is told of them."""

import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import polars as pl
import pytest

from dagster_datamask.failures import shard_of
from dagster_datamask.scoring.base import ScoredBatch
from dagster_datamask.scoring.parallel import FastTextProcesses, WorkerLost
from tests.project import Project, settings_for, text_of, write_shard
from tests.stages.conftest import rows_of, tree

SNAPSHOT = "S"
# enough for two processes
ROWS = {"000": 1500, "001": 1100}


@pytest.fixture(scope="module")
def many_rows(tmp_path_factory: pytest.TempPathFactory, fitted_root: Path, labels: Path) -> Project:
    """raw_shards of two shards with the odd texts among the plain ones. Copy it, never write into it."""
    source, root = tmp_path_factory.mktemp("many"), tmp_path_factory.mktemp("many-root") / "root"
    for shard, rows in ROWS.items():
        odd = {3: None, 5: "", 7: "\u2028\u2029\n", 11: "qqqq", 13: "\u5b9a\u7406"}
        texts = [odd.get(k % 50, text_of(f"{shard}/{k}", 1)) for k in range(rows)]
        write_shard(source, SNAPSHOT, shard, rows, texts=texts, group_rows=300)
    shutil.copytree(fitted_root, root)
    project = Project(settings_for(source, root, labels))
    project.stage("raw_shards", SNAPSHOT)
    return project


def with_processes(project: Project, root: Path, processes: int) -> Project:
    shutil.copytree(project.store.root, root)
    return project.with_settings(**{"storage.root": str(root), "compute.processes": processes})


def test_any_number_of_processes_publishes_the_same_bytes(
    many_rows: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Counter[int]()
    init = FastTextProcesses.__init__

    def counted(self: FastTextProcesses, processes: int, **arguments: object) -> None:
        made[processes] += 1
        init(self, processes, **arguments)

    monkeypatch.setattr(FastTextProcesses, "__init__", counted)
    trees = []
    for processes in (1, 2, 16):
        project = with_processes(many_rows, tmp_path / str(processes), processes)
        published = project.stage("dclm_scores", SNAPSHOT).published
        trees.append(tree(published.folder))
    # no more than there is work for
    assert made == {2: 2}
    assert trees[0] == trees[1] == trees[2]
    rows = rows_of(published)
    assert len(rows) == sum(ROWS.values())
    assert published.counts["null_text"] == len(rows) / 50
    assert published.counts["no_tokens"] == 4 * len(rows) / 50
    assert rows.filter(pl.col("score").is_null() == pl.col("reason").is_null()).is_empty()


def test_a_killed_process_loses_no_finished_shard_and_the_next_run_goes_on(
    many_rows: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = with_processes(many_rows, tmp_path / "clean", 1)
    project = with_processes(many_rows, tmp_path / "killed", 2)
    score_each, shards = FastTextProcesses.score_each, []

    def killing(self: FastTextProcesses, batches: Iterable[Sequence[str | None]]) -> Iterator[ScoredBatch]:
        shards.append(self._server.pid)
        if len(shards) == 2:
            (first, *_) = Path(f"/proc/{shards[0]}/task/{shards[0]}/children").read_text().split()
            os.kill(int(first), signal.SIGKILL)
        return score_each(self, batches)

    with monkeypatch.context() as patched, pytest.raises(WorkerLost, match="ended by SIGKILL") as caught:
        patched.setattr(FastTextProcesses, "score_each", killing)
        project.stage("dclm_scores", SNAPSHOT)
    assert shard_of(caught.value) == "001"
    assert project.store.published("dclm_scores", SNAPSHOT) is None
    (first,) = project.store.root.glob(f"dclm_scores/{SNAPSHOT}/*/000.parquet")
    stamp = first.stat().st_mtime_ns
    published = project.stage("dclm_scores", SNAPSHOT).published
    assert first.stat().st_mtime_ns == stamp
    assert tree(published.folder) == tree(clean.stage("dclm_scores", SNAPSHOT).published.folder)


def test_the_conventions_are_told_with_the_scores(project: Project) -> None:
    snapshot = project.source.snapshots()[0]
    project.stage("raw_shards", snapshot)
    project.stage("ultra_classifier", "")
    told = {part: project.stage(f"{part}_scores", snapshot).facts for part in ("dclm", "wiki", "ultra", "edu")}
    assert {part: (facts.get("positive_label"), facts.get("normaliser")) for part, facts in told.items()} == {
        "dclm": ("__label__hq", "dclm"),
        "wiki": ("__label__wiki", "dclm"),
        "ultra": ("__label__pos", "ultra_fineweb"),
        "edu": (None, None),
    }
    assert (told["edu"]["max_tokens"], told["edu"]["windows"]) == (16, "first")


def test_windows_are_another_edu_score_of_long_texts_alone(project: Project) -> None:
    snapshot = project.source.snapshots()[0]
    project.stage("raw_shards", snapshot)
    windowed = project.with_settings(**{"score.edu_windows": "first_middle_last"})
    windowed.stage("edu_classifier", "")
    spread = rows_of(windowed.stage("edu_scores", snapshot).published)
    project.stage("edu_classifier", "")
    first = rows_of(project.stage("edu_scores", snapshot).published)
    both = first.join(spread, on="doc_id", suffix="_spread")
    assert len(both) == len(first)
    assert both["reason"].equals(both["reason_spread"])
    # 16 tokens are less than any of these texts
    assert (both["score"] != both["score_spread"]).mean() > 0.9
    assert both.select(pl.corr("score", "score_spread")).item() > 0.3
