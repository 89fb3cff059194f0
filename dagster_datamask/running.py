"""Materialising without the UI: the same definitions, instance and jobs, driven from a process.

Belongs here: the instance's home, planning (`--limit`, `--dry-run`), and running snapshots one after another. What the
command line looks like is `cli`'s.
"""

import importlib.resources
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pyarrow.compute as pc

from dagster_datamask.definitions import build_definitions
from dagster_datamask.jobs import (
    EMBED,
    FIT_GLOBAL,
    FULL,
    GROUP_MATES_CONTINUE,
    GROUP_MATES_FIT,
    GROUP_MATES_SELECT,
    REPORT,
    SELECT,
    SOLVE_CORPUS,
    of_a_snapshot,
)
from dagster_datamask.keyed import hash64
from dagster_datamask.partitions import asset_key, cc_snapshot
from dagster_datamask.resources.storage import StorageResource
from dagster_datamask.scoring.encoders import ENCODERS
from dagster_datamask.settings import Settings, SettingsError
from dagster_datamask.shards.cursor import Cursor, read_batches
from dagster_datamask.shards.generations import Published, Store
from dagster_datamask.shards.identity import base_ids
from dagster_datamask.shards.source import Source
from dagster_datamask.stages.base import FITTED
from dagster_datamask.stages.freshness import unfitted
from dagster_datamask.stages.ingest import LIMIT_PURPOSE
from dagster_datamask.stages.language_model import check_reference
from dagster_datamask.stages.quality import CLEANING
from dagster_datamask.stages.scores import SIDE_ROWS

_ID_ROWS = 65_536
_PROCESS_TAG = "datamask/process"
# The dry run's yardstick, stated in its output: bf16 forward passes at 40 % of an A100's 312 TFLOP/s
GPU_FLOPS = 0.4 * 312e12
# the paper's own figure for the policy gradient: 30 to 60 minutes for a split of one million
_GRADIENT_HOURS_PER_DOCUMENT = 0.75 / 1e6


def dagster_home() -> Path:
    """$DAGSTER_HOME, else ./.dagster_home; made with the project's dagster.yaml where it has none."""
    home = Path(os.environ.get("DAGSTER_HOME") or ".dagster_home").resolve()
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "dagster.yaml").exists():
        with importlib.resources.as_file(importlib.resources.files("dagster_datamask") / "dagster.yaml") as packaged:
            shutil.copyfile(packaged, home / "dagster.yaml")
    os.environ["DAGSTER_HOME"] = str(home)
    return home


@dataclass
class SnapshotRun:
    """What became of one job run: success, or the failed step's message."""

    name: str
    run_id: str
    success: bool
    failure: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)


def chosen_snapshots(source: Source, asked: Sequence[str], warn: Callable[[str], None]) -> list[str]:
    """`asked`, each proved to have shards, or all snapshots that have some, in the order of their names, in which
    text_duplicates compares them; `warn` is told of folders left out."""
    if asked:
        for snapshot in asked:
            source.shards(snapshot)
        return sorted(asked)
    chosen = source.filled()
    for name in source.unusable():
        warn(f"folder {name!r} cannot be a snapshot: use letters, digits, '.', '_' and '-' only")
    for name in sorted(set(source.snapshots()) - set(chosen)):
        warn(f"snapshot {name} is left out: it has no .parquet shards")
    return chosen


def refuse_narrowing(store: Store, settings: Settings, snapshots: Sequence[str]) -> None:
    """Raise SettingsError where a limited run would take the place of a published, less limited one."""
    for snapshot in snapshots:
        published = store.published("raw_shards", snapshot)
        if published is not None and published.settings["source.hash_below"] > settings.source.hash_below:
            raise SettingsError(
                f"--limit would replace the fuller result of {snapshot} that {store.where} holds; give another --root"
            )


