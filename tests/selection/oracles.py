"""Small pools, and brute force over every mask of them."""

from itertools import combinations, permutations

import numpy as np

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
