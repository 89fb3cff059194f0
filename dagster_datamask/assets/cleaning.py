"""What selection rests on being clean of: equal texts, and evaluation sets."""

from dagster_datamask.assets.base import stage_asset
from dagster_datamask.shards.source import Source
from dagster_datamask.stages import cleaning
from dagster_datamask.stages.base import Outcome, Run


@stage_asset("text_duplicates")
def text_duplicates(run: Run, source: Source, snapshot: str) -> Outcome:
    return cleaning.text_duplicates(run, source, snapshot)


@stage_asset("contaminated_documents")
def contaminated_documents(run: Run, source: Source, snapshot: str) -> Outcome:
    return cleaning.contaminated_documents(run, source, snapshot)
