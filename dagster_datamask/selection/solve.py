"""The one way in: an objective and a budget to a selection with its certificate.

Here: the table of solvers and what every one of them returns. Not here: reading and writing files (`files`), and pools
that do not fit into memory (`corpus`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from dagster_datamask import keyed
from dagster_datamask.accelerator import Accelerator
from dagster_datamask.selection.budgets import Budget, documents
from dagster_datamask.selection.certificates import (
    Certificate,
    Evaluation,
    certify,
    evaluate,
    upper_bound,
)
from dagster_datamask.selection.certified import CertifiedOptions, Relaxation, relax, round_and_polish, uniform_start
from dagster_datamask.selection.disf import conditional_gradient, disf_greedy, disf_value
from dagster_datamask.selection.dvrl import DvrlOptions, dvrl, quality_and_similarity
from dagster_datamask.selection.exact import Scored, cut_of_one
from dagster_datamask.selection.facility_location import Cover, FacilityLocation
from dagster_datamask.selection.greedy import GreedyOptions, greedy
from dagster_datamask.selection.objectives import CONCAVE, METRICS, QualityDiversity
from dagster_datamask.selection.passes import InMemory, Part, Passes
from dagster_datamask.selection.policy_gradient import PolicyGradientOptions, Progress, learn_mask
from dagster_datamask.selection.pool import Pool, prepare_pool
from dagster_datamask.selection.sampling import ranks
from dagster_datamask.selection.semdedup import SemDeDupOptions, semdedup
from dagster_datamask.selection.vectors import FEATURES, on_device

# entries of the trajectory of a solver that adds one document at a time
_ENTRIES = 50

Options = PolicyGradientOptions | CertifiedOptions | GreedyOptions | SemDeDupOptions | DvrlOptions


@dataclass(frozen=True, eq=False)
class Selection:
    """The documents chosen of N, and how good the choice is.

    indices: int64[S], ascending rows of the input; value = λ·quality + (1−λ)·diversity + Σ weight·score, in float64;
    quality: mean scaled score, quality_raw: mean score as given (None where there is none); diversity in the
    objective's scale; metrics: {diversity metric: its own value}; tokens: of the documents kept, under a token budget;
    scores: float64[N], what the solver ordered documents by (logit, linear score, quality, or random draw); rank:
    int64[N], 1 for the best score, ties by the ids' hash. Swaps and sampled masks leave the order of the scores, so a
    selected document's rank can exceed S. kept: int64[N], the row of the document that was kept instead of a near-
    duplicate, −1 for none, and similarity: float64[N], the cosine of the two, NaN for none; None but for SemDeDup.
    mean_vector: float64[d], the mean of ẑ over the mask; passes: the solver's reads of the embeddings in units of the
    whole pool; seconds: arrays in memory to certified mask; solver_seconds: the solver alone; trajectory: the solver's
    log; facts: what else the solver has to say (SemDeDup's epsilon).
    """

    indices: np.ndarray
    value: float
    quality: float | None
    quality_raw: float | None
    diversity: float
    metrics: dict[str, float]
    tokens: int | None
    scores: np.ndarray = field(repr=False)
    rank: np.ndarray = field(repr=False)
    kept: np.ndarray | None = field(repr=False)
    similarity: np.ndarray | None = field(repr=False)
    certificate: Certificate
    mean_vector: np.ndarray = field(repr=False)
    solver: str
    passes: float
    seconds: float
    solver_seconds: float
    trajectory: list[dict[str, Any]] = field(repr=False)
    facts: dict[str, float]

    def summary(self) -> dict[str, Any]:
        """The JSON-able figures of `datamask solve --json`."""
        counted = {} if self.tokens is None else {"tokens": self.tokens}
        return {
            "n": self.scores.size,
            "budget": self.certificate.feasible_set["budget"],
            "kept": self.indices.size,
            **counted,
            "value": self.value,
            "quality": self.quality,
            "quality_raw": self.quality_raw,
            "diversity": self.diversity,
            "metrics": self.metrics,
            **self.certificate.as_dict(),
            "solver": self.solver,
            **self.facts,
            "passes": self.passes,
            "seconds": self.seconds,
            "solver_seconds": self.solver_seconds,
        }


@dataclass(frozen=True, eq=False)
class _Solved:
    """A solver's answer, by row."""

    rows: np.ndarray
    scores: np.ndarray
    passes: float
    trajectory: list[dict[str, Any]]
    relaxation: Relaxation | None = None
    kept: np.ndarray | None = None
    similarity: np.ndarray | None = None
    facts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Job:
    pool: Pool
    budget: Budget
    passes: Passes
    part: Part
    seed: int
    split: int | str
    ids: Sequence[str]
    accelerator: Accelerator
    progress: Progress | None
    options: Options | None

    def unit(self) -> np.ndarray:
        """float32[N, d]: ẑ in canonical order."""
        return self.pool.unit()

    def linear(self) -> np.ndarray:
        """float64[N]: linear in canonical order."""
        return self.pool.canonical(self.pool.linear)

    @cached_property
    def facility(self) -> FacilityLocation:
        """Facility location over the pool, its kernel shared by the solver and the certificate."""
        if self.memory_limit is None:
            return FacilityLocation(self.unit())
        return FacilityLocation(self.unit(), memory_limit=self.memory_limit)

    def cover(self, rows: np.ndarray) -> Cover:
        """How these rows cover the pool."""
        positions = np.sort(self.pool.ties[rows].astype(np.int64))
        return self.facility.cover(positions, lambda at: self.pool.vectors.double(self.pool.order[at]))

    def by_row(self, canonical: np.ndarray) -> np.ndarray:
        """Values by canonical position as values by row."""
        values = np.empty_like(canonical)
        values[self.pool.order] = canonical
        return values

    def fill(self, scores: np.ndarray) -> np.ndarray:
        """The rows of the best scores (by row) that meet the budget."""
        return self.budget.fill(scores, self.pool.ties)

    def fill_canonical(self, scores: np.ndarray) -> np.ndarray:
        """The same for scores by canonical position, and as such positions, ascending."""
        return np.sort(self.pool.ties[self.fill(self.by_row(scores))]).astype(np.int64)

    @property
    def memory_limit(self) -> float | None:
        """Bytes that may be planned for."""
        limit = self.accelerator.memory_limit_gb
        return None if limit is None else limit * 1e9


def solve(
    objective: QualityDiversity,
    budget: int | Budget,
    *,
    solver: str,
    seed: int = 0,
    split: int | str = 0,
    ids: Sequence[str],
    accelerator: Accelerator = Accelerator(),  # noqa: B008
    progress: Progress | None = None,
    options: Options | None = None,
) -> Selection:
    """Choose `budget` of the objective's N documents and certify the choice.

    budget: a number of documents, or a `Budget` of documents or tokens with or without quotas. solver: a key of
    SOLVERS. ids: N distinct strings; they break ties and fix the order in which documents are seen, so a permuted input
    gives the same ids. options: those of the solver; progress(step, steps, entry) is called with each entry of the
    trajectory.

    Raises ValueError for a budget that the documents cannot meet, an unknown solver, one that cannot take the objective
    or the budget, or options of another solver; BadInput for documents that cannot be selected from.
    """
    started = time.perf_counter()
    n = objective.embeddings.shape[0]
    if solver not in SOLVERS:
        raise ValueError(f"solver {solver!r} is none of: {', '.join(SOLVERS)}")
    chosen_from = budget if isinstance(budget, Budget) else documents(budget)
    chosen_from.check(n)
    kind = OPTIONS.get(solver)
    if options is not None and (kind is None or not isinstance(options, kind)):
        takes = "no options" if kind is None else kind.__name__
        raise ValueError(f"solver {solver!r} takes {takes}, not {type(options).__name__}")
    # BLAS orders its sums by its number of threads; ours work on fixed blocks instead
    with threadpool_limits(limits=1, user_api="blas"):
        pool = prepare_pool(objective, ids)
        solving = time.perf_counter()
        pool = replace(pool, vectors=on_device(pool.vectors, accelerator))
        passes, part = pool_passes(pool, chosen_from)
        job = _Job(pool, chosen_from, passes, part, seed, split, ids, accelerator, progress, options)
        solved = SOLVERS[solver](job)
        solver_seconds = time.perf_counter() - solving
        certificate, evaluation = _certify(job, solved)
    return Selection(
        indices=solved.rows,
        value=evaluation.value,
        quality=evaluation.quality,
        quality_raw=evaluation.quality_raw,
        diversity=evaluation.diversity,
        metrics=evaluation.metrics,
        tokens=evaluation.tokens,
        scores=solved.scores,
        rank=job.by_row(ranks(pool.canonical(solved.scores))),
        kept=solved.kept,
        similarity=solved.similarity,
        certificate=certificate,
        mean_vector=evaluation.mean_vector,
        solver=solver,
        passes=solved.passes,
        seconds=time.perf_counter() - started,
        solver_seconds=solver_seconds,
        trajectory=solved.trajectory,
        facts=solved.facts,
    )


def pool_passes(pool: Pool, budget: Budget) -> tuple[Passes, Part]:
    """The passes over a pool in memory, for its concave metrics, and the one part they are over."""
    given = pool.objective.given
    parts = InMemory(pool.vectors, pool.linear, pool.ties, pool.hashes, budget.costs, budget.groups, pool.columns())
    passes = Passes(
        parts,
        pool.n,
        pool.vectors.d,
        pool.terms.weights,
        budget.amounts,
        pool.largest,
        magnitude=pool.magnitude,
        tokens=budget.costs is not None,
        given=given,
        given_linear=pool.terms.linear_of(given),
    )
    return passes, parts.part


def _relax(job: _Job, options: CertifiedOptions, progress: Progress | None = None) -> Relaxation:
    start = uniform_start(job.passes, job.pool.feature_means(), job.pool.linear_mean)
    return relax(job.passes, start, options, progress)


def _certify(job: _Job, solved: _Solved) -> tuple[Certificate, Evaluation]:
    """The certificate of the mask of these rows, and what it is worth."""
    pool, budget, passes = job.pool, job.budget, job.passes
    part = job.part
    weights = pool.terms.weights
    others = _other_metrics(job, solved.rows)
    relaxation = solved.relaxation
    concave = not set(weights) - set(CONCAVE)
    if concave and relaxation is None and budget.amount:
        relaxation = _relax(job, CertifiedOptions())
    part.best[:] = False
    part.best[solved.rows] = True
    evaluation = evaluate(passes, pool.terms, others)
    feasible = {
        "documents": pool.n,
        "budget": budget.amount,
        "unit": budget.unit,
        "vectors": pool.checksum,
        "dtype": pool.objective.embeddings.dtype.name,
        "lambda": pool.terms.lam,
        "scale": pool.objective.scale,
        "constants": list(pool.objective.constants) if pool.objective.constants is not None else None,
        "diversity": dict(pool.objective.diversity),
        "scores": {name: score.weight for name, score in pool.objective.scores.items()},
        "quotas": len(budget.amounts) if budget.groups is not None else None,
        "given": None if pool.objective.given is None else pool.objective.given.size,
    }
    if budget.amount and weights.get("disf"):
        reason = "DiSF as its authors define it is not concave and has no known bound; disf_second_moment has one"
        return Certificate(None, None, None, None, None, feasible, reason, np.zeros(passes.size)), evaluation
    bound, more_error = None, 0.0
    if relaxation is not None:
        point = relaxation.bound_point
    else:
        point = passes.restore().point
        if weights.get("facility_location") and budget.amount:
            bound, more_error = _facility_location_bound(job, solved.rows, point)
    certificate = certify(
        passes,
        pool.terms,
        evaluation,
        feasible,
        point,
        means=pool.feature_means(),
        linear=pool.linear_mean,
        optimum=None if relaxation is None else relaxation.optimum,
        bound=bound,
        more_error=more_error,
    )
    return certificate, evaluation


def _other_metrics(job: _Job, rows: np.ndarray) -> dict[str, float]:
    """The metrics of the mask of these rows that are no sums over documents."""
    pool, asked = job.pool, job.pool.terms.diversity
    rows = rows[np.argsort(pool.ties[rows])]
    found: dict[str, float] = {}
    if "disf" in asked:
        found["disf"] = disf_value(pool.vectors.double(rows))
    if "disf_second_moment" in asked:
        costs = np.ones(rows.size) if job.budget.costs is None else job.budget.costs[rows].astype(np.float64)
        feature, total = FEATURES["disf_second_moment"], np.zeros(pool.vectors.d**2)
        for a in range(0, rows.size, 4096):
            total += feature.total(pool.vectors.double(rows[a : a + 4096]), costs[a : a + 4096])
        mean = total / max(costs.sum(), 1.0)
        found["disf_second_moment"] = -float(mean @ mean)
    if "facility_location" in asked:
        found["facility_location"] = job.cover(rows).value
    return found


def _facility_location_bound(job: _Job, rows: np.ndarray, point: np.ndarray) -> tuple[float, float]:
    """(what no feasible mask exceeds, by the gains of adding any document to the mask of these rows; its rounding
    error beyond that of the other terms)."""
    pool, budget, passes = job.pool, job.budget, job.passes
    weight = pool.terms.weights["facility_location"]
    cover = job.cover(rows)
    gains = job.by_row(job.facility.gains(cover))
    error = weight * (2.0 * cover.error + 1e-15)
    if budget.costs is None:
        # the mean of a score is over as many documents as are chosen
        return weight * cover.value + upper_bound(passes, point, extra=passes.amount * weight * gains), error
    # the most that the gains of documents within the budget add up to, a document counted by what of it fits
    part = Scored(gains / budget.costs, pool.ties, budget.costs, budget.groups)
    at = cut_of_one(part, budget.amounts)
    most = float(gains[at.whole(part)].sum())
    most += sum(float(fraction * gains[row]) for row, fraction in zip(*at.partial(part), strict=True))
    return weight * (cover.value + most) + upper_bound(passes, point), error + weight * most * 1e-12


def _policy_gradient(job: _Job) -> _Solved:
    options = job.options if isinstance(job.options, PolicyGradientOptions) else PolicyGradientOptions()
    learned = learn_mask(
        job.pool,
        job.budget,
        options,
        seed=job.seed,
        split=job.split,
        accelerator=job.accelerator,
        progress=job.progress,
    )
    return _Solved(learned.rows, job.by_row(learned.logits), learned.passes, learned.trajectory)


def _certified(job: _Job) -> _Solved:
    options = job.options if isinstance(job.options, CertifiedOptions) else CertifiedOptions()
    others = sorted(set(job.pool.terms.weights) - set(CONCAVE))
    if others:
        raise ValueError(
            f"solver 'certified' maximises concave objectives, and {others[0]} is not; take 'greedy' or "
            "'policy_gradient', or disf_second_moment in place of disf"
        )
    if not job.budget.amount:
        return _Solved(np.zeros(0, np.int64), job.pool.linear, 0.0, [])
    state = _relax(job, options, job.progress)
    scores = job.part.scores.copy()
    round_and_polish(job.passes, state, options, job.progress)
    rows = np.flatnonzero(job.part.best)
    return _Solved(rows, scores, job.passes.passes, state.trajectory, state)


def _top_k(job: _Job) -> _Solved:
    if job.pool.quality is None:
        raise ValueError("solver 'top_k' ranks by quality, and there are no finite scores for every document")
    return _Solved(job.fill(job.pool.quality), job.pool.quality, 0.0, [])


def _random(job: _Job) -> _Solved:
    drawn = keyed.hash64(list(job.ids), job.seed, f"random/{job.split}").astype(np.float64) / 2.0**64
    return _Solved(job.fill(drawn), drawn, 0.0, [])


def _semdedup(job: _Job) -> _Solved:
    _only(job, "semdedup", METRICS, plain=True)
    options = job.options if isinstance(job.options, SemDeDupOptions) else SemDeDupOptions()
    found = semdedup(
        job.unit(),
        budget=job.budget.amount,
        options=options,
        seed=job.seed,
        split=job.split,
        memory_limit=job.memory_limit,
        progress=job.progress,
    )
    kept = np.where(found.kept < 0, -1, job.pool.order[found.kept])
    return _Solved(
        np.sort(job.pool.order[found.positions]),
        job.by_row(found.score),
        1.0,
        [],
        kept=job.by_row(kept),
        similarity=job.by_row(found.similarity),
        facts={"epsilon": found.epsilon},
    )


def _dvrl(job: _Job) -> _Solved:
    _only(job, "dvrl", ("pws",))
    options = job.options if isinstance(job.options, DvrlOptions) else DvrlOptions()
    share = job.budget.amount / max(sum(job.budget.available(job.pool.n)), 1)
    found = dvrl(
        job.unit(),
        job.linear(),
        values=quality_and_similarity(job.pool.terms.beta),
        budget=round(share * job.pool.n),
        options=options,
        seed=job.seed,
        split=job.split,
        accelerator=job.accelerator,
        progress=job.progress,
    )
    scores = job.by_row(found.scores)
    return _Solved(job.fill(scores), scores, found.passes, found.trajectory)


def _only(job: _Job, solver: str, metrics: tuple[str, ...], *, plain: bool = False) -> None:
    """Raise ValueError for an objective or a budget that the solver does not know how to take into account."""
    others = sorted(set(job.pool.terms.weights) - set(metrics))
    if others:
        raise ValueError(f"solver {solver!r} knows {', '.join(metrics)}, not {others[0]}; take 'policy_gradient'")
    if plain and (job.budget.costs is not None or job.budget.groups is not None):
        raise ValueError(f"solver {solver!r} takes a number of documents, without quotas; take another solver")


def _greedy(job: _Job) -> _Solved:
    options = job.options if isinstance(job.options, GreedyOptions) else GreedyOptions()
    pool, budget, weights = job.pool, job.budget, job.pool.terms.weights
    groups = None if budget.groups is None else pool.canonical(budget.groups)
    costs = None if budget.costs is None else pool.canonical(budget.costs)
    if "disf" in weights:
        _only(job, "greedy", ("disf",), plain=True)
        found = disf_greedy(
            job.unit(), job.linear(), weight=weights["disf"], budget=budget.amount, progress=job.progress
        )
        positions, gains, passes = found.positions, found.gains, found.passes
    else:
        chosen = greedy(
            job.facility.z if "facility_location" in weights else job.unit(),
            job.linear(),
            fl=weights.get("facility_location", 0.0),
            pws=weights.get("pws", 0.0),
            second_moment=weights.get("disf_second_moment", 0.0),
            budget=budget.amount,
            options=options,
            seed=job.seed,
            split=job.split,
            facility=job.facility if "facility_location" in weights else None,
            costs=costs,
            groups=groups,
            quotas=None if groups is None else list(budget.amounts),
            progress=job.progress,
        )
        positions, gains, passes = chosen.positions, chosen.gains, chosen.passes
    # what was chosen first is best; what was not chosen has no place in that order
    scores = np.full(pool.n, -1.0)
    scores[positions] = np.arange(positions.size, 0, -1) / max(positions.size, 1)
    trajectory = _growth(gains)
    return _Solved(np.sort(pool.order[positions]), job.by_row(scores), passes, trajectory)


def _growth(gains: np.ndarray) -> list[dict[str, Any]]:
    """The value after some of the choices."""
    values = np.cumsum(gains)
    every = max(1, values.size // _ENTRIES)
    return [{"step": k + 1, "value": float(values[k])} for k in range(every - 1, values.size, every)]


def _conditional_gradient(job: _Job) -> _Solved:
    _only(job, "conditional_gradient", ("disf",))
    groups = None if job.budget.groups is None else job.pool.canonical(job.budget.groups)
    plain = job.budget.costs is None and groups is None
    found = conditional_gradient(
        job.unit(),
        job.linear(),
        weight=job.pool.terms.weights.get("disf", 0.0),
        budget=job.budget.amount if job.budget.costs is None else job.fill(job.pool.linear).size,
        take=None if plain else job.fill_canonical,
        groups=groups if job.budget.costs is None else None,
        progress=job.progress,
    )
    return _Solved(np.sort(job.pool.order[found.positions]), job.by_row(found.scores), found.passes, found.trajectory)


SOLVERS: dict[str, Callable[[_Job], _Solved]] = {
    "policy_gradient": _policy_gradient,
    "certified": _certified,
    "greedy": _greedy,
    "conditional_gradient": _conditional_gradient,
    "top_k": _top_k,
    "random": _random,
    "semdedup": _semdedup,
    "dvrl": _dvrl,
}
OPTIONS: dict[str, type] = {
    "policy_gradient": PolicyGradientOptions,
    "certified": CertifiedOptions,
    "greedy": GreedyOptions,
    "semdedup": SemDeDupOptions,
    "dvrl": DvrlOptions,
}
