"""Trajectories for the second round of rollouts, where a first influence model expects extremes (Group-MATES).

Here: the bootstrap policy. Not here: the model that it asks (`relational`), and running what it draws (`rollouts`).

Influences are near Gaussian, so uniform trajectories hardly show their tails. The bootstrap policy draws each step
uniformly from the K documents of lowest and the K of highest predicted influence given those drawn so far
(arXiv 2502.14709, section on rollouts, K = 5). It is a draw in truth: a beam of the best predicted sums would have all
trajectories share their beginnings and never mix low with high.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from threadpoolctl import threadpool_limits

from dagster_datamask import keyed
from dagster_datamask.influence.relational import bracket, check_constants
from dagster_datamask.selection.objectives import BadInput, canonical_order, finite_scores, name_documents
from dagster_datamask.selection.vectors import as_single

# bytes of the scores of trajectories that are drawn in step
_SCORES = 1 << 26
# trajectories of which there is always a multiple, and documents, in one product: none depends on how many others
_TOGETHER = 16
_ROWS = 4096


def bootstrap_trajectories(
    vectors: np.ndarray,
    f: np.ndarray,
    ids: Sequence[str],
    m: int,
    length: int,
    k: int = 5,
    *,
    alpha: float,
    beta: float,
    seed: int,
    first: int = 0,
) -> np.ndarray:
    """int64[m, length]: rows drawn step by step from the k lowest and the k highest Θ among those that are left.

    vectors: float[N, width] whose products are R (`InfluenceModel.relation`), float16 and memory-mapped ones included;
    f: float[N]. The first document is drawn by f alone. Where fewer than 2k are left, all are candidates. Trajectory j
    depends on (seed, j) and the pool as a set, not on m or the order of the rows; first: the number of the first one,
    to go on from.

    Raises ValueError for a length above N, k < 1, repeated ids and, naming the documents, values that are not finite.
    """
    n = len(ids)
    check_constants(alpha, beta)
    if f.shape != (n,) or vectors.ndim != 2 or len(vectors) != n:
        raise ValueError(f"{n} ids, influences of shape {list(f.shape)} and vectors of shape {list(vectors.shape)}")
    if k < 1 or m < 0 or length < 1:
        raise ValueError(f"{m} trajectories of length {length} from the {k} lowest and highest cannot be drawn")
    if length > n:
        raise ValueError(f"trajectories of {length} documents need as many, and the pool has {n}; shorten them")
    values = finite_scores(ids, f, "influence")
    order, _ = canonical_order(ids, n)
    # in the order of the ids' hashes a tie goes to the lower position
    pool = _Pool(vectors, values[order], order, ids)
    at_once = max(1, _SCORES // (8 * n * _TOGETHER)) * _TOGETHER
    drawn = np.empty((m, length), np.int64)
    with threadpool_limits(1, "blas"), ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        for a in range(0, m, at_once):
            b = min(a + at_once, m)
            drawn[a:b] = _draw(pool, range(first + a, first + b), length, k, alpha, beta, seed, threads)
    return order[drawn]


class _Pool:
    """N documents in canonical order; rows are read in blocks and checked the first time."""

    def __init__(self, vectors: np.ndarray, f: np.ndarray, order: np.ndarray, ids: Sequence[str]) -> None:
        self.vectors, self.f, self.order, self.ids = vectors, f, order, ids

    def rows(self, at: np.ndarray) -> np.ndarray:
        """float32[len(at), width]."""
        rows = as_single(self.vectors[self.order[at]])
        bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
        if bad.size:
            named = name_documents(self.ids, self.order[at[bad]])
            raise BadInput(f"{named}: the influence vector is not finite; leave these out or embed them again")
        return rows


def _draw(
    pool: _Pool,
    numbers: range,
    length: int,
    k: int,
    alpha: float,
    beta: float,
    seed: int,
    threads: ThreadPoolExecutor,
) -> np.ndarray:
    """int64[len(numbers), length]: positions in the pool."""
    n, count = pool.f.size, len(numbers)
    padded = -(-count // _TOGETHER) * _TOGETHER
    generators = [keyed.rng(seed, "bootstrap", j) for j in numbers]
    drawn = np.empty((count, length), np.int64)
    totals = np.zeros((padded, pool.vectors.shape[1]))
    scores = np.tile(pool.f, (count, 1))
    for t in range(length):
        if t:
            totals[:count] += pool.rows(drawn[:, t - 1])
            narrow = totals.astype(np.float32).T

            def score(a: int, narrow: np.ndarray = narrow, t: int = t) -> None:
                b = min(a + _ROWS, n)
                rows = np.zeros((_ROWS, narrow.shape[0]), np.float32)
                rows[: b - a] = pool.rows(np.arange(a, b))
                scores[:, a:b] = bracket((rows @ narrow)[: b - a, :count].T / t, alpha, beta) * pool.f[a:b]

            list(threads.map(score, range(0, n, _ROWS)))

        def pick(j: int, t: int = t) -> None:
            left = np.delete(scores[j], drawn[j, :t])
            where = np.delete(np.arange(n), drawn[j, :t])
            drawn[j, t] = where[generators[j].choice(extremes(left, k))]

        list(threads.map(pick, range(count)))
    return drawn


def extremes(scores: np.ndarray, k: int) -> np.ndarray:
    """int64, ascending: the places of the k lowest and the k highest scores, ties to the lower place; all where there
    are no more than 2k. The k highest are taken among what the k lowest leave."""
    n = scores.size
    if n <= 2 * k:
        return np.arange(n)
    chosen = _lowest(scores, k)
    rest = np.delete(np.arange(n), chosen)
    return np.sort(np.concatenate([chosen, rest[_lowest(-scores[rest], k)]]))


def _lowest(scores: np.ndarray, k: int) -> np.ndarray:
    level = np.partition(scores, k - 1)[k - 1]
    below = np.flatnonzero(scores < level)
    return np.concatenate([below, np.flatnonzero(scores == level)[: k - below.size]])
