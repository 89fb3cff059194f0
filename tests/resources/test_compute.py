"""The resource compute: a place is opened once, and what it loses is told to the stage at hand."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

from dagster_datamask.compute.base import Told
from dagster_datamask.resources.compute import ComputeResource


def dies_once() -> Callable[[Path, Told], int]:
    def work(item: Path, told: Told) -> int:
        if not item.exists():
            item.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 1

    return work


def test_a_lost_worker_is_told_to_the_last_who_asked(tmp_path: Path) -> None:
    resource = ComputeResource(processes=2)
    before: list[str] = []
    told: list[str] = []
    place = resource.compute(before.append, str(tmp_path))
    try:
        assert resource.compute(told.append, str(tmp_path)) is place
        assert [result for _, result in place.each(dies_once, [tmp_path / "a", tmp_path / "b"])] == [1, 1]
    finally:
        resource.close()
    assert before == [] and any("SIGKILL" in line for line in told)
