"""The pages that people look at: one of each snapshot, and one of the corpus without a dependency on any snapshot."""

import dagster as dg

from dagster_datamask.assets.base import stage_asset
from dagster_datamask.assets.checks import none_waiting
from dagster_datamask.resources.storage import StorageResource
from dagster_datamask.settings import Settings
from dagster_datamask.shards.source import Source
from dagster_datamask.stages import report
from dagster_datamask.stages import selection_report as corpus_report
from dagster_datamask.stages.base import Outcome, Run


@stage_asset("snapshot_report")
def snapshot_report(run: Run, source: Source, snapshot: str) -> Outcome:
    return report.snapshot_report(run, source, snapshot)


@stage_asset("selection_report")
def selection_report(run: Run, source: Source, snapshot: str) -> Outcome:
    return corpus_report.selection_report(run, source)


def report_is_current(settings: Settings) -> dg.AssetChecksDefinition:
    """The check of selection_report that anybody can ask for; it reads pointers and manifests' sidecars alone."""

    @dg.asset_check(
        asset="selection_report",
        description="The report speaks of every snapshot as it is published now, and nothing in it is stale.",
    )
    def report_is_current(storage: StorageResource) -> dg.AssetCheckResult:
        waiting = corpus_report.unreported(storage.store(), settings)
        return none_waiting(waiting, "materialise these snapshots and run the job report")

    return report_is_current
