"""What is handed on: the folder with the kept documents of all snapshots, and whether it still speaks of them."""

import dagster as dg

from dagster_datamask.assets.base import stage_asset
from dagster_datamask.resources.storage import StorageResource
from dagster_datamask.settings import Settings
from dagster_datamask.shards.source import Source
from dagster_datamask.stages import export
from dagster_datamask.stages.base import Outcome, Run
from dagster_datamask.stages.corpus import named


@stage_asset("dataset_card")
def dataset_card(run: Run, source: Source, snapshot: str) -> Outcome:
    return export.dataset_card(run)


def export_is_current(settings: Settings) -> dg.AssetChecksDefinition:
    """The check of dataset_card for these settings; it reads pointers alone, however many snapshots there are."""

    @dg.asset_check(
        asset=export.CARD,
        description="Every finished snapshot is in the export as it is published now, under these settings.",
    )
    def export_is_current(storage: StorageResource) -> dg.AssetCheckResult:
        why = export.outdated(storage.store(), settings)
        return dg.AssetCheckResult(
            passed=not why,
            severity=dg.AssetCheckSeverity.WARN,
            metadata={"outdated": len(why), "what": named(why) or "none", "remedy": "run the job export"},
        )

    return export_is_current
