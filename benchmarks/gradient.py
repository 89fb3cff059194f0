"""The policy gradient: a step at the recipe's settings against the least that its product takes, and how much of the
achievable gain it has after some steps."""

import time
from collections.abc import Callable

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from benchmarks.documents import BLOCK, KEEP, Documents, synthetic, synthetic_block
from benchmarks.measure import Row, against, at_least, least_seconds
from dagster_datamask import keyed
from dagster_datamask.accelerator import Accelerator
from dagster_datamask.selection.budgets import documents as budget_of
from dagster_datamask.selection.objectives import QualityDiversity
from dagster_datamask.selection.policy_gradient import PolicyGradientOptions, learn_mask
from dagster_datamask.selection.pool import Pool, prepare_pool
from dagster_datamask.selection.solve import solve

LAM = 0.5
RECIPE = PolicyGradientOptions().steps


class _Enough(Exception):
    """Enough of a run has been seen."""


def gradient(full: bool) -> list[Row]:
    pool = recipe_pool(1_000_000)
    rows = steps(pool, PolicyGradientOptions(steps=2500), 3)
    rows += steps(pool, PolicyGradientOptions(steps=250, gradient="ordered"), 2)
    del pool
    documents = synthetic(100_000)
    for lam in (0.1, LAM):
        rows += share(documents, lam, RECIPE if full else RECIPE // 10)
    return rows


def recipe_pool(n: int, d: int = 768) -> Pool:
    """n documents whose vectors are one block's, float16, over and over: a step costs what it does on n others."""
    block = synthetic_block(0, d, min(BLOCK, n))
    times = -(-n // len(block.ids))
    z = np.tile(block.embeddings.astype(np.float16), (times, 1))[:n]
    quality = np.tile(block.quality, times)[:n]
    return prepare_pool(QualityDiversity(z, quality, LAM, "per_pool"), [f"document-{i}" for i in range(n)])


def steps(pool: Pool, options: PolicyGradientOptions, chunks: int) -> list[Row]:
    """A step of a real run of the solver, sampling, gathering and its share of the trajectory included, between which
    the bare operations of the same shapes are timed. The run is left after `chunks` chunks of a fiftieth each, a first
    one not counted."""
    size = round(options.batch * pool.n)
    dense, gather = bare_operations(options.group, size, round(KEEP * size), pool.vectors.d)
    bare: dict[str, list[float]] = {"dense": [], "gather": []}
    chunk_seconds: list[float] = []
    last = [0, time.perf_counter()]

    def progress(step: int, of: int, entry: dict) -> None:
        chunk_seconds.append((time.perf_counter() - last[1]) / (step - last[0]))
        if len(chunk_seconds) > chunks:
            raise _Enough
        with threadpool_limits():
            bare["dense"].append(least_seconds(dense, 3))
            bare["gather"].append(least_seconds(gather, 3))
        last[:] = step, time.perf_counter()

    with threadpool_limits(1, "blas"):
        try:
            budget = budget_of(round(KEEP * pool.n))
            learn_mask(pool, budget, options, seed=0, split=0, accelerator=Accelerator(), progress=progress)
        except _Enough:
            pass
    counted = chunk_seconds[1:]
    cheaper = min(min(times) for times in bare.values())
    what = f"G {options.group}, batch {size:,} of {pool.n:,}, {options.gradient} form: step"
    most = 2.5 if options.gradient == "independent" else None
    facts = {"step_seconds": counted, **bare}
    return [against(what, 1e3 * min(counted), 1e3 * cheaper, most=most, unit="ms", facts=facts)]


def bare_operations(group: int, size: int, taken: int, d: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """(The masks' sums as one dense product, and as a gather and sum of each mask's rows), both on all cores."""
    rng = keyed.rng(0, "benchmark/step")
    vectors = rng.standard_normal((size, d), dtype=np.float32)
    chosen = np.argsort(rng.random((group, size), dtype=np.float32), axis=1)[:, :taken].copy()
    mask = np.zeros((group, size), np.float32)
    mask[np.arange(group)[:, None], chosen] = 1.0
    rows, bags = torch.from_numpy(vectors), torch.from_numpy(np.sort(chosen, axis=1))
    return lambda: mask @ vectors, lambda: torch.nn.functional.embedding_bag(bags, rows, mode="sum")


def share(documents: Documents, lam: float, count: int) -> list[Row]:
    objective = QualityDiversity(documents.embeddings, documents.quality, lam, "per_pool")
    found = solve(
        objective,
        round(KEEP * len(documents.ids)),
        solver="policy_gradient",
        ids=documents.ids,
        options=PolicyGradientOptions(steps=count),
    )
    facts = {"seconds": found.seconds, "steps": count, "value": found.value, "bound": found.certificate.upper_bound}
    what = f"{documents.name}, λ = {lam:g}: share of the achievable gain after {count:,} steps"
    if count < RECIPE:
        return [Row(what, found.certificate.share, digits=5, facts=facts)]
    return [at_least(what, found.certificate.share, 0.98, digits=5, facts=facts)]
