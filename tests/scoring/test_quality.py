import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_datamask.scoring.quality import calibrate, combine

NONE = {"dclm": [], "edu": [], "wiki": []}
unit = st.floats(0, 1)


def present(n: int) -> dict[str, list[str | None]]:
    return {part: [None] * n for part in NONE}


def test_known_values() -> None:
    quality, reasons = combine(
        np.array([0.0, 1.0, 0.5, 1.0]),
        np.array([0.0, 5.0, 2.5, 7.0]),
        np.array([0.0, 1.0, 0.2, 0.0]),
        reasons=present(4),
    )
    assert quality.tolist() == [0.0, 15.0, 6.0, 10.0] and reasons == [None] * 4


@pytest.mark.parametrize("n", [0, 1, 2])
def test_few_rows(n: int) -> None:
    column = np.full(n, 0.5)
    quality, reasons = combine(column, column * -3, column, reasons=present(n))
    assert quality.tolist() == [5.0] * n and reasons == [None] * n


def test_a_missing_part_makes_the_quality_null_and_is_named() -> None:
    nan = np.nan
    quality, reasons = combine(
        np.array([nan, 0.1, nan]),
        np.array([1.0, nan, nan]),
        np.array([0.2, 0.2, 0.2]),
        reasons={
            "dclm": ["no_tokens", None, "null_text"],
            "edu": [None, "non_finite", "null_text"],
            "wiki": [None] * 3,
        },
    )
    assert np.isnan(quality).all()
    assert reasons == ["dclm:no_tokens", "edu:non_finite", "dclm:null_text,edu:null_text"]


def test_a_part_of_weight_zero_is_not_needed() -> None:
    quality, reasons = combine(
        np.array([1.0]),
        np.array([np.nan]),
        np.array([0.0]),
        reasons={"dclm": [None], "edu": ["no_tokens"], "wiki": [None]},
        weights=(1, 0, 1),
    )
    assert quality.tolist() == [7.5] and reasons == [None]


@given(unit, st.floats(-10, 20), unit, st.tuples(unit, unit, unit).filter(lambda w: sum(w) > 1e-3))
def test_range_and_weights(dclm: float, edu: float, wiki: float, weights: tuple[float, float, float]) -> None:
    columns = [np.array([x]) for x in (dclm, edu, wiki)]
    quality, _ = combine(*columns, reasons=present(1), weights=weights)
    parts = np.array([5 * dclm, min(max(edu, 0), 5), 5 * wiki])
    assert 0 <= quality[0] <= 15
    np.testing.assert_allclose(quality[0], 3 * np.dot(weights, parts) / sum(weights), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dclm": np.array([0.5, 1.5])}, r"dclm, row 1: 1\.5 is not a probability"),
        ({"wiki": np.array([-0.1, 0.5])}, "wiki, row 0"),
        ({"edu": np.array([np.nan, 1])}, "edu, row 0: score nan with reason None"),
        ({"edu": np.array([1.0])}, r"edu: \[1\] scores and 2 reasons"),
        ({"weights": (1, -1, 1)}, "non-negative"),
        ({"weights": (0, 0, 0)}, "not all zero"),
        ({"weights": (1, np.nan, 1)}, "non-negative"),
        ({"reasons": {"dclm": [None, None]}}, "must name dclm, edu, wiki"),
    ],
)
def test_bad_input_is_named(change: dict, message: str) -> None:
    good = {"dclm": np.zeros(2), "edu": np.zeros(2), "wiki": np.zeros(2), "reasons": present(2)}
    with pytest.raises(ValueError, match=message):
        combine(**{**good, **change})


def test_calibration_against_numpy_and_a_count() -> None:
    sample = np.linspace(0, 15, 1001)[::-1].copy()
    sample[3] = np.nan
    found = calibrate(sample, 0.45)
    scored = sample[~np.isnan(sample)]
    assert (found.n, found.n_missing) == (1000, 1)
    assert found.q_lo == np.quantile(scored, 0.001) and found.q_hi == np.quantile(scored, 0.999)
    assert (scored < found.prune_threshold).sum() == 450


@given(st.lists(st.floats(0, 15), min_size=1, max_size=30), st.floats(0, 0.99))
def test_the_threshold_prunes_at_most_the_ratio(values: list[float], ratio: float) -> None:
    found = calibrate(np.array(values), ratio)
    below = int((np.array(values) < found.prune_threshold).sum())
    at_or_below = int((np.array(values) <= found.prune_threshold).sum())
    wanted = min(int(ratio * len(values) + 0.5), len(values) - 1)
    assert below <= wanted < at_or_below
    assert found.q_lo <= found.q_hi


@pytest.mark.parametrize(
    ("sample", "ratio", "message"),
    [
        ([], 0.45, "none of the 0 sampled rows"),
        ([np.nan, np.nan], 0.45, "none of the 2 sampled rows"),
        ([1.0, np.inf], 0.45, "row 1: inf"),
        ([1.0], 1.0, "prune ratio 1.0"),
        ([[1.0]], 0.45, "one column"),
    ],
)
def test_what_cannot_calibrate(sample: list, ratio: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate(np.array(sample), ratio)


def test_one_and_two_rows() -> None:
    assert calibrate(np.array([3.0])).prune_threshold == 3.0
    assert calibrate(np.array([3.0, 1.0])).prune_threshold == 3.0
