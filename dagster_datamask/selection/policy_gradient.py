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
from dagster_datamask.selection.budgets import Budget
from dagster_datamask.selection.disf import disf_group_values, second_moment_group_values
from dagster_datamask.selection.facility_location import group_values as facility_location_group_values
from dagster_datamask.selection.pool import Pool
from dagster_datamask.selection.sampling import Draws, Rows, draws

Progress = Callable[[int, int, dict[str, Any]], None]

# a spread of the group below this share of |f| is float32 noise, which an advantage would blow up to 1
_SATURATED = 1e-6
# how often the trajectory is written; each entry costs one pass over a tenth of the pool
_ENTRIES = 50
_WORTH_ROWS = 16_384
# sums of float32 squares stay finite
_LARGEST = 1e15
# documents that a group gives to a mask of a batch, below which batches are made of whole groups
_FEW = 4


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


@dataclass(frozen=True, eq=False)
class Learned:
    """rows: int64[S] of the final mask, ascending; logits: float64[N] by canonical position; passes: reads of the
    embeddings in units of the whole pool; trajectory: one entry a logged step (`learn_mask`)."""

    rows: np.ndarray
    logits: np.ndarray
    passes: float
    trajectory: list[dict[str, Any]]


def initial_logits(pool: Pool, l_min: float, l_max: float) -> np.ndarray:
    """float64[N] by canonical position: (Q − q_min)/(q_max − q_min)·(l_max − l_min) + l_min over the pool (Eq. 13).

    All l_min where quality says nothing: constant, or λ = 0.
    """
    start = np.full(pool.n, l_min)
    if pool.objective.lam > 0 and pool.quality is not None and pool.n:
        spread = float(np.ptp(pool.quality))
        if spread > 0:
            start += (pool.canonical(pool.quality) - pool.quality.min()) / spread * (l_max - l_min)
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
    budget: Budget,
    options: PolicyGradientOptions,
    *,
    seed: int,
    split: int | str,
    accelerator: Accelerator,
    progress: Progress | None = None,
) -> Learned:
    """Ascend E[f] over the logits and take the final mask.

    Each step draws a batch B of the pool and G masks of S_B = max(1, round(S/N·|B|)) of it, scores them (one product
    of the masks with the batch's vectors; facility location takes the batch as its ground set), and adds lr times the
    group's gradient to the batch's logits. Under quotas each group's part of the batch gives its own share; under a
    token budget a mask takes documents in the order drawn for as long as they fit. A step whose masks do not differ in
    value by more than float noise is skipped. Draws are keyed by (seed, "policy_gradient", split).

    The trajectory has entries `step`, `value` (the mean f of that step's masks, on its batch), `mask_value` (f of the
    mask that the logits stand for, over the whole pool, in float32; for means alone), `skipped` (saturated steps since
    the last entry) and `note`, which is "saturated" where there were any.

    Raises ValueError for the ordered form with anything but a number of documents, whose order it needs.
    """
    if options.gradient == "ordered" and (budget.costs is not None or budget.groups is not None):
        raise ValueError("the ordered form of the gradient is for a number of documents; take the independent one")
    if pool.magnitude > _LARGEST:
        raise ValueError(
            f"scores of size {pool.magnitude:.3g} are beyond single precision, in which masks are sampled and valued; "
            "divide them by a constant"
        )
    start = initial_logits(pool, options.l_min, options.l_max)
    ascent = _Ascent(pool, budget, options)
    if budget.amount == 0 or list(budget.amounts) == budget.available(pool.n):
        return Learned(ascent.fill(start), start, 0.0, [])
    with contextlib.closing(draws(accelerator, options.group, seed, "policy_gradient", split)) as source:
        return ascent.run(source, start, progress)