def free_dead_slots(instance: dg.DagsterInstance, report: Callable[[str], None]) -> None:
    """Give back pool slots of runs that ended or whose process is gone: no daemon does it for runs of this command."""
    for pool in instance.event_log_storage.get_concurrency_keys():
        for run_id in {slot.run_id for slot in instance.event_log_storage.get_concurrency_info(pool).claimed_slots}:
            run = instance.get_run_by_id(run_id)
            if run is not None and not run.is_finished:
                host, _, process = run.tags.get(_PROCESS_TAG, "").partition(":")
                if host != platform.node() or _lives(process):
                    remedy = f" (if {host}, where it runs, is gone, cancel it in the UI)"
                    report(
                        f"pool {pool} is held by run {run_id}, which has not ended; waiting for its slot"
                        f"{'' if host in ('', platform.node()) else remedy}"
                    )
                    continue
                instance.report_run_failed(run, "its process is gone")
            instance.event_log_storage.free_concurrency_slots_for_run(run_id)
            report(f"freed the slot of pool {pool} that the dead run {run_id} held")


def refuse_watched(instance: dg.DagsterInstance) -> None:
    """Raise SettingsError where a daemon would take the runs of this process for lost.

    A launcher of pods or containers looks for those of every run that has started, and finds none of ours.
    """
    launcher = instance.run_launcher
    if launcher.supports_check_run_worker_health:
        raise SettingsError(
            f"the runs of this DAGSTER_HOME are started by {type(launcher).__name__}, whose daemon takes a run without "
            "a pod or container for lost; launch it from the UI, or set DAGSTER_HOME to a folder of this command's own"
        )


def _started(pid: str) -> str:
    """When a process of this machine started, in ticks since boot; "" where it is gone."""
    try:
        # the name before it, in brackets, may hold anything
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _lives(process: str) -> bool:
    """Whether the process of a tag lives. A number alone does not tell: a restarted container gives the same ones."""
    pid, _, started = process.partition(":")
    return started in (_started(pid), "") and _started(pid) != ""


def materialise(
    settings: Settings,
    source: Source,
    snapshots: Sequence[str],
    instance: dg.DagsterInstance,
    told: Callable[[SnapshotRun], None] = lambda run: None,
    *,
    stages: bool = False,
) -> list[SnapshotRun]:
    """Run `fit_global` where it is due, then `full` for each snapshot; a failed snapshot does not stop the others.

    With select.scope = corpus: `embed` for each, `solve_corpus` over all that are embedded, then `select` for those
    that did not fail. With select.strategy = group_mates or joint the stages of Group-MATES come after `embed`; with
    `stages` they do under any strategy, beside what the manifest keeps.

    Raises SettingsError where influence is asked for and no reference set is named.
    """
    needed = settings.select.strategy == "group_mates" or settings.select.influence > 0
    staged = needed or stages
    if staged:
        check_reference(settings)
    jobs = _Jobs(settings, source, instance, told)
    if not jobs.fit(FIT_GLOBAL, FITTED, whole=True):
        return jobs.runs
    jobs.add_partitions(snapshots)
    if settings.select.scope != "corpus" and not staged:
        for snapshot in snapshots:
            jobs.execute(FULL, snapshot)
        return jobs.runs
    ready = [snapshot for snapshot in snapshots if jobs.execute(EMBED, snapshot)]
    if ready and staged:
        chosen = jobs.through_stages(ready)
        ready = chosen if needed else ready
    if ready and (settings.select.scope != "corpus" or jobs.execute(SOLVE_CORPUS)):
        for snapshot in ready:
            jobs.execute(SELECT, snapshot)
    return jobs.runs


def staged_summary(store: Store, settings: Settings, snapshots: Sequence[str]) -> list[dict[str, Any]]:
    """One row per finished Group-MATES stage: documents chosen of these snapshots, how many of them datamask_masks
    keeps too, mean predicted influence of each by itself, the share that influence alone would choose, and the loss on
    the held-out reference before and after training on them."""
    rows = []
    for number in range(1, settings.group_mates.stages + 1):
        trained = store.published(f"stage_{number}/continued_model")
        name = f"stage_{number}/group_mates_selection"
        found = {s: published for s in snapshots if (published := store.published(name, s)) is not None}
        if trained is None or not found:
            continue
        both = sum(_in_both(chosen, store.published("datamask_masks", snapshot)) for snapshot, chosen in found.items())
        facts = [published.facts for published in found.values()]
        kept = sum(f["kept"] for f in facts)
        rows.append(
            {
                "stage": number,
                "chosen": kept,
                "also_in_datamask": both,
                "influence_kept": sum((f["influence_kept"] or 0.0) * f["kept"] for f in facts) / max(1, kept),
                "influence_of_pool": sum((f["influence_of_pool"] or 0.0) * f["documents"] for f in facts)
                / max(1, sum(f["documents"] for f in facts)),
                "by_influence_alone": sum((f["overlap_individual"] or 0.0) * f["kept"] for f in facts) / max(1, kept),
                "held_out_loss_before": trained.facts.get("held_out_loss_before"),
                "held_out_loss_after": trained.facts.get("held_out_loss_after"),
            }
        )
    return rows


