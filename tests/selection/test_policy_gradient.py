import numpy as np
import pytest

from dagster_datamask.accelerator import Accelerator
from dagster_datamask.selection.budgets import Budget, documents
from dagster_datamask.selection.objectives import QualityDiversity
from dagster_datamask.selection.policy_gradient import (
    PolicyGradientOptions,
    _Ascent,
    advantages,
    independent_gradient,
    initial_logits,
    learn_mask,
    ordered_gradient,
)
from dagster_datamask.selection.pool import prepare_pool
from dagster_datamask.selection.sampling import TorchDraws, top_s
from dagster_datamask.selection.solve import solve

from .oracles import all_values, ids_of, objective, order_probabilities, value_of, worth

N, S = 6, 3
LOGITS = np.array([0.0, 0.7, -0.4, 1.1, -1.3, 0.2])


def log_probability(logits: np.ndarray, order: tuple[int, ...]) -> float:
    return float(np.log(order_probabilities(logits, len(order))[order]))


def differences(function, logits: np.ndarray, step: float = 1e-5) -> np.ndarray:
    eye = np.eye(len(logits)) * step
    return np.array([(function(logits + e) - function(logits - e)) / (2 * step) for e in eye])


@pytest.mark.parametrize("order", [(3, 0, 5), (4, 2, 1), (0, 1, 2)])
def test_ordered_gradient_is_the_derivative_of_the_log_probability(order: tuple[int, ...]) -> None:
    found = ordered_gradient(LOGITS, np.ones(1), np.array([order]), np)
    np.testing.assert_allclose(found, differences(lambda x: log_probability(x, order), LOGITS), atol=1e-9)


def test_ordered_gradient_is_unbiased_for_any_set_function() -> None:
    rng = np.random.default_rng(5)
    worth = {u: rng.standard_normal() for u in all_values(objective(rng, N, 3, 0.5), S)}
    orders = order_probabilities(LOGITS, S)

    def expectation(logits: np.ndarray) -> float:
        return sum(p * worth[tuple(sorted(o))] for o, p in order_probabilities(logits, S).items())

    # every order once, weighted by probability and value: the enumeration of E[f ∇ln P]
    weights = np.array([p * worth[tuple(sorted(o))] for o, p in orders.items()])
    enumerated = ordered_gradient(LOGITS, weights * len(orders), np.array(list(orders)), np)
    np.testing.assert_allclose(enumerated, differences(expectation, LOGITS), atol=1e-9)


def test_independent_gradient_drops_only_what_cancels() -> None:
    rng = np.random.default_rng(1)
    mask = np.zeros((8, N))
    for row in mask:
        row[rng.choice(N, S, replace=False)] = 1.0
    values = rng.standard_normal(8)
    advantage, saturated = advantages(values, 1.0, np)
    p = np.exp(LOGITS) / np.exp(LOGITS).sum()
    full = (advantage[:, None] * (mask - S * p)).mean(axis=0)
    assert not saturated
    np.testing.assert_allclose(advantage, (values - values.mean()) / values.std(), atol=1e-12)
    np.testing.assert_allclose(independent_gradient(advantage, mask, np), full, atol=1e-12)


def test_both_gradients_agree_between_numpy_and_torch() -> None:
    import torch

    rng = np.random.default_rng(2)
    order = np.array([rng.permutation(N)[:S] for _ in range(5)])
    advantage = rng.standard_normal(5)
    mask = np.zeros((5, N))
    np.put_along_axis(mask, order, 1.0, axis=1)
    t = torch.from_numpy
    for ours, theirs in [
        (ordered_gradient(LOGITS, advantage, order, np), ordered_gradient(t(LOGITS), t(advantage), t(order), torch)),
        (independent_gradient(advantage, mask, np), independent_gradient(t(advantage), t(mask), torch)),
        (advantages(advantage, 1.0, np)[0], advantages(t(advantage), torch.tensor(1.0), torch)[0]),
    ]:
        np.testing.assert_allclose(theirs.numpy(), ours, atol=1e-14)


def test_ordered_gradient_survives_sharp_logits() -> None:
    logits = np.array([250.0, 240.0, -50.0, -350.0])
    found = ordered_gradient(logits, np.ones(1), np.array([[0, 1, 2]]), np)
    # every draw but the first two's order was certain; 1 − Σ p would be 0 or noise from the second on
    first = np.exp(-10.0)
    np.testing.assert_allclose(found, [first, -first, 0.0, 0.0], rtol=1e-4, atol=1e-12)


