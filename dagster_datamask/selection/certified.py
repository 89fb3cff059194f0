"""The certified solver: Frank–Wolfe on the concave relaxation, then rounding and swaps.

Here: the relaxation max f(m) over m ∈ [0,1]^N with what each group is to get, whose every pass over the embeddings
yields an upper bound, and the search for an integer mask close to it. Not here: what a pass is (`passes`), nor the
final float64 figures (`certificates`).

f(m) = linear(m) − ‖p(m)‖², p being the scaled means of the concave metrics' features, so a document's score at p is
s_i = l_i − 2 φ_i·p, a Frank–Wolfe vertex is the documents with the largest s_i, and the step goes to the exact optimum
over all vertices in use, f being quadratic. Frank–Wolfe needs few passes on anisotropic embeddings and slows down near
the optimum of small or isotropic pools. There it hands over: f falls off from its optimum by at least ‖p − p*‖², so a
gap g confines every optimal p* to ‖p − p*‖ ≤ √g, and a document whose score lies more than 4√(βg) from the cut has
m_i = 0 or 1 in every optimum. The few that are left are solved by accelerated projected gradient, and a full pass
certifies the result. Pools with few masks are enumerated.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, islice, product
from typing import Any

import numpy as np

from dagster_datamask.selection.exact import Cut
from dagster_datamask.selection.passes import MEMORY, Gathered, Part, Passes, Vertex

Progress = Callable[[int, int, dict[str, Any]], None]

# Frank–Wolfe passes before the hand-over; each costs about as much as the screening that would replace it
_FRANK_WOLFE = 24
_ROUNDS = 8
# entries of vectors that may be gathered from the parts
_GATHERED = 1 << 25
_INNER = 150
# candidates on each side of the cut that swaps are looked for among, and how many of them are compared in a move
_SWAP_CANDIDATES = 512
_COMPARED = 96
# moves for which a document that was just swapped stays where it is, at most
_TABU = 10
_GOLDEN = (5**0.5 - 1) / 2
# most exchanges of many documents at once, documents on each side of one, and entries of their running sums
_EXCHANGES = 20
_EXCHANGED = 1024
_PREFIX = 1 << 21
# a share of the hull that is as good as none
_DROPPED = 1e-12
# documents past the cut that may fill the tokens that are left
_FILL = 4096
# entries of all masks of a pool that is enumerated
_ENUMERATED = 1 << 21


@dataclass(frozen=True)
class CertifiedOptions:
    """gap: stop once the mask is within this of the bound, in units of the objective; passes: most Frank–Wolfe and
    screening passes over the whole pool; moves: most swaps of the polish."""

    gap: float = 1e-6
    passes: int = 64
    moves: int = 1000

    def __post_init__(self) -> None:
        if not (np.isfinite(self.gap) and self.gap >= 0):
            raise ValueError(f"the gap to stop at must be finite and not negative, not {self.gap}")
        if self.passes < 1 or self.moves < 0:
            raise ValueError(f"passes ({self.passes}) must be positive and moves ({self.moves}) not negative")


@dataclass(frozen=True)
class Start:
    """Where the relaxation starts: the uniform weights, as a point with its mean of linear. `feasible` where they give
    each group what it is to get, so that they are a point of the hull."""

    point: np.ndarray = field(repr=False)
    linear: float
    feasible: bool


def uniform_start(passes: Passes, means: dict[str, np.ndarray], linear: float) -> Start:
    """The uniform weights of a pool with these means of its features and this mean of linear."""
    size, given = passes.amount, passes.given_size
    pieces = [np.zeros(0)]
    for name, _, scale in passes.features:
        total = size * means[name] + (given * passes.given.mean if passes.given is not None else 0.0)
        pieces.append(scale * total / (size + given))
    return Start(
        np.concatenate(pieces),
        (size * linear + given * passes.given_linear) / (size + given),
        not passes.tokens and len(passes.amounts) == 1,
    )


@dataclass(eq=False)
class Relaxation:
    """The state of the relaxation in search precision.

    point: p(m); value: f(m); bound and bound_point: the least upper bound so far and where it was taken; best_value: f
    of the best integer mask met, which the parts hold as `best`; optimum: f of the best mask of all, in float64, where
    they were enumerated; cut: that of the scores the parts hold; history: (point, score and tie of the cut) of every
    pass, from which any part finds its vertices again.
    """

    point: np.ndarray
    value: float
    bound: float
    bound_point: np.ndarray
    best_value: float = -np.inf
    optimum: float | None = None
    cut: Cut | None = None
    trajectory: list[dict[str, Any]] = field(default_factory=list)
    history: list[tuple[np.ndarray, Cut]] = field(default_factory=list)

    def improve(self, passes: Passes, vertex: Vertex) -> None:
        if vertex.value > self.best_value:
            self.best_value = vertex.value
            passes.keep()


def relax(passes: Passes, start: Start, options: CertifiedOptions, progress: Progress | None = None) -> Relaxation:
    """Maximise the relaxation; something is to be chosen.

    Ends once a vertex is within options.gap of the bound, or the relaxation within a hundredth of that, or after
    options.passes passes. The parts are left with the weights in `base` and the scores at the last point.
    """
    state = Relaxation(start.point, start.linear - float(start.point @ start.point), np.inf, start.point)
    hull = _Hull(passes.size)
    if start.feasible:
        hull.start(start.point, start.linear)
        passes.spread(passes.amount / passes.n)
    if _is_enumerable(passes):
        state.optimum = _enumerate(passes, state)
        _log(state, options, "enumerated", progress)
    full, rounds, note = 0, 0, "frank_wolfe"
    while True:
        passes.score(state.point)
        state.cut = passes.cut(lambda part: part.scores, passes.amounts)
        vertex = passes.take(state.cut)
        full += 1
        state.history.append((state.point, state.cut))
        bound = vertex.bound(state.point)
        if bound < state.bound:
            state.bound, state.bound_point = bound, state.point
        state.improve(passes, vertex)
        _log(state, options, note, progress)
        # search precision is float32: below its noise no step means anything
        noise = 1e-7 * float(state.point @ state.point)
        gap = max(state.bound - state.value, noise)
        if (
            full >= options.passes
            or state.bound - state.best_value <= options.gap
            or (hull.slots and gap <= max(0.01 * options.gap, noise))
        ):
            break
        if full < _FRANK_WOLFE or passes.tokens or _is_crowded(passes, state.cut, gap):
            note = "frank_wolfe"
            if hull.holds(vertex):
                # the best vertex here is one that the hull is at its optimum with
                break
            if len(hull.slots) == MEMORY:
                # all vertices into one point, so that there is room for more
                hull.collapse(passes)
            hull.add(passes, vertex)
            hull.correct()
            state.point = hull.point()
            state.value = hull.linear() - float(state.point @ state.point)
        elif rounds < _ROUNDS:
            note = "screened"
            rounds += 1
            hull.collapse(passes)
            state.point, linear = _solve_screened(passes, state.cut, gap)
            state.value = linear - float(state.point @ state.point)
            hull.start(state.point, linear)
        else:
            break
    hull.collapse(passes)
    return state


class _Hull:
    """The points whose convex combination the relaxation stands at: its start, whose weights the parts hold as `base`,
    and the vertices still in use, which they hold in numbered slots.

    `correct` moves to the best combination of them all (fully corrective Frank–Wolfe, exact line search being the case
    of two), which saves passes: a few small dot products against one over the whole pool.
    """

    def __init__(self, size: int) -> None:
        self._points = np.zeros((0, size))
        self._linears = np.zeros(0)
        self._shares = np.zeros(0)
        # −1 is the start
        self.slots: list[int] = []

    def start(self, point: np.ndarray, linear: float) -> None:
        self._points, self._linears = point[None, :], np.array([linear])
        self._shares, self.slots = np.ones(1), [-1]

    def add(self, passes: Passes, vertex: Vertex) -> None:
        slot = next(s for s in range(MEMORY) if s not in self.slots)
        passes.remember(slot)
        self._points = np.vstack([self._points, vertex.point])
        self._linears = np.append(self._linears, vertex.linear)
        self._shares = np.append(self._shares, 0.0 if self.slots else 1.0)
        self.slots.append(slot)

    def holds(self, vertex: Vertex) -> bool:
        """Whether the vertex is in use already."""
        same = (self._points == vertex.point).all(axis=1) & (self._linears == vertex.linear)
        return bool(same.any())

    def correct(self) -> None:
        """Maximise Σ a_k q_k − ‖Σ a_k c_k‖² over shares a ≥ 0, Σa = 1, by the active-set method of Wolfe's
        minimum-norm-point algorithm: solve without the signs, walk there until a share is 0, drop it, repeat."""
        gram = 2.0 * (self._points @ self._points.T)
        # affinely dependent points leave a direction without curvature; this much lets the walk find its end
        gram[np.diag_indices_from(gram)] += 1e-10 * max(float(gram.diagonal().max()), 1e-300)
        shares = self._shares
        used = np.arange(shares.size)
        while True:
            system = np.ones((used.size + 1, used.size + 1))
            system[:-1, :-1] = gram[np.ix_(used, used)]
            system[-1, -1] = 0.0
            sides = np.append(self._linears[used], 1.0)
            try:
                wanted = np.linalg.solve(system, sides)[:-1]
            except np.linalg.LinAlgError:
                # points that differ by less than rounding: any of the best combinations will do
                wanted = np.linalg.lstsq(system, sides)[0][:-1]
            falling = wanted <= _DROPPED
            if not falling.any():
                break
            drop = np.maximum(shares[used] - wanted, 1e-300)
            reach = np.where(falling, np.maximum(shares[used] - _DROPPED, 0.0) / drop, np.inf)
            first = int(reach.argmin())
            shares = shares.copy()
            shares[used] += min(1.0, float(reach[first])) * (wanted - shares[used])
            shares[used[first]] = 0.0
            used = np.delete(used, first)
            if used.size == 1:
                wanted = np.ones(1)
                break
        self._shares = wanted / wanted.sum()
        self._points, self._linears = self._points[used], self._linears[used]
        self.slots = [self.slots[k] for k in used.tolist()]

    def point(self) -> np.ndarray:
        return self._shares @ self._points

    def linear(self) -> float:
        return float(self._shares @ self._linears)

    def collapse(self, passes: Passes) -> None:
        """Make where the hull stands its start."""
        shares = dict(zip(self.slots, self._shares.tolist(), strict=True))
        passes.collapse(shares.pop(-1, 0.0), shares)
        if self.slots:
            self.start(self.point(), self.linear())


def round_and_polish(
    passes: Passes, state: Relaxation, options: CertifiedOptions, progress: Progress | None = None
) -> None:
    """Leave the parts' `best` as the best of the vertices met, the rounded relaxation, and swaps from there.

    Under a token budget what is left of it is then filled with documents that still fit, whatever they add.
    """
    found = passes.map(lambda part: (part.scores.min(initial=np.inf), part.scores.max(initial=-np.inf)))
    low, high = min(low for low, _ in found), max(high for _, high in found)
    # equal weights are ordered by score
    tilt = 1e-9 / (high - low) if high > low else 0.0

    def keys(part: Part) -> np.ndarray:
        return part.base + tilt * part.scores

    def drawn(part: Part) -> np.ndarray:
        # a document is above the cut with about the probability of its weight
        return part.base + part.hashes * 2.0**-64

    if state.optimum is None and state.bound - state.best_value > options.gap:
        state.improve(passes, passes.take(passes.cut(keys, passes.amounts), keys))
        _log(state, options, "rounded", progress)
        if state.bound - state.best_value > options.gap:
            state.improve(passes, passes.take(passes.cut(drawn, passes.amounts), drawn))
            _log(state, options, "drawn", progress)
        passes.restore()
        for _ in range(_EXCHANGES):
            before = state.best_value
            if state.bound - before <= options.gap:
                break
            state.improve(passes, _exchange(passes))
            _log(state, options, "exchanged", progress)
            if state.best_value - before <= 0.1 * options.gap:
                break
        # what all moves together can gain is of the order of 4β/S² each
        gain = options.moves * 4.0 * passes.beta / max(passes.amount, 1) ** 2
        if not passes.tokens and gain >= 0.1 * options.gap:
            passes.restore()
            state.improve(passes, _swap(passes, options.moves))
            _log(state, options, "swapped", progress)
    if passes.tokens:
        passes.restore()
        state.best_value = _fill(passes, keys).value
        passes.keep()
        _log(state, options, "filled", progress)


def _exchange(passes: Passes) -> Vertex:
    """Members that cost most to keep leave for documents of their group that would bring most, as many at once as f
    grows by: one pass, and the best prefix of the pairs. The members stay where no exchange is any good.

    A mask drawn from the weights lies about 1/√S from the relaxation's point, too far for single swaps; each exchange
    takes off most of what is left.
    """
    here, linear = passes.total()
    everything = passes.given_size + passes.held
    passes.score(here / max(everything, 1))
    most = max(1, min(_EXCHANGED, _PREFIX // max(passes.size, 1)))
    inside = passes.count(lambda part: part.member)
    documents = _both_sides(passes, inside, most)
    held = documents.inside
    pairs = _pairs(passes, documents)
    if not pairs.size:
        return passes.exchange(documents, np.zeros_like(held), np.zeros_like(held))
    out, into = pairs.T
    # f after the first b of the exchanges, from the sums
    steps = np.cumsum(_rows(passes, documents, into) - _rows(passes, documents, out), axis=0)
    points = here + steps
    costs = documents.costs
    amounts = everything + np.cumsum(costs[into] - costs[out])
    linears = linear + np.cumsum(costs[into] * documents.linear[into] - costs[out] * documents.linear[out])
    values = linears / amounts - np.einsum("bi,bi->b", points, points) / amounts**2
    best = int(values.argmax())
    if values[best] <= linear / everything - float(here @ here) / everything**2:
        pairs = pairs[:0]
    come, gone = np.zeros_like(held), np.zeros_like(held)
    come[pairs[: best + 1, 1]], gone[pairs[: best + 1, 0]] = True, True
    return passes.exchange(documents, come, gone)


def _pairs(passes: Passes, documents: Gathered) -> np.ndarray:
    """int64[b, 2]: members and the documents that take their places, the best pairs first. Partners are of one group
    and, with tokens, the one that comes takes no more than the one that leaves, nor less than half of it."""
    found = []
    for g in np.unique(documents.groups).tolist():
        leaving = np.flatnonzero(documents.inside & (documents.groups == g))
        coming = np.flatnonzero(~documents.inside & (documents.groups == g))
        leaving = leaving[np.argsort(documents.keys[leaving], kind="stable")]
        coming = coming[np.argsort(-documents.keys[coming], kind="stable")]
        if passes.tokens:
            free = np.ones(coming.size, bool)
            for out in leaving.tolist():
                cost = documents.costs[out]
                fits = np.flatnonzero(free & (documents.costs[coming] <= cost) & (2 * documents.costs[coming] >= cost))
                if fits.size:
                    found.append((out, int(coming[fits[0]])))
                    free[fits[0]] = False
        else:
            found += list(zip(leaving.tolist(), coming.tolist(), strict=False))
    pairs = np.array(found, np.int64).reshape(-1, 2)
    gains = documents.keys[pairs[:, 1]] - documents.keys[pairs[:, 0]]
    order = np.argsort(-gains, kind="stable")
    return pairs[order[gains[order] > 0]]


def _rows(passes: Passes, documents: Gathered, at: np.ndarray) -> np.ndarray:
    """float64[b, size of a point]: cost·√β φ of each."""
    units = documents.unit[at].astype(np.float64)
    pieces = [scale * feature.rows(units) for _, feature, scale in passes.features]
    return np.hstack([np.zeros((at.size, 0)), *pieces]) * documents.costs[at, None]


def _both_sides(passes: Passes, inside: int, most: int) -> Gathered:
    """The `most` members with the lowest scores and as many other documents with the highest."""

    def side(held: bool, size: int) -> Gathered:
        sign = -1.0 if held else 1.0
        return _best(passes, lambda part: np.where(part.member == held, sign * part.scores, -np.inf), min(size, most))

    members, others = side(True, inside), side(False, passes.n - inside)
    joined = members.joined(others)
    # keys are the scores themselves, whichever side they were picked from
    return replace(joined, keys=np.where(joined.inside, -joined.keys, joined.keys))


def _fill(passes: Passes, keys: Callable[[Part], np.ndarray]) -> Vertex:
    """Members and, in the order of their keys, the documents that still fit into what their group is to get."""
    groups = len(passes.amounts)
    held = np.zeros(groups, np.int64)

    def hold(part: Part) -> np.ndarray:
        held = np.zeros(groups, np.int64)
        np.add.at(held, part.group[part.member], part.cost[part.member])
        return held

    for of_part in passes.map(hold):
        held += of_part
    out = passes.count(lambda part: ~part.member)
    documents = _best(passes, lambda part: np.where(part.member, -np.inf, keys(part)), min(_FILL, out))
    room = np.array(passes.amounts) - held
    come = np.zeros(len(documents), bool)
    for k in np.lexsort((documents.ties, -documents.keys)).tolist():
        if documents.costs[k] <= room[documents.groups[k]]:
            come[k] = True
            room[documents.groups[k]] -= documents.costs[k]
    return passes.exchange(documents, come, np.zeros_like(come))


def _best(passes: Passes, keys: Callable[[Part], np.ndarray], size: int) -> Gathered:
    """The `size` documents with the best keys, whatever their group."""
    at = passes.cut(keys, [size], plain=True)
    return passes.gather(lambda part: at.whole(part.scored(keys(part), plain=True)), keys)


def _away(part: Part, at: Cut) -> np.ndarray:
    """Each document's score above its group's cut."""
    return part.scores - at.level(part.groups)


def _radius(passes: Passes, gap: float) -> float:
    return 4.0 * math.sqrt(passes.beta * gap)


def _is_crowded(passes: Passes, at: Cut, gap: float) -> bool:
    """Whether the undecided documents' vectors are too many to gather."""
    radius = _radius(passes, gap)
    return passes.count(lambda part: np.abs(_away(part, at)) <= radius) * passes.d > _GATHERED


