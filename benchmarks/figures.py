"""The patterns of the DataMask paper's figures 3, 7, 8, 10 and 13 on real web pages, each beside the certified bound.

`python -m benchmarks.figures [--out FOLDER]` draws them, and the certified front, into docs/figures in about five
minutes on two cores. The documents are the shared MiniLM vectors; their quality is the probability that a page has an
informative format, by a logistic regression on the vectors from the formats that were labelled: a stand-in that is
there for every page and, like the paper's classifiers, prefers some topics to others.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from sklearn.linear_model import LogisticRegression

from benchmarks.selection import KEEP, MINILM, Documents, web_pages
from dagster_datamask import keyed
from dagster_datamask.reporting.figures import (
    front_figure,
    metrics_figure,
    setting_figure,
    spread_figure,
)
from dagster_datamask.selection.objectives import QualityDiversity
from dagster_datamask.selection.policy_gradient import PolicyGradientOptions, Progress
from dagster_datamask.selection.solve import Selection, solve
from dagster_datamask.selection.sweep import parse_lambdas, sweep

FOLDER = Path(__file__).parents[1] / "docs/figures"
LABELS = MINILM.with_name("web_labels.parquet")
GOOD = ("Knowledge Article", "Academic Writing", "Tutorial", "Q&A", "FAQ")
BAD = ("Spam / Ads", "Product Page", "Content Listing", "Truncated")
# quality in [0, 1] varies about ten times as much as diversity on these pages, so this is where the two compete
JOINT = 0.1
STEPS = 1000
BATCH = 0.1
LEARNING_RATES = (0.1, 1.0, 10.0, 100.0, 1000.0)
GROUPS = (2, 4, 8, 16, 32, 64, 128, 256)
BATCHES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
SECONDS = 6.0
CHECKPOINTS = (10, 30, 100, 300, 1000, 2000)


def pages() -> Documents | None:
    """The web pages with their quality, or None where the shared data is not there."""
    found = web_pages()
    if found is None or not LABELS.exists():
        return None
    labels = pq.read_table(LABELS, columns=["id", "format"])
    format_of = dict(zip(labels["id"].to_pylist(), labels["format"].to_pylist(), strict=True))
    formats = [format_of.get(id_) for id_ in found.ids]
    rows = np.flatnonzero([name in GOOD or name in BAD for name in formats])
    vectors = found.embeddings.astype(np.float64)
    head = LogisticRegression(max_iter=1000).fit(vectors[rows], [formats[i] in GOOD for i in rows.tolist()])
    return Documents(found.name, found.ids, found.embeddings, head.predict_proba(vectors)[:, 1])


def learn(
    documents: Documents,
    lam: float,
    options: PolicyGradientOptions,
    *,
    seed: int = 0,
    rows: np.ndarray | None = None,
    progress: Progress | None = None,
) -> Selection:
    """The policy gradient on the documents, or on those at `rows`."""
    z, quality, ids = documents.embeddings, documents.quality, documents.ids
    if rows is not None:
        z, quality, ids = z[rows], quality[rows], [ids[i] for i in rows.tolist()]
    objective = QualityDiversity(z, quality, lam, "per_pool")
    budget = round(KEEP * len(ids))
    return solve(objective, budget, solver="policy_gradient", seed=seed, ids=ids, options=options, progress=progress)


def front(documents: Documents) -> bytes:
    found = sweep(
        documents.embeddings,
        documents.quality,
        parse_lambdas("0,0.01,0.02,0.05,0.1,0.15,0.2:1:0.1"),
        round(KEEP * len(documents.ids)),
        ids=documents.ids,
    )
    assert found.uniform is not None
    gaps = [s.certificate.gap for s in found.selections]
    say(f"front: {len(gaps)} λ, the widest gap {max(gaps):.1e}")
    title = f"{len(gaps)} masks of {KEEP:.0%} of the web pages, each certified, and what no mask can reach"
    return front_figure(found.rows(), dict(zip(("quality", "diversity"), found.uniform, strict=True)), title)


def learning_rate(documents: Documents) -> bytes:
    """Fig. 7, with masks drawn from the logits, which is what the paper follows, and with the largest logits, which is
    what we keep. A run of fewer steps is the beginning of a longer one: every draw has its key."""
    runs: dict[str, list[dict[str, float]]] = {}
    for lr in LEARNING_RATES:
        points = []
        for steps in (step for step in CHECKPOINTS if step <= STEPS):
            options = PolicyGradientOptions(steps=steps, batch=BATCH, lr=lr, final="sampled")
            run = learn(documents, 0.0, options)
            drawn, kept = run.value, run.trajectory[-1]["mask_value"]
            points.append({"step": steps, "a mask drawn from the logits": drawn, "the largest logits": kept})
        runs[f"learning rate {lr:g}"] = points
        say(f"learning rate {lr:g}: drawn {drawn:.5f}, largest {kept:.5f}, bound {run.certificate.upper_bound:.5f}")
    bounds = dict.fromkeys(("a mask drawn from the logits", "the largest logits"), run.certificate.upper_bound)
    return metrics_figure(runs, bounds, "Learning rate (the pattern of DataMask's Fig. 7): diversity, λ = 0")


def group_size(documents: Documents) -> bytes:
    """Fig. 8."""
    runs = {
        str(group): learn(documents, 0.0, PolicyGradientOptions(steps=STEPS, batch=BATCH, group=group))
        for group in GROUPS
    }
    say("group size: " + shares(runs))
    return setting_figure(
        "masks a step, G",
        [{"setting": int(name), "value": run.value, "cost": run.solver_seconds} for name, run in runs.items()],
        f"seconds for {STEPS:,} steps",
        runs["128"].certificate.upper_bound,
        f"Group size (the pattern of Fig. 8): diversity after {STEPS:,} steps, λ = 0",
    )


def batch_ratio(documents: Documents) -> bytes:
    """Fig. 10: where each ratio stands after the same time."""
    rows = []
    for batch in BATCHES:
        pilot = learn(documents, 0.0, PolicyGradientOptions(steps=50, batch=batch))
        # half as many again as should fit, so that the time is up before the steps are
        steps = max(50, round(75 * SECONDS / pilot.solver_seconds))
        clock: list[float] = []
        started = time.perf_counter()
        run = learn(
            documents,
            0.0,
            PolicyGradientOptions(steps=steps, batch=batch),
            progress=lambda *_, clock=clock, started=started: clock.append(time.perf_counter() - started),
        )
        last = run.trajectory[max(0, sum(seconds <= SECONDS for seconds in clock) - 1)]
        rows.append({"setting": 100 * batch, "value": last["mask_value"], "cost": last["step"]})
        say(f"batch ratio {batch:g}: {last['mask_value']:.5f} in {last['step']:,} steps, {_share(run, last):.2%}")
    return setting_figure(
        "share of the pool in a step, %",
        rows,
        f"steps in {SECONDS:g} seconds",
        run.certificate.upper_bound,
        f"Batch ratio (the pattern of Fig. 10): diversity after {SECONDS:g} seconds each, λ = 0",
    )


def quality_and_diversity(documents: Documents) -> bytes:
    """Fig. 3."""
    n, ids = len(documents.ids), documents.ids
    # both metrics of every mask are told on one scale, that of the joint objective
    low, spread = documents.quality.min(), np.ptp(documents.quality)
    kinds = {
        "diversity only (λ = 0)": (0.0, 2.0),
        f"joint (λ = {JOINT:g}), equal first logits": (JOINT, 0.0),
        f"joint (λ = {JOINT:g}), first logits by quality": (JOINT, 2.0),
        "quality only (λ = 1)": (1.0, 2.0),
    }
    runs: dict[str, list[dict[str, float]]] = {}
    for kind, (lam, l_max) in kinds.items():
        runs[kind] = []
        for steps in CHECKPOINTS:
            found = learn(documents, lam, PolicyGradientOptions(steps=steps, batch=BATCH, l_max=l_max))
            quality = float((documents.quality[found.indices].mean() - low) / spread)
            runs[kind].append({"step": steps, "quality": quality, "diversity": found.diversity})
    for kind, points in runs.items():
        say(f"{kind}: quality {points[-1]['quality']:.4f}, diversity {points[-1]['diversity']:.5f}")
    best = {
        name: solve(
            QualityDiversity(documents.embeddings, documents.quality, lam, "per_pool"),
            round(KEEP * n),
            solver="certified",
            ids=ids,
        ).certificate.upper_bound
        for name, lam in (("quality", 1.0), ("diversity", 0.0))
    }
    say(f"bounds: quality {best['quality']:.4f}, diversity {best['diversity']:.5f}")
    return metrics_figure(runs, best, "Quality and diversity during optimisation (the pattern of Fig. 3)")


def seeds(documents: Documents) -> bytes:
    """Fig. 13."""
    options = PolicyGradientOptions(steps=STEPS, batch=BATCH)
    half = len(documents.ids) // 2
    subsets = [np.sort(keyed.rng(0, "figures/subset", k).permutation(len(documents.ids))[:half]) for k in range(3)]
    groups = {
        "three seeds": {f"seed {seed}": learn(documents, JOINT, options, seed=seed) for seed in range(3)},
        "three random halves": {
            f"half {k}": learn(documents, JOINT, options, rows=rows) for k, rows in enumerate(subsets)
        },
    }
    for group, runs in groups.items():
        say(f"{group}: {shares(runs)}")
    return spread_figure(
        {group: {name: _shares(run) for name, run in runs.items()} for group, runs in groups.items()},
        f"Spread over seeds and over pools (the pattern of Fig. 13), λ = {JOINT:g}",
    )


def _shares(run: Selection) -> list[dict[str, float]]:
    return [{"step": point["step"], "share": _share(run, point)} for point in run.trajectory]


def _share(run: Selection, point: dict[str, Any]) -> float:
    start, bound = run.certificate.baseline, run.certificate.upper_bound
    return (point["mask_value"] - start) / (bound - start)


def shares(runs: dict[str, Selection]) -> str:
    return ", ".join(f"{name}: {run.certificate.share:.2%}" for name, run in runs.items())


def say(text: str) -> None:
    print(text, flush=True)


DRAWN: Sequence[Callable[[Documents], bytes]] = (
    front,
    learning_rate,
    group_size,
    batch_ratio,
    quality_and_diversity,
    seeds,
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the pictures; default docs/figures")
    parser.add_argument("--only", choices=[draw.__name__ for draw in DRAWN], help="draw this one alone")
    arguments = parser.parse_args()
    documents = pages()
    if documents is None:
        say(f"No figures drawn: {MINILM.name} and {LABELS.name} of the shared data are not there.")
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    for draw in DRAWN:
        if arguments.only in (None, draw.__name__):
            started = time.perf_counter()
            path = arguments.out / f"{draw.__name__}.png"
            path.write_bytes(draw(documents))
            say(f"{path.name} in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
