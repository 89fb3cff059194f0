"""The quality of a document from its three scores, and the frozen constants taken from a sample of it.

DataMask (arXiv 2512.24265): Q = DCLM + Edu + Wiki in 0…15, so 0…5 each; 5·p for the two probabilities is
inferred from its Table 7. Where the sum is not what one wants, each part is replaced by its standing in a frozen
sample, by z-score or by rank, on the same 0…15. Here belong: these combinations, missing parts, quantiles. Not here:
ties and cuts over documents (`selection`), and whether the scorers agree (`agreement`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

PARTS = ("dclm", "edu", "wiki")
PART_MAX = 5.0
QUALITY_MAX = 15.0
LOW_QUANTILE = 0.001
HIGH_QUANTILE = 0.999
# scores that differ by less than this share of themselves are one score: scorers compute in single precision
_EQUAL = 1e-6

Combination = Literal["sum", "zscore", "rank"]
Missing = Literal["null", "others"]


@dataclass(frozen=True)
class Standard:
    """The scores of a recorded sample that a document's are measured against: float64 by part, sorted, on 0…5.

    zscore: a part counts 2.5 + (5/6)·z, so that quality = 7.5 + 2.5·z̄ for the weighted mean z̄ of (x − μ)/σ: three
    standard deviations below and above the sample's mean are 0 and 15. The map is linear and not clipped, for the
    objective takes mean quality, and a bent or cut scale would prefer other masks; few documents lie outside 0…15. A
    part that is constant in the sample, but for the last digits of single precision, has no σ and counts 2.5.

    rank: a part counts 5·F for the share F of the sample below it, and half the share equal to it (the mid-rank), so
    quality is 15 times a weighted mean quantile. What lies beyond the sample counts 0 or 5.
    """

    combination: Combination
    scores: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, combination: Combination, parts: Mapping[str, np.ndarray]) -> "Standard":
        """From float64[n] scores by part as the scorers give them; NaN is a score that is missing, and left out."""
        return cls(
            combination,
            {part: np.sort(_scaled(part, column[np.isfinite(column)])) for part, column in parts.items()},
        )

    def told(self) -> list[dict[str, float | str | None]]:
        """A record of each part's sample on 0…5: `scorer, documents, mean, sd, median`; None of no documents."""
        return [
            {
                "scorer": part,
                "documents": len(sample),
                "mean": float(sample.mean()) if len(sample) else None,
                "sd": _spread(sample) if len(sample) else None,
                "median": float(np.median(sample)) if len(sample) else None,
            }
            for part, sample in self.scores.items()
        ]

    def place(self, part: str, scaled: np.ndarray) -> np.ndarray:
        """What each of float64[n] scores on 0…5 counts; NaN stays. Raises ValueError where the sample has no score."""
        sample = self.scores[part]
        if not len(sample):
            raise ValueError(
                f"{part}: no document of the calibration sample has a score to measure others against; raise "
                "score.calibration_sample or set score.combine = sum"
            )
        if self.combination == "zscore":
            spread = _spread(sample)
            z = (scaled - sample.mean()) / spread if spread > 0 else np.where(np.isnan(scaled), np.nan, 0.0)
            return PART_MAX / 2 + PART_MAX / 6 * z
        below, up_to = (np.searchsorted(sample, scaled, side) for side in ("left", "right"))
        return np.where(np.isnan(scaled), np.nan, PART_MAX * (below + up_to) / (2 * len(sample)))


def _spread(ordered: np.ndarray) -> float:
    """σ of one or more sorted scores, and 0 of a constant, which rounding of its mean would give one."""
    constant = np.ptp(ordered) <= _EQUAL * np.abs(ordered).max()
    return 0.0 if constant else float(ordered.std())