def _solve_screened(passes: Passes, at: Cut, gap: float) -> tuple[np.ndarray, float]:
    """Accelerated projected gradient (FISTA with gradient restart) over the documents the gap leaves undecided.

    Leaves the weights in `base` and returns (their point, their mean of linear).
    """
    radius = _radius(passes, gap)
    free = passes.gather(lambda part: np.abs(_away(part, at)) <= radius)
    fixed = passes.hold(lambda part: _away(part, at) > radius)
    everything = passes.amount + passes.given_size
    room = np.array(passes.amounts, np.float64) - fixed.held
    by_group = [np.flatnonzero(free.groups == g) for g in range(len(room))]

    def project(point: np.ndarray) -> np.ndarray:
        projected = np.empty_like(point)
        for rows, left in zip(by_group, room.tolist(), strict=True):
            projected[rows] = _project(point[rows], left) if rows.size else 0.0
        return projected

    # minimise everything²/2·(‖p‖² − linear), whose slope in x_i is φ_i·(everything·p) − everything·l_i/2
    pull = 0.5 * everything * free.linear
    steepest = _largest_eigenvalue(passes, free.unit)
    # at most a few whole passes' worth of work before the next certificate
    inner = int(np.clip(12 * passes.n / max(len(free), 1), 10, _INNER))
    x = project(free.base)
    y, momentum = x, 1.0
    for _ in range(inner):
        total = fixed.point + _features(passes, free.unit, y)
        moved = project(y - (_products(passes, free.unit, total) - pull) / steepest)
        if (y - moved) @ (moved - x) > 0:
            momentum = 1.0
        following = 0.5 * (1.0 + math.sqrt(1.0 + 4.0 * momentum * momentum))
        y = moved + (momentum - 1.0) / following * (moved - x)
        x, momentum = moved, following
    passes.reads += (2 * inner + 2) * len(free)

    def weigh(part: Part, free: tuple[np.ndarray, np.ndarray]) -> None:
        part.base[:] = _away(part, at) > radius
        part.base[free[0]] = free[1]

    theirs = [free.part == number for number in range(len(passes.parts))]
    passes.map(weigh, [(free.row[here], x[here]) for here in theirs])
    point = fixed.point.copy()
    for a in range(0, len(free), _FILL):
        point += _features(passes, free.unit[a : a + _FILL].astype(np.float64), x[a : a + _FILL])
    return point / everything, (fixed.linear + float(x @ free.linear)) / everything


