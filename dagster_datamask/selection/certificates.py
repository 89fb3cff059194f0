"""What a mask is worth, and how far from the best mask it can be at most.

Here: the float64 evaluation of a mask, the upper bounds, and the certificate made of both. Not here: the search for a
good mask or for the point where the bound is smallest (`certified`).

For the concave metrics −‖·‖² and any vector p, −‖m‖² ≤ ‖p‖² − 2 m·p, so every U of S documents has
f(U) ≤ ‖p‖² + the mean of the S largest l_i − 2 φ_i·p. Facility location F is monotone and submodular, so
F(U') ≤ F(U) + Σ_{x ∈ U'} [F(U ∪ x) − F(U)], which adds S times that gain to x's score. For DiSF as its authors define
it no bound is known.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from dagster_datamask.selection.exact import HALF_ULP_32, HALF_ULP_64, GridSum, ScalarSum, gamma
from dagster_datamask.selection.objectives import Given, map_blocks
from dagster_datamask.selection.passes import Part, Passes
from dagster_datamask.selection.vectors import Feature

# a share of less than this is a share of nothing
NO_GAIN = 1e-9
# rounds of the search for the worst number of tokens
_ROUNDS = 20
_BLOCK = 64
# rows whose products are summed at once
_BLOCK_OF_SECOND = 4096


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A mask's worth in float64: value = λ·quality + (1−λ)·diversity + Σ weight·score.

    quality: mean scaled score, and quality_raw: mean score as given (None where there is none to average); diversity:
    Σ weight·metric in the objective's scale, metrics: each of them alone; scores: mean scaled further scores; documents
    and tokens (None where they are not counted) of the mask; mean_vector: float64[d], the mean of ẑ over the mask. What
    is given to a mask beforehand is part of all means.
    """

    value: float
    quality: float | None
    quality_raw: float | None
    diversity: float
    metrics: dict[str, float]
    scores: dict[str, float]
    documents: int
    tokens: int | None
    mean_vector: np.ndarray = field(repr=False)


@dataclass(frozen=True, eq=False)
class Certificate:
    """How good a mask is, for its feasible set.

    upper_bound: no mask of the feasible set is worth more, float rounding included; numerical_error: what rounding
    can have moved value and bound by together, already added to the bound; gap = upper_bound − value ≥ 0;
    baseline: f₀, the expectation over uniform masks of the same size; share: (value − f₀)/(upper_bound − f₀), None
    where upper_bound − f₀ < 1e-9; feasible_set: what the bound is about; reason: why a figure is missing;
    point: the p at which the bound was taken.
    """

    upper_bound: float | None
    numerical_error: float | None
    gap: float | None
    share: float | None
    baseline: float | None
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


@dataclass(frozen=True)
class Terms:
    """What f is made of: lam, λ; diversity {metric: weight}, (1−λ) not included; scores {further score: weight}."""

    lam: float
    diversity: dict[str, float]
    scores: dict[str, float] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, float]:
        """{metric: its weight in f}, those of weight 0 left out."""
        return {name: (1.0 - self.lam) * w for name, w in self.diversity.items() if w and self.lam < 1}

    @property
    def beta(self) -> float:
        """The weight of −‖mean ẑ‖² in f."""
        return self.weights.get("pws", 0.0)

    def linear_of(self, given: Given | None) -> float:
        """What of f is linear, of what is given; 0 of nothing."""
        if given is None:
            return 0.0
        return self.lam * given.quality + sum(w * given.scores.get(name, 0.0) for name, w in self.scores.items())


