"""The one way in: an objective and a budget to a selection with its certificate.

Here: the table of solvers and what every one of them returns. Not here: reading and writing files (`files`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from dagster_datamask import keyed
from dagster_datamask.accelerator import Accelerator
from dagster_datamask.selection.certificates import Certificate, certify, evaluate
from dagster_datamask.selection.certified import CertifiedOptions, Relaxation, relax, round_and_polish
from dagster_datamask.selection.objectives import Pool, QualityDiversity
from dagster_datamask.selection.policy_gradient import PolicyGradientOptions, Progress, learn_mask
from dagster_datamask.selection.sampling import ranks, top_s

Options = PolicyGradientOptions | CertifiedOptions


@dataclass(frozen=True, eq=False)
class Selection:
    """The S documents chosen of N, and how good the choice is.

    indices: int64[S], ascending rows of the input; value = λ·quality + (1−λ)·diversity, in float64; quality: mean
    scaled score, quality_raw: mean score as given (None where there is none); diversity in the objective's scale;
    scores: float64[N], what the solver ordered documents by (logit, linear score, quality, or random draw); rank:
    int64[N], 1 for the best score, ties by the ids' hash. Swaps and sampled masks leave the order of the scores, so a
    selected document's rank can exceed S. mean_vector: float64[d], the mean of ẑ over the mask; passes: the solver's
    reads of the embeddings in units of the whole pool; seconds: arrays in memory to certified mask; solver_seconds:
    the solver alone; trajectory: the solver's log.
    """

    indices: np.ndarray
    value: float
    quality: float | None
    quality_raw: float | None
    diversity: float
    scores: np.ndarray = field(repr=False)
    rank: np.ndarray = field(repr=False)
    certificate: Certificate
    mean_vector: np.ndarray = field(repr=False)
    solver: str
    passes: float
    seconds: float
    solver_seconds: float
    trajectory: list[dict[str, Any]] = field(repr=False)

    def summary(self) -> dict[str, Any]:
        """The JSON-able figures of `datamask solve --json`."""
        return {
            "n": self.scores.size,
            "budget": self.certificate.feasible_set["budget"],
            "kept": self.indices.size,
            "value": self.value,
            "quality": self.quality,
            "quality_raw": self.quality_raw,
            "diversity": self.diversity,
            **self.certificate.as_dict(),
            "solver": self.solver,
            "passes": self.passes,
            "seconds": self.seconds,
            "solver_seconds": self.solver_seconds,
        }


@dataclass(frozen=True, eq=False)
class _Solved:
    """A solver's answer in the pool's canonical positions."""

    positions: np.ndarray
    scores: np.ndarray
    passes: float
    trajectory: list[dict[str, Any]]
    relaxation: Relaxation | None = None


@dataclass(frozen=True)
class _Job:
    budget: int
    seed: int
    split: int | str
    ids: Sequence[str]
    accelerator: Accelerator
    progress: Progress | None
    options: Options | None


def solve(
    objective: QualityDiversity,
    budget: int,
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

    solver: a key of SOLVERS. "policy_gradient" is the paper's, "certified" maximises the same objective to a proven
    gap, "top_k" takes the best quality, "random" a uniform sample by (seed, split). ids: N distinct strings; they break
    ties and fix the order in which documents are seen, so a permuted input gives the same ids. options: those of the
    solver; progress(step, steps, entry) is called with each entry of the trajectory.

    Raises ValueError for a budget outside 0..N, an unknown solver, or options of another solver; BadInput for documents
    that cannot be selected from.
    """
    started = time.perf_counter()
    n = objective.embeddings.shape[0]
    if solver not in SOLVERS:
        raise ValueError(f"solver {solver!r} is none of: {', '.join(SOLVERS)}")
    if not 0 <= budget <= n:
        raise ValueError(f"budget {budget} is not between 0 and the {n} documents of the pool")
    pool = objective.prepare(ids)
    solving = time.perf_counter()
    job = _Job(budget, seed, split, ids, accelerator, progress, options)
    # BLAS orders its sums by its number of threads; ours work on fixed blocks instead
    with threadpool_limits(limits=1, user_api="blas"):
        solved = SOLVERS[solver](pool, job)
        solver_seconds = time.perf_counter() - solving
        relaxation = solved.relaxation
        if relaxation is None and budget:
            relaxation = relax(pool, budget, CertifiedOptions(), accelerator=accelerator)
    evaluation = evaluate(pool, solved.positions)
    point = pool.mean if relaxation is None else relaxation.point
    certificate = certify(pool, evaluation, budget, point)
    scores, rank = np.empty(n), np.empty(n, np.int64)
    scores[pool.order] = solved.scores
    rank[pool.order] = ranks(solved.scores)
    return Selection(
        indices=np.sort(pool.order[solved.positions]),
        value=evaluation.value,
        quality=evaluation.quality,
        quality_raw=evaluation.quality_raw,
        diversity=evaluation.diversity,
        scores=scores,
        rank=rank,
        certificate=certificate,
        mean_vector=evaluation.mean_vector,
        solver=solver,
        passes=solved.passes,
        seconds=time.perf_counter() - started,
        solver_seconds=solver_seconds,
        trajectory=solved.trajectory,
    )


def _policy_gradient(pool: Pool, job: _Job) -> _Solved:
    options = job.options if job.options is not None else PolicyGradientOptions()
    if not isinstance(options, PolicyGradientOptions):
        raise ValueError(f"solver 'policy_gradient' takes PolicyGradientOptions, not {type(options).__name__}")
    learned = learn_mask(
        pool,
        job.budget,
        options,
        seed=job.seed,
        split=job.split,
        accelerator=job.accelerator,
        progress=job.progress,
    )
    return _Solved(learned.positions, learned.logits, learned.passes, learned.trajectory)


def _certified(pool: Pool, job: _Job) -> _Solved:
    options = job.options if job.options is not None else CertifiedOptions()
    if not isinstance(options, CertifiedOptions):
        raise ValueError(f"solver 'certified' takes CertifiedOptions, not {type(options).__name__}")
    if not job.budget:
        return _Solved(np.zeros(0, np.int64), pool.linear, 0.0, [])
    state = relax(pool, job.budget, options, accelerator=job.accelerator, progress=job.progress)
    positions = round_and_polish(pool, job.budget, state, options, job.progress)
    return _Solved(positions, state.scores, state.passes, state.trajectory, state)


def _top_k(pool: Pool, job: _Job) -> _Solved:
    _no_options(job, "top_k")
    if pool.quality is None:
        raise ValueError("solver 'top_k' ranks by quality, and there are no finite scores for every document")
    return _Solved(top_s(pool.quality, job.budget), pool.quality, 0.0, [])


def _random(pool: Pool, job: _Job) -> _Solved:
    _no_options(job, "random")
    drawn = keyed.hash64(job.ids, job.seed, f"random/{job.split}")[pool.order].astype(np.float64) / 2.0**64
    return _Solved(top_s(drawn, job.budget), drawn, 0.0, [])


def _no_options(job: _Job, solver: str) -> None:
    if job.options is not None:
        raise ValueError(f"solver {solver!r} takes no options, not {type(job.options).__name__}")


SOLVERS: dict[str, Callable[[Pool, _Job], _Solved]] = {
    "policy_gradient": _policy_gradient,
    "certified": _certified,
    "top_k": _top_k,
    "random": _random,
}
