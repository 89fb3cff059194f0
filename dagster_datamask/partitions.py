"""How stages are addressed in Dagster: by the asset's key and, within it, the one partition of the system, a Common
Crawl snapshot. Shards and splits are work inside a partition."""

import dagster as dg

cc_snapshot = dg.DynamicPartitionsDefinition(name="cc_snapshot")


def asset_key(name: str) -> dg.AssetKey:
    """The key of a stage's asset; what belongs to a Group-MATES stage lies in that stage's folder."""
    return dg.AssetKey(name.split("/"))
