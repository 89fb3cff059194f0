"""What is fitted once and frozen: unpartitioned, without a dependency on any snapshot's asset."""

from collections.abc import Callable
from typing import Any

import dagster as dg

from dagster_datamask.assets.base import stage_asset
from dagster_datamask.shards.source import Source
from dagster_datamask.stages import calibration, classifiers
from dagster_datamask.stages.base import Outcome, Run


def _card(name: str) -> Callable[[Run], dict[str, Any]]:
    """The model card of a classifier that was trained here, to be read where it is shown."""

    def beside(run: Run) -> dict[str, Any]:
        card = classifiers.card_of(run.store.current(name))
        return {"card": dg.MetadataValue.md(card)} if card else {}

    return beside


@stage_asset("dclm_classifier", _card("dclm_classifier"))
def dclm_classifier(run: Run, source: Source, snapshot: str) -> Outcome:
    return classifiers.classifier(run, "dclm")


@stage_asset("edu_classifier", _card("edu_classifier"))
def edu_classifier(run: Run, source: Source, snapshot: str) -> Outcome:
    return classifiers.classifier(run, "edu")


@stage_asset("wiki_classifier", _card("wiki_classifier"))
def wiki_classifier(run: Run, source: Source, snapshot: str) -> Outcome:
    return classifiers.classifier(run, "wiki")


@stage_asset("ultra_classifier", _card("ultra_classifier"))
def ultra_classifier(run: Run, source: Source, snapshot: str) -> Outcome:
    return classifiers.classifier(run, "ultra")


@stage_asset("quality_calibration")
def quality_calibration(run: Run, source: Source, snapshot: str) -> Outcome:
    return calibration.quality_calibration(run, source)


@stage_asset("kmeans_centroids")
def kmeans_centroids(run: Run, source: Source, snapshot: str) -> Outcome:
    return calibration.kmeans_centroids(run)
