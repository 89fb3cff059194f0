from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_datamask.selection.budgets import Budget, documents
from dagster_datamask.selection.certificates import (
    Evaluation,
    NegativeGap,
    baseline,
    certify,
    evaluate,
    numerical_error,
    upper_bound,
)
from dagster_datamask.selection.objectives import BadInput, Given, QualityDiversity, Score
from dagster_datamask.selection.passes import Part, Passes
from dagster_datamask.selection.policy_gradient import PolicyGradientOptions
from dagster_datamask.selection.pool import Pool, prepare_pool
from dagster_datamask.selection.solve import pool_passes, solve

from .oracles import all_values, feasible, ids_of, objective, value_of, vectors, worth

FEW = PolicyGradientOptions(steps=20, batch=1.0, group=8)


def prepared(f: QualityDiversity, budget: Budget | int) -> tuple[Pool, Passes]:
    pool = prepare_pool(f, ids_of(f.embeddings.shape[0]))
    return pool, pool_passes(pool, budget if isinstance(budget, Budget) else documents(budget))[0]


def evaluated(pool: Pool, passes: Passes, rows: list[int]) -> Evaluation:
    def mark(part: Part) -> None:
        part.best[:] = False
        part.best[rows] = True

    passes.map(mark)
    return evaluate(passes, pool.terms)


@given(
    n=st.integers(1, 9),
    d=st.integers(1, 4),
    lam=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    dtype=st.sampled_from([np.float16, np.float32, np.float64]),
    seed=st.integers(0, 10**6),
    reach=st.sampled_from([0.0, 0.3, 1.0, 20.0]),
)
@settings(max_examples=60, deadline=None)
def test_the_bound_holds_for_every_mask_at_every_point(
    n: int, d: int, lam: float, dtype: type, seed: int, reach: float
) -> None:
    rng = np.random.default_rng(seed)
    base = objective(rng, n, d, lam)
    f = QualityDiversity(base.embeddings.astype(dtype), base.quality, lam, "per_pool")
    for size in range(1, n + 1):
        pool, passes = prepared(f, size)
        point = reach * rng.standard_normal(passes.size)
        values = all_values(f, size)
        best = max(values.values())
        assert upper_bound(passes, point) + numerical_error(passes, pool.terms, point, size) >= best
        for mask, expected in list(values.items())[:20]:
            assert evaluated(pool, passes, list(mask)).value == pytest.approx(expected, abs=1e-12)
        mean = np.mean(list(values.values()))
        found = baseline(passes, pool.feature_means(), pool.linear_mean, pool.terms.weights)
        assert found == pytest.approx(mean, abs=1e-12)


def draw_budget(rng: np.random.Generator, n: int, kind: str) -> Budget:
    costs = rng.integers(1, 9, n) if "tokens" in kind else None
    groups = rng.integers(0, 3, n) if "quotas" in kind else None
    there = Budget((0,) * (3 if groups is not None else 1), costs, groups).available(n)
    return Budget(tuple(int(rng.integers(0, most + 1)) for most in there), costs, groups)


