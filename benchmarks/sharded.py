"""The certified solver over shards on disk against the same in memory: masks, time a pass, passes and memory."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.documents import KEEP, SCORES, Documents, joined, page_block, synthetic_block, web_pages
from benchmarks.measure import Row, absent, against, at_most, in_child, in_turn
from dagster_datamask.selection.budgets import documents
from dagster_datamask.selection.certified import CertifiedOptions
from dagster_datamask.selection.corpus import Block, Corpus, solve_corpus
from dagster_datamask.selection.objectives import QualityDiversity
from dagster_datamask.selection.passes import Passes
from dagster_datamask.selection.pool import prepare_pool
from dagster_datamask.selection.solve import pool_passes, solve

LAMBDAS = (0.0, 0.1, 0.5)


def sharded(full: bool) -> list[Row]:
    rows = []
    shards = [joined([halved(synthetic_block(k)) for k in (a, a + 1)]) for a in range(0, 10, 2)]
    for lam in LAMBDAS:
        rows += compare("mean cosine 0.7", shards, lam, gap=1e-6, passes=30)
    pages = web_pages()
    if pages is None:
        rows.append(absent("MiniLM-like", "the shared data is not there"))
    else:
        shards = [joined([page_block(pages, k) for k in (a, a + 1)]) for a in range(0, 8, 2)]
        for lam in LAMBDAS:
            rows += compare("MiniLM-like", shards, lam, gap=1e-5, passes=60)
    return rows + memory(10 if full else 3)


def halved(block: Documents) -> Documents:
    return replace(block, embeddings=block.embeddings.astype(np.float16))


def fill(folder: Path, lam: float, shards: Sequence[Callable[[], Documents]]) -> Corpus:
    corpus = Corpus(folder, lam=lam, scale="minmax", constants=SCORES)
    for number, shard in enumerate(shards):

        def blocks(shard: Callable[[], Documents] = shard) -> list[Block]:
            held = shard()
            return [Block(held.ids, held.quality if lam else None, held.embeddings)]

        corpus.add(f"{number:04d}", blocks)
    return corpus


def compare(
    name: str, shards: Sequence[Documents], lam: float, *, gap: float, passes: int, rounds: int = 2
) -> list[Row]:
    """The same problem in memory and on disk, both to this gap. A pass scores every document, cuts and sums up, at each
    of the points that the search went by; the whole is all but validation, final float64 figures and certificate
    included."""
    ids = [id_ for shard in shards for id_ in shard.ids]
    z = np.concatenate([shard.embeddings for shard in shards])
    quality = np.concatenate([shard.quality for shard in shards])
    objective = QualityDiversity(z, quality, lam, "minmax", SCORES)
    budget, options = round(KEEP * len(ids)), CertifiedOptions(gap=gap)
    with tempfile.TemporaryDirectory() as folder:
        corpus = fill(Path(folder), lam, [lambda shard=shard: shard for shard in shards])
        timed = in_turn(
            rounds,
            {
                "validation": lambda: prepare_pool(objective, ids),
                "memory": lambda: solve(objective, budget, solver="certified", ids=ids, options=options),
                "disk": lambda: solve_corpus(corpus, [budget], options=options),
            },
        )
        mask = np.concatenate([corpus.selected(shard)[0] for shard in corpus.names])
        held, found = timed["memory"].results[0], timed["disk"].results[0]
        points = [np.array(entry["point"]) for entry in found.history]
        in_memory, on_disk = pool_passes(timed["validation"].results[0], documents(budget))[0], corpus.passes([budget])
        with threadpool_limits(1, "blas"):
            timed |= in_turn(
                3,
                {
                    "passes in memory": lambda: again(in_memory, points),
                    "passes on disk": lambda: again(on_disk, points),
                },
            )
    expected = np.zeros(len(ids), bool)
    expected[held.indices] = True
    whole = min(s.seconds for s in timed["memory"].results) - min(timed["validation"].wall)
    facts = {name: work.facts() for name, work in timed.items()} | {"shards": len(shards)}
    cosine = corpus.mean() @ corpus.mean()
    what = f"{name} ({cosine:.3f}), {len(ids):,} × {z.shape[1]}, λ = {lam:g}:"
    return [
        at_most(f"{what} documents that differ", int((mask != expected).sum()), 0, facts=facts),
        against(
            f"{what} a pass",
            1e3 * min(timed["passes on disk"].wall) / len(points),
            1e3 * min(timed["passes in memory"].wall) / len(points),
            most=1.5,
            unit="ms",
        ),
        against(f"{what} the whole", min(timed["disk"].wall), whole, unit="s"),
        at_most(f"{what} gap", found.certificate.gap, gap),
        at_most(f"{what} passes", found.passes, passes),
    ]


def again(passes: Passes, points: list[np.ndarray]) -> None:
    """The whole passes of a search at these points."""
    for point in points:
        passes.score(point)
        passes.take(passes.cut(lambda part: part.scores, passes.amounts))


def memory(shards: int, d: int = 768, rows: int = 10_000) -> list[Row]:
    """What a child's memory grows by while it writes and solves so many shards, and ten times as many."""
    few, many = (
        in_child("benchmarks.sharded:solving", shards=count, d=d, rows=rows) for count in (shards, 10 * shards)
    )
    what = f"{10 * shards * rows:,} × {d} against {shards * rows:,} × {d}, shards of {rows:,}: peak memory"
    sizes = {"few": few, "many": many, "shard_bytes": rows * d * 2}
    return [against(what, many["growth"] / 1e6, few["growth"] / 1e6, most=1.25, unit="MB", facts=sizes)]


def solving(shards: int, d: int, rows: int) -> Callable[[], float]:
    def work() -> float:
        with tempfile.TemporaryDirectory() as folder:
            several = [lambda k=k: halved(synthetic_block(k, d, rows)) for k in range(shards)]
            corpus = fill(Path(folder), 0.1, several)
            return solve_corpus(corpus, [round(KEEP * corpus.n)]).certificate.gap

    # a first shard loads the libraries and takes what making a shard takes, neither of which is the solver's
    with tempfile.TemporaryDirectory() as folder:
        solve_corpus(fill(Path(folder), 0.1, [lambda: halved(synthetic_block(0, d, rows))]), [rows // 10])
    return work
