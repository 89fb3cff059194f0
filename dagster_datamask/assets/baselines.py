"""Selections to compare with, and what they leave out or cut: one asset each, in the job `full` only where kept."""

from functools import partial

from dagster_datamask.assets.base import StageAsset, stage_asset
from dagster_datamask.shards.source import Source
from dagster_datamask.stages import baselines, near_duplicates, substrings
from dagster_datamask.stages.base import STAGES, Outcome, Run


@stage_asset("near_duplicates")
def near_duplicates_(run: Run, source: Source, snapshot: str) -> Outcome:
    return near_duplicates.near_duplicates(run, source, snapshot)


@stage_asset("exact_substrings")
def exact_substrings(run: Run, source: Source, snapshot: str) -> Outcome:
    return substrings.exact_substrings(run, source, snapshot)


BASELINES: tuple[StageAsset, ...] = tuple(
    StageAsset(STAGES[name], partial(baselines.baseline, name=name)) for name in baselines.BASELINES
)