class _Ascent:
    """One pool, in canonical order, and what a batch of it needs."""

    def __init__(self, pool: Pool, budget: Budget, options: PolicyGradientOptions) -> None:
        self.pool, self.budget, self.options = pool, budget, options
        self.linear = pool.canonical(pool.linear)
        self.costs = None if budget.costs is None else pool.canonical(budget.costs)
        self.groups = None if budget.groups is None else pool.canonical(budget.groups)
        self.shares = [
            amount / there if there else 0.0
            for amount, there in zip(budget.amounts, budget.available(pool.n), strict=True)
        ]
        n = pool.n
        self.size = min(n, max(2, round(options.batch * n)))
        self._members: list[np.ndarray] | None = None
        if self.groups is not None and self.size < n:
            order = np.argsort(self.groups, kind="stable")
            sizes = np.bincount(self.groups, minlength=len(budget.amounts))
            filled = sizes > 0
            taken = np.array(self.shares)[filled] * sizes[filled] * options.batch
            if float(np.median(taken)) < _FEW:
                self._members = [m for m in np.split(order, np.cumsum(sizes)[:-1]) if m.size]
                self._groups_of_a_batch = max(1, round(options.batch * len(self._members)))
        # a mask of the batch leaves something out, or there is nothing to learn
        self.taken = min(self.size - 1, max(1, round(self.shares[0] * self.size)))

    def fill(self, logits: np.ndarray) -> np.ndarray:
        """The rows of the mask that logits by canonical position stand for."""
        by_row = np.empty(logits.size)
        by_row[self.pool.order] = logits
        return self.budget.fill(by_row, self.pool.ties)

    def run(self, source: Draws, start: np.ndarray, progress: Progress | None) -> Learned:
        n, options = self.pool.n, self.options
        logits = source.put(start)
        rows = source.rows(self.pool.vectors, self.pool.order)
        linear = source.put(self.linear)
        means, skips = source.put(np.zeros(options.steps)), source.put(np.zeros(options.steps))
        every = max(1, options.steps // _ENTRIES)
        trajectory: list[dict[str, Any]] = []
        logged, passes = 0, 0.0
        for step in range(options.steps):
            batch = self._batch(source)
            update, mean, saturated = self._step(source, rows, batch, logits[batch], linear[batch])
            logits[batch] += update
            means[step], skips[step] = mean, saturated
            passes += logits[batch].shape[0] / n
            if (step + 1) % every and step + 1 != options.steps:
                continue
            skipped = int(source.fetch(skips[logged : step + 1]).sum())
            entry = {
                "step": step + 1,
                "value": float(means[step]),
                **self._worth(source, rows, source.fetch(logits).astype(np.float64)),
                "skipped": skipped,
                "note": "saturated" if skipped else None,
            }
            passes += self.budget.amount / max(sum(self.budget.available(n)), 1)
            logged = step + 1
            trajectory.append(entry)
            if progress is not None:
                progress(step + 1, options.steps, entry)
        learned = source.fetch(logits).astype(np.float64)
        final = learned
        if options.final == "sampled":
            final = source.fetch(source.gumbel(logits)[0]).astype(np.float64)
        return Learned(self.fill(final), learned, passes, trajectory)

    def _batch(self, source: Draws) -> Any:
        """Canonical positions of a batch: a uniform sample or, where a group's part of one would give masks nothing to
        choose from, whole groups."""
        if self._members is not None:
            some = source.fetch(source.batch(len(self._members), self._groups_of_a_batch))
            return source.index(np.sort(np.concatenate([self._members[g] for g in some.tolist()])))
        return source.batch(self.pool.n, self.size) if self.size < self.pool.n else slice(None)

    def _step(self, source: Draws, rows: Rows, batch: Any, logits: Any, linear: Any) -> tuple[Any, Any, Any]:
        """(lr·ĝ for the batch, mean f of the group, saturated), all on the device."""
        xp, options = source.xp, self.options
        keys = source.gumbel(logits)
        mask, costs = self._mask(source, keys, batch)
        weighted = mask if costs is None else mask * costs
        amount = self.taken if costs is None and self.groups is None else weighted.sum(1)
        quality = xp.einsum("jb,b->j", weighted, linear) / amount
        values, scale = quality, abs(quality)
        for name, weight in self.pool.terms.weights.items():
            metric = weight * self._metric(source, name, mask, weighted, amount, rows, batch)
            values, scale = values + metric, scale + abs(metric)
        advantage, saturated = advantages(values, scale.mean(), xp)
        if options.gradient == "independent":
            gradient = independent_gradient(advantage, mask, xp)
        else:
            order = source.order(keys, self.taken)
            exact = ordered_gradient(source.double(logits), source.double(advantage), order, xp)
            gradient = source.single(exact)
        return options.lr * gradient, values.mean(), saturated

    def _mask(self, source: Draws, keys: Any, batch: Any) -> tuple[Any, Any]:
        """(float32[G, B] of 0 and 1, float32[B] tokens or None)."""
        if self.groups is None and self.costs is None:
            return source.mask(keys, self.taken), None
        # groups and tokens are looked up on the host, so these budgets wait for the device once a step
        at = batch if isinstance(batch, slice) else source.fetch(batch)
        groups = np.zeros(keys.shape[1], np.int64) if self.groups is None else self.groups[at]
        costs = None if self.costs is None else self.costs[at]
        mask = source.xp.zeros_like(keys)
        for g in np.unique(groups).tolist():
            columns = np.flatnonzero(groups == g)
            there = source.index(columns)
            if costs is None:
                size = round(self.shares[g] * columns.size)
                if size:
                    mask[:, there] = source.mask(keys[:, there], size) if size < columns.size else 1.0
            else:
                tokens = costs[columns]
                mask[:, there] = source.filled(keys[:, there], source.put(tokens), self.shares[g] * float(tokens.sum()))
        if costs is None and not mask[0].sum():
            # no group's share is a whole document of a batch this small
            mask = source.mask(keys, 1)
        return mask, None if costs is None else source.put(costs)

    def _metric(self, source: Draws, name: str, mask: Any, weighted: Any, amount: Any, rows: Rows, batch: Any) -> Any:
        if name == "pws":
            mean = source.sums(weighted, rows, batch, mask is not weighted) / (
                amount if isinstance(amount, int) else amount[:, None]
            )
            return -(mean * mean).sum(1)
        units = source.single(rows(batch))
        if name == "facility_location":
            return facility_location_group_values(source.xp, mask, units, self._most(mask))
        values = disf_group_values if name == "disf" else second_moment_group_values
        if self.costs is None:
            size = self._most(mask)
            return source.banded(mask, lambda xp, band: values(xp, band, units, size))
        # sizes differ between masks under a token budget
        return source.banded(
            mask, lambda xp, band: xp.stack([values(xp, row[None, :], units, int(row.sum()))[0] for row in band])
        )

    def _most(self, mask: Any) -> int:
        """Documents of the largest mask."""
        return self.taken if self.groups is None and self.costs is None else int(mask.sum(1).max())

    def _worth(self, source: Draws, rows_of: Rows, logits: np.ndarray) -> dict[str, float]:
        """{"mask_value": f} of the mask that the logits stand for, where f is made of means."""
        weights = self.pool.terms.weights
        if set(weights) - {"pws"}:
            return {}
        rows = self.fill(logits)
        if not rows.size:
            return {"mask_value": 0.0}
        costs = np.ones(rows.size) if self.budget.costs is None else self.budget.costs[rows].astype(np.float64)
        positions = self.pool.ties[rows].astype(np.int64)
        ordered = np.argsort(positions)
        rows, costs, positions = rows[ordered], costs[ordered], positions[ordered]
        mean = np.zeros(self.pool.vectors.d)
        for a in range(0, rows.size, _WORTH_ROWS):
            some = source.single(rows_of(source.index(positions[a : a + _WORTH_ROWS])))
            mean += source.fetch(source.put(costs[a : a + _WORTH_ROWS]) @ some)
        mean /= costs.sum()
        quality = float(costs @ self.pool.linear[rows]) / float(costs.sum())
        return {"mask_value": quality - weights.get("pws", 0.0) * float(mean @ mean)}
