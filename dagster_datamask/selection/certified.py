"""The certified solver: Frank–Wolfe on the concave relaxation, then rounding and swaps.

Here: the relaxation max f(m) over m ∈ [0,1]^N, Σm = S, whose every pass over the embeddings yields an upper bound,
and the search for an integer mask close to it. Not here: the final float64 figures (`certificates`).

With s_i(v) = l_i − 2β ẑ_i·v at v = (1/S)Σ m_i ẑ_i, a Frank–Wolfe vertex is the S documents with the largest s_i, and
the step goes to the exact optimum over all vertices in use, f being quadratic. Frank–Wolfe needs few passes on
anisotropic embeddings and slows down near the optimum of small or isotropic pools. There it hands over: since f is
β-strongly concave in v, a gap g confines every optimal v* to ‖v − v*‖ ≤ √(g/β), and a document whose score lies more
than 4√(βg) from the S-th best has m_i = 0 or 1 in every optimum. The few that are left are solved by accelerated
projected gradient, and a full pass certifies the result.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dagster_datamask.accelerator import Accelerator
from dagster_datamask.selection.certificates import search_dots
from dagster_datamask.selection.objectives import Pool, map_blocks
from dagster_datamask.selection.policy_gradient import Progress
from dagster_datamask.selection.sampling import top_s

Dots = Callable[[np.ndarray], np.ndarray]

# Frank–Wolfe passes before the hand-over; each costs about as much as the screening that would replace it
_FRANK_WOLFE = 24
_ROUNDS = 8
# entries of a pool that may be copied whole
_SMALL = 1 << 24
_INNER = 150
# candidates on each side of the cut that swaps are looked for among, and how many of them are compared in a move
_SWAP_CANDIDATES = 512
_COMPARED = 96
# moves for which a document that was just swapped stays where it is, at most
_TABU = 10
_GOLDEN = (5**0.5 - 1) / 2
# a share of the hull that is as good as none
_DROPPED = 1e-12


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


@dataclass(eq=False)
class Relaxation:
    """The state of the relaxation in search precision.

    weights: m, float64[N]; v: float64[d]; scores: s_i(v), float64[N]; bound and point: the least upper bound so far
    and where it was taken; value: f(m); best and best_value: the best integer mask met on the way, ascending positions;
    passes: reads of the embeddings in units of the whole pool.
    """

    weights: np.ndarray
    v: np.ndarray
    scores: np.ndarray
    bound: float
    point: np.ndarray
    value: float
    best: np.ndarray
    best_value: float
    passes: float = 0.0
    trajectory: list[dict[str, Any]] = field(default_factory=list)


def relax(
    pool: Pool,
    budget: int,
    options: CertifiedOptions,
    *,
    accelerator: Accelerator,
    progress: Progress | None = None,
) -> Relaxation:
    """Maximise the relaxation; 1 ≤ budget ≤ N.

    Ends once a vertex is within options.gap of the bound, or the relaxation within a hundredth of that, or after
    options.passes passes.
    """
    linear, beta = pool.linear, pool.beta
    dots = _dots_on(pool, accelerator)
    state = Relaxation(
        weights=np.full(pool.n, budget / pool.n),
        v=pool.mean,
        scores=np.zeros(0),
        bound=np.inf,
        point=pool.mean,
        value=float(linear.mean() - beta * (pool.mean @ pool.mean)),
        best=np.zeros(0, np.int64),
        best_value=-np.inf,
    )
    hull = _Hull(state.v, float(linear.mean()))
    vertex, total = np.zeros(0, np.int64), np.zeros(pool.vectors.shape[1])
    full_passes, rounds, note = 0, 0, "frank_wolfe"
    while True:
        state.scores = linear - 2.0 * beta * dots(state.v)
        previous, vertex = vertex, top_s(state.scores, budget)
        total, moved = _move_total(pool, total, previous, vertex)
        state.passes += 1.0 + moved / pool.n
        full_passes += 1
        mean, quality = total / budget, float(linear[vertex].mean())
        bound = float(beta * (state.v @ state.v) + state.scores[vertex].mean())
        if bound < state.bound:
            state.bound, state.point = bound, state.v
        value = float(quality - beta * (mean @ mean))
        if value > state.best_value:
            state.best, state.best_value = vertex, value
        _log(state, options, note, progress)
        # search precision is float32: below its noise no step means anything
        noise = 1e-7 * beta * float(state.v @ state.v)
        gap = max(state.bound - state.value, noise)
        if (
            full_passes >= options.passes
            or state.bound - state.best_value <= options.gap
            or gap <= max(0.01 * options.gap, noise)
        ):
            break
        if full_passes < _FRANK_WOLFE or _is_crowded(pool, budget, state, gap):
            note = "frank_wolfe"
            hull.add(vertex, mean, quality)
            hull.correct(beta)
            state.v = hull.mean()
            state.value = float(hull.quality() - beta * (state.v @ state.v))
        elif rounds < _ROUNDS:
            note = "screened"
            rounds += 1
            state.weights = hull.weights(state.weights)
            _solve_screened(pool, budget, state, gap)
            state.value = float(linear @ state.weights / budget - beta * (state.v @ state.v))
            hull = _Hull(state.v, float(linear @ state.weights / budget))
        else:
            break
    state.weights = hull.weights(state.weights)
    return state


class _Hull:
    """The points whose convex combination the relaxation stands at: its start, and the vertices still in use.

    `correct` moves to the best combination of them all (fully corrective Frank–Wolfe, exact line search being the case
    of two), which saves passes: a few small dot products against one over the whole pool.
    """

    def __init__(self, mean: np.ndarray, quality: float) -> None:
        self._means = mean[None, :]
        self._qualities = np.array([quality])
        self._shares = np.ones(1)
        # the start is not a vertex
        self._vertices: list[np.ndarray | None] = [None]

    def add(self, vertex: np.ndarray, mean: np.ndarray, quality: float) -> None:
        self._means = np.vstack([self._means, mean])
        self._qualities = np.append(self._qualities, quality)
        self._shares = np.append(self._shares, 0.0)
        self._vertices.append(vertex)

    def correct(self, beta: float) -> None:
        """Maximise Σ a_k q_k − β‖Σ a_k c_k‖² over shares a ≥ 0, Σa = 1, by the active-set method of Wolfe's
        minimum-norm-point algorithm: solve without the signs, walk there until a share is 0, drop it, repeat."""
        gram = 2.0 * beta * (self._means @ self._means.T)
        # affinely dependent points leave a direction without curvature; this much lets the walk find its end
        gram[np.diag_indices_from(gram)] += 1e-10 * max(float(gram.diagonal().max()), 1e-300)
        shares = self._shares
        used = np.arange(shares.size)
        while True:
            system = np.ones((used.size + 1, used.size + 1))
            system[:-1, :-1] = gram[np.ix_(used, used)]
            system[-1, -1] = 0.0
            wanted = np.linalg.solve(system, np.append(self._qualities[used], 1.0))[:-1]
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
        self._means, self._qualities = self._means[used], self._qualities[used]
        self._vertices = [self._vertices[k] for k in used.tolist()]

    def mean(self) -> np.ndarray:
        return self._shares @ self._means

    def quality(self) -> float:
        return float(self._shares @ self._qualities)

    def weights(self, start: np.ndarray) -> np.ndarray:
        """float64[N]: m, where `start` are the weights of the point that is not a vertex."""
        weights = np.zeros(start.size)
        for share, vertex in zip(self._shares.tolist(), self._vertices, strict=True):
            if vertex is None:
                weights += share * start
            else:
                weights[vertex] += share
        return weights


def round_and_polish(
    pool: Pool, budget: int, state: Relaxation, options: CertifiedOptions, progress: Progress | None = None
) -> np.ndarray:
    """int64[S], ascending: the best of the vertices met, the rounded relaxation, and swaps from there."""
    linear, beta = pool.linear, pool.beta
    if state.bound - state.best_value <= options.gap:
        return state.best
    spread = float(np.ptp(state.scores))
    # equal weights are ordered by score
    rounded = top_s(state.weights + (state.scores * (1e-9 / spread) if spread else 0.0), budget)
    mean = _total(pool, rounded) / budget
    value = float(linear[rounded].mean() - beta * (mean @ mean))
    state.passes += budget / pool.n
    if value > state.best_value:
        state.best, state.best_value = rounded, value
    _log(state, options, "rounded", progress)
    # what all moves together can gain is of the order of 4β/S² each
    if options.moves * 4.0 * beta / budget**2 < 0.1 * options.gap:
        return state.best
    state.best = _swap(pool, state, budget, options.moves)
    mean = _total(pool, state.best) / budget
    state.best_value = float(linear[state.best].mean() - beta * (mean @ mean))
    state.passes += min(2 * _SWAP_CANDIDATES, pool.n) / pool.n
    _log(state, options, "swapped", progress)
    return state.best


def _undecided(pool: Pool, budget: int, state: Relaxation, gap: float) -> tuple[np.ndarray, np.ndarray]:
    """(positions whose weight the gap leaves open, positions whose weight is 1 in every optimum)."""
    threshold = np.partition(state.scores, pool.n - budget)[pool.n - budget]
    radius = 4.0 * np.sqrt(pool.beta * gap)
    free = np.flatnonzero(np.abs(state.scores - threshold) <= radius)
    return free, np.flatnonzero(state.scores > threshold + radius)


def _is_crowded(pool: Pool, budget: int, state: Relaxation, gap: float) -> bool:
    """Whether a copy of the undecided documents' vectors would cost real memory."""
    if pool.vectors.size <= _SMALL:
        return False
    return 4 * _undecided(pool, budget, state, gap)[0].size > pool.n


