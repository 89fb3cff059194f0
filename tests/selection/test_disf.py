import os
from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_datamask.selection.disf import (
    _Problem,
    _search_segment,
    conditional_gradient,
    disf_greedy,
    disf_group_values,
    disf_value,
    second_moment_error,
    second_moment_group_values,
    second_moment_value,
)
from dagster_datamask.selection.sampling import top_s

from .oracles import vectors


def disf_by_definition(rows: np.ndarray) -> float:
    """Standardise every column (sample deviation), C = FᵀF/(S − 1), −10⁻⁴ Σ_{p≠q} C_pq²."""
    size, d = rows.shape
    deviation = rows.std(axis=0, ddof=1) if size > 1 else np.zeros(d)
    varies = deviation > 1e-7
    if not varies.any():
        return -1e-4 * d * (d - 1)
    f = np.zeros_like(rows)
    f[:, varies] = (rows - rows.mean(axis=0))[:, varies] / deviation[varies]
    c = f.T @ f / (size - 1)
    return float(-1e-4 * sum(c[p, q] ** 2 for p in range(d) for q in range(d) if p != q))


def objective(z: np.ndarray, linear: np.ndarray, weight: float, chosen: np.ndarray | list[int]) -> float:
    return float(linear[chosen].mean() + weight * disf_by_definition(z[chosen].astype(np.float64)))


def single(rng: np.random.Generator, n: int, d: int, shift: float = 0.0) -> np.ndarray:
    return vectors(rng, n, d, shift).astype(np.float32)


@pytest.mark.parametrize(("size", "d"), [(3, 7), (7, 7), (40, 7), (2, 3), (5, 1)])
def test_value_is_the_definition(size: int, d: int) -> None:
    rows = vectors(np.random.default_rng(size), size, d, 0.5)
    assert disf_value(rows) == pytest.approx(disf_by_definition(rows), rel=1e-11, abs=1e-15)


@pytest.mark.parametrize("size", [4, 30])
def test_a_constant_column_correlates_with_nothing(size: int) -> None:
    rows = vectors(np.random.default_rng(0), size, 6)
    rows[:, 2] = 0.25
    without = np.delete(rows, 2, axis=1)
    assert disf_value(rows) == pytest.approx(disf_value(without), rel=1e-11)
    # what float32 makes of a constant is constant
    rows[:, 2] += 1e-8 * (-1.0) ** np.arange(size)
    assert disf_value(rows) == pytest.approx(disf_value(without), rel=1e-11)


def test_the_worst_value_is_that_of_copies_pairs_and_single_documents() -> None:
    rows = vectors(np.random.default_rng(0), 2, 5)
    worst = -1e-4 * 5 * 4
    assert disf_value(rows[:1]) == worst
    assert disf_value(np.repeat(rows[:1], 9, axis=0)) == worst
    assert disf_value(np.repeat(rows[:1], 3, axis=0)) == worst
    assert disf_value(rows) == pytest.approx(worst, rel=1e-12)
    assert disf_value(rows[:0]) == 0.0
    assert second_moment_value(rows[:0]) == 0.0


@given(size=st.integers(1, 40), d=st.integers(1, 12), shift=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_second_moment_is_within_its_error(size: int, d: int, shift: float, seed: int) -> None:
    given_rows = np.random.default_rng(seed).standard_normal((size, d)) + shift
    rows = given_rows / np.linalg.norm(given_rows, axis=1, keepdims=True)
    wide = given_rows.astype(np.longdouble)
    wide /= np.sqrt((wide * wide).sum(axis=1, keepdims=True))
    moment = sum(np.outer(row, row) for row in wide) / np.longdouble(size)
    exact = -(moment * moment).sum()
    assert abs(second_moment_value(rows) - exact) <= second_moment_error(size, d)
    assert second_moment_error(size, d) < 1e-13


@pytest.mark.parametrize("array", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize(("size", "d"), [(1, 4), (2, 4), (9, 16), (30, 8)])
def test_group_values_are_those_of_each_mask(array: Callable, size: int, d: int) -> None:
    rng = np.random.default_rng(size)
    rows = single(rng, 50, d, 0.5)
    mask = np.zeros((6, 50), np.float32)
    for row in mask:
        row[rng.choice(50, size, replace=False)] = 1.0
    xp = np if array is np.asarray else torch
    for of_group, of_one in (
        (disf_group_values, disf_value),
        (second_moment_group_values, second_moment_value),
    ):
        found = of_group(xp, array(mask), array(rows), size)
        assert found.dtype == xp.float32
        wanted = [of_one(rows[row > 0].astype(np.float64)) for row in mask]
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=2e-5, atol=1e-9)


@given(n=st.integers(4, 12), d=st.integers(2, 6), weight=st.sampled_from([0.3, 20.0]), seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=25)
def test_gradient_is_that_of_the_weighted_definition(n: int, d: int, weight: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    z, linear, m = single(rng, n, d, 0.5), rng.standard_normal(n), rng.uniform(0.2, 1.0, n)
    problem = _Problem(z, linear, weight)

    def weighted(m: np.ndarray) -> float:
        c = np.cov(z.astype(np.float64).T, aweights=m, ddof=0)
        c /= np.sqrt(np.outer(np.diag(c), np.diag(c)))
        return float(m @ linear / m.sum() - weight * 1e-4 * ((c * c).sum() - d))

    point = problem.sums(np.zeros(0, np.int64))
    for i in range(n):
        point = point.plus(problem.sums(np.array([i])), m[i])
    assert problem.value(point) == pytest.approx(weighted(m), rel=1e-9)
    slopes = problem.gradient(point)
    step = 1e-5
    for i in range(n):
        ahead, behind = m.copy(), m.copy()
        ahead[i] += step
        behind[i] -= step
        slope = (weighted(ahead) - weighted(behind)) / (2 * step)
        assert slopes[i] == pytest.approx(slope, rel=1e-4, abs=1e-5 * weight * 1e-4 * d * d + 1e-8)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 9, 40])
