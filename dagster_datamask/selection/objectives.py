"""What is maximised: a set function of the selected documents, with its scales.

Here: the joint objective of quality and pair-wise similarity, and the pool a solver sees, which is the objective with
its scales resolved and its rows in canonical order. Not here: how to maximise it (the solvers) and what a mask is
worth to the last digit (`certificates`).
"""

import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np

from dagster_datamask import keyed

T = TypeVar("T")

SCALES = ("minmax", "per_pool", "zscore", "raw")

# rows that are summed in one go, and rows that stay in cache while they are gathered, normalised and summed
_BLOCK = 128
_CACHED = 64
_SHOWN = 5
# below this the scores of a "varying" direction are rounding noise
_CONSTANT = 1e-12


class BadInput(ValueError):
    """Input that cannot be selected from; the message names the documents and the remedy."""


def map_blocks(work: Callable[[int, int], T], n: int, block: int = _BLOCK) -> list[T]:
    """work(start, stop) over 0..n in fixed blocks, on all cores, results in block order.

    The blocks depend on n alone, so a sum taken over the results in order has the same bits on any number of cores.
    """
    starts = range(0, n, block)
    # a few hundred rows take less time than it takes to start a thread
    if len(starts) <= 8:
        return [work(a, min(a + block, n)) for a in starts]
    workers = min(len(os.sched_getaffinity(0)), 8)
    # a few pieces a worker, so that none waits long for the last one
    chunk = block * max(1, len(starts) // (4 * workers))
    with ThreadPoolExecutor(workers) as threads:

        def run(first: int) -> list[T]:
            return [work(a, min(a + block, n)) for a in range(first, min(first + chunk, n), block)]

        return [result for part in threads.map(run, range(0, n, chunk)) for result in part]


@dataclass(frozen=True, eq=False)
class QualityDiversity:
    """f(U) = λ·quality(U) + (1−λ)·diversity(U) over the N documents of one pool (DataMask, arXiv 2512.24265, Eq. 12).

    quality(U) is the mean scaled score; diversity(U) = −‖mean of ẑ over U‖², the negated mean pair-wise cosine, where
    ẑ is the stored vector divided by its own norm in float64.

    embeddings: float16, float32 or float64 [N, d], finite and not zero; quality: float64 [N], or None where lam is 0;
    lam: λ in [0, 1]. `scale` turns scores into quality:

    - "minmax": (Q − lo)/(hi − lo) with the given `constants` (lo, hi), linear and not clipped, so that every pool,
      split and scope has the same objective;
    - "per_pool": the same with the pool's own least and greatest score;
    - "zscore": each term divided by its standard deviation over the pool, sd(Q) and sd(2ẑ·z̄), the spread of the
      diversity's linear scores at the pool's mean;
    - "raw": Q as it is.

    A term that is constant over the pool scales to 0. λ = 0 ignores quality altogether: it may be missing or NaN.

    Raises ValueError for shapes, types, λ or a scale that do not fit together; what the values hold is checked when
    the pool is prepared, where the ids are known.
    """

    embeddings: np.ndarray
    quality: np.ndarray | None
    lam: float
    scale: str = "minmax"
    constants: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        z = self.embeddings
        if z.ndim != 2 or z.dtype not in (np.float16, np.float32, np.float64):
            raise ValueError(f"embeddings must be float16, float32 or float64 [N, d], not {z.dtype} {list(z.shape)}")
        if z.shape[0] and not z.shape[1]:
            raise ValueError("embeddings have no dimensions (d = 0)")
        if not 0 <= self.lam <= 1:
            raise ValueError(f"λ must lie in [0, 1], not {self.lam}")
        if self.scale not in SCALES:
            raise ValueError(f"scale {self.scale!r} is none of: {', '.join(SCALES)}")
        if self.quality is not None and self.quality.shape != z.shape[:1]:
            raise ValueError(f"{z.shape[0]} embeddings but quality of shape {list(self.quality.shape)}")
        if self.lam > 0:
            if self.quality is None:
                raise ValueError(f"λ = {self.lam} weighs quality, and there is none; give scores or set λ to 0")
            if self.scale == "minmax" and self.constants is None:
                raise ValueError("scale 'minmax' needs its frozen constants (q_lo, q_hi); give them, or use 'per_pool'")
        if self.constants is not None:
            lo, hi = self.constants
            if not (np.isfinite(lo) and np.isfinite(hi) and lo <= hi):
                raise ValueError(f"constants (q_lo, q_hi) = ({lo}, {hi}) are not finite and in order")

    def prepare(self, ids: Sequence[str]) -> "Pool":
        """The pool in canonical order, normalised and scaled.

        Costs one gather of the embeddings and a float32 copy of them. Raises BadInput naming the first documents
        whose vector is not finite or is zero, whose score is not finite (λ > 0), or whose id is not unique.
        """
        n, d = self.embeddings.shape
        order, ties = canonical_order(ids, n)
        vectors = np.empty((n, d), np.float32)
        inverse_norms = np.empty(n)

        def normalise(start: int, stop: int) -> tuple[np.ndarray, int]:
            size = min(_CACHED, stop - start)
            stored = np.empty((size, d), self.embeddings.dtype)
            rows, total, crc = np.empty((size, d)), np.zeros(d), 0
            for a in range(start, stop, _CACHED):
                b = min(a + _CACHED, stop)
                # indices are in range; "raise" would gather into a second buffer first
                np.take(self.embeddings, order[a:b], axis=0, out=stored[: b - a], mode="clip")
                crc = zlib.crc32(stored[: b - a].data, crc)
                rows[: b - a] = stored[: b - a]
                wide, narrow = rows[: b - a], vectors[a:b]
                with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                    inverse = 1.0 / np.sqrt(np.einsum("ij,ij->i", wide, wide))
                    total += np.einsum("i,ij->j", inverse, wide)
                    if stored.dtype == np.float64:
                        # float32 may not hold what is stored, but always its direction
                        wide *= inverse[:, None]
                        narrow[:] = wide
                    else:
                        narrow[:] = wide
                        narrow *= inverse.astype(np.float32)[:, None]
                inverse_norms[a:b] = inverse
            return total, crc

        parts = map_blocks(normalise, n, block=16 * _CACHED)
        # a NaN or an infinity gives NaN or 0 here, a zero vector infinity
        self._check_vectors(ids, np.sort(order[~(np.isfinite(inverse_norms) & (inverse_norms > 0))]))
        total = np.zeros(d)
        for part, _ in parts:
            total += part
        checksum = keyed.digest(n, d, *(crc for _, crc in parts)).hex()
        mean = total / n if n else total

        quality, scaled = None, np.zeros(n)
        if self.quality is not None:
            given = np.asarray(self.quality, np.float64)
            bad = np.flatnonzero(~np.isfinite(given))
            if not bad.size:
                quality = given[order]
            elif self.lam > 0:
                raise BadInput(
                    f"{name_documents(ids, bad)}: the score is not finite; leave these out or score them again"
                )
        offset, factor = self._quality_scale(quality)
        if quality is not None:
            scaled = (quality - offset) * factor
        pool = Pool(
            objective=self,
            order=order,
            ties=ties,
            vectors=vectors,
            inverse_norms=inverse_norms,
            mean=mean,
            quality=quality,
            scaled=scaled,
            diversity_scale=1.0,
            checksum=checksum,
        )
        if self.scale != "zscore" or not n:
            return pool
        spread = float(np.std(2.0 * pool.dots(np.arange(n), mean)))
        return replace(pool, diversity_scale=1.0 / spread if spread > _CONSTANT else 0.0)

    def _quality_scale(self, quality: np.ndarray | None) -> tuple[float, float]:
        """(offset, factor) with scaled = (Q − offset)·factor."""
        if quality is None or not quality.size:
            return 0.0, 0.0
        lo, hi = float(quality.min()), float(quality.max())
        if self.scale == "minmax" and self.constants is not None:
            lo, hi = self.constants
        # a constant score cannot tell documents apart, whatever its level
        if hi == lo or (self.scale == "minmax" and self.constants is None):
            return lo, 0.0
        if self.scale == "raw":
            return 0.0, 1.0
        if self.scale == "zscore":
            return 0.0, 1.0 / float(np.std(quality))
        return lo, 1.0 / (hi - lo)

    def _check_vectors(self, ids: Sequence[str], bad: np.ndarray) -> None:
        if not bad.size:
            return
        zero = bad[[not self.embeddings[i].any() for i in bad]]
        if zero.size:
            raise BadInput(f"{name_documents(ids, zero)}: the embedding is zero and has no direction; leave these out")
        raise BadInput(f"{name_documents(ids, bad)}: the embedding is not finite; embed these again or leave them out")


@dataclass(frozen=True, eq=False)
class Pool:
    """An objective ready to be maximised, its N rows in canonical order (`canonical_order`): whatever the order of
    the input, the solvers see the same arrays, and a lower position wins a tie.

    f(U) = mean of `linear` over U − `beta`·‖mean of ẑ over U‖².

    order: int64[N], the input row at each position; ties: uint64[N], the tie hash; vectors: float32[N, d], ẑ for the
    search; inverse_norms, mean (z̄, [d]), quality (raw, or None), scaled: float64; checksum: of the stored vectors.
    """

    objective: QualityDiversity
    order: np.ndarray
    ties: np.ndarray = field(repr=False)
    vectors: np.ndarray = field(repr=False)
    inverse_norms: np.ndarray = field(repr=False)
    mean: np.ndarray = field(repr=False)
    quality: np.ndarray | None = field(repr=False)
    scaled: np.ndarray = field(repr=False)
    diversity_scale: float
    checksum: str

    @property
    def n(self) -> int:
        return self.vectors.shape[0]

    @property
    def linear(self) -> np.ndarray:
        """float64[N]: λ·scaled quality."""
        return self.objective.lam * self.scaled

    @property
    def beta(self) -> float:
        """The weight of −‖mean ẑ‖²: (1−λ), over sd(2ẑ·z̄) where the scale is "zscore"."""
        return (1.0 - self.objective.lam) * self.diversity_scale

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """float64[k, d]: ẑ of the stored vectors at these positions."""
        return self.objective.embeddings[self.order[positions]].astype(np.float64) * self.inverse_norms[positions, None]

    def dots(self, positions: np.ndarray, v: np.ndarray) -> np.ndarray:
        """float64[k]: ẑ·v in float64 from the stored vectors."""
        parts = map_blocks(lambda a, b: np.einsum("ij,j->i", self.rows(positions[a:b]), v), positions.size)
        return np.concatenate(parts) if parts else np.zeros(0)

    def total(self, positions: np.ndarray) -> np.ndarray:
        """float64[d]: the sum of ẑ over these positions, in float64 from the stored vectors."""
        total = np.zeros(self.vectors.shape[1])
        for part in map_blocks(lambda a, b: self.rows(positions[a:b]).sum(axis=0), positions.size):
            total += part
        return total


def canonical_order(ids: Sequence[str], n: int) -> tuple[np.ndarray, np.ndarray]:
    """(int64[n] rows in the order of their ids' tie hash, uint64[n] those hashes): an order that the input's own
    order has no part in.

    Raises BadInput for ids that repeat and ValueError where there are not n of them.
    """
    if len(ids) != n:
        raise ValueError(f"{n} embeddings but {len(ids)} ids")
    hashes = keyed.hash64(ids, 0, "tie")
    order = np.argsort(hashes, kind="stable")
    hashes = hashes[order]
    if np.any(hashes[1:] == hashes[:-1]):
        # equal hashes are equal ids, or else two ids that collide and go by the id itself
        level = dict(zip(order.tolist(), hashes.tolist(), strict=True))
        order = np.array(sorted(level, key=lambda i: (level[i], ids[i])), np.int64)
        twice = sorted(int(b) for a, b in pairwise(order.tolist()) if ids[a] == ids[b])
        if twice:
            raise BadInput(
                f"{name_documents(ids, np.array(twice))}: the id is not unique; every document needs its own"
            )
    return order.astype(np.int64), hashes


def name_documents(ids: Sequence[str], rows: np.ndarray) -> str:
    """How an error names the documents at these rows: how many, and the first ids."""
    shown = ", ".join(f"{ids[i]!r} (row {i})" for i in rows[:_SHOWN].tolist())
    more = rows.size - min(rows.size, _SHOWN)
    return f"{rows.size} document{'s' if rows.size > 1 else ''}: {shown}{f' and {more} more' if more else ''}"
