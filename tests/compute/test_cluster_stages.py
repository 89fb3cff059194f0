"""Real stages over Ray: the bytes that one process publishes, whatever is lost meanwhile; clusters of other people."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_datamask.compute.cluster import RayCluster
from dagster_datamask.settings import SettingsError
from dagster_datamask.stages.base import Run
from tests.assets.conftest import execute, materialised
from tests.compute.conftest import NODE, until_ray_starts
from tests.compute.places import Placed
from tests.compute.test_places import BESIDE, published
from tests.conftest import SNAPSHOTS
from tests.ports import free_port
from tests.project import SNAPSHOT_STAGES, Project, settings_for, write_shard

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = pytest.mark.slow

STAGES = tuple(dict.fromkeys(("raw_shards", "text_duplicates", *SNAPSHOT_STAGES, *BESIDE[2:4])))


@pytest.fixture
def place(cluster: Any, tmp_path: Path) -> Iterator[RayCluster]:
    with RayCluster(cluster.address, threads=1, shared=tmp_path) as place:
        yield place


class Logged(Placed):
    """A project on a cluster that tells the project's log, as the resource has it."""

    def __init__(self, settings: Any, place: RayCluster) -> None:
        super().__init__(settings, place)
        place.log = self.log.append

    def run(self) -> Run:
        return replace(super().run(), log=self.log.append)


def test_a_whole_project_on_two_nodes_publishes_the_bytes_of_one_process(
    place: RayCluster, small_source: Path, labels: Path, fitted_root: Path, tmp_path: Path
) -> None:
    roots = {name: tmp_path / name for name in ("here", "there")}
    for name, root in roots.items():
        shutil.copytree(fitted_root, root)
        settings = settings_for(small_source, root, labels, "clean.duplicates=remove")
        project = Project(settings) if name == "here" else Logged(settings, place)
        project.stage("ultra_classifier", "")
        for stage in STAGES:
            project.stage(stage, SNAPSHOTS[0])
    here, there = (published(root) for root in roots.values())
    there = {path: content for path, content in there.items() if not path.startswith(".shared-")}
    assert list(here) == list(there)
    assert [path for path, content in here.items() if there[path] != content] == []
    # several workers did it
    assert any("Ray has room for 2 workers of 1 CPU" in line for line in project.log)