def _solve_screened(pool: Pool, budget: int, state: Relaxation, gap: float) -> None:
    """Accelerated projected gradient (FISTA with gradient restart) over the documents the gap leaves undecided."""
    beta = pool.beta
    free, fixed = _undecided(pool, budget, state, gap)
    rows = pool.vectors if free.size == pool.n else pool.vectors[free]
    base = _total(pool, fixed)
    room = float(budget - fixed.size)
    # minimise ½‖base + Σ m_i ẑ_i‖² − (S/2β) Σ m_i l_i, which is −f up to a factor
    pull = pool.linear[free] * (budget / (2.0 * beta))
    steepest = _largest_eigenvalue(rows)
    # at most a few whole passes' worth of work before the next certificate
    inner = int(np.clip(12 * pool.n / free.size, 10, _INNER))
    x = _project(state.weights[free], room)
    y, momentum = x, 1.0
    for _ in range(inner):
        total = base + y.astype(np.float32) @ rows
        slope = rows @ total.astype(np.float32) - pull
        moved = _project(y - slope / steepest, room)
        if (y - moved) @ (moved - x) > 0:
            momentum = 1.0
        following = 0.5 * (1.0 + np.sqrt(1.0 + 4.0 * momentum * momentum))
        y = moved + (momentum - 1.0) / following * (moved - x)
        x, momentum = moved, following
    state.passes += (2 * inner + 2) * free.size / pool.n + fixed.size / pool.n
    state.weights = np.zeros(pool.n)
    state.weights[fixed] = 1.0
    state.weights[free] = x
    for part in map_blocks(lambda a, b: np.einsum("i,ij->j", x[a:b], rows[a:b]), free.size):
        base += part
    state.v = base / budget


