"""`datamask doctor`: what is installed, which device there is, and what can be reached, each in one row."""

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

from dagster_datamask import __version__
from dagster_datamask.accelerator import AcceleratorUnavailable, resolve
from dagster_datamask.scoring.models import ModelUnavailable, resolve_model
from dagster_datamask.scoring.quality import PARTS
from dagster_datamask.settings import Settings
from dagster_datamask.shards.source import Source, SourceError
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


def examine(settings: Settings) -> dict[str, Any]:
    """{"checks": [{what, state: ok | missing | note, detail}]}; looks, and changes nothing."""
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
    checks += [_model(settings, name) for name in ("encoder", *PARTS)]
    checks.append(_source(settings))
    checks.append(_root(settings))
    return {"checks": checks}


def _row(what: str, state: str, detail: str) -> dict[str, str]:
    return {"what": what, "state": state, "detail": detail}


def _model(settings: Settings, name: str) -> dict[str, str]:
    ref = settings.get(f"models.{name}")
    if ref == TRAINED:
        labels = settings.get(f"score.{name}_labels")
        if not labels:
            return _row(f"models.{name}", "missing", f"'trained', but score.{name}_labels is not set")
        if "://" not in labels and not Path(labels).exists():
            return _row(f"models.{name}", "missing", f"'trained', but {labels} does not exist")
        return _row(f"models.{name}", "ok", f"trained from {labels}")
    try:
        found = resolve_model(ref, setting=name)
    except ModelUnavailable as error:
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
    root = Path(settings.storage.root)
    if "://" in settings.storage.root:
        return _row("storage.root", "missing", f"{settings.storage.root} is a URL; give a folder")
    if root.exists():
        return _row("storage.root", "ok", str(root))
    return _row("storage.root", "note", f"{root} will be made by the first run")