def certify(
    passes: Passes,
    terms: Terms,
    evaluation: Evaluation,
    feasible: dict[str, Any],
    point: np.ndarray,
    *,
    means: dict[str, np.ndarray],
    linear: float,
    optimum: float | None = None,
    bound: float | None = None,
    more_error: float = 0.0,
) -> Certificate:
    """The certificate of a mask with this evaluation, with the bound taken at `point`.

    means: {concave metric: mean of φ over the pool}; linear: the pool's mean of it; optimum: f of the best mask where
    all were looked at; bound: where there is another than `upper_bound`, with the rounding error it has more.
    """
    if not passes.amount:
        only = "budget 0: the empty mask is the only one"
        error = 0.0 if passes.given is None else numerical_error(passes, terms, np.zeros(passes.size), 0)
        return Certificate(evaluation.value + error, error, error, None, evaluation.value, feasible, only, point)
    error = numerical_error(passes, terms, point, passes.amount) + more_error
    limit = (upper_bound(passes, point) if bound is None else bound) + error
    if optimum is not None:
        # its sums run over the whole pool, one term after another
        terms_summed = gamma(passes.n * passes.n + passes.n + passes.d, HALF_ULP_64)
        limit = min(limit, optimum + error + 2.0 * terms_summed * (passes.magnitude + passes.beta))
    gap = limit - evaluation.value
    if not gap >= 0:
        raise NegativeGap(
            f"value {evaluation.value!r} exceeds the upper bound {limit!r} (rounding allows {error!r}); "
            "the certificate is wrong, please report this"
        )
    start = baseline(passes, means, linear, terms.weights)
    share: float | None = None
    reason: str | None = None
    if start is None:
        reason = "no share: the expectation over uniform masks has no closed form here"
    elif limit - start < NO_GAIN:
        reason = "no share: no mask is better than a uniform one by 1e-9"
    else:
        share = (evaluation.value - start) / (limit - start)
    return Certificate(limit, error, gap, share, start, feasible, reason, point)


def evaluate(passes: Passes, terms: Terms, others: dict[str, float] | None = None) -> Evaluation:
    """f of the mask that the parts hold as `best`, in float64 from the stored vectors. The empty mask is worth 0.

    others: the mask's metrics but pws, which are no sums over documents. The parts' columns are "quality", scaled,
    "quality_raw", and the further scores, scaled; those that are missing are not averaged.
    """
    vectors = GridSum(passes.d, costs=passes.tokens, fine=passes.tokens)
    documents = amount = 0
    largest: dict[str, float] = {}
    for of_part in passes.map(_largest_of_columns):
        for name, most in of_part.items():
            largest[name] = max(largest.get(name, 0.0), most)
    sums = {name: ScalarSum(most) for name, most in largest.items()}
    nothing, no_sums = vectors.empty(), {name: each.empty() for name, each in sums.items()}

    def held(part: Part) -> tuple[int, int, GridSum, dict[str, ScalarSum]]:
        rows = np.flatnonzero(part.best)
        costs = None if part.costs is None else part.costs[rows]
        total, means = nothing.empty(), {name: no_sums[name].empty() for name in part.columns}
        part.vectors.add_to(rows, total, part.costs)
        for name, column in part.columns.items():
            means[name].add(column[rows], costs)
        return rows.size, rows.size if costs is None else int(costs.sum()), total, means

    for rows, taken, of_vectors, of_columns in passes.map(held):
        documents, amount = documents + rows, amount + taken
        vectors.join(of_vectors)
        for name, of_column in of_columns.items():
            sums[name].join(of_column)
    if not documents and passes.given is None:
        return Evaluation(0.0, None, None, 0.0, {}, {}, 0, 0 if passes.tokens else None, np.zeros(passes.d))
    everything, total = amount + passes.given_size, vectors.value()
    means = {name: found.value() for name, found in sums.items()}
    if passes.given is not None:
        total = total + passes.given.size * passes.given.mean
        for name, before in {"quality": passes.given.quality, **passes.given.scores}.items():
            means[name] = means.get(name, 0.0) + passes.given.size * before
        means.pop("quality_raw", None)
    means = {name: found / everything for name, found in means.items()}
    mean = total / everything
    metrics = {"pws": -float(mean @ mean)} if "pws" in terms.diversity else {}
    metrics |= others or {}
    diversity = sum(weight * metrics[name] for name, weight in terms.diversity.items() if weight)
    scores = {name: means[name] for name in terms.scores}
    value = (1.0 - terms.lam) * diversity + sum(weight * scores[name] for name, weight in terms.scores.items())
    if terms.lam > 0:
        value += terms.lam * means["quality"]
    return Evaluation(
        value,
        means.get("quality"),
        means.get("quality_raw"),
        diversity,
        metrics,
        scores,
        documents,
        amount if passes.tokens else None,
        mean,
    )


def _largest_of_columns(part: Part) -> dict[str, float]:
    return {name: float(np.abs(column).max(initial=0.0)) for name, column in part.columns.items()}


