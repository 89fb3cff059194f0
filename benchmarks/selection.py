"""What the certified solver and the policy gradient cost, in units of one matrix–vector product over the same array.

`python -m benchmarks.selection [--full] [--out FILE]` ends in under three minutes without `--full`. Ratios carry over
between machines better than seconds do; both are in the JSON. The pools are synthetic and anisotropic, like the
sentence encoders' (mean cosine about 0.7), and real web pages where the shared data is there.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from dagster_datamask import keyed
from dagster_datamask.selection.objectives import QualityDiversity
from dagster_datamask.selection.policy_gradient import PolicyGradientOptions
from dagster_datamask.selection.solve import Selection, solve

MINILM = Path(__file__).parents[1] / "../shared/data/embeddings_minilm_l6_fp16.parquet"
KEEP = 0.1


@dataclass(frozen=True, eq=False)
class Documents:
    name: str
    ids: list[str]
    embeddings: np.ndarray
    quality: np.ndarray


def synthetic(n: int, d: int = 768) -> Documents:
    """Unit vectors with mean cosine about 0.7 and a decaying spectrum, float32, and uniform scores that prefer one
    direction."""
    rng = keyed.rng(0, "benchmark", n, d)
    spread = np.arange(1, d + 1, dtype=np.float32) ** np.float32(-0.3)
    centre = rng.standard_normal(d, dtype=np.float32)
    centre *= 1.55 / np.linalg.norm(centre)
    z = np.empty((n, d), np.float32)
    quality = np.empty(n)
    for a in range(0, n, 10_000):
        block = rng.standard_normal((min(10_000, n - a), d), dtype=np.float32) * spread
        block /= np.linalg.norm(block, axis=1, keepdims=True)
        quality[a : a + len(block)] = rng.uniform(0, 15, len(block)) + 10 * block[:, 0]
        block += centre
        z[a : a + len(block)] = block / np.linalg.norm(block, axis=1, keepdims=True)
    return Documents(f"synthetic {n:,} × {d}", [f"synthetic-{i}" for i in range(n)], z, quality)


def web_pages() -> Documents | None:
    if not MINILM.exists():
        return None
    table = pq.read_table(MINILM)
    ids = table["id"].to_pylist()
    z = table["embedding"].combine_chunks().flatten().to_numpy().reshape(len(ids), -1)
    return Documents(f"web pages {len(ids):,} × {z.shape[1]}", ids, z, np.zeros(len(ids)))


def product_seconds(z: np.ndarray) -> float:
    """The least time of one product of the array, as float32, with a vector."""
    z = np.asarray(z, np.float32)
    v = z[0].copy()
    return min(_timed(lambda: z @ v) for _ in range(7))


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def row(documents: Documents, lam: float, unit: float, found: Selection, best: Selection) -> dict[str, Any]:
    start, bound = best.certificate.baseline, best.certificate.upper_bound
    return {
        "pool": documents.name,
        "lambda": lam,
        "solver": found.solver,
        "value": found.value,
        "upper_bound": found.certificate.upper_bound,
        "gap": found.certificate.gap,
        "share": found.certificate.share,
        "share_lost_to_best": (best.value - found.value) / (bound - start),
        "passes": found.passes,
        "solver_seconds": found.solver_seconds,
        "seconds": found.seconds,
        "solver_products": found.solver_seconds / unit,
        "products": found.seconds / unit,
        "product_seconds": unit,
        "times_best": found.solver_seconds / best.solver_seconds,
    }


def compare(
    documents: Documents, lams: list[float], gradient_at: list[float], options: PolicyGradientOptions
) -> list[dict]:
    """Rows for the certified solver at every λ, and for the policy gradient where it is asked for."""
    unit = product_seconds(documents.embeddings)
    budget = round(KEEP * len(documents.ids))
    rows = []
    for lam in lams:
        objective = QualityDiversity(documents.embeddings, documents.quality, lam, "per_pool")
        best = solve(objective, budget, solver="certified", ids=documents.ids)
        rows.append(row(documents, lam, unit, best, best))
        if lam in gradient_at:
            found = solve(objective, budget, solver="policy_gradient", ids=documents.ids, options=options)
            rows.append(row(documents, lam, unit, found, best) | {"steps": options.steps, "batch": options.batch})
    return rows


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title=f"Keep {KEEP:.0%}; times in matrix–vector products over the same array")
    for name in ("pool", "λ", "solver", "value", "gap", "share", "passes", "solver", "whole", "× certified"):
        table.add_column(name, justify="left" if name in ("pool", "solver") and len(table.columns) < 3 else "right")
    for r in rows:
        share = "–" if r["share"] is None else f"{r['share']:.5f}"
        steps = f" ({r['steps']:,} steps)" if "steps" in r else ""
        table.add_row(
            r["pool"], f"{r['lambda']}", r["solver"] + steps, f"{r['value']:.7f}", f"{r['gap']:.1e}", share,
            f"{r['passes']:.1f}", f"{r['solver_products']:.0f}", f"{r['products']:.0f}", f"{r['times_best']:.1f}",
        )  # fmt: skip
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.selection", description=__doc__)
    parser.add_argument("--full", action="store_true", help="a million documents, and the longer gradient runs")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    console = Console(width=160)
    rows = []
    pages = web_pages()
    if pages is None:
        console.print(f"No web pages: {MINILM.name} of the shared data is not there.")
    else:
        steps = 3000 if arguments.full else 500
        rows += compare(pages, [0.0], [0.0], PolicyGradientOptions(steps=steps, batch=0.1))
    steps = 2000 if arguments.full else 300
    rows += compare(synthetic(100_000), [0.0, 0.1, 0.5], [0.1], PolicyGradientOptions(steps=steps))
    if arguments.full:
        rows += compare(synthetic(1_000_000), [0.0, 0.1, 0.5], [], PolicyGradientOptions())
    show(rows, console)
    load = os.getloadavg()[0]
    console.print(f"{len(os.sched_getaffinity(0))} cores, load {load:.1f} (a loaded machine shows worse ratios)")
    if arguments.out is not None:
        figures = {"python": sys.version.split()[0], "numpy": np.__version__, "load": load, "rows": rows}
        arguments.out.write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
