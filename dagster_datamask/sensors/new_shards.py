"""new_shards: a snapshot that appears, or whose listing changes, is selected anew once it is quiet.

A tick lists the source, compares each snapshot's listing with the cursor, and for those that have not changed for a
while adds missing partitions and requests one run each. Nothing is read of the shards themselves. Where the global
assets are missing, `fit_global` goes first, once, and not while shards are landing.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from dagster_datamask import doctor
from dagster_datamask.jobs import EMBED, FIT_GLOBAL, FULL
from dagster_datamask.keyed import digest
from dagster_datamask.partitions import cc_snapshot
from dagster_datamask.redaction import redacted
from dagster_datamask.resources.storage import StorageResource
from dagster_datamask.scoring.models import ModelUnavailable
from dagster_datamask.sensors.runs import fit_under_way
from dagster_datamask.settings import Settings, SettingsError
from dagster_datamask.shards.generations import Store
from dagster_datamask.shards.remote import RootUnusable
from dagster_datamask.shards.source import Source, SourceError
from dagster_datamask.stages.base import FITTED, STAGES
from dagster_datamask.stages.freshness import unfitted

_MAX_REQUESTS = 25
# the daemon gives up on a tick after 60 s
_DEADLINE_SECONDS = 40.0
# a snapshot whose shards are still landing would be run once for each of them; just below a multiple of the interval
_QUIET_SECONDS = 45.0
# but where shards land for days, what is fitted on a sample need not wait for the last
_LONGEST_WAIT_SECONDS = 3600.0

# of a run of fit_global: what it was to fit, what was published before it, and the run that succeeded before and was of
# no use
_FIT, _THERE, _AGAIN = "datamask/fit", "datamask/fitted", "datamask/fitted_before"


def build_new_shards(settings: Settings, jobs: Mapping[str, UnresolvedAssetJobDefinition]) -> dg.SensorDefinition:
    """The sensor for these settings."""
    fit = digest(*(STAGES[name].code_version(settings) for name in FITTED), size=8).hex()
    # a corpus is chosen from once its snapshots are embedded: `new_embeddings` goes on from there
    job = EMBED if settings.select.scope == "corpus" else FULL

    @dg.sensor(
        name="new_shards",
        jobs=[jobs[job], jobs[FIT_GLOBAL]],
        minimum_interval_seconds=30,
        default_status=dg.DefaultSensorStatus.STOPPED,
        description=f"Adds a partition for each new snapshot and runs the job {job} when shards have landed or "
        "changed.",
    )
    def new_shards(context: dg.SensorEvaluationContext, storage: StorageResource) -> dg.SensorResult | dg.SkipReason:
        if doctor.home_unset():
            context.log.warning(doctor.HOME_UNSET)
        try:
            source = storage.documents()
            snapshots = source.snapshots()
        except (SourceError, SettingsError) as error:
            return dg.SkipReason(redacted(str(error)))
        refused = source.unusable()
        for folder in refused:
            context.log.warning(f"folder {folder!r} of {source.url} cannot be a snapshot: rename it")

        cursor = _Cursor.read(context.cursor)
        quiet, waiting = _changed(context, source, cursor, snapshots)

        def skip(why: str) -> dg.SensorResult:
            names = f"; refused: {', '.join(map(repr, refused))}" if refused else ""
            return dg.SensorResult(skip_reason=why + names, cursor=cursor.text())

        if not quiet:
            if waiting:
                return skip(f"waiting until {_QUIET_SECONDS:.0f} s have passed without a change: {_named(waiting)}")
            return skip(f"{len(cursor.seen)} snapshots, none new or changed")
        try:
            store = storage.store()
            missing = unfitted(store, settings, source)
        except (SettingsError, RootUnusable, ModelUnavailable) as error:
            return skip(redacted(str(error)))
        if missing:
            why = ", ".join(f"{name} ({reason})" for name, reason in missing.items())
            if waiting and time.time() - cursor.oldest() < _LONGEST_WAIT_SECONDS:
                return skip(f"fit_global goes first, once no shards land: {_named(waiting)} changed just now: {why}")
            request = _fit_first(context, fit, _fitted(store), why, storage.root)
            if isinstance(request, str):
                return skip(request)
            return dg.SensorResult(run_requests=[request], cursor=cursor.text())

        known = context.instance.get_dynamic_partitions(cc_snapshot.name or "")
        added = [snapshot for snapshot in quiet if snapshot not in known]
        requests = [
            dg.RunRequest(
                run_key=cursor.see(snapshot, fingerprint),
                job_name=job,
                partition_key=snapshot,
                tags={"datamask/listing": fingerprint},
            )
            for snapshot, fingerprint in quiet.items()
        ]
        if job == EMBED:
            context.log.info(
                "once these are embedded, solve_corpus and then select are next: the sensor new_embeddings"
            )
        return dg.SensorResult(
            run_requests=requests,
            dynamic_partitions_requests=[cc_snapshot.build_add_request(added)] if added else [],
            cursor=cursor.text(),
        )

    return new_shards


@dataclass(frozen=True)
class _Pending:
    """A listing that no run was asked for: since when it is as it is, and since when it is another than before."""

    fingerprint: str
    since: float
    first: float


@dataclass
class _Cursor:
    """What was seen: per snapshot its listing's fingerprint and how often that changed; what waits for quiet; and
    where a tick ended."""

    seen: dict[str, tuple[str, int]]
    pending: dict[str, _Pending]
    after: str

    @classmethod
    def read(cls, text: str | None) -> "_Cursor":
        found: dict[str, Any] = json.loads(text) if text else {"seen": {}, "after": ""}
        return cls(
            {name: (value[0], value[1]) for name, value in found["seen"].items()},
            # cursors of earlier versions have no such entry
            {name: _Pending(*value) for name, value in found.get("pending", {}).items()},
            found["after"],
        )

    def text(self) -> str:
        pending = {name: (entry.fingerprint, entry.since, entry.first) for name, entry in self.pending.items()}
        return json.dumps({"seen": self.seen, "pending": pending, "after": self.after}, sort_keys=True)

    def is_quiet(self, snapshot: str, fingerprint: str, now: float) -> bool:
        """Note a listing no run was asked for; whether it has been the same for long enough."""
        before = self.pending.get(snapshot)
        # what will be has not been: the clock was put back, by hours perhaps
        if before is None or before.fingerprint != fingerprint or before.since > now:
            self.pending[snapshot] = _Pending(fingerprint, now, min(before.first, now) if before else now)
            return False
        return now - before.since >= _QUIET_SECONDS

    def oldest(self) -> float:
        """When the snapshot that has waited longest began to wait."""
        return min(entry.first for entry in self.pending.values())

    def see(self, snapshot: str, fingerprint: str) -> str:
        """Note the listing and give the run's key: a listing that comes back is a change like any other."""
        changes = self.seen[snapshot][1] + 1 if snapshot in self.seen else 0
        self.seen[snapshot] = (fingerprint, changes)
        self.pending.pop(snapshot, None)
        return f"{snapshot}:{fingerprint}" + (f":{changes}" if changes else "")


