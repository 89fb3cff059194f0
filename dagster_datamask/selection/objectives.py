"""What is maximised: a set function of the selected documents, with its scales.

Here: the joint objective (quality, diversity, further scores) and the pool a solver sees, which is the objective with
its scales resolved and its rows checked. Not here: how to maximise it (the solvers), what one diversity metric is
(`vectors`, `facility_location`, `disf`) and what a mask is worth to the last digit (`certificates`).
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import numpy as np

from dagster_datamask import keyed

T = TypeVar("T")

SCALES = ("minmax", "per_pool", "zscore", "raw")
# DataMask's pair-wise similarity, facility location, DiSF as its authors define it, and DiSF's second moment
METRICS = ("pws", "facility_location", "disf", "disf_second_moment")
# those for which the relaxed problem is concave, so that a bound comes with every pass
CONCAVE = ("pws", "disf_second_moment")

_BLOCK = 128
_SHOWN = 5
# what a float64 certificate of unit vectors is still good for
LARGEST_WEIGHT = 1e9
# below this the scores of a "varying" direction are rounding noise
CONSTANT = 1e-12


class BadInput(ValueError):
    """Input that cannot be selected from; the message names the documents and the remedy."""


def map_blocks(work: Callable[[int, int], T], n: int, block: int = _BLOCK) -> list[T]:
    """work(start, stop) over 0..n in fixed blocks, on all cores, results in block order.

    The blocks depend on n alone, so a sum taken over the results in order has the same bits on any number of cores.
    """
    starts = range(0, n, block)
    workers = min(len(os.sched_getaffinity(0)), 8)
    # a few hundred rows take less time than it takes to start a thread
    if n <= 1024 or len(starts) < 2 or workers == 1:
        return [work(a, min(a + block, n)) for a in starts]
    # a few pieces a worker, so that none waits long for the last one
    chunk = block * max(1, len(starts) // (4 * workers))
    with ThreadPoolExecutor(workers) as threads:

        def run(first: int) -> list[T]:
            return [work(a, min(a + block, n)) for a in range(first, min(first + chunk, n), block)]

        return [result for part in threads.map(run, range(0, n, chunk)) for result in part]


@dataclass(frozen=True, eq=False)
class Score:
    """A further score of every document, of which the objective takes `weight` times the scaled mean: an influence, a
    domain's share, whatever is to be had more of (or less, with a negative weight).

    values: float64[N], finite; constants: (lo, hi) for scale "minmax", which has to have them.
    """

    values: np.ndarray = field(repr=False)
    weight: float
    constants: tuple[float, float] | None = None


@dataclass(frozen=True, eq=False)
class Given:
    """What is chosen already, beside which the pool's mask is chosen: `size` documents (or tokens) with the mean of ẑ
    `mean` float64[d], the scaled mean quality `quality` and {further score: its scaled mean} `scores`. The objective is
    that of the union."""

    size: int
    mean: np.ndarray = field(repr=False)
    quality: float = 0.0
    scores: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class QualityDiversity:
    """f(U) = λ·quality(U) + (1−λ)·diversity(U) + Σ weight·score(U) over the N documents of one pool (DataMask,
    arXiv 2512.24265, Eq. 12; further metrics enter the same way).

    quality(U) is the mean scaled score. diversity(U) = Σ weight·metric(U) over `diversity`:

    - "pws": −‖mean of ẑ over U‖², the negated mean pair-wise cosine;
    - "facility_location": (1/N) Σ_x max(0, max over u ∈ U of ẑ_x·ẑ_u);
    - "disf": −10⁻⁴ Σ_{p≠q} C_pq² with C the correlations of U's feature columns (arXiv 2504.20644);
    - "disf_second_moment": −‖mean of ẑẑᵀ over U‖_F², the variant of it with a certificate.

    ẑ is the stored vector divided by its own norm in float64. Under a token budget every mean is weighted by tokens.

    embeddings: float16, float32 or float64 [N, d], finite and not zero; quality: float64[N], or None where lam is 0;
    lam: λ in [0, 1]. `scale` turns scores into quality:

    - "minmax": (Q − lo)/(hi − lo) with the given `constants` (lo, hi), linear and not clipped, so that every pool,
      split and scope has the same objective;
    - "per_pool": the same with the pool's own least and greatest score;
    - "zscore": each term divided by its standard deviation over the pool, sd(Q) for a score and, for pws, sd(2ẑ·z̄),
      the spread of the diversity's linear scores at the pool's mean; the other metrics have no such closed form;
    - "raw": Q as it is.

    A term that is constant over the pool scales to 0. λ = 0 ignores quality altogether: it may be missing or NaN.
    `given` is what the mask is to be chosen beside (pws alone).

    Raises ValueError for shapes, types, weights, λ or a scale that do not fit together; what the values hold is checked
    when the pool is prepared, where the ids are known.
    """

    embeddings: np.ndarray
    quality: np.ndarray | None
    lam: float
    scale: str = "minmax"
    constants: tuple[float, float] | None = None
    diversity: Mapping[str, float] = field(default_factory=lambda: {"pws": 1.0})
    scores: Mapping[str, Score] = field(default_factory=dict)
    given: Given | None = None

    def __post_init__(self) -> None:
        z = self.embeddings
        if z.ndim != 2 or z.dtype not in (np.float16, np.float32, np.float64):
            raise ValueError(f"embeddings must be float16, float32 or float64 [N, d], not {z.dtype} {list(z.shape)}")
        if z.shape[0] and not z.shape[1]:
            raise ValueError("embeddings have no dimensions (d = 0)")
        check_terms(self.lam, self.scale, self.constants, self.diversity)
        if self.quality is not None and self.quality.shape != z.shape[:1]:
            raise ValueError(f"{z.shape[0]} embeddings but quality of shape {list(self.quality.shape)}")
        if self.lam > 0 and self.quality is None:
            raise ValueError(f"λ = {self.lam} weighs quality, and there is none; give scores or set λ to 0")
        for name, score in self.scores.items():
            if score.values.shape != z.shape[:1]:
                raise ValueError(f"{z.shape[0]} embeddings but score {name!r} of shape {list(score.values.shape)}")
            if not np.isfinite(score.weight):
                raise ValueError(f"the weight of score {name!r} is not finite: {score.weight}")
            if self.scale == "minmax" and score.constants is None:
                raise ValueError(f"scale 'minmax' needs the constants (lo, hi) of score {name!r}; or use 'per_pool'")
            _check_constants(score.constants, f"score {name!r}")
        if self.given is not None:
            if {name for name, weight in self.diversity.items() if weight} - {"pws"} or self.scale == "zscore":
                raise ValueError("what is given already is taken into account by pws alone, and not under 'zscore'")
            size, mean, quality = self.given.size, self.given.mean, self.given.quality
            if size != int(size) or size < 0 or mean.shape != z.shape[1:]:
                raise ValueError(
                    f"given: {size} documents with a mean of shape {list(mean.shape)}, and the embeddings have "
                    f"{z.shape[1]} dimensions"
                )
            if not (np.isfinite(mean).all() and np.isfinite(quality) and float(mean @ mean) <= 1.0 + 1e-6):
                raise ValueError(
                    "given: the mean of unit vectors and the mean quality are finite, the mean of length 1 at most"
                )

    def scaled(
        self, values: np.ndarray, constants: tuple[float, float] | None, order: np.ndarray, what: str
    ) -> np.ndarray:
        """float64[N]: scores on the objective's scale. order: the canonical order, in which sums are taken.

        Raises BadInput for scores too large or too close together to be brought to the scale.
        """
        if not values.size:
            return values
        lo, hi = float(values.min()), float(values.max())
        with np.errstate(all="ignore"):
            spread = float(np.std(values[order])) if self.scale == "zscore" and hi > lo else 1.0
            offset, factor = score_scale(self.scale, constants, lo, hi, spread)
            scaled = (values - offset) * factor
        if not np.isfinite(scaled).all() or (spread in (0.0, np.inf)):
            raise BadInput(
                f"the {what} lies in {lo!r} to {hi!r}, which cannot be brought to scale {self.scale!r}; divide or "
                "multiply it by a constant"
            )
        return scaled


def check_terms(lam: float, scale: str, constants: tuple[float, float] | None, diversity: Mapping[str, float]) -> None:
    """Raise ValueError for a λ, scale, constants or weights that make no objective."""
    if not 0 <= lam <= 1:
        raise ValueError(f"λ must lie in [0, 1], not {lam}")
    if scale not in SCALES:
        raise ValueError(f"scale {scale!r} is none of: {', '.join(SCALES)}")
    unknown = [name for name in diversity if name not in METRICS]
    if unknown:
        raise ValueError(f"diversity metric {unknown[0]!r} is none of: {', '.join(METRICS)}")
    for name, weight in diversity.items():
        if not 0 <= weight <= LARGEST_WEIGHT:
            raise ValueError(f"the weight of {name} must lie in 0 to {LARGEST_WEIGHT:g}, not {weight}")
        if weight and scale == "zscore" and name != "pws" and lam < 1:
            raise ValueError(f"scale 'zscore' has a closed form for pws alone, not for {name}; use another scale")
    if lam > 0 and scale == "minmax" and constants is None:
        raise ValueError("scale 'minmax' needs its frozen constants (q_lo, q_hi); give them, or use 'per_pool'")
    _check_constants(constants, "quality")


def _check_constants(constants: tuple[float, float] | None, what: str) -> None:
    if constants is not None:
        lo, hi = constants
        if not (np.isfinite(lo) and np.isfinite(hi) and lo <= hi):
            raise ValueError(f"constants (q_lo, q_hi) = ({lo}, {hi}) of {what} are not finite and in order")


def score_scale(
    scale: str, constants: tuple[float, float] | None, lo: float, hi: float, spread: float
) -> tuple[float, float]:
    """(offset, factor) with scaled = (Q − offset)·factor, for a pool's least and greatest Q and their sd."""
    if scale == "minmax" and constants is not None:
        lo, hi = constants
    # a constant score cannot tell documents apart, whatever its level
    if hi == lo or (scale == "minmax" and constants is None):
        return lo, 0.0
    if scale == "raw":
        return 0.0, 1.0
    if scale == "zscore":
        return 0.0, 1.0 / spread if spread else np.inf
    return lo, 1.0 / (hi - lo)


def finite_scores(ids: Sequence[str], values: np.ndarray, what: str) -> np.ndarray:
    """float64[N]: the values. Raises BadInput naming the documents where they are not finite."""
    values = np.asarray(values, np.float64)
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise BadInput(f"{name_documents(ids, bad)}: the {what} is not finite; leave these out or score them again")
    return values


def canonical_order(ids: Sequence[str], n: int) -> tuple[np.ndarray, np.ndarray]:
    """(int64[n] rows in the order of their ids' tie hash, uint64[n] those hashes): an order that the input's own
    order has no part in.

    Raises BadInput for ids that repeat and ValueError where there are not n of them.
    """
    if len(ids) != n:
        raise ValueError(f"{n} embeddings but {len(ids)} ids")
    if not all(issubclass(kind, str) for kind in set(map(type, ids))):
        other = next(i for i in ids if not isinstance(i, str))
        raise ValueError(f"ids are texts, and {other!r} is of type {type(other).__name__}; write str(id)")
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
