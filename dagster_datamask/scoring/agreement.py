"""Whether the scorers agree, and whether each of them tells documents apart at all.

Numbers from a sample of documents that all scorers have read. Not here: drawing the sample (`stages.quality`), and what
the scores make together (`quality`).
"""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np
from scipy.stats import rankdata

# what a score can range over; Edu's may leave it a little
SCALES = {"dclm": 1.0, "edu": 5.0, "wiki": 1.0}
LEAST_SPREAD = 0.01
MOST_EQUAL = 0.99
# of fewer documents nothing is said
FEWEST_DOCUMENTS = 100


def correlations(scores: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Pearson's and Spearman's correlation of each two scorers, over the documents that have both scores.

    scores: {part: float64[n]}, NaN where there is none. A record of each pair: `first, second, pearson, spearman,
    documents`; None where fewer than two documents have both, or one of the two is constant on them.
    """
    found = []
    for first, second in combinations(scores, 2):
        both = np.isfinite(scores[first]) & np.isfinite(scores[second])
        a, b = scores[first][both], scores[second][both]
        found.append(
            {
                "first": first,
                "second": second,
                "pearson": _pearson(a, b),
                # average ranks of ties
                "spearman": _pearson(rankdata(a), rankdata(b)),
                "documents": int(both.sum()),
            }
        )
    return found


def nearly_constant(scores: Mapping[str, np.ndarray]) -> dict[str, str]:
    """{scorer that hardly tells documents apart: the figures}: its standard deviation is below 1 % of its scale, or
    more than 99 % of the documents have one value. Scorers with fewer than 100 scores are passed over.
    """
    found = {}
    for part, column in scores.items():
        known = column[np.isfinite(column)]
        if len(known) < FEWEST_DOCUMENTS:
            continue
        spread = float(known.std())
        values, counts = np.unique(known, return_counts=True)
        share, value = float(counts.max() / len(known)), float(values[counts.argmax()])
        if spread < LEAST_SPREAD * SCALES[part] or share > MOST_EQUAL:
            found[part] = (
                f"standard deviation {spread:.4g} on a scale of {SCALES[part]:g}, "
                f"{share:.1%} of {len(known)} documents have the score {value:.6g}"
            )
    return found


def _pearson(a: np.ndarray, b: np.ndarray) -> float | None:
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])
