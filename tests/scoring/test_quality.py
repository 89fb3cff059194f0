import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_datamask import keyed
from dagster_datamask.scoring.quality import PARTS, Standard, calibrate, combine

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


def columns_of(rng: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    return {"dclm": rng.random(n) ** 3, "edu": rng.normal(2, 2, n), "wiki": rng.random(n)}


class TestStandings:
    @pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (2.0, 0.5, 1.0), (0.0, 1.0, 3.0)])
    def test_z_scores_are_those_of_the_sample_and_linear(self, weights: tuple[float, float, float]) -> None:
        rng = keyed.rng(0, "zscore")
        sample, scored = columns_of(rng, 501), columns_of(rng, 40)
        standard = Standard.of("zscore", sample)
        quality, reasons = combine(**scored, reasons=present(40), weights=weights, standard=standard)
        five = {part: np.clip(x, 0, 5) if part == "edu" else 5 * x for part, x in sample.items()}
        z = sum(
            w * ((np.clip(x, 0, 5) if part == "edu" else 5 * x) - five[part].mean()) / five[part].std()
            for (part, x), w in zip(scored.items(), weights, strict=True)
        ) / sum(weights)
        np.testing.assert_allclose(quality, 7.5 + 2.5 * z, rtol=1e-12)
        assert reasons == [None] * 40
        own, _ = combine(**sample, reasons=present(501), weights=weights, standard=standard)
        assert own.mean() == pytest.approx(7.5)

    def test_a_score_far_from_the_sample_is_not_cut_off(self) -> None:
        sample = {
            "dclm": np.linspace(0, 0.01, 100),
            "edu": np.linspace(0, 0.05, 100),
            "wiki": np.linspace(0, 0.01, 100),
        }
        one = {"dclm": np.array([0.5, 1.0]), "edu": np.array([2.5, 5.0]), "wiki": np.array([0.5, 1.0])}
        quality, _ = combine(**one, reasons=present(2), standard=Standard.of("zscore", sample))
        assert 15 < quality[0] < quality[1]

    def test_ranks_are_the_share_below_and_half_the_share_equal(self) -> None:
        sample = {
            "dclm": np.array([0.1, 0.2, 0.2, 0.4]),
            "edu": np.array([0.0, -1.0, 3.0, 9.0]),
            "wiki": np.array([0.5]),
        }
        one = {
            "dclm": np.array([0.2, 0.0, 1.0, 0.3, 0.4]),
            "edu": np.array([-7.0, 1.0, 5.0, 4.0, 6.0]),
            "wiki": np.array([0.5, 0.4, 0.6, 0.5, 0.5]),
        }
        quality, _ = combine(**one, reasons=present(5), standard=Standard.of("rank", sample))
        expected = 5 * (
            np.array([2 / 4, 0, 1, 3 / 4, 3.5 / 4])
            + np.array([1 / 4, 2 / 4, 3.5 / 4, 3 / 4, 3.5 / 4])
            + np.array([1 / 2, 0, 1, 1 / 2, 1 / 2])
        )
        np.testing.assert_allclose(quality, expected)

    @given(st.integers(1, 40), st.integers(0, 2**32), st.sampled_from(["zscore", "rank"]))
    def test_a_better_part_never_lowers_the_quality(self, n: int, seed: int, how: str) -> None:
        rng = np.random.default_rng(seed)
        standard = Standard.of(how, columns_of(rng, n))
        low = {part: np.minimum(x, 0.9) for part, x in columns_of(rng, 5).items()}
        for part in PARTS:
            high = low | {part: low[part] + rng.random(5) * 0.1}
            before, _ = combine(**low, reasons=present(5), standard=standard)
            after, _ = combine(**high, reasons=present(5), standard=standard)
            assert (after >= before - 1e-12).all()
            if how == "rank":
                assert (before >= 0).all() and (after <= 15).all()

    def test_a_scorer_constant_in_the_sample_says_nothing(self) -> None:
        sample = {"dclm": np.array([0.5, 0.5]), "edu": np.array([1.0, 3.0]), "wiki": np.array([0.2, 0.4])}
        one = {"dclm": np.array([0.1, 0.9]), "edu": np.array([2.0, 2.0]), "wiki": np.array([0.3, 0.3])}
        quality, _ = combine(**one, reasons=present(2), standard=Standard.of("zscore", sample))
        np.testing.assert_allclose(quality, [7.5, 7.5])

    @pytest.mark.parametrize("value", [0.018112, 0.1, 0.7, 0.0, 1.0])
    def test_a_constant_is_one_whatever_its_mean_is_rounded_to(self, value: float) -> None:
        """Of 1000 equal scores the mean is rounded, and their standard deviation is not always 0."""
        rng = keyed.rng(0, "constant")
        sample = columns_of(rng, 1000) | {"wiki": np.full(1000, value)}
        standard = Standard.of("zscore", sample)
        assert {row["scorer"]: row["sd"] for row in standard.told()}["wiki"] == 0.0
        others = {"dclm": np.full(3, 0.5), "edu": np.full(3, 2.5)}
        scored = others | {"wiki": np.clip([value, value * 1.01 + 0.001, value * 0.99], 0, 1)}
        quality, _ = combine(**scored, reasons=present(3), standard=standard)
        z = [(5 * 0.5 - standard.scores["dclm"].mean()) / standard.scores["dclm"].std()]
        z.append((2.5 - standard.scores["edu"].mean()) / standard.scores["edu"].std())
        np.testing.assert_allclose(quality, 7.5 + 5 / 6 * sum(z), rtol=1e-12)

    def test_what_differs_in_the_last_digits_of_single_precision_is_constant(self) -> None:
        noise = keyed.rng(0, "noise").integers(-2, 3, 500) * np.finfo(np.float32).eps
        column = {"dclm": 0.3 * (1 + noise), "edu": 2.0 * (1 + noise), "wiki": 1e-5 * (1 + noise)}
        quality, _ = combine(**column, reasons=present(500), standard=Standard.of("zscore", column))
        assert quality.tolist() == [7.5] * 500
        # a narrow spread is one all the same
        narrow = {part: values * (1 + np.linspace(0, 1e-4, 500)) for part, values in column.items()}
        quality, _ = combine(**narrow, reasons=present(500), standard=Standard.of("zscore", narrow))
        assert quality.std() == pytest.approx(2.5, rel=1e-3)

    def test_a_sample_without_a_score_is_named_where_it_is_needed(self) -> None:
        sample = {"dclm": np.array([np.nan, np.nan]), "edu": np.array([1.0, np.nan]), "wiki": np.array([0.2, 0.4])}
        one = {"dclm": np.array([0.1]), "edu": np.array([2.0]), "wiki": np.array([0.3])}
        for how in ("zscore", "rank"):
            standard = Standard.of(how, sample)
            assert [len(standard.scores[part]) for part in PARTS] == [0, 1, 2]
            with pytest.raises(ValueError, match="dclm: no document of the calibration sample has a score"):
                combine(**one, reasons=present(1), standard=standard)
            assert np.isfinite(combine(**one, reasons=present(1), standard=standard, weights=(0, 1, 1))[0]).all()


