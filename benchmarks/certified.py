"""The certified solver on pair-wise similarity: its gap, and its cost in matrix–vector products over the same array."""

from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.documents import KEEP, Documents, synthetic, web_pages
from benchmarks.measure import Row, absent, at_least, at_most, in_child, in_turn, product_seconds
from dagster_datamask.selection.objectives import QualityDiversity
from dagster_datamask.selection.solve import Selection, solve

LAMBDAS = (0.0, 0.1, 0.5)


def find(documents: Documents, lam: float) -> Selection:
    objective = QualityDiversity(documents.embeddings, documents.quality, lam, "per_pool")
    return solve(objective, round(KEEP * len(documents.ids)), solver="certified", ids=documents.ids)


def certified(full: bool) -> list[Row]:
    rows = costs(synthetic(100_000)) + memory(100_000)
    if full:
        rows += costs(synthetic(1_000_000)) + memory(1_000_000)
    return rows


def costs(documents: Documents, lams: Sequence[float] = LAMBDAS, rounds: int = 3) -> list[Row]:
    rows = []
    for lam in lams:
        timed = in_turn(
            rounds,
            {
                "product": lambda: product_seconds(documents.embeddings),
                "solve": lambda lam=lam: find(documents, lam),
            },
        )
        unit = min(timed["product"].results)
        found = timed["solve"].results
        certificate = found[0].certificate
        facts = {
            "product_seconds": timed["product"].results,
            "solver_seconds": [s.solver_seconds for s in found],
            "seconds": [s.seconds for s in found],
            "passes": found[0].passes,
            "value": found[0].value,
        }
        what = f"{documents.name}, λ = {lam:g}:"
        rows += [
            at_most(f"{what} gap", certificate.gap, 1e-6, facts=facts),
            at_most(
                f"{what} gap / achievable gain",
                certificate.gap / (certificate.upper_bound - certificate.baseline),
                1e-4,
            ),
            at_most(f"{what} search", min(s.solver_seconds for s in found) / unit, 20, unit="products"),
            at_most(f"{what} whole", min(s.seconds for s in found) / unit, 30, unit="products"),
        ]
    return rows


def memory(n: int, d: int = 768) -> list[Row]:
    """The embeddings and what solving them adds, over the embeddings."""
    rows = []
    for dtype in ("float32", "float16"):
        size = n * d * np.dtype(dtype).itemsize
        child = in_child("benchmarks.certified:solving", n=n, d=d, dtype=dtype)
        what = f"synthetic {n:,} × {d}, {dtype}: peak memory"
        rows.append(at_most(what, (size + child["growth"]) / size, 1.3, unit="× embeddings", facts=child))
    return rows


def solving(n: int, d: int, dtype: str) -> Callable[[], float]:
    # a first solve of a few documents loads the libraries, which the embeddings have no part in
    find(synthetic(2_000, 8, np.dtype(dtype).type), 0.1)
    documents = synthetic(n, d, np.dtype(dtype).type)
    return lambda: find(documents, 0.1).certificate.gap


def pages(full: bool) -> list[Row]:
    documents = web_pages()
    if documents is None:
        return [absent("web pages", "the shared data is not there")]
    return real(documents)


def real(documents: Documents, rounds: int = 3) -> list[Row]:
    timed = in_turn(rounds, {"solve": lambda: find(documents, 0.0)})["solve"]
    found = timed.results[0]
    facts = timed.facts() | {"passes": found.passes, "upper_bound": found.certificate.upper_bound}
    what = f"{documents.name}, λ = 0:"
    return [
        at_least(f"{what} value", found.value, -0.005835, digits=7, facts=facts),
        at_most(f"{what} gap", found.certificate.gap, 1e-5),
        at_most(f"{what} whole", min(s.seconds for s in timed.results), 3.0, unit="s"),
    ]