def _in_both(chosen: Published, mask: Published | None) -> int:
    """Documents that two masks of a snapshot's candidates keep; 0 where they are not of the same."""
    if mask is None or mask.inputs.get("e5_embeddings") != chosen.inputs["e5_embeddings"]:
        return 0
    both = 0
    for shard in chosen.shards:
        other = Cursor(mask.path(shard), ["doc_id", "selected"], SIDE_ROWS)
        for table in read_batches(chosen.path(shard), ["doc_id", "selected"], SIDE_ROWS):
            found = other.take_all(table["doc_id"].combine_chunks())
            both += pc.sum(pc.and_(table["selected"], found["selected"])).as_py() or 0
    return both


class _Jobs:
    """Jobs run one after another, and what became of them."""

    def __init__(
        self, settings: Settings, source: Source, instance: dg.DagsterInstance, told: Callable[[SnapshotRun], None]
    ) -> None:
        self._settings, self._source, self._instance, self._told = settings, source, instance, told
        self._defs, self._store = build_definitions(settings), StorageResource.from_settings(settings).store()
        self.runs: list[SnapshotRun] = []

    def execute(self, job: str, snapshot: str | None = None, only: Sequence[str] | None = None) -> bool:
        self.runs.append(_execute(self._defs, job, snapshot, self._instance, only))
        self._told(self.runs[-1])
        return self.runs[-1].success

    def fit(self, job: str, assets: Sequence[str], whole: bool = False) -> bool:
        """Run those assets of a job that are missing or were fitted otherwise, or the `whole` job for any of them."""
        due = list(unfitted(self._store, self._settings, self._source, assets))
        return not due or self.execute(job, only=None if whole else due)

    def add_partitions(self, snapshots: Sequence[str]) -> None:
        name = cc_snapshot.name or ""
        known = self._instance.get_dynamic_partitions(name)
        self._instance.add_dynamic_partitions(name, sorted(key for key in snapshots if key not in known))

    def through_stages(self, snapshots: list[str]) -> list[str]:
        """Of each stage what is fitted once, where that is due, what it chooses of each snapshot, and the model that
        goes on from there; the snapshots that every stage has chosen from."""
        last = self._settings.group_mates.stages
        for number in range(1, last + 1):
            probed = [f"stage_{number}/rollout_sets", f"stage_{number}/influence_model"]
            if not self.fit(f"{GROUP_MATES_FIT}_{number}", ["warmup_model", *probed] if number == 1 else probed):
                return []
            snapshots = [name for name in snapshots if self.execute(f"{GROUP_MATES_SELECT}_{number}", name)]
            # the joint objective needs the last stage's scores and no model after them
            if not snapshots or (number == last and self._settings.select.influence):
                break
            if not self.fit(f"{GROUP_MATES_CONTINUE}_{number}", [f"stage_{number}/continued_model"]):
                return []
        return snapshots


def report_all(settings: Settings, instance: dg.DagsterInstance) -> SnapshotRun:
    """Run the job `report`: one page over all snapshots that are selected."""
    return _execute(build_definitions(settings), REPORT, None, instance)


def _execute(
    defs: dg.Definitions,
    job: str,
    snapshot: str | None,
    instance: dg.DagsterInstance,
    only: Sequence[str] | None = None,
) -> SnapshotRun:
    """Run a job, or `only` some of its assets."""
    refuse_watched(instance)
    result = defs.resolve_job_def(job).execute_in_process(
        instance=instance,
        partition_key=snapshot,
        raise_on_error=False,
        tags={_PROCESS_TAG: f"{platform.node()}:{os.getpid()}:{_started('self')}"},
        run_config={"loggers": {"console": {"config": {}}}},
        asset_selection=None if only is None else [asset_key(name) for name in only],
    )
    name = " ".join(part for part in (snapshot, "" if job == FULL else job) if part)
    run = SnapshotRun(name, result.run_id, result.success)
    for event in result.all_events:
        if event.is_step_failure and run.failure is None:
            data = event.step_failure_data
            cause = data.user_failure_data.description if data.user_failure_data else None
            run.failure = f"{event.step_key}: {cause or (data.error.message.strip() if data.error else 'failed')}"
        elif event.is_step_success and event.step_key:
            run.seconds[event.step_key] = event.step_success_data.duration_ms / 1000
    return run


