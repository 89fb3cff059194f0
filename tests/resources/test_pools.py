"""A step that waits for its pool sleeps."""

import threading
import time
from pathlib import Path

import dagster as dg

import dagster_datamask.definitions  # noqa: F401  (importing it is what puts the waiting right)


@dg.asset(pool="gpu")
def pooled() -> None: ...


def test_a_blocked_step_sleeps_until_its_turn(tmp_path: Path) -> None:
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        storage = instance.event_log_storage
        storage.set_concurrency_slots("gpu", 1)
        assert storage.claim_concurrency_slot("gpu", "another run", "a step").is_claimed
        timer = threading.Timer(4, lambda: storage.free_concurrency_slots_for_run("another run"))
        timer.start()
        began, used = time.monotonic(), time.thread_time()
        assert dg.materialize([pooled], instance=instance).success
        waited, busy = time.monotonic() - began, time.thread_time() - used
        timer.join()
        assert waited > 4
        # spinning takes all of the time; the run itself some fraction of a second
        assert busy < waited / 2
