import math
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_datamask.selection import facility_location
from dagster_datamask.selection.facility_location import Coverage, FacilityLocation, group_values, product_error

from .oracles import vectors


def unit(z: np.ndarray) -> np.ndarray:
    wide = z.astype(np.float64)
    return wide / np.linalg.norm(wide, axis=1, keepdims=True)


def fl(z: np.ndarray, chosen: list[int]) -> float:
    """FL from its definition, in float64."""
    if not chosen:
        return 0.0
    return float(np.maximum(unit(z) @ unit(z[chosen]).T, 0.0).max(axis=1).mean())


def pool(seed: int, n: int, d: int, shift: float = 0.0, copies: int = 0) -> np.ndarray:
    z = vectors(np.random.default_rng(seed), n, d, shift).astype(np.float32)
    z[n - copies :] = z[:copies]
    return z


def covered(facility: FacilityLocation, chosen: list[int]) -> facility_location.Cover:
    return facility.cover(np.array(chosen, np.int64), lambda positions: unit(facility.z[positions]))


shapes = {
    "n": st.integers(0, 10),
    "d": st.integers(1, 5),
    "shift": st.sampled_from([0.0, 1.0]),
    "seed": st.integers(0, 10**6),
    "kernel": st.sampled_from(["dense", "blocks"]),
}


