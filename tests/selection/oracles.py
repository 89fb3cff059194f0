"""Small pools, and brute force over every mask of them."""

from itertools import combinations, permutations

import numpy as np

from dagster_datamask.selection.budgets import Budget
from dagster_datamask.selection.objectives import QualityDiversity


def ids_of(n: int) -> list[str]:
    return [f"doc-{i}" for i in range(n)]


def vectors(rng: np.random.Generator, n: int, d: int, shift: float = 0.0) -> np.ndarray:
    z = rng.standard_normal((n, d)) + shift
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def objective(
    rng: np.random.Generator, n: int, d: int, lam: float, scale: str = "per_pool", shift: float = 0.0
) -> QualityDiversity:
    return QualityDiversity(vectors(rng, n, d, shift), rng.uniform(0, 15, n), lam, scale)


def value_of(f: QualityDiversity, chosen: list[int], scaled: np.ndarray | None = None) -> float:
    """f from its definition, by the pair-wise cosines; per_pool quality unless given."""
    if not chosen:
        return 0.0
    z = f.embeddings.astype(np.float64)
    z = z / np.linalg.norm(z, axis=1, keepdims=True)
    if scaled is None and f.quality is not None:
        spread = np.ptp(f.quality)
        scaled = (f.quality - f.quality.min()) / spread if spread else np.zeros(len(z))
    pairs = z[chosen] @ z[chosen].T
    quality = 0.0 if scaled is None or f.lam == 0 else f.lam * scaled[chosen].mean()
    return float(quality - (1 - f.lam) * pairs.sum() / len(chosen) ** 2)


def all_values(f: QualityDiversity, size: int) -> dict[tuple[int, ...], float]:
    return {u: value_of(f, list(u)) for u in combinations(range(f.embeddings.shape[0]), size)}


def order_probabilities(logits: np.ndarray, size: int) -> dict[tuple[int, ...], float]:
    """P(π | L) of every ordered draw of `size`, from the definition."""
    p = np.exp(logits - logits.max())
    p /= p.sum()
    found = {}
    for order in permutations(range(len(p)), size):
        left, probability = 1.0, 1.0
        for i in order:
            probability *= p[i] / left
            left -= p[i]
        found[order] = probability
    return found


def scaled_by(f: QualityDiversity, values: np.ndarray, constants: tuple[float, float] | None) -> np.ndarray:
    """Scores on the objective's scale, from the definitions."""
    lo, hi = (values.min(), values.max()) if f.scale == "per_pool" or constants is None else constants
    if f.scale == "raw":
        return values if np.ptp(values) else values * 0.0
    if f.scale == "zscore":
        return values / values.std() if np.ptp(values) else values * 0.0
    return (values - lo) / (hi - lo) if hi > lo and np.ptp(values) else values * 0.0


def metric(name: str, z: np.ndarray, chosen: list[int], weights: np.ndarray) -> float:
    """A diversity metric from its definition; z: unit rows of the whole pool; weights: of the chosen."""
    u, w = z[chosen], weights / weights.sum()
    if name == "pws":
        return -float(w @ (u @ u.T) @ w)
    if name == "disf_second_moment":
        return -float(w @ (u @ u.T) ** 2 @ w)
    if name == "facility_location":
        return float(np.maximum((z @ u.T).max(axis=1), 0.0).mean())
    centred = u - u.mean(axis=0)
    spread = centred.std(axis=0)
    if not (spread > 1e-7).any():
        d = z.shape[1]
        return -1e-4 * d * (d - 1)
    columns = centred[:, spread > 1e-7] / spread[spread > 1e-7]
    correlations = columns.T @ columns / len(u)
    return -1e-4 * float((correlations**2).sum() - (np.diag(correlations) ** 2).sum())


def worth(f: QualityDiversity, chosen: list[int], costs: np.ndarray | None = None) -> float:
    """f of a mask from the definitions, means weighted by tokens where there are costs."""
    z = f.embeddings.astype(np.float64)
    z = z / np.linalg.norm(z, axis=1, keepdims=True)
    weights = np.ones(len(chosen)) if costs is None else costs[chosen].astype(float)
    share = weights / weights.sum()
    total = sum((1 - f.lam) * w * metric(name, z, chosen, weights) for name, w in f.diversity.items())
    if f.lam > 0 and f.quality is not None:
        total += f.lam * float(share @ scaled_by(f, f.quality, f.constants)[chosen])
    for score in f.scores.values():
        total += score.weight * float(share @ scaled_by(f, score.values, score.constants)[chosen])
    return float(total)


def feasible(n: int, budget: Budget) -> list[list[int]]:
    """Every mask that a certificate of this budget is about."""
    costs = np.ones(n, int) if budget.costs is None else budget.costs
    groups = np.zeros(n, int) if budget.groups is None else budget.groups
    found = []
    for bits in range(1, 2**n):
        chosen = [i for i in range(n) if bits >> i & 1]
        fits = True
        for g, amount in enumerate(budget.amounts):
            held = sum(int(costs[i]) for i in chosen if groups[i] == g)
            slack = 0 if budget.costs is None else int(costs[groups == g].max(initial=0))
            fits &= amount - slack <= held <= amount
        if fits:
            found.append(chosen)
    return found
