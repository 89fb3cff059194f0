"""DiSF, the diversity of a selection's feature columns: its two forms, their values, and solvers for the authors' one.

Here: the authors' DiSF (arXiv 2504.20644; −10⁻⁴ Σ_{p≠q} C_pq² with C the correlation of the selection's columns) and
the second moment (−‖(1/S) Σ ẑẑᵀ‖_F²), for one selection in float64 and for a group of masks; the incremental greedy
that the authors' form is published with, and a conditional gradient with exchanges that takes its place. Not here: a
certificate for the second moment (`certificates`), its greedy (`greedy`), and any certificate for the authors' form,
which is not concave and has none.

The authors' form is 0 at best and −10⁻⁴ d(d−1) at worst. Where the formula says 0/0:

- a column is constant where its standard deviation is 10⁻⁷ or less, which is float32 rounding of a unit row; its
  standardised column is 0, so it correlates with nothing;
- a selection in which no column varies (one document, or copies of one) has collapsed to a point and is worth the
  worst value, as every pair is whose columns all differ, since two points correlate by ±1 throughout;
- the empty selection is worth 0.

With rows x of weights m, W = Σm, mean μ and scatter M = Σ m (x−μ)(x−μ)ᵀ, Σ_pq C_pq² = uᵀ(M∘M)u for u = 1/diag M:
the correlation does not change with the scale of M, so fractional weights need no S − 1. A document more or less is a
rank-one change of M, and for M' = M + b·yyᵀ and u = 1/diag M'

    Σ_pq C'_pq² = uᵀ(M∘M)u + 2b (y∘u)ᵀM(y∘u) + b² (Σ_p y_p² u_p)²,

two matrix products for any number of candidates y.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from dagster_datamask.selection.exact import HALF_ULP_64, gamma
from dagster_datamask.selection.objectives import map_blocks
from dagster_datamask.selection.sampling import top_s

Progress = Callable[[int, int, dict[str, Any]], None]
Take = Callable[[np.ndarray], np.ndarray]

_AUTHORS = 1e-4
# variance of a constant column
_VARIANCE = 1e-14
# rows whose intermediate products stay in cache
_ROWS = 256
# float32 scores closer than this share of the best are compared in float64, where this share is a tie
_CONTENDS = 1e-5
_TIED = 1e-12
# entries of a trajectory
_ENTRIES = 50
# an exchange looks at this many documents on each side, and stops where a look at the whole pool gains less than this
_LISTED = 256
_EXCHANGES = 16
_ENOUGH = 1e-5
# a budget for which greedy costs little; weights round badly to so few documents
_FEW = 32
# batches of swaps between two looks at the whole pool, and how many leaving documents are tried one by one
_MOVES = 200
_TRIED = 16


def disf_value(rows: np.ndarray) -> float:
    """The authors' DiSF of a selection: −10⁻⁴ Σ_{p≠q} C_pq² in [−10⁻⁴ d(d−1), 0]; rows: float64[S, d], unit.

    No bound on its rounding error is given: dividing by a column's spread magnifies it without limit.
    """
    size = rows.shape[0]
    if not size:
        return 0.0
    return -_AUTHORS * float(_collapse(np, rows - rows.mean(axis=0)))


def second_moment_value(rows: np.ndarray) -> float:
    """−‖(1/S) Σ ẑẑᵀ‖_F² of a selection, in [−1, −1/min(S, d)]; 0 for the empty one. rows: float64[S, d], unit.

    Within `second_moment_error(S, d)` of the exact value.
    """
    size = rows.shape[0]
    if not size:
        return 0.0
    gram = _gram(rows)
    return -math.fsum(np.einsum("ij,ij->i", gram, gram)) / size**2


def second_moment_error(size: int, d: int) -> float:
    """The most that float64 rounding moves `second_moment_value` of `size` rows in d dimensions, their normalisation
    included.

    γ_k = k·u/(1 − k·u): an entry of the Gram matrix sums `longer` products of two entries that d + 4 operations
    normalised, and the norm of the matrix of their absolute values is at most S; a squared row sums `shorter` terms.
    """
    shorter, longer = sorted((size, d))
    entry = gamma(longer + 2 * (d + 4) + 1, HALF_ULP_64)
    return 2.0 * entry + entry * entry + 2.0 * gamma(shorter + 4, HALF_ULP_64)


def disf_group_values(xp: Any, mask: Any, rows: Any, size: int) -> Any:
    """[G]: the authors' DiSF of each mask.

    xp: numpy, or torch with everything on one device; mask: [G, B] of 0 and 1 with exactly `size` ≥ 1 ones in a row;
    rows: float32[B, d], unit. One mask's rows are gathered at a time: moments by the mask would multiply all B of them.
    """
    centred = rows - rows.mean(0)
    values = [-_AUTHORS * _collapse(xp, centred[chosen]) for chosen in _chosen(xp, mask, size)]
    return xp.asarray(xp.stack(values), dtype=rows.dtype)


def second_moment_group_values(xp: Any, mask: Any, rows: Any, size: int) -> Any:
    """[G]: −‖(1/S) Σ ẑẑᵀ‖_F² of each mask; arguments as for `disf_group_values`."""
    values = []
    for chosen in _chosen(xp, mask, size):
        gram = _gram(rows[chosen])
        values.append((gram * gram).sum(dtype=xp.float64) * (-1.0 / size**2))
    return xp.asarray(xp.stack(values), dtype=rows.dtype)


class Greedy(NamedTuple):
    """positions: int64[S] in the order chosen; gains: float64[S], F after each choice less F before, which for the
    first is F itself; passes: reads of the embeddings in units of the whole pool."""

    positions: np.ndarray
    gains: np.ndarray
    passes: float


class Exchanged(NamedTuple):
    """positions: int64[S], ascending; scores: float64[N], what each document adds to the selection: F with it less F
    without; passes: reads of the embeddings in units of the whole pool; trajectory: entries `step`, `value` (F of the
    best selection so far), `relaxed` (F of the fractional weights, None after them) and `note`."""

    positions: np.ndarray
    scores: np.ndarray
    passes: float
    trajectory: list[dict[str, Any]]


def disf_greedy(
    z: np.ndarray,
    linear: np.ndarray,
    *,
    weight: float,
    budget: int,
    candidates: Callable[[list[int]], np.ndarray] | None = None,
    progress: Progress | None = None,
) -> Greedy:
    """Greedy for F(U) = mean of `linear` over U + weight·DiSF(U), the authors' form: each step takes the document with
    the largest F(U ∪ {x}), N values by two matrix products, O(N d²) a step. Values within 10⁻¹² of each other tie,
    and ties go to the lower position.

    z: float32[N, d], unit rows; linear: float64[N]. DiSF cannot tell single documents apart, nor pairs whose columns
    all differ (see the module): `linear` chooses the first document, and as a rule the second.
    candidates(chosen) gives bool[N], who may come next (quotas, tokens); the documents chosen need not be left out. It
    ends early where nobody may. Float32 finds the contenders of a step, float64 decides among them.

    Raises ValueError where budget is not in 0..N.
    """
    _check(z, linear, budget)
    problem = _Problem(z, linear, weight)
    chosen: list[int] = []
    values: list[float] = []
    free = np.ones(len(z), bool)
    sums = problem.sums(np.zeros(0, np.int64))
    every = max(1, budget // _ENTRIES)
    while len(chosen) < budget:
        allowed = np.flatnonzero(free & candidates(chosen) if candidates is not None else free)
        if not allowed.size:
            break
        best, value = problem.best_addition(sums, allowed)
        chosen.append(best)
        values.append(value)
        free[best] = False
        sums = sums.plus(problem.sums(np.array([best])))
        if progress is not None and (len(chosen) % every == 0 or len(chosen) == budget):
            progress(len(chosen), budget, {"step": len(chosen), "value": value})
    gains = np.array([after - before for before, after in pairwise([0.0, *values])])
    return Greedy(np.array(chosen, np.int64), gains, float(len(chosen)))


def conditional_gradient(
    z: np.ndarray,
    linear: np.ndarray,
    *,
    weight: float,
    budget: int,
    steps: int = 12,
    take: Take | None = None,
    groups: np.ndarray | None = None,
    progress: Progress | None = None,
) -> Exchanged:
    """A selection of large F(U) = mean of `linear` over U + weight·DiSF(U), the authors' form, in a few tens of passes
    over the embeddings. F is not concave: there is no certificate.

    1. Frank–Wolfe on the weights m ∈ [0, 1]^N, from the uniform ones: a vertex is the best feasible set by ∂F/∂m, one
       pass, and the step is searched on F along the segment; `steps` at most.
    2. The best of the vertices met, of the set of largest m and, up to 32 documents, of greedy's.
    3. Exchanges. What each document adds to the selection is known exactly (rank-one changes); the documents that add
       least leave for those that would add most, as many at once as F grows by, then one by one; first among the 256
       best on each side, then again after a look at the whole pool, until that gains no more.

    z: float32[N, d], unit rows; linear: float64[N]; budget: S. take(scores) gives the positions of the feasible set of
    best scores, by default the S largest; with one, S is about how many it takes. groups: int[N]; a document is
    exchanged within its group only. With a `take` and no groups nothing is exchanged. Fewer than three documents are
    taken by `linear` alone: DiSF cannot tell them apart (see `disf_greedy`).

    Raises ValueError where budget is not in 0..N.
    """
    _check(z, linear, budget)
    n = len(z)
    best_set: Take = take if take is not None else lambda scores: top_s(scores, budget)
    if budget < 3:
        positions = np.sort(best_set(linear)) if budget else np.zeros(0, np.int64)
        return Exchanged(positions, linear.astype(np.float64), 0.0, [])
    problem = _Problem(z, linear, weight)
    search = _Search(problem, steps + 2 + _EXCHANGES, progress)
    weights = search.relax(best_set, budget, steps)
    search.propose(best_set(weights), "rounded")
    if take is None and budget <= _FEW:
        found = disf_greedy(z, linear, weight=weight, budget=budget)
        search.passes += found.passes
        search.propose(np.sort(found.positions), "greedy")
    if take is None or groups is not None:
        search.exchange(np.unique(groups, return_inverse=True)[1] if groups is not None else np.zeros(n, np.int64))
    scores = problem.marginals(search.sums, search.inside, np.arange(n))
    return Exchanged(np.flatnonzero(search.inside), scores, search.passes + 1.0, search.trajectory)


@dataclass(frozen=True, eq=False)
class _Sums:
    """Σm, Σm·linear, Σm·x and Σm·xxᵀ in float64, for x = ẑ less the pool's mean, which spares the scatter most of its
    cancellation."""

    weight: float
    linear: float
    first: np.ndarray
    second: np.ndarray

    def plus(self, other: "_Sums", factor: float = 1.0) -> "_Sums":
        return _Sums(
            self.weight + factor * other.weight,
            self.linear + factor * other.linear,
            self.first + factor * other.first,
            self.second + factor * other.second,
        )

    def mixed(self, other: "_Sums", share: float) -> "_Sums":
        return self.plus(self, -share).plus(other, share)

    def scatter(self) -> np.ndarray:
        return self.second - np.outer(self.first, self.first / self.weight)


class _Problem:
    """F and its first-order parts over one pool."""

    def __init__(self, z: np.ndarray, linear: np.ndarray, weight: float) -> None:
        self.z, self.linear = z, linear.astype(np.float64)
        self._penalty = weight * _AUTHORS
        total = np.zeros(z.shape[1])
        for part in map_blocks(lambda a, b: z[a:b].sum(axis=0, dtype=np.float64), len(z), block=2048):
            total += part
        self._centre = total / max(len(z), 1)

    def sums(self, positions: np.ndarray) -> _Sums:
        """Of the documents at these positions, with weight 1 each."""
        d = self.z.shape[1]

        def part(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
            rows = self.z[positions[start:stop]] - self._centre
            return rows.sum(axis=0), rows.T @ rows

        first, second = np.zeros(d), np.zeros((d, d))
        # few enough parts that holding them all costs little
        for a, b in map_blocks(part, positions.size, block=max(1024, -(-positions.size // 64))):
            first += a
            second += b
        return _Sums(float(positions.size), math.fsum(self.linear[positions]), first, second)

    def value(self, sums: _Sums) -> float:
        """F; 0 for nothing."""
        if not sums.weight:
            return 0.0
        return sums.linear / sums.weight - self._penalty * float(_off_diagonal(np, sums.scatter(), sums.weight))

    def gradient(self, sums: _Sums) -> np.ndarray:
        """float64[N]: ∂F/∂m_i, by ∂M/∂m_i = yyᵀ with y = x_i − μ.

        ∂(Σ C²)/∂m_i = 2 yᵀDCDy − 2 Σ_p y_p² D_pp² Σ_q C_pq² with D = (diag M)^−½.
        """
        scatter = sums.scatter()
        spread = _varying(np, scatter.diagonal(), sums.weight)
        correlation = scatter * spread * spread[:, None]
        np.einsum("ii->i", correlation)[...] -= (correlation * correlation).sum(axis=1)
        form, scale = correlation.astype(np.float32), spread.astype(np.float32)
        mean = (self._centre + sums.first / sums.weight).astype(np.float32)
        slopes = np.empty(len(self.z))

        def fill(start: int, stop: int) -> None:
            for a in range(start, stop, _ROWS):
                y = self.z[a : min(a + _ROWS, stop)] - mean
                y *= scale
                slopes[a : a + len(y)] = np.einsum("ij,ij->i", y @ form, y)

        map_blocks(fill, len(self.z), block=4 * _ROWS)
        return (self.linear - sums.linear / sums.weight) / sums.weight - 2.0 * self._penalty * slopes

    def changed(
        self, sums: _Sums, positions: np.ndarray, sign: int, dtype: type[np.floating] = np.float32
    ) -> np.ndarray:
        """float64[k]: F with each of these documents alone added to the selection (sign 1) or taken from it (−1)."""
        size, after = sums.weight, sums.weight + sign
        if not after:
            return np.zeros(positions.size)
        linear = (sums.linear + sign * self.linear[positions]) / after
        d = self.z.shape[1]
        if not size:
            return linear - self._penalty * d * (d - 1)
        scatter = sums.scatter()
        diagonal = scatter.diagonal()
        spread = _varying(np, diagonal, size)
        # a constant column keeps its own scale, since the document may be what makes it vary
        scale = np.where(spread > 0, spread, 1.0)
        # one entry a column: what it adds to its own variance, and how much of that counts as varying
        own = np.where(spread > 0, 1.0, np.maximum(diagonal, 0.0)).astype(dtype)
        # a document that alone makes a column vary leaves rounding behind
        least = np.maximum(after * _VARIANCE * scale * scale, 64 * np.finfo(dtype).eps * own).astype(dtype)
        correlation = scatter * spread * spread[:, None]
        squared = (correlation * correlation).astype(dtype)
        correlation = correlation.astype(dtype)
        mean, scale = (self._centre + sums.first / size).astype(dtype), scale.astype(dtype)
        step = dtype(sign * size / after)
        collapse = np.empty(positions.size)

        def fill(start: int, stop: int) -> None:
            for a in range(start, stop, _ROWS):
                b = min(a + _ROWS, stop)
                y = self.z[positions[a:b]] - mean
                y *= scale
                u = y * y
                u *= step
                u += own
                varies = u > least
                np.divide(1.0, u, out=u, where=varies)
                u *= varies
                total = np.einsum("ij,ij->i", u @ squared, u)
                scaled = y * u
                total += 2.0 * step * np.einsum("ij,ij->i", scaled @ correlation, scaled)
                share = step * np.einsum("ij,ij->i", y, scaled)
                total += share * share
                count = varies.sum(axis=1)
                collapse[a:b] = np.where(count > 0, total.astype(np.float64) - count, float(d * (d - 1)))

        map_blocks(fill, positions.size, block=4 * _ROWS)
        return linear - self._penalty * collapse

    def best_addition(self, sums: _Sums, positions: np.ndarray) -> tuple[int, float]:
        """(The document of these whose addition makes F largest, that F)."""
        rough = self.changed(sums, positions, 1)
        # what F is a difference of: the diagonal of C cancels
        magnitude = np.abs(rough).max() + self._penalty * self.z.shape[1]
        contenders = positions[rough >= rough.max() - _CONTENDS * magnitude]
        exact = self.changed(sums, contenders, 1, np.float64)
        # equal rows need not have equal bits in a matrix product
        best = int((exact >= exact.max() - _TIED * magnitude).argmax())
        return int(contenders[best]), float(exact[best])

    def marginals(self, sums: _Sums, inside: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """float64[k]: what each of these documents adds, F(U) − F(U∖{x}) if it is in U and F(U ∪ {x}) − F(U) if not."""
        value = self.value(sums)
        result = np.empty(positions.size)
        for side, sign in ((inside[positions], -1), (~inside[positions], 1)):
            result[side] = sign * (self.changed(sums, positions[side], sign) - value)
        return result


class _Search:
    """The best selection so far, and how it was come by."""

    def __init__(self, problem: _Problem, steps: int, progress: Progress | None) -> None:
        self.problem = problem
        self.inside = np.zeros(len(problem.z), bool)
        self.sums = problem.sums(np.zeros(0, np.int64))
        self.value = -np.inf
        self.passes = 0.0
        self.trajectory: list[dict[str, Any]] = []
        self._steps, self._progress = steps, progress

    def propose(self, positions: np.ndarray, note: str) -> None:
        self._keep(positions, self.problem.sums(positions))
        self._log(note)

    def relax(self, best_set: Take, budget: int, steps: int) -> np.ndarray:
        """float64[N]: the weights m, equal ones told apart by the last gradient. The vertices met are proposed."""
        problem = self.problem
        n = len(problem.z)
        weights = np.full(n, budget / n)
        whole = problem.sums(np.arange(n))
        point = problem.sums(np.zeros(0, np.int64)).plus(whole, budget / n)
        value, share = problem.value(point), 0.5
        slopes = np.zeros(n)
        self.passes += 1.0
        for _ in range(steps):
            slopes = problem.gradient(point)
            vertex = best_set(slopes)
            if not vertex.size:
                break
            corner = problem.sums(vertex)
            self.passes += 1.0 + vertex.size / n
            self._keep(vertex, corner)
            before = value
            share, value = _search_segment(problem, point, corner, value, share)
            if value > before:
                weights *= 1.0 - share
                weights[vertex] += share
                point = point.mixed(corner, share)
            self._log("conditional_gradient", value)
            if value - before <= _ENOUGH * abs(value):
                break
        spread = float(np.ptp(slopes))
        return weights + (slopes * (1e-9 / spread) if spread else 0.0)

    def exchange(self, groups: np.ndarray) -> None:
        """Exchanges until a look at the whole pool gains next to nothing."""
        for _ in range(_EXCHANGES):
            before = self.value
            added = self.problem.marginals(self.sums, self.inside, np.arange(self.inside.size))
            self.passes += 1.0
            leaving, coming, _ = _pairs(added, np.arange(added.size), self.inside, groups)
            listed = np.sort(np.concatenate([leaving[:_LISTED], coming[:_LISTED]]))
            self._exchange_among(listed, groups)
            self._log("exchanged")
            if self.value - before <= _ENOUGH * abs(self.value):
                break

    def _exchange_among(self, listed: np.ndarray, groups: np.ndarray) -> None:
        """Exchange as many at once as F grows by, and one pair where no such number is left, until none is."""
        n, most = len(self.problem.z), listed.size
        for _ in range(_MOVES):
            added = self.problem.marginals(self.sums, self.inside, listed)
            self.passes += listed.size / n
            leaving, coming, gaining = _pairs(added, listed, self.inside, groups)
            count = min(2 * most, gaining)
            while count and not self._try(leaving[:count], coming[:count]):
                count //= 2
            most = max(count, 1)
            if not count and not self._try_pairs(added, listed, groups):
                break

    def _try(self, leaving: np.ndarray, coming: np.ndarray) -> bool:
        """Exchange these if F grows by more than rounding."""
        problem = self.problem
        sums = self.sums.plus(problem.sums(coming)).plus(problem.sums(leaving), -1.0)
        value = problem.value(sums)
        if not value > self.value + _TIED * (abs(self.value) + abs(value)):
            return False
        self.inside[leaving], self.inside[coming] = False, True
        self.sums, self.value = sums, value
        return True

    def _try_pairs(self, added: np.ndarray, listed: np.ndarray, groups: np.ndarray) -> bool:
        """Exchange one pair that makes F grow, if the members that add least have one."""
        problem = self.problem
        members, others = listed[self.inside[listed]], listed[~self.inside[listed]]
        least = members[np.argsort(added[self.inside[listed]], kind="stable")[:_TRIED]]
        for member in least:
            allowed = others[groups[others] == groups[member]]
            if not allowed.size:
                continue
            without = self.sums.plus(problem.sums(np.array([member])), -1.0)
            values = problem.changed(without, allowed, 1)
            self.passes += allowed.size / len(problem.z)
            if self._try(np.array([member]), allowed[[values.argmax()]]):
                return True
        return False

    def _keep(self, positions: np.ndarray, sums: _Sums) -> None:
        value = self.problem.value(sums)
        if value > self.value:
            self.inside = np.zeros(len(self.problem.z), bool)
            self.inside[positions] = True
            self.sums, self.value = sums, value

    def _log(self, note: str, relaxed: float | None = None) -> None:
        step = len(self.trajectory) + 1
        entry = {"step": step, "value": self.value, "relaxed": relaxed, "note": note}
        self.trajectory.append(entry)
        if self._progress is not None:
            self._progress(step, self._steps, entry)


def _search_segment(problem: _Problem, point: _Sums, corner: _Sums, value: float, share: float) -> tuple[float, float]:
    """(Step, F there) of a good step from the point to the corner, no worse than staying: halving from twice the last
    step for as long as F grows, then the top of the parabola through the best step and its two neighbours."""

    def at(step: float) -> float:
        return problem.value(point.mixed(corner, step))

    step = min(1.0, 2.0 * share)
    beyond, found, half = None, at(step), at(step / 2.0)
    while (half > found or found <= value) and step > _TIED:
        step, beyond, found = step / 2.0, found, half
        half = at(step / 2.0)
    if found <= value:
        return share, value
    if beyond is not None and half <= found:
        # through (½, half), (1, found) and (2, beyond) in units of the step; beyond < found
        rise, fall = found - half, found - beyond
        top = step * (0.75 + 1.5 * rise / (fall + 2.0 * rise))
        better = at(top)
        if better > found:
            return top, better
    return step, found


def _pairs(
    added: np.ndarray, listed: np.ndarray, inside: np.ndarray, groups: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """(Members to leave, documents to come for them, how many pairs promise a gain), the most promising pair first.

    added: float64[k], what the `listed` documents add. In each group the member that adds least is paired with the
    other that adds most, the next with the next, and so on.
    """
    member = inside[listed]
    sides = []
    for side, costs in ((listed[member], added[member]), (listed[~member], -added[~member])):
        order = np.lexsort((costs, groups[side]))
        group = groups[side][order]
        rank = np.arange(group.size) - np.searchsorted(group, group)
        sides.append((side[order], costs[order], group * listed.size + rank))
    (leaving, losses, one), (coming, costs, other) = sides
    _, here, there = np.intersect1d(one, other, assume_unique=True, return_indices=True)
    total = losses[here] + costs[there]
    order = np.argsort(total, kind="stable")
    return leaving[here[order]], coming[there[order]], int((total < 0).sum())


def _collapse(xp: Any, rows: Any) -> Any:
    """Σ_{p≠q} C_pq² of rows [S, d] that lie about 0, S ≥ 1, by the smaller of C and its Gram matrix."""
    size, d = rows.shape
    mean = rows.mean(0)
    if size > d:
        return _off_diagonal(xp, rows.T @ rows - size * mean[:, None] * mean[None, :], size)
    rows = rows - mean
    spread = _varying(xp, (rows * rows).sum(0), size)
    gram = _gram(rows * spread)
    return _less_diagonal(xp, (gram * gram).sum(dtype=xp.float64), spread)


def _off_diagonal(xp: Any, scatter: Any, size: float) -> Any:
    """Σ_{p≠q} C_pq² from M, [d, d], and its weight W."""
    spread = _varying(xp, scatter.diagonal(), size)
    correlation = scatter * spread * spread[:, None]
    return _less_diagonal(xp, (correlation * correlation).sum(dtype=xp.float64), spread)


def _varying(xp: Any, diagonal: Any, size: float) -> Any:
    """[d]: (diag M)^−½, 0 where the column is constant."""
    varies = diagonal > size * _VARIANCE
    return varies / xp.where(varies, diagonal, 1.0) ** 0.5


def _less_diagonal(xp: Any, square: Any, spread: Any) -> Any:
    """Σ_pq C_pq² less the ones on the diagonal; d(d−1) where no column varies."""
    d = spread.shape[0]
    count = (spread > 0).sum()
    return xp.where(count > 0, square - count, float(d * (d - 1)))


def _gram(rows: Any) -> Any:
    """RᵀR or RRᵀ, whichever is smaller: their Frobenius norms are equal."""
    return rows @ rows.T if rows.shape[0] < rows.shape[1] else rows.T @ rows


def _chosen(xp: Any, mask: Any, size: int) -> Any:
    """int64[G, size]: the positions of the ones in each mask."""
    if xp is np:
        return np.nonzero(mask)[1].reshape(len(mask), size)
    # not nonzero, which waits for the device to count
    return xp.topk(mask, size, dim=1, sorted=False).indices


def _check(z: np.ndarray, linear: np.ndarray, budget: int) -> None:
    if linear.shape != z.shape[:1]:
        raise ValueError(f"{len(z)} embeddings but linear scores of shape {list(linear.shape)}")
    if not 0 <= budget <= len(z):
        raise ValueError(f"budget {budget} is not between 0 and the {len(z)} documents of the pool")
