"""Data valuation by reinforcement learning, a baseline (DVRL, arXiv 1909.11671).

Here: a network that gives each document a value, taught by REINFORCE on Bernoulli selections of random batches, and
the mask made of the documents it values most. Not here: what is rewarded, beyond quality and pair-wise similarity: any
function of groups of masks will do.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dagster_datamask import keyed
from dagster_datamask.accelerator import Accelerator
from dagster_datamask.selection.objectives import map_blocks
from dagster_datamask.selection.policy_gradient import Progress
from dagster_datamask.selection.sampling import top_s

if TYPE_CHECKING:
    import torch

# values(xp, mask, rows, linear) -> [G]: f of each of G masks of a batch of B documents; xp is torch here, mask is
# float32[G, B] of 0 and 1, rows are float32[B, d] unit vectors, linear is float32[B]
Values = Callable[[Any, Any, Any, Any], Any]

# the share of its past that the moving baseline forgets in a step: the window of 20 of the paper
_FORGOTTEN = 1 / 20
# documents of a batch, and of a mask in expectation: the mean of fewer says little about the mean of many
_LEAST_BATCH = 500
_LEAST_MASK = 50
# how often the trajectory is written
_ENTRIES = 50
# rows that are summed, and rows that are valued, in one go
_SUMMED = 2048
_VALUED = 8192
# bisections of the shift of the logits, in float32
_BISECTIONS = 40
_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class DvrlOptions:
    """hidden: width, and layers: number of the hidden layers; lr: of Adam, falling to 0 along a half cosine; steps;
    batch: documents a step, or None for as many as give masks of 50, and 500 at least; group: Bernoulli masks of a
    batch. The paper draws one mask a step; the more the steadier the gradient, at little cost."""

    hidden: int = 100
    layers: int = 1
    lr: float = 3e-3
    steps: int = 2000
    batch: int | None = None
    group: int = 128

    def __post_init__(self) -> None:
        for name in ("hidden", "batch", "group"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ValueError(f"{name} must be 1 or more, not {given}")
        if self.layers < 0 or self.steps < 0:
            raise ValueError(f"layers ({self.layers}) and steps ({self.steps}) must not be negative")
        if not (np.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"the learning rate must be positive and finite, not {self.lr}")


@dataclass(frozen=True, eq=False)
class Valued:
    """positions: int64[S], ascending, of the documents of largest value; scores: float64[N], the network's output;
    passes: reads of the embeddings in units of the whole pool; trajectory: one entry a logged step (`dvrl`)."""

    positions: np.ndarray
    scores: np.ndarray = field(repr=False)
    passes: float
    trajectory: list[dict[str, Any]] = field(repr=False)


def quality_and_similarity(pws: float) -> Values:
    """mean of linear − pws·‖mean of ẑ‖² of each mask that has a document."""

    def values(xp: Any, mask: Any, rows: Any, linear: Any) -> Any:
        size = xp.clip(mask.sum(1), 1.0, None)
        mean = mask @ rows / size[:, None]
        return mask @ linear / size - pws * (mean * mean).sum(1)

    return values


def dvrl(
    z: np.ndarray,
    linear: np.ndarray,
    *,
    values: Values,
    budget: int,
    options: DvrlOptions,
    seed: int,
    split: int | str,
    accelerator: Accelerator,
    progress: Progress | None = None,
) -> Valued:
    """Keep the `budget` of N documents that the trained network values most, ties to the lower position.

    z: float32[N, d], unit rows; linear: float64[N], what each document adds to f by itself; values: f of Bernoulli
    masks. The paper's value network sees an example and its label; this one sees ẑ and, where it varies, the linear
    score, both standardised over the pool.

    A step draws a batch and G masks of it, document i with probability σ(h_i + c), and follows the gradient of ln P
    times (f − δ), δ being the moving average of earlier rewards. The scalar c makes the probabilities average S/N, so
    masks have the budget's share of the batch in expectation, in place of the paper's penalty on leaving a range; the
    gradient takes the dependence of c on the network into account. A mask without documents teaches nothing. Draws
    are keyed by (seed, "dvrl", split).

    The trajectory has entries `step`, `value` (the mean f of that step's masks, on its batch) and `baseline` (δ).
    Raises ValueError for a budget outside 0..N and MemoryPlanError where a batch would not fit.
    """
    n, d = z.shape
    if not 0 <= budget <= n:
        raise ValueError(f"budget {budget} is not between 0 and the {n} documents of the pool")
    if budget in (0, n):
        return Valued(np.arange(budget), np.zeros(n), 0.0, [])
    batch = min(n, options.batch if options.batch is not None else max(_LEAST_BATCH, -(-_LEAST_MASK * n // budget)))
    # rows as given, standardised, beside their scores and as a gradient; masks, noise and their difference from p
    needed = 4 * (batch * (4 * d + 4 * options.hidden * options.layers + 4 * options.group) + n)
    accelerator.plan(
        f"DVRL in batches of {batch:,}", needed + (4 * n * d if accelerator.is_cuda else 0), "set a smaller batch"
    )
    import torch

    threads = torch.get_num_threads()
    if not accelerator.is_cuda:
        # torch orders its sums by its number of threads
        torch.set_num_threads(1)
    try:
        return _train(z, linear, values, budget, batch, options, keyed.rng(seed, "dvrl", split), accelerator, progress)
    finally:
        torch.set_num_threads(threads)


def _train(
    z: np.ndarray,
    linear: np.ndarray,
    values: Values,
    budget: int,
    size: int,
    options: DvrlOptions,
    draws: np.random.Generator,
    accelerator: Accelerator,
    progress: Progress | None,
) -> Valued:
    import torch

    n = z.shape[0]
    device = accelerator.device
    generator = torch.Generator(device=device).manual_seed(int(draws.integers(2**63)))
    rows = torch.from_numpy(np.ascontiguousarray(z)).to(device)
    scores = torch.from_numpy(linear.astype(np.float32)).to(device)
    network = _Network(z, linear, options, generator, device)
    optimiser = torch.optim.Adam(network.parameters, lr=options.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, options.steps))
    batches = _batches(n, size, generator)
    baseline = torch.zeros((), device=device)
    every = max(1, options.steps // _ENTRIES)
    trajectory: list[dict[str, Any]] = []
    for step in range(options.steps):
        batch = next(batches)
        z_batch, linear_batch = rows[batch], scores[batch]
        logits = network(z_batch, linear_batch)
        chance = _with_mean(logits.detach(), budget / n)
        mask = (torch.rand((options.group, size), generator=generator, device=device) < chance).float()
        rewards = values(torch, mask, z_batch, linear_batch)
        some = mask.sum(1) > 0
        mean = torch.where(some, rewards, 0.0).sum() / some.sum()
        # no mean where every mask is empty, and no past at first
        mean = torch.where(some.any(), mean, baseline)
        baseline = baseline if step else mean
        advantage = torch.where(some, rewards - baseline, 0.0)
        gradient = _gradient(advantage / options.group, mask, chance)
        optimiser.zero_grad()
        logits.backward(-gradient)
        optimiser.step()
        schedule.step()
        baseline = baseline + _FORGOTTEN * (mean - baseline)
        if (step + 1) % every and step + 1 != options.steps:
            continue
        entry = {"step": step + 1, "value": float(mean), "baseline": float(baseline)}
        trajectory.append(entry)
        if progress is not None:
            progress(step + 1, options.steps, entry)
    with torch.no_grad():
        parts = [network(rows[a : a + _VALUED], scores[a : a + _VALUED]) for a in range(0, n, _VALUED)]
    learned = torch.cat(parts).cpu().numpy().astype(np.float64)
    return Valued(top_s(learned, budget), learned, 3.0 + options.steps * size / n, trajectory)


class _Network:
    """A multi-layer perceptron on standardised inputs, its first weights drawn from `generator`."""

    def __init__(
        self, z: np.ndarray, linear: np.ndarray, options: DvrlOptions, generator: "torch.Generator", device: str
    ) -> None:
        import torch

        mean, inverse = _moments(z)
        self._mean = torch.from_numpy(mean).to(device)
        self._inverse = torch.from_numpy(inverse).to(device)
        level, deviation = float(linear.mean()), float(linear.std())
        self._linear = (level, 1.0 / deviation) if deviation > 1e-12 * abs(level) else None
        widths = [z.shape[1] + (self._linear is not None), *[options.hidden] * options.layers, 1]
        self.parameters: list[torch.Tensor] = []
        for inputs, outputs in pairwise(widths):
            weight = torch.empty((outputs, inputs), device=device)
            torch.nn.init.kaiming_uniform_(weight, nonlinearity="relu", generator=generator)
            self.parameters += [weight.requires_grad_(), torch.zeros(outputs, device=device, requires_grad=True)]

    def __call__(self, rows: "torch.Tensor", linear: "torch.Tensor") -> "torch.Tensor":
        import torch

        x = (rows - self._mean) * self._inverse
        if self._linear is not None:
            level, inverse = self._linear
            x = torch.cat([x, ((linear - level) * inverse)[:, None]], dim=1)
        for k in range(0, len(self.parameters), 2):
            x = torch.nn.functional.linear(torch.relu(x) if k else x, *self.parameters[k : k + 2])
        return x[:, 0]


def _with_mean(logits: "torch.Tensor", share: float) -> "torch.Tensor":
    """float32[B]: σ(h + c) with the c for which they average `share`, by bisection."""
    import torch

    centre = float(np.log(share / (1.0 - share)))
    low, high = centre - logits.max(), centre - logits.min()
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        above = torch.sigmoid(logits + middle).mean() > share
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return torch.sigmoid(logits + (low + high) / 2)


def _gradient(weights: "torch.Tensor", mask: "torch.Tensor", chance: "torch.Tensor") -> "torch.Tensor":
    """float32[B]: Σ_j weights_j ∂ln P(M_j)/∂h for probabilities σ(h + c) whose mean c holds.

    ∂ln P/∂(h + c) of Bernoulli draws is M − p, and ∂c/∂h_i = −p_i(1−p_i)/Σp(1−p). weights: [G]; mask: [G, B].
    """
    gradient = weights @ (mask - chance)
    slope = chance * (1.0 - chance)
    return gradient - slope * (gradient.sum() / slope.sum().clamp(min=_TINY))


def _batches(n: int, size: int, generator: "torch.Generator") -> Iterator["torch.Tensor"]:
    """int64[size], without end: the pool in a random order, then in another; what is left over of one is not used."""
    import torch

    while True:
        order = torch.randperm(n, generator=generator, device=generator.device)
        for start in range(0, n - size + 1, size):
            yield order[start : start + size]


def _moments(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(float32[d] mean, float32[d] 1/standard deviation, 0 for a constant column)."""
    n, d = z.shape
    total, squares = np.zeros(d), np.zeros(d)
    for part in map_blocks(lambda a, b: z[a:b].sum(axis=0, dtype=np.float64), n, block=_SUMMED):
        total += part
    mean = total / n
    for part in map_blocks(lambda a, b: np.square(z[a:b] - mean).sum(axis=0), n, block=_SUMMED):
        squares += part
    spread = np.sqrt(squares / n)
    # below this a column varies by no more than its rounding to float32
    varies = spread > 1e-6
    return mean.astype(np.float32), np.divide(1.0, spread, out=np.zeros(d), where=varies).astype(np.float32)
