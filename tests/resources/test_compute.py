"""Where shards are worked on, as a resource: from settings, opened when asked for, closed with the run."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest

from dagster_datamask.compute.base import INLINE, Told
from dagster_datamask.compute.local import Processes
from dagster_datamask.resources.compute import ComputeResource
from dagster_datamask.settings import SettingsError, load_settings
from tests.compute.test_local import gone


def resource(*overrides: str) -> ComputeResource:
    return ComputeResource.from_settings(load_settings(os.devnull, list(overrides), env={}))


def test_settings_become_the_place() -> None:
    assert resource("compute.processes=1").compute(print, "root") is INLINE
    place = resource("compute.processes=3").compute(print, "root")
    assert isinstance(place, Processes) and place.workers == 3
    cores = len(os.sched_getaffinity(0))
    place = resource().compute(print, "root")
    assert place is INLINE if cores == 1 else place.workers == cores


def dies_once() -> Callable[[Path, Told], int]:
    def work(item: Path, told: Told) -> int:
        if not item.exists():
            item.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 1

    return work


def test_a_place_is_opened_once_and_a_lost_worker_is_told_to_who_asked_last(tmp_path: Path) -> None:
    compute = resource("compute.processes=2")
    before: list[str] = []
    told: list[str] = []
    place = compute.compute(before.append, str(tmp_path))
    try:
        assert compute.compute(told.append, str(tmp_path)) is place
        assert [result for _, result in place.each(dies_once, [tmp_path / "a", tmp_path / "b"])] == [1, 1]
    finally:
        compute.close()
    assert before == [] and len(told) == 2 and all("SIGKILL" in line for line in told)
    assert compute.compute(print, str(tmp_path)) is not place


def test_requests_of_what_is_no_asset_are_refused_with_the_nearest() -> None:
    with pytest.raises(
        SettingsError, match=r"compute\.requests: 'e5_embedings' is no asset; did you mean 'e5_embedding"
    ):
        resource("compute.requests={e5_embedings={cpus=2}}")


def test_processes_end_with_the_run_that_used_them() -> None:
    pids: list[int] = []

    @dg.asset
    def first(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:
        place = compute.compute(context.log.info, "root")
        pids.extend(pid for _, pid in place.each(lambda: lambda item, told: os.getpid(), [0]))

    @dg.asset(deps=[first])
    def second(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:
        place = compute.compute(context.log.info, "root")
        pids.extend(pid for _, pid in place.each(lambda: lambda item, told: os.getpid(), [0]))

    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize(
            [first, second], instance=instance, resources={"compute": ComputeResource(processes=2, threads=0)}
        )
    assert result.success
    # one process for both steps, as it stays while the run does
    assert len(pids) == 2 and len(set(pids)) == 1
    assert os.getpid() not in pids and gone(pids)


def test_threads_of_this_process_are_set_when_a_place_is_asked_for() -> None:
    code = (
        "from dagster_datamask.resources.compute import ComputeResource\n"
        "import torch\n"
        "ComputeResource(processes=1, threads=1).compute(print, 'root')\n"
        "print(torch.get_num_threads())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"]
