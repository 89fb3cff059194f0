"""Sums and cuts that do not depend on the order of the rows: what makes a mask the same for any order and any sharding.

Here: sums over rows as whole numbers of a fixed unit, and the cut of the S best scores (or of T tokens) over parts
that are read one at a time. Not here: what is summed or scored (`passes`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

# half the distance between neighbours of 1, relative: the most that one rounding moves a number by
HALF_ULP_32, HALF_ULP_64 = 2.0**-24, 2.0**-53
# entries are rounded to multiples of 2**-bits, and what that leaves, where it counts, to multiples of 2**-2·bits:
# 64 rows of them fit a float64 exactly, and 32 blocks of 1024 rows an int64
_BITS = 47
# with rows that count up to 2**24 tokens each
_BITS_OF_TOKENS = 22
MOST_TOKENS = 1 << 24
# rows that a float64 adds up without rounding
_CHUNK = 64
# blocks whose int64 sums cannot overflow together
_FOLD = 32
# rows of several parts that are sorted together
_AT_HAND = 1 << 16


def gamma(k: int, half_ulp: float) -> float:
    """γ_k = k·u/(1 − k·u): the most, relative, that k roundings in a row move a result by."""
    return k * half_ulp / (1.0 - k * half_ulp)


class GridSum:
    """Σ c_i·x_i over rows x_i of entries in [−1, 1], as exact whole numbers of `unit`.

    `block` can run in any thread, and `add` takes its results in any order: the total is the same. `fine` keeps 2·bits
    instead of bits of every entry. costs: whether rows are weighed by whole numbers c_i up to 2**24.
    """

    def __init__(self, width: int, *, costs: bool = False, fine: bool = False) -> None:
        self.total = np.zeros(width, object)
        self.fine = fine
        self._bits = _BITS_OF_TOKENS if costs else _BITS
        self._round = 1.5 * 2.0 ** (52 - self._bits)
        self._round_rest = 1.5 * 2.0 ** (52 - 2 * self._bits)

    @property
    def unit(self) -> float:
        return 2.0 ** -(self._bits * (2 if self.fine else 1))

    def nothing(self) -> np.ndarray:
        """int64[1 or 2, width]: the `block` of no rows."""
        return np.zeros((1 + self.fine, self.total.size), np.int64)

    def block(self, rows: np.ndarray, costs: np.ndarray | None = None) -> np.ndarray:
        """int64[1 or 2, d]: the sum of up to 1024 rows (float64[k, d], overwritten), in units of 2**-bits, and that of
        the remainders in units of 2**-2·bits."""
        sums = self.nothing()
        for a in range(0, len(rows), _CHUNK):
            x = rows[a : a + _CHUNK]
            c = None if costs is None else costs[a : a + _CHUNK, None].astype(np.float64)
            if self.fine:
                whole = x + self._round
                whole -= self._round
                x -= whole
                x += self._round_rest
                x -= self._round_rest
                sums[1] += _scaled(x if c is None else x * c, 2 * self._bits)
                x = whole
            else:
                x += self._round
                x -= self._round
            sums[0] += _scaled(x if c is None else x * c, self._bits)
        return sums

    def add(self, blocks: Sequence[np.ndarray], sign: int = 1) -> None:
        """Take in results of `block`, or take them out with sign −1."""
        for a in range(0, len(blocks), _FOLD):
            folded = np.sum(blocks[a : a + _FOLD], axis=0).astype(object)
            self.total += sign * (folded[0] * (1 << self._bits) + folded[1] if self.fine else folded[0])

    def join(self, other: "GridSum") -> None:
        """Take in another sum of the same unit."""
        self.total += other.total

    def empty(self) -> "GridSum":
        """A sum of nothing, of the same width and unit."""
        return GridSum(self.total.size, costs=self._bits == _BITS_OF_TOKENS, fine=self.fine)

    def value(self) -> np.ndarray:
        """float64[width]: the sum, rounded once."""
        return np.array([float(x) for x in self.total]) * self.unit


def _scaled(rows: np.ndarray, bits: int) -> np.ndarray:
    return (rows.sum(axis=0) * 2.0**bits).astype(np.int64)


class ScalarSum:
    """Σ c_i·x_i of float64 scalars |x_i| ≤ `largest`, exact to 2**-80 of `largest`, in any order."""

    def __init__(self, largest: float) -> None:
        # a power of two, so that scaling rounds nothing
        self._exponent = int(np.frexp(largest)[1]) if largest > 0 else 0
        self._total = 0

    def add(self, values: np.ndarray, costs: np.ndarray | None = None, sign: int = 1) -> None:
        step = 1 << 20
        for a in range(0, values.size, step):
            scaled = np.ldexp(values[a : a + step], 38 - self._exponent)
            whole = np.rint(scaled)
            rest = np.rint((scaled - whole) * 2.0**30)
            w, r = whole.astype(np.int64), rest.astype(np.int64)
            if costs is not None:
                w, r = (x * costs[a : a + step].astype(object) for x in (w, r))
            self._total += sign * ((int(w.sum()) << 30) + int(r.sum()))

    def join(self, other: "ScalarSum") -> None:
        """Take in another sum of scalars with the same largest."""
        self._total += other._total

    def empty(self) -> "ScalarSum":
        """A sum of nothing, in the same unit."""
        nothing = ScalarSum(0.0)
        nothing._exponent = self._exponent
        return nothing

    def value(self) -> float:
        return float(np.ldexp(float(self._total), self._exponent - 68))


@dataclass(frozen=True, eq=False)
class Scored:
    """The part of a cut's input that is at hand: scores float64[k] without NaN; ties uint64[k], distinct, the lower
    first; costs int64[k] ≥ 0, or None where every row counts 1; groups int[k] in 0..G−1, or None for one group."""

    scores: np.ndarray
    ties: np.ndarray
    costs: np.ndarray | None = None
    groups: np.ndarray | None = None

    @property
    def group(self) -> np.ndarray:
        """int64[k]: each row's group, 0 where there is one."""
        return np.zeros(self.scores.size, np.int64) if self.groups is None else self.groups


