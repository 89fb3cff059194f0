import os
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from dagster_datamask.selection import facility_location
from dagster_datamask.selection.facility_location import FacilityLocation
from dagster_datamask.selection.greedy import Chosen, GreedyOptions, greedy

from .oracles import vectors

LAZY = GreedyOptions()


def pool(seed: int, n: int, d: int, shift: float = 0.0, copies: int = 0) -> np.ndarray:
    z = vectors(np.random.default_rng(seed), n, d, shift).astype(np.float32)
    z[n - copies :] = z[:copies]
    return z


def run(z: np.ndarray, linear: np.ndarray | None = None, budget: int = 1, **given: Any) -> Chosen:
    weights = {"fl": 0.0, "pws": 0.0, "second_moment": 0.0, "options": LAZY, "seed": 0, "split": 0}
    return greedy(z, np.zeros(len(z)) if linear is None else linear, budget=budget, **{**weights, **given})


def objective(
    z: np.ndarray,
    linear: np.ndarray,
    chosen: list[int],
    fl: float,
    pws: float,
    second_moment: float,
    budget: int,
    costs: np.ndarray | None = None,
) -> float:
    """The objective from its definition, every mean over `budget`."""
    if not chosen:
        return 0.0
    wide = z.astype(np.float64)
    w = np.ones(len(z)) if costs is None else costs.astype(np.float64)
    mine, own = wide[chosen], w[chosen]
    moment = np.einsum("k,ki,kj->ij", own, mine, mine) / budget
    return float(
        fl * np.maximum(wide @ mine.T, 0.0).max(axis=1).mean()
        + (own * linear[chosen]).sum() / budget
        - pws * np.sum((own @ mine / budget) ** 2)
        - second_moment * np.sum(moment**2)
    )


weights = {
    "fl": st.sampled_from([0.0, 0.3, 1.0]),
    "pws": st.sampled_from([0.0, 0.5]),
    "second_moment": st.sampled_from([0.0, 0.5]),
    "variant": st.sampled_from(["lazy", "stochastic", "lazier"]),
    "shift": st.sampled_from([0.0, 1.0]),
    "seed": st.integers(0, 10**6),
}