def combine(
    dclm: np.ndarray,
    edu: np.ndarray,
    wiki: np.ndarray,
    *,
    reasons: Mapping[str, Sequence[str | None]],
    weights: tuple[float, float, float] = (1.0, 1.0, 1.0),
    standard: Standard | None = None,
    missing: Missing = "null",
) -> tuple[np.ndarray, list[str | None]]:
    """Continuous quality float64[n] and why a part of it, or all of it, is missing.

    dclm, wiki: float64[n] probabilities; edu: float64[n] on Edu's scale, clamped to [0, 5] here and only
    here; NaN where `reasons[part]` has an entry. weights: non-negative; the weighted sum is scaled so that
    its maximum stays 15. standard: None for the sum, in [0, 15]. A missing part of positive weight is named in the
    reason, `dclm:no_tokens`, several joined by commas; with missing = null it makes the quality NaN, with others the
    quality is the weighted mean of the parts that there are, three times, and NaN where there is none.

    Raises ValueError naming part, row and value: shapes that differ, a NaN without a reason or a reason with
    a score, a probability outside [0, 1], weights that are negative, not finite, or all zero.
    """
    if len(weights) != 3 or not all(np.isfinite(w) and w >= 0 for w in weights) or sum(weights) <= 0:
        raise ValueError(f"quality weights {weights} must be three non-negative numbers, not all zero")
    columns = dict(zip(PARTS, (np.asarray(c, dtype=np.float64) for c in (dclm, edu, wiki)), strict=True))
    if sorted(reasons) != sorted(PARTS):
        raise ValueError(f"reasons must name {', '.join(PARTS)}, not {', '.join(sorted(reasons))}")
    n = len(columns["dclm"])
    total, weighed = np.zeros(n), np.zeros(n)
    why: dict[int, list[str]] = {}
    for (part, column), weight in zip(columns.items(), weights, strict=True):
        if column.shape != (n,) or len(reasons[part]) != n:
            raise ValueError(
                f"{part}: {list(column.shape)} scores and {len(reasons[part])} reasons, but dclm has {n} scores"
            )
        absent = np.array([reason is not None for reason in reasons[part]], dtype=bool)
        wrong = np.flatnonzero(absent == np.isfinite(column))
        if wrong.size:
            row = int(wrong[0])
            raise ValueError(f"{part}, row {row}: score {column[row]} with reason {reasons[part][row]!r}")
        if part != "edu":
            outside = np.flatnonzero(~absent & ((column < 0) | (column > 1)))
            if outside.size:
                row = int(outside[0])
                raise ValueError(f"{part}, row {row}: {column[row]} is not a probability in [0, 1]")
        if weight == 0:
            continue
        for row in np.flatnonzero(absent).tolist():
            why.setdefault(int(row), []).append(f"{part}:{reasons[part][row]}")
        scaled = _scaled(part, column)
        counts = scaled if standard is None else standard.place(part, scaled)
        total += np.where(absent, 0.0, weight * counts)
        weighed += np.where(absent, 0.0, weight)
    quality = total * (3.0 / np.where(weighed > 0, weighed, np.nan))
    if standard is None or standard.combination == "rank":
        quality = np.minimum(quality, QUALITY_MAX)
    joined: list[str | None] = [None] * n
    for row, parts in why.items():
        joined[row] = ",".join(parts)
        if missing == "null":
            quality[row] = np.nan
    return quality, joined


def _scaled(part: str, column: np.ndarray) -> np.ndarray:
    """A part on 0…5."""
    return np.clip(column, 0.0, PART_MAX) if part == "edu" else PART_MAX * column


@dataclass(frozen=True)
class Calibration:
    """Constants frozen from a sample of qualities: q_lo and q_hi (quantiles 0.001 and 0.999, the ends of the
    linear, unclipped min-max map) and prune_threshold, the quality below which the share prune_ratio of the
    sample lies: documents with quality ≥ prune_threshold survive. n: scored sample rows; n_missing: rows
    without a quality."""

    q_lo: float
    q_hi: float
    prune_ratio: float
    prune_threshold: float
    n: int
    n_missing: int


def calibrate(sample_quality: np.ndarray, prune_ratio: float = 0.45) -> Calibration:
    """Calibration of float64[n] qualities; NaN is a row without a quality, counted and left out.

    Quantiles interpolate linearly, except the prune threshold, which is a value of the sample: the smallest
    one with at least ⌊prune_ratio·n + ½⌋ rows before it in sorted order. Raises ValueError for an infinite
    value (row named), for no scored row, and for a ratio outside [0, 1).
    """
    sample = np.asarray(sample_quality, dtype=np.float64)
    if not 0 <= prune_ratio < 1:
        raise ValueError(f"prune ratio {prune_ratio} must lie in [0, 1)")
    if sample.ndim != 1:
        raise ValueError(f"a quality sample must be one column, not of shape {list(sample.shape)}")
    infinite = np.flatnonzero(np.isinf(sample))
    if infinite.size:
        raise ValueError(f"quality sample, row {int(infinite[0])}: {sample[infinite[0]]} is not finite")
    scored = np.sort(sample[~np.isnan(sample)])
    if not scored.size:
        raise ValueError(
            f"none of the {sample.size} sampled rows has a quality; check the scorers' reasons or sample more shards"
        )
    q_lo, q_hi = np.quantile(scored, [LOW_QUANTILE, HIGH_QUANTILE])
    threshold = scored[min(int(prune_ratio * scored.size + 0.5), scored.size - 1)]
    return Calibration(
        float(q_lo),
        float(q_hi),
        prune_ratio,
        float(threshold),
        int(scored.size),
        int(sample.size - scored.size),
    )
