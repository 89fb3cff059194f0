import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr

from dagster_datamask import keyed
from dagster_datamask.scoring.agreement import correlations, nearly_constant


def test_correlations_are_scipys_over_the_documents_that_have_both() -> None:
    rng = keyed.rng(0, "agreement")
    dclm = rng.random(300)
    scores = {"dclm": dclm, "edu": np.round(dclm**4 * 5 + rng.normal(0, 1, 300)), "wiki": rng.random(300)}
    scores["edu"][::7] = np.nan
    scores["wiki"][::5] = np.nan
    pairs = correlations(scores)
    assert [(p["first"], p["second"]) for p in pairs] == [("dclm", "edu"), ("dclm", "wiki"), ("edu", "wiki")]
    for pair in pairs:
        a, b = scores[pair["first"]], scores[pair["second"]]
        both = ~np.isnan(a) & ~np.isnan(b)
        assert pair["documents"] == both.sum()
        assert pair["pearson"] == pytest.approx(pearsonr(a[both], b[both])[0])
        assert pair["spearman"] == pytest.approx(spearmanr(a[both], b[both])[0])
    assert pairs[0]["spearman"] > 0.5


@pytest.mark.parametrize("n", [0, 1, 2])
def test_few_documents(n: int) -> None:
    column = np.arange(n, dtype=float)
    (pair,) = correlations({"dclm": column, "edu": -column})
    assert (pair["pearson"], pair["spearman"]) == ((None, None) if n < 2 else (pytest.approx(-1), pytest.approx(-1)))
    assert nearly_constant({"dclm": column}) == {}


def test_a_constant_has_no_correlation() -> None:
    (pair,) = correlations({"dclm": np.ones(5), "edu": np.arange(5.0)})
    assert pair["pearson"] is pair["spearman"] is None


def test_a_scorer_is_named_where_it_hardly_varies() -> None:
    even = np.linspace(0, 1, 1000)
    assert nearly_constant({"dclm": even, "edu": 5 * even, "wiki": even}) == {}
    # the same spread is enough on a scale of 1 and not on Edu's of 5
    assert set(nearly_constant({"dclm": 0.1 * even, "edu": 0.1 * even})) == {"edu"}
    found = nearly_constant({"wiki": np.r_[np.full(991, 0.25), np.linspace(0.3, 1, 9)]})
    assert found == {"wiki": found["wiki"]}
    assert "99.1% of 1000 documents have the score 0.25" in found["wiki"]
    assert nearly_constant({"wiki": np.r_[np.full(990, 0.25), np.linspace(0.3, 1, 10)]}) == {}
    assert nearly_constant({"wiki": np.r_[np.full(99, 0.25), np.full(900, np.nan)]}) == {}
    assert "standard deviation 0 on a scale of 1" in nearly_constant({"wiki": np.full(100, 0.25)})["wiki"]
