"""Mask learning by policy gradient: the paper's solver (DataMask, arXiv 2512.24265, sections 3 and 4).

Here: logits, group advantages, the two forms of the gradient, batch updates and the final mask. Not here: random
draws (`sampling`), and what the mask it ends with is worth (`certificates`).
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dagster_datamask.accelerator import Accelerator
from dagster_datamask.selection.objectives import Pool
from dagster_datamask.selection.sampling import Draws, draws, top_s

Progress = Callable[[int, int, dict[str, Any]], None]

# a spread of the group below this share of |f| is float32 noise, which an advantage would blow up to 1
_SATURATED = 1e-6
# how often the trajectory is written; each entry costs one pass over a tenth of the pool
_ENTRIES = 50


@dataclass(frozen=True)
class PolicyGradientOptions:
    """The paper's recipe and its values.

    group: G, masks a step; lr: η; steps: E; batch: share of the pool that a step draws, scores and updates (1 is the
    whole pool); gradient: "independent" takes ∂ln P/∂L_i ≈ M_i − S·p_i, whose second term cancels in a group, and
    "ordered" the exact derivative for the drawn order; l_min, l_max: range of the quality-aware first logits
    (Eq. 13); final: "top" takes the S largest logits, "sampled" draws a mask from them.
    """

    group: int = 128
    lr: float = 10.0
    steps: int = 10_000
    batch: float = 0.05
    gradient: Literal["independent", "ordered"] = "independent"
    l_min: float = 0.0
    l_max: float = 2.0
    final: Literal["top", "sampled"] = "top"

    def __post_init__(self) -> None:
        if self.group < 2:
            raise ValueError(f"a group needs 2 masks or more to compare, not {self.group}")
        if self.steps < 0:
            raise ValueError(f"steps must not be negative: {self.steps}")
        if not 0 < self.batch <= 1:
            raise ValueError(f"batch is a share of the pool in (0, 1], not {self.batch}")
        if not (np.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"the learning rate must be positive and finite, not {self.lr}")
        if not (np.isfinite(self.l_min) and np.isfinite(self.l_max) and self.l_min <= self.l_max):
            raise ValueError(f"(l_min, l_max) = ({self.l_min}, {self.l_max}) are not finite and in order")
        if self.gradient not in ("independent", "ordered"):
            raise ValueError(f"gradient {self.gradient!r} is neither 'independent' nor 'ordered'")
        if self.final not in ("top", "sampled"):
            raise ValueError(f"final {self.final!r} is neither 'top' nor 'sampled'")


@dataclass(frozen=True)
class Learned:
    """positions: int64[S] of the final mask; logits: float64[N]; passes: reads of the embeddings in units of the
    whole pool; trajectory: one entry a logged step (`learn_mask`)."""

    positions: np.ndarray
    logits: np.ndarray
    passes: float
    trajectory: list[dict[str, Any]]


def initial_logits(pool: Pool, l_min: float, l_max: float) -> np.ndarray:
    """float64[N]: (Q − q_min)/(q_max − q_min)·(l_max − l_min) + l_min over the pool (Eq. 13).

    All l_min where quality says nothing: constant, or λ = 0.
    """
    start = np.full(pool.n, l_min)
    if pool.objective.lam > 0 and pool.quality is not None and pool.n:
        spread = float(np.ptp(pool.quality))
        if spread > 0:
            start += (pool.quality - pool.quality.min()) / spread * (l_max - l_min)
    return start


def advantages(values: Any, scale: Any, xp: Any) -> tuple[Any, Any]:
    """(A_j = (f_j − μ)/σ over the group (Eq. 10), whether the group is saturated, for which every A_j is 0).

    values: f_j, [G]; scale: what |f| is made of, so that the test for float noise does not depend on where a joint
    objective happens to cancel.
    """
    centred = values - values.mean()
    sigma = (centred * centred).mean() ** 0.5
    alive = sigma > _SATURATED * scale
    # the quotient is formed for a saturated group too, because branching would wait for the device
    return centred * (alive / xp.where(alive, sigma, xp.ones_like(sigma))), ~alive


def independent_gradient(advantage: Any, mask: Any, xp: Any) -> Any:
    """[B]: (1/G)·Aᵀ M, the mean of A_j·(M_j − S·p) for advantages that sum to 0.

    advantage: [G]; mask: [G, B] of 0 and 1.
    """
    # a BLAS product would split this sum by the number of threads
    return xp.einsum("j,jb->b", advantage, mask) / mask.shape[0]


def ordered_gradient(logits: Any, advantage: Any, order: Any, xp: Any) -> Any:
    """[B]: (1/G)·Σ_j A_j ∇ln P(π_j | L) for masks with their draw order; unbiased for any set function.

    ∂ln P(π|L)/∂L_i = M_i − p_i·C_r(i), with C_r = Σ_{k≤r} 1/(1 − Σ_{j<k} p_π(j)) and r(i) the draw of i, or S where
    i was not drawn. logits: [B] float64; advantage: [G] float64; order: int [G, S], first drawn first.
    """
    group, size = order.shape
    weights = xp.exp(logits - logits.max())
    p = weights / weights.sum()
    rows = xp.cumsum(xp.ones_like(order), 0) - 1
    drawn = xp.zeros_like(advantage[:, None] * p)
    drawn[rows, order] = 1.0
    # 1 − Σ p of those drawn so far cancels once the logits are sharp; the sum of what is left does not
    chosen = p[order]
    left = ((1.0 - drawn) @ p)[:, None] + xp.flip(xp.cumsum(xp.flip(chosen, (1,)), 1), (1,))
    reach = xp.cumsum(1.0 / xp.clip(left, 1e-300, None), 1)
    factor = xp.zeros_like(drawn) + reach[:, size - 1 :]
    factor[rows, order] = reach
    return (advantage @ drawn - p * (advantage @ factor)) / group


def learn_mask(
    pool: Pool,
    budget: int,
    options: PolicyGradientOptions,
    *,
    seed: int,
    split: int | str,
    accelerator: Accelerator,
    progress: Progress | None = None,
) -> Learned:
    """Ascend E[f] over the logits and take the final mask.

    Each step draws a batch B of the pool and G masks of S_B = max(1, round(S/N·|B|)) of it, scores them (one product
    of the masks with the batch's vectors), and adds lr times the group's gradient to the batch's logits. A step whose
    masks do not differ in value by more than float noise is skipped. Draws are keyed by (seed, "policy_gradient",
    split).

    The trajectory has entries `step`, `value` (the mean f of that step's masks, on its batch), `mask_value` (f of the
    top-S of the logits over the whole pool, in float32), `skipped` (saturated steps since the last entry) and `note`,
    which is "saturated" where there were any.
    """
    n = pool.n
    start = initial_logits(pool, options.l_min, options.l_max)
    if budget in (0, n):
        return Learned(np.arange(budget), start, 0.0, [])
    with contextlib.closing(draws(accelerator, options.group, seed, "policy_gradient", split)) as source:
        return _ascend(pool, budget, options, source, start, progress)


def _ascend(
    pool: Pool,
    budget: int,
    options: PolicyGradientOptions,
    source: Draws,
    start: np.ndarray,
    progress: Progress | None,
) -> Learned:
    n = pool.n
    logits = source.put(start)
    vectors, linear = source.put(pool.vectors), source.put(pool.linear)
    size = min(n, max(2, round(options.batch * n)))
    taken = min(size - 1, max(1, round(budget / n * size)))
    means, skips = source.put(np.zeros(options.steps)), source.put(np.zeros(options.steps))
    every = max(1, options.steps // _ENTRIES)
    trajectory: list[dict[str, Any]] = []
    logged, passes = 0, 0.0
    for step in range(options.steps):
        batch = source.batch(n, size) if size < n else slice(None)
        update, mean, saturated = _step(source, logits[batch], vectors[batch], linear[batch], pool.beta, taken, options)
        logits[batch] += update
        means[step], skips[step] = mean, saturated
        passes += size / n
        if (step + 1) % every and step + 1 != options.steps:
            continue
        skipped = int(source.fetch(skips[logged : step + 1]).sum())
        entry = {
            "step": step + 1,
            "value": float(means[step]),
            "mask_value": _mask_value(pool, top_s(source.fetch(logits), budget)),
            "skipped": skipped,
            "note": "saturated" if skipped else None,
        }
        passes += budget / n
        logged = step + 1
        trajectory.append(entry)
        if progress is not None:
            progress(step + 1, options.steps, entry)
    learned = source.fetch(logits).astype(np.float64)
    if options.final == "sampled":
        drawn = source.order(source.gumbel(logits)[:1], budget)
        positions = np.sort(source.fetch(drawn)[0])
    else:
        positions = top_s(learned, budget)
    return Learned(positions, learned, passes, trajectory)


def _step(
    source: Draws,
    logits: Any,
    vectors: Any,
    linear: Any,
    beta: float,
    size: int,
    options: PolicyGradientOptions,
) -> tuple[Any, Any, Any]:
    """(lr·ĝ for the batch, mean f of the group, saturated), all on the device."""
    xp = source.xp
    keys = source.gumbel(logits)
    mask = source.mask(keys, size)
    mean = source.sums(mask, vectors) / size
    quality = xp.einsum("jb,b->j", mask, linear) / size
    similarity = beta * (mean * mean).sum(1)
    values = quality - similarity
    scale = (abs(quality) + similarity).mean()
    advantage, saturated = advantages(values, scale, xp)
    if options.gradient == "independent":
        gradient = independent_gradient(advantage, mask, xp)
    else:
        order = source.order(keys, size)
        exact = ordered_gradient(source.double(logits), source.double(advantage), order, xp)
        gradient = source.single(exact)
    return options.lr * gradient, values.mean(), saturated


def _mask_value(pool: Pool, positions: np.ndarray) -> float:
    mean = pool.vectors[positions].mean(axis=0, dtype=np.float64)
    return float(pool.linear[positions].mean() - pool.beta * (mean @ mean))
