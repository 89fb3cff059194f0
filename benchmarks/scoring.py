"""What embedding and scoring cost beside the plain libraries, with the bars that they are held to.

`python -m benchmarks.scoring [--full] [--only NAME] [--out FILE]` prints a table a subject, in a few minutes without
--full. Ratios are of works timed in turn in one run. docs/benchmarks.md tells how to read it. The file keeps every
subject's latest run.
"""

import argparse
import importlib
import importlib.util
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from benchmarks.measure import Row, machine, show
from benchmarks.selection import keep

_MODULES = ("benchmarks.embedding", "benchmarks.scorers")


def subjects() -> dict[str, Callable[[bool], list[Row]]]:
    """The subjects of all modules that are there."""
    found: dict[str, Callable[[bool], list[Row]]] = {}
    for name in _MODULES:
        if importlib.util.find_spec(name) is not None:
            found |= importlib.import_module(name).SUBJECTS
    return found


def main() -> None:
    known = subjects()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scoring", description=__doc__)
    parser.add_argument("--full", action="store_true", help="all pages, a million vectors, and what takes many minutes")
    parser.add_argument("--only", choices=known, help="this subject alone")
    parser.add_argument("--out", type=Path, help="keep the figures here, as JSON")
    arguments = parser.parse_args()
    console = Console(width=150)
    met = []
    for name, subject in known.items():
        if arguments.only not in (None, name):
            continue
        before, started = machine(), time.perf_counter()
        rows = subject(arguments.full)
        seconds = time.perf_counter() - started
        show(f"{name}: {seconds:.0f} s on {before['cores']} cores, load {before['load']:.1f} before", rows, console)
        met += [row.met for row in rows if row.met is not None]
        if arguments.out is not None:
            run = {"machine": before, "full": arguments.full, "seconds": seconds, "rows": [asdict(row) for row in rows]}
            keep(arguments.out, name, run)
    console.print(f"{sum(met)} of {len(met)} bars met (a loaded machine shows worse ratios)")


if __name__ == "__main__":
    main()
