"""Pictures of every shape of input: they decode, stay small, come out equal, and show what changes in the numbers."""

import io
from collections.abc import Callable

import matplotlib
import numpy as np
import pytest
from PIL import Image

from dagster_datamask.keyed import rng
from dagster_datamask.reporting.figures import (
    PAPER_TABLE_7,
    calibration_figure,
    cluster_sizes_figure,
    front_figure,
    metrics_figure,
    quality_diversity_figure,
    quality_histogram,
    setting_figure,
    spread_figure,
    trajectory_figure,
)

MAX_BYTES = 60_000


def _certified(passes: int) -> list[dict]:
    return [{"step": i + 1, "value": -0.1 / (i + 1), "bound": 0.3 / (i + 1) ** 2} for i in range(passes)]


def _gradient(entries: int, every: int = 10) -> list[dict]:
    return [{"step": every * (i + 1), "value": 5.0, "mask_value": -0.2 / (i + 1), "note": None} for i in range(entries)]


def _bins(n: int) -> list[dict]:
    return [
        {"lower": i / n, "upper": (i + 1) / n, "n": i, "mean_predicted": (i + 0.5) / n, "mean_observed": (i / n) ** 2}
        for i in range(n)
    ]


def _clusters(k: int) -> tuple[np.ndarray, np.ndarray]:
    random = rng(0, "test-figures", k)
    sizes = 1 + (100 * random.pareto(1.2, k)).astype(int)
    return sizes, random.binomial(sizes, 0.1)


def _front(n: int) -> list[dict]:
    """The front quality² + diversity² = 1 at n values of λ, whose exact bounds are its tangents."""
    lambdas = [k / (n - 1) for k in range(n)] if n > 1 else [0.5] * n
    norms = [(lam**2 + (1 - lam) ** 2) ** 0.5 for lam in lambdas]
    return [
        {"lambda": lam, "quality": lam / norm, "diversity": (1 - lam) / norm, "upper_bound": norm + 1e-12}
        for lam, norm in zip(lambdas, norms, strict=True)
    ]


def _settings(n: int) -> list[dict]:
    return [{"setting": 2.0**k, "value": -0.1 / (k + 1), "cost": 3.0 * 2**k} for k in range(n)]


def _metrics(n: int) -> list[dict]:
    return [{"step": 10 * 2**k, "quality": 1 - 1 / (k + 2), "diversity": -1 / (k + 2)} for k in range(n)]


def _shares(n: int, least: float = 0.0) -> list[dict]:
    return [{"step": k + 1, "share": least + (1 - least) * (1 - 1 / (k + 1))} for k in range(n)]