def test_documents_changed_at_once_are_those_changed_one_by_one(size: int, dtype: type) -> None:
    rng = np.random.default_rng(size)
    z = single(rng, 700, 6, 0.5)
    # a column that only a document outside makes vary, one that only a member does, and one that nobody does
    z[:, 0] = 0.125
    z[500:, 0] = 0.25
    z[:, 1] = 0.125
    z[size - 1, 1] = 0.5
    z[:, 2] = 0.0
    linear = rng.standard_normal(700)
    problem = _Problem(z, linear, 7.0)
    inside, others = np.arange(size), np.arange(size, 700)
    sums = problem.sums(inside)
    added = problem.changed(sums, others, 1, dtype)
    tolerance = {"rel": 1e-4 if dtype is np.float32 else 1e-9, "abs": 1e-6}
    for x in (size, 499, 500, 699):
        wanted = objective(z, linear, 7.0, [*inside, x])
        assert added[x - size] == pytest.approx(wanted, **tolerance)
    removed = problem.changed(sums, inside, -1, dtype)
    for x in inside:
        wanted = objective(z, linear, 7.0, np.delete(inside, x)) if size > 1 else 0.0
        assert removed[x] == pytest.approx(wanted, **tolerance)


def greedy_by_definition(z: np.ndarray, linear: np.ndarray, weight: float, budget: int) -> list[int]:
    chosen: list[int] = []
    while len(chosen) < budget:
        left = [i for i in range(len(z)) if i not in chosen]
        values = np.array([objective(z, linear, weight, [*chosen, i]) for i in left])
        chosen.append(left[int((values >= values.max() - 1e-11).argmax())])
    return chosen


@pytest.mark.parametrize("weight", [0.0, 1.0, 300.0])
@pytest.mark.parametrize("flat", [True, False])
def test_greedy_is_greedy_by_definition(weight: float, flat: bool) -> None:
    rng = np.random.default_rng(1)
    z = single(rng, 30, 5, 0.3)
    # copies: ties that go to the lower position
    z[20:] = z[:10]
    linear = np.zeros(30) if flat else rng.uniform(size=30)
    found = disf_greedy(z, linear, weight=weight, budget=12)
    assert found.positions.tolist() == greedy_by_definition(z, linear, weight, 12)
    assert found.gains.sum() == pytest.approx(objective(z, linear, weight, found.positions), abs=1e-9)
    assert found.gains[0] == pytest.approx(objective(z, linear, weight, found.positions[:1]), abs=1e-9)
    assert found.passes == 12


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 8])
def test_greedy_takes_exactly_the_budget(budget: int) -> None:
    z = single(np.random.default_rng(0), 8, 3)
    entries: list[dict] = []
    found = disf_greedy(z, np.zeros(8), weight=1.0, budget=budget, progress=lambda i, n, entry: entries.append(entry))
    assert np.unique(found.positions).size == budget
    assert found.gains.size == budget
    assert [entry["step"] for entry in entries] == list(range(1, budget + 1))


