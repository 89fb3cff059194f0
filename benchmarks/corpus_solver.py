"""The certified solver over a corpus on disk: passes to the gap that is asked for, seconds a pass, peak memory.

Vectors are made shard by shard and go to a temporary folder, float16, so that no more than a shard is ever in memory:
`cosine` like an E5 encoder's (mean cosine 0.7, `documents.synthetic_block`), and `minilm`, drawn from the real MiniLM
vectors so that mean and covariance, hence the mean cosine of 0.055 and the spectrum, are theirs. The sizes are 20,000
and 100,000 documents, and with --full a million in 20 shards.

A pass is a read of all documents' vectors. Counted are the scoring at each point, what is read to sum up a vertex (the
documents that enter or leave it), to gather the undecided and for every product with them, for rounding, exchanges and
swaps, and, told apart, what the final float64 value and bound take: the sum over the mask, a scoring, and the documents
that this leaves in question. Not counted is the pass that writes the scratch and finds norms and mean.
"""

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.documents import BLOCK, KEEP, SCORES, synthetic_block, web_pages
from benchmarks.measure import Row, absent, against, at_most, in_child, in_turn, run_subjects
from dagster_datamask import keyed
from dagster_datamask.compute.base import INLINE
from dagster_datamask.compute.local import Processes
from dagster_datamask.selection import corpus as solver_module
from dagster_datamask.selection.certified import CertifiedOptions
from dagster_datamask.selection.corpus import Block, Corpus, solve_corpus
from dagster_datamask.selection.vectors import as_single, one_thread

LAMBDAS = (0.0, 0.1, 0.5)
DIMENSION = 384
SHARD = 50_000
# {kind: (gap, passes)}
BARS = {"cosine": (1e-6, 30), "minilm": (1e-5, 60)}
# what of a drawn vector's deviation from the mean is noise of the pages' covariance; the rest is a page's own
_NOISE = 0.5


class MiniLM:
    """Vectors like those of the real pages: their mean, plus √(1−t²) times the deviation of a page drawn at random,
    plus t times a Gaussian of their covariance, normalised. A smoothed bootstrap that leaves both moments as they are.
    """

    def __init__(self, pages: np.ndarray) -> None:
        unit = pages.astype(np.float32)
        unit /= np.linalg.norm(unit, axis=1, keepdims=True)
        self.mean = unit.mean(axis=0)
        self.deviations = unit - self.mean
        covariance = np.cov(self.deviations, rowvar=False).astype(np.float64)
        # the square root, from eigenvalues: pages fewer than dimensions have some of 0
        values, directions = np.linalg.eigh(covariance)
        self.root = (directions * np.sqrt(np.maximum(values, 0.0))).astype(np.float32)

    def block(self, number: int, rows: int = BLOCK) -> tuple[np.ndarray, np.ndarray]:
        """(float32[rows, d], scores) of a block, the same for every run."""
        rng = keyed.rng(0, "benchmark/minilm", number)
        z = self.deviations[rng.integers(0, len(self.deviations), rows)] * np.float32(np.sqrt(1.0 - _NOISE**2))
        z += np.float32(_NOISE) * (rng.standard_normal(z.shape, dtype=np.float32) @ self.root.T)
        z += self.mean
        z /= np.linalg.norm(z, axis=1, keepdims=True)
        return z, rng.uniform(*SCORES, rows) + 10.0 * z[:, 0]


