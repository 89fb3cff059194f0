"""Group selection by predicted influence: what clusters save, and how far one pick is from a pass over memory.

`python -m benchmarks.group_selection [--out FILE]` takes about two minutes on two quiet cores: 100,000 documents of
768 dimensions, 10 % kept, in 10, 100 and 1,000 clusters of random members, and without clusters for 500 picks, from
which the rest is extrapolated. Seconds of the picks are those beyond one pick a cluster, which is what ordering the
documents and widening their vectors costs; both are shown.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from benchmarks.documents import KEEP, Documents, synthetic
from benchmarks.measure import Row, against, in_turn, keep, least_seconds, machine, product_seconds, show
from dagster_datamask import keyed
from dagster_datamask.influence.relational import bracket
from dagster_datamask.influence.selection import Picks, greedy, select_in_clusters

CLUSTERS = (10, 100, 1_000)
FULL_PICKS = 500
# documents that similarities are averaged anew for at each pick
NAIVE = 2_000


def group_selection(documents: Documents, clusters: tuple[int, ...] = CLUSTERS, picks: int = FULL_PICKS) -> list[Row]:
    h, ids = documents.embeddings, documents.ids
    n = len(ids)
    size = round(KEEP * n)
    f = keyed.rng(0, "benchmark/influence").standard_normal(n)
    labels = {d: keyed.rng(0, "benchmark/clusters", d).integers(d, size=n) for d in clusters}

    def choose(d: int, amount: int) -> Picks:
        return select_in_clusters(h, f, labels[d], amount, alpha=1.0, beta=1.0, ids=ids)

    # libraries load with the first call
    choose(clusters[-1], min(n, clusters[-1]))
    works: dict[str, Callable[[], Picks]] = {}
    for d in clusters:
        works[f"{d} start"] = lambda d=d: choose(d, min(d, size))  # type: ignore[misc]
        works[f"{d} whole"] = lambda d=d: choose(d, size)  # type: ignore[misc]
    works["full start"] = lambda: greedy(h, f, 1, alpha=1.0, beta=1.0, ids=ids)
    works["full"] = lambda: greedy(h, f, picks, alpha=1.0, beta=1.0, ids=ids)
    timed = in_turn(1, works)
    seconds = {name: min(run.wall) for name, run in timed.items()}

    a_pick = (seconds["full"] - seconds["full start"]) / (picks - 1)
    full = seconds["full start"] + a_pick * (size - 1)
    rows = [
        Row(
            f"{documents.name}, no clusters: {size:,} picks, extrapolated from {picks}",
            full,
            unit="s",
            facts={"measured_seconds": seconds["full"], "picks": picks, "seconds_a_pick": a_pick},
        )
    ]
    before, name = full - seconds["full start"], "no clusters"
    for d in clusters:
        whole = seconds[f"{d} whole"]
        beyond = max(whole - seconds[f"{d} start"], 1e-9)
        what = f"{documents.name}, {d:,} clusters:"
        rows.append(
            against(f"{what} {size:,} picks, whole, beside no clusters (extrapolated)", whole, full, unit="s", digits=4)
        )
        rows.append(against(f"{what} picks alone, beside {name}", beyond, before, unit="s"))
        before, name = beyond, f"{d:,} clusters"
    rows += floor(h, a_pick)
    rows.append(naive(documents, f))
    return rows


def floor(h: np.ndarray, a_pick: float) -> list[Row]:
    """A pick without clusters reads every vector once, as float32: beside the same bytes read by a sum, and by BLAS."""
    wide = h.astype(np.float32)
    read = least_seconds(lambda: torch.from_numpy(wide).sum())
    what = f"a pick reads {wide.nbytes / 1e6:.0f} MB:"
    facts = {"gigabytes_a_second": {"a pick": wide.nbytes / a_pick / 1e9, "a sum": wide.nbytes / read / 1e9}}
    return [
        against(f"{what} beside a sum of them, all cores", a_pick, read, unit="s", facts=facts),
        against(f"{what} beside their product with one vector by BLAS", a_pick, product_seconds(wide), unit="s"),
    ]


def naive(documents: Documents, f: np.ndarray) -> Row:
    """The running sum beside similarities that are averaged anew at each pick: whether they choose the same, and what
    it saves."""
    part = documents.head(min(NAIVE, len(documents.ids)))
    n = len(part.ids)
    h, values = part.embeddings, f[:n]
    started = time.perf_counter()
    picks = greedy(h, values, n // 10, alpha=1.0, beta=1.0, ids=part.ids)
    ours = time.perf_counter() - started
    started = time.perf_counter()
    wide = h.astype(np.float64)
    chosen: list[int] = []
    for _ in range(n // 10):
        mean = (wide @ wide[chosen].T).mean(axis=1) if chosen else np.zeros(n)
        score = bracket(mean, 1.0, 1.0) * values if chosen else values.copy()
        score[chosen] = np.inf
        chosen.append(int(score.argmin()))
    other = time.perf_counter() - started
    agree = bool(picks.rows.tolist() == chosen)
    what = f"{n:,} documents, {n // 10} picks: the same as with averages taken anew"
    return Row(what, ours, other, ours / other, "equal picks", agree, unit="s")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.group_selection", description=__doc__)
    parser.add_argument("--out", type=Path, help="keep the figures here, as JSON")
    arguments = parser.parse_args()
    before = machine()
    rows = group_selection(synthetic(100_000, dtype=np.float16))
    show(f"group selection on {before['cores']} cores, load {before['load']:.1f} before", rows, Console(width=150))
    if arguments.out is not None:
        keep(arguments.out, "group_selection", {"machine": before, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