@given(n=st.integers(0, 14), d=st.integers(1, 4), limit=st.sampled_from([4e9, 0.0]), data=st.data(), **weights)
@settings(max_examples=120, deadline=None)
def test_exact_size_unique_and_gains_that_sum_to_the_objective(
    n: int,
    d: int,
    limit: float,
    fl: float,
    pws: float,
    second_moment: float,
    variant: Any,
    shift: float,
    seed: int,
    data: st.DataObject,
) -> None:
    budget = data.draw(st.integers(0, n))
    z = pool(seed, n, d, shift, copies=data.draw(st.integers(0, n // 2)))
    linear = data.draw(st.sampled_from([np.zeros(n), np.linspace(-1, 1, n), np.full(n, 3.0)]))
    found = run(
        z,
        linear,
        budget,
        fl=fl,
        pws=pws,
        second_moment=second_moment,
        options=GreedyOptions(variant),
        memory_limit=limit,
    )
    assert found.positions.dtype == np.int64
    assert found.positions.size == len(set(found.positions.tolist())) == budget
    assert not budget or 0 <= found.positions.min() <= found.positions.max() < n
    exact = objective(z, linear, found.positions.tolist(), fl, pws, second_moment, budget)
    assert found.gains.sum() == pytest.approx(exact, abs=1e-5)


@given(n=st.integers(1, 12), d=st.integers(1, 4), scores=st.sampled_from([0.0, 0.5]), data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_choice_adds_the_most_and_greedy_is_within_its_guarantee(
    n: int, d: int, scores: float, data: st.DataObject
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    z = vectors(rng, n, d).astype(np.float32)
    linear = scores * rng.uniform(size=n)
    budget = data.draw(st.integers(1, min(n, 5)))

    def worth(chosen: list[int]) -> float:
        return objective(z, linear, chosen, 1.0, 0.0, 0.0, budget)

    found = run(z, linear, budget, fl=1.0)
    chosen: list[int] = []
    for u, gain in zip(found.positions.tolist(), found.gains, strict=True):
        added = np.array([worth([*chosen, x]) if x not in chosen else -np.inf for x in range(n)])
        assert added[u] >= added.max() - 1e-6
        assert gain == pytest.approx(added[u] - worth(chosen), abs=1e-6)
        chosen.append(u)
    best = max(worth(list(u)) for u in combinations(range(n), budget))
    assert worth(chosen) >= (1 - 1 / np.e) * best - 1e-6


@pytest.mark.parametrize("pws", [0.0, 0.4])
def test_lazy_chooses_what_renewing_every_gain_would(pws: float) -> None:
    z = pool(1, 900, 16, 0.3, copies=100)
    linear = 0.01 * np.random.default_rng(1).uniform(size=900)
    lazy = run(z, linear, 200, fl=1.0, pws=pws)
    # a sample of everything, evaluated anew each time
    plain = run(z, linear, 200, fl=1.0, pws=pws, options=GreedyOptions("stochastic", 1e-99))
    lazier = run(z, linear, 200, fl=1.0, pws=pws, options=GreedyOptions("lazier", 1e-99))
    np.testing.assert_array_equal(lazy.positions, plain.positions)
    np.testing.assert_array_equal(lazy.gains, plain.gains)
    np.testing.assert_array_equal(lazier.positions, plain.positions)


def test_the_kernel_in_blocks_ends_where_the_dense_one_does() -> None:
    z = pool(2, 1200, 24, 0.2)
    dense = run(z, None, 120, fl=1.0)
    blocks = run(z, None, 120, fl=1.0, facility=FacilityLocation(z, kernel="blocks"))
    # room for 145 of the 1,200 rows
    tight = run(z, None, 120, fl=1.0, memory_limit=1e6)
    assert blocks.gains.sum() == pytest.approx(dense.gains.sum(), rel=1e-5)
    assert tight.gains.sum() == pytest.approx(dense.gains.sum(), rel=1e-5)
    assert dense.passes == 600


@pytest.mark.parametrize("kernel", ["dense", "blocks"])
def test_the_number_of_threads_changes_nothing(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facility_location, "_BAND", 32)
    monkeypatch.setattr(facility_location, "_COLUMNS", 48)
    monkeypatch.setattr(facility_location, "_TILE", 700 * 40)
    z = pool(4, 700, 16, 0.3)
    found = []
    for cores in ({0}, {0, 1, 2, 3}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        with threadpool_limits(limits=1, user_api="blas"):
            found.append(run(z, None, 80, fl=1.0, pws=0.3, facility=FacilityLocation(z, kernel=kernel)))
    np.testing.assert_array_equal(found[0].positions, found[1].positions)
    np.testing.assert_array_equal(found[0].gains, found[1].gains)


def test_samples_come_near_plain_greedy_and_follow_their_key() -> None:
    z = pool(3, 1000, 16)
    lazy = run(z, None, 100, fl=1.0).gains.sum()
    for variant in ("stochastic", "lazier"):
        options = GreedyOptions(variant)  # type: ignore[arg-type]
        first = run(z, None, 100, fl=1.0, options=options)
        assert 0.95 * lazy < first.gains.sum() < lazy
        np.testing.assert_array_equal(first.positions, run(z, None, 100, fl=1.0, options=options).positions)
        assert run(z, None, 100, fl=1.0, options=options, seed=1).positions.tolist() != first.positions.tolist()
        assert run(z, None, 100, fl=1.0, options=options, split=1).positions.tolist() != first.positions.tolist()
    sampled = [run(z, None, 100, fl=1.0, options=GreedyOptions(v)).positions.tolist() for v in ("stochastic", "lazier")]  # type: ignore[arg-type]
    assert sampled[0] == sampled[1]


@pytest.mark.parametrize("weights", [{"fl": 1.0}, {"pws": 1.0}, {"second_moment": 1.0}, {"fl": 1.0, "pws": 1.0}])
def test_ties_go_to_the_lower_position(weights: dict[str, float]) -> None:
    z = np.tile(np.array([[0.6, 0.8]], np.float32), (40, 1))
    found = run(z, np.full(40, 0.25), 7, **weights)
    np.testing.assert_array_equal(found.positions, np.arange(7))


@pytest.mark.parametrize("variant", ["stochastic", "lazier"])
def test_ties_in_a_sample_go_to_the_lower_position(variant: Any) -> None:
    # the lowest of 10 of 40 positions is 2.7 on average, and any of them 19.5
    z = np.tile(np.array([[0.6, 0.8]], np.float32), (40, 1))
    options = GreedyOptions(variant, epsilon=float(np.exp(-0.25)))
    first = [run(z, None, 1, fl=1.0, options=options, seed=seed).positions[0] for seed in range(20)]
    assert 0 < np.mean(first) < 6


@pytest.mark.parametrize("costs", [None, np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3] * 3)])
def test_squares_are_weighed_between_the_budget_and_what_is_chosen(costs: np.ndarray | None) -> None:
    z = pool(8, 30, 4, 0.5)
    linear = np.random.default_rng(8).uniform(0, 1, 30)
    w, budget = (np.ones(30), 12) if costs is None else (costs.astype(float), 40)
    wide = z.astype(np.float64)

    def plain(per_cost: bool) -> tuple[list[int], float]:
        chosen: list[int] = []
        while True:
            spent = w[chosen].sum()
            tried = [x for x in range(30) if x not in chosen and w[x] <= budget - spent]
            if not tried:
                break
            now = ((w[chosen] @ wide[chosen]) ** 2).sum()
            keys = []
            for x in tried:
                rise = ((w[[*chosen, x]] @ wide[[*chosen, x]]) ** 2).sum() - now
                weight = budget * (spent + w[x])
                keys.append((w[x] * linear[x] / weight**0.5 - 0.6 * rise / weight) / (w[x] if per_cost else 1.0))
            chosen.append(tried[int(np.argmax(keys))])
        return chosen, objective(z, linear, chosen, 0.0, 0.6, 0.0, budget, costs)

    found = run(z, linear, budget, pws=0.6, costs=costs)
    runs = [plain(False)] if costs is None else [plain(False), plain(True)]
    assert found.positions.tolist() == max(runs, key=lambda one: one[1])[0]


def test_linear_scores_alone_give_the_best_scores() -> None:
    linear = np.array([0.1, 0.9, 0.5, 0.9, -1.0])
    found = run(pool(0, 5, 2), linear, 4)
    assert found.positions.tolist() == [1, 3, 2, 0]
    np.testing.assert_allclose(found.gains, np.array([0.9, 0.9, 0.5, 0.1]) / 4)
    assert found.passes == 0


@pytest.mark.parametrize("term", ["pws", "second_moment"])
def test_squares_are_chosen_by_the_smallest_rise(term: str) -> None:
    z = pool(7, 60, 5, 0.7)
    found = run(z, None, 20, **{term: 1.0})
    power = 1 if term == "pws" else 2
    similar = ((z.astype(np.float64) @ z.T) ** power)[:, found.positions].cumsum(axis=1)
    left = np.ones(60, bool)
    for k, u in enumerate(found.positions.tolist()):
        if k:
            assert similar[u, k - 1] <= similar[left, k - 1].min() + 1e-5
        left[u] = False
    assert found.passes == 20


@given(n=st.integers(1, 12), data=st.data(), **weights)
@settings(max_examples=80, deadline=None)
def test_token_budgets_are_never_exceeded_and_filled_while_anything_fits(
    n: int,
    fl: float,
    pws: float,
    second_moment: float,
    variant: Any,
    shift: float,
    seed: int,
    data: st.DataObject,
) -> None:
    costs = np.array(data.draw(st.lists(st.integers(1, 9), min_size=n, max_size=n)))
    budget = data.draw(st.integers(0, int(costs.sum())))
    z = pool(seed, n, 3, shift)
    linear = np.random.default_rng(seed).uniform(-1, 1, n)
    found = run(
        z,
        linear,
        budget,
        fl=fl,
        pws=pws,
        second_moment=second_moment,
        costs=costs,
        options=GreedyOptions(variant),
    )
    chosen = found.positions.tolist()
    left = budget - costs[chosen].sum()
    assert left >= 0
    assert len(set(chosen)) == len(chosen)
    assert all(costs[x] > left for x in set(range(n)) - set(chosen))
    exact = objective(z, linear, chosen, fl, pws, second_moment, max(1, budget), costs)
    assert found.gains.sum() == pytest.approx(exact, abs=1e-5)


def test_the_better_of_gain_and_gain_per_cost_is_kept() -> None:
    z = np.eye(6, dtype=np.float32)[[0, 0, 0, 1, 2, 3]]
    # one long document that stands for three, or three short ones that stand for one each, and for the three
    costs = np.array([4, 4, 1, 1, 1, 1])
    found = run(z, None, 4, fl=1.0, costs=costs)
    assert sorted(found.positions.tolist()) == [2, 3, 4, 5]
    # per cost, the short one comes first and leaves no room for the long one
    z = np.eye(4, dtype=np.float32)[[0, 1, 1, 1]]
    found = run(z, np.zeros(4), 4, fl=1.0, costs=np.array([1, 4, 9, 9]))
    assert found.positions.tolist() == [1]


@given(n=st.integers(1, 14), data=st.data(), **weights)
@settings(max_examples=60, deadline=None)
def test_quotas_are_met(
    n: int,
    fl: float,
    pws: float,
    second_moment: float,
    variant: Any,
    shift: float,
    seed: int,
    data: st.DataObject,
) -> None:
    groups = np.random.default_rng(seed).integers(0, 3, n)
    sizes = np.bincount(groups, minlength=3)
    quotas = [data.draw(st.integers(0, int(size))) for size in sizes]
    found = run(
        pool(seed, n, 3, shift),
        None,
        sum(quotas),
        fl=fl,
        pws=pws,
        second_moment=second_moment,
        groups=groups,
        quotas=quotas,
        options=GreedyOptions(variant),
    )
    assert np.bincount(groups[found.positions], minlength=3).tolist() == quotas
    assert len(set(found.positions.tolist())) == sum(quotas)


@given(n=st.integers(1, 12), data=st.data(), **weights)
@settings(max_examples=40, deadline=None)
def test_quotas_are_in_tokens_where_the_budget_is(
    n: int,
    fl: float,
    pws: float,
    second_moment: float,
    variant: Any,
    shift: float,
    seed: int,
    data: st.DataObject,
) -> None:
    rng = np.random.default_rng(seed)
    costs, groups = rng.integers(1, 9, n), rng.integers(0, 2, n)
    quotas = [data.draw(st.integers(0, 30)) for _ in range(2)]
    budget = min(sum(quotas), int(costs.sum()))
    found = run(
        pool(seed, n, 3, shift),
        None,
        budget,
        fl=fl,
        pws=pws,
        second_moment=second_moment,
        costs=costs,
        groups=groups,
        quotas=quotas,
        options=GreedyOptions(variant),
    )
    chosen = np.zeros(n, bool)
    chosen[found.positions] = True
    left = [quotas[g] - costs[chosen & (groups == g)].sum() for g in range(2)]
    unspent = budget - costs[chosen].sum()
    assert min(left) >= 0
    assert unspent >= 0
    assert all(costs[x] > min(left[groups[x]], unspent) for x in np.flatnonzero(~chosen))


def test_progress_is_told_about_fifty_times_and_ends_at_the_budget() -> None:
    calls: list[tuple[int, int, dict[str, Any]]] = []
    found = run(pool(0, 400, 4), None, 300, fl=1.0, progress=lambda *call: calls.append(call))
    assert 40 <= len(calls) <= 60
    assert calls[-1][:2] == (300, 300)
    assert calls[-1][2]["value"] == pytest.approx(found.gains.sum())
    assert [step for step, _, _ in calls] == sorted({step for step, _, _ in calls})


def test_what_does_not_fit_together_is_refused() -> None:
    z = pool(0, 6, 2)
    groups = np.zeros(6, np.int64)
    for message, given_ in (
        ("budget 7 .* 6", {"budget": 7}),
        ("budget -1", {"budget": -1}),
        ("finite", {"linear": np.array([0, 0, np.nan, 0, 0, 0])}),
        ("6 finite", {"linear": np.zeros(5)}),
        ("fl -1", {"fl": -1.0}),
        ("cost nothing", {"costs": np.array([1, 1, 0, 1, 1, 1])}),
        ("together", {"groups": groups}),
        ("below 0", {"groups": groups, "quotas": []}),
        ("budget 3 .* 2", {"groups": groups, "quotas": [2], "budget": 3}),
    ):
        with pytest.raises(ValueError, match=message):
            run(z, **given_)
    z[3, 1] = np.nan
    with pytest.raises(ValueError, match="z must be finite"):
        run(z, None, 2, fl=1.0)
    with pytest.raises(ValueError, match="eager"):
        GreedyOptions("eager")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="epsilon"):
        GreedyOptions(epsilon=0.0)