def upper_bound(passes: Passes, point: np.ndarray, extra: np.ndarray | None = None) -> float:
    """‖p‖² + the largest possible mean of the scores at p, in float64 from the stored vectors.

    Documents: of amounts[g] documents of each group g. Tokens: of any documents that hold amounts[g] tokens of each
    group, or less by no more than the group's largest document. Only the documents that a float32 pass leaves in
    question are scored again: one whose float32 score lies more than twice that score's largest rounding error below
    the cut cannot be above it. extra: float64[N] to add to every score (of the one part there is).
    """
    passes.score(point, extra)
    spread = 2.0 * rough_error(passes, point)
    rough = passes.cut(lambda part: part.scores, passes.amounts)
    pieces = list(passes.pieces(point))

    def score(part: Part) -> tuple[int, float]:
        rows = np.flatnonzero(part.scores >= rough.level(part.groups) - spread)
        scores = _scores_at(pieces, part, rows)
        if extra is not None:
            scores += extra[rows]
        part.next_scores[:] = -np.inf
        part.next_scores[rows] = scores
        return rows.size, float(np.abs(scores).max(initial=0.0))

    found = passes.map(score)
    passes.parts.turn("scores")
    passes.reads += sum(rows for rows, _ in found)
    largest = max(most for _, most in found)
    given = passes.given_size * passes.given_linear
    if passes.given is not None:
        for _, scale, piece in passes.pieces(point):
            given -= 2.0 * passes.given.size * scale * float(passes.given.mean @ piece)
    bound = float(point @ point) + _largest_mean(passes, given, largest)
    # the empty mask is worth 0, where there may be one
    return max(bound, 0.0) if passes.tokens and not passes.given_size and _may_be_empty(passes) else bound


def _scores_at(pieces: list[tuple[Feature, float, np.ndarray]], part: Part, rows: np.ndarray) -> np.ndarray:
    """float64[k]: the scores of these rows at the point of these pieces, from the stored vectors."""

    def dots(a: int, b: int) -> np.ndarray:
        unit, found = part.vectors.double(rows[a:b]), np.zeros(b - a)
        for feature, scale, piece in pieces:
            found += scale * feature.dots(unit, piece)
        return found

    found = map_blocks(dots, rows.size, _BLOCK)
    return part.linear[rows] - 2.0 * np.concatenate(found) if found else np.zeros(0)


def _largest_mean(passes: Passes, given: float, largest: float) -> float:
    """The largest (given + Σ cost·score)/(what is given + Σ cost) over all documents that are feasible.

    The amount that maximises it is found by Dinkelbach's method; what is returned is a bound at any number of rounds.
    """
    most = np.array(passes.amounts, object)
    if not passes.tokens:
        return (given + _sum_above(passes, passes.amounts, largest)) / (passes.amount + passes.given_size)
    longest = _longest(passes)
    least = np.maximum(most - longest, 0)
    # the mean of no documents is none
    fewest, all_of_it = max(int(sum(least)) + passes.given_size, 1), int(sum(most)) + passes.given_size
    level = -np.inf
    for left in reversed(range(_ROUNDS)):
        filled = sum(passes.map(partial(_tokens_above, level=level, groups=most.size)))
        amounts = [int(x) for x in np.clip(filled, least, most)]
        everything = sum(amounts) + passes.given_size
        total = given + _sum_above(passes, amounts, largest)
        if np.isfinite(level):
            # no choice of amounts has more than this above the level, whatever it divides by
            excess = total - level * everything
            if not left or excess <= 1e-15 * abs(total):
                break
        level = total / everything
    return level + max(excess / fewest, excess / all_of_it)


def _tokens_above(part: Part, level: float, groups: int) -> np.ndarray:
    above = part.scores > level
    tokens = part.cost[above]
    return np.bincount(part.group[above], weights=tokens, minlength=groups).astype(np.int64)


def _longest(passes: Passes) -> np.ndarray:
    """int64[G]: the tokens of each group's largest document."""
    groups = len(passes.amounts)

    def longest(part: Part) -> np.ndarray:
        found = np.zeros(groups, np.int64)
        np.maximum.at(found, part.group, part.cost)
        return found

    return np.max(passes.map(longest), axis=0)


def _may_be_empty(passes: Passes) -> bool:
    return bool((np.array(passes.amounts, object) <= _longest(passes)).all())


