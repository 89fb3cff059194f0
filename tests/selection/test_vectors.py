import numpy as np
import pytest

from dagster_datamask.selection.exact import GridSum
from dagster_datamask.selection.objectives import QualityDiversity
from dagster_datamask.selection.pool import prepare_pool
from dagster_datamask.selection.solve import solve
from dagster_datamask.selection.vectors import DeviceVectors, First, Second, Vectors, as_single

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
