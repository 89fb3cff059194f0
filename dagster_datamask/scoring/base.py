"""What a scorer is and what it returns. Not here: any scorer."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class ScoredBatch:
    """Scores of n texts, in input order.

    scores: float64[n], NaN exactly where `reasons` says why there is none; reasons: per text None,
    `null_text`, `no_tokens` or `non_finite`; notes: rows counted by what was done to them
    (`surrogates_replaced`). Raises ValueError naming the row where score and reason disagree.
    """

    scores: np.ndarray
    reasons: list[str | None]
    notes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        if self.scores.dtype != np.float64 or self.scores.shape != (len(self.reasons),):
            raise ValueError(
                f"scores must be float64[{len(self.reasons)}], not {self.scores.dtype}{list(self.scores.shape)}"
            )
        missing = np.array([reason is not None for reason in self.reasons], dtype=bool)
        wrong = np.flatnonzero(missing == np.isfinite(self.scores))
        if wrong.size:
            row = int(wrong[0])
            raise ValueError(f"row {row}: score {self.scores[row]} with reason {self.reasons[row]!r}")


class Scorer(Protocol):
    """Anything that scores texts: one model under one published convention."""

    def score(self, texts: Sequence[str | None]) -> ScoredBatch:
        """One score or one reason per text, in input order; a text's score does not depend on the others."""

    def describe(self) -> dict[str, Any]:
        """The conventions and the model's revision, as JSON values: what metadata and manifests record."""