@given(
    n=st.integers(1, 9),
    kind=st.sampled_from(["documents", "documents, quotas", "tokens", "tokens, quotas"]),
    lam=st.sampled_from([0.0, 0.3, 1.0]),
    scale=st.sampled_from(["per_pool", "raw", "zscore"]),
    mix=st.sampled_from(["pws", "disf_second_moment", "facility_location", "all"]),
    solver=st.sampled_from(["certified", "greedy", "policy_gradient", "random"]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=150, deadline=None)
def test_no_feasible_mask_exceeds_a_certified_bound(
    n: int, kind: str, lam: float, scale: str, mix: str, solver: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    # around the origin: half of the cosines are negative
    z = vectors(rng, n, int(rng.integers(1, 4))).astype(rng.choice([np.float16, np.float32, np.float64]))
    diversity = {"pws": 0.6, "disf_second_moment": 0.7, "facility_location": 1.5} if mix == "all" else {mix: 1.0}
    if scale == "zscore":
        diversity = {"pws": 1.0}
    if solver == "certified" and "facility_location" in diversity:
        solver = "greedy"
    scores = {"influence": Score(rng.standard_normal(n), float(rng.normal()))} if rng.random() < 0.5 else {}
    f = QualityDiversity(z, rng.uniform(0, 15, n), lam, scale, None, diversity, scores)
    budget = draw_budget(rng, n, kind)
    found = solve(f, budget, solver=solver, ids=ids_of(n), options=None if solver != "policy_gradient" else FEW)
    held = found.indices.tolist()
    if not budget.amount:
        assert not held
        return
    masks = feasible(n, budget)
    assert held in masks or not held
    if not masks:
        return
    if held and scale != "zscore":
        assert found.value == pytest.approx(worth(f, held, budget.costs), abs=1e-9)
    if scale == "zscore":
        pool, passes = prepared(f, budget)
        best = max(evaluated(pool, passes, mask).value for mask in masks)
    else:
        best = max(worth(f, mask, budget.costs) for mask in masks)
    assert found.certificate.upper_bound >= best - 1e-12
    assert found.certificate.gap >= 0


def test_the_bound_beside_what_is_given() -> None:
    rng = np.random.default_rng(5)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        z, q = vectors(rng, 14, 3), rng.uniform(0, 1, 14)
        whole = QualityDiversity(z, q, 0.3, "raw")
        first = list(range(4))
        given_ = Given(4, z[:4].mean(axis=0), float(q[:4].mean()))
        f = QualityDiversity(z[4:], q[4:], 0.3, "raw", given=given_)
        found = solve(f, 3, solver="certified", ids=ids_of(10))
        every = {u: value_of(whole, first + [4 + i for i in u], q) for u in all_values(f, 3)}
        assert found.value == pytest.approx(every[tuple(found.indices.tolist())], abs=1e-12)
        assert found.value == pytest.approx(max(every.values()), abs=1e-12)
        assert found.certificate.upper_bound >= max(every.values())
        assert found.certificate.baseline == pytest.approx(np.mean(list(every.values())), abs=1e-12)


def test_numerical_error_covers_exact_arithmetic() -> None:
    # integers normalise to exact rationals when their norm is one: (3, 4)/5 and its like
    stored = np.array([[3, 4], [4, -3], [-5, 12], [8, 15], [0, 7], [20, -21]], float)
    norms = [5, 5, 13, 17, 7, 29]
    exact = [[Fraction(int(x), r) for x in row] for row, r in zip(stored, norms, strict=True)]
    point = np.array([0.1, -0.3])
    for size in range(1, 7):
        pool, passes = prepared(QualityDiversity(stored, None, 0.0), size)
        chosen = list(range(size))
        mean = [sum(exact[i][k] for i in chosen) / size for k in range(2)]
        value = -sum(x * x for x in mean)
        w = [Fraction(x) for x in point]
        scores = sorted((-2 * sum(a * b for a, b in zip(row, w, strict=True)) for row in exact), reverse=True)
        bound = sum(x * x for x in w) + sum(scores[:size]) / size
        error = numerical_error(passes, pool.terms, point, size)
        off = abs(Fraction(evaluated(pool, passes, chosen).value) - value)
        assert off + abs(Fraction(upper_bound(passes, point)) - bound) <= Fraction(error)
        assert error < 1e-12


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_bound_equals_the_one_that_scores_every_document_in_float64(dtype: type) -> None:
    rng = np.random.default_rng(0)
    f = QualityDiversity(
        (rng.standard_normal((3000, 48)) + 0.5).astype(dtype), rng.uniform(0, 15, 3000), 0.2, "per_pool"
    )
    for size in (1, 300, 2999, 3000):
        pool, passes = prepared(f, size)
        z = f.embeddings.astype(np.float64)
        z /= np.linalg.norm(z, axis=1, keepdims=True)
        beta = pool.terms.beta
        scores = np.sort(pool.linear - 2 * beta * z @ pool.mean)[::-1]
        expected = beta * (pool.mean @ pool.mean) + scores[:size].mean()
        assert upper_bound(passes, np.sqrt(beta) * pool.mean) == pytest.approx(expected, abs=1e-13)


def test_a_value_above_the_bound_is_an_error_and_not_a_zero_gap() -> None:
    pool, passes = prepared(objective(np.random.default_rng(0), 6, 3, 0.0), 2)
    evaluation = evaluated(pool, passes, [0, 1])
    more = {"means": pool.feature_means(), "linear": pool.linear_mean}
    bound = certify(passes, pool.terms, evaluation, {}, pool.mean, **more).upper_bound
    assert certify(passes, pool.terms, replace(evaluation, value=bound), {}, pool.mean, **more).gap == 0.0
    with pytest.raises(NegativeGap, match="exceeds the upper bound"):
        certify(passes, pool.terms, replace(evaluation, value=np.nextafter(bound, 1)), {}, pool.mean, **more)


def test_the_certificate_says_what_it_is_about() -> None:
    f = objective(np.random.default_rng(0), 6, 3, 0.5)
    certificate = solve(f, 2, solver="random", ids=ids_of(6)).certificate
    checksum = prepare_pool(f, ids_of(6)).checksum
    assert certificate.feasible_set == {
        "documents": 6,
        "budget": 2,
        "unit": "documents",
        "vectors": checksum,
        "dtype": "float64",
        "lambda": 0.5,
        "scale": "per_pool",
        "constants": None,
        "diversity": {"pws": 1.0},
        "scores": {},
        "quotas": None,
        "given": None,
    }


def test_the_checksum_binds_every_bit_to_its_id_and_not_to_its_place() -> None:
    rng = np.random.default_rng(0)
    z, ids = rng.standard_normal((6, 3)).astype(np.float16), ids_of(6)
    of = lambda vectors_, names: prepare_pool(QualityDiversity(vectors_, None, 0.0), names).checksum  # noqa: E731
    shuffled = [3, 0, 5, 1, 4, 2]
    assert of(z[shuffled], [ids[i] for i in shuffled]) == of(z, ids)
    changed = z.copy()
    changed[2, 1] = np.nextafter(changed[2, 1], np.float16(9))
    negative = z.copy()
    negative[4] *= -1
    others = [of(changed, ids), of(negative, ids), of(z[:, [1, 0, 2]], ids), of(z[shuffled], ids), of(z[:5], ids[:5])]
    assert len({of(z, ids), *others}) == 6


def test_no_share_where_there_is_nothing_to_gain() -> None:
    f = QualityDiversity(np.ones((5, 2)), None, 0.0)
    certificate = solve(f, 2, solver="random", ids=ids_of(5)).certificate
    assert certificate.share is None
    assert "no mask is better than a uniform one" in str(certificate.reason)
    empty = solve(f, 0, solver="random", ids=ids_of(5)).certificate
    assert (empty.upper_bound, empty.gap, empty.share) == (0.0, 0.0, None)
    assert "budget 0" in str(empty.reason)


def test_the_authors_disf_has_no_certificate_and_says_so() -> None:
    f = replace(objective(np.random.default_rng(0), 12, 3, 0.5), diversity={"disf": 1.0, "pws": 0.5})
    found = solve(f, 5, solver="random", ids=ids_of(12))
    certificate = found.certificate
    assert (certificate.upper_bound, certificate.gap, certificate.share) == (None, None, None)
    assert "no known bound" in str(certificate.reason)
    assert found.value == pytest.approx(worth(f, found.indices.tolist()), abs=1e-9)


def test_evaluation_parts_add_up() -> None:
    f = objective(np.random.default_rng(3), 9, 4, 0.3)
    pool, passes = prepared(f, 3)
    rows = [1, 4, 6]
    found = evaluated(pool, passes, rows)
    assert found.value == pytest.approx(0.3 * found.quality + 0.7 * found.diversity, abs=1e-15)
    assert found.quality_raw == pytest.approx(f.quality[rows].mean(), abs=1e-12)
    assert found.value == pytest.approx(value_of(f, rows), abs=1e-12)
    np.testing.assert_allclose(found.mean_vector, f.embeddings[rows].mean(axis=0), atol=1e-15)


@pytest.mark.parametrize("level", [1e6, 1e9, 1e12])
def test_terms_that_cancel_are_covered_by_the_error(level: float) -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        quality = rng.uniform(0.5, 1.0, 30) * level
        other = Score(-quality + rng.standard_normal(30), 0.5)
        f = QualityDiversity(vectors(rng, 30, 3), quality, 0.5, "raw", scores={"other": other})
        found = solve(f, 7, solver="top_k", ids=ids_of(30))
        exact = (
            sum(
                Fraction(float(quality[i])) * Fraction(1, 2) + Fraction(float(other.values[i])) / 2
                for i in found.indices
            )
            / 7
        )
        mean = f.embeddings[found.indices].mean(axis=0)
        assert found.certificate.gap >= 0
        assert (
            abs(found.value - float(exact - Fraction(float(mean @ mean)) / 2))
            <= found.certificate.numerical_error + 1e-12
        )


@pytest.mark.parametrize("n", [300, 700])
@pytest.mark.parametrize("lam", [0.9999, 1.0])
def test_an_enumerated_optimum_is_covered_by_the_error(n: int, lam: float) -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        quality = np.full(n, float(rng.uniform(1, 9)))
        quality[int(rng.integers(0, n))] = float(rng.uniform(1, 9))
        f = QualityDiversity(vectors(rng, n, 2), quality, lam, "raw")
        best, top = (solve(f, n - 1, solver=solver, ids=ids_of(n)).certificate for solver in ("certified", "top_k"))
        assert 0 <= best.gap < 1e-8
        assert top.gap >= 0


def test_given_quality_far_from_the_pools_is_covered_by_the_error() -> None:
    for seed in range(30):
        rng = np.random.default_rng(seed)
        z = vectors(rng, 20, 3)
        before = Given(7, z[:7].mean(axis=0), float(rng.uniform(5, 15)))
        f = QualityDiversity(z[7:], np.full(13, float(rng.choice([0.0, 1e-9]))), 0.999, "raw", given=before)
        for size in (0, 3, 13):
            assert solve(f, size, solver="certified", ids=ids_of(13)).certificate.gap >= 0


def test_objectives_of_any_size_are_certified_or_refused() -> None:
    rng = np.random.default_rng(0)
    z = vectors(rng, 40, 3)
    for size in (1e-170, 1e-300, 1e150):
        quality = rng.uniform(1, 2, 40) * size
        found = solve(QualityDiversity(z, quality, 1.0, "raw"), 9, solver="certified", ids=ids_of(40))
        assert found.certificate.gap <= 1e-9 * size
    for scale, quality in (("zscore", rng.uniform(1, 2, 40) * 1e-200), ("per_pool", rng.uniform(-1, 1, 40) * 1.7e308)):
        with pytest.raises(BadInput, match=f"cannot be brought to scale '{scale}'"):
            solve(QualityDiversity(z, quality, 0.5, scale), 9, solver="certified", ids=ids_of(40))
