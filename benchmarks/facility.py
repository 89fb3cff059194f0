"""Facility location against submodlib and apricot, each with its best settings, in CPU seconds."""

import contextlib
import io
from collections.abc import Callable
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.documents import KEEP, Documents, page_like, synthetic, web_pages
from benchmarks.measure import Row, absent, against, at_most, in_child, in_turn
from dagster_datamask.selection.greedy import GreedyOptions, greedy
from dagster_datamask.selection.objectives import QualityDiversity
from dagster_datamask.selection.solve import Selection, solve

EXTRA = "not installed: the extra `bench`"


def facility(full: bool) -> list[Row]:
    pages = web_pages()
    rows = compare(pages.head(10_000) if pages is not None else synthetic(10_000, 384), rounds=2)
    if full:
        rows += compare(page_like(pages, 20_000) if pages is not None else synthetic(20_000, 384), rounds=1)
        rows.append(memory(100_000))
    return rows


def find(documents: Documents) -> Selection:
    objective = QualityDiversity(documents.embeddings, None, 0.0, diversity={"facility_location": 1.0})
    return solve(objective, round(KEEP * len(documents.ids)), solver="greedy", ids=documents.ids)


def compare(documents: Documents, rounds: int) -> list[Row]:
    """Ours is the lazy greedy, validation and certificate included, and the same alone, as the peers' are."""
    z = unit_rows(documents)
    size = round(KEEP * len(z))
    peers = {"submodlib LazyGreedy": submodlib("LazyGreedy", z, size)}
    peers["submodlib LazierThanLazyGreedy"] = submodlib("LazierThanLazyGreedy", z, size)
    peers["apricot lazy"] = apricot(z, size)
    works: dict[str, Callable[[], Any]] = {"ours": lambda: find(documents), "ours alone": lambda: alone(z, size)}
    works |= {name: work for name, work in peers.items() if work is not None}
    timed = in_turn(rounds, works)
    whole, bare = timed["ours"], timed["ours alone"]
    ours = cover_value(z, whole.results[0].indices)
    rows = []
    for name, work in peers.items():
        what = f"{documents.name}, against {name}:"
        if work is None:
            rows.append(absent(f"{what[:-1]}", EXTRA))
            continue
        peer = timed[name]
        barred = name == "submodlib LazyGreedy"
        facts = {"ours": whole.facts(), "ours_alone": bare.facts(), "peer": peer.facts()}
        facts["gap"] = whole.results[0].certificate.gap
        cpu = min(peer.cpu)
        most, least = (0.3, 0.9999) if barred else (None, None)
        rows += [
            against(f"{what} CPU, certified", min(whole.cpu), cpu, most=most, unit="s", facts=facts),
            against(f"{what} CPU, greedy alone", min(bare.cpu), cpu, unit="s"),
            against(f"{what} objective", ours, cover_value(z, np.array(peer.results[0])), least=least, digits=7),
        ]
    return rows


def alone(z: np.ndarray, size: int) -> np.ndarray:
    linear, options = np.zeros(len(z)), GreedyOptions()
    with threadpool_limits(1, "blas"):
        return greedy(
            z, linear, fl=1.0, pws=0.0, second_moment=0.0, budget=size, options=options, seed=0, split=0
        ).positions


def unit_rows(documents: Documents) -> np.ndarray:
    z = documents.embeddings.astype(np.float32)
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def kernel(z: np.ndarray) -> np.ndarray:
    """Cosines, with 0 for negative ones. Both peers take far longer to make theirs; on one core it costs the least CPU
    time."""
    with threadpool_limits(1, "blas"):
        return np.maximum(z @ z.T, 0.0)


def submodlib(optimizer: str, z: np.ndarray, size: int) -> Callable[[], list[int]] | None:
    try:
        from submodlib import FacilityLocationFunction
    except ImportError:
        return None

    def work() -> list[int]:
        function = FacilityLocationFunction(n=len(z), mode="dense", sijs=kernel(z), separate_rep=False)
        chosen = function.maximize(size, optimizer, show_progress=False)
        return [int(i) for i, _ in chosen]

    return work


def apricot(z: np.ndarray, size: int) -> Callable[[], list[int]] | None:
    try:
        from apricot import FacilityLocationSelection
    except ImportError:
        return None

    def work() -> list[int]:
        selection = FacilityLocationSelection(size, metric="precomputed", optimizer="lazy")
        with contextlib.redirect_stdout(io.StringIO()):
            selection.fit(kernel(z).astype(np.float64))
        return selection.ranking.tolist()

    return work


def cover_value(z: np.ndarray, chosen: np.ndarray) -> float:
    """FL of rows `chosen` in float64, whoever chose them."""
    wide = z.astype(np.float64)
    members = wide[chosen].T.copy()
    total = 0.0
    for a in range(0, len(z), 1024):
        total += float(np.maximum((wide[a : a + 1024] @ members).max(axis=1), 0.0).sum())
    return total / len(z)


def memory(n: int, d: int = 384) -> Row:
    child = in_child("benchmarks.facility:solving", n=n, d=d)
    what = f"{n:,} × {d}: peak memory beside the embeddings"
    return at_most(what, child["growth"] / 1e9, 8.0, unit="GB", facts=child)


def solving(n: int, d: int) -> Callable[[], float]:
    pages = web_pages()
    documents = page_like(pages, n) if pages is not None else synthetic(n, d, np.float16)
    return lambda: find(documents).value
