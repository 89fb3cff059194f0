"""A small real project whose every published byte is known, runs of it, and what must hold after each.

Here: the documents, one undisturbed run, a run through Dagster as `datamask run` makes it, the comparison. What goes
wrong is `faults`' matter, and processes that are killed `victims`'.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import dagster as dg
import polars as pl

from dagster_datamask import jobs, running
from dagster_datamask.assets import base
from dagster_datamask.failures import KIND, is_transient, told
from dagster_datamask.reporting import figures
from dagster_datamask.settings import Settings, known_keys
from dagster_datamask.shards import source
from dagster_datamask.shards.generations import LEASE, POINTER
from dagster_datamask.shards.remote import LISTING
from dagster_datamask.shards.source import Source
from dagster_datamask.stages import base as base_stages
from tests.chaos.filesystem import PROTOCOL, weather
from tests.chaos.victims import Victims
from tests.project import settings_for, text_of, write_labels, write_shard

SNAPSHOT = "CC-MAIN-2024-10"
SHARDS = {"000_00000": 20, "001_00000": 13, "002_00000": 9}
ROWS = sum(SHARDS.values())


def write_source(source: Path) -> None:
    """Three shards with what the wild has: a repeated id, rows without one, a null and a blank text, equal texts."""
    for shard, rows in SHARDS.items():
        ids: list[str | None] = [f"{shard}/{k}" for k in range(rows)]
        texts: list[str | None] = [text_of(f"{shard}/{k}") for k in range(rows)]
        ids[3], texts[4], texts[5] = None, None, " \n"
        if shard != "000_00000":
            ids[1], texts[2] = "000_00000/1", text_of("000_00000/2")
        write_shard(source, SNAPSHOT, shard, rows, ids=ids, texts=texts, group_rows=5)


@dataclass
class Attempt:
    """What became of one run: how many steps were tried again, and the first failure as a person reads it."""

    success: bool
    retries: int = 0
    # permanent or transient, of a failure
    kind: str | None = None
    told: str = ""
    # a step that failed by an error that nobody sorted
    unsorted: bool = False


@dataclass
class World:
    """The project in `folder`: its source, what is fitted once, and the bytes of one undisturbed run."""

    folder: Path
    expected: dict[str, str] = field(default_factory=dict)
    # what the store is asked in such a run, by operation, and by operation and place
    asked: Counter[str] = field(default_factory=Counter)
    # the same of the store of a root
    asked_of_store: Counter[str] = field(default_factory=Counter)
    # file events and seconds of an undisturbed run of the command, once it was measured
    events: int = 0
    seconds: float = 0.0
    victims: Victims = field(default_factory=Victims)

    @property
    def source(self) -> Path:
        return self.folder / "source"

    @property
    def labels(self) -> Path:
        return self.folder / "labels"

    @property
    def fitted(self) -> Path:
        """A root with the global assets; copied, never written into."""
        return self.folder / "fitted"

    @property
    def whole(self) -> Path:
        """The root of the undisturbed run; copied, never written into."""
        return self.folder / "whole"

    def settings(self, root: Path | str, *overrides: str, documents: Path | None = None) -> Settings:
        url = f"{PROTOCOL}://{documents or self.source}"
        # the weather is this process's
        return settings_for(url, root, self.labels, "compute.processes=1", *overrides)  # type: ignore[arg-type]

    def config(self, root: Path, backend: str = "") -> str:
        """datamask.toml of the same project for another process: in one place, or in two of `backend`."""
        place = f"compute.backend={backend or 'local'}"
        settings = settings_for(self.source, root, self.labels, f"compute.processes={2 if backend else 1}", place)
        return as_toml(settings)

    @classmethod
    def made(cls, folder: Path) -> "World":
        """Write the documents, fit, and run once undisturbed."""
        world = cls(folder)
        write_source(world.source)
        write_labels(world.labels)
        first = run(world.settings(world.whole))
        assert first.success, first.told
        shutil.copytree(world.whole, world.fitted)
        for asset in sorted(world.fitted.iterdir()):
            if (asset / SNAPSHOT).exists():
                shutil.rmtree(asset)
        world.expected = published(world.whole)
        source._contents.clear()
        before = Counter(weather.asked)
        second = run(world.settings(world.root("counting")), whole=False)
        assert second.success, second.told
        world.asked = weather.asked - before
        problems = broken(world.whole)
        assert not problems, problems
        return world

    def fitted_store(self) -> Path:
        """The folder behind a root at `chaos://` with the global assets; copied, never written into."""
        fitted = self.folder / "stores" / "fitted"
        if not fitted.exists():
            making = self.folder / "stores" / "making"
            first = run(self.settings_at(making), whole=False)
            assert first.success, first.told
            shutil.copytree(making, fitted)
            for asset in sorted(fitted.iterdir()):
                if (asset / SNAPSHOT).exists():
                    shutil.rmtree(asset)
            counting = self.folder / "stores" / "counting"
            shutil.copytree(fitted, counting)
            before = Counter(weather.asked)
            second = run(self.settings_at(counting), whole=False)
            assert second.success, second.told
            self.asked_of_store = weather.asked - before
        return fitted

    def cache_of(self, store: Path) -> Path:
        return store.with_name(f"{store.name}_cache")

    def settings_at(self, store: Path) -> Settings:
        """Of a root on a store, the source being a plain folder; its cache lies beside the folder behind it."""
        cache = self.cache_of(store)
        root = f"{PROTOCOL}://{store}"
        return settings_for(self.source, root, self.labels, "compute.processes=1", f"storage.cache={cache}")  # type: ignore[arg-type]

    def root(self, name: str, of: Path | None = None) -> Path:
        """A root of its own in the state of `of`, or with nothing but what is fitted once."""
        root = self.folder / "roots" / name
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(of or self.fitted, root)
        return root


def as_toml(settings: Settings) -> str:
    """A settings file that loads as `settings`: dotted keys, and of TOML's values those that JSON writes alike."""
    told = {key: settings.get(key) for key in known_keys() if "." in key}
    lines = [f"{key} = {json.dumps(value)}" for key, value in told.items() if value not in (None, {})]
    return "\n".join((f"profile = {json.dumps(settings.profile)}", *lines)) + "\n"


