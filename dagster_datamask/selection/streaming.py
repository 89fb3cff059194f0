"""Upper bounds over pools that never sit in memory.

Here: the bound of `certificates`, taken in one pass over blocks. Not here: where blocks come from, and which point to
take the bound at (the mean vector of what was selected is a good one).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from dagster_datamask.selection.certificates import dot_error

Blocks = Callable[[], Iterable[tuple[np.ndarray, np.ndarray | None]]]

_ROWS = 256


@dataclass(frozen=True)
class UnionBound:
    """upper_bound: no mask of the budget from the whole pool is worth more, slack and rounding included; slack: the
    most by which the histogram can have raised it; numerical_error: likewise for float64 rounding; rows: documents
    seen."""

    upper_bound: float
    slack: float
    numerical_error: float
    rows: int


def union_bound(
    blocks: Blocks,
    v: np.ndarray,
    *,
    lam: float,
    budget: int,
    constants: tuple[float, float] | None = None,
    resolution: float = 2.0**-18,
) -> UnionBound:
    """(1−λ)‖v‖² + the mean of the `budget` largest λ·Q_i − 2(1−λ) ẑ_i·v over all blocks, never too small.

    `blocks()` yields (embeddings [k, d], scores [k] or None) and is read once; v: float64[d]. Quality is scaled by
    `constants` (q_lo, q_hi) as in "minmax", or left raw where there are none; λ = 0 needs no scores. The scores are
    counted in a histogram of bins `resolution` wide that keeps each bin's exact sum, so only the bin that the cut
    falls into is uncertain, by at most its width times its part of the budget. Memory is that of the bins in use.

    Raises ValueError for rows that are not finite or have no direction, and for a budget above the rows seen.
    """
    if not 0 <= lam <= 1:
        raise ValueError(f"λ must lie in [0, 1], not {lam}")
    offset, factor = 0.0, 1.0
    if constants is not None:
        lo, hi = constants
        if not (np.isfinite(lo) and np.isfinite(hi) and lo <= hi):
            raise ValueError(f"constants (q_lo, q_hi) = ({lo}, {hi}) are not finite and in order")
        offset, factor = lo, 1.0 / (hi - lo) if hi > lo else 0.0
    beta = 1.0 - lam
    counts: dict[int, int] = {}
    sums: dict[int, float] = {}
    rows, largest = 0, 0.0
    for embeddings, quality in blocks():
        linear = _linear(quality, embeddings.shape[0], lam, offset, factor, rows)
        largest = max(largest, float(np.abs(linear).max(initial=0.0)))
        for start in range(0, embeddings.shape[0], _ROWS):
            part = slice(start, start + _ROWS)
            scores = linear[part] - 2.0 * beta * _dots(embeddings[part], v, rows + start)
            bins, at = np.unique(np.floor(scores / resolution).astype(np.int64), return_inverse=True)
            adds = np.bincount(at, weights=scores, minlength=bins.size)
            for bin_, count, add in zip(bins.tolist(), np.bincount(at).tolist(), adds.tolist(), strict=True):
                counts[bin_] = counts.get(bin_, 0) + count
                sums[bin_] = sums.get(bin_, 0.0) + add
        rows += embeddings.shape[0]
    if not 0 <= budget <= rows:
        raise ValueError(f"budget {budget} is not between 0 and the {rows} documents of the pool")
    if not budget:
        return UnionBound(0.0, 0.0, 0.0, rows)
    best, slack, left = [], 0.0, budget
    for bin_ in sorted(counts, reverse=True):
        if counts[bin_] <= left:
            best.append(sums[bin_])
            left -= counts[bin_]
        else:
            low = bin_ * resolution
            # the best `left` of the bin: below its upper edge, and what is not taken is above its lower one
            most = min(left * (low + resolution), sums[bin_] - (counts[bin_] - left) * low)
            least = left * sums[bin_] / counts[bin_]
            best.append(most)
            slack = max(0.0, most - least) / budget
            left = 0
        if not left:
            break
    norm = float(np.linalg.norm(v))
    # adding up n scores one after another loses at most n roundings of the running sum, relative to the sum of sizes
    summing = (rows + 8) * 2.0**-53 * (largest + 2.0 * beta * norm)
    error = dot_error(v.size, norm, beta) + 8.0 * 2.0**-53 * (largest + beta * (1.0 + norm) ** 2) + summing
    bound = beta * float(v @ v) + math.fsum(best) / budget + error
    return UnionBound(bound, slack, error, rows)


def _linear(quality: np.ndarray | None, n: int, lam: float, offset: float, factor: float, first: int) -> np.ndarray:
    if not lam:
        return np.zeros(n)
    if quality is None:
        raise ValueError(f"λ = {lam} weighs quality, and the block at row {first} has none")
    bad = np.flatnonzero(~np.isfinite(quality))
    if bad.size:
        raise ValueError(f"the score of row {first + int(bad[0])} is not finite")
    return lam * (quality.astype(np.float64) - offset) * factor


def _dots(embeddings: np.ndarray, v: np.ndarray, first: int) -> np.ndarray:
    stored = embeddings.astype(np.float64)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        dots = np.einsum("ij,j->i", stored, v) / np.sqrt(np.einsum("ij,ij->i", stored, stored))
    bad = np.flatnonzero(~(np.isfinite(dots) & stored.any(axis=1)))
    if bad.size:
        raise ValueError(f"the embedding of row {first + int(bad[0])} is not finite or has no direction")
    return dots
