"""A million documents on a CUDA device: the policy gradient at the recipe's 10,000 steps, and the certified solver.

`python -m benchmarks.gpu [--out FILE]` says so where there is no CUDA device, and takes a few minutes where there is
one, most of them to make the vectors and to solve once on the CPU. Both solvers have solved a small pool before, so
that no library is loaded while they are timed.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from benchmarks.documents import KEEP, Documents, synthetic
from benchmarks.measure import Row, against, at_least, at_most, keep, machine, show
from dagster_datamask.accelerator import Accelerator, resolve
from dagster_datamask.selection.objectives import QualityDiversity
from dagster_datamask.selection.policy_gradient import PolicyGradientOptions
from dagster_datamask.selection.solve import Selection, solve

LAM = 0.5


def find(documents: Documents, solver: str, device: Accelerator, steps: int = 10_000) -> Selection:
    objective = QualityDiversity(documents.embeddings, documents.quality, LAM, "per_pool")
    options = PolicyGradientOptions(steps=steps) if solver == "policy_gradient" else None
    budget = round(KEEP * len(documents.ids))
    return solve(objective, budget, solver=solver, ids=documents.ids, accelerator=device, options=options)


def on_device(documents: Documents, device: Accelerator, steps: int = 10_000) -> list[Row]:
    small = documents.head(min(20_000, len(documents.ids)))
    find(small, "policy_gradient", device, steps=100)
    find(small, "certified", device)
    torch.cuda.reset_peak_memory_stats(device.device)
    runs = [find(documents, "certified", device) for _ in range(3)]
    held = torch.cuda.max_memory_allocated(device.device)
    learned = find(documents, "policy_gradient", device, steps)
    on_cpu = find(documents, "certified", Accelerator())
    best = runs[0]
    what = f"{documents.name}, λ = {LAM:g}:"
    facts = {
        "certified": [run.summary() for run in runs],
        "policy_gradient": learned.summary(),
        "certified_on_cpu": on_cpu.summary(),
    }
    return [
        at_most(f"{what} policy gradient, {steps:,} steps, whole", learned.seconds, 60.0, unit="s", facts=facts),
        at_least(f"{what} policy gradient, share of the achievable gain", learned.certificate.share, 0.98, digits=5),
        at_most(f"{what} certified, upload and search", min(run.solver_seconds for run in runs), 1.0, unit="s"),
        against(f"{what} certified, whole, the CPU's", min(run.seconds for run in runs), on_cpu.seconds, unit="s"),
        # a solver that leaves the device alone holds nothing there
        at_least(f"{what} certified, device memory / embeddings", held / documents.embeddings.nbytes, 1.0),
        at_most(f"{what} certified, gap", best.certificate.gap, 1e-6),
        at_most(f"{what} certified, |value − the CPU's|", abs(best.value - on_cpu.value), 1e-6),
        at_most(
            f"{what} certified, |bound − the CPU's|",
            abs(best.certificate.upper_bound - on_cpu.certificate.upper_bound),
            1e-6,
        ),
        at_most(
            f"{what} policy gradient, value − the CPU's certified bound",
            learned.value - on_cpu.certificate.upper_bound,
            0.0,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, help="keep the figures here, as JSON")
    arguments = parser.parse_args()
    console = Console(width=150)
    if not torch.cuda.is_available():
        console.print("Nothing measured: torch sees no CUDA device on this machine.")
        return
    device = resolve("cuda:0")
    rows = on_device(synthetic(1_000_000, dtype=np.float16), device)
    show(f"{device.name}, torch {torch.__version__}", rows, console)
    if arguments.out is not None:
        here = machine() | {"device": device.name, "torch": torch.__version__}
        keep(arguments.out, "gpu", {"machine": here, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