@contextmanager
def at_once() -> Iterator[None]:
    """Retries as they are, but for the waiting."""
    with mock.patch.object(base, "RETRIES", dg.RetryPolicy(max_retries=base.RETRIES.max_retries, delay=0)):
        yield


@contextmanager
def without_figures(left_out: bool) -> Iterator[None]:
    """The job `full` without snapshot_report and without the UI's figures, where they are left out."""
    if not left_out:
        yield
        return
    lineage = base_stages.lineage

    def shorter(names: Iterable[str], settings: Settings) -> list[str]:
        return lineage([name for name in names if name != "snapshot_report"], settings)

    with mock.patch.object(jobs, "lineage", shorter), mock.patch.object(figures, "png", lambda *args, **kwargs: b""):
        yield


def run(settings: Settings, *, whole: bool = True) -> Attempt:
    """One snapshot through Dagster's jobs, as `datamask run` runs it; errors end up in the Attempt.

    whole: with the report and the figures for the UI, which take as long as all else.
    """
    with at_once(), without_figures(not whole), dg.DagsterInstance.ephemeral() as instance:
        try:
            documents = Source(settings.source.url)
            chosen = running.chosen_snapshots(documents, [SNAPSHOT], lambda text: None)
            runs = running.materialise(settings, documents, chosen, instance)
        except Exception as error:
            return Attempt(False, 0, "transient" if is_transient(error) else "permanent", told(error))
        logs = [entry for done in runs for entry in instance.all_logs(done.run_id)]
    events = [entry.get_dagster_event() for entry in logs if entry.is_dagster_event]
    retries = sum(event.event_type_value == "STEP_UP_FOR_RETRY" for event in events)
    for event in events:
        if event.is_step_failure:
            data = event.step_failure_data
            failed = data.user_failure_data
            if failed is None:
                return Attempt(False, retries, None, data.error.message if data.error else "", unsorted=True)
            return Attempt(False, retries, str(failed.metadata[KIND].value), failed.description or "")
    return Attempt(all(done.success for done in runs), retries)


def published(root: Path) -> dict[str, str]:
    """{path below root: SHA-256} of every pointer and of every file of the generations that they name."""
    found: dict[str, str] = {}
    # a folder has no need of a store's listings and leases, nor a store of a lock
    own = (LEASE, LISTING, ".leases")
    for pointer in sorted(root.glob(f"**/{POINTER}")):
        generation = pointer.with_name(json.loads(pointer.read_text("utf-8"))["fingerprint"])
        for path in (pointer, *sorted(generation.rglob("*"))):
            if path.is_file() and not path.name.startswith(own) and path.parent.name != ".leases":
                found[str(path.relative_to(root))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def different(here: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Which published files are missing, too many or of other bytes, in words."""
    return [
        *(f"{name} is missing" for name in sorted(expected.keys() - here.keys())),
        *(f"{name} is one too many" for name in sorted(here.keys() - expected.keys())),
        *(f"{name} has other bytes" for name in sorted(here.keys() & expected.keys()) if here[name] != expected[name]),
    ]


def half_done(root: Path) -> list[str]:
    """Completion records without their very file, in words: what would be taken for done and is not."""
    wrong = []
    for path in sorted(root.glob("**/*.done.json")):
        record = json.loads(path.read_text("utf-8"))
        file = path.with_name(record["file"])
        if not file.exists():
            wrong.append(f"{path.relative_to(root)} tells of a file that is not there")
        elif hashlib.sha256(file.read_bytes()).hexdigest() != record["sha256"]:
            wrong.append(f"{file.relative_to(root)} is not what its record says")
    return wrong


def broken(root: Path, rows: int = ROWS) -> list[str]:
    """What must not be in a root after a run that went well, in words: losses, doubles, rests, locks that are held."""
    wrong = half_done(root)
    wrong += [f"{path.relative_to(root)} was left behind" for path in sorted(root.rglob(".*.tmp*"))]
    wrong += [f"{path.relative_to(root)} was left behind" for path in sorted(root.rglob("*.part"))]
    for lease in sorted(root.glob("**/.lease")):
        handle = os.open(lease, os.O_RDWR)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            wrong.append(f"{lease.relative_to(root)} is held by nobody who runs")
        finally:
            os.close(handle)
    pointer: dict[str, Any] = json.loads((root / "fineweb_mask_manifest" / SNAPSHOT / POINTER).read_text("utf-8"))
    folder = root / "fineweb_mask_manifest" / SNAPSHOT / pointer["fingerprint"]
    manifest = pl.concat([pl.read_parquet(folder / f"{shard}.parquet") for shard in pointer["shards"]])
    if len(manifest) != rows:
        wrong.append(f"the manifest has {len(manifest)} rows of {rows}")
    if manifest["doc_id"].n_unique() != len(manifest):
        wrong.append("the manifest has an id twice")
    if manifest.select("shard", "row").n_unique() != len(manifest):
        wrong.append("the manifest has a row twice")
    if manifest["decision"].null_count():
        wrong.append("the manifest has a row without a decision")
    return wrong
