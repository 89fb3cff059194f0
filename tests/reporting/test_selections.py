"""Pictures of what a mask does, for every shape of pool: they decode, stay small, come out equal and show numbers."""

import io
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from dagster_datamask.keyed import rng
from dagster_datamask.reporting.selections import (
    cluster_map_figure,
    hosts_figure,
    lengths_figure,
    overlap_figure,
    quality_change_figure,
    selections_map_figure,
    strategies_figure,
)

MAX_BYTES = 60_000
EDGES = 2.0 ** (np.arange(21) / 2)


def _clusters(k: int) -> tuple[np.ndarray, ...]:
    random = rng(0, "test-selections", k)
    pool = random.integers(0, 50, k)
    return random.random(k) * 15, random.random(k), pool, random.binomial(pool, 0.2)


def _strategies(*rows: tuple[str, float | None, float | None]) -> bytes:
    return strategies_figure([{"name": n, "quality": q, "cosine": c} for n, q, c in rows], "t")


def _lengths(*counts: list[int]) -> bytes:
    named = {name: c + [0] * (20 - len(c)) for name, c in zip(("scored", "choosable", "kept"), counts, strict=True)}
    return lengths_figure(EDGES, named, "t")


def _quality(*counts: list[int]) -> bytes:
    named = {name: c + [0] * (16 - len(c)) for name, c in zip(("scored", "left", "kept"), counts, strict=True)}
    return quality_change_figure(named, {name: 1.0 if sum(c) else None for name, c in named.items()}, "t")


def _map(n: int, masks: int = 3) -> bytes:
    random = rng(0, "test-map", n)
    named = {"all": np.ones(n, bool), **{f"mask {k}": random.random(n) < 0.2 for k in range(masks)}}
    return selections_map_figure(random.normal(size=(n, 2)), named, "t")


def _hosts(*rows: tuple[str, float, float]) -> bytes:
    return hosts_figure([{"host": h, "before": b, "after": a} for h, b, a in rows], "t")


FIGURES: dict[str, Callable[[], bytes]] = {
    "strategies, none": lambda: _strategies(),
    "strategies, too few documents": lambda: _strategies(("pool", 1.0, None), ("mask", None, None)),
    "strategies, one": lambda: _strategies(("pool", 1.0, 0.2)),
    "strategies, eight": lambda: _strategies(*((f"s{k}", float(k), 0.1 * k) for k in range(8))),
    "quality, nothing": lambda: _quality([], [], []),
    "quality, nothing kept": lambda: _quality([1, 2], [0, 2], []),
    "quality, one document": lambda: _quality([0, 1], [0, 1], [0, 1]),
    "quality": lambda: _quality(list(range(16)), [0] * 5 + list(range(11)), [0] * 12 + [5, 3, 2]),
    "clusters, none": lambda: cluster_map_figure(*_clusters(0), "t"),
    "clusters, all empty": lambda: cluster_map_figure(*([np.zeros(3)] * 2), *([np.zeros(3, int)] * 2), "t"),
    "clusters, one": lambda: cluster_map_figure(np.ones(1), np.ones(1), np.array([3]), np.array([0]), "t"),
    "clusters, two": lambda: cluster_map_figure(*_clusters(2), "t"),
    "clusters, equal": lambda: cluster_map_figure(np.ones(9), np.ones(9), np.full(9, 4), np.full(9, 1), "t"),
    "clusters, 10,000": lambda: cluster_map_figure(*_clusters(10_000), "t"),
    "map, none": lambda: selections_map_figure(None, {"all": np.zeros(0, bool)}, "t"),
    "map, five": lambda: _map(5),
    "map, 2,000": lambda: _map(2000),
    "lengths, unknown": lambda: _lengths([], [], []),
    "lengths, one bin": lambda: _lengths([0, 1], [0, 1], [0, 1]),
    "lengths": lambda: _lengths(list(range(20)), list(range(20)), list(range(20))[::-1]),
    "hosts, none": lambda: _hosts(),
    "hosts, nothing kept": lambda: _hosts(("a", 1.0, 0.0)),
    "hosts, as they come": lambda: _hosts(("", 0.5, 0.1), ("$x$" * 30, 0.2, 0.4), ("пример.рф", 0.1, 0.2)),
    "overlap, empty masks": lambda: overlap_figure(["a", "b"], np.full((2, 2), np.nan), "t"),
    "overlap, one empty": lambda: overlap_figure(["a", "b"], np.array([[1, 0.0], [np.nan, np.nan]]), "t"),
    "strategies, thirteen": lambda: _strategies(*((f"baseline_{k}", float(k), 0.05 * k) for k in range(13))),
    "overlap, thirteen": lambda: overlap_figure([f"baseline_fineweb_edu_{k}" for k in range(13)], np.eye(13), "t"),
    "overlap, six": lambda: overlap_figure([f"baseline_{k}" for k in range(6)], np.eye(6), "t"),
}


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_a_small_png_without_warnings(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        png = FIGURES[name]()
    assert len(png) < MAX_BYTES
    image = pixels(png)
    assert image.shape[1] > 300 and len(np.unique(image)) > 3


@pytest.mark.parametrize("name", ["strategies, eight", "clusters, two", "map, five", "hosts, as they come"])
def test_equal_numbers_give_equal_bytes(name: str) -> None:
    assert FIGURES[name]() == FIGURES[name]()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            lambda: _strategies(("pool", 1.0, 0.2), ("a", 2.0, 0.1)),
            lambda: _strategies(("pool", 1.0, 0.2), ("a", 2.0, 0)),
        ),
        (lambda: _quality([1], [1], [1]), lambda: _quality([1], [1], [0, 1])),
        (lambda: _lengths([1], [1], [1]), lambda: _lengths([1], [1], [0, 1])),
        (lambda: _hosts(("a", 1.0, 0.5)), lambda: _hosts(("a", 1.0, 0.25))),
        (lambda: overlap_figure(["a"], np.ones((1, 1)), "t"), lambda: overlap_figure(["a"], np.ones((1, 1)) / 2, "t")),
    ],
)
def test_other_numbers_give_another_picture(one: Callable[[], bytes], other: Callable[[], bytes]) -> None:
    assert not np.array_equal(pixels(one()), pixels(other()))


def test_a_cluster_cannot_keep_more_than_it_has() -> None:
    with pytest.raises(ValueError, match="cluster 1 keeps 3 documents of 2"):
        cluster_map_figure(np.ones(2), np.ones(2), np.array([2, 2]), np.array([1, 3]), "t")
