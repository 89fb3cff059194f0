"""retry_failed_snapshots: a snapshot whose last run failed by a hub, a store or a lost process is tried again.

Only what the run was to make and did not is asked for, with the run's own config: finished assets are not made twice.
The history of runs is all the memory there is: a retry carries how many came before it, and its key names the run it
repeats, so neither a lost cursor nor a reload repeats one. A run that was cancelled, and a failure that is permanent,
are a person's to look at; the tick says which.
"""

import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from dagster_datamask.jobs import FULL, of_a_snapshot
from dagster_datamask.partitions import asset_key
from dagster_datamask.sensors.runs import failure, unfinished
from dagster_datamask.settings import Settings

_MAX_REQUESTS = 25
_MAX_TRIES = 3
# before the first, second and third retry of a snapshot: steps have tried for two minutes themselves
_WAITS_SECONDS = (60, 300, 1500)
# what failed longer ago is history, not work
_WINDOW = timedelta(days=7)
_LOOKED_AT = 500
_NAMED = 10
_PARTITION = "dagster/partition"
_TRY = "datamask/retry"
# Dagster's own mark of a lost run that it starts anew by itself
_WILL_RETRY = "dagster/will_retry"


def build_retry_failed_snapshots(
    settings: Settings, jobs: Mapping[str, UnresolvedAssetJobDefinition]
) -> dg.SensorDefinition:
    """The sensor for these settings: it tries what the job `full` makes."""
    assets = frozenset(map(asset_key, of_a_snapshot(settings)))

    @dg.sensor(
        name="retry_failed_snapshots",
        jobs=[jobs[FULL]],
        minimum_interval_seconds=60,
        # nothing here starts work that nobody asked for: who turns new_shards on decides about this one, too
        default_status=dg.DefaultSensorStatus.STOPPED,
        description="Tries a snapshot again, from what failed and at most three times, where its last run's failure "
        "may pass; names those whose failure will not.",
    )
    def retry_failed_snapshots(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        requests: list[dg.RunRequest] = []
        left: list[str] = []
        for snapshot in _failed(context.instance):
            record = context.instance.get_run_records(dg.RunsFilter(tags={_PARTITION: snapshot}), limit=1)[0]
            what = _next_step(context.instance, snapshot, record, assets)
            if isinstance(what, dg.RunRequest):
                requests.append(what)
            elif what:
                left.append(what)
            if len(requests) == _MAX_REQUESTS:
                break
        message = "; ".join(left[:_NAMED]) + (f"; and {len(left) - _NAMED} more" if len(left) > _NAMED else "")
        if not requests:
            return dg.SkipReason(message or "no snapshot's last run failed in the last week")
        if message:
            context.log.warning(message)
        for request in requests:
            context.log.info(f"{request.partition_key}: try {request.tags[_TRY]} of {_MAX_TRIES}")
        return dg.SensorResult(run_requests=requests)

    return retry_failed_snapshots


def _failed(instance: dg.DagsterInstance) -> list[str]:
    """Snapshots with a failed run in the window, those that failed longest ago first."""
    runs = instance.get_runs(
        dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE], updated_after=datetime.now(UTC) - _WINDOW),
        limit=_LOOKED_AT,
    )
    return list(dict.fromkeys(run.tags[_PARTITION] for run in reversed(runs) if _PARTITION in run.tags))


def _next_step(
    instance: dg.DagsterInstance, snapshot: str, record: dg.RunRecord, assets: frozenset[dg.AssetKey]
) -> dg.RunRequest | str:
    """The retry of a snapshot's last run, or why there is none; "" where nothing has to be said."""
    run = record.dagster_run
    if run.status is not dg.DagsterRunStatus.FAILURE or run.tags.get(_WILL_RETRY) == "true":
        return ""
    missing = unfinished(instance, run.run_id)
    if not missing or not set(missing) <= assets:
        return ""
    why = failure(instance, run.run_id)
    if not why.transient:
        return f"{snapshot} is left alone, its failure is permanent: {why.told} (run {run.run_id})"
    tries = int(run.tags.get(_TRY, "0"))
    if tries >= _MAX_TRIES:
        return f"{snapshot} was tried again {tries} times and is given up: {why.told} (run {run.run_id})"
    ready = (record.end_time or record.update_timestamp.timestamp()) + _WAITS_SECONDS[tries]
    # longer than it ever waits means that the clock was put back since
    if 0 < ready - time.time() <= _WAITS_SECONDS[tries]:
        return f"{snapshot} waits until {datetime.fromtimestamp(ready, UTC):%H:%M:%S} UTC: {why.told}"
    return dg.RunRequest(
        run_key=f"{snapshot}:retry:{run.run_id}",
        job_name=FULL,
        partition_key=snapshot,
        asset_selection=missing,
        run_config=_config_of(run, missing),
        tags={_TRY: str(tries + 1), "datamask/retry_of": run.run_id},
    )


def _config_of(run: dg.DagsterRun, assets: list[dg.AssetKey]) -> dict[str, Any]:
    """The failed run's config for these assets: a value from the Launchpad holds for the retry as well."""
    config: dict[str, Any] = dict(run.run_config)
    # as Dagster calls an asset's step
    names = {"__".join(key.path) for key in assets}
    if "ops" in config:
        config["ops"] = {name: value for name, value in config["ops"].items() if name in names}
    return config