@pytest.mark.parametrize("seed", range(8))
def test_ties_that_rounding_hides_go_to_the_lower_position(seed: int) -> None:
    rng = np.random.default_rng(seed)
    even = np.full((2, 33), 33**-0.5) * [[1.0], [-1.0]]
    one = vectors(rng, 1, 33)
    # with columns that are all alike, a document is worth what one with the same entries in another order is
    z = np.concatenate([even, one, rng.permuted(one, axis=1)]).astype(np.float32)
    found = disf_greedy(z, np.zeros(4), weight=1.0, budget=3)
    assert found.positions.tolist() == [0, 1, 2]


def test_greedy_of_copies_ends() -> None:
    z = np.repeat(single(np.random.default_rng(0), 1, 4), 9, axis=0)
    assert disf_greedy(z, np.zeros(9), weight=1.0, budget=5).positions.tolist() == [0, 1, 2, 3, 4]


def test_greedy_asks_who_may_come_next() -> None:
    z = single(np.random.default_rng(0), 40, 4)
    groups = np.arange(40) % 2

    def two_of_each(chosen: list[int]) -> np.ndarray:
        return np.bincount(groups[chosen], minlength=2)[groups] < 2

    found = disf_greedy(z, np.zeros(40), weight=1.0, budget=9, candidates=two_of_each)
    assert np.bincount(groups[found.positions]).tolist() == [2, 2]


@given(
    n=st.integers(3, 11),
    d=st.integers(1, 4),
    weight=st.sampled_from([0.0, 1.0, 1000.0]),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
@settings(deadline=None, max_examples=40)
def test_conditional_gradient_is_between_its_start_and_the_optimum(
    n: int, d: int, weight: float, seed: int, data: st.DataObject
) -> None:
    size = data.draw(st.integers(3, min(n, 6)))
    rng = np.random.default_rng(seed)
    z, linear = single(rng, n, d, 0.5), rng.uniform(size=n)
    found = conditional_gradient(z, linear, weight=weight, budget=size)
    value = objective(z, linear, weight, found.positions)
    best = max(objective(z, linear, weight, list(u)) for u in combinations(range(n), size))
    problem = _Problem(z, linear, weight)
    start = top_s(problem.gradient(problem.sums(np.arange(n))), size)
    noise = 1e-9 * (1 + weight)
    assert np.unique(found.positions).size == size
    assert objective(z, linear, weight, start) - noise <= value <= best + noise
    values = [entry["value"] for entry in found.trajectory]
    assert values == sorted(values)
    assert values[-1] == pytest.approx(value, abs=noise)
    if weight == 0.0:
        assert value == pytest.approx(best, abs=1e-12)


def test_conditional_gradient_finds_most_small_optima() -> None:
    missed = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        z, linear = single(rng, 12, 3, 0.5), rng.uniform(size=12)
        found = conditional_gradient(z, linear, weight=2000.0, budget=5)
        best = max(objective(z, linear, 2000.0, list(u)) for u in combinations(range(12), 5))
        missed += objective(z, linear, 2000.0, found.positions) < best - 1e-9
    assert missed <= 1


@pytest.mark.parametrize("budget", [3, 5, 9])
@pytest.mark.parametrize("seed", range(4))
def test_a_few_documents_are_worth_no_less_than_greedy_finds(budget: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    z = single(rng, 300, 20, 0.5)
    ours = conditional_gradient(z, np.zeros(300), weight=1.0, budget=budget)
    theirs = disf_greedy(z, np.zeros(300), weight=1.0, budget=budget)
    values = [disf_by_definition(z[found.positions].astype(np.float64)) for found in (ours, theirs)]
    assert values[0] >= values[1] - 1e-12


@pytest.mark.parametrize("weight", [1.0, 30.0])
def test_conditional_gradient_is_worth_more_than_greedy_on_anisotropic_vectors(weight: float) -> None:
    rng = np.random.default_rng(0)
    z = rng.standard_normal((800, 24)) * np.arange(1, 25) ** -0.5 + 0.5
    z = (z / np.linalg.norm(z, axis=1, keepdims=True)).astype(np.float32)
    linear = 1e-3 * rng.uniform(size=800)
    ours = conditional_gradient(z, linear, weight=weight, budget=80)
    theirs = disf_greedy(z, linear, weight=weight, budget=80)
    assert objective(z, linear, weight, ours.positions) > objective(z, linear, weight, theirs.positions)
    assert ours.passes < theirs.passes


def test_scores_are_what_each_document_adds() -> None:
    rng = np.random.default_rng(3)
    z, linear = single(rng, 60, 5, 0.5), 1e-3 * rng.uniform(size=60)
    found = conditional_gradient(z, linear, weight=2.0, budget=20)
    value = objective(z, linear, 2.0, found.positions)
    for x in range(60):
        if x in found.positions:
            wanted = value - objective(z, linear, 2.0, np.setdiff1d(found.positions, [x]))
        else:
            wanted = objective(z, linear, 2.0, [*found.positions, x]) - value
        assert found.scores[x] == pytest.approx(wanted, abs=1e-8)


def test_nothing_is_exchanged_across_groups() -> None:
    rng = np.random.default_rng(0)
    z, groups = single(rng, 200, 6, 0.5), rng.integers(0, 3, 200) * 10 - 7
    quotas = {-7: 5, 3: 20, 13: 10}

    def take(scores: np.ndarray) -> np.ndarray:
        rows = [np.flatnonzero(groups == g) for g in quotas]
        best = [row[top_s(scores[row], quota)] for row, quota in zip(rows, quotas.values(), strict=True)]
        return np.sort(np.concatenate(best))

    common = {"weight": 1.0, "budget": 35, "take": take}
    within = conditional_gradient(z, np.zeros(200), groups=groups, **common)
    without = conditional_gradient(z, np.zeros(200), **common)
    for found in (within, without):
        assert {g: int((groups[found.positions] == g).sum()) for g in quotas} == quotas
    assert [entry["note"] for entry in without.trajectory].count("exchanged") == 0
    assert objective(z, np.zeros(200), 1.0, within.positions) > objective(z, np.zeros(200), 1.0, without.positions)


def test_a_set_of_any_size_can_be_feasible() -> None:
    rng = np.random.default_rng(0)
    z, costs = single(rng, 100, 5, 0.5), rng.integers(1, 9, 100)

    def fill(scores: np.ndarray) -> np.ndarray:
        order = np.argsort(-scores, kind="stable")
        return np.sort(order[: np.searchsorted(np.cumsum(costs[order]), 120, side="right")])

    found = conditional_gradient(z, np.zeros(100), weight=1.0, budget=25, take=fill)
    assert 120 - 9 < costs[found.positions].sum() <= 120
    empty = conditional_gradient(z, np.zeros(100), weight=1.0, budget=25, take=lambda scores: np.zeros(0, np.int64))
    assert empty.positions.size == 0


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 9])
def test_any_budget_of_copies(budget: int) -> None:
    z = np.repeat(single(np.random.default_rng(0), 1, 4), 9, axis=0)
    linear = np.arange(9.0)
    found = conditional_gradient(z, linear, weight=1.0, budget=budget)
    assert found.positions.tolist() == list(range(9 - budget, 9))
    assert found.scores.shape == (9,)