def limited(settings: Settings, source: Source, snapshots: Sequence[str], limit: int) -> Settings:
    """Settings that keep exactly the `limit` documents with the smallest keyed hash of all `snapshots`.

    The cut depends on the documents alone, not on their order; reading ids costs one pass over the id columns.
    """
    if limit < 1:
        raise SettingsError(f"--limit {limit} keeps nothing; give at least 1")

    def hashes() -> Iterator[np.ndarray]:
        for snapshot in snapshots:
            for shard in source.shards(snapshot):
                if shard.name in settings.source.aside(snapshot):
                    continue
                first = 0
                for batch in source.batches(shard, ["id"], _ID_ROWS):
                    ids = batch.column("id") if "id" in batch.schema.names else None
                    yield hash64(base_ids(ids, shard.name, first, len(batch))[0], 0, LIMIT_PURPOSE)
                    first += len(batch)

    total = 0
    smallest = np.empty(0, dtype=np.uint64)
    for batch in hashes():
        total += len(batch)
        smallest = np.sort(np.concatenate([smallest, batch]))[: limit + 1]
    if limit >= total:
        return settings
    last, following = int(smallest[limit - 1]), int(smallest[limit])
    below = (last + following + 1) / 2 / 2**64
    if not last < int(below * 2**64) <= following:
        less = f" or {limit - 1}" if limit > 1 else ""
        raise SettingsError(f"--limit {limit} falls between two rows of one id; take {limit + 1}{less}")
    return settings.replace({"source.hash_below": below})


def dry_run(settings: Settings, source: Source, snapshots: Sequence[str]) -> dict[str, Any]:
    """What `run` would read and cost: rows, bytes, passes over the text, and GPU-hours by a stated yardstick."""
    rows = size = 0
    for snapshot in snapshots:
        for shard in source.shards(snapshot):
            rows += source.footer(shard)[0]
            size += shard.size
    embedded = rows if settings.embed.documents == "all" else round(rows * (1 - settings.prune.ratio))
    known = ENCODERS.get(settings.models.encoder.partition("@")[0])
    dimension, length = (known.dimension, known.max_length) if known else (768, 512)
    length = min(length, settings.embed.max_tokens or length)
    layers = 24 if dimension > 768 else 12
    flops_per_token = 2 * 12 * layers * dimension**2
    embed_hours = embedded * length * flops_per_token / GPU_FLOPS / 3600
    edu_hours = rows * min(length, settings.score.edu_max_tokens) * flops_per_token / GPU_FLOPS / 3600
    gradient = embedded * _GRADIENT_HOURS_PER_DOCUMENT if settings.select.solver == "policy_gradient" else 0.0
    return {
        "snapshots": list(snapshots),
        "rows": rows,
        "bytes": size,
        "documents_embedded": embedded,
        "embedding_bytes": embedded * dimension * 2,
        "passes_over_text": {
            "raw_shards": 2 if source.hashes_content() else 1,
            **{name: 1 for name in of_a_snapshot(settings) if name in CLEANING or name.endswith("/influence_scores")},
            "scorers": 3,
            "e5_embeddings": 1,
            "fineweb_mask": 1,
        },
        "gpu_hours": {
            "edu_scores": round(edu_hours, 4),
            "e5_embeddings": round(embed_hours, 4),
            "datamask_masks": round(gradient, 4),
        },
        "gpu_hours_assume": "full-length documents, bf16 at 40 % of 312 TFLOP/s; the paper's 45 minutes a million for "
        "the policy gradient; the certified solver needs seconds",
        "stages": of_a_snapshot(settings),
    }


def summary(store: Store, snapshots: Sequence[str]) -> list[dict[str, Any]]:
    """One row per snapshot with a published manifest: decisions, budget, value, bound, gap, share, tokens."""
    rows = []
    for snapshot in snapshots:
        published: Published | None = store.published("fineweb_mask_manifest", snapshot)
        if published is not None:
            rows.append({"snapshot": snapshot, "readable_rows": published.rows, **published.facts})
    return rows