def _largest_eigenvalue(rows: np.ndarray) -> float:
    """A little more than the largest eigenvalue of rowsᵀ·rows, by power iteration; rows: float32[k, d]."""
    direction = rows.sum(axis=0, dtype=np.float64) + rows[0]
    size = 0.0
    for _ in range(15):
        norm = float(np.linalg.norm(direction))
        if not norm:
            break
        direction = ((rows @ (direction / norm).astype(np.float32)) @ rows).astype(np.float64)
        size = float(np.linalg.norm(direction))
    # every row is a unit vector, so the largest eigenvalue is at least 1
    return 1.1 * max(size, 1.0)


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


def _swap(pool: Pool, state: Relaxation, budget: int, moves: int) -> np.ndarray:
    """Swap one document in for one out, the best pair first, among those nearest to the cut.

    Goes on past a local optimum for as long as `moves` lasts, with a tabu on documents just moved, and returns the
    best mask met: never one worse than state.best.
    """
    beta = pool.beta
    inside = np.zeros(pool.n, bool)
    inside[state.best] = True
    # the documents that cost least to lose and those that would bring most, by the relaxation's scores
    start = np.concatenate(
        [
            side[top_s(sign * state.scores[side], min(side.size, _SWAP_CANDIDATES))]
            for side, sign in ((np.flatnonzero(inside), -1.0), (np.flatnonzero(~inside), 1.0))
        ]
    )
    if start.size == 0 or inside[start].all() or not inside[start].any():
        return state.best
    rows = pool.rows(start)
    gram = np.concatenate(map_blocks(lambda a, b: rows[a:b] @ rows.T, start.size, block=256))
    total = _total(pool, state.best)
    # S²·f changes by gain_j − gain_i − 2β(1 − ẑ_i·ẑ_j) when j comes in for i
    gain = budget * pool.linear[start] - 2.0 * beta * (rows @ total)
    held = inside[start]
    # a tabu that held a whole side would leave no move, and one of constant length goes round in circles
    longest = min(_TABU, int(min(held.sum(), (~held).sum())) - 1)
    tenures = np.rint(longest * ((np.arange(moves) * _GOLDEN) % 1.0)).astype(np.int64)
    free_at = np.zeros(start.size, np.int64)
    change, best_change, best_held = 0.0, 0.0, held.copy()
    for move in range(moves):
        ready = free_at <= move
        leaving = np.flatnonzero(held & ready)
        coming = np.flatnonzero(~held & ready)
        leaving = leaving[top_s(-gain[leaving], min(leaving.size, _COMPARED))]
        coming = coming[top_s(gain[coming], min(coming.size, _COMPARED))]
        deltas = gain[coming][None, :] - gain[leaving][:, None] - 2.0 * beta * (1.0 - gram[np.ix_(leaving, coming)])
        i, j = divmod(int(deltas.argmax()), coming.size)
        out, into = leaving[i], coming[j]
        change += float(deltas[i, j])
        gain -= 2.0 * beta * (gram[into] - gram[out])
        held[out], held[into] = False, True
        free_at[[out, into]] = move + 1 + tenures[move]
        if change > best_change + 1e-12:
            best_change, best_held = change, held.copy()
    inside[start] = best_held
    return np.flatnonzero(inside)


