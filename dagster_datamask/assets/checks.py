"""Checks that run by themselves, whenever somebody asks: what a published asset no longer speaks of."""

import dagster as dg

from dagster_datamask.resources.storage import StorageResource
from dagster_datamask.settings import Settings
from dagster_datamask.stages.corpus import STATE, named, unsolved


def none_waiting(waiting: dict[str, str], remedy: str) -> dg.AssetCheckResult:
    """A warning that names the snapshots that wait, and why, unless there are none."""
    return dg.AssetCheckResult(
        passed=not waiting,
        severity=dg.AssetCheckSeverity.WARN,
        metadata={"waiting": len(waiting), "snapshots": named(waiting) or "none", "remedy": remedy},
    )


def every_embedded_snapshot_solved(settings: Settings) -> dg.AssetChecksDefinition:
    """The check of corpus_selection_state for these settings; it reads pointers and the state alone."""

    @dg.asset_check(
        asset=STATE,
        description="Every embedded snapshot is in the state, as it is published now and these settings say.",
    )
    def every_embedded_snapshot_solved(storage: StorageResource) -> dg.AssetCheckResult:
        waiting = unsolved(storage.store(), settings) if settings.select.scope == "corpus" else {}
        return none_waiting(waiting, "run the job solve_corpus")

    return every_embedded_snapshot_solved
