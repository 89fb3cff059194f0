from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_datamask.selection.budgets import Budget, documents
from dagster_datamask.selection.certified import (
    CertifiedOptions,
    _Hull,
    _largest_eigenvalue,
    _project,
    relax,
    uniform_start,
)
from dagster_datamask.selection.objectives import QualityDiversity
from dagster_datamask.selection.passes import Vertex
from dagster_datamask.selection.pool import prepare_pool
from dagster_datamask.selection.solve import pool_passes, solve

from .oracles import all_values, feasible, ids_of, objective, vectors, worth

MINILM = Path(__file__).parents[2] / "../shared/data/embeddings_minilm_l6_fp16.parquet"


@given(
    n=st.integers(1, 16),
    d=st.integers(1, 5),
    lam=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    scale=st.sampled_from(["per_pool", "raw", "zscore"]),
    shift=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_value_and_bound_enclose_the_optimum(
    n: int, d: int, lam: float, scale: str, shift: float, seed: int, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, min(n, 6)))
    f = objective(np.random.default_rng(seed), n, d, lam, scale, shift)
    found = solve(f, size, solver="certified", ids=ids_of(n))
    pool = prepare_pool(f, ids_of(n))
    z, linear, beta = pool.vectors.double(np.arange(n)), pool.linear, pool.terms.beta
    best = max(linear[list(u)].mean() - beta * np.sum(z[list(u)].mean(axis=0) ** 2) for u in all_values(f, size))
    assert found.indices.size == size
    assert found.value <= best + 1e-12
    assert best <= found.certificate.upper_bound
    assert found.certificate.gap >= 0
    # so few masks are all looked at, and the bound is the best of them
    assert found.value == pytest.approx(best, abs=1e-12)
    assert found.certificate.gap < 1e-11


def test_small_pools_that_are_not_enumerated_are_solved_by_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagster_datamask.selection.certified._ENUMERATED", 0)
    missed = 0
    for seed in range(12):
        f = objective(np.random.default_rng(seed), 14, 3, 0.1)
        found = solve(f, 5, solver="certified", ids=ids_of(14))
        missed += found.value < max(all_values(f, 5).values()) - 1e-9
    assert missed <= 1


def test_the_relaxation_closes_its_own_gap_on_isotropic_vectors() -> None:
    f = QualityDiversity(vectors(np.random.default_rng(0), 2000, 48, 0.05).astype(np.float32), None, 0.0)
    pool = prepare_pool(f, ids_of(2000))
    passes, part = pool_passes(pool, documents(200))
    start = uniform_start(passes, pool.feature_means(), pool.linear_mean)
    state = relax(passes, start, CertifiedOptions(gap=1e-8))
    weights = part.base
    assert state.bound - state.value < 1e-9
    assert weights.min() >= 0
    assert weights.max() <= 1
    assert weights.sum() == pytest.approx(200, abs=1e-6)
    np.testing.assert_allclose(weights @ f.embeddings / 200, state.point, atol=1e-6)


@given(
    st.lists(st.floats(-3, 3), min_size=1, max_size=12),
    st.floats(0, 1),
)
@settings(deadline=None)
def test_projection_is_the_nearest_point(values: list[float], share: float) -> None:
    point = np.array(values)
    room = share * point.size
    found = _project(point, room)
    assert found.sum() == pytest.approx(room, abs=1e-9)
    assert found.min() >= 0
    assert found.max() <= 1
    # nearest: no direction that keeps the sum and the box makes an acute angle with what was removed
    removed = point - found
    for i in range(point.size):
        for j in range(point.size):
            if found[i] < 1 - 1e-9 and found[j] > 1e-9:
                assert removed[i] <= removed[j] + 1e-7


def test_the_step_length_covers_the_largest_eigenvalue() -> None:
    for shift in (0.0, 0.1, 2.0):
        z = vectors(np.random.default_rng(4), 500, 30, shift).astype(np.float32)
        largest = np.linalg.eigvalsh(z.T @ z)[-1]
        assert largest * 0.98 <= steepest(z, {"pws": 1.0}) <= largest * 1.2
        outer = np.einsum("ij,ik->ijk", z, z).reshape(500, -1)
        both = np.hstack([np.sqrt(0.5) * z, np.sqrt(2.0) * outer])
        largest = np.linalg.eigvalsh(both @ both.T)[-1]
        assert largest * 0.98 <= steepest(z, {"pws": 0.5, "disf_second_moment": 2.0}) <= largest * 1.2
    opposite = np.array([[1.0, 0.0], [-1.0, 0.0]], np.float32)
    assert steepest(opposite, {"pws": 1.0}) >= 2.0


def steepest(z: np.ndarray, diversity: dict[str, float]) -> float:
    pool = prepare_pool(QualityDiversity(z, None, 0.0, diversity=diversity), ids_of(len(z)))
    return _largest_eigenvalue(pool_passes(pool, documents(1))[0], z)