def cosine_block(number: int, rows: int = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    block = synthetic_block(number, DIMENSION, rows)
    return block.embeddings, block.quality


Blocks = Callable[[int, int], tuple[np.ndarray, np.ndarray]]


def blocks_of(kind: str) -> Blocks | None:
    """Where a kind's blocks come from; None where the data that it takes is not there."""
    if kind == "cosine":
        return cosine_block
    pages = web_pages()
    return None if pages is None else MiniLM(pages.embeddings).block


def opened(folder: Path, n: int, lam: float, blocks: Blocks, shard: int = SHARD) -> Corpus:
    """The corpus of the first n documents under `folder`, written where it is not there yet; shards of whole blocks."""
    assert shard % BLOCK == 0 or n <= shard
    corpus = Corpus(folder, lam=lam, scale="minmax", constants=SCORES)
    for number, start in enumerate(range(0, n, shard)):
        stop = min(start + shard, n)

        def written(start: int = start, stop: int = stop) -> Iterator[Block]:
            for a in range(start, stop, BLOCK):
                z, quality = blocks(a // BLOCK, min(BLOCK, stop - a))
                yield Block([f"document-{i}" for i in range(a, a + len(z))], quality, z.astype(np.float16))

        corpus.add(f"{number:04d}", written)
    return corpus


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="corpus-solver-") as folder:
        yield Path(folder)


def solver(kind: str, full: bool) -> list[Row]:
    blocks = blocks_of(kind)
    if blocks is None:
        return [absent(kind, "the shared data is not there")]
    rows = []
    for n in (20_000, 100_000, *((1_000_000,) if full else ())):
        with scratch() as folder:
            rows += solved(kind, folder, n, blocks, min(SHARD, n // 2))
    return rows


def solved(kind: str, folder: Path, n: int, blocks: Blocks, shard: int) -> list[Row]:
    """Every λ over one set of scratch files: gap and passes, and a pass beside what it cannot do without."""
    gap, passes = BARS[kind]
    rows = []
    for lam in LAMBDAS:
        corpus = opened(folder, n, lam, blocks, shard)
        timed = in_turn(
            1,
            {
                "reading": lambda: read(folder),
                "products": lambda: products(folder),
                "solve": lambda corpus=corpus: solve_corpus(
                    corpus, [round(KEEP * n)], options=CertifiedOptions(gap=gap)
                ),
                "reading again": lambda: read(folder),
                "products again": lambda: products(folder),
            },
        )
        found = timed["solve"].results[0]
        whole = found.passes + found.certifying
        floor = min(timed["products"].wall[0], timed["products again"].wall[0])
        floor_cpu = min(timed["products"].cpu[0], timed["products again"].cpu[0])
        facts = {name: work.facts() for name, work in timed.items()} | {
            "passes": found.passes,
            "certifying": found.certifying,
            "points": len(found.history),
            "value": found.evaluation.value,
            "mean_cosine": float(corpus.mean() @ corpus.mean()),
            "bytes": sum(path.stat().st_size for path in folder.glob("*/vectors.bin")),
            "steps": [(entry["note"], entry.get("bound", np.nan) - entry["value"]) for entry in found.trajectory],
        }
        what = f"{kind}, {n:,} × {DIMENSION}, λ = {lam:g}:"
        rows += [
            at_most(f"{what} gap", found.certificate.gap, gap, facts=facts),
            at_most(f"{what} passes, final value and bound included", whole, passes),
            against(f"{what} a pass over a plain product: seconds", timed["solve"].wall[0] / whole, floor, unit="s"),
            against(f"{what} … CPU seconds", timed["solve"].cpu[0] / whole, floor_cpu, unit="s"),
        ]
    return rows


def read(folder: Path) -> int:
    """All vectors' bytes once."""
    return sum(len(path.read_bytes()) for path in sorted(folder.glob("*/vectors.bin")))


@one_thread()
def products(folder: Path) -> float:
    """All vectors once with a plain product: mapped, widened, multiplied, on one thread."""
    v, total = np.ones(DIMENSION, np.float32), 0.0
    for path in sorted(folder.glob("*/vectors.bin")):
        rows = np.memmap(path, np.float16, "r").reshape(-1, DIMENSION)
        for a in range(0, len(rows), 512):
            total += float((as_single(rows[a : a + 512]) @ v).sum())
    return total


def places(full: bool) -> list[Row]:
    """One process beside two, workers started before: the same to the last bit."""
    n = 1_000_000 if full else 200_000
    blocks = blocks_of("cosine")
    assert blocks is not None
    with scratch() as folder, Processes(2, threads=1) as two:
        corpus = opened(folder, n, 0.0, blocks)

        def solve(name: str) -> list[Any]:
            # whether it pays is what is measured
            with patch.object(solver_module, "_SPREAD", 0):
                solved = solve_corpus(corpus, [round(KEEP * n)], compute=INLINE if name == "one" else two)
            masks = [tuple(array.tobytes() for array in corpus.selected(shard)) for shard in corpus.names]
            return [masks, solved.certificate.as_dict(), solved.history]

        solve("two")
        timed = in_turn(2, {name: lambda name=name: solve(name) for name in ("one", "two")})
        differ = timed["one"].results[0] != timed["two"].results[0]
    what = f"cosine, {n:,} × {DIMENSION}, λ = 0, two processes beside one:"
    facts = {name: work.facts() for name, work in timed.items()}
    return [
        at_most(f"{what} solves that differ", int(differ), 0),
        against(f"{what} seconds", min(timed["two"].wall), min(timed["one"].wall), unit="s", facts=facts),
    ]


def memory(full: bool) -> list[Row]:
    """A child's peak memory, libraries and all, in a solve of each size over shards of equal size."""
    n = 1_000_000 if full else 500_000
    peaks = {}
    for kind in BARS:
        blocks = blocks_of(kind)
        if blocks is None:
            continue
        for size in (100_000, n):
            with scratch() as folder:
                opened(folder, size, 0.0, blocks)
                child = in_child("benchmarks.corpus_solver:solving", folder=str(folder), n=size, kind=kind)
                peaks[kind, size] = child["result"] | {"growth": child["growth"]}
    return [
        against(
            f"{kind}, {n:,} × {DIMENSION} against 100,000, λ = 0: peak memory",
            peaks[kind, n]["peak"] / 1e6,
            peaks[kind, 100_000]["peak"] / 1e6,
            most=1.2,
            unit="MB",
            facts={str(size): peaks[kind, size] for size in (100_000, n)},
        )
        for kind in BARS
        if (kind, n) in peaks
    ]


def solving(folder: str, n: int, kind: str) -> Callable[[], dict[str, float]]:
    def work() -> dict[str, float]:
        started = time.process_time()
        corpus = opened(Path(folder), n, 0.0, _unread)
        found = solve_corpus(corpus, [round(KEEP * n)], options=CertifiedOptions(gap=BARS[kind][0]))
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert peak is not None
        return {"peak": 1024 * int(peak[1]), "gap": found.certificate.gap, "cpu": time.process_time() - started}

    return work


def _unread(number: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    raise AssertionError(f"block {number} is written already")


SUBJECTS: dict[str, Callable[[bool], list[Row]]] = {
    "cosine": lambda full: solver("cosine", full),
    "minilm": lambda full: solver("minilm", full),
    "places": places,
    "memory": memory,
}

if __name__ == "__main__":
    os.nice(5)
    run_subjects("benchmarks.corpus_solver", __doc__, SUBJECTS)
