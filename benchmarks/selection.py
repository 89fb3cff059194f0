"""What selection costs and what it is worth, beside its peers and bounds, with the bars that it is held to.

`python -m benchmarks.selection [--full] [--only NAME] [--out FILE]` prints a table a subject and ends in about 15
minutes on two quiet cores without --full. Ratios are of works timed in turn in one run: they carry over between
machines better than seconds do. docs/benchmarks.md tells how to read it. The file keeps every subject's latest run.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from benchmarks.certified import certified, pages
from benchmarks.disf import disf
from benchmarks.documents import KEEP, MINILM, Documents, synthetic, web_pages
from benchmarks.dvrl import dvrl
from benchmarks.facility import facility
from benchmarks.gradient import gradient
from benchmarks.measure import Row, machine, product_seconds, show
from benchmarks.sharded import sharded

__all__ = ["KEEP", "MINILM", "SUBJECTS", "Documents", "product_seconds", "synthetic", "web_pages"]

SUBJECTS: dict[str, Callable[[bool], list[Row]]] = {
    "certified": certified,
    "pages": pages,
    "gradient": gradient,
    "facility": facility,
    "disf": disf,
    "dvrl": dvrl,
    "sharded": sharded,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.selection", description=__doc__)
    parser.add_argument("--full", action="store_true", help="a million documents, and what takes many minutes")
    parser.add_argument("--only", choices=SUBJECTS, help="this subject alone")
    parser.add_argument("--out", type=Path, help="keep the figures here, as JSON")
    arguments = parser.parse_args()
    console = Console(width=150)
    met = []
    for name, subject in SUBJECTS.items():
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


def keep(path: Path, name: str, run: dict) -> None:
    """Put this subject's run in the place of its last."""
    kept = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps(kept | {name: run}, indent=1, allow_nan=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
