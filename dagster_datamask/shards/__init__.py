"""The shard engine: where documents lie, who they are, and how a step over them is done once and completely.

`source` lists and reads FineWeb-shaped shards, `schemas` declares every file, `writer` writes whole files or nothing,
`generations` publishes them, `engine` maps kernels over shards, `cursor` joins side files by id in one streaming pass,
`order` finds exact cuts without sorting in memory, `shuffle` makes splits. No Dagster, no models, no objectives.
"""
