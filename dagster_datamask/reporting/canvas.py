"""What every figure of the project shares: palette, sizes, an empty figure, and PNG bytes.

Here: drawing without a subject. Not here: the figures themselves (`figures` draws solvers, models and scores,
`selections` what a mask does to a pool).
"""

import io
import textwrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from PIL import Image

from dagster_datamask.reporting.tables import human

# Okabe and Ito's palette, told apart with every common colour blindness; markers and dashes repeat the difference.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1)), (0, (1, 1)), (0, (4, 1, 1, 1)))
BOUND = "#000000"
GREY = "#8C8C8C"
DPI = 100
SMALL = 8.5
_SHADES = 64


def canvas(
    title: str, panels: int = 1, size: tuple[float, float] | None = None, rows: int = 1
) -> tuple[Figure, list[Axes]]:
    """A figure with `panels` axes in `rows` rows and its title on the left; `size` in inches."""
    figure = Figure(figsize=size or (7.2 if panels == 2 else 6.4, 3.4), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(rows, -(-panels // rows), i + 1) for i in range(panels)]
    figure.suptitle(textwrap.fill(title, 80 if panels == 1 else 92), x=0.01, ha="left", fontsize=10.5)
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="#E3E3E3")
        panel.set_axisbelow(True)
        panel.tick_params(labelsize=SMALL)
    return figure, axes


def png(figure: Figure) -> bytes:
    """The figure as a PNG of few colours without dates or versions: small, and equal figures give equal bytes."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    # an event of Dagster's log, which is never pruned, carries every figure: a palette makes them a third
    image = Image.open(drawn).convert("RGB").quantize(_SHADES, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    image.save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def say(axes: Axes, message: str) -> None:
    """A message in place of a panel."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, message, transform=axes.transAxes, ha="center", va="center", color=GREY, wrap=True)


def nothing(figure: Figure, axes: Axes, message: str) -> bytes:
    """The figure of a pool that has nothing to draw: a strip that says so."""
    figure.set_size_inches(6.4, 1.2)
    say(axes, message)
    return png(figure)


def legend_below(figure: Figure, axes: Axes) -> None:
    """The legend under the figure, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=SMALL)


def documents(n: int) -> str:
    """A number of documents in words."""
    return f"{human(n)} document{'' if n == 1 else 's'}"


def percent_axis(axes: Axes) -> None:
    """Ticks of the y axis in per cent."""
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g} %"))
