import os

import numpy as np
import pytest

from dagster_datamask.selection.exact import GridSum
from dagster_datamask.selection.objectives import BadInput, QualityDiversity
from dagster_datamask.selection.pool import prepare_pool
from dagster_datamask.selection.solve import solve
from dagster_datamask.selection.vectors import DeviceVectors, First, Second, Vectors, as_single, nearest

from .oracles import ids_of, vectors


def prepared(n: int, d: int, dtype: type) -> Vectors:
    z = (vectors(np.random.default_rng(n), n, d, 0.2) * 1.7).astype(dtype)
    return prepare_pool(QualityDiversity(z, None, 0.0), ids_of(n)).vectors


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("n", [0, 1, 2, 9000])
def test_products_are_those_of_unit_rows(dtype: type, n: int) -> None:
    found = prepared(n, 11, dtype)
    unit = found.double(np.arange(n))
    v, matrix = np.linspace(-1, 1, 11), np.outer(np.arange(11), np.linspace(0, 1, 11))
    np.testing.assert_allclose(First().rough(found, v), unit @ v, atol=1e-6)
    np.testing.assert_allclose(
        Second().rough(found, matrix.ravel()), np.einsum("ij,jk,ik->i", unit, matrix, unit), atol=1e-4
    )


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_rows_product_depends_on_nothing_but_the_row(dtype: type) -> None:
    found = prepared(5000, 37, dtype)
    rng = np.random.default_rng(0)
    v, matrix = rng.standard_normal(37), rng.standard_normal((37, 37))
    shuffled = rng.permutation(5000)[:777]
    some = Vectors(np.ascontiguousarray(found.stored[shuffled]), found.inverse[shuffled])
    assert (some.dots(v) == found.dots(v)[shuffled]).all()
    assert (some.forms(matrix) == found.forms(matrix)[shuffled]).all()


def test_half_precision_is_widened_exactly_from_a_read_only_map() -> None:
    rows = np.random.default_rng(0).standard_normal((3000, 40)).astype(np.float16)
    rows.flags.writeable = False
    assert (as_single(rows) == rows.astype(np.float32)).all()
    assert as_single(rows[:0]).shape == (0, 40)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_device_takes_the_same_sums_and_nearly_the_same_products(dtype: type) -> None:
    ours = prepared(4000, 24, dtype)
    theirs = DeviceVectors(ours, "cpu")
    rng = np.random.default_rng(1)
    v, matrix = rng.standard_normal(24), rng.standard_normal((24, 24))
    np.testing.assert_allclose(theirs.dots(v), ours.dots(v), atol=2e-6)
    np.testing.assert_allclose(theirs.forms(matrix), ours.forms(matrix), atol=2e-5)
    rows = np.sort(rng.permutation(4000)[:1500])
    one, two = GridSum(24), GridSum(24)
    ours.add_to(rows, one)
    theirs.add_to(rows, two)
    assert (one.total == two.total).all()
    theirs.add_to(rows, two, sign=-1)
    assert not two.total.any()


def test_the_solver_on_a_device_certifies_the_same_value(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    f = QualityDiversity(vectors(rng, 3000, 16, 0.8).astype(np.float16), rng.uniform(0, 1, 3000), 0.2, "per_pool")
    here = solve(f, 300, solver="certified", ids=ids_of(3000))
    monkeypatch.setattr(
        "dagster_datamask.selection.solve.on_device", lambda vectors_, accelerator: DeviceVectors(vectors_, "cpu")
    )
    there = solve(f, 300, solver="certified", ids=ids_of(3000))
    assert there.value == pytest.approx(here.value, abs=1e-6)
    assert there.certificate.gap <= here.certificate.gap + 1e-6


class TestNearest:
    def test_it_is_the_centroid_of_largest_cosine(self) -> None:
        centroids = np.eye(3, dtype=np.float32)
        labels, cosines = nearest(np.array([[0.6, 0.8, 0.0], [5.0, 0.0, 0.0], [0.7, 0.7, 0.1], [0, 0, 0]]), centroids)
        assert labels.tolist() == [1, 0, 0, 0]
        assert cosines.dtype == np.float32 and cosines == pytest.approx([0.8, 1.0, 0.7 / 0.99**0.5, 0.0])
        assert [x.shape for x in nearest(np.empty((0, 3)), centroids)] == [(0,), (0,)]

    @pytest.mark.parametrize(("d", "k"), [(3, 1), (33, 5), (384, 20), (384, 113), (768, 100)])
    def test_a_row_s_bits_depend_on_nothing_but_the_row(self, d: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
        rng = np.random.default_rng(d)
        rows = vectors(rng, 1300, d, 0.5).astype(np.float16)
        centroids = vectors(rng, k, d, 0.5).astype(np.float32)
        centroids /= np.linalg.norm(centroids, axis=1, keepdims=True)
        labels, cosines = nearest(rows, centroids)
        assert cosines == pytest.approx(np.clip(_cosines(rows, centroids).max(axis=1), -1, 1), abs=1e-5)
        for size in (1, 2, 3, 7, 100, 255, 257):
            parts = [nearest(rows[a : a + size], centroids) for a in range(0, 260, size)]
            assert np.concatenate([part[0] for part in parts])[:260].tolist() == labels[:260].tolist()
            assert np.concatenate([part[1] for part in parts])[:260].tobytes() == cosines[:260].tobytes()
        order = rng.permutation(1300)
        for cores in ({0}, {0, 1, 2}):
            monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
            assert nearest(rows[order], centroids)[1].tobytes() == cosines[order].tobytes()

    def test_a_row_that_is_not_finite_is_named(self) -> None:
        rows = np.ones((300, 2), np.float32)
        rows[[270, 280], 1] = np.nan, np.inf
        with pytest.raises(BadInput, match="row 270: the vector is not finite; leave it out or embed it again"):
            nearest(rows, np.eye(2, dtype=np.float32))


def _cosines(rows: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    wide = rows.astype(np.float64)
    return wide @ centroids.astype(np.float64).T / np.linalg.norm(wide, axis=1, keepdims=True)
