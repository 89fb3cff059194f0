"""new_shards: a snapshot that appears, or whose listing changes, is selected anew.

A tick lists the source, compares each snapshot's listing with the cursor, adds missing partitions and requests one run
each. Nothing is read of the shards themselves. Where the global assets are missing, `fit_global` goes first.
"""

import json
import time
from dataclasses import dataclass
from typing import Any

import dagster as dg

from dagster_datamask.jobs import embed, fit_global, full
from dagster_datamask.partitions import cc_snapshot
from dagster_datamask.resources.storage import StorageResource
from dagster_datamask.scoring.models import ModelUnavailable
from dagster_datamask.settings import Settings, SettingsError
from dagster_datamask.shards.source import Source, SourceError
from dagster_datamask.stages.base import FITTED, STAGES
from dagster_datamask.stages.freshness import unfitted

_MAX_REQUESTS = 25
# the daemon gives up on a tick after 60 s
_DEADLINE_SECONDS = 40.0


def build_new_shards(settings: Settings) -> dg.SensorDefinition:
    """The sensor for these settings."""
    global_settings = settings.hash({key for name in FITTED for key in STAGES[name].reads})
    # a corpus is chosen from once its snapshots are embedded: `new_embeddings` goes on from there
    job = embed if settings.select.scope == "corpus" else full

    @dg.sensor(
        name="new_shards",
        jobs=[job, fit_global],
        minimum_interval_seconds=30,
        default_status=dg.DefaultSensorStatus.STOPPED,
        description=f"Adds a partition for each new snapshot and runs the job {job.name} when shards land or change.",
    )
    def new_shards(context: dg.SensorEvaluationContext, storage: StorageResource) -> dg.SensorResult | dg.SkipReason:
        try:
            source = storage.documents()
            snapshots = source.snapshots()
        except (SourceError, SettingsError) as error:
            return dg.SkipReason(str(error))
        for folder in source.unusable():
            context.log.warning(f"folder {folder!r} of {source.url} cannot be a snapshot: rename it")

        cursor = _Cursor.read(context.cursor)
        changed = _changed(context, source, cursor, snapshots)
        if not changed:
            return dg.SkipReason(f"{len(cursor.seen)} snapshots, none new or changed")
        try:
            missing = unfitted(storage.store(), settings, source)
        except (SettingsError, ModelUnavailable) as error:
            return dg.SkipReason(str(error))
        if missing:
            return _fit_first(context, missing, global_settings)

        known = context.instance.get_dynamic_partitions(cc_snapshot.name or "")
        added = [snapshot for snapshot in changed if snapshot not in known]
        requests = [
            dg.RunRequest(
                run_key=cursor.see(snapshot, fingerprint),
                job_name=job.name,
                partition_key=snapshot,
                tags={"datamask/listing": fingerprint},
            )
            for snapshot, fingerprint in changed.items()
        ]
        if job is embed:
            context.log.info(
                "once these are embedded, solve_corpus and then select are next: the sensor new_embeddings"
            )
        return dg.SensorResult(
            run_requests=requests,
            dynamic_partitions_requests=[cc_snapshot.build_add_request(added)] if added else [],
            cursor=cursor.text(),
        )

    return new_shards


@dataclass
class _Cursor:
    """What was seen: per snapshot its listing's fingerprint and how often that changed; and where a tick ended."""

    seen: dict[str, tuple[str, int]]
    after: str

    @classmethod
    def read(cls, text: str | None) -> "_Cursor":
        found: dict[str, Any] = json.loads(text) if text else {"seen": {}, "after": ""}
        return cls({name: (value[0], value[1]) for name, value in found["seen"].items()}, found["after"])

    def text(self) -> str:
        return json.dumps({"seen": self.seen, "after": self.after}, sort_keys=True)

    def see(self, snapshot: str, fingerprint: str) -> str:
        """Note the listing and give the run's key: a listing that comes back is a change like any other."""
        changes = self.seen[snapshot][1] + 1 if snapshot in self.seen else 0
        self.seen[snapshot] = (fingerprint, changes)
        self.after = snapshot
        return f"{snapshot}:{fingerprint}" + (f":{changes}" if changes else "")


def _changed(
    context: dg.SensorEvaluationContext, source: Source, cursor: _Cursor, snapshots: list[str]
) -> dict[str, str]:
    """{snapshot: listing fingerprint} of those that are new or changed, at most as many as one tick may request.

    New snapshots come first, then the others from where the last tick ended, so that a slow listing starves none.
    """
    started = time.monotonic()
    order = sorted(snapshots, key=lambda name: (name in cursor.seen, name <= cursor.after, name))
    changed: dict[str, str] = {}
    for snapshot in order:
        if len(changed) == _MAX_REQUESTS or time.monotonic() - started > _DEADLINE_SECONDS:
            context.log.info("more snapshots wait for the next tick")
            break
        try:
            fingerprint = source.listing_fingerprint(snapshot)
        except SourceError as error:
            context.log.warning(str(error))
            continue
        if snapshot not in cursor.seen or cursor.seen[snapshot][0] != fingerprint:
            changed[snapshot] = fingerprint
    return changed


def _fit_first(
    context: dg.SensorEvaluationContext, missing: dict[str, str], settings_hash: str
) -> dg.SensorResult | dg.SkipReason:
    why = ", ".join(f"{name} ({reason})" for name, reason in missing.items())
    runs = context.instance.get_runs(
        filters=dg.RunsFilter(job_name=fit_global.name, tags={"datamask/settings": settings_hash}), limit=1
    )
    if runs and not runs[0].is_finished:
        return dg.SkipReason(f"waiting for fit_global (run {runs[0].run_id}): {why}")
    if runs and runs[0].is_failure:
        return dg.SkipReason(
            f"fit_global failed (run {runs[0].run_id}); mend its cause and run the job fit_global again: {why}"
        )
    context.log.info(f"fit_global goes first: {why}")
    # a finished run of these settings that left something unfitted means that the files were removed since
    key = f"fit_global:{settings_hash}" + (f":after:{runs[0].run_id[:8]}" if runs else "")
    return dg.SensorResult(
        run_requests=[dg.RunRequest(run_key=key, job_name=fit_global.name, tags={"datamask/settings": settings_hash})],
        cursor=context.cursor,
    )
