"""The one partition of the system: a Common Crawl snapshot. Shards and splits are work inside it."""

import dagster as dg

cc_snapshot = dg.DynamicPartitionsDefinition(name="cc_snapshot")