FIGURES: dict[str, Callable[[], bytes]] = {
    "trajectory, nothing": lambda: trajectory_figure({}),
    "trajectory, a solver without points": lambda: trajectory_figure({"certified": []}, 1.0, 0.0),
    "trajectory, one point": lambda: trajectory_figure({"certified": _certified(1)}, 0.01, -0.3),
    "trajectory, two points": lambda: trajectory_figure({"certified": _certified(2)}),
    "trajectory, constant": lambda: trajectory_figure({"top_k": [{"step": s, "value": 0.0} for s in (0, 1)]}),
    "trajectory, from step 0": lambda: trajectory_figure({"a": [{"step": s, "value": s} for s in range(100)]}),
    "trajectory, both": lambda: trajectory_figure(
        {"certified": _certified(20), "policy_gradient": _gradient(300)}, 0.0, -0.3, "a long title " * 12
    ),
    "trajectory, 10,000 steps and large": lambda: trajectory_figure(
        {"policy_gradient": [{"step": i + 1, "value": 1e9 * (1 - 1 / (i + 1))} for i in range(10_000)]}, 1.01e9, 1e8
    ),
    "quality, nothing": lambda: quality_histogram([]),
    "quality, one document": lambda: quality_histogram([0, 0, 1]),
    "quality, two documents": lambda: quality_histogram([1] + [0] * 14 + [1]),
    "quality, many": lambda: quality_histogram([10**10 * k for k in range(16)]),
    "kept, nothing": lambda: quality_diversity_figure([], [], [], []),
    "kept, none of one": lambda: quality_diversity_figure([1], [0], [1], [0]),
    "kept, two": lambda: quality_diversity_figure([1, 1], [0, 1], [1, 1, 0], [0, 1, 0]),
    "kept, 10,000 clusters": lambda: quality_diversity_figure(
        [10**9] * 12, [10**7] * 12, *_clusters(10_000), title="CC-MAIN-2024-18: what the mask keeps"
    ),
    "calibration, nothing": lambda: calibration_figure([], [[0, 0], [0, 0]]),
    "calibration, ten bins": lambda: calibration_figure(_bins(10), [[93, 7], [12, 10**7]]),
    "clusters, nothing": lambda: cluster_sizes_figure([]),
    "clusters, all empty": lambda: cluster_sizes_figure([0, 0]),
    "clusters, one": lambda: cluster_sizes_figure([5]),
    "clusters, two": lambda: cluster_sizes_figure([5, 3, 0]),
    "front, nothing": lambda: front_figure([]),
    "front, empty masks": lambda: front_figure([{**row, "quality": None} for row in _front(3)]),
    "front, one mask": lambda: front_figure(_front(1)),
    "front, two": lambda: front_figure(_front(2), {"quality": 0.3, "diversity": 0.2}),
    "front, without certificates": lambda: front_figure([{**row, "upper_bound": None} for row in _front(4)]),
    "front, constant quality": lambda: front_figure(
        [{"lambda": lam, "quality": 0.0, "diversity": 0.0, "upper_bound": 0.0} for lam in (0.0, 1.0)]
    ),
    "front, 1,001": lambda: front_figure(_front(1001), {"quality": 0.3, "diversity": 0.2}),
    "settings, nothing": lambda: setting_figure("G", [], "seconds", 0.0, "title"),
    "settings, one": lambda: setting_figure("G", _settings(1), "seconds", 0.0, "title"),
    "settings, free of cost": lambda: setting_figure("G", [{**_settings(1)[0], "cost": 0.0}], "s", 0.0, "title"),
    "settings, seven": lambda: setting_figure("masks a step", _settings(7), "seconds", 0.0, "a title " * 18),
    "metrics, nothing": lambda: metrics_figure({"joint": []}, {"quality": 1.0, "diversity": 0.0}, "title"),
    "metrics, one point": lambda: metrics_figure({"joint": _metrics(1)}, {"quality": 1.0, "diversity": 0.0}, "title"),
    "metrics, four runs": lambda: metrics_figure(
        {f"run {k}": _metrics(6 + k) for k in range(4)}, {"quality": 1.0, "diversity": 0.0}, "a title " * 18
    ),
    "metrics, one axis": lambda: metrics_figure({"a": _metrics(9)}, {"quality": 1.0, "diversity": 1.0}, "title"),
    "spread, nothing": lambda: spread_figure({"seeds": {}, "pools": {"a": []}}, "title"),
    "spread, one and two": lambda: spread_figure(
        {"one run": {"seed 0": _shares(1)}, "two": {"seed 0": _shares(60), "seed 1": _shares(60, 0.1)}}, "title"
    ),
    "clusters, 10,000": lambda: cluster_sizes_figure(_clusters(10_000)[0]),
}


def _pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), dtype=np.int16)


@pytest.mark.parametrize("name", FIGURES)
def test_small_equal_and_not_blank(name: str) -> None:
    before = dict(matplotlib.rcParams)
    png = FIGURES[name]()
    assert png == FIGURES[name]()
    assert len(png) <= MAX_BYTES
    pixels = _pixels(png)
    assert pixels.shape[1] in (640, 720)
    assert pixels.shape[0] == 120 or 300 <= pixels.shape[0] <= 400
    assert (pixels.min(axis=2) < 200).sum() > 200, "something dark is drawn"
    # Nothing may be cut off at the frame: its outermost pixels stay white.
    for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
        assert edge.min() > 200
    assert dict(matplotlib.rcParams) == before
    assert Image.open(io.BytesIO(png)).info.keys() <= {"dpi"}


def test_the_bound_and_the_baseline_are_drawn() -> None:
    points = {"certified": [{"step": s, "value": float(s)} for s in range(1, 9)]}
    plain = trajectory_figure(points)
    assert len({plain, trajectory_figure(points, 9.0), trajectory_figure(points, None, 0.0)}) == 3


