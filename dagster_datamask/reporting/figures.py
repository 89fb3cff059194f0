"""Figures of solvers, models and scores, drawn with Matplotlib's object interface and returned as PNG bytes.

Here: numbers to pictures. Equal numbers give equal bytes (no date, no software version in the file, the font that
Matplotlib ships), no global state is touched, and a figure stays under 60 kB so that a Dagster event that carries it in
base64 stays small. Not here: computing the numbers, embedding the pictures (`tables`, `html`), and what a mask does to
a pool (`selections`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from dagster_datamask.reporting.canvas import (
    BOUND,
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

# Share of FineWeb's documents at each integer quality 0..15: DataMask (arXiv 2512.24265), Table 7.
PAPER_TABLE_7 = (0.03, 0.09, 0.17, 0.24, 0.23, 0.14, 0.06, 0.03, 0.01, 0.002, 0.0003, 0.00003, 0.0, 0.0, 0.0, 0.0)

_MAX_POINTS = 400

Point = Mapping[str, Any]


def trajectory_figure(
    trajectories: Mapping[str, Sequence[Point]],
    upper_bound: float | None = None,
    baseline: float | None = None,
    title: str = "Objective during optimisation",
    what: str = "objective (higher is better)",
) -> bytes:
    """The objective's value against the step (or pass), one line per solver, with the bound and the uniform mask.

    A point is a mapping with `step` and `value`, and where the solver has one, `bound` (drawn dotted in the solver's
    colour). Where it has `mask_value` that is drawn instead: the policy gradient's `value` is of masks on a batch,
    which no bound for the whole pool applies to. `upper_bound` is the certificate: no mask of the budget lies above
    it. `baseline` is the expected value of a uniform mask of the same size. More than 50 steps go on a log axis.
    `what` is drawn, where it is another value than the objective's.
    Raises ValueError naming the solver and the step where a value is missing or not finite.
    """
    figure, (axes,) = canvas(title)
    values: list[float] = [v for v in (upper_bound, baseline) if v is not None]
    all_steps: list[float] = []
    for i, (solver, points) in enumerate(trajectories.items()):
        steps, solver_values, bounds = _points(solver, points)
        all_steps += steps
        values += solver_values
        colour = COLOURS[i % len(COLOURS)]
        marker = MARKERS[i % len(MARKERS)] if len(steps) <= 30 else None
        axes.plot(steps, solver_values, color=colour, marker=marker, markersize=4, label=solver, lw=1.5)
        seen = [(s, b) for s, b in zip(steps, bounds, strict=True) if b is not None]
        if seen:
            bound_steps, bound_values = zip(*seen, strict=True)
            # The first bounds may lie far above everything else: they may leave the picture.
            if upper_bound is None:
                values.append(min(bound_values))
            axes.plot(bound_steps, bound_values, color=colour, ls=":", lw=1.2, label=f"{solver}: bound so far")
    if not all_steps:
        return nothing(figure, axes, "no optimisation step was recorded")
    if upper_bound is not None:
        axes.axhline(upper_bound, color=BOUND, ls="--", lw=1.2, label=f"upper bound {upper_bound:.6g}")
    if baseline is not None:
        axes.axhline(baseline, color=GREY, ls="-.", lw=1.2, label=f"uniform mask {baseline:.6g}")
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.05
    axes.set_ylim(low - margin, high + margin)
    first, last = min(all_steps), max(all_steps)
    if last > 50 and first < last:
        if first > 0:
            axes.set_xscale("log")
            axes.set_xlim(first * 0.9, last * 1.1)
        else:
            axes.set_xscale("symlog", linthresh=1.0)
            axes.set_xlim(first, last * 1.1)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: human(x)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        side = 0.03 * (last - first) or 0.5
        axes.set_xlim(first - side, last + side)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("step or pass")
    axes.set_ylabel(what)
    legend_below(figure, axes)
    return png(figure)


def quality_histogram(
    counts: Sequence[int], title: str = "Quality of the documents", beside_paper: bool = True
) -> bytes:
    """Share of documents at each integer quality 0..15, beside FineWeb's (the paper's Table 7) where quality is the
    paper's sum.

    `counts` holds one number of documents per score, 16 of them at most; missing ones are 0. Shares below 1 % carry
    their number, since their bars cannot be seen. Raises ValueError for a negative count or more than 16.
    """
    ours = _sixteen(counts)
    figure, (axes,) = canvas(title)
    total = int(ours.sum())
    if total == 0:
        return nothing(figure, axes, "no document has a quality score")
    x = np.arange(16)
    paper = np.array(PAPER_TABLE_7)
    bars = [
        (-0.2, ours / total, COLOURS[0], None, f"this pool, {documents(total)}"),
        (0.2, paper / paper.sum(), COLOURS[4], "///", "FineWeb (DataMask paper, Table 7)"),
    ]
    for offset, shares, colour, hatch, label in bars if beside_paper else bars[:1]:
        mean = float((x * shares).sum())
        label = f"{label}: mean {mean:.2f}"
        axes.bar(x + offset, 100 * shares, 0.4, color=colour, hatch=hatch, edgecolor="white", lw=0.5, label=label)
        for score, share in enumerate(100 * shares):
            if 0 < share < 1:
                axes.annotate(
                    f"{share:.1g}",
                    (score + offset, share),
                    xytext=(0, 2),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    rotation=90,
                    fontsize=6.5,
                )
    percent_axis(axes)
    axes.set_xticks(x)
    axes.set_xlabel("quality, rounded (DCLM + Edu + Wiki, 0 to 15)" if beside_paper else "quality, rounded")
    axes.set_ylabel("share of documents")
    legend_below(figure, axes)
    return png(figure)


def quality_diversity_figure(
    pool_counts: Sequence[int],
    kept_counts: Sequence[int],
    cluster_pool: Sequence[int],
    cluster_kept: Sequence[int],
    title: str = "What the mask keeps",
) -> bytes:
    """Left: quality of the pool and of the kept documents, as shares per integer score. Right: the kept share of each
    cluster against the cluster's size; the dashed line is the share kept of the whole pool, where a uniform mask lies.

    `cluster_pool[c]` and `cluster_kept[c]` are the documents of cluster c in the pool and in the mask. Raises
    ValueError where the two differ in length or a cluster keeps more than it has.
    """
    pool, kept = _sixteen(pool_counts), _sixteen(kept_counts)
    sizes, chosen = np.asarray(cluster_pool, dtype=np.int64), np.asarray(cluster_kept, dtype=np.int64)
    if sizes.shape != chosen.shape:
        raise ValueError(f"{len(sizes)} clusters in the pool but {len(chosen)} in the mask")
    if (chosen > sizes).any():
        worst = int(np.flatnonzero(chosen > sizes)[0])
        raise ValueError(f"cluster {worst} keeps {chosen[worst]} documents of {sizes[worst]}")
    figure, (left, right) = canvas(title, 2)
    if pool.sum() == 0:
        say(left, "no document has a quality score")
    else:
        x = np.arange(16)
        axes_shares = 100 * pool / pool.sum()
        left.bar(x, axes_shares, 0.85, color="#C9C9C9", label=f"pool, {documents(int(pool.sum()))}")
        if kept.sum():
            kept_shares = 100 * kept / kept.sum()
            left.step(
                np.append(x, 16) - 0.5,
                np.append(kept_shares, kept_shares[-1]),
                where="post",
                color=COLOURS[0],
                lw=1.8,
                label=f"kept, {documents(int(kept.sum()))}",
            )
        percent_axis(left)
        left.set_xticks(x[::3])
        left.set_xlabel("quality, rounded")
        left.set_ylabel("share of documents")
        left.legend(loc="upper right", frameon=False, fontsize=SMALL)
        left.set_ylim(0, left.get_ylim()[1] * 1.25)
    filled = sizes > 0
    if not filled.any():
        say(right, "no clusters")
    else:
        share = 100 * chosen[filled] / sizes[filled]
        overall = 100 * chosen.sum() / sizes.sum()
        right.scatter(
            sizes[filled],
            share,
            s=max(4.0, min(30.0, 3000 / filled.sum())),
            color=COLOURS[1],
            alpha=0.6,
            lw=0,
            rasterized=True,
        )
        right.axhline(overall, color=BOUND, ls="--", lw=1.2, label=f"whole pool {overall:.1f} %")
        right.set_ylim(-3, max(share.max(), overall) * 1.2 + 3)
        _size_axis(right, sizes[filled])
        percent_axis(right)
        right.set_xlabel("documents in the cluster")
        right.set_ylabel("share kept")
        right.legend(loc="upper right", frameon=False, fontsize=SMALL)
    return png(figure)


def calibration_figure(
    bins: Sequence[Mapping[str, Any]],
    confusion: Sequence[Sequence[int]],
    labels: Sequence[str] = ("negative", "positive"),
    title: str = "Classifier on held-out documents (demo model)",
) -> bytes:
    """Left: reliability, the mean label against the mean prediction, one point per bin, its area the bin's documents;
    the diagonal is perfect calibration. Right: the confusion matrix with its shares of each row (the true label).

    A bin has `lower`, `upper`, `n`, `mean_predicted`, `mean_observed`, as a training report's calibration does; the
    axes run from 0 to the largest `upper` (1 for a probability, 5 for an educational value). Bins with `n` 0 are not
    drawn. Raises ValueError where `confusion` is not square with one row per label.
    """
    matrix = np.asarray(confusion, dtype=np.int64)
    if matrix.shape != (len(labels), len(labels)):
        raise ValueError(f"a confusion matrix for {len(labels)} labels has shape {matrix.shape}")
    figure, (left, right) = canvas(title, 2)
    top = max((float(b["upper"]) for b in bins), default=1.0)
    filled = [b for b in bins if b["n"] > 0]
    if filled:
        predicted, observed = [b["mean_predicted"] for b in filled], [b["mean_observed"] for b in filled]
        most = max(b["n"] for b in filled)
        left.plot([0, top], [0, top], color=GREY, ls="--", lw=1, label="perfect calibration")
        left.plot(predicted, observed, color=COLOURS[0], lw=1.2, label="model")
        left.scatter(predicted, observed, s=[10 + 60 * b["n"] / most for b in filled], color=COLOURS[0], zorder=3)
        left.legend(loc="upper left", frameon=False, fontsize=SMALL)
    else:
        say(left, "no held-out document")
    left.set_xlim(-0.04 * top, 1.04 * top)
    left.set_ylim(-0.04 * top, 1.04 * top)
    left.set_xlabel("mean prediction (area: documents)")
    left.set_ylabel("mean label")
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    right.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    right.grid(False)
    for (i, j), n in np.ndenumerate(matrix):
        right.text(
            j,
            i,
            f"{human(int(n))}\n{100 * shares[i, j]:.0f} %",
            ha="center",
            va="center",
            color="white" if shares[i, j] > 0.6 else "black",
        )
    right.set_xticks(range(len(labels)), labels)
    right.set_yticks(range(len(labels)), labels)
    right.set_xlabel("predicted")
    right.set_ylabel("true")
    return png(figure)


def cluster_sizes_figure(sizes: Sequence[int], title: str = "Cluster sizes") -> bytes:
    """Cluster sizes from the largest to the smallest, with the mean; empty clusters are counted below.

    Raises ValueError for a negative size.
    """
    counts = np.sort(np.asarray(sizes, dtype=np.int64))[::-1]
    if (counts < 0).any():
        raise ValueError(f"a cluster has a negative size: {counts.min()}")
    figure, (axes,) = canvas(title)
    filled = counts[counts > 0]
    if len(filled) == 0:
        return nothing(figure, axes, "no clusters")
    rank = np.arange(1, len(filled) + 1)
    mean = float(filled.mean())
    if len(filled) <= 60:
        axes.bar(rank, filled, 0.85, color=COLOURS[0])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_xlim(0.4, len(filled) + 0.6)
    else:
        axes.plot(rank, filled, color=COLOURS[0], lw=1.8)
        axes.set_xscale("log")
        axes.set_xlim(0.9, len(filled) * 1.1)
    if len(filled) > 60 and filled[0] > 50 * filled[-1]:
        axes.set_yscale("log")
        axes.set_ylim(filled[-1] * 0.7, filled[0] * 1.5)
    else:
        axes.set_ylim(0, filled[0] * 1.15)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda v, _: human(v)))
        axis.set_minor_formatter(NullFormatter())
    axes.axhline(
        mean,
        color=BOUND,
        ls="--",
        lw=1.2,
        label=f"mean {human(mean)}; largest {human(int(filled[0]))}, smallest {human(int(filled[-1]))}",
    )
    axes.set_xlabel(
        f"cluster, largest first ({human(len(filled))} with documents, {human(len(counts) - len(filled))} empty)"
    )
    axes.set_ylabel("documents")
    legend_below(figure, axes)
    return png(figure)


def front_figure(
    rows: Sequence[Mapping[str, Any]],
    uniform: Mapping[str, float] | None = None,
    title: str = "Quality against diversity: certified masks, and what no mask can reach",
) -> bytes:
    """The masks of a sweep over λ in the plane of quality and diversity, and the region proven to hold no mask.

    rows: ascending in `lambda`, with `quality`, `diversity` and `upper_bound`, the proven bound of λ·quality +
    (1−λ)·diversity (None where there is no certificate); each bound is a line that no mask lies above. `uniform` is
    the (quality, diversity) expected of a uniform mask. Rows without a quality (empty masks) are left out. Raises
    ValueError where a row lies in the shaded region: its bound would be wrong.
    """
    figure, (axes,) = canvas(title)
    rows = [row for row in rows if row["quality"] is not None]
    if not rows:
        return nothing(figure, axes, "the masks are empty")
    lambdas, quality, diversity = (
        np.array([float(row[key]) for row in rows]) for key in ("lambda", "quality", "diversity")
    )
    bounds = [(row["lambda"], float(row["upper_bound"])) for row in rows if row["upper_bound"] is not None]
    for lam, bound in bounds:
        above = np.flatnonzero(lam * quality + (1 - lam) * diversity > bound)
        if above.size:
            raise ValueError(f"the mask of λ = {lambdas[above[0]]:g} lies above the bound of λ = {lam:g}")
    shown = [(quality, diversity), *([([uniform["quality"]], [uniform["diversity"]])] if uniform else [])]
    # room above and to the right for what cannot be
    (left, right), (low, high) = (_view(np.concatenate([part[k] for part in shown]), 0.14, 0.2) for k in (0, 1))
    if bounds:
        _shade(axes, bounds, np.linspace(left, right, 1001), low, high)
    axes.plot(quality, diversity, color=COLOURS[0], marker="o", markersize=4, lw=1.5, label="masks found, one per λ")
    label: dict[str, Any] = {"xytext": (-6, -5), "textcoords": "offset points", "ha": "right", "va": "top"}
    for i in _apart((quality - left) / (right - left), (diversity - low) / (high - low)):
        axes.annotate(f"λ = {lambdas[i]:g}", (quality[i], diversity[i]), **label, fontsize=SMALL)
    if uniform is not None:
        point = (uniform["quality"], uniform["diversity"])
        axes.plot(*point, color=COLOURS[1], marker="X", markersize=8, ls="none", label="uniform mask, expected")
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)
    axes.set_xlabel("quality (mean of the scaled scores)")
    axes.set_ylabel("diversity (higher is better)")
    legend_below(figure, axes)
    return png(figure)


def _shade(axes: Axes, bounds: Sequence[tuple[float, float]], x: np.ndarray, low: float, high: float) -> None:
    """Shade what lies above any of the lines λ·x + (1−λ)·y = bound, within a view from `low` to `high`."""
    ends = np.array([bound for lam, bound in bounds if lam == 1])
    # two points where the best quality ends, so that the ceiling falls straight down there
    x = np.sort(np.concatenate([x, ends, np.nextafter(ends, np.inf)]))
    ceiling = np.full(x.shape, np.inf)
    for lam, bound in bounds:
        if lam < 1:
            ceiling = np.minimum(ceiling, (bound - lam * x) / (1 - lam))
        else:
            ceiling[x > bound] = -np.inf
    edge = np.clip(ceiling, 2 * low - high, high)
    axes.fill_between(x, edge, high, facecolor="#EDEDED", edgecolor="#BDBDBD", hatch="////", lw=0)
    axes.plot(x, edge, color=BOUND, ls="--", lw=1.2, label="ceiling of all bounds: no mask is beyond it")
    box = {"facecolor": "white", "edgecolor": "none", "pad": 2}
    axes.text(0.985, 0.96, "no mask can be here", transform=axes.transAxes, ha="right", va="top", bbox=box)


def setting_figure(name: str, rows: Sequence[Mapping[str, float]], cost: str, upper_bound: float, title: str) -> bytes:
    """What a solver reaches at each value of one setting, and what that costs.

    rows: `setting`, `value` (of the mask it ends with) and `cost`, ascending; `cost` says what is counted. Left: the
    values below the certified bound; right: the costs. Both against the setting on a log axis.
    """
    figure, (left, right) = canvas(title, 2)
    if not rows:
        say(right, "")
        return nothing(figure, left, "nothing was measured")
    settings, values, costs = ([row[key] for row in rows] for key in ("setting", "value", "cost"))
    left.plot(settings, values, color=COLOURS[0], marker="o", lw=1.5, label="mask reached")
    left.axhline(upper_bound, color=BOUND, ls="--", lw=1.2, label=f"certified bound {upper_bound:.5g}")
    left.set_ylim(*_view(np.array([*values, upper_bound])))
    left.set_ylabel("objective (higher is better)")
    right.plot(settings, costs, color=COLOURS[1], marker="s", lw=1.5)
    right.set_ylim(0, 1.15 * max(costs) or 1.0)
    right.set_ylabel(cost)
    right.yaxis.set_major_formatter(FuncFormatter(lambda y, _: human(y)))
    for panel in (left, right):
        panel.set_xscale("log", base=2)
        panel.minorticks_off()
        panel.set_xticks(settings, [f"{setting:g}" for setting in settings])
        panel.set_xlabel(name)
    legend_below(figure, left)
    return png(figure)


def metrics_figure(runs: Mapping[str, Sequence[Point]], bounds: Mapping[str, float], title: str) -> bytes:
    """Two metrics of the masks of several runs against the step, one panel each.

    `bounds` names the two, and holds the certified bound of each: no mask has more of it. A point has `step` and both
    metrics. Metrics with one bound share their axis.
    """
    figure, panels = canvas(title, 2)
    if not any(runs.values()):
        say(panels[1], "")
        return nothing(figure, panels[0], "no optimisation step was recorded")
    if len(set(bounds.values())) == 1:
        panels[1].sharey(panels[0])
    for panel, (metric, bound) in zip(panels, bounds.items(), strict=True):
        for i, (run, points) in enumerate(runs.items()):
            panel.plot(
                [point["step"] for point in points],
                [point[metric] for point in points],
                color=COLOURS[i % len(COLOURS)],
                marker=MARKERS[i % len(MARKERS)],
                markersize=4,
                lw=1.5,
                label=run,
            )
        panel.axhline(bound, color=BOUND, ls="--", lw=1.2, label="certified bound")
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: human(x)))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_xlabel("step")
        panel.set_ylabel(metric)
    legend_below(figure, panels[0])
    return png(figure)


def spread_figure(groups: Mapping[str, Mapping[str, Sequence[Point]]], title: str) -> bytes:
    """How far runs lie apart: one panel for each of two groups of runs, the share of the achievable gain against the
    step.

    A point has `step` and `share`: (value − uniform)/(certified bound − uniform), which no mask has above 1, so that
    runs on different pools compare. Each panel tells how far its runs lie apart at the end.
    """
    figure, panels = canvas(title, 2)
    panels[1].sharey(panels[0])
    for panel, (group, runs) in zip(panels, groups.items(), strict=True):
        if not any(runs.values()):
            say(panel, "no optimisation step was recorded")
            continue
        for i, (run, points) in enumerate(runs.items()):
            panel.plot(
                [point["step"] for point in points],
                [point["share"] for point in points],
                color=COLOURS[i % len(COLOURS)],
                ls=DASHES[i % len(DASHES)],
                lw=1.5,
                label=run,
            )
        last = [points[-1]["share"] for points in runs.values() if points]
        panel.axhline(1.0, color=BOUND, ls="--", lw=1.2, label="certified bound")
        panel.set_title(f"{group}; at the end {100 * (max(last) - min(last)):.2f} % apart", fontsize=SMALL)
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: human(x)))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_xlabel("step")
        panel.legend(loc="lower right", frameon=False, fontsize=SMALL)
    panels[0].set_ylabel("share of the achievable gain")
    panels[1].tick_params(labelleft=False)
    return png(figure)


def _view(values: np.ndarray, below: float = 0.08, above: float = 0.08) -> tuple[float, float]:
    """An axis's limits with room on both sides of the values, as shares of their range."""
    low, high = float(values.min()), float(values.max())
    spread = high - low or abs(high) or 1.0
    return low - below * spread, high + above * spread


