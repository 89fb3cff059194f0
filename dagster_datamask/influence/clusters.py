"""Clusters in influence space, in which group selection chooses independently (Group-MATES).

Here: spherical k-means over the vectors whose products are R, assignment, and how much of R lies inside clusters. Not
here: the clusters of the text encoder's vectors (`stages.calibration`), which are another space.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from threadpoolctl import threadpool_limits

from dagster_datamask import keyed
from dagster_datamask.selection.objectives import BadInput, name_documents
from dagster_datamask.selection.vectors import as_single, nearest, unit_rows

# documents a cluster that k-means is fitted on, faiss's own default
FITTED_PER_CLUSTER = 256
# the paper's number of Lloyd's iterations
ITERATIONS = 100


@dataclass(frozen=True, eq=False)
class Clusters:
    """Fitted clusters. centroids: float32[k, width], unit norm; asked: the k asked for, which the sample's distinct
    rows limit; fitted: the rows they were fitted on; sizes: int64[k], how many of those are in each, 0 included."""

    centroids: np.ndarray = field(repr=False)
    asked: int
    fitted: int
    sizes: np.ndarray = field(repr=False)

    @property
    def k(self) -> int:
        return len(self.centroids)

    @property
    def empty(self) -> int:
        """How many clusters hold no row of the sample."""
        return int((self.sizes == 0).sum())

    def assign(self, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `selection.vectors.nearest`, of float[n, width] rows."""
        return nearest(vectors, self.centroids)


def fit_clusters(
    vectors: np.ndarray, k: int, *, ids: Sequence[str], seed: int, iterations: int = ITERATIONS
) -> Clusters:
    """Spherical k-means on at most 256 rows a cluster, drawn by a keyed hash of the ids.

    vectors: float[n, width], float16 and memory-mapped ones included. The result has the same bits for any order of the
    rows and any number of threads. Raises ValueError for k < 1 or no rows, and BadInput naming the rows of the sample
    that are not finite.
    """
    # faiss takes longer to load than all else here
    import faiss

    if vectors.ndim != 2 or len(vectors) != len(ids):
        raise ValueError(f"{len(ids)} ids but vectors of shape {list(vectors.shape)}")
    if k < 1:
        raise ValueError(f"{k} clusters; there must be 1 or more")
    if not len(ids):
        raise ValueError("no document has an influence vector, so there is nothing to cluster")
    hashes = keyed.hash64(ids, seed, "influence-clusters")
    size = min(len(ids), FITTED_PER_CLUSTER * k)
    rows = np.argpartition(hashes, size - 1)[:size] if size < len(ids) else np.arange(size)
    rows = rows[np.argsort(hashes[rows], kind="stable")]
    sample = as_single(vectors[rows])
    bad = np.flatnonzero(~np.isfinite(sample).all(axis=1))
    if bad.size:
        named = name_documents(ids, rows[bad])
        raise BadInput(f"{named}: the influence vector is not finite; leave these out or embed them again")
    sample = unit_rows(sample)
    found = _distinct(sample, k)
    model = faiss.Kmeans(
        sample.shape[1],
        found,
        niter=iterations,
        seed=int(keyed.rng(seed, "influence-clusters").integers(1, 2**31)),
        spherical=True,
        min_points_per_centroid=1,
        max_points_per_centroid=len(sample),
    )
    with threadpool_limits(1, "blas"):
        model.train(sample)
    centroids = np.ascontiguousarray(model.centroids, np.float32)
    labels, _ = nearest(sample, centroids)
    return Clusters(centroids, k, len(sample), np.bincount(labels, minlength=found))


@dataclass(frozen=True)
class Relatedness:
    """Mean and standard deviation of R over pairs of documents, inside clusters and across them; None where there are
    no such pairs."""

    inside_mean: float | None
    inside_sd: float | None
    across_mean: float | None
    across_sd: float | None


def relatedness(vectors: np.ndarray, labels: np.ndarray) -> Relatedness:
    """How much of R lies inside clusters: exact over all pairs, O(n·width²), from sums of rows and of their products.

    Σ_ij h_i·h_j = ‖Σ h‖² and Σ_ij (h_i·h_j)² = ‖Σ h hᵀ‖²; a document is no pair with itself.
    """
    width = vectors.shape[1]
    whole = _Moments(width)
    inside = np.zeros(3)
    for label in np.unique(labels).tolist():
        members = np.flatnonzero(labels == label)
        part = _Moments(width)
        for a in range(0, members.size, 4096):
            part.add(vectors[members[a : a + 4096]].astype(np.float64))
        inside += part.pairs()
        whole.join(part)
    return Relatedness(*_mean_sd(inside), *_mean_sd(whole.pairs() - inside))


class _Moments:
    def __init__(self, width: int) -> None:
        self.count, self.total, self.products = 0, np.zeros(width), np.zeros((width, width))
        self.own = np.zeros(2)

    def add(self, rows: np.ndarray) -> None:
        squares = np.einsum("nd,nd->n", rows, rows)
        self.count += len(rows)
        self.total += rows.sum(axis=0)
        self.products += rows.T @ rows
        self.own += squares.sum(), (squares**2).sum()

    def join(self, other: "_Moments") -> None:
        self.count += other.count
        self.total += other.total
        self.products += other.products
        self.own += other.own

    def pairs(self) -> np.ndarray:
        """float64[3]: ordered pairs of different rows, the sum of their products, the sum of the squares of those."""
        sums = self.total @ self.total - self.own[0], (self.products**2).sum() - self.own[1]
        return np.array([self.count * (self.count - 1), *sums])


def _mean_sd(sums: np.ndarray) -> tuple[float | None, float | None]:
    pairs, total, squares = sums.tolist()
    if not pairs:
        return None, None
    mean = total / pairs
    return mean, float(np.sqrt(max(squares / pairs - mean * mean, 0.0)))


def _distinct(rows: np.ndarray, most: int) -> int:
    """How many different rows there are, counted up to `most`."""
    seen: set[bytes] = set()
    for row in rows:
        seen.add((row + 0.0).tobytes())
        if len(seen) == most:
            break
    return len(seen)
