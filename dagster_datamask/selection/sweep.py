"""The certified front of quality against diversity: one mask for each λ, and what no mask can reach.

Here: reading a list of λ, and solving one pool for each. Not here: the table and the picture (`reporting`).

A bound at λ says λ·quality(U) + (1−λ)·diversity(U) ≤ bound for every mask U of the budget: a line in the plane of
quality and diversity with all masks on one side of it. Where the lines of several λ are crossed, no mask can be.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dagster_datamask.accelerator import Accelerator
from dagster_datamask.selection.budgets import Budget, exact_number, parse_tokens
from dagster_datamask.selection.files import of_file, read_documents
from dagster_datamask.selection.objectives import QualityDiversity
from dagster_datamask.selection.policy_gradient import Progress
from dagster_datamask.selection.solve import Options, Selection, solve

# more than this is a step typed wrongly
_MOST = 1001
_ELLIPSES = ("...", "…")


@dataclass(frozen=True, eq=False)
class Sweep:
    """One pool solved for several λ, which ascend.

    selections: one for each λ; overlaps: the share of each mask that the mask before it holds too (None for the first,
    and for empty masks); uniform: (quality, diversity) expected of a uniform mask of the same size, in the objective's
    scale, None where the budget is 0 or the certificates tell no expectation.
    """

    lambdas: tuple[float, ...]
    selections: list[Selection] = field(repr=False)
    overlaps: list[float | None]
    uniform: tuple[float, float] | None

    def rows(self) -> list[dict[str, Any]]:
        """One JSON-able row for each λ; value = λ·quality + (1−λ)·diversity."""
        return [
            {
                "lambda": lam,
                "quality": found.quality,
                "quality_raw": found.quality_raw,
                "diversity": found.diversity,
                "value": found.value,
                "upper_bound": found.certificate.upper_bound,
                "gap": found.certificate.gap,
                "share": found.certificate.share,
                "baseline": found.certificate.baseline,
                "overlap": overlap,
                "passes": found.passes,
                "seconds": found.seconds,
            }
            for lam, found, overlap in zip(self.lambdas, self.selections, self.overlaps, strict=True)
        ]


def parse_lambdas(text: str) -> tuple[float, ...]:
    """The λ of "0,0.1,0.5", of "0:1:0.05" (first:last:step, last included where a step lands on it) or of
    "0,0.05,…,1" (the step of the two before the dots), ascending and without repetition.

    Exact in the decimals written. Raises ValueError for what cannot be read, lies outside [0, 1] or makes fewer than
    two λ.
    """
    parts = [part.strip() for part in text.split(",")]
    found: list[Fraction] = []
    for k, part in enumerate(parts):
        if part in _ELLIPSES:
            if k < 2 or k + 1 == len(parts):
                raise ValueError(f"--lambda {text!r}: dots stand between two λ and a last one, as in 0,0.05,…,1")
            found += _range(found[-1], _number(parts[k + 1], text), found[-1] - found[-2], text)
        elif ":" in part:
            ends = part.split(":")
            if len(ends) != 3:
                raise ValueError(f"--lambda {text!r}: a range is first:last:step, as in 0:1:0.05")
            first, last, step = (_number(end, text) for end in ends)
            found += _range(first, last, step, text)
        else:
            found.append(_number(part, text))
    outside = [x for x in found if not 0 <= x <= 1]
    if outside:
        raise ValueError(f"--lambda {text!r}: λ must lie in [0, 1], not {float(outside[0]):g}")
    distinct = sorted({float(x) for x in found})
    if len(distinct) < 2:
        raise ValueError(f"--lambda {text!r} is one λ; a sweep takes two or more, `datamask solve` takes one")
    return tuple(distinct)


def _number(text: str, whole: str) -> Fraction:
    try:
        return exact_number(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"--lambda {whole!r}: {text!r} is no number; write 0,0.1,0.5 or 0:1:0.05") from None


def _range(first: Fraction, last: Fraction, step: Fraction, whole: str) -> list[Fraction]:
    if step <= 0 or last < first:
        raise ValueError(f"--lambda {whole!r}: a range ascends by a step above 0")
    count = int((last - first) / step) + 1
    if count > _MOST:
        raise ValueError(f"--lambda {whole!r} makes {count} λ; {_MOST} are the most")
    return [first + k * step for k in range(count)]


def sweep(
    embeddings: np.ndarray,
    quality: np.ndarray,
    lambdas: Sequence[float],
    budget: int | Budget,
    *,
    ids: Sequence[str],
    scale: str = "per_pool",
    constants: tuple[float, float] | None = None,
    solver: str = "certified",
    seed: int = 0,
    diversity: Mapping[str, float] | None = None,
    accelerator: Accelerator = Accelerator(),  # noqa: B008
    progress: Progress | None = None,
    options: Options | None = None,
) -> Sweep:
    """Solve one pool for each of the `lambdas`, two or more in [0, 1].

    Arguments as those of `QualityDiversity` and `solve`; the bounds are proven whatever the solver.
    progress(k, number of λ, {"value", "lambda"}) is called after each. Raises ValueError for fewer than two λ, and
    what `QualityDiversity` and `solve` raise.
    """
    ascending = tuple(sorted(set(lambdas)))
    if len(ascending) < 2:
        raise ValueError(f"a sweep takes two different λ or more, not {list(lambdas)}")
    terms = {"pws": 1.0} if diversity is None else diversity
    selections: list[Selection] = []
    for k, lam in enumerate(ascending):
        objective = QualityDiversity(embeddings, quality, lam, scale, constants, terms)
        found = solve(objective, budget, solver=solver, seed=seed, ids=ids, accelerator=accelerator, options=options)
        selections.append(found)
        if progress is not None:
            progress(k + 1, len(ascending), {"value": found.value, "lambda": lam})
    overlaps: list[float | None] = [None]
    for before, after in pairwise(selections):
        common = np.intersect1d(before.indices, after.indices, assume_unique=True).size
        overlaps.append(common / after.indices.size if after.indices.size else None)
    return Sweep(ascending, selections, overlaps, _uniform(ascending, selections))


def _uniform(lambdas: Sequence[float], selections: Sequence[Selection]) -> tuple[float, float] | None:
    # the expectation over uniform masks is linear in λ, so two of them give both of its terms
    (a, fa), (b, fb) = ((lambdas[k], selections[k].certificate.baseline) for k in (0, -1))
    if fa is None or fb is None or not selections[0].indices.size:
        return None
    slope = (fb - fa) / (b - a)
    return fa + (1.0 - a) * slope, fa - a * slope


def sweep_file(
    source: Path,
    lambdas: Sequence[float],
    *,
    budget: str | int | float,
    scale: str = "per_pool",
    solver: str = "certified",
    seed: int = 0,
    columns: Mapping[str, str] | None = None,
    diversity: Mapping[str, float] | None = None,
    quota: str | None = None,
    accelerator: Accelerator = Accelerator(),  # noqa: B008
    progress: Progress | None = None,
    options: Options | None = None,
) -> dict[str, Any]:
    """Read `source` once (`files.read_documents`) and sweep it; the JSON-able figures of `datamask sweep`.

    Raises ValueError or BadInput naming the file, and the first ids or rows at fault.
    """
    in_tokens = parse_tokens(budget) is not None
    documents = read_documents(source, columns or {}, scores_needed=True, tokens_needed=in_tokens, quota=quota)
    assert documents.scores is not None
    with of_file(source):
        kept = documents.budget(budget)
        found = sweep(
            documents.embeddings,
            documents.scores,
            lambdas,
            kept,
            ids=documents.ids,
            scale=scale,
            solver=solver,
            seed=seed,
            diversity=diversity,
            accelerator=accelerator,
            progress=progress,
            options=options,
        )
    uniform = None if found.uniform is None else dict(zip(("quality", "diversity"), found.uniform, strict=True))
    return {
        "n": len(documents.ids),
        "budget": kept.amount,
        "unit": kept.unit,
        "scale": scale,
        "solver": solver,
        "seed": seed,
        "source": str(source),
        "uniform": uniform,
        "rows": found.rows(),
    }