def test_one_core_and_many_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    z, linear = single(rng, 12_000, 8, 0.5), 1e-3 * rng.uniform(size=12_000)
    answers = []
    for cores in ({0}, set(range(8))):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        ours = conditional_gradient(z, linear, weight=1.0, budget=400, steps=4)
        theirs = disf_greedy(z, linear, weight=1.0, budget=6)
        answers.append((ours.positions.tolist(), ours.scores.tobytes(), theirs.positions.tolist()))
    assert answers[0] == answers[1]


@given(seed=st.integers(0, 10**6), share=st.sampled_from([1e-3, 0.1, 0.5, 1.0]))
@settings(deadline=None, max_examples=30)
def test_a_step_is_never_worse_than_staying(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    problem = _Problem(single(rng, 60, 4, 0.3), np.zeros(60), 1.0)
    point = problem.sums(rng.choice(60, 20, replace=False))
    vertex = top_s(problem.gradient(point), 20)
    corner, value = problem.sums(vertex), problem.value(point)
    step, found = _search_segment(problem, point, corner, value, share)
    assert 0 < step <= 1
    assert found >= value
    if found > value:
        assert problem.value(point.mixed(corner, step)) == found
        # and the best of a grid is not much better
        grid = max(problem.value(point.mixed(corner, t)) for t in np.linspace(0, min(1.0, 2 * share), 60))
        assert found - value >= 0.9 * (grid - value)


def test_bad_input_is_named() -> None:
    z = single(np.random.default_rng(0), 3, 2)
    for solver in (disf_greedy, conditional_gradient):
        with pytest.raises(ValueError, match="budget 4 is not between 0 and the 3 documents"):
            solver(z, np.zeros(3), weight=1.0, budget=4)
        with pytest.raises(ValueError, match=r"3 embeddings but linear scores of shape \[2\]"):
            solver(z, np.zeros(2), weight=1.0, budget=1)
