import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_datamask.selection import exact
from dagster_datamask.selection.exact import GridSum, ScalarSum, Scored, cut, descending, from_descending


@given(
    n=st.integers(1, 40),
    groups=st.integers(1, 3),
    tokens=st.booleans(),
    at_hand=st.sampled_from([0, 3, 1 << 20]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=150, deadline=None)
def test_a_cut_over_parts_is_the_head_of_the_sorted_whole(
    n: int, groups: int, tokens: bool, at_hand: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    # few levels, so that most cuts go through ties
    scores = rng.integers(-2, 3, n) / 3.0
    ties = rng.permutation(n).astype(np.uint64) << np.uint64(int(rng.integers(0, 50)))
    costs = rng.integers(1, 9, n) if tokens else None
    group = rng.integers(0, groups, n) if groups > 1 else None
    weight, of = np.ones(n, int) if costs is None else costs, np.zeros(n, int) if group is None else group
    amounts = [int(rng.integers(0, weight[of == g].sum() + 1)) for g in range(groups)]
    # by hand: each group's rows in order until the amount is reached
    held = np.zeros(n)
    for g, left in enumerate(amounts):
        for row in sorted(np.flatnonzero(of == g), key=lambda i: (-scores[i], int(ties[i]))):
            held[row] = min(1.0, left / weight[row])
            left = max(0, left - int(weight[row]))
    edges = sorted(rng.integers(0, n + 1, 2).tolist())
    ranges = [(0, edges[0]), (edges[0], edges[1]), (edges[1], n)]

    parts = []
    for a, b in ranges:
        some = (None if column is None else column[a:b] for column in (costs, group))
        parts.append(Scored(scores[a:b], ties[a:b], *some))

    whole = Scored(scores, ties, costs, group)
    before, exact._AT_HAND = exact._AT_HAND, at_hand
    try:
        found = [cut(lambda find: [find(whole)], 1, amounts), cut(lambda find: map(find, parts), 3, amounts)]
    finally:
        exact._AT_HAND = before
    for one in found:
        inside = one.whole(whole).astype(float)
        rows, fractions = one.partial(whole)
        inside[rows] = fractions
        np.testing.assert_allclose(inside, held)
        assert (np.concatenate([one.whole(part) for part in parts]) == one.whole(whole)).all()


@given(st.lists(st.floats(allow_nan=False), min_size=2, max_size=20))
def test_keys_order_as_scores_do_and_lead_back(values: list[float]) -> None:
    scores = np.array(values)
    keys = descending(scores)
    assert (from_descending(keys) == scores).all()
    for a, x in zip(values, keys.tolist(), strict=True):
        for b, y in zip(values, keys.tolist(), strict=True):
            assert (a > b) == (x < y)
            assert (a == b) == (x == y)


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("n", [0, 1, 2, 2500])
def test_vectors_add_up_exactly_in_any_order_and_can_be_taken_out(tokens: bool, n: int) -> None:
    rng = np.random.default_rng(n)
    rows = rng.standard_normal((n, 5))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    costs = rng.integers(1, exact.MOST_TOKENS + 1, n) if tokens else None

    def total(order: np.ndarray, block: int) -> GridSum:
        sums = GridSum(5, costs=tokens, fine=tokens)
        pieces = [order[a : a + block] for a in range(0, n, block)]
        sums.add([sums.block(rows[p].copy(), None if costs is None else costs[p]) for p in pieces])
        return sums

    one, two = total(np.arange(n), 1024), total(rng.permutation(n), 77)
    assert (one.total == two.total).all()
    weights = [1] * n if costs is None else costs.tolist()
    true = [float(sum(Fraction(float(x)) * w for x, w in zip(rows[:, k], weights, strict=True))) for k in range(5)]
    np.testing.assert_allclose(one.value(), true, atol=(sum(weights) + 1) * (2.0**-45 if tokens else 2.0**-48))
    gone = rng.permutation(n)[: n // 2]
    one.add([one.block(rows[[i]].copy(), None if costs is None else costs[[i]]) for i in gone], sign=-1)
    left = total(np.setdiff1d(np.arange(n), gone), 100)
    assert (one.total == left.total).all()
    left.join(total(gone, 3))
    assert (left.total == two.total).all()


@pytest.mark.parametrize("largest", [0.0, 1e-300, 3.7, 1e12])
@pytest.mark.parametrize("tokens", [False, True])
def test_scalars_add_up_to_the_last_bit(largest: float, tokens: bool) -> None:
    rng = np.random.default_rng(1)
    values = rng.uniform(-1, 1, 3000) * largest
    costs = rng.integers(1, exact.MOST_TOKENS, 3000) if tokens else None
    shuffled = rng.permutation(3000)
    one, two = ScalarSum(largest), ScalarSum(largest)
    one.add(values, costs)
    for part in np.array_split(shuffled, 7):
        two.add(values[part], None if costs is None else costs[part])
    assert one.value() == two.value()
    true = (
        math.fsum(values)
        if costs is None
        else float(sum(Fraction(v) * c for v, c in zip(values.tolist(), costs.tolist(), strict=True)))
    )
    assert one.value() == pytest.approx(true, rel=1e-14, abs=largest * 1e-14)
