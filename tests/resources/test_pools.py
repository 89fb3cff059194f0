"""A step that waits for its pool sleeps."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from dagster._core.execution.plan import active
from dagster._core.execution.plan.instance_concurrency_context import InstanceConcurrencyContext

import dagster_datamask.definitions  # noqa: F401  (importing it is what puts the waiting right)


@dg.asset(pool="gpu")
def pooled() -> None: ...


def test_a_blocked_step_sleeps_until_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claims, naps = list[str](), list[float]()
    claim = InstanceConcurrencyContext.claim
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        storage = instance.event_log_storage
        storage.set_concurrency_slots("gpu", 1)
        assert storage.claim_concurrency_slot("gpu", "another run", "a step").is_claimed

        def counted(self: InstanceConcurrencyContext, *of: Any) -> bool:
            claims.append("asked")
            if len(claims) == 1000:
                # it spins, and would for ever
                storage.free_concurrency_slots_for_run("another run")
            return claim(self, *of)

        def sleep(seconds: float) -> None:
            naps.append(seconds)
            if len(naps) == 2:
                storage.free_concurrency_slots_for_run("another run")
            time.sleep(seconds)

        monkeypatch.setattr(InstanceConcurrencyContext, "claim", counted)
        monkeypatch.setattr(active, "time", SimpleNamespace(time=time.time, sleep=sleep))
        assert dg.materialize([pooled], instance=instance).success
    assert len(naps) >= 2 and all(0 < nap <= 5 for nap in naps)
    # no more than one that finds its time just passed, and the one that is served
    assert len(claims) <= 2 * len(naps) + 1