LACKING = {
    "dclm": np.array([np.nan, 0.4, np.nan, 0.4]),
    "edu": np.array([3.0, np.nan, np.nan, 3.0]),
    "wiki": np.array([0.2, 0.2, np.nan, 0.2]),
}
REASONS = {
    "dclm": ["no_tokens", None, "null_text", None],
    "edu": [None, "non_finite", "null_text", None],
    "wiki": [None, None, "null_text", None],
}


class TestMissing:
    @pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (2.0, 1.0, 3.0)])
    def test_the_others_are_averaged_and_the_reason_is_recorded(self, weights: tuple[float, float, float]) -> None:
        quality, reasons = combine(**LACKING, reasons=REASONS, weights=weights, missing="others")
        a, b, c = weights
        expected = [
            3 * (b * 3 + c * 1) / (b + c),
            3 * (a * 2 + c * 1) / (a + c),
            np.nan,
            3 * (a * 2 + b * 3 + c) / (a + b + c),
        ]
        np.testing.assert_allclose(quality, expected)
        assert reasons == ["dclm:no_tokens", "edu:non_finite", "dclm:null_text,edu:null_text,wiki:null_text", None]

    def test_null_takes_no_part_of_a_sum(self) -> None:
        quality, reasons = combine(**LACKING, reasons=REASONS)
        assert np.isnan(quality).tolist() == [True, True, True, False]
        assert reasons[:2] == ["dclm:no_tokens", "edu:non_finite"]

    def test_a_part_of_weight_zero_alone_is_no_quality(self) -> None:
        columns = {"dclm": np.array([np.nan]), "edu": np.array([3.0]), "wiki": np.array([np.nan])}
        reasons = {"dclm": ["no_tokens"], "edu": [None], "wiki": ["no_tokens"]}
        quality, why = combine(**columns, reasons=reasons, weights=(1, 0, 1), missing="others")
        assert np.isnan(quality[0]) and why == ["dclm:no_tokens,wiki:no_tokens"]

    @pytest.mark.parametrize("how", ["zscore", "rank"])
    def test_standings_of_the_others_are_averaged(self, how: str) -> None:
        standard = Standard.of(how, columns_of(keyed.rng(1, "missing"), 50))
        quality, _ = combine(**LACKING, reasons=REASONS, standard=standard, missing="others")
        expected = (3 / 2) * (standard.place("edu", np.array([3.0])) + standard.place("wiki", np.array([1.0])))
        np.testing.assert_allclose(quality[0], expected[0])


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
