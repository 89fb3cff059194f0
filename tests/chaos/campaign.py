"""A campaign: injections by their seeds, each logged as one line and checked, and a table of what became of them.

A seed alone decides an injection: its kind, its moment and everything that is drawn for it.
"""

import json
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from dagster_datamask import keyed
from dagster_datamask.scoring import models
from dagster_datamask.shards import source
from tests.chaos.world import World

# the moment that was drawn did not come: no injection
MISSED = "missed"
WRONG = "WRONG"


class Wrong(AssertionError):
    """Something was lost, doubled, half-done, of other bytes, or told wrongly."""


@dataclass(frozen=True)
class Injection:
    """What was injected and what became of it."""

    where: str
    when: str
    outcome: str
    # how many faults it was: a run that is killed three times has three
    count: int = 1


@dataclass(frozen=True)
class Entry:
    """A line of the log."""

    seed: int
    kind: str
    where: str
    when: str
    outcome: str
    count: int
    seconds: float


Kind = Callable[[World, np.random.Generator, Path], Injection]


def inject(world: World, seed: int, kind: str, act: Kind) -> Entry:
    """One injection on a root of its own, which is kept where something proved wrong."""
    # as a new process begins: nothing is known of any file
    source._contents.clear()
    models._digests.clear()
    started = time.monotonic()
    root = world.folder / "roots" / f"{kind}_{seed}"
    try:
        done = act(world, keyed.rng(seed, "chaos", kind), root)
    except Exception as error:
        told = str(error) if isinstance(error, Wrong) else "".join(traceback.format_exception(error))
        done = Injection(str(root), "", f"{WRONG}: {told}")
    if not done.outcome.startswith(WRONG):
        shutil.rmtree(root, ignore_errors=True)
    return Entry(seed, kind, done.where, done.when, done.outcome, done.count, round(time.monotonic() - started, 2))


def run(world: World, schedule: Iterable[tuple[int, str, Kind]], log: Path, console: Console) -> list[Entry]:
    """Every injection of the schedule, in turn, each appended to the log as it is done."""
    log.parent.mkdir(parents=True, exist_ok=True)
    entries = []
    with log.open("w", encoding="utf-8") as file:
        for seed, kind, act in schedule:
            entry = inject(world, seed, kind, act)
            entries.append(entry)
            file.write(_line(entry))
            file.flush()
            console.print(f"{seed:4d} {kind}: {entry.where}, {entry.when}: {entry.outcome}", style=_style(entry))
    return entries


def write(log: Path, entries: Iterable[Entry]) -> None:
    """The log of these entries, a line each."""
    log.write_text("".join(map(_line, entries)), "utf-8")


def _line(entry: Entry) -> str:
    return json.dumps(asdict(entry)) + "\n"


def injected(entries: Iterable[Entry]) -> int:
    """How many faults were injected: those whose moment came."""
    return sum(entry.count for entry in entries if entry.outcome != MISSED)


def wrong(entries: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.outcome.startswith(WRONG)]


def summary(entries: list[Entry]) -> Table:
    """Counts by kind and outcome, and seconds."""
    outcomes = sorted({_short(entry) for entry in entries})
    table = Table("kind", "faults", *outcomes, "s", title=f"{injected(entries)} faults injected", title_justify="left")
    for kind in sorted({entry.kind for entry in entries}):
        of_kind = [entry for entry in entries if entry.kind == kind]
        counts = Counter(_short(entry) for entry in of_kind)
        cells = (str(counts[outcome] or "") for outcome in outcomes)
        table.add_row(kind, str(injected(of_kind)), *cells, f"{sum(entry.seconds for entry in of_kind):.0f}")
    return table


def _short(entry: Entry) -> str:
    return entry.outcome.partition(":")[0]


def _style(entry: Entry) -> str:
    return "red" if entry.outcome.startswith(WRONG) else "yellow" if entry.outcome == MISSED else "green"
