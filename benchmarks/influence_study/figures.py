"""The study's figures. Here: numbers to pictures. Not here: the numbers, and the page around them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from benchmarks.influence_study.claims import Estimate
from dagster_datamask.reporting.canvas import BOUND, COLOURS, DASHES, GREY, MARKERS, SMALL, canvas, legend_below, png
from dagster_datamask.reporting.tables import human

Found = Mapping[str, Mapping[str, Estimate]]


def intervals(found: Found, rows: Sequence[tuple[str, str]], title: str, label: str) -> bytes:
    """Each row (key, name) as a value with its interval, one mark a place; the line is 0."""
    figure, (axes,) = canvas(title, size=(6.4, 1.3 + 0.42 * len(rows)))
    offsets = np.linspace(0.22, -0.22, len(found))
    for (place, estimates), colour, marker, offset in zip(found.items(), COLOURS, MARKERS, offsets, strict=False):
        at = [k for k, (key, _) in enumerate(rows) if key in estimates]
        values = [estimates[rows[k][0]] for k in at]
        y = np.array([len(rows) - 1 - k for k in at]) + offset
        axes.hlines(y, [v.low for v in values], [v.high for v in values], color=colour, lw=1.6)
        axes.plot([v.value for v in values], y, marker, color=colour, markersize=5, label=place)
    axes.axvline(0, color=BOUND, lw=1)
    axes.set_yticks(range(len(rows)), [name for _, name in reversed(rows)])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel(label)
    legend_below(figure, axes)
    return png(figure)


def counts(found: Found, numbers: Mapping[str, Sequence[int]], title: str) -> bytes:
    """ρ against the number of trajectories, a panel a place, relational and individual."""
    places = [place for place in found if numbers.get(place)]
    figure, panels = canvas(title, len(places), size=(6.4 if len(places) < 2 else 7.2, 3.4))
    for axes, place in zip(panels, places, strict=True):
        for name, prefix, colour, marker in (
            ("relational", "count/", COLOURS[0], MARKERS[0]),
            ("individual", "count/individual ", COLOURS[1], MARKERS[1]),
        ):
            x = list(numbers[place])
            y = [found[place][f"{prefix}{count}"] for count in x]
            axes.fill_between(x, [v.low for v in y], [v.high for v in y], color=colour, alpha=0.15, lw=0)
            axes.plot(x, [v.value for v in y], marker=marker, color=colour, markersize=4, label=name)
        axes.set_xscale("log")
        axes.set_xticks(x, [human(count) for count in x])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_title(place, fontsize=SMALL, loc="left")
        axes.set_xlabel("random trajectories")
        axes.set_ylabel("pooled ρ")
    legend_below(figure, panels[0])
    return png(figure)


def overlaps(found: Found, sizes: Mapping[str, int], title: str) -> bytes:
    """Overlap of individual and group selection against n, and what chance would share."""
    figure, (axes,) = canvas(title)
    largest = 1
    for (place, estimates), colour, marker, dash in zip(found.items(), COLOURS, MARKERS, DASHES, strict=False):
        x = sorted(int(key.removeprefix("overlap/")) for key in estimates if key.removeprefix("overlap/").isdigit())
        y = [estimates[f"overlap/{n}"] for n in x]
        largest = max(largest, *x)
        if y[0].units > 1:
            axes.fill_between(x, [v.low for v in y], [v.high for v in y], color=colour, alpha=0.15, lw=0)
        axes.plot(x, [v.value for v in y], color=colour, marker=marker, ls=dash, markersize=4, label=place)
    for size, dash in zip(sorted(set(sizes.values())), ("-.", ":"), strict=False):
        axes.plot([1, largest], [1 / size, largest / size], color=GREY, ls=dash, label=f"chance, n/{size}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:g}"))
    axes.set_ylim(-0.03, 1.05)
    axes.set_xlabel("documents selected, n")
    axes.set_ylabel("share in common")
    legend_below(figure, axes)
    return png(figure)


def paths(results: Sequence[Mapping[str, Any]], title: str) -> bytes:
    """Of every subject the sum of true increments of each choice out of one pool, a column a subject."""
    figure, (axes,) = canvas(title, size=(7.2, 3.6))
    kinds = ("brute force", "oracle individual", "relational", "individual", "random")
    names = ("brute force", "lowest true single influences", "relational greedy", "individual model", "random")
    for kind, name, colour, marker in zip(kinds, names, COLOURS, MARKERS, strict=False):
        values = []
        for result in results:
            part = result["chosen"]
            values.append(part["forced"][0][kind] if kind in part["forced"][0] else part["sums"][kind][0])
        axes.plot(range(len(results)), values, marker, color=colour, markersize=6, alpha=0.85, label=name)
    axes.axhline(0, color=BOUND, lw=1)
    axes.set_xticks(
        range(len(results)),
        [r["name"].removeprefix("web pages, ").replace(", ", "\n").replace("-", "-\n") for r in results],
        fontsize=6.5,
    )
    axes.set_ylabel("change of the reference loss")
    legend_below(figure, axes)
    return png(figure)


def losses(results: Sequence[Mapping[str, Any]], arms: Sequence[tuple[str, str]], title: str) -> bytes:
    """Held-out loss of every way to select, (key, name), minus that of random ones: a mark a run, a bar their mean, a
    panel a place."""
    places = list(dict.fromkeys(result["place"] for result in results))
    figure, panels = canvas(title, len(places), size=(7.6, 3.4))
    at = {key: len(arms) - 1 - k for k, (key, _) in enumerate(arms)}
    for axes, place in zip(panels, places, strict=True):
        runs = [result["continued"]["losses"] for result in results if result["place"] == place]
        random = np.array(
            [np.mean([v["loss"] for name, v in run.items() if name.startswith("random ")]) for run in runs]
        )
        for (key, y), colour in zip(at.items(), COLOURS, strict=True):
            if key not in runs[0]:
                axes.text(0, y, " none is known", va="center", fontsize=6.5, color=GREY)
                continue
            values = np.array([run[key]["loss"] for run in runs]) - random
            axes.barh(y, values.mean(), 0.6, color=colour, alpha=0.5)
            axes.plot(values, np.full(values.size, y), "|", color=BOUND, markersize=9)
        axes.axvline(0, color=BOUND, lw=1)
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.set_yticks(list(at.values()), [name for _, name in arms] if axes is panels[0] else [])
        axes.set_ylim(-0.6, len(arms) - 0.4)
        axes.set_title(place, fontsize=SMALL, loc="left")
    panels[len(panels) // 2].set_xlabel("held-out loss − that of random selections")
    return png(figure)


def speeds(runs: Sequence[Mapping[str, Any]], title: str) -> bytes:
    """Seconds of the picks against the number of clusters, a line a size of the pool, and a line of slope −1."""
    figure, (axes,) = canvas(title)
    for run, colour, marker in zip(runs, COLOURS, MARKERS, strict=False):
        axes.plot(run["clusters"], run["seconds"], marker=marker, color=colour, label=f"{run['documents']:,} documents")
        x = np.array([1, max(run["clusters"])])
        axes.plot(x, run["full"] / x, color=colour, ls=":", lw=1)
    axes.plot([], [], color=GREY, ls=":", lw=1, label="without clusters (extrapolated), divided by d")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda v, _: human(v)))
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("clusters, d")
    axes.set_ylabel("seconds of the picks")
    legend_below(figure, axes)
    return png(figure)


def drifts(results: Sequence[Mapping[str, Any]], title: str) -> bytes:
    """Influence of the same documents at two checkpoints, a panel each of up to three subjects."""
    shown = results[:3]
    figure, panels = canvas(title, len(shown), size=(7.2, 3.0))
    for axes, result in zip(panels, shown, strict=True):
        x, y = (np.array(result["drift"][name], np.float64) for name in ("first", "later"))
        axes.plot(x, y, ".", color=COLOURS[0], markersize=3, alpha=0.6)
        axes.set_title(result["name"], fontsize=SMALL, loc="left")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(4))
        axes.tick_params(labelsize=6.5)
    panels[0].set_ylabel("at the later checkpoint")
    panels[len(shown) // 2].set_xlabel("influence at the first checkpoint")
    return png(figure)
