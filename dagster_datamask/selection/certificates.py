"""What a mask is worth, and how far from the best mask it can be at most.

Here: the float64 evaluation of a mask, the upper bound of DataMask's concave relaxation, and the certificate made of
both. Not here: the search for a good mask or for the point where the bound is smallest (`certified`).

For f(U) = mean of l over U − β‖mean of ẑ over U‖² and any vector v, −‖m‖² ≤ ‖v‖² − 2 m·v gives, for every U of S
documents, f(U) ≤ β‖v‖² + the mean of the S largest l_i − 2β ẑ_i·v.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dagster_datamask.selection.objectives import Pool, map_blocks
from dagster_datamask.selection.sampling import top_s

_HALF_ULP_32 = 2.0**-24
_HALF_ULP_64 = 2.0**-53
# rows summed in one go by `Pool.total`; then as many more additions as there are blocks
_SUMMED = 128
# a share of less than this is a share of nothing
_NO_GAIN = 1e-9


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A mask's worth in float64: value = λ·quality + (1−λ)·diversity.

    quality: mean scaled score, and quality_raw: mean score as given (None where there is none to average);
    diversity: −‖mean ẑ‖² in the objective's scale; mean_vector: float64[d], the mean of ẑ over the mask.
    """

    value: float
    quality: float | None
    quality_raw: float | None
    diversity: float
    mean_vector: np.ndarray = field(repr=False)


@dataclass(frozen=True, eq=False)
class Certificate:
    """How good a mask is, for its feasible set.

    upper_bound: no mask of the feasible set is worth more, float rounding included; numerical_error: what rounding
    can have moved value and bound by together, already added to the bound; gap = upper_bound − value ≥ 0;
    baseline: f₀, the expectation over uniform masks of the same size; share: (value − f₀)/(upper_bound − f₀), None
    where upper_bound − f₀ < 1e-9; feasible_set: what the bound is about; reason: why a figure is missing;
    point: float64[d], the v at which the bound was taken.
    """

    upper_bound: float
    numerical_error: float
    gap: float
    share: float | None
    baseline: float
    feasible_set: dict[str, Any]
    reason: str | None
    point: np.ndarray = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """The certificate as JSON-able values, without the point."""
        return {
            "upper_bound": self.upper_bound,
            "numerical_error": self.numerical_error,
            "gap": self.gap,
            "share": self.share,
            "baseline": self.baseline,
            "feasible_set": self.feasible_set,
            "reason": self.reason,
        }


class NegativeGap(ArithmeticError):
    """A mask is worth more than its upper bound: a fault in this module, never a rounding matter."""


def evaluate(pool: Pool, positions: np.ndarray) -> Evaluation:
    """f of the mask at these positions, in float64 from the stored vectors. The empty mask is worth 0."""
    size, lam = positions.size, pool.objective.lam
    if not size:
        return Evaluation(0.0, None, None, 0.0, np.zeros(pool.vectors.shape[1]))
    mean = pool.total(positions) / size
    diversity = -pool.diversity_scale * float(mean @ mean)
    quality = None if pool.quality is None else math.fsum(pool.scaled[positions]) / size
    raw = None if pool.quality is None else math.fsum(pool.quality[positions]) / size
    value = (1.0 - lam) * diversity + (lam * quality if lam > 0 and quality is not None else 0.0)
    return Evaluation(value, quality, raw, diversity, mean)


def upper_bound(pool: Pool, size: int, v: np.ndarray) -> float:
    """β‖v‖² + the mean of the `size` largest linear scores, in float64 from the stored vectors; size ≥ 1.

    Only the documents that a float32 pass leaves in question are scored again: one whose float32 score lies more than
    twice that score's largest rounding error below the size-th best cannot be among the best.
    """
    beta, linear = pool.beta, pool.linear
    if not beta:
        return math.fsum(linear[top_s(linear, size)]) / size
    rough = linear - 2.0 * beta * search_dots(pool, v)
    worst = np.partition(rough, pool.n - size)[pool.n - size]
    candidates = np.flatnonzero(rough >= worst - 2.0 * _rough_error(pool, v))
    scores = linear[candidates] - 2.0 * beta * pool.dots(candidates, v)
    best = scores[top_s(scores, size)]
    return beta * float(v @ v) + math.fsum(best) / size


def baseline(pool: Pool, size: int) -> float:
    """f₀: the expected value of a uniform random mask of `size` documents of the pool, in closed form."""
    return uniform_value(pool.mean, pool.n, size, math.fsum(pool.linear) / pool.n if size else 0.0, pool.beta)