def _move_total(pool: Pool, total: np.ndarray, previous: np.ndarray, vertex: np.ndarray) -> tuple[np.ndarray, int]:
    """(The vertex's sum of ẑ, from the previous vertex's where they share most documents; rows read)."""
    come = np.setdiff1d(vertex, previous, assume_unique=True)
    if 2 * come.size >= vertex.size:
        return _total(pool, vertex), vertex.size
    gone = np.setdiff1d(previous, vertex, assume_unique=True)
    return total + _total(pool, come) - _total(pool, gone), come.size + gone.size


def _total(pool: Pool, positions: np.ndarray) -> np.ndarray:
    """float64[d]: the sum of the search vectors at these positions."""
    total = np.zeros(pool.vectors.shape[1])
    for part in map_blocks(lambda a, b: pool.vectors[positions[a:b]].sum(axis=0, dtype=np.float64), positions.size):
        total += part
    return total


def _dots_on(pool: Pool, accelerator: Accelerator) -> Dots:
    """ẑ·v for all documents, on the device that the accelerator names."""
    if not accelerator.is_cuda:
        return lambda v: search_dots(pool, v)
    import torch

    vectors = torch.from_numpy(pool.vectors).to(accelerator.device)

    def dots(v: np.ndarray) -> np.ndarray:
        narrow = torch.from_numpy(v.astype(np.float32)).to(accelerator.device)
        return (vectors @ narrow).cpu().numpy()

    return dots


def _log(state: Relaxation, options: CertifiedOptions, note: str, progress: Progress | None) -> None:
    step = len(state.trajectory) + 1
    entry = {
        "step": step,
        "value": state.best_value,
        "bound": state.bound,
        "note": note,
    }
    state.trajectory.append(entry)
    if progress is not None:
        progress(step, options.passes, entry)
