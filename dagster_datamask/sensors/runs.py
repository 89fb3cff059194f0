"""What sensors ask of the history of runs: what is under way, what a run was to make and did not, and why."""

from collections.abc import Collection
from dataclasses import dataclass

import dagster as dg

from dagster_datamask.failures import KIND, PERMANENT, TRANSIENT
from dagster_datamask.jobs import FIT_GLOBAL
from dagster_datamask.stages.base import FITTED

_FINISHED = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)
UNDER_WAY = [status for status in dg.DagsterRunStatus if status not in _FINISHED]
# a step that ends so was stopped from outside and says nothing of its work
_STOPPED = ("DagsterExecutionInterruptedError", "KeyboardInterrupt")


@dataclass(frozen=True)
class Failure:
    """Why a run failed: by something that trying again may mend, or not; and what was said."""

    transient: bool
    told: str


def fit_under_way(instance: dg.DagsterInstance) -> str | None:
    """The run that fits global assets now, by whatever job it was launched; None where none does."""
    fitted = {dg.AssetKey(name) for name in FITTED}
    for run in instance.get_runs(dg.RunsFilter(statuses=UNDER_WAY)):
        if run.job_name == FIT_GLOBAL or fitted & set(run.asset_selection or ()):
            return run.run_id
    return None


def unfinished(instance: dg.DagsterInstance, run_id: str) -> list[dg.AssetKey]:
    """The assets that a run was to make and did not: what failed, and what follows it."""
    planned, made = (
        {record.asset_key for record in _events(instance, run_id, kind) if record.asset_key is not None}
        for kind in (dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED, dg.DagsterEventType.ASSET_MATERIALIZATION)
    )
    return sorted(planned - made)


def failure(instance: dg.DagsterInstance, run_id: str) -> Failure:
    """What a failed run says. Where no step failed, its process was lost, which another one may mend."""
    told: list[tuple[str, str]] = []
    for event in _events(instance, run_id, dg.DagsterEventType.STEP_FAILURE):
        data = event.step_failure_data
        said = data.user_failure_data
        if said is not None:
            kind = said.metadata.get(KIND)
            told.append((str(kind.value) if kind else PERMANENT, f"{event.step_key}: {said.description}"))
        elif data.error is not None and data.error.cls_name in _STOPPED:
            told.append((TRANSIENT, f"{event.step_key}: was stopped"))
        else:
            why = data.error.message.strip() if data.error else "failed"
            told.append((PERMANENT, f"{event.step_key}: {why}"))
    permanent = [line for kind, line in told if kind != TRANSIENT]
    if permanent:
        return Failure(False, "; ".join(permanent))
    return Failure(True, "; ".join(line for _, line in told) or "its process was lost")


def _events(instance: dg.DagsterInstance, run_id: str, kind: dg.DagsterEventType) -> Collection[dg.DagsterEvent]:
    return [entry.dagster_event for entry in instance.all_logs(run_id, of_type=kind) if entry.dagster_event]
