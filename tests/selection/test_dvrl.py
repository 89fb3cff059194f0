from typing import Any

import numpy as np
import pytest
import torch

from dagster_datamask.accelerator import Accelerator, MemoryPlanError
from dagster_datamask.selection.dvrl import (
    DvrlOptions,
    Valued,
    _batches,
    _gradient,
    _moments,
    _Network,
    _with_mean,
    dvrl,
    quality_and_similarity,
)
from dagster_datamask.selection.sampling import top_s

from .oracles import vectors


def pool(seed: int, n: int, d: int, shift: float = 0.0) -> np.ndarray:
    return vectors(np.random.default_rng(seed), n, d, shift).astype(np.float32)


def run(
    z: np.ndarray, linear: np.ndarray, pws: float, budget: int, seed: int = 0, split: int = 0, **options: Any
) -> Valued:
    return dvrl(
        z,
        linear,
        values=quality_and_similarity(pws),
        budget=budget,
        options=DvrlOptions(**{"steps": 200, "batch": 200, "group": 64, **options}),
        seed=seed,
        split=split,
        accelerator=Accelerator(),
    )


def value_of(z: np.ndarray, linear: np.ndarray, pws: float, chosen: np.ndarray) -> float:
    """f by the pair-wise cosines."""
    rows = z[chosen].astype(np.float64)
    return float(linear[chosen].mean() - pws * (rows @ rows.T).mean())


@pytest.mark.parametrize("pws", [0.0, 0.7])
def test_values_are_f_of_each_mask(pws: float) -> None:
    rng = np.random.default_rng(0)
    z, linear = pool(0, 30, 5), rng.uniform(size=30)
    mask = rng.uniform(size=(6, 30)) < 0.3
    found = quality_and_similarity(pws)(
        torch, torch.from_numpy(mask).float(), torch.from_numpy(z), torch.from_numpy(linear).float()
    )
    expected = [value_of(z, linear, pws, np.flatnonzero(row)) for row in mask]
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)


def test_best_quality_is_found_where_nothing_else_counts() -> None:
    rng = np.random.default_rng(1)
    linear = rng.permutation(400) / 400.0
    found = run(pool(1, 400, 6), linear, 0.0, 40, steps=600)
    assert linear[found.positions].mean() > 0.99 * linear[top_s(linear, 40)].mean()


def test_best_of_two_levels_are_found_exactly() -> None:
    linear = np.zeros(300)
    best = np.sort(np.random.default_rng(2).choice(300, 30, replace=False))
    linear[best] = 1.0
    assert run(pool(2, 300, 6), linear, 0.0, 30).positions.tolist() == best.tolist()


def test_quality_is_found_in_the_embedding_alone() -> None:
    """A score that is not handed over: rewarded, and to be read from the vectors."""
    z = pool(3, 1000, 6)
    best = top_s(z[:, 0], 100)

    def values(xp: Any, mask: Any, rows: Any, linear: Any) -> Any:
        assert not linear.any()
        return mask @ rows[:, 0] / mask.sum(1)

    found = dvrl(
        z,
        np.zeros(1000),
        values=values,
        budget=100,
        options=DvrlOptions(steps=200, batch=200, group=64),
        seed=0,
        split=0,
        accelerator=Accelerator(),
    )
    assert z[found.positions, 0].mean() > 0.95 * z[best, 0].mean()


@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_gains_most_of_what_there_is_to_gain_over_random(lam: float) -> None:
    rng = np.random.default_rng(4)
    n, size = 1500, 150
    z = pool(4, n, 16, 0.7)
    linear, pws = lam * rng.uniform(size=n), 1.0 - lam
    random = np.mean([value_of(z, linear, pws, rng.choice(n, size, replace=False)) for _ in range(20)])
    # the concave bound at a point near the optimum: no mask is worth more
    v = z.mean(axis=0, dtype=np.float64)
    bound = np.inf
    for k in range(1, 300):
        scores = linear - 2.0 * pws * (z @ v)
        vertex = top_s(scores, size)
        bound = min(bound, pws * v @ v + scores[vertex].mean())
        v += (z[vertex].mean(axis=0, dtype=np.float64) - v) * 2.0 / (k + 2)
    found = run(z, linear, pws, size)
    share = (value_of(z, linear, pws, found.positions) - random) / (bound - random)
    assert 0.85 < share <= 1.0


