"""How the benchmarks measure, and how they show it.

Here: works timed in turn, a child's peak memory, rows with their bars, tables and the machine. Not here: what is
measured. Memory is read from /proc: Linux alone.
"""

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

_ROOT = Path(__file__).parents[1]
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Row:
    """One figure of ours beside a peer's, a bound or a bar. ratio: ours over the other; met: None where there is no
    bar; digits: how many are shown; facts: what else was measured, for the JSON."""

    what: str
    ours: float | None
    other: float | str | None = None
    ratio: float | None = None
    bar: str = ""
    met: bool | None = None
    unit: str = ""
    digits: int = 3
    facts: dict[str, Any] = field(default_factory=dict)


def at_most(what: str, ours: float, bar: float, **more: Any) -> Row:
    return Row(what, ours, bar=f"≤ {bar:g}", met=bool(ours <= bar), **more)


def at_least(what: str, ours: float, bar: float, **more: Any) -> Row:
    return Row(what, ours, bar=f"≥ {bar:g}", met=bool(ours >= bar), **more)


def against(
    what: str, ours: float, other: float, *, most: float | None = None, least: float | None = None, **more: Any
) -> Row:
    """Ours over the other, with a bar on the ratio where one is given."""
    # what is too little to be seen is as good as nothing
    ratio = ours / other if other else 1.0
    if most is not None:
        return Row(what, ours, other, ratio, f"ratio ≤ {most:g}", bool(ratio <= most), **more)
    if least is not None:
        return Row(what, ours, other, ratio, f"ratio ≥ {least:g}", bool(ratio >= least), **more)
    return Row(what, ours, other, ratio, **more)


def above(what: str, ours: float, other: float, slack: float = 0.0, **more: Any) -> Row:
    """A value of ours that has to be no less than the other, but for rounding."""
    return Row(what, ours, other, bar="≥ the other", met=bool(ours >= other - slack), digits=8, **more)


def absent(what: str, why: str) -> Row:
    return Row(what, None, why)


@dataclass(frozen=True, eq=False)
class Timed:
    """A work's results and its seconds, one each a round: wall, and cpu of all threads of this process."""

    results: list[Any] = field(repr=False)
    wall: list[float]
    cpu: list[float]

    def facts(self) -> dict[str, list[float]]:
        return {"seconds": [min(self.wall), float(np.median(self.wall))], "cpu_seconds": self.cpu}


def in_turn(rounds: int, works: dict[str, Callable[[], Any]]) -> dict[str, Timed]:
    """Each work once a round, in their order: what disturbs the machine disturbs them all."""
    timed = {name: Timed([], [], []) for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            wall, cpu = time.perf_counter(), time.process_time()
            timed[name].results.append(work())
            timed[name].cpu.append(time.process_time() - cpu)
            timed[name].wall.append(time.perf_counter() - wall)
    return timed


def least_seconds(work: Callable[[], Any], times: int = 7) -> float:
    return min(in_turn(times, {"": work})[""].wall)


def product_seconds(z: np.ndarray) -> float:
    """The least time of one product of the array, as float32, with a vector; BLAS on all cores."""
    z = np.asarray(z, np.float32)
    v = z[0].copy()
    return least_seconds(lambda: z @ v)


def in_child(case: str, **arguments: Any) -> dict[str, Any]:
    """What `case`, as "module:function", does in a process of its own: {"growth": bytes by which its peak of resident
    memory exceeds what it held before, "peak", "result", "seconds"}.

    function(**arguments) prepares what is not to be counted and returns the work that is; its result is JSON.
    """
    command = [sys.executable, "-m", "benchmarks.measure", case, json.dumps(arguments)]
    done = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measured(case: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What `in_child` returns, of this process."""
    module, function = case.split(":")
    work = getattr(importlib.import_module(module), function)(**arguments)
    # makes what is held now the peak
    Path("/proc/self/clear_refs").write_text("5")
    before, started = _resident("VmRSS"), time.perf_counter()
    result = work()
    peak, seconds = _resident("VmHWM"), time.perf_counter() - started
    return {"growth": peak - before, "peak": peak, "result": result, "seconds": seconds}


def _resident(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    models = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def show(name: str, rows: Iterable[Row], console: Console) -> None:
    table = Table(title=name, title_justify="left")
    table.add_column("what", overflow="fold")
    for column in ("ours", "peer or bound", "ratio", "bar", "met"):
        table.add_column(column, justify="right")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.5f}" if row.digits > 3 else f"{row.ratio:.2f}"
        met = {None: "", True: "yes", False: "NO"}[row.met]
        table.add_row(row.what, _shown(row.ours, row), _shown(row.other, row), ratio, row.bar, met)
    console.print(table)


def _shown(value: float | str | None, row: Row) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.{row.digits}g} {row.unit}".strip()


def run_subjects(name: str, about: str | None, subjects: Mapping[str, Callable[[bool], list[Row]]]) -> None:
    """The command line of a module of benchmarks: a table a subject, and how many bars are met."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=about)
    parser.add_argument("--full", action="store_true", help="all sizes, and what takes many minutes")
    parser.add_argument("--only", choices=subjects, help="this subject alone")
    parser.add_argument("--out", type=Path, help="keep the figures here, as JSON")
    arguments = parser.parse_args()
    console = Console(width=150)
    met = []
    for subject_name, subject in subjects.items():
        if arguments.only not in (None, subject_name):
            continue
        before, started = machine(), time.perf_counter()
        rows = subject(arguments.full)
        seconds = time.perf_counter() - started
        told = f"{subject_name}: {seconds:.0f} s on {before['cores']} cores, load {before['load']:.1f} before"
        show(told, rows, console)
        met += [row.met for row in rows if row.met is not None]
        if arguments.out is not None:
            run = {"machine": before, "full": arguments.full, "seconds": seconds, "rows": [asdict(row) for row in rows]}
            keep(arguments.out, subject_name, run)
    console.print(f"{sum(met)} of {len(met)} bars met (a loaded machine shows worse ratios)")


def keep(path: Path, name: str, run: dict) -> None:
    """Put this subject's run in the place of its last."""
    kept = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps(kept | {name: run}, indent=1, allow_nan=False) + "\n", "utf-8")


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1], json.loads(sys.argv[2]))))
