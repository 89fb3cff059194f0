"""`datamask doctor`: what is installed, which device there is, and what can be reached, each in one row.

raw_shards shows the same rows for the machine that made it.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from pathlib import Path
from typing import Any

from dagster_datamask import __version__
from dagster_datamask.accelerator import AcceleratorUnavailable, resolve
from dagster_datamask.failures import told
from dagster_datamask.redaction import redacted
from dagster_datamask.scoring.encoders import EncoderSpec, encoder_spec
from dagster_datamask.scoring.models import ModelUnavailable, ResolvedModel, resolve_model
from dagster_datamask.scoring.quality import PARTS
from dagster_datamask.settings import Settings, SettingsError
from dagster_datamask.shards.remote import RemoteStore, open_store
from dagster_datamask.shards.source import Source, SourceError
from dagster_datamask.stages.base import check_requests
from dagster_datamask.stages.classifiers import TRAINED

_PACKAGES = (
    "dagster",
    "dagster-webserver",
    "duckdb",
    "faiss-cpu",
    "fasttext-community",
    "numpy",
    "polars",
    "pyarrow",
    "sentence-transformers",
    "torch",
    "transformers",
)


# said wherever it is unset: by the doctor, the sensors' ticks and every run of raw_shards
HOME_UNSET = (
    "DAGSTER_HOME is not set: when Dagster stops, the history of runs, checks and backfills, the sensors' cursors and "
    "the partitions are lost, so that every snapshot is asked for again (what is published stays); set it to a folder, "
    "or use `make dev`"
)


def home_unset() -> bool:
    """Whether this process has no DAGSTER_HOME to keep its history in."""
    return not os.environ.get("DAGSTER_HOME")


def examine(settings: Settings, models: bool = True) -> dict[str, Any]:
    """{"checks": [{what, state: ok | missing | note, detail}]}; looks, and changes nothing but the hub's cache.

    models: whether to look the models up, which may take a download, and to ask a cluster; if not, what they are called
    is told.
    """
    checks = [_row("dagster-datamask", "ok", f"{__version__}, Python {platform.python_version()}")]
    for package in _PACKAGES:
        try:
            checks.append(_row(package, "ok", importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            checks.append(_row(package, "missing", f"pip install {package}"))
    try:
        device = resolve(settings.compute.device, settings.compute.dtype, settings.compute.memory_limit_gb)
        checks.append(_row("accelerator", "ok", f"{device.device} ({device.name}), {device.dtype}"))
    except AcceleratorUnavailable as error:
        checks.append(_row("accelerator", "missing", str(error)))
    checks.append(_compute(settings, models))
    look_up = _model if models else _named
    checks += [look_up(settings, name) for name in ("encoder", *PARTS)]
    checks += [_for_baselines(look_up(settings, name)) for name in ("ultra", "ultra_tokenizer")]
    checks.append(_source(settings))
    checks.append(_root(settings))
    home = _row("DAGSTER_HOME", "note", HOME_UNSET) if home_unset() else _row("DAGSTER_HOME", "ok", _home())
    checks.append(home)
    return {"checks": checks}


def _row(what: str, state: str, detail: str) -> dict[str, str]:
    return {"what": what, "state": state, "detail": redacted(detail)}


def _compute(settings: Settings, ask: bool) -> dict[str, str]:
    """Where shards are worked on, and what of it can be reached."""
    asked = settings.compute
    cores = asked.processes or len(os.sched_getaffinity(0))
    try:
        check_requests(settings)
        if asked.backend == "local":
            return _row("compute", "ok", f"local, {cores} process{'es' if cores > 1 else ''}")
        if importlib.util.find_spec("ray") is None:
            return _row("compute", "missing", "compute.backend = ray; pip install 'dagster-datamask[ray]'")
        if not asked.ray_address:
            return _row("compute", "ok", f"Ray on this machine, {cores} core{'s' if cores > 1 else ''}")
        if not ask:
            return _row("compute", "note", f"the Ray cluster at {asked.ray_address}, connected to by the first stage")
        from dagster_datamask.compute.cluster import ClusterUnavailable, ClusterUnfit, RayCluster

        try:
            with RayCluster(asked.ray_address) as cluster:
                room = f"room for {cluster.workers} workers of a core now"
                return _row("compute", "ok", f"the Ray cluster at {asked.ray_address}, {room}")
        except (ClusterUnavailable, ClusterUnfit) as error:
            return _row("compute", "missing", str(error))
    except SettingsError as error:
        return _row("compute", "missing", str(error))


def _home() -> str:
    return str(Path(os.environ["DAGSTER_HOME"]).resolve())


def _named(settings: Settings, name: str) -> dict[str, str]:
    return _row(f"models.{name}", "note", f"{settings.get(f'models.{name}')}, looked up by the stage that loads it")


def _for_baselines(row: dict[str, str]) -> dict[str, str]:
    """Nothing but baselines needs it, so that its absence is no fault."""
    state = "note" if row["state"] == "missing" else row["state"]
    return row | {"state": state, "detail": f"{row['detail']} (for baselines alone)"}


def _model(settings: Settings, name: str) -> dict[str, str]:
    ref = settings.get(f"models.{name}")
    if ref == TRAINED:
        labels = settings.get(f"score.{name}_labels")
        if not labels:
            return _row(f"models.{name}", "missing", f"'trained', but score.{name}_labels is not set")
        if "://" not in labels and not Path(labels).exists():
            return _row(f"models.{name}", "missing", f"'trained', but {labels} does not exist")
        return _row(f"models.{name}", "ok", f"trained from {labels}")
    found: EncoderSpec | ResolvedModel
    try:
        if name == "encoder":
            # of a bare id of the registry the stages take its commit, wherever the branch has moved since
            found = encoder_spec(ref, settings.models.encoder_prefix)
        else:
            found = resolve_model(ref, filename="tokenizer.json" if name == "ultra_tokenizer" else None, setting=name)
    except (ModelUnavailable, ValueError) as error:
        return _row(f"models.{name}", "missing", str(error))
    return _row(f"models.{name}", "ok", f"{ref}, {found.revision}, licence {found.licence or 'not stated'}")


def _source(settings: Settings) -> dict[str, str]:
    try:
        source = Source(settings.source.url)
        snapshots = source.snapshots()
    except SourceError as error:
        return _row("source", "missing", str(error))
    return _row("source", "ok", f"{len(snapshots)} snapshots in {source.url}: {', '.join(snapshots[:5])}")


def _root(settings: Settings) -> dict[str, str]:
    try:
        store = open_store(settings.storage.root, settings.storage.cache)
        if isinstance(store, RemoteStore):
            return _row("storage.root", "ok", f"{store.where}, {store.reached()}")
    except Exception as error:  # every client of a store has errors of its own
        return _row("storage.root", "missing", told(error))
    root = store.root
    if root.exists():
        if not os.access(root, os.W_OK):
            return _row("storage.root", "missing", f"{root} cannot be written; grant the right, or set another root")
        free = shutil.disk_usage(root).free
        return _row("storage.root", "ok", f"{root}, {free / 1e9:,.1f} GB free")
    return _row("storage.root", "note", f"{root} will be made by the first run")