def _sum_above(passes: Passes, amounts: list[int], largest: float) -> float:
    """Σ cost·score of the best documents that hold these amounts, the last one of each group by its part."""
    at, total = passes.cut(lambda part: part.scores, amounts), ScalarSum(largest)
    nothing = total.empty()

    def above(part: Part) -> tuple[ScalarSum, list[float]]:
        scored, found = part.scored(part.scores), nothing.empty()
        rows = np.flatnonzero(at.whole(scored))
        found.add(part.scores[rows], None if part.costs is None else part.costs[rows])
        partly = zip(*at.partial(scored), strict=True)
        return found, [float(fraction * part.cost[row] * part.scores[row]) for row, fraction in partly]

    rest: list[float] = []
    for found, partly in passes.map(above):
        total.join(found)
        rest += partly
    return total.value() + sum(sorted(rest))


def numerical_error(passes: Passes, terms: Terms, point: np.ndarray, amount: int) -> float:
    """The most that float64 rounding can move value and bound by, together, against exact arithmetic.

    Standard forward bounds, γ_k = k·u/(1 − k·u) for k operations: a normalised entry, d + 4; a dot product of d, d;
    a sum of rows, exact but for what their grid leaves of an entry. Sums of scores are exact to 2**-68 of the largest.
    """
    d, beta = passes.d, terms.beta
    norm = float(np.linalg.norm(point))
    grid = GridSum(1, costs=passes.tokens, fine=passes.tokens).unit * float(np.sqrt(d))
    mean = gamma(d + 6, HALF_ULP_64) + grid
    # ‖ẑ‖ ≤ 1 bounds the norm of the mean of absolute values, and ‖mean‖ ≤ 1 what its error is multiplied by
    value = beta * (2.0 * mean + mean * mean + gamma(d + 4, HALF_ULP_64))
    second = terms.weights.get("disf_second_moment", 0.0)
    if second:
        # as above for each entry of ẑẑᵀ, summed over blocks of rows, then their squares
        value += second * (
            2.0 * gamma(2 * (d + 4) + _BLOCK_OF_SECOND + amount // _BLOCK_OF_SECOND + d * d, HALF_ULP_64)
        )
    # a score is made of a handful of roundings of its terms, which may cancel, and so are the means
    last = 16.0 * HALF_ULP_64 * (passes.magnitude + passes.beta * (1.0 + norm) ** 2)
    return value + dot_error(passes, norm) + last


def dot_error(passes: Passes, norm: float) -> float:
    """The most that float64 rounding moves ‖p‖² and 2 φ·p by, together, for a point of length `norm`."""
    rounds = max((feature.rounding(passes.d) for _, feature, _ in passes.features), default=0)
    dots = 2.0 * float(np.sqrt(passes.beta)) * norm * gamma(rounds + passes.d + 8, HALF_ULP_64)
    return dots + norm * norm * gamma(passes.size + 4, HALF_ULP_64)


def rough_error(passes: Passes, point: np.ndarray) -> float:
    """The most by which a score of `Passes.score` can differ from the float64 one."""
    rounds = max((feature.rounding(passes.d) for _, feature, _ in passes.features), default=0)
    # ẑ is scaled and, like p, rounded to float32, then the products are summed in any order; those below the smallest
    # normal number are flushed
    share = gamma(rounds + 8, HALF_ULP_32)
    flushed = passes.size * 2.0**-100
    return 2.0 * float(np.sqrt(passes.beta)) * (float(np.linalg.norm(point)) * share + flushed) + 1e-12


def baseline(passes: Passes, means: dict[str, np.ndarray], linear: float, weights: dict[str, float]) -> float | None:
    """f₀: the expected value of a uniform mask of the documents asked for, in closed form; None where there is none:
    under quotas, a token budget, or for a metric that is not concave.

    means: {metric: mean of φ over the pool}; linear: the pool's mean of it.
    """
    if passes.tokens or len(passes.amounts) > 1 or not passes.n or set(weights) - set(means):
        return None
    size, given, everything = passes.amount, passes.given_size, passes.amount + passes.given_size
    if not everything:
        return 0.0
    value = (given * passes.given_linear + size * linear) / everything
    for name, weight in weights.items():
        mean = means[name]
        cosine = (passes.n * float(mean @ mean) - 1.0) / (passes.n - 1) if passes.n > 1 else 1.0
        square = size * (1.0 - cosine) + size * size * cosine
        if passes.given is not None:
            before = passes.given.mean
            square += given * given * float(before @ before) + 2.0 * given * size * float(before @ mean)
        value -= weight * square / everything**2
    return value
