"""Rows of embeddings as the solvers read them: stored as they came, normalised block by block on the way.

Here: reading unit rows in search precision and in float64, the pass that checks and normalises, the nearest of some
centroids, and the two concave metrics' features of a row (ẑ, and ẑẑᵀ). Not here: what is done with the rows (`passes`,
the solvers).
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from threadpoolctl import ThreadpoolController

from dagster_datamask import keyed
from dagster_datamask.accelerator import Accelerator
from dagster_datamask.selection.exact import GridSum
from dagster_datamask.selection.objectives import BadInput, map_blocks

# rows that stay in cache while they are read, converted and summed, and rows of one block's sum
_CACHED = 64
BLOCK = 1024
# rows whose product with a matrix is taken at once
PRODUCT = 256
# rows that BLAS is given a multiple of
_EVEN = 64
# rows read at once where only a product with a vector is taken: few enough to stay in cache once they are widened
_DOTS = 512
_TORCH_GRAIN = 32_000
# rows that go to a device, and are widened there, at once
_UPLOADED = 1 << 16
# rows of which whole units fit an int64 together
_SUMMED = 1 << 15
# float32 squares of entries in rows of such lengths neither overflow nor vanish
SHORTEST, LONGEST = 1e-12, 1e12


@dataclass(frozen=True, eq=False)
class Vectors:
    """N rows: `stored` float16 or float32 [N, d] in any contiguous array, memory-mapped ones included, and
    `inverse` float64[N], 1/‖z‖; `exact`, where it is given, holds the rows in full (what `stored` is a float32 copy of,
    normalised). A row's result never depends on the rows around it."""

    stored: np.ndarray = field(repr=False)
    inverse: np.ndarray = field(repr=False)
    exact: np.ndarray | None = field(repr=False, default=None)

    @property
    def n(self) -> int:
        return self.stored.shape[0]

    @property
    def d(self) -> int:
        return self.stored.shape[1]

    def single(self, start: int, stop: int) -> np.ndarray:
        """float32[k, d]: stored rows, not normalised."""
        return as_single(self.stored[start:stop])

    def unit(self, rows: np.ndarray | slice) -> np.ndarray:
        """float32[k, d]: ẑ in search precision."""
        found = as_single(self.stored[rows])
        return found * self.inverse[rows].astype(np.float32)[:, None]

    def double(self, rows: np.ndarray | slice) -> np.ndarray:
        """float64[k, d]: ẑ of the stored vectors, divided by their norms in float64."""
        if self.exact is not None:
            return _normalised(self.exact[rows].astype(np.float64))
        found = self.stored[rows].astype(np.float64)
        found *= self.inverse[rows, None]
        return found

    def dots(self, v: np.ndarray) -> np.ndarray:
        """float32[N]: ẑ·v in search precision, one pass."""
        narrow, result = v.astype(np.float32), np.empty(self.n, np.float32)

        def dot(start: int, stop: int) -> None:
            result[start:stop] = _times(self.single(start, stop), narrow)
            result[start:stop] *= self.inverse[start:stop].astype(np.float32)

        map_blocks(dot, self.n, _DOTS)
        return result

    def forms(self, matrix: np.ndarray) -> np.ndarray:
        """float32[N]: ẑᵀ·matrix·ẑ in search precision, one pass."""
        narrow, result = matrix.astype(np.float32), np.empty(self.n, np.float32)

        def form(start: int, stop: int) -> None:
            # always as many rows, so that a row's product does not depend on how many come with it
            rows = np.zeros((PRODUCT, self.d), np.float32)
            rows[: stop - start] = self.unit(slice(start, stop))
            result[start:stop] = np.einsum("ij,ij->i", rows @ narrow, rows)[: stop - start]

        map_blocks(form, self.n, PRODUCT)
        return result

    def add_to(self, rows: np.ndarray, total: GridSum, costs: np.ndarray | None = None, sign: int = 1) -> None:
        """Add the sum of ẑ over these rows, each weighed by its cost, to `total`."""

        def block(a: int, b: int) -> np.ndarray:
            sums = total.nothing()
            for c in range(a, b, _CACHED):
                part = rows[c : min(c + _CACHED, b)]
                sums += total.block(self.double(part), None if costs is None else costs[part])
            return sums

        if rows.size:
            total.add(map_blocks(block, rows.size, BLOCK), sign)


