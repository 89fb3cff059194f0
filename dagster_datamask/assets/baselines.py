"""Selections to compare with, and the near-duplicates of a snapshot: one asset each, none of them in the job `full`."""

from functools import partial

from dagster_datamask.assets.base import StageAsset, stage_asset
from dagster_datamask.shards.source import Source
from dagster_datamask.stages import baselines, near_duplicates
from dagster_datamask.stages.base import STAGES, Outcome, Run


@stage_asset("near_duplicates")
def near_duplicates_(run: Run, source: Source, snapshot: str) -> Outcome:
    return near_duplicates.near_duplicates(run, source, snapshot)


BASELINES: tuple[StageAsset, ...] = tuple(
    StageAsset(STAGES[name], partial(baselines.baseline, name=name)) for name in baselines.BASELINES
)
