"""The certified solver over shards on disk against the same in memory: masks, time a pass, passes and memory."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.documents import KEEP, SCORES, Documents, page_block, synthetic_block, web_pages
from benchmarks.measure import Row, absent, against, at_most, in_child, in_turn
from dagster_datamask.selection.certified import CertifiedOptions
from dagster_datamask.selection.corpus import Block, Corpus, solve_corpus
from dagster_datamask.selection.objectives import QualityDiversity
from dagster_datamask.selection.pool import prepare_pool
from dagster_datamask.selection.solve import solve

LAMBDAS = (0.0, 0.1, 0.5)


def sharded(full: bool) -> list[Row]:
    rows = []
    shards = [halved(synthetic_block(k)) for k in range(10)]
    for lam in LAMBDAS:
        rows += compare("mean cosine 0.7", shards, lam, gap=1e-6, passes=30)
    pages = web_pages()
    if pages is None:
        rows.append(absent("MiniLM-like", "the shared data is not there"))
    else:
        shards = [page_block(pages, k) for k in range(8)]
        for lam in LAMBDAS:
            rows += compare("MiniLM-like", shards, lam, gap=1e-5, passes=60)
    return rows + memory(10 if full else 3)


def halved(documents: Documents) -> Documents:
    return Documents(
        documents.name, documents.ids, documents.embeddings.astype(np.float16), documents.quality.astype(np.float64)
    )


def fill(folder: Path, lam: float, shards: Sequence[Callable[[], Documents]]) -> Corpus:
    corpus = Corpus(folder, lam=lam, scale="minmax", constants=SCORES)
    for number, shard in enumerate(shards):

        def blocks(shard: Callable[[], Documents] = shard) -> list[Block]:
            documents = shard()
            return [Block(documents.ids, documents.quality if lam else None, documents.embeddings)]

        corpus.add(f"{number:04d}", blocks)
    return corpus


def compare(
    name: str, shards: Sequence[Documents], lam: float, *, gap: float, passes: int, rounds: int = 2
) -> list[Row]:
    """Both stop at `gap`. A pass's time is that of everything but validation, over the passes of the search: final
    float64 figures and certificate included, on both sides."""
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
    expected = np.zeros(len(ids), bool)
    expected[held.indices] = True
    validation = min(timed["validation"].wall)
    in_memory = (min(s.seconds for s in timed["memory"].results) - validation) / held.passes
    on_disk = min(timed["disk"].wall) / found.passes
    mean = corpus.mean()
    facts = {name: work.facts() for name, work in timed.items()}
    what = f"{name} ({mean @ mean:.3f}), {len(ids):,} × {z.shape[1]} in {len(shards)} shards, λ = {lam:g}:"
    return [
        at_most(f"{what} documents decided differently", int((mask != expected).sum()), 0, facts=facts),
        against(f"{what} a pass", 1e3 * on_disk, 1e3 * in_memory, most=1.5, unit="ms"),
        at_most(f"{what} gap", found.certificate.gap, gap),
        at_most(f"{what} passes", found.passes, passes),
    ]


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
