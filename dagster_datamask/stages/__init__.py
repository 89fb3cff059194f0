"""One module per stage: what an asset computes, from published inputs to a published generation.

A stage reads through `shards`, computes with `scoring` and `selection`, and returns an Outcome of counts, facts,
figures and checks. No Dagster here: `assets` wraps each stage in a few lines, and tests run stages directly.
"""
