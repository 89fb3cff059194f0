"""Intervals: rank correlations of resampled trajectories, and means over runs that are nested in worlds.

Here: numbers to intervals. Not here: which numbers (`estimates`).
"""

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.influence_study.claims import Estimate
from dagster_datamask import keyed

RESAMPLES = 10_000
# resamples that are ranked at once
_BLOCK = 100


def multiplicities(count: int, resamples: int, *key: str | int) -> np.ndarray:
    """int16[resamples, count]: how often each of `count` trajectories is drawn, keyed; the first row is one each: the
    sample itself."""
    drawn = keyed.rng(0, "study-resample", *key).multinomial(count, np.full(count, 1 / count), size=resamples)
    return np.concatenate([np.ones((1, count), np.int16), drawn.astype(np.int16)])


def resampled_spearman(x: np.ndarray, y: np.ndarray, times: np.ndarray) -> np.ndarray:
    """float64[B]: Spearman's ρ of x and y (float64[m, T]) with trajectory k taken times[b, k] times (int[B, m]).

    What is NaN in either counts for nothing. Equal values have the mean of their ranks. NaN where nothing varies.
    """
    known = np.isfinite(x) & np.isfinite(y)
    rows = np.nonzero(known)[0]
    ranked = [_Ranks(values[known]) for values in (x, y)]
    found = np.empty(len(times))
    for a in range(0, len(times), _BLOCK):
        weights = times[a : a + _BLOCK, rows].astype(np.float64)
        middle = (weights.sum(axis=1, keepdims=True) + 1) / 2
        left, right = (ranks.of(weights) - middle for ranks in ranked)
        products = weights * right
        with np.errstate(invalid="ignore", divide="ignore"):
            found[a : a + _BLOCK] = (left * products).sum(axis=1) / np.sqrt(
                (weights * left * left).sum(axis=1) * (products * right).sum(axis=1)
            )
    return found


def resampled_within(x: np.ndarray, y: np.ndarray, times: np.ndarray) -> np.ndarray:
    """float64[B]: the mean over positions of each position's own ρ."""
    columns = [resampled_spearman(x[:, t : t + 1], y[:, t : t + 1], times) for t in range(x.shape[1])]
    return np.nanmean(columns, axis=0)


class _Ranks:
    """Ranks of values that are each taken several times."""

    def __init__(self, values: np.ndarray) -> None:
        self.order = np.argsort(values, kind="stable")
        ordered = values[self.order]
        new = np.concatenate([[True], ordered[1:] != ordered[:-1]]) if values.size else np.zeros(0, bool)
        self.starts = np.flatnonzero(new)
        self.back = np.empty(values.size, np.int64)
        self.back[self.order] = np.cumsum(new) - 1

    def of(self, weights: np.ndarray) -> np.ndarray:
        """float64[B, n]: each value's mean rank where it is taken weights[b, ·] times."""
        groups = np.add.reduceat(weights[:, self.order], self.starts, axis=1)
        ends = np.cumsum(groups, axis=1)
        return (ends - (groups - 1) / 2)[:, self.back]


def resampled_mean(values: Sequence[float] | np.ndarray, resamples: int, *key: str | int) -> np.ndarray:
    """float64[1 + resamples]: means of values that are resampled, the first of the sample itself."""
    sample = np.asarray(values, np.float64)
    return multiplicities(sample.size, resamples, *key) @ sample / sample.size


def interval(replicates: np.ndarray, units: int, over: str) -> Estimate:
    """The first replicate, which is the sample's own, and the middle 95 % of the others."""
    low, high = np.nanquantile(replicates[1:], [0.025, 0.975])
    return Estimate(float(replicates[0]), float(low), float(high), units, over)


def nested(runs: Mapping[tuple[int, int], np.ndarray], over: str, key: str) -> Estimate:
    """The mean over runs (world, seed), with worlds, seeds within a world and what is within a run resampled together.

    runs: float64[1 + B] replicates of each, the first its own; of one number where nothing within a run is resampled.
    """
    worlds: dict[int, list[np.ndarray]] = {}
    for (world, _), replicates in sorted(runs.items()):
        worlds.setdefault(world, []).append(replicates)
    groups = list(worlds.values())
    sizes = {len(replicates) for replicates in runs.values()} - {1}
    resamples = max(sizes, default=1 + RESAMPLES) - 1
    rng = keyed.rng(0, "study-nested", key)
    found = np.zeros(1 + resamples)
    found[0] = np.mean([np.mean([replicates[0] for replicates in group]) for group in groups])
    for drawn in rng.integers(len(groups), size=(len(groups), resamples)):
        for g, group in enumerate(groups):
            at = np.flatnonzero(drawn == g) + 1
            table = np.array([np.broadcast_to(replicates, 1 + resamples) for replicates in group])
            for _ in group:
                found[at] += table[rng.integers(len(group), size=at.size), at] / (len(group) * len(groups))
    return interval(found, len(runs), over)


def slope(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> float:
    return float(np.polyfit(np.asarray(x, np.float64), np.asarray(y, np.float64), 1)[0])
