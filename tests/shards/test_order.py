"""Exact cuts against NumPy's lexsort."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_datamask.shards.order import Cut, cut, descending, tie_hash

SCORES = st.lists(
    st.one_of(
        st.sampled_from([0.0, -0.0, 1.0, -1.0, 5e-324, -5e-324, 1.7976931348623157e308]),
        st.floats(allow_nan=False, allow_infinity=False),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(scores=SCORES, size=st.integers(1, 7), data=st.data())
def test_the_cut_is_that_of_lexsort(scores: list[float], size: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(scores)))
    ids = [f"d{k}" for k in range(len(scores))]
    values, ties = descending(np.array(scores)), tie_hash(ids)

    def batches():
        for start in range(0, len(scores), size):
            yield values[start : start + size], ties[start : start + size]

    inside = cut(batches, count).inside(values, ties)
    order = np.lexsort((ties, -(np.array(scores) + 0.0)))
    assert set(np.flatnonzero(inside)) == set(order[:count])


@settings(max_examples=60, deadline=None)
@given(scores=SCORES)
def test_keys_order_as_scores_do_and_signed_zeros_are_equal(scores: list[float]) -> None:
    values, keys = np.array(scores), descending(np.array(scores))
    for a in range(len(scores)):
        assert ((keys[a] < keys) == (values[a] > values)).all()
        assert ((keys[a] == keys) == (values[a] == values)).all()


def test_a_cut_beyond_the_documents_says_how_many_there_are() -> None:
    with pytest.raises(ValueError, match="a cut after 3 needs as many documents; there are 2"):
        cut(lambda: [(descending(np.array([1.0, 2.0])), tie_hash(["a", "b"]))], 3)
    with pytest.raises(ValueError, match="there are 0"):
        cut(list, 1)


def test_equal_ids_at_the_cut_are_refused_and_elsewhere_harmless() -> None:
    keys = (descending(np.array([1.0, 1.0, 2.0])), tie_hash(["a", "a", "b"]))
    with pytest.raises(ValueError, match="2 documents share one value and one tie hash"):
        cut(lambda: [keys], 2)
    assert cut(lambda: [keys], 1).inside(*keys).tolist() == [False, False, True]
    assert cut(lambda: [keys], 3).inside(*keys).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"score 1 of 2 is .*not finite"):
        descending(np.array([1.0, value]))


def test_an_empty_cut_holds_nothing() -> None:
    assert not Cut(0, 0, 0).inside(descending(np.array([np.finfo(float).max])), np.zeros(1, np.uint64)).any()