def _times(rows: np.ndarray, v: np.ndarray) -> np.ndarray:
    """float32[k]: rows·v, each of which depends on nothing but the row: BLAS takes a row's products alone, but may take
    the last few of an odd number of rows in another way, so there are none."""
    odd = len(rows) % _EVEN
    if not odd:
        return rows @ v
    padded = np.zeros((len(rows) - odd + _EVEN, rows.shape[1]), np.float32)
    padded[: len(rows)] = rows
    return (padded @ v)[: len(rows)]


class DeviceVectors(Vectors):
    """The same rows on a torch device as well, where passes and sums are taken.

    Rows stay in the precision they are stored in and are widened on the way; sums are the same whole numbers as on the
    CPU, products are rounded in another order.
    """

    _held: Any
    _inverse: Any

    def __init__(self, vectors: Vectors, device: str) -> None:
        import torch

        super().__init__(vectors.stored, vectors.inverse, vectors.exact)
        held = torch.empty(vectors.stored.shape, dtype=_torch_dtype(vectors.stored), device=device)
        for a in range(0, vectors.n, _UPLOADED):
            held[a : a + _UPLOADED] = torch.from_dlpack(np.ascontiguousarray(vectors.stored[a : a + _UPLOADED]))
        object.__setattr__(self, "_held", held)
        object.__setattr__(self, "_inverse", torch.from_numpy(vectors.inverse).to(device))

    def dots(self, v: np.ndarray) -> np.ndarray:
        return self._each(lambda rows, torch: rows @ torch.from_numpy(v.astype(np.float32)).to(rows.device))

    def forms(self, matrix: np.ndarray) -> np.ndarray:
        def form(rows: Any, torch: Any) -> Any:
            return ((rows @ torch.from_numpy(matrix.astype(np.float32)).to(rows.device)) * rows).sum(1)

        return self._each(form, power=2)

    def _each(self, product: Callable[[Any, Any], Any], power: int = 1) -> np.ndarray:
        import torch

        found = [
            product(self._held[a : a + _UPLOADED].float(), torch) * self._inverse[a : a + _UPLOADED].float() ** power
            for a in range(0, self.n, _UPLOADED)
        ]
        return torch.cat(found).cpu().numpy() if found else np.zeros(0, np.float32)

    def add_to(self, rows: np.ndarray, total: GridSum, costs: np.ndarray | None = None, sign: int = 1) -> None:
        if costs is not None or total.fine or self.exact is not None:
            # what is rounded in two steps is summed up on the CPU, once a solve
            super().add_to(rows, total, costs, sign)
            return
        import torch

        for a in range(0, rows.size, _SUMMED):
            at = torch.from_numpy(rows[a : a + _SUMMED]).to(self._held.device)
            units = (self._held[at].double() * self._inverse[at, None] / total.unit).round().to(torch.int64)
            total.add([units.sum(0)[None].cpu().numpy()], sign)


def on_device(vectors: Vectors, accelerator: Accelerator) -> Vectors:
    """The rows where the accelerator computes: a copy of them on a CUDA device, as they are on the CPU."""
    if not accelerator.is_cuda:
        return vectors
    size = vectors.stored.nbytes + vectors.inverse.nbytes
    accelerator.plan(f"a pool of {vectors.n:,} documents on {accelerator.device}", size, "take smaller splits")
    return DeviceVectors(vectors, accelerator.device)


def _torch_dtype(rows: np.ndarray) -> Any:
    import torch

    return torch.float16 if rows.dtype == np.float16 else torch.float32


@contextmanager
def one_thread(libraries: ThreadpoolController | None = None) -> Iterator[None]:
    """BLAS and torch, where it is loaded, on one thread: it is blocks of rows that go to all cores. libraries: those
    of this process, for who comes here often, as looking for them takes milliseconds."""
    torch = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    try:
        if torch is not None:
            torch.set_num_threads(1)
        with (libraries or ThreadpoolController()).limit(limits=1, user_api="blas"):
            yield
    finally:
        if torch is not None:
            torch.set_num_threads(before)


