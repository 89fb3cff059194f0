"""The snapshot's documents, their quality, and what pruning leaves."""

from typing import Any

import dagster as dg

from dagster_datamask import doctor
from dagster_datamask.assets.base import stage_asset
from dagster_datamask.scoring.quality import PARTS
from dagster_datamask.shards.source import Source
from dagster_datamask.stages import ingest, quality, scores
from dagster_datamask.stages.base import Outcome, Run
from dagster_datamask.stages.classifiers import classifier_of


def _doctor(run: Run) -> dict[str, Any]:
    """The root asset tells what everything after it is made with: versions, device, models, storage."""
    if doctor.home_unset():
        run.log(doctor.HOME_UNSET)
    rows = doctor.examine(run.settings, models=False)["checks"]
    rows += [
        {"what": f"{part} as fitted", "state": "ok", "detail": f"{fitted.facts['ref']}, {fitted.facts['revision']}"}
        for part in PARTS
        if (fitted := run.store.published(classifier_of(part)))
    ]
    return {"doctor": dg.MetadataValue.table([dg.TableRecord(row) for row in rows])}


@stage_asset("raw_shards", _doctor)
def raw_shards(run: Run, source: Source, snapshot: str) -> Outcome:
    return ingest.raw_shards(run, source, snapshot)


@stage_asset("dclm_scores")
def dclm_scores(run: Run, source: Source, snapshot: str) -> Outcome:
    return scores.scores(run, source, snapshot, "dclm")


@stage_asset("edu_scores")
def edu_scores(run: Run, source: Source, snapshot: str) -> Outcome:
    return scores.scores(run, source, snapshot, "edu")


@stage_asset("wiki_scores")
def wiki_scores(run: Run, source: Source, snapshot: str) -> Outcome:
    return scores.scores(run, source, snapshot, "wiki")


@stage_asset("ultra_scores")
def ultra_scores(run: Run, source: Source, snapshot: str) -> Outcome:
    return scores.scores(run, source, snapshot, "ultra")


@stage_asset("quality_scores")
def quality_scores(run: Run, source: Source, snapshot: str) -> Outcome:
    return quality.quality_scores(run, snapshot)


@stage_asset("pruned_documents")
def pruned_documents(run: Run, source: Source, snapshot: str) -> Outcome:
    return quality.pruned_documents(run, snapshot)