def test_equal_values_are_a_saturated_group() -> None:
    noise = np.full(8, -0.7, np.float32)
    noise[0] = np.nextafter(noise[0], np.float32(0))
    advantage, saturated = advantages(noise, np.float32(0.7), np)
    assert saturated
    assert not advantage.any()


def test_quality_aware_start() -> None:
    f = QualityDiversity(np.eye(3), np.array([2.0, 4.0, 3.0]), 0.5, "per_pool")
    pool = prepare_pool(f, ids_of(3))
    logits = np.empty(3)
    logits[pool.order] = initial_logits(pool, 1.0, 3.0)
    assert logits.tolist() == [1.0, 3.0, 2.0]
    constant = prepare_pool(QualityDiversity(np.eye(3), np.full(3, 7.0), 0.5, "per_pool"), ids_of(3))
    assert initial_logits(constant, 0.5, 2.0).tolist() == [0.5] * 3
    ignored = prepare_pool(QualityDiversity(np.eye(3), np.array([1.0, 2.0, np.nan]), 0.0), ids_of(3))
    assert initial_logits(ignored, 0.0, 2.0).tolist() == [0.0] * 3


@pytest.mark.parametrize("gradient", ["independent", "ordered"])
@pytest.mark.parametrize("lam", [0.0, 0.3])
def test_finds_the_best_mask_of_a_small_pool(gradient: str, lam: float) -> None:
    f = objective(np.random.default_rng(7), 10, 3, lam)
    values = sorted(all_values(f, 4).values())
    options = PolicyGradientOptions(group=64, lr=1.0, steps=300, batch=1.0, gradient=gradient)
    found = solve(f, 4, solver="policy_gradient", ids=ids_of(10), options=options)
    assert found.value >= values[-3] - 1e-12


def final_value(group: int = 32, lr: float = 10.0, steps: int = 150, batch: float = 1.0, seed: int = 0) -> float:
    f = objective(np.random.default_rng(11), 300, 24, 0.0, shift=0.3)
    options = PolicyGradientOptions(group=group, lr=lr, steps=steps, batch=batch)
    return solve(f, 30, solver="policy_gradient", ids=ids_of(300), options=options, seed=seed).value


def test_learning_rates_have_the_published_pattern() -> None:
    slow, low, high, diverging = (final_value(lr=lr) for lr in (0.01, 1.0, 10.0, 1000.0))
    uniform = solve(objective(np.random.default_rng(11), 300, 24, 0.0, shift=0.3), 30, solver="random", ids=ids_of(300))
    reach = uniform.certificate.upper_bound - uniform.certificate.baseline
    assert max(slow, diverging) < min(low, high)
    assert low - slow > 0.02 * reach
    assert high - diverging > 0.02 * reach


def test_larger_groups_are_better_and_flatten() -> None:
    values = [np.mean([final_value(group=g, steps=100, seed=s) for s in (0, 1, 2)]) for g in (2, 8, 32, 128)]
    assert values == sorted(values)
    assert values[3] - values[2] < values[1] - values[0]


def test_batches_learn_too() -> None:
    start = final_value(steps=0)
    assert final_value(steps=600, batch=0.1) > start
    bound = solve(
        objective(np.random.default_rng(11), 300, 24, 0.0, shift=0.3), 30, solver="certified", ids=ids_of(300)
    )
    assert final_value(steps=600, batch=0.1) - start > 0.7 * (bound.value - start)


def test_saturation_is_skipped_and_said_so() -> None:
    f = QualityDiversity(np.ones((12, 3), np.float32), None, 0.0)
    options = PolicyGradientOptions(steps=20, batch=1.0)
    learned = learn_mask(prepare_pool(f, ids_of(12)), documents(4), options, seed=0, split=0, accelerator=Accelerator())
    assert not learned.logits.any()
    assert sum(entry["skipped"] for entry in learned.trajectory) == 20
    assert all(entry["note"] == "saturated" for entry in learned.trajectory)


