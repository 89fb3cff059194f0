from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_datamask.selection.objectives import QualityDiversity
from dagster_datamask.selection.solve import solve
from dagster_datamask.selection.streaming import union_bound

from .oracles import all_values, ids_of, vectors

Cut = Callable[[], Iterable[tuple[np.ndarray, np.ndarray | None]]]


def cut(z: np.ndarray, q: np.ndarray | None, size: int) -> Cut:
    return lambda: ((z[a : a + size], None if q is None else q[a : a + size]) for a in range(0, len(z), size))


@given(
    n=st.integers(1, 8),
    d=st.integers(1, 3),
    lam=st.sampled_from([0.0, 0.2, 1.0]),
    block=st.integers(1, 4),
    resolution=st.sampled_from([1.0, 0.1, 2.0**-18]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=80, deadline=None)
def test_never_below_the_best_mask(n: int, d: int, lam: float, block: int, resolution: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    z, q, v = vectors(rng, n, d), rng.uniform(-3, 20, n), rng.standard_normal(d)
    constants = (float(q.min()), float(q.max())) if n > 1 else (0.0, 0.0)
    f = QualityDiversity(z, q, lam, "minmax", constants)
    for size in range(1, n + 1):
        found = union_bound(cut(z, q, block), v, lam=lam, budget=size, constants=constants, resolution=resolution)
        linear = lam * (q - q.min()) / np.ptp(q) if n > 1 else np.zeros(n)
        scores = np.sort(linear - 2 * (1 - lam) * z @ v)[::-1]
        true = (1 - lam) * v @ v + scores[:size].mean()
        assert found.rows == n
        assert true <= found.upper_bound + 1e-15
        assert found.upper_bound <= true + found.slack + 2 * found.numerical_error + 1e-12
        assert found.slack <= resolution
        assert max(all_values(f, size).values()) <= found.upper_bound


def test_agrees_with_the_bound_of_the_pool_in_memory() -> None:
    rng = np.random.default_rng(0)
    z, q = vectors(rng, 3000, 16, 0.4).astype(np.float16), rng.uniform(0, 15, 3000)
    f = QualityDiversity(z, q, 0.1, "minmax", (1.0, 14.0))
    found = solve(f, 300, solver="certified", ids=ids_of(3000))
    streamed = union_bound(cut(z, q, 700), found.certificate.point, lam=0.1, budget=300, constants=(1.0, 14.0))
    assert 0 <= streamed.upper_bound - found.certificate.upper_bound + 1e-12 <= streamed.slack + 2e-12
    assert streamed.slack < 1e-6
    # the mask's own mean gives a bound as well, and one that needs no state but the mask
    own = union_bound(cut(z, q, 700), found.mean_vector, lam=0.1, budget=300, constants=(1.0, 14.0))
    assert found.value <= own.upper_bound < found.value + 1e-2


def test_zero_and_impossible_budgets() -> None:
    z, v = np.eye(3), np.zeros(3)
    empty = union_bound(cut(z, None, 2), v, lam=0.0, budget=0)
    assert (empty.upper_bound, empty.rows) == (0.0, 3)
    assert union_bound(lambda: (), v, lam=0.0, budget=0).rows == 0
    with pytest.raises(ValueError, match="budget 4 is not between 0 and the 3 documents"):
        union_bound(cut(z, None, 2), v, lam=0.0, budget=4)


def test_bad_rows_are_named() -> None:
    z = np.eye(4)
    with pytest.raises(ValueError, match="the block at row 0 has none"):
        union_bound(cut(z, None, 2), np.zeros(4), lam=0.5, budget=1)
    with pytest.raises(ValueError, match="the score of row 3 is not finite"):
        union_bound(cut(z, np.array([1, 1, 1, np.nan]), 2), np.zeros(4), lam=0.5, budget=1)
    for value in (0.0, np.nan, np.inf):
        bad = z.copy()
        bad[2] = value
        with pytest.raises(ValueError, match="the embedding of row 2 is not finite or has no direction"):
            union_bound(cut(bad, None, 2), np.ones(4), lam=0.0, budget=1)
    with pytest.raises(ValueError, match="not finite and in order"):
        union_bound(cut(z, None, 2), np.zeros(4), lam=0.0, budget=1, constants=(2.0, 1.0))
    with pytest.raises(ValueError, match="λ must lie"):
        union_bound(cut(z, None, 2), np.zeros(4), lam=2.0, budget=1)
