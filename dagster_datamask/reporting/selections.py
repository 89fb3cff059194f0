"""Figures of what a mask does to a pool: quality and diversity, clusters, lengths, hosts, overlap, a map of documents.

Here: numbers to pictures, under the rules of `figures`. Not here: the numbers, and the captions under the pictures.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from dagster_datamask.reporting.canvas import (
    COLOURS,
    DASHES,
    GREY,
    MARKERS,
    SMALL,
    canvas,
    documents,
    legend_below,
    nothing,
    percent_axis,
    png,
    say,
)
from dagster_datamask.reporting.tables import human

# most rows and columns of the map of clusters: as many as leave every cell's number legible
_CELLS = 8
_HOST_CHARACTERS = 34


def strategies_figure(rows: Sequence[Mapping[str, Any]], title: str) -> bytes:
    """Masks of one pool in the plane of quality and diversity, each with its name; the first row is the pool.

    A row has `name`, `quality` (mean) and `cosine` (mean over two different documents), either None where there are too
    few documents; such rows are left out.
    """
    drawn = [(i, row) for i, row in enumerate(rows) if row["quality"] is not None and row["cosine"] is not None]
    # the legend's further lines must not take the axes' room
    figure, (axes,) = canvas(title, size=(6.4, 3.4 + 0.22 * max(0, (len(drawn) + 1) // 2 - 3)))
    if not drawn:
        return nothing(figure, axes, "too few documents to compare")
    for i, row in drawn:
        axes.plot(
            row["quality"],
            1 - row["cosine"],
            ls="none",
            color=GREY if i == 0 else COLOURS[(i - 1) % len(COLOURS)],
            # past the palette's end colours come again with other markers
            marker="X" if i == 0 else MARKERS[(i - 1 + (i - 1) // len(COLOURS)) % len(MARKERS)],
            markersize=9,
            label=f"{row['name']}: {row['quality']:.2f}, {1 - row['cosine']:.3f}",
        )
    axes.margins(0.12)
    axes.set_xlabel("mean quality (0 to 15)")
    axes.set_ylabel("diversity (1 − mean cosine)")
    legend_below(figure, axes)
    return png(figure)


def quality_change_figure(counts: Mapping[str, Sequence[int]], means: Mapping[str, float | None], title: str) -> bytes:
    """Share of documents at each integer quality 0..15 of every group, the last one (what is kept) as bars.

    counts: {group: 16 numbers}; means: {group: mean quality} for the legend. Groups without documents are left out.
    """
    figure, (axes,) = canvas(title)
    filled = {name: np.asarray(group) for name, group in counts.items() if sum(group)}
    if not filled:
        return nothing(figure, axes, "no document has a quality score")
    kept = list(counts)[-1]
    x = np.arange(16)
    for i, (name, group) in enumerate(filled.items()):
        shares = 100 * group / group.sum()
        label = f"{name}, {documents(int(group.sum()))}: mean {means[name]:.2f}"
        if name == kept:
            axes.bar(x, shares, 0.86, color=COLOURS[0], alpha=0.55, label=label, zorder=1)
            continue
        edges, heights = np.append(x, 16) - 0.5, np.append(shares, shares[-1])
        axes.step(edges, heights, where="post", color=(GREY, COLOURS[1])[i % 2], ls=DASHES[i % 2], lw=1.8, label=label)
    percent_axis(axes)
    axes.set_ylim(bottom=0)
    axes.set_xticks(x)
    axes.set_xlabel("quality, rounded (0 to 15)")
    axes.set_ylabel("share of documents")
    legend_below(figure, axes)
    return png(figure)


def cluster_map_figure(
    quality: np.ndarray, typicality: np.ndarray, pool: np.ndarray, kept: np.ndarray, title: str
) -> bytes:
    """Clusters by their mean quality (columns) and by how typical they are (rows), as two heat maps: the share of the
    pool's documents that each cell holds, and the share of a cell's documents that is kept.

    quality: float64[k]; typicality: float64[k], cosine of the cluster's centroid with the pool's mean; pool, kept:
    int64[k] documents. Clusters without documents are left out. Cells hold equal numbers of clusters along each side.
    Raises ValueError where a cluster keeps more than it has.
    """
    if (kept > pool).any():
        worst = int(np.flatnonzero(kept > pool)[0])
        raise ValueError(f"cluster {worst} keeps {kept[worst]} documents of {pool[worst]}")
    figure, (left, right) = canvas(title, 2, (7.4, 3.7))
    filled = pool > 0
    quality, typicality, pool, kept = (values[filled] for values in (quality, typicality, pool, kept))
    if not pool.size:
        say(right, "")
        return nothing(figure, left, "no clusters")
    side = int(np.clip(round(np.sqrt(pool.size / 2)), 1, _CELLS))
    column, columns = _by_rank(quality, side)
    row, rows = _by_rank(typicality, side)
    cells = np.zeros((2, side, side))
    np.add.at(cells[0], (row, column), pool)
    np.add.at(cells[1], (row, column), kept)
    with np.errstate(invalid="ignore"):
        share = 100 * np.where(cells[0] > 0, cells[1] / cells[0], np.nan)
    holds = np.where(cells[0] > 0, 100 * cells[0] / cells[0].sum(), np.nan)
    for axes, values, name in (
        (left, holds, f"before: share of {documents(int(pool.sum()))}"),
        (right, share, f"after: share kept ({100 * kept.sum() / pool.sum():.1f} % in all)"),
    ):
        top = float(np.nanmax(values)) or 1.0
        axes.imshow(values, cmap="cividis", vmin=0, vmax=top, origin="lower", aspect="auto")
        axes.grid(False)
        for (i, j), value in np.ndenumerate(values):
            if np.isfinite(value):
                # cividis is dark below
                colour = "white" if value < 0.55 * top else "black"
                text = f"{value:.0f}" if value >= 9.95 or not value else f"{value:.1f}"
                axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=SMALL)
        axes.set_title(f"{name}, %", fontsize=SMALL, loc="left")
        axes.set_xticks(range(side), [f"{value:.1f}" for value in columns])
        axes.set_yticks(range(side), [f"{value:.2f}" for value in rows])
        axes.set_xlabel("mean quality of the clusters")
    left.set_ylabel("cosine with the pool's mean")
    return png(figure)


def _by_rank(values: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """(the bin of each value, bins of equal numbers; the median of each bin). Equal values share a bin."""
    order = np.sort(values)
    edges = order[[int(k * len(order) / side) for k in range(1, side)]]
    bins = np.searchsorted(edges, values, side="right")
    medians = [np.median(values[bins == b]) if (bins == b).any() else np.nan for b in range(side)]
    return bins, np.array(medians)


def selections_map_figure(places: np.ndarray | None, masks: Mapping[str, np.ndarray], title: str) -> bytes:
    """A map of documents (t-SNE), once for each mask: what the mask holds in colour, the rest in grey.

    places: float64[n, 2], or None where there are too few documents for a map; masks: {name: bool[n]}, at most four.
    """
    if places is None:
        figure, (axes,) = canvas(title)
        return nothing(figure, axes, "too few documents for a map")
    figure, panels = canvas(title, 4, (7.2, 6.4), rows=2)
    every = len(places)
    for i, (axes, (name, mask)) in enumerate(zip(panels, masks.items(), strict=False)):
        axes.grid(False)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[["left", "bottom"]].set_color("#CCCCCC")
        rest, size = ~mask, max(3.0, min(14.0, 5000 / every))
        axes.scatter(places[rest, 0], places[rest, 1], s=0.6 * size, color="#D4D4D4", lw=0)
        colour = "#5A5A5A" if mask.all() else COLOURS[(i - 1) % len(COLOURS)]
        axes.scatter(places[mask, 0], places[mask, 1], s=size, color=colour, lw=0)
        axes.set_title(f"{name}: {documents(int(mask.sum()))}", fontsize=9.5, loc="left")
    for axes in panels[len(masks) :]:
        say(axes, "")
    return png(figure)


def lengths_figure(edges: np.ndarray, counts: Mapping[str, Sequence[int]], title: str) -> bytes:
    """Left: share of documents by their number of tokens, a line for each group; right: share of tokens.

    edges: float64[b + 1] of the bins; counts: {group: b documents}. The share of tokens takes a bin's geometric middle.
    """
    figure, (left, right) = canvas(title, 2, (7.4, 3.6))
    filled = {name: np.asarray(group, dtype=float) for name, group in counts.items() if sum(group)}
    if not filled:
        say(right, "")
        return nothing(figure, left, "the source tells no token counts")
    together = np.sum(list(filled.values()), axis=0)
    first, last = (int(k) for k in np.flatnonzero(together)[[0, -1]])
    middle = np.sqrt(edges[:-1] * edges[1:])
    for i, (name, group) in enumerate(filled.items()):
        style = {"color": (GREY, *COLOURS[1::-1])[i % 3], "ls": DASHES[(2, 1, 0)[i % 3]], "lw": 1.8}
        for axes, weights in ((left, group), (right, group * middle)):
            shares = 100 * weights / weights.sum()
            at = slice(max(0, first - 1), last + 2)
            axes.step(edges[:-1][at], shares[at], where="post", label=name, **style)
    for axes, what in ((left, "documents"), (right, "tokens")):
        _log_axis(axes)
        percent_axis(axes)
        axes.set_xlabel("tokens in the document")
        axes.set_title(f"share of {what}", fontsize=SMALL, loc="left")
    legend_below(figure, left)
    return png(figure)


def _log_axis(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: human(x)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def hosts_figure(rows: Sequence[Mapping[str, Any]], title: str) -> bytes:
    """The hosts with the most documents: the share of all documents that each has, before and after.

    A row has `host`, `before` and `after` (shares of 1), the largest host first.
    """
    figure, (axes,) = canvas(title, size=(6.4, 1.6 + 0.24 * max(4, len(rows))))
    if not rows:
        return nothing(figure, axes, "the source tells no hosts")
    y = -np.arange(len(rows))
    before, after = (100 * np.array([row[key] for row in rows], dtype=float) for key in ("before", "after"))
    axes.hlines(y, before, after, color="#BBBBBB", lw=2, zorder=1)
    axes.plot(before, y, ls="none", marker="o", color=GREY, markersize=6, label="before: of the scored documents")
    axes.plot(after, y, ls="none", marker="D", color=COLOURS[0], markersize=5.5, label="after: of what is kept")
    axes.set_yticks(y, [_shortened(row["host"] or "(no host)") for row in rows])
    for label in axes.get_yticklabels():
        # a dollar sign would start a formula
        label.set_parse_math(False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g} %"))
    # room for the markers at 0
    axes.set_xlim(left=-0.02 * max(before.max(), after.max()))
    axes.set_ylim(0.6 - len(rows), 0.6)
    axes.set_xlabel("share of documents")
    legend_below(figure, axes)
    return png(figure)


def _shortened(host: str) -> str:
    # the font has not every letter that a host may have
    text = host.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= _HOST_CHARACTERS else f"…{text[-_HOST_CHARACTERS + 1 :]}"


def overlap_figure(names: Sequence[str], shares: np.ndarray, title: str) -> bytes:
    """How much of each mask (row) another one (column) chose too; shares: float64[m, m] of 1, NaN for empty masks."""
    many = len(names) > 7
    figure, (axes,) = canvas(title, size=(7.2 if many else 6.4, 1.9 + 0.42 * len(names)))
    if not np.isfinite(shares).any():
        return nothing(figure, axes, "no mask holds a document")
    axes.imshow(shares, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    axes.grid(False)
    for (i, j), share in np.ndenumerate(shares):
        if np.isfinite(share):
            colour = "white" if share < 0.55 else "black"
            text = f"{100 * share:.0f}" if many else f"{100 * share:.0f} %"
            axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=SMALL if many else None)
    # a slanted name ends below its column
    slant = {"rotation": 20, "ha": "right", "rotation_mode": "anchor"} if len(names) > 4 else {}
    axes.set_xticks(range(len(names)), names, fontsize=SMALL, **{"rotation": 90} if many else slant)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylabel("of the documents of")
    axes.set_xlabel("this share, in %, is in" if many else "this share is in")
    return png(figure)