def test_a_node_that_is_lost_in_the_middle_of_a_stage_leaves_no_trace_in_its_bytes(
    place: RayCluster, cluster: Any, labels: Path, fitted_root: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    for shard in range(16):
        write_shard(source, "S", f"{shard:03}", 400)
    here = Project(settings_for(source, tmp_path / "here", labels))
    shutil.copytree(fitted_root, tmp_path / "here")
    here.stage("raw_shards", "S")
    here.stage("dclm_scores", "S")

    def losing(root: Path) -> list[str]:
        """The stage in `root`, the second node being killed at its third shard; what is said of the loss."""
        (second,) = cluster.worker_nodes

        def kill() -> None:
            until = time.monotonic() + 600
            while time.monotonic() < until and len(list(root.glob("dclm_scores/S/*/*.done.json"))) < 3:
                time.sleep(0.01)
            cluster.remove_node(second, allow_graceful=False)

        shutil.copytree(fitted_root, root)
        there = Logged(settings_for(source, root, labels), place)
        there.stage("raw_shards", "S")
        killer = threading.Thread(target=kill)
        killer.start()
        try:
            there.stage("dclm_scores", "S")
        finally:
            killer.join()
            cluster.add_node(num_cpus=1, **NODE)
        return [line for line in there.log if line.startswith("lost worker ")]

    # all shards may be done before a node is gone
    for attempt in range(5):
        root = tmp_path / f"there_{attempt}"
        if lost := losing(root):
            break
    assert lost and "tried again: 0" in lost[0]
    expected, found = (published(root) for root in (tmp_path / "here", root))
    assert {path: content for path, content in found.items() if not path.startswith(".shared-")} == expected


def test_a_cluster_that_dagster_ray_brings_up_is_the_runs(
    cluster: Any, small_source: Path, labels: Path, fitted_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LocalRay is here what KubeRay's resources are on Kubernetes: it connects before a run and leaves after it."""
    from dagster_ray import LocalRay

    from dagster_datamask.resources.ray_of_the_run import RayOfTheRun

    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    root = tmp_path / "root"
    shutil.copytree(fitted_root, root)
    settings = settings_for(small_source, root, labels, "compute.backend=ray", "compute.ray_address=auto")
    with dg.DagsterInstance.ephemeral() as instance:
        result = execute(
            settings,
            instance,
            "score",
            SNAPSHOTS[0],
            only=["raw_shards", "dclm_scores"],
            compute=RayOfTheRun.of(settings, LocalRay(ray_init_options={"log_to_driver": False})),
        )
    assert result.success
    assert materialised(result) == {"raw_shards", "dclm_scores"}
    assert not ray.is_initialized() and not list(root.glob(".shared-*"))


def test_a_cluster_of_the_run_is_no_other(labels: Path) -> None:
    from dagster_ray import LocalRay

    from dagster_datamask.resources.ray_of_the_run import RayOfTheRun

    settings = settings_for(
        Path("source"), Path("root"), labels, "compute.backend=ray", "compute.ray_address=ray://h:1"
    )
    with pytest.raises(SettingsError, match=r"ray_address = 'ray://h:1', but a cluster is brought up for each"):
        RayOfTheRun.of(settings, LocalRay())


_ASK = """
import sys, time
from dagster_datamask.compute.cluster import RayCluster

def work(item, told):
    told(item)
    if item == 3:
        raise KeyError("three")
    return item * item

try:
    with RayCluster(sys.argv[1], log=print) as place:
        print(sorted(place.each(lambda: work, range(3))))
        list(place.each(lambda: work, [3]))
except Exception as error:
    print(f"{type(error).__name__}: {error}", getattr(error, "__notes__", ""))
"""


def _asked(address: str, **environment: str) -> list[str]:
    done = until_ray_starts(
        lambda: subprocess.run(
            [sys.executable, "-c", _ASK, address], env=os.environ | environment, capture_output=True, text=True
        )
    )
    return done.stdout.splitlines()


def test_a_machine_outside_the_cluster_is_a_client(cluster: Any) -> None:
    told = _asked(cluster.client_address)
    assert "[(0, 0), (1, 1), (2, 4)]" in told
    assert re.fullmatch(r"KeyError: 'three' \['in worker \d+ on node \S+'\]", told[-1])


def test_memory_that_runs_out_ends_with_the_remedy() -> None:
    """Ray's own monitor ends every worker on a node that it takes for full."""
    told = _asked("", RAY_memory_usage_threshold="0.001")
    why = "ended by Ray as its node ran out of memory; raise memory_gb in compute.requests"
    assert next(line for line in told if line.startswith("lost ")).endswith(f"({why})")
    assert re.fullmatch(
        rf"ClusterUnavailable: \d+ workers on Ray were lost one after another, and no item was done between; the last: "
        rf"{why} ",
        told[-1],
    )


def test_a_cluster_with_another_token_refuses(tmp_path: Path) -> None:
    """Ray's authentication by token, which `ray start` has on by default, on a head node of its own."""
    port = free_port()
    mode = {"RAY_AUTH_MODE": "token", "RAY_TMPDIR": tempfile.mkdtemp(dir="/tmp")}
    options = ("--head", "--block", f"--port={port}", "--num-cpus=1", "--include-dashboard=false")
    head = subprocess.Popen(
        [Path(sys.executable).with_name("ray"), "start", *options, "--object-store-memory=80000000"],
        env=os.environ | mode | {"RAY_AUTH_TOKEN": "a" * 64, "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 600
        told: list[str] = []
        while time.monotonic() < until and not any("(2, 4)" in line for line in told):
            told = _asked(f"127.0.0.1:{port}", **mode, RAY_AUTH_TOKEN="a" * 64)
        assert "[(0, 0), (1, 1), (2, 4)]" in told
        told = _asked(f"127.0.0.1:{port}", **mode, RAY_AUTH_TOKEN="b" * 64)
        assert told[-1].startswith(
            f"ClusterUnfit: the Ray cluster at 127.0.0.1:{port} refuses this process's token; set"
        )
    finally:
        # with --block all of the node are of this process's group, and end with its end
        head.terminate()
        head.wait()
        shutil.rmtree(mode["RAY_TMPDIR"], ignore_errors=True)
