"""Model-aware selection: the language model that is probed, and the assets of each Group-MATES stage.

Dagster knows no cycles, so each stage is a set of assets of its own, `[stage_n, …]`, made by one function.
"""

from functools import partial
from typing import Any

import dagster as dg

from dagster_datamask.assets.base import StageAsset, stage_asset
from dagster_datamask.shards.source import Source
from dagster_datamask.stages import group_selection, influence, language_model, rollouts
from dagster_datamask.stages.base import MOST_STAGES, Outcome, Run


@stage_asset("warmup_model")
def warmup_model(run: Run, source: Source, snapshot: str) -> Outcome:
    return language_model.warmup_model(run, source)


@stage_asset("influence_scores")
def influence_scores(run: Run, source: Source, snapshot: str) -> Outcome:
    return influence.influence_scores(run, snapshot)


@stage_asset("group_mates_selection")
def group_mates_selection(run: Run, source: Source, snapshot: str) -> Outcome:
    return group_selection.group_mates_selection(run, snapshot)


def build_group_mates_stage(number: int) -> tuple[StageAsset, ...]:
    """The assets of a stage, 1 to 4: it probes the checkpoint of the one before, and leaves the next."""
    prefix = f"stage_{number}/"

    @stage_asset(f"{prefix}rollout_sets")
    def rollout_sets(run: Run, source: Source, snapshot: str) -> Outcome:
        return rollouts.rollout_sets(run, number)

    @stage_asset(f"{prefix}influence_model", partial(_card, number))
    def influence_model(run: Run, source: Source, snapshot: str) -> Outcome:
        return influence.influence_model(run, number)

    @stage_asset(f"{prefix}influence_scores")
    def stage_scores(run: Run, source: Source, snapshot: str) -> Outcome:
        return influence.stage_scores(run, source, snapshot, number)

    @stage_asset(f"{prefix}group_mates_selection")
    def stage_selection(run: Run, source: Source, snapshot: str) -> Outcome:
        return group_selection.stage_selection(run, source, snapshot, number)

    @stage_asset(f"{prefix}continued_model")
    def continued_model(run: Run, source: Source, snapshot: str) -> Outcome:
        return language_model.continued_model(run, source, number)

    return rollout_sets, influence_model, stage_scores, stage_selection, continued_model


def _card(number: int, run: Run) -> dict[str, Any]:
    """The influence model's card, for reading."""
    published = run.store.current(f"stage_{number}/influence_model")
    return {"card": dg.MetadataValue.md(published.file(influence.CARD_PAGE).read_text("utf-8"))}


STAGE_ASSETS = tuple(asset for number in range(1, MOST_STAGES + 1) for asset in build_group_mates_stage(number))
