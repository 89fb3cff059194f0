"""new_shards: a snapshot that appears, or whose listing changes, is selected anew.

A tick lists the source, compares each snapshot's listing with the cursor, adds missing partitions and requests one run
each. Nothing is read of the shards themselves. Where the global assets are missing, `fit_global` goes first.
"""

import json
import time

import dagster as dg

from dagster_datamask.jobs import fit_global, full
from dagster_datamask.partitions import cc_snapshot
from dagster_datamask.resources.storage import StorageResource
from dagster_datamask.scoring.models import ModelUnavailable
from dagster_datamask.settings import Settings, SettingsError
from dagster_datamask.shards.source import SourceError
from dagster_datamask.stages.base import STAGES
from dagster_datamask.stages.freshness import unfitted

_MAX_REQUESTS = 25
# the daemon gives up on a tick after 60 s
_DEADLINE_SECONDS = 40.0


def build_new_shards(settings: Settings) -> dg.SensorDefinition:
    """The sensor for these settings."""
    global_settings = settings.hash({key for stage in STAGES.values() if not stage.partitioned for key in stage.reads})

    @dg.sensor(
        name="new_shards",
        jobs=[full, fit_global],
        minimum_interval_seconds=30,
        default_status=dg.DefaultSensorStatus.STOPPED,
        description="Adds a partition for each new snapshot and runs the job full when shards land or are replaced.",
    )
    def new_shards(context: dg.SensorEvaluationContext, storage: StorageResource) -> dg.SensorResult | dg.SkipReason:
        try:
            source = storage.documents()
            missing = unfitted(storage.store(), settings)
            snapshots = source.snapshots()
        except (SourceError, SettingsError, ModelUnavailable) as error:
            return dg.SkipReason(str(error))
        for folder in source.unusable():
            context.log.warning(f"folder {folder!r} of {source.url} cannot be a snapshot: rename it")
        if missing:
            return _fit_first(context, missing, global_settings)

        seen: dict[str, str] = json.loads(context.cursor) if context.cursor else {}
        known = set(context.instance.get_dynamic_partitions(cc_snapshot.name or ""))
        started = time.monotonic()
        requests: list[dg.RunRequest] = []
        added: list[str] = []
        for snapshot in snapshots:
            if len(requests) == _MAX_REQUESTS or time.monotonic() - started > _DEADLINE_SECONDS:
                context.log.info("more snapshots wait for the next tick")
                break
            try:
                fingerprint = source.listing_fingerprint(snapshot)
            except SourceError as error:
                context.log.warning(str(error))
                continue
            if seen.get(snapshot) == fingerprint:
                continue
            seen[snapshot] = fingerprint
            if snapshot not in known:
                added.append(snapshot)
            requests.append(
                dg.RunRequest(
                    run_key=f"{snapshot}:{fingerprint}",
                    job_name=full.name,
                    partition_key=snapshot,
                    tags={"datamask/listing": fingerprint},
                )
            )
        cursor = json.dumps(seen, sort_keys=True)
        if not requests:
            return dg.SkipReason(f"{len(seen)} snapshots, none new or changed")
        return dg.SensorResult(
            run_requests=requests,
            dynamic_partitions_requests=[cc_snapshot.build_add_request(added)] if added else [],
            cursor=cursor,
        )

    return new_shards


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
