"""new_embeddings: with select.scope = corpus, from embedded snapshots to masks.

A tick waits until no run that embeds or solves is under way, asks for `solve_corpus` where the published state does not
speak of some embedded snapshot, and otherwise for `select` of the snapshots whose masks are not the state's. Only
pointers and the state are read.
"""

import json
from collections.abc import Mapping

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from dagster_datamask.jobs import EMBED, FIT_GLOBAL, FULL, SCORE, SELECT, SOLVE_CORPUS
from dagster_datamask.keyed import digest
from dagster_datamask.partitions import cc_snapshot
from dagster_datamask.redaction import redacted
from dagster_datamask.resources.storage import StorageResource
from dagster_datamask.settings import Settings, SettingsError
from dagster_datamask.shards.remote import RootUnusable
from dagster_datamask.stages.base import STAGES
from dagster_datamask.stages.corpus import STATE, outdated_masks, unsolved

_MAX_REQUESTS = 25
_BUSY = (FIT_GLOBAL, SCORE, EMBED, FULL, SOLVE_CORPUS)
_UNDER_WAY = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]


def build_new_embeddings(settings: Settings, jobs: Mapping[str, UnresolvedAssetJobDefinition]) -> dg.SensorDefinition:
    """The sensor for these settings."""

    @dg.sensor(
        name="new_embeddings",
        jobs=[jobs[SOLVE_CORPUS], jobs[SELECT]],
        minimum_interval_seconds=30,
        default_status=dg.DefaultSensorStatus.STOPPED,
        description="Runs solve_corpus once new snapshots are embedded, then select for each of its snapshots.",
    )
    def new_embeddings(
        context: dg.SensorEvaluationContext, storage: StorageResource
    ) -> dg.SensorResult | dg.SkipReason:
        try:
            store = storage.store()
        except (SettingsError, RootUnusable) as error:
            return dg.SkipReason(redacted(str(error)))
        for job in _BUSY:
            runs = context.instance.get_runs(dg.RunsFilter(job_name=job, statuses=_UNDER_WAY), limit=1)
            if runs:
                return dg.SkipReason(f"waiting for {job} (run {runs[0].run_id})")
        waiting = unsolved(store, settings)
        if waiting:
            # the key holds what is there to solve, so that a failed run is not repeated for ever
            there = {name: store.current("e5_embeddings", name).fingerprint for name in sorted(waiting)}
            state = store.published(STATE)
            told = json.dumps([STAGES[STATE].code_version(settings), there, state and state.fingerprint])
            key = f"{SOLVE_CORPUS}:{digest(told, size=8).hex()}"
            context.log.info(f"solve_corpus for {len(waiting)} snapshots")
            return dg.SensorResult(run_requests=[dg.RunRequest(run_key=key, job_name=SOLVE_CORPUS)])
        asked: dict[str, str] = json.loads(context.cursor or "{}")
        known = set(context.instance.get_dynamic_partitions(cc_snapshot.name or ""))
        outdated = {name: part for name, part in outdated_masks(store, settings).items() if name in known}
        new = {name: part for name, part in outdated.items() if asked.get(name) != part}
        if not new:
            return dg.SkipReason(f"{len(outdated)} snapshots without the state's masks, each asked for already")
        chosen = dict(sorted(new.items())[:_MAX_REQUESTS])
        return dg.SensorResult(
            run_requests=[
                dg.RunRequest(run_key=f"{name}:{part}", job_name=SELECT, partition_key=name)
                for name, part in chosen.items()
            ],
            cursor=json.dumps(asked | chosen, sort_keys=True),
        )

    return new_embeddings