@given(**shapes, data=st.data())
@settings(max_examples=80, deadline=None)
def test_value_and_gains_against_the_definition(
    n: int, d: int, shift: float, seed: int, kernel: str, data: st.DataObject
) -> None:
    z = pool(seed, n, d, shift, copies=data.draw(st.integers(0, n // 2)))
    chosen = data.draw(st.lists(st.integers(0, n - 1), unique=True)) if n else []
    facility = FacilityLocation(z, kernel=kernel)
    cover = covered(facility, chosen)
    assert cover.value == pytest.approx(fl(z, chosen), abs=1e-14)
    gains = facility.gains(cover)
    exact = np.array([fl(z, [*chosen, x]) - fl(z, chosen) for x in range(n)])
    assert gains.shape == (n,)
    assert np.all(gains >= exact - 1e-15)
    assert np.all(gains <= exact + 4.5 * product_error(d))
    assert not gains[chosen].any()


@given(**shapes, fraction=st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_the_bound_made_of_value_and_gains_holds_for_every_mask(
    n: int, d: int, shift: float, seed: int, kernel: str, fraction: float
) -> None:
    z = pool(seed, n, d, shift)
    chosen = list(range(round(fraction * n)))
    facility = FacilityLocation(z, kernel=kernel)
    cover = covered(facility, chosen)
    gains = np.sort(facility.gains(cover))[::-1]
    for size in range(1, min(n, 4) + 1):
        best = max(fl(z, list(u)) for u in combinations(range(n), size))
        assert best <= cover.value + cover.error + math.fsum(gains[:size])


def test_negative_cosines_count_as_zero() -> None:
    z = np.array([[1, 0], [-1, 0], [0, 1]], np.float32)
    facility = FacilityLocation(z)
    cover = covered(facility, [0])
    assert cover.value == pytest.approx(1 / 3)
    np.testing.assert_array_equal(cover.nearest, [1.0, 0.0, 0.0])
    # from nothing: itself, and nobody else
    np.testing.assert_allclose(facility.gains(covered(facility, [])), [1 / 3] * 3, atol=1e-5)


@pytest.mark.parametrize("crowded", [0, 1000])
def test_the_nearest_member_is_found_in_float64_among_near_ties(crowded: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # members that float32 products cannot tell apart, evaluated pair by pair and as one product
    monkeypatch.setattr(facility_location, "_CROWDED", crowded)
    rng = np.random.default_rng(0)
    centre = vectors(rng, 1, 64)
    stored = centre + 1e-4 * rng.standard_normal((300, 64))
    stored[200:] = vectors(rng, 100, 64)
    z = unit(stored).astype(np.float32)
    chosen = np.arange(0, 300, 2)
    cover = FacilityLocation(z).cover(chosen, lambda positions: unit(stored[positions]))
    exact = np.maximum(unit(stored) @ unit(stored[chosen]).T, 0.0).max(axis=1)
    np.testing.assert_allclose(cover.nearest, exact, rtol=0, atol=1e-14)
    assert abs(cover.value - float(sum(map(Fraction, exact.tolist())) / 300)) <= cover.error


def test_the_product_error_bounds_float32_products() -> None:
    stored = vectors(np.random.default_rng(1), 400, 300, 0.5).astype(np.float16)
    exact = unit(stored) @ unit(stored).T
    z = unit(stored).astype(np.float32)
    worst = np.abs(z @ z.T - exact).max()
    assert 0 < worst <= product_error(300)


def test_a_dense_kernel_that_does_not_fit_is_refused_with_the_estimate() -> None:
    z = pool(0, 1000, 2)
    with pytest.raises(ValueError, match=r"1000 documents takes 0\.004 GB and the limit is 0\.003 GB"):
        FacilityLocation(z, kernel="dense", memory_limit=3e6)
    assert not FacilityLocation(z, memory_limit=3e6).is_dense
    assert FacilityLocation(z, memory_limit=6e6).is_dense
    with pytest.raises(ValueError, match="sparse"):
        FacilityLocation(z, kernel="sparse")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="float64"):
        FacilityLocation(z.astype(np.float64))


@pytest.mark.parametrize("kernel", ["dense", "blocks"])
@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_coverage_keeps_gains_through_the_change_to_lists(kernel: str, shift: float) -> None:
    z = pool(3, 700, 24, shift, copies=20)
    facility = FacilityLocation(z, kernel=kernel)
    coverage = Coverage(facility)
    everyone = np.arange(700)
    chosen: list[int] = []
    previous = coverage.gains(everyone)
    for u in np.random.default_rng(0).permutation(700)[:120].tolist():
        coverage.add(u)
        chosen.append(u)
        gains = coverage.gains(everyone)
        # products formed anew may differ in their last bit
        assert np.all(gains <= previous + (0.0 if kernel == "dense" else 2.0**-22))
        assert np.all(np.abs(gains[chosen]) <= (0.0 if kernel == "dense" else 2.0**-22))
        if len(chosen) % 40 == 0:
            upper = facility.gains(covered(facility, chosen))
            np.testing.assert_allclose(gains, upper, atol=4.5 * product_error(24))
        previous = gains
    assert coverage.current is not None


def test_lists_change_no_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    z = pool(4, 600, 16)
    everyone = np.arange(600)
    found = []
    for small in (512, 10**9):
        monkeypatch.setattr(facility_location, "_SMALL", small)
        coverage = Coverage(FacilityLocation(z))
        for u in range(100):
            coverage.add(u)
        assert (coverage.current is not None) == (small == 512)
        # read twice: the second time from lists that have shrunk
        found += [coverage.gains(everyone), coverage.gains(everyone)]
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


@pytest.mark.parametrize("size", [0, 1, 5, 12])
@pytest.mark.parametrize("strip", [1, 50, 10**6])
def test_group_values_against_the_definition(size: int, strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facility_location, "_GROUPED", strip)
    rng = np.random.default_rng(5)
    z = pool(5, 12, 4)
    masks = np.zeros((6, 12), np.float32)
    for row in masks:
        row[rng.permutation(12)[:size]] = 1.0
    exact = [fl(z, np.flatnonzero(row).tolist()) for row in masks]
    np.testing.assert_allclose(group_values(np, masks, z, size), exact, atol=1e-6)
    found = group_values(torch, torch.from_numpy(masks), torch.from_numpy(z), size)
    np.testing.assert_allclose(found.numpy(), exact, atol=1e-6)


def test_group_values_of_masks_of_several_sizes() -> None:
    z = pool(6, 9, 3)
    masks = np.array([[1, 0, 0, 1, 0, 0, 1, 0, 0], [0, 0, 0, 0, 1, 0, 0, 0, 0], np.zeros(9)], np.float32)
    exact = [fl(z, np.flatnonzero(row).tolist()) for row in masks]
    np.testing.assert_allclose(group_values(np, masks, z, 3), exact, atol=1e-6)
    found = group_values(torch, torch.from_numpy(masks), torch.from_numpy(z), 3)
    np.testing.assert_allclose(found.numpy(), exact, atol=1e-6)