def test_selection_is_the_top_of_the_scores_and_the_log_tells_of_the_rise() -> None:
    z = pool(5, 600, 8, 0.7)
    entries: list[tuple[int, int, dict]] = []
    found = dvrl(
        z,
        np.zeros(600),
        values=quality_and_similarity(1.0),
        budget=60,
        options=DvrlOptions(steps=120, batch=200),
        seed=0,
        split=0,
        accelerator=Accelerator(),
        progress=lambda *entry: entries.append(entry),
    )
    assert found.positions.tolist() == top_s(found.scores, 60).tolist()
    assert [entry["step"] for entry in found.trajectory] == list(range(2, 121, 2))
    assert entries == [(entry["step"], 120, entry) for entry in found.trajectory]
    assert found.trajectory[-1]["value"] > found.trajectory[0]["value"]
    assert found.passes == 3.0 + 120 * 200 / 600


def test_runs_repeat_bit_for_bit_and_leave_torch_as_it_was() -> None:
    z, linear = pool(6, 400, 8), np.random.default_rng(6).uniform(size=400)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    scores = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            torch.manual_seed(count)
            before = torch.get_rng_state()
            scores.append(run(z, linear, 1.0, 40, steps=40).scores)
            assert torch.get_num_threads() == count
            assert torch.equal(torch.get_rng_state(), before)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
    assert scores[0].tobytes() == scores[1].tobytes()
    assert run(z, linear, 1.0, 40, seed=1, steps=40).scores.tobytes() != scores[0].tobytes()
    assert run(z, linear, 1.0, 40, split=1, steps=40).scores.tobytes() != scores[0].tobytes()


def test_threads_come_back_after_an_error() -> None:
    threads = torch.get_num_threads()

    def fails(xp: Any, mask: Any, rows: Any, linear: Any) -> Any:
        raise RuntimeError("no reward")

    try:
        torch.set_num_threads(3)
        with pytest.raises(RuntimeError, match="no reward"):
            dvrl(
                pool(0, 10, 3),
                np.zeros(10),
                values=fails,
                budget=5,
                options=DvrlOptions(),
                seed=0,
                split=0,
                accelerator=Accelerator(),
            )
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 20])
@pytest.mark.parametrize("kind", ["distinct", "equal", "opposite"])
def test_sizes_and_duplicates(n: int, kind: str) -> None:
    z = pool(7, n, 4)
    if kind != "distinct" and n:
        z = np.repeat(z[:1], n, axis=0)
    if kind == "opposite":
        z[::2] *= -1.0
    linear = np.zeros(n) if kind == "equal" else np.linspace(0.0, 1.0, n)
    for budget in sorted({0, 1, n - 1, n} & set(range(n + 1))):
        found = run(z, linear, 0.5, budget, steps=30)
        assert found.positions.size == np.unique(found.positions).size == budget
        assert found.scores.shape == (n,) and np.isfinite(found.scores).all()
        assert all(np.isfinite(entry["value"]) for entry in found.trajectory)
        if kind == "equal":
            assert found.positions.tolist() == list(range(budget))


def test_a_reward_that_empty_masks_have_none_of_does_no_harm() -> None:
    z = pool(8, 4, 3)

    def values(xp: Any, mask: Any, rows: Any, linear: Any) -> Any:
        return mask @ linear / mask.sum(1)

    linear = np.array([0.0, 0.0, 1.0, 0.0])
    found = dvrl(
        z,
        linear,
        values=values,
        budget=1,
        options=DvrlOptions(steps=200, group=4),
        seed=0,
        split=0,
        accelerator=Accelerator(),
    )
    assert np.isfinite(found.scores).all()
    assert found.positions.tolist() == [2]


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.999])
def test_probabilities_average_the_share(share: float) -> None:
    for spread in (0.0, 1.0, 30.0):
        logits = torch.from_numpy(np.random.default_rng(9).standard_normal(5000) * spread).float()
        chance = _with_mean(logits, share)
        assert float(chance.mean()) == pytest.approx(share, rel=2e-3)
        assert torch.equal(torch.sort(chance[torch.argsort(logits)]).values, chance[torch.argsort(logits)])