@pytest.mark.parametrize("gradient", ["independent", "ordered"])
@pytest.mark.parametrize("batch", [0.5, 1.0])
def test_the_same_steps_run_on_torch(gradient: str, batch: float) -> None:
    f = objective(np.random.default_rng(7), 40, 3, 0.3)
    pool = prepare_pool(f, ids_of(40))
    options = PolicyGradientOptions(group=64, lr=2.0, steps=200, batch=batch, gradient=gradient, final="sampled")
    start = initial_logits(pool, 0.0, 2.0)
    learned = _Ascent(pool, documents(8), options).run(TorchDraws(Accelerator(), 5, 64), start, None)
    best = solve(f, 8, solver="certified", ids=ids_of(40))
    first = value_of(f, pool.order[top_s(start, 8)].tolist())
    assert learned.rows.size == np.unique(learned.rows).size == 8
    assert value_of(f, pool.order[top_s(learned.logits, 8)].tolist()) - first > 0.8 * (best.value - first)
    assert value_of(f, learned.rows.tolist()) > first


def mixed_budgets() -> list[Budget]:
    rng = np.random.default_rng(0)
    costs, groups = rng.integers(1, 30, 60), rng.integers(0, 3, 60)
    return [
        Budget((12,)),
        Budget((3, 6, 2), groups=groups),
        Budget((200,), costs=costs),
        Budget((80, 60, 40), costs=costs, groups=groups),
    ]


@pytest.mark.parametrize("budget", mixed_budgets(), ids=["documents", "quotas", "tokens", "tokens and quotas"])
@pytest.mark.parametrize("metric", ["pws", "facility_location", "disf", "disf_second_moment"])
def test_every_metric_is_learned_under_every_budget_on_numpy_and_torch(budget: Budget, metric: str) -> None:
    base = objective(np.random.default_rng(9), 60, 4, 0.1, shift=0.5)
    f = QualityDiversity(base.embeddings, base.quality, 0.1, "per_pool", diversity={metric: 3.0})
    pool = prepare_pool(f, ids_of(60))
    options = PolicyGradientOptions(group=64, lr=2.0, steps=80, batch=1.0)
    uniform = np.mean(
        [
            worth(f, solve(f, budget, solver="random", ids=ids_of(60), seed=s).indices.tolist(), budget.costs)
            for s in range(10)
        ]
    )
    ascent, start = _Ascent(pool, budget, options), np.zeros(60)
    for learned in (
        learn_mask(pool, budget, options, seed=0, split=0, accelerator=Accelerator()),
        ascent.run(TorchDraws(Accelerator(), 5, 64), start, None),
    ):
        held = learned.rows.tolist()
        assert held in [sorted(held)]
        for g, amount in enumerate(budget.amounts):
            inside = [i for i in held if budget.groups is None or budget.groups[i] == g]
            spent = len(inside) if budget.costs is None else int(budget.costs[inside].sum())
            assert spent == amount or (budget.costs is not None and amount - 30 < spent <= amount)
        assert worth(f, held, budget.costs) > uniform


def test_the_trajectory_counts_steps_and_reports_progress() -> None:
    seen: list[tuple[int, int, dict]] = []
    f = objective(np.random.default_rng(0), 40, 4, 0.5)
    options = PolicyGradientOptions(steps=120, batch=0.5)
    found = solve(f, 8, solver="policy_gradient", ids=ids_of(40), options=options, progress=lambda *a: seen.append(a))
    assert [step for step, _, _ in seen] == [e["step"] for e in found.trajectory]
    assert found.trajectory[-1]["step"] == 120
    assert found.trajectory[-1]["mask_value"] == pytest.approx(found.value, abs=1e-6)
    assert found.passes == pytest.approx(60 + len(seen) * 0.2)


def test_the_sampled_mask_is_one_draw_from_the_logits() -> None:
    f = objective(np.random.default_rng(0), 30, 4, 0.5)
    masks = {
        tuple(
            solve(
                f,
                6,
                solver="policy_gradient",
                seed=seed,
                ids=ids_of(30),
                options=PolicyGradientOptions(steps=0, final="sampled", l_max=0.0),
            ).indices.tolist()
        )
        for seed in range(8)
    }
    assert len(masks) == 8
    assert all(len(set(mask)) == 6 for mask in masks)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group": 1}, "2 masks or more"),
        ({"steps": -1}, "steps must not be negative"),
        ({"batch": 0.0}, "batch is a share"),
        ({"batch": 1.1}, "batch is a share"),
        ({"lr": 0.0}, "learning rate"),
        ({"lr": float("nan")}, "learning rate"),
        ({"l_min": 3.0}, "l_min, l_max"),
        ({"gradient": "exact"}, "gradient 'exact'"),
        ({"final": "best"}, "final 'best'"),
    ],
)
def test_options_that_make_no_sense_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyGradientOptions(**settings)
