import numpy as np
import pytest

from dagster_datamask.scoring.base import ScoredBatch


@pytest.mark.parametrize("n", [0, 1, 2])
def test_a_batch_keeps_scores_and_reasons_together(n: int) -> None:
    batch = ScoredBatch(np.array([0.5, np.nan])[:n], [None, "no_tokens"][:n])
    assert len(batch.scores) == len(batch.reasons) == n and not batch.notes


@pytest.mark.parametrize(
    ("scores", "reasons", "message"),
    [
        ([0.1, np.nan], [None, None], "row 1: score nan with reason None"),
        ([0.1, 0.2], ["no_tokens", None], "row 0: score 0.1 with reason 'no_tokens'"),
        ([np.inf], [None], "row 0: score inf"),
        ([0.1], [None, None], r"must be float64\[2\]"),
    ],
)
def test_disagreement_is_an_error(scores: list[float], reasons: list[str | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScoredBatch(np.array(scores), reasons)


def test_dtype_is_checked() -> None:
    with pytest.raises(ValueError, match="float32"):
        ScoredBatch(np.zeros(1, dtype=np.float32), [None])
