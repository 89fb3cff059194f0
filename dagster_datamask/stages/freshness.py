"""Which global assets are missing or were fitted under other settings: what must run before a snapshot can."""

from dagster_datamask.settings import Settings
from dagster_datamask.shards.generations import Store
from dagster_datamask.stages.base import STAGES


def unfitted(store: Store, settings: Settings) -> dict[str, str]:
    """{global asset: why it has to be fitted}, empty where all are published under these settings."""
    why: dict[str, str] = {}
    for name, stage in STAGES.items():
        if stage.partitioned:
            continue
        published = store.published(name)
        if published is None:
            why[name] = "missing"
        elif published.settings != stage.identity(settings):
            why[name] = "fitted under other settings"
        elif any(ancestor in why for ancestor in stage.inputs):
            why[name] = f"rests on {', '.join(a for a in stage.inputs if a in why)}"
        elif any(store.current(a).fingerprint != published.inputs.get(a) for a in stage.inputs):
            why[name] = "fitted on another generation of its inputs"
    return why