def _features(passes: Passes, unit: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Σ x_i φ_i, scaled: float64[size of a point]."""
    pieces = [scale * feature.total(unit, x) for _, feature, scale in passes.features]
    return np.concatenate(pieces) if pieces else np.zeros(0)


def _products(passes: Passes, unit: np.ndarray, point: np.ndarray) -> np.ndarray:
    """φ_i·point, scaled: float64[k]."""
    found = np.zeros(len(unit))
    for feature, scale, piece in passes.pieces(point):
        found += scale * feature.products(unit, piece)
    return found


def _largest_eigenvalue(passes: Passes, unit: np.ndarray) -> float:
    """A little more than the largest eigenvalue of Σ φ_i φ_iᵀ, by power iteration."""
    # weights that cancel for no pair of opposite rows
    direction = _features(passes, unit, np.where(np.arange(len(unit)), 1.0, 2.0))
    size = 0.0
    for _ in range(15):
        norm = float(np.linalg.norm(direction))
        if not norm:
            break
        direction = _features(passes, unit, _products(passes, unit, direction / norm))
        size = float(np.linalg.norm(direction))
    # every feature has length √β, so the largest eigenvalue is at least β
    return 1.1 * max(size, passes.beta)


def _project(point: np.ndarray, room: float) -> np.ndarray:
    """The nearest weights in [0, 1] that sum to `room` (Euclidean): clip(point − shift, 0, 1) for the one shift.

    The sum is piecewise linear in the shift and turns where an entry leaves 0 (at its value) or reaches 1 (1 below).
    """
    turns = np.concatenate([point, point - 1.0])
    order = np.argsort(-turns, kind="stable")
    turns = turns[order]
    slopes = np.cumsum(np.where(order < point.size, 1.0, -1.0))
    sums = np.concatenate([[0.0], np.cumsum(slopes[:-1] * (turns[:-1] - turns[1:]))])
    k = min(int(np.searchsorted(sums, room)), sums.size - 1)
    shift = turns[k]
    if k and sums[k] > room:
        shift = turns[k - 1] - (room - sums[k - 1]) / slopes[k - 1]
    return np.clip(point - shift, 0.0, 1.0)


def _swap(passes: Passes, moves: int) -> Vertex:
    """Swap one document in for one of its group out, the best pair first, among those nearest to the cut.

    Goes on past a local optimum for as long as `moves` lasts, with a tabu on documents just moved, and returns the
    best mask met: never one worse than the members.
    """
    documents = _both_sides(passes, passes.count(lambda part: part.member), _SWAP_CANDIDATES)
    held = documents.inside
    if held.all() or not held.any():
        return passes.exchange(documents, np.zeros_like(held), np.zeros_like(held))
    rows = documents.unit.astype(np.float64)
    cosines = rows @ rows.T
    gram = sum(scale * scale * feature.gram(cosines) for _, feature, scale in passes.features) + np.zeros_like(cosines)
    everything = passes.amount + passes.given_size
    now = passes.exchange(documents, np.zeros_like(held), np.zeros_like(held))
    # everything²·f changes by gain_j − gain_i − 2(β − φ_i·φ_j) when j comes in for i
    gain = everything * documents.linear - 2.0 * everything * _products(passes, rows, now.point)
    # a tabu that held a whole side would leave no move, and one of constant length goes round in circles
    longest = min(_TABU, int(min(held.sum(), (~held).sum())) - 1)
    tenures = np.rint(longest * ((np.arange(moves) * _GOLDEN) % 1.0)).astype(np.int64)
    free_at = np.zeros(len(documents), np.int64)
    change, best_change, start, best = 0.0, 0.0, held, held.copy()
    held = held.copy()
    for move in range(moves):
        ready = free_at <= move
        leaving, coming = np.flatnonzero(held & ready), np.flatnonzero(~held & ready)
        leaving = leaving[np.argsort(gain[leaving], kind="stable")[:_COMPARED]]
        coming = coming[np.argsort(-gain[coming], kind="stable")[:_COMPARED]]
        deltas = gain[coming][None, :] - gain[leaving][:, None] - 2.0 * (passes.beta - gram[np.ix_(leaving, coming)])
        deltas[documents.groups[leaving][:, None] != documents.groups[coming][None, :]] = -np.inf
        i, j = divmod(int(deltas.argmax()), coming.size)
        if not np.isfinite(deltas[i, j]):
            continue
        out, into = leaving[i], coming[j]
        change += float(deltas[i, j])
        gain -= 2.0 * (gram[into] - gram[out])
        held[out], held[into] = False, True
        free_at[[out, into]] = move + 1 + tenures[move]
        if change > best_change + 1e-12:
            best_change, best = change, held.copy()
    return passes.exchange(documents, best & ~start, start & ~best)


def _is_enumerable(passes: Passes) -> bool:
    """Whether all masks of the pool can be looked at."""
    if passes.tokens or passes.n > 1 << 10:
        return False
    sizes = np.zeros(len(passes.amounts), np.int64)
    groups = sizes.size
    for of_part in passes.map(lambda part: np.bincount(part.group, minlength=groups)):
        sizes += of_part
    masks = math.prod(math.comb(n, k) for n, k in zip(sizes.tolist(), passes.amounts, strict=True))
    return masks * passes.n <= _ENUMERATED


def _enumerate(passes: Passes, state: Relaxation) -> float:
    """f of the best mask of all, in float64, having made it the best."""
    documents = passes.gather(lambda part: np.ones(part.member.size, bool))
    rows = np.empty((len(documents), passes.d))
    theirs = [documents.part == number for number in range(len(passes.parts))]
    found = passes.map(lambda part, at: part.vectors.double(at), [documents.row[here] for here in theirs])
    for here, of_part in zip(theirs, found, strict=True):
        rows[here] = of_part
    size, everything = passes.amount, passes.amount + passes.given_size
    cosines = rows @ rows.T
    gram = sum(scale * scale * feature.gram(cosines) for _, feature, scale in passes.features) + np.zeros_like(cosines)
    linear = documents.linear.copy()
    constant = passes.given_size * passes.given_linear
    if passes.given is not None:
        linear -= 2.0 * passes.beta * passes.given_size * (rows @ passes.given.mean) / everything
        constant -= passes.beta * passes.given_size**2 * float(passes.given.mean @ passes.given.mean) / everything
    best, best_value = np.zeros(len(documents), bool), -np.inf
    groups = [np.flatnonzero(documents.groups == g).tolist() for g in range(len(passes.amounts))]
    chosen = product(*(combinations(group, k) for group, k in zip(groups, passes.amounts, strict=True)))
    every = (tuple(chain.from_iterable(parts)) for parts in chosen)
    while some := list(islice(every, 4096)):
        masks = np.zeros((len(some), len(documents)))
        masks[np.arange(len(some))[:, None], np.array(some, np.int64).reshape(len(some), size)] = 1.0
        values = masks @ linear - np.einsum("mi,mi->m", masks @ gram, masks) / everything
        k = int(values.argmax())
        if values[k] > best_value:
            best_value, best = float(values[k]), masks[k].astype(bool)
    held = documents.inside
    state.improve(passes, passes.exchange(documents, best & ~held, held & ~best))
    return (constant + best_value) / everything


def _log(state: Relaxation, options: CertifiedOptions, note: str, progress: Progress | None) -> None:
    step = len(state.trajectory) + 1
    entry = {"step": step, "value": state.best_value, "bound": state.bound, "note": note}
    if not np.isfinite(state.bound):
        del entry["bound"]
    state.trajectory.append(entry)
    if progress is not None:
        progress(step, options.passes, entry)
