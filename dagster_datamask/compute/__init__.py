"""Where work on shards runs: this process, processes of this machine, or a Ray cluster. No Dagster here."""