def _apart(x: np.ndarray, y: np.ndarray) -> list[int]:
    """Positions, the ends first, of points that are far enough apart for a label each; both axes from 0 to 1."""
    chosen: list[int] = []
    for i in [0, len(x) - 1, *range(1, len(x) - 1)]:
        if all(abs(x[i] - x[k]) > 0.17 or abs(y[i] - y[k]) > 0.09 for k in chosen):
            chosen.append(i)
    return chosen


def _size_axis(axes: Axes, sizes: np.ndarray) -> None:
    if sizes.max() > 20 * sizes.min():
        axes.set_xscale("log")
    else:
        axes.set_xlim(sizes.min() - 0.6, sizes.max() + 0.6)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: human(x)))


def _sixteen(counts: Sequence[int]) -> np.ndarray:
    array = np.asarray(counts, dtype=np.int64)
    if array.ndim != 1 or len(array) > 16:
        raise ValueError(f"quality counts are for the 16 integer scores 0..15, not of shape {array.shape}")
    if (array < 0).any():
        raise ValueError(f"quality score {int(np.flatnonzero(array < 0)[0])} has a negative count")
    return np.pad(array, (0, 16 - len(array)))


def _points(solver: str, points: Sequence[Point]) -> tuple[list[float], list[float], list[float | None]]:
    """Steps, values and bounds; a long trajectory is thinned to points evenly spaced in log step, ends included."""
    steps: list[float] = []
    values: list[float] = []
    bounds: list[float | None] = []
    picked = list(range(len(points)))
    if len(points) > _MAX_POINTS:
        spaced = np.geomspace(1, len(points), _MAX_POINTS).round().astype(int) - 1
        picked = sorted({0, len(points) - 1, *spaced.tolist()})
    for i in picked:
        point = points[i]
        step, value, bound = float(point["step"]), point.get("mask_value", point["value"]), point.get("bound")
        if value is None or not math.isfinite(value):
            raise ValueError(f"trajectory of {solver!r}: step {step:g} has the value {value}")
        steps.append(step)
        values.append(float(value))
        bounds.append(float(bound) if bound is not None and math.isfinite(bound) else None)
    return steps, values, bounds