def as_single(rows: np.ndarray) -> np.ndarray:
    """float32 rows. Torch converts half precision several times as fast as NumPy, in pieces below which it starts no
    threads of its own where it may."""
    if rows.dtype != np.float16:
        return rows.astype(np.float32, copy=False)
    import torch

    single = np.empty(rows.shape, np.float32)
    alone = torch.get_num_threads() == 1
    step = max(1, len(rows) if alone else _TORCH_GRAIN // max(1, rows.shape[1]))
    for a in range(0, len(rows), step):
        # a memory map is read-only, which `from_numpy` would warn of
        torch.from_numpy(single[a : a + step]).copy_(torch.from_dlpack(rows[a : a + step]))
    return single


def nearest(rows: np.ndarray, centroids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(int64[n] the centroid of largest cosine, the lower on ties; float32[n] that cosine) of float[n, d] rows, for
    centroids float32[k, d] of unit norm.

    A row's bits do not depend on the rows around it, their number or the number of threads. A row of zeros has cosine 0
    and is in cluster 0. Raises BadInput naming a row that is not finite.
    """
    n = len(rows)
    labels, cosines = np.zeros(n, np.int64), np.zeros(n, np.float32)

    def block(a: int, b: int) -> None:
        # always as many rows: BLAS takes the last few of another number in another way
        part = np.zeros((PRODUCT, rows.shape[1]), np.float32)
        part[: b - a] = as_single(rows[a:b])
        finite = np.isfinite(part).all(axis=1)
        if not finite.all():
            raise BadInput(
                f"row {a + int(np.argmin(finite))}: the vector is not finite; leave it out or embed it again"
            )
        products = unit_rows(part) @ centroids.T
        best = products.argmax(axis=1)
        labels[a:b], cosines[a:b] = best[: b - a], products[np.arange(PRODUCT), best][: b - a]

    with one_thread():
        map_blocks(block, n, PRODUCT)
    return labels, cosines


def unit_rows(rows: np.ndarray) -> np.ndarray:
    """float32[n, d]: rows of float32[n, d] over their norms, those of zeros as they are."""
    norms = np.sqrt(np.einsum("nd,nd->n", rows, rows))
    return rows / np.maximum(norms, np.float32(SHORTEST))[:, None]


@dataclass(frozen=True, eq=False)
class Prepared:
    """vectors; bad: int64 rows that are not finite or zero, ascending; total: Σ ẑ; prints: what the stored vectors and
    their ids add to a checksum, modulo 2**64 and in any order."""

    vectors: Vectors
    bad: np.ndarray
    total: GridSum
    prints: int


def prepare(stored: np.ndarray, ties: np.ndarray) -> Prepared:
    """One pass over the rows: their norms, their mean and what is wrong with them.

    stored: [N, d] of float16, float32 or float64; ties: uint64[N], the hash of each row's id.
    """
    n, d = stored.shape
    inverse, prints = np.empty(n), np.empty((n, 2))
    total = GridSum(d)
    # any direction would do; one that the rows do not know tells apart what has equal norms
    probe = keyed.rng(0, "checksum", d).standard_normal(d)
    narrow = np.asarray(probe, np.float32)

    def block(start: int, stop: int) -> np.ndarray:
        sums = total.nothing()
        rows = np.empty((_CACHED, d))
        for a in range(start, stop, _CACHED):
            b = min(a + _CACHED, stop)
            x, read = rows[: b - a], stored[a:b]
            with np.errstate(all="ignore"):
                if stored.dtype == np.float64:
                    x[:] = read
                    prints[a:b, 1] = np.einsum("ij,j->i", x, probe)
                else:
                    single = as_single(read)
                    x[:] = single
                    prints[a:b, 1] = _times(single, narrow)
                squares = np.einsum("ij,ij->i", x, x)
                prints[a:b, 0] = squares
                inverse[a:b] = 1.0 / np.sqrt(squares)
                x *= inverse[a:b, None]
                # what is not finite is reported, and must not end up in a conversion to whole numbers
                good = np.isfinite(inverse[a:b]) & (inverse[a:b] > 0)
            sums += total.block(x if good.all() else x[good])
        return sums

    total.add(map_blocks(block, n, BLOCK))
    doubtful = np.flatnonzero(~((inverse > 1 / LONGEST) & (inverse < 1 / SHORTEST)))
    bad = doubtful[[not (np.isfinite(stored[i]).all() and stored[i].any()) for i in doubtful.tolist()]]
    vectors = Vectors(stored, inverse)
    if doubtful.size > bad.size or stored.dtype == np.float64:
        # float32 may not hold what is stored, but always its direction
        narrow = np.empty((n, d), np.float32)
        with np.errstate(all="ignore"):
            for a in range(0, n, BLOCK):
                narrow[a : a + BLOCK] = _normalised(stored[a : a + BLOCK].astype(np.float64))
        vectors = Vectors(narrow, np.ones(n), stored)
    if doubtful.size > bad.size:
        total = GridSum(d)
        vectors.add_to(np.setdiff1d(np.arange(n), bad), total)
    bits = prints.view(np.uint64)
    mixed = (ties ^ (bits[:, 0] * np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(31)) ^ bits[:, 1]) * np.uint64(0x94D049BB133111EB)
    return Prepared(vectors, bad, total, int((mixed ^ (mixed >> np.uint64(29))).sum(dtype=np.uint64)))


def _normalised(rows: np.ndarray) -> np.ndarray:
    # scaled first, so that no square overflows or vanishes
    rows = rows / np.abs(rows).max(axis=1, keepdims=True)
    return rows / np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None]


class Feature(Protocol):
    """What a concave metric averages: metric(U) = −‖mean of φ over U‖², with ‖φ‖ = 1."""

    def size(self, d: int) -> int:
        """Entries of φ."""

    def rough(self, vectors: Vectors, v: np.ndarray) -> np.ndarray:
        """float32[N]: φ·v in search precision, one pass; a row's result depends on nothing but the row."""

    def dots(self, rows: np.ndarray, v: np.ndarray) -> np.ndarray:
        """float64[k]: φ·v for unit rows in float64."""

    def products(self, rows: np.ndarray, v: np.ndarray) -> np.ndarray:
        """φ·v for unit rows in float32, as fast as can be."""

    def total(self, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """float64[size]: Σ weight·φ over unit rows, summed in the rows' precision."""

    def rows(self, rows: np.ndarray) -> np.ndarray:
        """float64[k, size]: φ of unit rows in float64."""

    def gram(self, cosines: np.ndarray) -> np.ndarray:
        """φ·φ' from ẑ·ẑ'."""

    def rounding(self, d: int) -> int:
        """Roundings that a product φ·v goes through."""


class First:
    """φ = ẑ: pair-wise similarity."""

    def size(self, d: int) -> int:
        return d

    def rough(self, vectors: Vectors, v: np.ndarray) -> np.ndarray:
        return vectors.dots(v)

    def dots(self, rows: np.ndarray, v: np.ndarray) -> np.ndarray:
        return np.einsum("ij,j->i", rows, v)

    def products(self, rows: np.ndarray, v: np.ndarray) -> np.ndarray:
        return rows @ v.astype(rows.dtype)

    def total(self, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return (weights.astype(rows.dtype) @ rows).astype(np.float64)

    def rows(self, rows: np.ndarray) -> np.ndarray:
        return rows

    def gram(self, cosines: np.ndarray) -> np.ndarray:
        return cosines

    def rounding(self, d: int) -> int:
        return d + 4


class Second:
    """φ = ẑẑᵀ, flattened: DiSF's second moment."""

    def size(self, d: int) -> int:
        return d * d

    def rough(self, vectors: Vectors, v: np.ndarray) -> np.ndarray:
        return vectors.forms(v.reshape(vectors.d, vectors.d))

    def dots(self, rows: np.ndarray, v: np.ndarray) -> np.ndarray:
        d = rows.shape[1]
        return np.einsum("ij,ij->i", rows @ v.reshape(d, d), rows)

    def products(self, rows: np.ndarray, v: np.ndarray) -> np.ndarray:
        return self.dots(rows, v.astype(rows.dtype))

    def total(self, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        total = np.zeros((rows.shape[1], rows.shape[1]))
        for a in range(0, len(rows), 16 * PRODUCT):
            part = rows[a : a + 16 * PRODUCT]
            total += part.T @ (part * weights[a : a + 16 * PRODUCT, None].astype(part.dtype))
        return total.ravel()

    def rows(self, rows: np.ndarray) -> np.ndarray:
        return np.einsum("ij,ik->ijk", rows, rows).reshape(len(rows), -1)

    def gram(self, cosines: np.ndarray) -> np.ndarray:
        return cosines * cosines

    def rounding(self, d: int) -> int:
        return 2 * d + 6


FEATURES: dict[str, Feature] = {"pws": First(), "disf_second_moment": Second()}