def test_gradient_is_that_of_the_expected_reward() -> None:
    """With a baseline of 0, E[f·(M − p)] less its part along c is d E[f]/dh: by enumeration and finite differences."""
    rng = np.random.default_rng(10)
    n, share = 5, 0.4
    logits = rng.standard_normal(n)
    masks = np.array([[mask >> i & 1 for i in range(n)] for mask in range(2**n)], np.float64)
    worth = rng.standard_normal(2**n)

    def expected(h: np.ndarray) -> float:
        p = _with_mean(torch.from_numpy(h), share).numpy()
        return float(np.prod(np.where(masks == 1, p, 1 - p), axis=1) @ worth)

    step = 1e-4
    numeric = [(expected(logits + e) - expected(logits - e)) / (2 * step) for e in np.eye(n) * step]
    p = _with_mean(torch.from_numpy(logits), share)
    weights = np.prod(np.where(masks == 1, p.numpy(), 1 - p.numpy()), axis=1) * worth
    found = _gradient(torch.from_numpy(weights), torch.from_numpy(masks), p)
    np.testing.assert_allclose(found.numpy(), numeric, atol=1e-7)


def test_batches_go_through_the_pool_before_they_repeat() -> None:
    batches = _batches(10, 4, torch.Generator().manual_seed(0))
    for _ in range(3):
        seen = torch.cat([next(batches), next(batches)]).tolist()
        assert len(set(seen)) == 8 and set(seen) <= set(range(10))


def test_moments_are_the_columns() -> None:
    z = pool(11, 5000, 4)
    z[:, 2] = 0.25
    mean, inverse = _moments(z)
    np.testing.assert_allclose(mean, z.mean(axis=0, dtype=np.float64), atol=1e-7)
    np.testing.assert_allclose(inverse[[0, 1, 3]], 1.0 / z[:, [0, 1, 3]].std(axis=0, dtype=np.float64), rtol=1e-5)
    assert inverse[2] == 0.0


def test_network_sees_the_linear_score_only_where_it_varies() -> None:
    z = pool(12, 50, 4)
    options, generator = DvrlOptions(hidden=3, layers=2), torch.Generator().manual_seed(0)
    shapes = {
        kind: [tuple(p.shape) for p in _Network(z, linear, options, generator, "cpu").parameters]
        for kind, linear in (("constant", np.full(50, 0.3)), ("varying", np.arange(50.0)))
    }
    assert shapes["constant"] == [(3, 4), (3,), (3, 3), (3,), (1, 3), (1,)]
    assert shapes["varying"][0] == (3, 5)


def test_batch_grows_where_the_budget_is_small() -> None:
    z, seen = pool(13, 2000, 3), set()

    def values(xp: Any, mask: Any, rows: Any, linear: Any) -> Any:
        seen.add(tuple(mask.shape))
        return mask.sum(1)

    for budget in (20, 100, 1000):
        dvrl(
            z,
            np.zeros(2000),
            values=values,
            budget=budget,
            options=DvrlOptions(steps=1, group=2),
            seed=0,
            split=0,
            accelerator=Accelerator(),
        )
    assert seen == {(2, 2000), (2, 1000), (2, 500)}


def test_batch_that_does_not_fit_is_refused_with_the_estimate() -> None:
    with pytest.raises(MemoryPlanError, match=r"DVRL in batches of 500 needs about 0\.00 GB .* set a smaller batch"):
        dvrl(
            pool(0, 1000, 4),
            np.zeros(1000),
            values=quality_and_similarity(1.0),
            budget=500,
            options=DvrlOptions(),
            seed=0,
            split=0,
            accelerator=Accelerator(memory_limit_gb=1e-6),
        )


@pytest.mark.parametrize("budget", [-1, 6])
def test_budget_outside_the_pool_is_refused(budget: int) -> None:
    with pytest.raises(ValueError, match=f"budget {budget} is not between 0 and the 5 documents"):
        run(pool(0, 5, 3), np.zeros(5), 1.0, budget)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hidden": 0}, "hidden must be 1 or more"),
        ({"batch": 0}, "batch must be 1 or more"),
        ({"group": 0}, "group must be 1 or more"),
        ({"steps": -1}, "must not be negative"),
        ({"layers": -1}, "must not be negative"),
        ({"lr": float("nan")}, "positive and finite"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DvrlOptions(**options)
