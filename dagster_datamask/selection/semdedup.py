"""Semantic deduplication: of documents that say the same, keep one (SemDeDup, arXiv 2303.09540).

Here: clusters, each document's largest cosine to an earlier one of its cluster, the threshold that leaves exactly a
budget, and which kept document stands for one that was dropped. Not here: exact duplicates by text, and the centroids
that a corpus is clustered by for good.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np

from dagster_datamask import keyed
from dagster_datamask.accelerator import MemoryPlanError
from dagster_datamask.selection.objectives import map_blocks
from dagster_datamask.selection.policy_gradient import Progress
from dagster_datamask.selection.sampling import top_s
from dagster_datamask.selection.vectors import PRODUCT, nearest

# documents of a cluster that are compared with as many others in one product
_TILE = 1024
# documents a cluster that k-means is fitted on, faiss's own default
_FITTED = 256
_ROWS = 2048
# calls of progress: the workers wait for one another at each
_REPORTS = 10
# threads of `map_blocks` at most
_WORKERS = 8
# the score of a document that nothing precedes: above that of every other, which is at most 1
_FIRST = 2.0


@dataclass(frozen=True)
class SemDeDupOptions:
    """clusters: k of the spherical k-means, or None for ⌈√N⌉; iterations: of Lloyd's algorithm; keep: "hard" sees the
    documents of a cluster farthest from the centroid first and so keeps them, "easy" the nearest first."""

    clusters: int | None = None
    iterations: int = 10
    keep: Literal["hard", "easy"] = "hard"

    def __post_init__(self) -> None:
        if self.clusters is not None and self.clusters < 1:
            raise ValueError(f"clusters must be 1 or more, not {self.clusters}; None takes the square root of the pool")
        if self.iterations < 1:
            raise ValueError(f"k-means needs 1 iteration or more, not {self.iterations}")
        if self.keep not in ("hard", "easy"):
            raise ValueError(f"keep {self.keep!r} is neither 'hard' nor 'easy'")


@dataclass(frozen=True, eq=False)
class Deduplicated:
    """What is left of N documents.

    positions: int64[S], ascending; score: float64[N], the negated largest cosine to an earlier document of the
    cluster, 2 where there is none, so that the selection is the top-S; kept: int64[N], the position of the document
    that was kept instead, −1 for a kept one; similarity: float64[N], the cosine to that document, NaN where kept is
    −1; epsilon: the largest ε with which "drop at a cosine above 1 − ε" keeps every selected document, 2 where none is
    selected but documents that nothing precedes; clusters: int32[N].

    A dropped document has kept = −1 only where the budget is below the number of clusters with documents in them.
    """

    positions: np.ndarray
    score: np.ndarray = field(repr=False)
    kept: np.ndarray = field(repr=False)
    similarity: np.ndarray = field(repr=False)
    epsilon: float
    clusters: np.ndarray = field(repr=False)


def semdedup(
    z: np.ndarray,
    *,
    budget: int,
    options: SemDeDupOptions,
    seed: int,
    split: int | str,
    memory_limit: float | None = None,
    progress: Progress | None = None,
) -> Deduplicated:
    """Keep the `budget` of N documents that are least like an earlier one of their cluster.

    z: float32[N, d], unit rows; memory_limit: bytes for what is needed besides z. SemDeDup keeps whatever lies within
    1 − ε of nothing earlier, dropped or kept; the number kept grows with 1 − ε, so the ε that leaves the budget is read
    off the sorted cosines, which is what bisection converges to. Among documents that ε alone cannot part, and where
    the budget is below the number of clusters, the lower position stays. Centroids are fitted with a seed keyed by
    (seed, "semdedup", split), on 256 documents a cluster where there are more.

    progress(step, steps, {"compared": documents so far}) is called about ten times. Raises ValueError for a budget
    outside 0..N and MemoryPlanError where the limit is too low.
    """
    n, d = z.shape
    if not 0 <= budget <= n:
        raise ValueError(f"budget {budget} is not between 0 and the {n} documents of the pool")
    asked = options.clusters if options.clusters is not None else int(np.ceil(np.sqrt(n)))
    k = min(asked, n)
    _plan(n, d, k, memory_limit)
    clusters, closeness = _cluster(z, k, options.iterations, int(keyed.rng(seed, "semdedup", split).integers(2**31)))
    largest, earlier = nearest_earlier(z, clusters, closeness, options.keep, progress)
    score = np.where(earlier < 0, _FIRST, -largest)
    positions = top_s(score, budget)
    kept, similarity = representatives(z, earlier, positions)
    threshold = float(largest[positions].max(initial=-1.0))
    return Deduplicated(positions, score, kept, similarity, 1.0 - threshold, clusters)


def nearest_earlier(
    z: np.ndarray,
    clusters: np.ndarray,
    closeness: np.ndarray,
    keep: Literal["hard", "easy"],
    progress: Progress | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(float64[N] each document's largest cosine to an earlier one of its cluster, int64[N] that document's position).

    −1 and −1 for the first document of a cluster. clusters: int[N]; closeness: [N], the cosine to the centroid, by
    which "hard" puts the least first and "easy" the greatest, ties to the lower position. Which document is nearest is
    found in float32, its cosine is float64. Memory does not grow with the size of a cluster.
    """
    n = z.shape[0]
    order = np.lexsort((closeness if keep == "hard" else -closeness, clusters))
    first = np.searchsorted(clusters[order], clusters[order], side="left")
    earlier = np.full(n, -1, np.int64)
    tiles = _tiles(first)

    def compare(tile: tuple[int, int, int]) -> None:
        start, a, b = tile
        rows = z[order[a:b]]
        best, found = np.full(b - a, -np.inf, np.float32), np.full(b - a, -1, np.int64)
        for left in range(start, b, _TILE):
            right = min(left + _TILE, b)
            cosines = rows @ (rows if left == a else z[order[left:right]]).T
            if left == a:
                cosines[~np.tri(b - a, k=-1, dtype=bool)] = -np.inf
            at = cosines.argmax(axis=1)
            here = cosines[np.arange(b - a), at]
            # a strict comparison leaves a tie with the document that comes first
            better = here > best
            best[better], found[better] = here[better], left + at[better]
        earlier[order[a:b]] = np.where(found < 0, -1, order[found])

    every = max(1, -(-len(tiles) // _REPORTS))
    for done in range(0, len(tiles), every):
        batch = tiles[done : done + every]
        map_blocks(lambda a, _, batch=batch: compare(batch[a]), len(batch), block=1)  # type: ignore[misc]
        if progress is not None:
            progress(done + len(batch), len(tiles), {"compared": batch[-1][2]})
    largest = np.full(n, -1.0)
    later = np.flatnonzero(earlier >= 0)
    largest[later] = _cosines(z, later, earlier[later])
    return largest, earlier


def representatives(z: np.ndarray, earlier: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(int64[N] the kept document that stands for each dropped one, float64[N] their cosine).

    −1 and NaN for a kept document. From a dropped document the way goes to its nearest earlier one, and on from there
    until one is kept; −1 and NaN too where it ends at a first document that was dropped.
    """
    n = earlier.size
    # the place after the last stands for none
    stands = np.append(np.where(earlier < 0, n, earlier), n)
    stands[positions] = positions
    while True:
        further = stands[stands]
        if np.array_equal(further, stands):
            break
        stands = further
    kept = np.where(stands == n, -1, stands)[:n]
    kept[positions] = -1
    similarity = np.full(n, np.nan)
    dropped = np.flatnonzero(kept >= 0)
    similarity[dropped] = _cosines(z, dropped, kept[dropped])
    return kept, similarity


def _cluster(z: np.ndarray, k: int, iterations: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(int32[N] the centroid of largest cosine, lowest on ties; float32[N] that cosine)."""
    # faiss takes longer to load than all else here
    import faiss

    n, d = z.shape
    if not n:
        return np.zeros(0, np.int32), np.zeros(0, np.float32)
    model = faiss.Kmeans(
        d,
        k,
        niter=iterations,
        seed=seed,
        spherical=True,
        min_points_per_centroid=1,
        max_points_per_centroid=_FITTED,
    )
    model.train(z)
    clusters, closeness = nearest(z, np.asarray(model.centroids, np.float32))
    return clusters.astype(np.int32), closeness


def _tiles(first: np.ndarray) -> list[tuple[int, int, int]]:
    """(start of the cluster, start, stop) of pieces of at most _TILE documents; first: the start of each one's."""
    starts = np.unique(first).tolist()
    return [
        (start, a, min(a + _TILE, stop))
        for start, stop in pairwise([*starts, first.size])
        for a in range(start, stop, _TILE)
    ]


def _cosines(z: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """float64[k]: cosines of pairs of rows, exactly 1 for rows that are equal."""
    found = np.empty(left.size)

    def fill(a: int, b: int) -> None:
        x, y = z[left[a:b]].astype(np.float64), z[right[a:b]].astype(np.float64)
        norms = np.sqrt(np.einsum("ij,ij->i", x, x) * np.einsum("ij,ij->i", y, y))
        found[a:b] = np.clip(np.einsum("ij,ij->i", x, y) / norms, -1.0, 1.0)

    map_blocks(fill, left.size, block=_ROWS)
    return found


def _plan(n: int, d: int, k: int, memory_limit: float | None) -> None:
    """Raise MemoryPlanError where the k-means sample or the workers' products would not fit."""
    fitted = 4 * d * (min(n, _FITTED * k) + 3 * k)
    rows, tile = min(n, _ROWS), min(n, _TILE)
    worker = max(4 * PRODUCT * k, 24 * rows * d, tile * (5 * tile + 8 * d))
    needed = max(fitted, _WORKERS * worker) + 80 * n
    if memory_limit is not None and needed > memory_limit:
        raise MemoryPlanError(
            f"SemDeDup of {n:,} documents in {k:,} clusters needs about {needed / 1e9:.2f} GB besides the embeddings "
            f"and may use {memory_limit / 1e9:.2f}; ask for fewer clusters, or raise the limit"
        )