def uniform_value(mean: np.ndarray, n: int, size: int, linear: float, beta: float) -> float:
    """The expected value of a uniform mask of `size` of n unit vectors with mean `mean` and mean linear score `linear`.

    E‖mean ẑ‖² = (1/S)·(1 − c) + c where c = (N‖z̄‖² − 1)/(N − 1) is the mean cosine of two distinct documents.
    """
    if not size:
        return 0.0
    cosine = (n * float(mean @ mean) - 1.0) / (n - 1) if n > 1 else 1.0
    return linear - beta * ((1.0 - cosine) / size + cosine)


def certify(pool: Pool, evaluation: Evaluation, size: int, v: np.ndarray) -> Certificate:
    """The certificate of a mask of `size` documents of the pool, with the bound taken at v.

    Raises NegativeGap where the value exceeds the bound.
    """
    feasible = {
        "documents": pool.n,
        "budget": size,
        "vectors": pool.checksum,
        "dtype": pool.objective.embeddings.dtype.name,
        "lambda": pool.objective.lam,
        "scale": pool.objective.scale,
        "constants": list(pool.objective.constants) if pool.objective.constants is not None else None,
    }
    if not size:
        return Certificate(
            0.0, 0.0, 0.0, None, 0.0, feasible, "budget 0: the empty mask is the only one", np.zeros_like(v)
        )
    error = numerical_error(pool, size, v)
    bound = upper_bound(pool, size, v) + error
    gap = bound - evaluation.value
    if not gap >= 0:
        raise NegativeGap(
            f"value {evaluation.value!r} exceeds the upper bound {bound!r} (rounding allows {error!r}); "
            "the certificate is wrong, please report this"
        )
    start = baseline(pool, size)
    if bound - start < _NO_GAIN:
        reason = "no share: no mask is better than a uniform one by 1e-9"
        return Certificate(bound, error, gap, None, start, feasible, reason, v)
    share = (evaluation.value - start) / (bound - start)
    return Certificate(bound, error, gap, share, start, feasible, None, v)


def numerical_error(pool: Pool, size: int, v: np.ndarray) -> float:
    """The most that float64 rounding can move value and bound by, together, against exact arithmetic.

    Standard forward bounds, γ_k = k·u/(1 − k·u) for k operations: a normalised entry, d + 4; a sum of `size` rows in
    blocks, block + number of blocks; a dot product of d, d. Sums of scores are exact to their last rounding.
    """
    d = pool.vectors.shape[1]
    norm = float(np.linalg.norm(v))
    largest = float(np.abs(pool.linear).max(initial=0.0))
    mean = _gamma(d + 4 + _SUMMED + size // _SUMMED + 2, _HALF_ULP_64)
    # ‖ẑ‖ ≤ 1 bounds the norm of the mean of absolute values, and ‖mean‖ ≤ 1 what its error is multiplied by
    value = pool.beta * (2.0 * mean + mean * mean + _gamma(d + 4, _HALF_ULP_64))
    bound = dot_error(d, norm, pool.beta)
    last = 8.0 * _HALF_ULP_64 * (largest + pool.beta * (1.0 + norm) ** 2)
    return value + bound + last


def dot_error(d: int, norm: float, beta: float) -> float:
    """The most that float64 rounding moves β‖v‖² and 2β ẑ·v by, together, for a v of length `norm`, [d]."""
    dots = 2.0 * beta * norm * _gamma(2 * d + 8, _HALF_ULP_64)
    return dots + beta * norm * norm * _gamma(d + 4, _HALF_ULP_64)


def search_dots(pool: Pool, v: np.ndarray) -> np.ndarray:
    """float32[N]: ẑ·v in float32, one pass over the embeddings. A row's result depends on nothing but the row."""
    narrow = v.astype(np.float32)
    result = np.empty(pool.n, np.float32)

    def dot(start: int, stop: int) -> None:
        np.einsum("ij,j->i", pool.vectors[start:stop], narrow, out=result[start:stop])

    map_blocks(dot, pool.n, block=2048)
    return result


def _rough_error(pool: Pool, v: np.ndarray) -> float:
    """The most by which a score from `search_dots` can differ from the float64 one."""
    d = pool.vectors.shape[1]
    # ẑ is scaled and, like v, rounded to float32, then d products are summed in any order
    share = _gamma(d + 8, _HALF_ULP_32)
    # products below the smallest normal number are flushed
    flushed = d * 2.0**-120
    return 2.0 * pool.beta * (float(np.linalg.norm(v)) * share + flushed) + 1e-12


def _gamma(k: int, half_ulp: float) -> float:
    return k * half_ulp / (1.0 - k * half_ulp)