@dataclass(frozen=True, eq=False)
class Cut:
    """The best rows of each group that fill its amount: those above (score, tie), and `fraction` of the row there.

    score float64[G], tie uint64[G], fraction float64[G] in (0, 1], 1 where rows count 1 each; an amount of 0 has score
    +inf and fraction 0.
    """

    score: np.ndarray
    tie: np.ndarray
    fraction: np.ndarray

    def level(self, groups: np.ndarray | None) -> Any:
        """The score of the cut of each row's group: float64[k], or one number where there is one group."""
        return self.score[0] if groups is None else self.score[groups]

    def whole(self, part: Scored) -> np.ndarray:
        """bool[k]: the rows that are in whole."""
        if self.score.size == 1:
            above = part.scores > self.score[0]
            level = np.flatnonzero(part.scores == self.score[0])
            inside = part.ties[level] < self.tie[0]
            if self.fraction[0] == 1.0:
                inside |= part.ties[level] == self.tie[0]
            above[level[inside]] = True
            return above
        g = part.group
        score, tie, fraction = self.score[g], self.tie[g], self.fraction[g]
        level = part.scores == score
        return (part.scores > score) | (level & ((part.ties < tie) | ((part.ties == tie) & (fraction == 1.0))))

    def partial(self, part: Scored) -> tuple[np.ndarray, np.ndarray]:
        """(int64[p] rows that are in by a fraction, float64[p] those fractions)."""
        if (self.fraction == 1.0).all():
            return np.zeros(0, np.int64), np.zeros(0)
        g = part.group
        rows = np.flatnonzero(
            (part.scores == self.score[g])
            & (part.ties == self.tie[g])
            & (self.fraction[g] < 1.0)
            & (self.fraction[g] > 0.0)
        )
        return rows, self.fraction[g[rows]]


# the same asked of what is at hand of every part, where that is, in the parts' order
Each = Callable[[Callable[[Scored], Any]], Iterable[Any]]


def cut(each: Each, count: int, amounts: Sequence[int]) -> Cut:
    """The cut that fills amounts[g] of each group g with its best rows, ties to the lower `ties`.

    each(find): find(scored) of every part, any number of times; count: how many there are; each amount is at most the
    group's sum of costs. One part is sorted or partitioned; several are counted by the leading digits of (score, tie)
    until few enough rows are in question to be gathered, so that memory does not grow with their number.
    """
    if count == 1:
        (found,) = each(partial(cut_of_one, amounts=amounts))
        return found
    return _cut_by_digits(each, amounts)


def cut_of_one(part: Scored, amounts: Sequence[int]) -> Cut:
    """The cut of rows that are at hand together."""
    score, tie = np.full(len(amounts), np.inf), np.zeros(len(amounts), np.uint64)
    fraction = np.zeros(len(amounts))
    if part.costs is None and part.groups is None:
        size = amounts[0]
        if size:
            level = np.partition(part.scores, part.scores.size - size)[part.scores.size - size]
            tied = np.sort(part.ties[part.scores == level])
            more = size - int(np.count_nonzero(part.scores > level))
            score[0], tie[0], fraction[0] = level, tied[more - 1], 1.0
        return Cut(score, tie, fraction)
    keys = (part.ties, -part.scores) if part.groups is None else (part.ties, -part.scores, part.groups)
    order = np.lexsort(keys)
    costs = np.ones(order.size, np.int64) if part.costs is None else part.costs[order]
    if part.groups is None:
        ends = np.array([order.size])
    else:
        ends = np.cumsum(np.bincount(part.groups, minlength=len(amounts)))
    filled = np.concatenate([[0], np.cumsum(costs)])
    for g, amount in enumerate(amounts):
        if not amount:
            continue
        start = int(ends[g - 1]) if g else 0
        wanted = filled[start] + amount
        # the first row with which the amount is reached
        at = int(np.searchsorted(filled, wanted, side="left")) - 1
        row = order[at]
        score[g], tie[g] = part.scores[row], part.ties[row]
        fraction[g] = (wanted - filled[at]) / costs[at]
    return Cut(score, tie, fraction)


