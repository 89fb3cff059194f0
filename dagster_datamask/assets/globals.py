"""What is fitted once and frozen: unpartitioned, without a dependency on any snapshot's asset."""

from dagster_datamask.assets.base import stage_asset
from dagster_datamask.shards.source import Source
from dagster_datamask.stages import calibration, classifiers
from dagster_datamask.stages.base import Outcome, Run


@stage_asset("quality_classifiers")
def quality_classifiers(run: Run, source: Source, snapshot: str) -> Outcome:
    return classifiers.quality_classifiers(run)


@stage_asset("quality_calibration")
def quality_calibration(run: Run, source: Source, snapshot: str) -> Outcome:
    return calibration.quality_calibration(run, source)


@stage_asset("kmeans_centroids")
def kmeans_centroids(run: Run, source: Source, snapshot: str) -> Outcome:
    return calibration.kmeans_centroids(run)
