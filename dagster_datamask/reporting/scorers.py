"""Figures of the scorers beside each other. Not here: a scorer by itself (`figures`)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dagster_datamask.reporting.canvas import SMALL, canvas, documents, nothing, png


def correlation_figure(pairs: Sequence[Mapping[str, Any]], title: str = "How the scorers agree") -> bytes:
    """A square of scorers: Pearson's correlation above the diagonal, Spearman's below; blue agrees, red contradicts.

    pairs: records of `first, second, pearson, spearman, documents`, None where there is no correlation.
    """
    figure, (axes,) = canvas(title)
    names = list(dict.fromkeys(name for pair in pairs for name in (pair["first"], pair["second"])))
    most = max((pair["documents"] for pair in pairs), default=0)
    if most < 2:
        return nothing(figure, axes, "too few documents have two scores")
    square = np.full((len(names), len(names)), np.nan)
    np.fill_diagonal(square, 1.0)
    for pair in pairs:
        i, k = sorted((names.index(pair["first"]), names.index(pair["second"])))
        square[i, k] = np.nan if pair["pearson"] is None else pair["pearson"]
        square[k, i] = np.nan if pair["spearman"] is None else pair["spearman"]
    axes.imshow(np.nan_to_num(square), cmap="RdBu", vmin=-1, vmax=1)
    for (i, k), value in np.ndenumerate(square):
        shown = "constant" if np.isnan(value) else "" if i == k else f"{value:.2f}"
        axes.text(k, i, shown, ha="center", va="center", color="white" if abs(value) > 0.6 else "black")
    axes.grid(False)
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel(f"above: Pearson; below: Spearman; {documents(most)}", fontsize=SMALL)
    return png(figure)