def test_the_batch_mean_is_not_drawn_where_a_mask_value_is() -> None:
    one, other = _gradient(20), [{**p, "value": -7.0} for p in _gradient(20)]
    assert trajectory_figure({"policy_gradient": one}, 0.0) == trajectory_figure({"policy_gradient": other}, 0.0)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_a_value_that_is_none_is_named(value: float | None) -> None:
    with pytest.raises(ValueError, match=r"'certified': step 2"):
        trajectory_figure({"certified": [{"step": 1, "value": 0.0}, {"step": 2, "value": value}]})


def test_a_long_trajectory_keeps_its_last_point() -> None:
    points = [{"step": i + 1, "value": 0.0} for i in range(5_000)]
    jump = [*points[:-1], {"step": 5_000, "value": 1.0}]
    assert trajectory_figure({"a": points}) != trajectory_figure({"a": jump})


def test_the_papers_table_is_whole() -> None:
    assert len(PAPER_TABLE_7) == 16
    # The printed shares are rounded: they sum to 1.002.
    assert sum(PAPER_TABLE_7) == pytest.approx(1.00233)
    assert max(range(16), key=PAPER_TABLE_7.__getitem__) == 3


@pytest.mark.parametrize(("counts", "message"), [([0] * 17, "16 integer scores"), ([1, -1], "score 1 has a negative")])
def test_wrong_quality_counts(counts: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quality_histogram(counts)
    with pytest.raises(ValueError, match=message):
        quality_diversity_figure([], counts, [], [])


def test_clusters_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="2 clusters in the pool but 1 in the mask"):
        quality_diversity_figure([], [], [1, 1], [1])
    with pytest.raises(ValueError, match="cluster 1 keeps 2 documents of 1"):
        quality_diversity_figure([], [], [1, 1], [1, 2])
    with pytest.raises(ValueError, match="negative size: -3"):
        cluster_sizes_figure([1, -3])


def test_a_confusion_matrix_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"2 labels has shape \(1, 2\)"):
        calibration_figure([], [[1, 2]])


def test_each_part_of_a_front_is_drawn() -> None:
    rows = _front(5)
    loose = [{**row, "upper_bound": row["upper_bound"] + 0.02} for row in rows]
    assert len({front_figure(rows), front_figure(loose), front_figure(rows, {"quality": 0.4, "diversity": 0.3})}) == 3


def test_the_shaded_region_holds_no_mask() -> None:
    """Beyond the tangents of the unit circle it is grey, within the circle white."""
    rows = _front(101)
    png = _pixels(front_figure(rows))
    white = (png.min(axis=2) > 250).mean()
    looser = _pixels(front_figure([{**row, "upper_bound": row["upper_bound"] + 0.1} for row in rows]))
    assert (looser.min(axis=2) > 250).mean() > white + 0.02


def test_a_mask_above_a_bound_is_refused() -> None:
    rows = _front(3)
    rows[2]["upper_bound"] = 0.99
    with pytest.raises(ValueError, match="mask of λ = 1 lies above the bound of λ = 1"):
        front_figure(rows)


def test_the_bounds_of_the_paper_s_figures_are_drawn() -> None:
    best = {"quality": 1.0, "diversity": 0.0}
    for one, other in [
        (
            setting_figure("G", _settings(3), "s", 0.0, "t"),
            setting_figure("G", _settings(3), "s", 0.1, "t"),
        ),
        (
            metrics_figure({"a": _metrics(3)}, best, "t"),
            metrics_figure({"a": _metrics(3)}, {**best, "quality": 1.2}, "t"),
        ),
    ]:
        assert one != other


def test_the_spread_is_told() -> None:
    same = {"x": {"a": _shares(9), "b": _shares(9)}, "y": {"a": _shares(9)}}
    apart = {"x": {"a": _shares(9), "b": _shares(9, 0.5)}, "y": {"a": _shares(9)}}
    assert spread_figure(same, "t") != spread_figure(apart, "t")


def test_a_loss_is_not_called_an_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[str] = []
    monkeypatch.setattr(matplotlib.axes.Axes, "set_ylabel", lambda axes, label: labels.append(label))
    trajectory_figure({"certified": _certified(3)})
    trajectory_figure({"training loss": _gradient(3)}, what="training loss (lower is better)")
    assert labels == ["objective (higher is better)", "training loss (lower is better)"]
