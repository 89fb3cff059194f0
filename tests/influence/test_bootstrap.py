import os
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_datamask import keyed
from dagster_datamask.influence import bootstrap as module
from dagster_datamask.influence.bootstrap import bootstrap_trajectories, extremes
from dagster_datamask.influence.relational import bracket
from dagster_datamask.selection.objectives import BadInput


def pool(seed: int, n: int, width: int = 4) -> tuple[np.ndarray, np.ndarray, list[str]]:
    rng = np.random.default_rng(seed)
    h = rng.standard_normal((n, width)) + 0.5
    h /= np.linalg.norm(h, axis=1, keepdims=True)
    return h.astype(np.float32), rng.standard_normal(n), [f"doc-{i}" for i in range(n)]


def candidates(
    h: np.ndarray, f: np.ndarray, ids: list[str], drawn: list[int], k: int, alpha: float, beta: float
) -> set[int]:
    """The k lowest and, of the others, the k highest by the definition."""
    ties = keyed.hash64(ids, 0, "tie")
    scores = {}
    for x in set(range(len(f))) - set(drawn):
        mean = np.mean([h[i].astype(float) @ h[x].astype(float) for i in drawn]) if drawn else 0.0
        scores[x] = float(f[x]) * (float(bracket(np.array([mean]), alpha, beta)[0]) if drawn else 1.0)
    low = sorted(scores, key=lambda x: (scores[x], ties[x]))[:k]
    return set(low) | set(sorted(set(scores) - set(low), key=lambda x: (-scores[x], ties[x]))[:k])


def law(
    h: np.ndarray, f: np.ndarray, ids: list[str], length: int, k: int, alpha: float, beta: float
) -> dict[tuple[int, ...], float]:
    """{trajectory: its probability} by enumeration."""
    found = {(): 1.0}
    for _ in range(length):
        found = {
            (*drawn, x): p / len(among)
            for drawn, p in found.items()
            for among in [candidates(h, f, ids, list(drawn), k, alpha, beta)]
            for x in among
        }
    return found


@pytest.mark.parametrize(("n", "length", "k"), [(6, 3, 1), (7, 2, 2), (3, 3, 5)])
def test_trajectories_follow_the_law(n: int, length: int, k: int) -> None:
    h, f, ids = pool(n, n)
    exact = law(h, f, ids, length, k, 1.2, 0.8)
    draws = 4000
    drawn = bootstrap_trajectories(h, f, ids, draws, length, k, alpha=1.2, beta=0.8, seed=0)
    counts = dict.fromkeys(exact, 0)
    for row in drawn.tolist():
        counts[tuple(row)] += 1
    square = sum((counts[t] - draws * p) ** 2 / (draws * p) for t, p in exact.items())
    # the mean of χ² is its degrees of freedom, its variance twice that
    freedom = len(exact) - 1
    assert square < freedom + 5 * np.sqrt(2 * freedom)
    if n == 3:
        assert set(exact) == set(permutations(range(3)))


def test_low_and_high_are_mixed() -> None:
    h, f, ids = pool(1, 200)
    drawn = bootstrap_trajectories(h, f, ids, 300, 6, 5, alpha=1.0, beta=1.0, seed=0)
    low = f[drawn] < np.median(f)
    # a deterministic beam would have all-low and all-high trajectories alone
    assert np.mean(low.any(axis=1) & ~low.all(axis=1)) > 0.9
    # the first by bare f, from all ten extremes of it
    order = np.argsort(f)
    assert set(drawn[:, 0].tolist()) == set(order[:5].tolist()) | set(order[-5:].tolist())
    assert all(len(set(row)) == 6 for row in drawn.tolist())
    for row in drawn[:20].tolist():
        for t in range(6):
            assert row[t] in candidates(h, f, ids, row[:t], 5, 1.0, 1.0)


def test_a_trajectory_is_its_numbers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    h, f, ids = pool(2, 150, 24)
    whole = bootstrap_trajectories(h, f, ids, 40, 5, 3, alpha=1.0, beta=1.0, seed=0)
    assert np.array_equal(
        bootstrap_trajectories(h, f, ids, 10, 5, 3, alpha=1.0, beta=1.0, seed=0, first=30), whole[30:]
    )
    order = np.random.default_rng(0).permutation(150)
    permuted = bootstrap_trajectories(
        h[order], f[order], [ids[i] for i in order], 40, 5, 3, alpha=1.0, beta=1.0, seed=0
    )
    assert np.array_equal(order[permuted], whole)
    monkeypatch.setattr(module, "_SCORES", 1)
    monkeypatch.setattr(module, "_ROWS", 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    stored = h.astype(np.float16)
    assert np.array_equal(bootstrap_trajectories(h, f, ids, 40, 5, 3, alpha=1.0, beta=1.0, seed=0), whole)
    assert bootstrap_trajectories(stored, f, ids, 2, 5, 3, alpha=1.0, beta=1.0, seed=0).shape == (2, 5)
    assert not np.array_equal(bootstrap_trajectories(h, f, ids, 40, 5, 3, alpha=1.0, beta=1.0, seed=1), whole)


@given(st.lists(st.integers(-3, 3), max_size=12), st.integers(1, 4))
def test_extremes_are_both_ends(scores: list[int], k: int) -> None:
    order = sorted(range(len(scores)), key=lambda i: (scores[i], i))
    low = order[:k]
    high = sorted(set(order) - set(low), key=lambda i: (-scores[i], i))[:k]
    assert extremes(np.array(scores, np.float64), k).tolist() == sorted({*low, *high})


@pytest.mark.parametrize("n", [1, 2])
def test_tiny_pools(n: int) -> None:
    h, f, ids = pool(n, n)
    drawn = bootstrap_trajectories(h, f, ids, 3, n, 5, alpha=1.0, beta=1.0, seed=0)
    assert [sorted(row) for row in drawn.tolist()] == [list(range(n))] * 3
    assert bootstrap_trajectories(h, f, ids, 0, n, 5, alpha=1.0, beta=1.0, seed=0).shape == (0, n)


def test_bad_input_is_named() -> None:
    h, f, ids = pool(3, 10)

    def run(h: np.ndarray = h, f: np.ndarray = f, length: int = 3, k: int = 2, beta: float = 1.0) -> None:
        bootstrap_trajectories(h, f, ids, 4, length, k, alpha=1.0, beta=beta, seed=0)

    with pytest.raises(ValueError, match="trajectories of 11 documents need as many, and the pool has 10"):
        run(length=11)
    with pytest.raises(ValueError, match="from the 0 lowest"):
        run(k=0)
    with pytest.raises(ValueError, match="beta 0"):
        run(beta=0.0)
    with pytest.raises(BadInput, match=r"'doc-4' \(row 4\): the influence is not finite"):
        run(f=np.where(np.arange(10) == 4, np.nan, f))
    with pytest.raises(BadInput, match=r"'doc-6' \(row 6\): the influence vector is not finite"):
        run(h=np.where(np.arange(10)[:, None] == 6, np.nan, h))
    with pytest.raises(ValueError, match="vectors of shape"):
        run(h=h[:9])
