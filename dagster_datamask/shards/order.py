"""Exact cuts in a total order over more values than fit in memory.

The order everywhere is: value descending, then the keyed hash of the id ascending. A cut is found by radix
selection: each pass counts 65,536 bins of the still undecided keys, so n documents cost at most eight passes over
16 bytes each and one histogram of memory, and usually three or four.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from dagster_datamask.keyed import hash64

_BITS = 16
_BINS = 1 << _BITS


@dataclass(frozen=True)
class Cut:
    """The last key that is still inside: `inside(keys)` is true for exactly the `count` first in the order."""

    value: int
    tie: int
    count: int

    def inside(self, values: np.ndarray, ties: np.ndarray) -> np.ndarray:
        """bool[n] for `descending(scores)` and tie hashes, both uint64[n]."""
        if self.count == 0:
            return np.zeros(len(values), dtype=bool)
        first = np.uint64(self.value)
        return (values < first) | ((values == first) & (ties <= np.uint64(self.tie)))


def descending(scores: np.ndarray) -> np.ndarray:
    """uint64[n] keys whose ascending order is the descending order of float64 scores (-0.0 equals 0.0).

    Raises ValueError naming the first score that is not finite: it has no place in the order.
    """
    scores = np.asarray(scores, dtype=np.float64)
    if not np.isfinite(scores).all():
        first = int(np.argmin(np.isfinite(scores)))
        raise ValueError(f"score {first} of {len(scores)} is {scores[first]}, not finite, and cannot be ranked")
    bits = (scores + 0.0).view(np.uint64)
    negative = bits >> np.uint64(63) == 1
    ascending = np.where(negative, ~bits, bits | np.uint64(1 << 63))
    return ~ascending


def tie_hash(ids: Iterable[str]) -> np.ndarray:
    """uint64[n]: the stable hash of the ids that breaks every tie in the project."""
    return hash64(ids, 0, "tie")


def cut(batches: Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]], count: int) -> Cut:
    """The cut after the `count` first of all (value key, tie hash) pairs that `batches()` yields, each call anew.

    Raises ValueError if there are fewer than `count` pairs, or several pairs equal at the cut (equal ids).
    """
    if count == 0:
        return Cut(0, 0, 0)
    value, inside = _nth(lambda: (values for values, _ in batches()), count)
    tie, left = _nth(lambda: (ties[values == np.uint64(value)] for values, ties in batches()), count - inside)
    same = sum(int(((v == np.uint64(value)) & (t == np.uint64(tie))).sum()) for v, t in batches())
    if count - inside - left != same:
        raise ValueError(f"{same} documents share one value and one tie hash at the cut; their ids are not distinct")
    return Cut(value, tie, count)


def _nth(batches: Callable[[], Iterable[np.ndarray]], count: int) -> tuple[int, int]:
    """(the `count`-th smallest uint64 of all batches, how many are smaller than it)."""
    prefix = 0
    smaller = 0
    for shift in range(64 - _BITS, -1, -_BITS):
        histogram = np.zeros(_BINS, dtype=np.int64)
        for keys in batches():
            if shift < 64 - _BITS:
                keys = keys[(keys >> np.uint64(shift + _BITS)) == np.uint64(prefix)]
            bins = (keys >> np.uint64(shift)) & np.uint64(_BINS - 1)
            histogram += np.bincount(bins.astype(np.int64), minlength=_BINS)
        cumulative = np.cumsum(histogram)
        if cumulative[-1] < count - smaller:
            raise ValueError(f"a cut after {count} needs as many documents; there are {smaller + int(cumulative[-1])}")
        chosen = int(np.searchsorted(cumulative, count - smaller))
        smaller += int(cumulative[chosen] - histogram[chosen])
        prefix = (prefix << _BITS) | chosen
    return prefix, smaller