def _cut_by_digits(each: Each, amounts: Sequence[int]) -> Cut:
    groups = len(amounts)
    width = 16 if groups <= 8 else 8
    # the digits of (score, tie) found so far, best first, and what is still to be filled below them
    found = np.zeros((groups, 2), np.uint64)
    left = [int(amount) for amount in amounts]
    last = [1] * groups
    for step in range(2 * (64 // width)):
        bins, rows = np.zeros((2, groups << width), np.int64)
        for places, held, counted in each(partial(_count, found=found, step=step, width=width)):
            bins[places] += held
            rows[places] += counted
        in_question = 0
        which = step // (64 // width)
        for k in range(groups):
            if not amounts[k]:
                continue
            own = slice(k << width, (k + 1) << width)
            filled = np.cumsum(bins[own])
            digit = int(np.searchsorted(filled, left[k], side="left"))
            left[k] -= int(filled[digit - 1]) if digit else 0
            last[k] = int(bins[own][digit])
            in_question += int(rows[own][digit])
            found[k, which] = (found[k, which] << np.uint64(width)) | np.uint64(digit)
        if in_question <= _AT_HAND:
            agree = partial(_agreeing, found=found, step=step + 1, width=width)
            return _cut_of_few(each(partial(_those, rows=agree)), left)
    score = np.array([s if a else np.inf for s, a in zip(from_descending(found[:, 0]), amounts, strict=True)])
    return Cut(
        score, found[:, 1], np.array([r / of if a else 0.0 for r, of, a in zip(left, last, amounts, strict=True)])
    )


def _agreeing(part: Scored, found: np.ndarray, step: int, width: int) -> np.ndarray:
    """int64[k]: the rows that agree with their group's first `step` digits."""
    steps = 64 // width
    key = descending(part.scores)
    if not step:
        return np.arange(key.size)
    shift = np.uint64(64 - width * (step % steps)) if step % steps else np.uint64(0)
    if step < steps:
        return np.flatnonzero(key >> shift == found[part.group, 0])
    rows = np.flatnonzero(key == found[part.group, 0])
    return rows[part.ties[rows] >> shift == found[part.group[rows], 1]] if step > steps else rows


def _count(part: Scored, found: np.ndarray, step: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(groups and next digits that agreeing rows have, as group << width | digit; int64 costs and rows of each)."""
    rows = _agreeing(part, found, step, width)
    shift = np.uint64(64 - width * (step % (64 // width) + 1))
    keys = part.ties[rows] if step >= 64 // width else descending(part.scores[rows])
    digits = ((keys >> shift) & np.uint64((1 << width) - 1)).astype(np.int64)
    places = (part.group[rows] << width) | digits
    counts = np.bincount(places)
    there = np.flatnonzero(counts)
    if part.costs is None:
        return there, counts[there], counts[there]
    # float64 counts tokens exactly up to 2**53
    held = np.bincount(places, weights=part.costs[rows])
    return there, held[there].astype(np.int64), counts[there]


def _those(part: Scored, rows: Callable[[Scored], np.ndarray]) -> Scored:
    at = rows(part)
    costs, groups = (None if column is None else column[at] for column in (part.costs, part.groups))
    return Scored(part.scores[at], part.ties[at], costs, groups)


def _cut_of_few(parts: Iterable[Scored], left: Sequence[int]) -> Cut:
    """The cut among the rows that are still in question, gathered."""
    kept = list(parts)
    return cut_of_one(
        Scored(
            np.concatenate([k.scores for k in kept]),
            np.concatenate([k.ties for k in kept]),
            None if kept[0].costs is None else np.concatenate([k.costs for k in kept if k.costs is not None]),
            None if kept[0].groups is None else np.concatenate([k.groups for k in kept if k.groups is not None]),
        ),
        left,
    )


def descending(scores: np.ndarray) -> np.ndarray:
    """uint64[k] keys that ascend as the scores (float64, no NaN) descend; equal scores have equal keys."""
    # −0.0 and 0.0 are one score
    bits = (scores + 0.0).view(np.uint64)
    top = np.uint64(1 << 63)
    return np.where(bits & top, bits, ~bits & ~top)


def from_descending(keys: np.ndarray) -> np.ndarray:
    """The scores of `descending` keys."""
    top = np.uint64(1 << 63)
    return np.where(keys & top, keys, ~keys & ~top).view(np.float64)