@given(k=st.integers(1, 7), d=st.integers(1, 4), seed=st.integers(0, 10**6))
@settings(deadline=None)
def test_the_hull_is_corrected_to_its_best_point(k: int, d: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    points, qualities = rng.standard_normal((k, d)) + 0.5, rng.standard_normal(k)
    passes = _Remembered(k)
    hull = _Hull(d)
    hull.start(points[0], float(qualities[0]))
    best = qualities[0] - points[0] @ points[0]
    for i in range(1, k):
        passes.vertex = i
        hull.add(passes, Vertex(points[i], float(qualities[i]), 0.0))
        hull.correct()
        value = hull.linear() - hull.point() @ hull.point()
        assert value >= best - 1e-9
        best = value
        # optimal over the hull of what was kept: no vertex of it ascends, and the new one does not either
        slopes = qualities - 2.0 * points @ hull.point()
        assert slopes[i] <= hull.linear() - 2.0 * hull.point() @ hull.point() + 1e-8
    point = hull.point()
    hull.collapse(passes)
    assert passes.weights.min() >= 0
    assert passes.weights.sum() == pytest.approx(1.0)
    np.testing.assert_allclose(passes.weights @ points, point, atol=1e-9)


class _Remembered:
    """What a hull asks of the passes: here a document is a vertex."""

    def __init__(self, k: int) -> None:
        self.weights = np.zeros(k)
        self.weights[0] = 1.0
        self.vertex = 0
        self.slots: dict[int, int] = {}

    def remember(self, slot: int) -> None:
        self.slots[slot] = self.vertex

    def collapse(self, start: float, shares: dict[int, float]) -> None:
        self.weights *= start
        for slot, share in shares.items():
            self.weights[self.slots[slot]] += share


def test_anisotropic_pools_need_few_passes() -> None:
    rng = np.random.default_rng(0)
    f = QualityDiversity(vectors(rng, 20_000, 32, 1.5).astype(np.float32), rng.random(20_000), 0.5, "per_pool")
    found = solve(f, 2000, solver="certified", ids=ids_of(20_000))
    assert found.certificate.gap <= 1e-5
    assert found.certificate.share > 0.999
    assert found.passes < 60


def test_a_cosine_of_one_between_all_documents_is_solved_at_once() -> None:
    f = QualityDiversity(np.ones((50, 4), np.float16), np.arange(50.0), 0.5, "per_pool")
    found = solve(f, 5, solver="certified", ids=ids_of(50))
    assert found.indices.tolist() == [45, 46, 47, 48, 49]
    assert found.certificate.gap < 1e-6


@pytest.mark.parametrize(
    ("settings_", "message"),
    [({"gap": -1.0}, "gap"), ({"gap": float("nan")}, "gap"), ({"passes": 0}, "passes"), ({"moves": -1}, "moves")],
)
def test_options_that_make_no_sense_are_refused(settings_: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CertifiedOptions(**settings_)


@pytest.mark.skipif(not MINILM.exists(), reason=f"needs {MINILM.name} of the shared data")
def test_real_web_pages_reach_the_reference() -> None:
    table = pq.read_table(MINILM)
    ids = table["id"].to_pylist()
    z = table["embedding"].combine_chunks().flatten().to_numpy().reshape(len(ids), -1)
    found = solve(QualityDiversity(z, None, 0.0), 1259, solver="certified", ids=ids)
    assert found.value >= -0.0058302
    assert -0.005830 < found.certificate.upper_bound <= -0.0058256
    assert found.certificate.gap <= 1e-5
    assert found.certificate.share > 0.9999


@pytest.mark.parametrize("diversity", [{"pws": 1.0}, {"disf_second_moment": 1.0}])
@pytest.mark.parametrize("kind", ["documents", "quotas", "tokens"])
@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_isotropic_pools_close_their_gap(diversity: dict[str, float], kind: str, shift: float) -> None:
    # the relaxation's optimum is the uniform weights here, and says nothing about which documents
    rng = np.random.default_rng(0)
    n, d = 4000, 12
    z = (rng.standard_normal((n, d)) + shift).astype(np.float32)
    costs, groups = rng.integers(20, 900, n), rng.integers(0, 3, n)
    budget = {
        "documents": documents(400),
        "quotas": Budget((100, 150, 150), None, groups),
        "tokens": Budget((int(costs.sum()) // 10,), costs),
    }[kind]
    f = QualityDiversity(z, None, 0.0, diversity=diversity)
    found, drawn = (solve(f, budget, solver=s, ids=ids_of(n)) for s in ("certified", "random"))
    left, before = found.certificate.gap, found.certificate.upper_bound - drawn.value
    assert found.value > drawn.value
    assert left < (0.02 if kind != "tokens" else 0.2) * before


def test_quotas_of_a_few_documents_are_enumerated_too() -> None:
    rng = np.random.default_rng(1)
    f = objective(rng, 9, 3, 0.2)
    budget = Budget((2, 1), None, np.array([0, 1, 0, 0, 1, 0, 1, 0, 1]))
    found = solve(f, budget, solver="certified", ids=ids_of(9))
    best = max(worth(f, mask) for mask in feasible(9, budget))
    assert found.value == pytest.approx(best, abs=1e-12)
    assert found.certificate.gap < 1e-11
