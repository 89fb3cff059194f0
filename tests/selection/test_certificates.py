from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_datamask.selection.certificates import (
    NegativeGap,
    baseline,
    certify,
    evaluate,
    numerical_error,
    search_dots,
    upper_bound,
)
from dagster_datamask.selection.objectives import QualityDiversity

from .oracles import all_values, ids_of, objective, value_of


@given(
    n=st.integers(1, 9),
    d=st.integers(1, 4),
    lam=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    dtype=st.sampled_from([np.float16, np.float32, np.float64]),
    seed=st.integers(0, 10**6),
    reach=st.sampled_from([0.0, 0.3, 1.0, 20.0]),
)
@settings(max_examples=80, deadline=None)
def test_the_bound_holds_for_every_mask_at_every_point(
    n: int, d: int, lam: float, dtype: type, seed: int, reach: float
) -> None:
    rng = np.random.default_rng(seed)
    base = objective(rng, n, d, lam)
    f = QualityDiversity(base.embeddings.astype(dtype), base.quality, lam, "per_pool")
    pool = f.prepare(ids_of(n))
    position = np.empty(n, int)
    position[pool.order] = np.arange(n)
    v = reach * rng.standard_normal(d)
    for size in range(1, n + 1):
        values = all_values(f, size)
        best = max(values.values())
        bound = upper_bound(pool, size, v) + numerical_error(pool, size, v)
        assert bound >= best
        for mask, worth in list(values.items())[:20]:
            evaluation = evaluate(pool, position[list(mask)])
            assert evaluation.value == pytest.approx(worth, abs=1e-12)
            certificate = certify(pool, evaluation, size, v)
            assert certificate.upper_bound >= evaluation.value
            assert certificate.gap == certificate.upper_bound - evaluation.value
        mean = np.mean(list(values.values()))
        assert baseline(pool, size) == pytest.approx(mean, abs=1e-12)


def test_numerical_error_covers_exact_arithmetic() -> None:
    # integers normalise to exact rationals when their norm is one: (3, 4)/5 and its like
    stored = np.array([[3, 4], [4, -3], [-5, 12], [8, 15], [0, 7], [20, -21]], float)
    norms = [5, 5, 13, 17, 7, 29]
    exact = [[Fraction(int(x), r) for x in row] for row, r in zip(stored, norms, strict=True)]
    pool = QualityDiversity(stored, None, 0.0).prepare(ids_of(6))
    v = np.array([0.1, -0.3])
    for size in range(1, 7):
        chosen = pool.order[:size]
        mean = [sum(exact[i][k] for i in chosen) / size for k in range(2)]
        worth = -sum(x * x for x in mean)
        w = [Fraction(x) for x in v]
        scores = sorted((-2 * sum(a * b for a, b in zip(row, w, strict=True)) for row in exact), reverse=True)
        bound = sum(x * x for x in w) + sum(scores[:size]) / size
        error = numerical_error(pool, size, v)
        assert abs(Fraction(evaluate(pool, np.arange(size)).value) - worth) + abs(
            Fraction(upper_bound(pool, size, v)) - bound
        ) <= Fraction(error)
        assert error < 1e-12


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_bound_equals_the_one_that_scores_every_document_in_float64(dtype: type) -> None:
    rng = np.random.default_rng(0)
    f = QualityDiversity(
        (rng.standard_normal((3000, 48)) + 0.5).astype(dtype), rng.uniform(0, 15, 3000), 0.2, "per_pool"
    )
    pool = f.prepare(ids_of(3000))
    v = pool.mean
    for size in (1, 300, 2999, 3000):
        scores = np.sort(pool.linear - 2 * pool.beta * pool.dots(np.arange(3000), v))[::-1]
        expected = pool.beta * (v @ v) + scores[:size].mean()
        assert upper_bound(pool, size, v) == pytest.approx(expected, abs=1e-14)


def test_the_search_pass_does_not_depend_on_where_a_row_lies() -> None:
    rng = np.random.default_rng(0)
    f = QualityDiversity(rng.standard_normal((5000, 37)).astype(np.float32), None, 0.0)
    pool = f.prepare(ids_of(5000))
    v = rng.standard_normal(37)
    whole = search_dots(pool, v)
    apart = np.concatenate([np.einsum("ij,j->i", pool.vectors[i : i + 1], v.astype(np.float32)) for i in range(5000)])
    assert (whole == apart).all()


def test_a_value_above_the_bound_is_an_error_and_not_a_zero_gap() -> None:
    pool = objective(np.random.default_rng(0), 6, 3, 0.0).prepare(ids_of(6))
    evaluation = evaluate(pool, np.arange(2))
    bound = certify(pool, evaluation, 2, pool.mean).upper_bound
    assert certify(pool, replace(evaluation, value=bound), 2, pool.mean).gap == 0.0
    with pytest.raises(NegativeGap, match="exceeds the upper bound"):
        certify(pool, replace(evaluation, value=np.nextafter(bound, 1)), 2, pool.mean)


def test_the_certificate_says_what_it_is_about() -> None:
    f = objective(np.random.default_rng(0), 6, 3, 0.5)
    pool = f.prepare(ids_of(6))
    certificate = certify(pool, evaluate(pool, np.arange(2)), 2, pool.mean)
    assert certificate.feasible_set == {
        "documents": 6,
        "budget": 2,
        "vectors": pool.checksum,
        "dtype": "float64",
        "lambda": 0.5,
        "scale": "per_pool",
        "constants": None,
    }
    shuffled = [3, 0, 5, 1, 4, 2]
    again = QualityDiversity(f.embeddings[shuffled], f.quality[shuffled], 0.5, "per_pool")
    assert again.prepare([ids_of(6)[i] for i in shuffled]).checksum == pool.checksum
    other = f.embeddings.copy()
    other[2, 1] = np.nextafter(other[2, 1], 1)
    assert QualityDiversity(other, None, 0.0).prepare(ids_of(6)).checksum != pool.checksum


def test_no_share_where_there_is_nothing_to_gain() -> None:
    pool = QualityDiversity(np.ones((5, 2)), None, 0.0).prepare(ids_of(5))
    certificate = certify(pool, evaluate(pool, np.arange(2)), 2, pool.mean)
    assert certificate.share is None
    assert "no mask is better than a uniform one" in str(certificate.reason)
    empty = certify(pool, evaluate(pool, np.arange(0)), 0, pool.mean)
    assert (empty.upper_bound, empty.gap, empty.share) == (0.0, 0.0, None)
    assert "budget 0" in str(empty.reason)


def test_evaluation_parts_add_up() -> None:
    f = objective(np.random.default_rng(3), 9, 4, 0.3)
    pool = f.prepare(ids_of(9))
    found = evaluate(pool, np.array([1, 4, 6]))
    rows = pool.order[[1, 4, 6]]
    assert found.value == pytest.approx(0.3 * found.quality + 0.7 * found.diversity, abs=1e-15)
    assert found.quality_raw == pytest.approx(f.quality[rows].mean(), abs=1e-12)
    assert found.value == pytest.approx(value_of(f, rows.tolist()), abs=1e-12)
    np.testing.assert_allclose(found.mean_vector, f.embeddings[rows].mean(axis=0), atol=1e-15)
