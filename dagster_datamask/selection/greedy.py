"""Greedy selection: one document at a time, each time the one that adds most.

Here: lazy, stochastic and lazier-than-lazy greedy for sums of facility location, linear scores, pair-wise similarity
and DiSF's second moment, under document or token budgets and quotas. Not here: facility location itself
(`facility_location`) and what the choice is worth (`certificates`).

With B the budget, w_u a document's cost (1, or its tokens) and W = Σ w_u, the objective is
fl·FL(U) + (1/B)·Σ w_u l_u − (1/B²)·D(U), where D(U) = pws·‖Σ w_u ẑ_u‖² + sm·‖Σ w_u ẑ_u ẑ_uᵀ‖_F². Without D it is
monotone submodular plus modular, and greedy follows it. D grows with W², so early documents would be chosen as if
diversity did not matter, and documents of the mean of U so far as if only it did. Where there is D, greedy therefore
puts √(B·(W + w)) for B, halfway between the two: on real and synthetic vectors neither of them ends higher throughout.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from dagster_datamask import keyed
from dagster_datamask.selection.facility_location import Coverage, FacilityLocation
from dagster_datamask.selection.objectives import map_blocks
from dagster_datamask.selection.sampling import top_s

Progress = Callable[[int, int, dict[str, Any]], None]

# stale bounds that are renewed together: at first, and at most, doubling in between
_FIRST = 4
_MOST = 1024
_ENTRIES = 50
_ROWS = 2048


@dataclass(frozen=True)
class GreedyOptions:
    """variant: "lazy" renews facility location's gains only where an old one, which bounds it, could still win
    (Minoux 1978), and chooses what plain greedy would; "stochastic" takes the best of a random sample each time
    (Mirzasoleiman et al., arXiv 1409.7938), "lazier" the same with old gains as bounds. epsilon: a sample has
    (N/S)·ln(1/ε) documents, which gives 1 − 1/e − ε of the optimum in expectation where the objective is monotone
    submodular.
    """

    variant: Literal["lazy", "stochastic", "lazier"] = "lazy"
    epsilon: float = 0.01

    def __post_init__(self) -> None:
        if self.variant not in ("lazy", "stochastic", "lazier"):
            raise ValueError(f"variant {self.variant!r} is none of: lazy, stochastic, lazier")
        if not 0 < self.epsilon < 1:
            raise ValueError(f"epsilon must lie in (0, 1), not {self.epsilon}")


class Chosen(NamedTuple):
    """positions: int64[S] in the order chosen; gains: float64[S], what each added to the objective in search precision;
    passes: products of the whole pool with one vector."""

    positions: np.ndarray
    gains: np.ndarray
    passes: float


def greedy(
    z: np.ndarray,
    linear: np.ndarray,
    *,
    fl: float,
    pws: float,
    second_moment: float,
    budget: int,
    options: GreedyOptions,
    seed: int,
    split: int | str,
    memory_limit: float = 4e9,
    facility: FacilityLocation | None = None,
    costs: np.ndarray | None = None,
    groups: np.ndarray | None = None,
    quotas: list[int] | None = None,
    progress: Progress | None = None,
) -> Chosen:
    """Choose `budget` of N documents, exactly and each once, or with `costs` as many as fit.

    z: float32[N, d], unit rows in canonical order; linear: float64[N], finite; fl, pws, second_moment: weights ≥ 0 of
    the terms; facility: over the same z, to share its kernel, or else one is made within memory_limit bytes.
    costs: int64[N] ≥ 1, and budget is in the same unit: a document is a candidate while it fits, and of the greedy by
    gain and the greedy by gain per cost the better is kept. groups: int[N] in 0..len(quotas), quotas in the budget's
    unit: a document is a candidate while it fits its group's. Ties go to the lower position. Samples are keyed by
    (seed, "greedy", split).

    progress(step, steps, {"value": sum of the gains so far}) is called about 50 times, in units of the budget.

    Raises ValueError for arguments that do not fit together, and for a budget that cannot be filled.
    """
    n = z.shape[0]
    if linear.shape != (n,) or not np.isfinite(linear).all():
        raise ValueError(f"linear must hold {n} finite scores, one for each document")
    if not np.isfinite(z.sum()):
        raise ValueError("z must be finite; leave documents without a finite vector out")
    if min(fl, pws, second_moment) < 0:
        raise ValueError(f"weights must not be negative: fl {fl}, pws {pws}, second_moment {second_moment}")
    if costs is not None and (costs.shape != (n,) or (n and costs.min() < 1)):
        raise ValueError(f"costs must be {n} numbers of at least 1; leave documents that cost nothing out")
    if (groups is None) != (quotas is None):
        raise ValueError("groups and quotas come together: one group for each document, one quota for each group")
    room = n if costs is None else int(costs.sum())
    if groups is not None and quotas is not None:
        if groups.shape != (n,) or (n and not 0 <= groups.min() <= groups.max() < len(quotas)):
            raise ValueError(f"groups must be {n} numbers below {len(quotas)}, the number of quotas")
        if costs is None:
            room = int(np.minimum(np.bincount(groups, minlength=len(quotas)), quotas).sum())
    if not 0 <= budget <= room:
        raise ValueError(f"budget {budget} is not between 0 and the {room} that there is room for")
    if fl and facility is None:
        facility = FacilityLocation(z, memory_limit=memory_limit)
    formed = facility.passes if facility is not None else 0.0
    best, passes = Chosen(np.zeros(0, np.int64), np.zeros(0), 0.0), 0.0
    for per_cost in (False,) if costs is None else (False, True):
        terms = _Terms(z, linear, pws, second_moment, budget, costs)
        candidates = _Candidates(n, budget, costs, groups, quotas)
        generator = keyed.rng(seed, "greedy", split)
        found = _search(terms, candidates, facility if fl else None, fl, budget, options, generator, per_cost, progress)
        passes += found.passes
        if not best.gains.size or math.fsum(found.gains) > math.fsum(best.gains):
            best = found
    if facility is not None:
        passes += facility.passes - formed
    return best._replace(passes=passes)


class _Terms:
    """The terms other than facility location, and what each document adds to them.

    Document x raises D by 2w_x·h_x + (pws + sm)·w_x², where h_x = Σ_u w_u (pws·ẑ_x·ẑ_u + sm·(ẑ_x·ẑ_u)²) takes one
    product of the pool with ẑ_u for each u chosen. marginals: float64[N], what the choice goes by.
    """

    def __init__(
        self, z: np.ndarray, linear: np.ndarray, pws: float, moment: float, budget: int, costs: np.ndarray | None
    ) -> None:
        n = z.shape[0]
        self._z, self._pws, self._moment, self._budget = z, pws, moment, max(1, budget)
        self.costs = np.ones(n) if costs is None else costs.astype(np.float64)
        self._linear = self.costs * linear
        # what D rises by
        self._rise = (pws + moment) * self.costs**2
        self._weight = 0.0
        self.passes = 0
        self._weigh()

    def gain(self, position: int) -> float:
        """What the document adds to the objective."""
        return float(self._linear[position] / self._budget - self._rise[position] / self._budget**2)

    def add(self, position: int) -> None:
        if not (self._pws or self._moment):
            return
        cost, row = self.costs[position], self._z[position]
        dots = np.concatenate(map_blocks(lambda a, b: self._z[a:b] @ row, self._z.shape[0], block=_ROWS))
        wide = dots.astype(np.float64)
        self._rise += 2.0 * cost * self.costs * wide * (self._pws + self._moment * wide)
        self._weight += cost
        self.passes += 1
        self._weigh()

    def _weigh(self) -> None:
        if not (self._pws or self._moment):
            self.marginals = self._linear / self._budget
            return
        square = self._budget * (self._weight + self.costs)
        self.marginals = self._linear / np.sqrt(square) - self._rise / square


class _Candidates:
    """Which documents may be chosen next: those not chosen that fit what is left of the budget and of their quota.

    open: bool[N]; spent: of the budget.
    """

    def __init__(
        self,
        n: int,
        budget: int,
        costs: np.ndarray | None,
        groups: np.ndarray | None,
        quotas: list[int] | None,
    ) -> None:
        self._costs = np.ones(n, np.int64) if costs is None else costs
        self._groups, self._room = groups, np.array([] if quotas is None else quotas, np.int64)
        self._budget, self.spent = budget, 0
        self.open = self._costs <= budget
        if groups is not None:
            self.open &= self._costs <= self._room[groups]

    def add(self, position: int) -> None:
        cost = int(self._costs[position])
        self.spent += cost
        self.open[position] = False
        self.open &= self._costs <= self._budget - self.spent
        if self._groups is not None:
            self._room[self._groups[position]] -= cost
            self.open &= self._costs <= self._room[self._groups]


def _search(
    terms: _Terms,
    candidates: _Candidates,
    facility: FacilityLocation | None,
    fl: float,
    budget: int,
    options: GreedyOptions,
    generator: np.random.Generator,
    per_cost: bool,
    progress: Progress | None,
) -> Chosen:
    coverage = Coverage(facility) if facility is not None else None
    # facility location's gains, or what bounds them
    bounds = np.full(candidates.open.size, 0.0 if coverage is None else np.inf)
    if coverage is not None and options.variant == "lazy" and budget:
        bounds = coverage.gains(np.arange(bounds.size))
    sample = math.ceil(terms.costs.sum() / max(1, budget) * math.log(1.0 / options.epsilon))
    shares = terms.costs if per_cost else np.ones(bounds.size)
    positions: list[int] = []
    gains: list[float] = []
    value, due = 0.0, 0.0
    while candidates.open.any():
        tried = np.flatnonzero(candidates.open)
        together = _FIRST
        if options.variant != "lazy" and tried.size > sample:
            tried = np.sort(tried[generator.choice(tried.size, sample, replace=False, shuffle=False)])
        current = None if coverage is None else coverage.current
        if current is not None:
            bounds = current
        elif coverage is not None and options.variant == "stochastic":
            bounds[tried], together = np.inf, tried.size
        fresh = np.full(tried.size, coverage is None or current is not None)
        keys = (fl * bounds[tried] + terms.marginals[tried]) / shares[tried]
        while not fresh[best := int(keys.argmax())] and coverage is not None:
            asked = np.flatnonzero(~fresh & (keys >= keys[fresh].max(initial=-np.inf)))
            if asked.size > together:
                asked = asked[top_s(keys[asked], together)]
            stale = tried[asked]
            bounds[stale] = coverage.gains(stale)
            keys[asked] = (fl * bounds[stale] + terms.marginals[stale]) / shares[stale]
            fresh[asked] = True
            together = min(2 * together, _MOST)
        chosen = int(tried[best])
        gain = terms.gain(chosen) + fl * float(bounds[chosen])
        positions.append(chosen)
        gains.append(gain)
        value += gain
        candidates.add(chosen)
        terms.add(chosen)
        if coverage is not None:
            coverage.add(chosen)
        if progress is not None and (candidates.spent >= due or not candidates.open.any()):
            progress(candidates.spent, budget, {"value": value})
            due = candidates.spent + budget / _ENTRIES
    return Chosen(np.array(positions, np.int64), np.array(gains), float(terms.passes))