def _changed(
    context: dg.SensorEvaluationContext, source: Source, cursor: _Cursor, snapshots: list[str]
) -> tuple[dict[str, str], list[str]]:
    """({snapshot: listing fingerprint} of those that are new or changed and quiet, at most as many as one tick may
    request; those that are not quiet yet).

    New snapshots come first, then the others from where the last tick ended, so that a slow listing starves none.
    """
    started, now = time.monotonic(), time.time()
    order = sorted(snapshots, key=lambda name: (name in cursor.seen, name <= cursor.after, name))
    quiet: dict[str, str] = {}
    waiting: list[str] = []
    for snapshot in order:
        if len(quiet) == _MAX_REQUESTS or time.monotonic() - started > _DEADLINE_SECONDS:
            context.log.info("more snapshots wait for the next tick")
            break
        cursor.after = snapshot
        try:
            fingerprint = source.listing_fingerprint(snapshot)
        except SourceError as error:
            context.log.warning(str(error))
            continue
        if snapshot in cursor.seen and cursor.seen[snapshot][0] == fingerprint:
            # what had changed is as it was
            cursor.pending.pop(snapshot, None)
        elif cursor.is_quiet(snapshot, fingerprint, now):
            quiet[snapshot] = fingerprint
        else:
            waiting.append(snapshot)
    for gone in cursor.pending.keys() - set(snapshots):
        del cursor.pending[gone]
    return quiet, waiting


def _fitted(store: Store) -> str:
    """16 hex digits over which global assets are published."""
    found = {name: (published := store.published(name)) and published.fingerprint for name in FITTED}
    return digest(json.dumps(found, sort_keys=True), size=8).hex()


def _fit_first(context: dg.SensorEvaluationContext, fit: str, there: str, why: str, root: str) -> dg.RunRequest | str:
    """The run of fit_global, or why there is none yet.

    fit: what is to be fitted, by code and settings; there: what of it is published now.
    """
    under_way = fit_under_way(context.instance)
    if under_way:
        return f"waiting for fit_global (run {under_way}): {why}"
    key, tags = f"fit_global:{fit}", {_FIT: fit, _THERE: there}
    records = context.instance.get_run_records(dg.RunsFilter(job_name=FIT_GLOBAL, tags={_FIT: fit}), limit=1)
    if records:
        last = records[0].dagster_run
        since = dg.RunsFilter(
            job_name=FIT_GLOBAL,
            statuses=[dg.DagsterRunStatus.SUCCESS],
            created_after=records[0].create_timestamp,
        )
        if not last.is_success and not context.instance.get_runs(since, limit=1):
            ended = "was cancelled" if last.status is dg.DagsterRunStatus.CANCELED else "failed"
            return f"fit_global {ended} (run {last.run_id}); mend its cause and run the job fit_global again: {why}"
        key = f"{key}:after:{last.run_id[:8]}"
        if last.is_success and last.tags[_THERE] == there:
            if _AGAIN in last.tags:
                # runs on other machines may write to a root that only looks like the one that is seen here
                return (
                    f"fit_global succeeded twice (runs {last.tags[_AGAIN]} and {last.run_id}) and left nothing that "
                    f"is seen here under {root}: do the code server and the runs have one root and one datamask.toml? "
                    f"If the files were removed, run the job fit_global: {why}"
                )
            # or the files were removed since
            tags[_AGAIN] = last.run_id
    context.log.info(f"fit_global goes first: {why}")
    return dg.RunRequest(run_key=key, job_name=FIT_GLOBAL, tags=tags)


def _named(snapshots: list[str]) -> str:
    more = len(snapshots) - 5
    return ", ".join(snapshots[:5]) + (f" and {more} more" if more > 0 else "")
