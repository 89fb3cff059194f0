"""Waiting for a pool slot without burning a core.

Dagster 1.13.27 sleeps for the least of zero and the times until a blocked step may ask again, so never: a run whose
step waits for the pool `gpu` spins, on the core that the running stage needs. The pin in pyproject.toml keeps that
method what it is; a test fails where the replacement is no longer reached.
"""

import time

from dagster._core.execution.plan.instance_concurrency_context import InstanceConcurrencyContext

_METHOD = "interval_to_next_pending_claim_check"
# a slot that was freed is taken up within this time, whatever Dagster's own back-off says
_LONGEST_SECONDS = 5.0


def _seconds_to_wait(self: InstanceConcurrencyContext) -> float:
    if not self.has_pending_claims():
        return 0.0
    now = time.time()
    waits = [ready_at - now for ready_at in self._pending_timeouts.values()]
    return max(0.0, min([_LONGEST_SECONDS, *waits]))


def wait_without_spinning() -> None:
    """Replace Dagster's method in this process; calling it again changes nothing."""
    setattr(InstanceConcurrencyContext, _METHOD, _seconds_to_wait)
