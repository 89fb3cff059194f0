"""A pool: an objective with its rows checked and its scales resolved, as every solver sees it.

Here: the one pass that prepares it, and reading its rows in canonical order. Not here: pools that never sit in memory
(`corpus`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dagster_datamask import keyed
from dagster_datamask.selection.certificates import Terms
from dagster_datamask.selection.exact import ScalarSum
from dagster_datamask.selection.objectives import (
    CONCAVE,
    CONSTANT,
    BadInput,
    QualityDiversity,
    canonical_order,
    finite_scores,
    map_blocks,
    name_documents,
)
from dagster_datamask.selection.vectors import FEATURES, Vectors, prepare

_ROWS = 4096


@dataclass(frozen=True, eq=False)
class Pool:
    """f(U) = mean of `linear` over U + Σ weight·metric(U), over N documents in the order they came in.

    Whatever that order, solvers give the same documents: they break ties by `ties` or work in canonical order.

    order: int64[N], the row at each canonical position; ties: uint64[N], each row's canonical position; hashes:
    uint64[N], of its id; mean: float64
    [d], the mean of ẑ; quality: the raw scores, or None where there are none for every document; scaled: λ's factor;
    linear: λ·scaled + Σ weight·score, all float64[N]; terms: what f is made of, scales resolved; checksum: of the
    stored vectors.
    """

    objective: QualityDiversity
    vectors: Vectors
    order: np.ndarray = field(repr=False)
    ties: np.ndarray = field(repr=False)
    hashes: np.ndarray = field(repr=False)
    mean: np.ndarray = field(repr=False)
    quality: np.ndarray | None = field(repr=False)
    scaled: np.ndarray = field(repr=False)
    scores: dict[str, np.ndarray] = field(repr=False)
    linear: np.ndarray = field(repr=False)
    terms: Terms
    checksum: str

    @property
    def n(self) -> int:
        return self.vectors.n

    @property
    def largest(self) -> float:
        """The largest |linear|, 0 for no documents."""
        return float(np.abs(self.linear).max(initial=0.0))

    @property
    def magnitude(self) -> float:
        """The largest sum of the sizes of the terms of `linear`, which may cancel."""
        sizes = [self.terms.lam * self.scaled] + [
            self.terms.scores[name] * column for name, column in self.scores.items()
        ]
        return sum(float(np.abs(column).max(initial=0.0)) for column in sizes)

    @property
    def linear_mean(self) -> float:
        """The mean of `linear`, in any order the same; 0 of nothing."""
        total = ScalarSum(self.largest)
        total.add(self.linear)
        return total.value() / max(self.n, 1)

    def canonical(self, values: np.ndarray) -> np.ndarray:
        """Values by row as values by canonical position."""
        return values[self.order]

    def columns(self) -> dict[str, np.ndarray]:
        """What a mask's means are taken of."""
        quality = {} if self.quality is None else {"quality": self.scaled, "quality_raw": self.quality}
        return quality | self.scores

    def feature_means(self) -> dict[str, np.ndarray]:
        """{concave metric of weight: the mean of its φ over the pool}."""
        return {name: self.feature_mean(name) for name in CONCAVE if self.terms.weights.get(name)}

    def unit(self) -> np.ndarray:
        """float32[N, d]: ẑ in canonical order; a copy of the embeddings."""
        return self.vectors.unit(self.order)

    def feature_mean(self, name: str) -> np.ndarray:
        """float64[size]: the mean of a concave metric's φ over the pool."""
        if name == "pws":
            return self.mean
        feature = FEATURES[name]
        total = np.zeros(feature.size(self.vectors.d))
        for a in range(0, self.n, _ROWS):
            rows = self.vectors.unit(self.order[a : a + _ROWS])
            total += feature.total(rows, np.ones(len(rows)))
        return total / max(self.n, 1)


def prepare_pool(objective: QualityDiversity, ids: Sequence[str]) -> Pool:
    """The pool of an objective whose N documents have these N distinct ids.

    One pass over the embeddings; they are not copied, unless they are float64 or too long or short for float32.
    Raises BadInput naming the first documents whose vector is not finite or is zero, whose score is not finite, or
    whose id is not unique.
    """
    n, d = objective.embeddings.shape
    order, hashes = canonical_order(ids, n)
    ties = np.empty(n, np.uint64)
    ties[order] = np.arange(n, dtype=np.uint64)
    by_row = np.empty(n, np.uint64)
    by_row[order] = hashes
    prepared = prepare(np.ascontiguousarray(objective.embeddings), by_row)
    if prepared.bad.size:
        zero = prepared.bad[[not objective.embeddings[i].any() for i in prepared.bad.tolist()]]
        if zero.size:
            raise BadInput(f"{name_documents(ids, zero)}: the embedding is zero and has no direction; leave these out")
        raise BadInput(
            f"{name_documents(ids, prepared.bad)}: the embedding is not finite; embed these again or leave them out"
        )
    mean = prepared.total.value() / max(n, 1)
    quality, scaled = None, np.zeros(n)
    if objective.quality is not None and (objective.lam > 0 or np.isfinite(objective.quality).all()):
        quality = finite_scores(ids, objective.quality, "score")
        scaled = objective.scaled(quality, objective.constants, order, "score")
    scores = {
        name: objective.scaled(
            finite_scores(ids, score.values, f"score {name!r}"), score.constants, order, f"score {name!r}"
        )
        for name, score in objective.scores.items()
    }
    linear = objective.lam * scaled if objective.lam else np.zeros(n)
    for name, score in objective.scores.items():
        linear = linear + score.weight * scores[name]
    diversity = {name: weight for name, weight in objective.diversity.items() if weight}
    if objective.scale == "zscore" and n and "pws" in diversity:
        parts = map_blocks(lambda a, b: np.einsum("ij,j->i", prepared.vectors.double(order[a:b]), mean), n)
        spread = float(np.std(2.0 * np.concatenate(parts)))
        diversity["pws"] *= 1.0 / spread if spread > CONSTANT else 0.0
    return Pool(
        objective=objective,
        vectors=prepared.vectors,
        order=order,
        ties=ties,
        hashes=by_row,
        mean=mean,
        quality=quality,
        scaled=scaled,
        scores=scores,
        linear=linear,
        terms=Terms(objective.lam, diversity, {name: score.weight for name, score in objective.scores.items()}),
        checksum=checksum(n, d, prepared.prints),
    )


def checksum(n: int, d: int, prints: int) -> str:
    """Hex, of N stored vectors bound to their ids, whatever their order."""
    return keyed.digest(n, d, prints % 2**64).hex()
