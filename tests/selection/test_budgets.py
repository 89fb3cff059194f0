from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_datamask.selection.budgets import (
    Budget,
    documents,
    largest_remainder,
    parse_budget,
    parse_tokens,
    quotas,
)


@pytest.mark.parametrize(
    ("budget", "n", "size"),
    [
        ("10%", 12_590, 1259),
        ("2.5%", 20, 1),
        ("2.5%", 19, 0),
        (" 50 % ", 3, 2),
        (0.1, 5, 1),
        (0.29, 50, 15),  # 0.29·50 is 14.499999999999998 in floats, and 14.5 as written
        (1.0, 7, 7),
        (1, 7, 1),
        ("100%", 7, 7),
        ("5000", 5000, 5000),
        ("5e2", 1000, 500),
        (0, 0, 0),
        ("0%", 0, 0),
        ("100%", 0, 0),
        (0, 4, 0),
    ],
)
def test_reads_shares_and_counts(budget: str | int | float, n: int, size: int) -> None:
    assert parse_budget(budget, n) == size


@pytest.mark.parametrize(
    ("budget", "n", "message"),
    [
        (-1, 5, r"budget -1 is negative; ask for 0 or more of the 5"),
        ("-10%", 5, r"budget '-10%' is negative"),
        (6, 5, r"budget 6 asks for more than the 5 documents"),
        ("101%", 5, r"budget '101%' asks for more than the 5"),
        ("100.1%", 5, r"more than the 5"),
        (1.5, 5, r"budget 1.5 is a float above 1"),
        ("1.5", 5, r"'1.5' is not a whole number"),
        ("1/2", 5, r"'1/2' is not a whole number"),
        ("ten", 5, r"'ten' cannot be read; write a share as"),
        ("1/0", 5, r"'1/0' cannot be read"),
        ("", 5, r"'' cannot be read"),
        (True, 5, r"True is not a number"),
        (float("nan"), 5, r"nan is not finite"),
        (float("inf"), 5, r"inf is not finite"),
        (1, 0, r"budget 1 asks for more than the 0 documents"),
        (0, -1, r"cannot have -1 documents"),
    ],
)
def test_refuses_with_the_budget_and_the_pool_named(budget: str | int | float, n: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_budget(budget, n)


@given(
    st.integers(0, 10**12),
    st.lists(st.integers(0, 10**12), min_size=1, max_size=12),
)
def test_shares_add_up_and_stay_within_one_of_their_quota(total: int, weights: list[int]) -> None:
    shares = largest_remainder(total, weights)
    assert sum(shares) == total
    whole = sum(weights)
    for share, weight in zip(shares, weights, strict=True):
        quota = Fraction(total * weight, whole) if whole else Fraction(total, len(weights))
        assert abs(share - quota) < 1


@given(st.data())
def test_capacities_hold_and_the_total_stays_exact(data: st.DataObject) -> None:
    capacities = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=8))
    weights = data.draw(st.lists(st.integers(0, 9), min_size=len(capacities), max_size=len(capacities)))
    total = data.draw(st.integers(0, sum(capacities)))
    shares = largest_remainder(total, weights, capacities)
    assert sum(shares) == total
    assert all(0 <= share <= capacity for share, capacity in zip(shares, capacities, strict=True))


def test_the_largest_remainders_get_one_more_and_ties_go_to_the_first() -> None:
    assert largest_remainder(10, [3, 3, 3]) == [4, 3, 3]
    assert largest_remainder(7, [1, 2, 3]) == [1, 2, 4]
    assert largest_remainder(1, [1, 1, 1, 1]) == [1, 0, 0, 0]
    assert largest_remainder(3, [0, 0]) == [2, 1]
    assert largest_remainder(0, []) == []
    assert largest_remainder(0, [], []) == []


def test_what_a_full_group_cannot_take_goes_to_the_others() -> None:
    assert largest_remainder(10, [8, 1, 1], [2, 9, 9]) == [2, 4, 4]
    # a group of no weight takes part only once the weighted ones are full
    assert largest_remainder(5, [1, 0], [3, 3]) == [3, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, [1]), "must not be negative"),
        ((1, [-1]), "must not be negative"),
        ((1, []), "among no weights"),
        ((4, [1, 1], [1, 2]), "4 exceeds what there is room for, 3"),
        ((1, [1], [1, 1]), "1 weights but 2 capacities"),
    ],
)
def test_refuses_what_cannot_be_shared(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        largest_remainder(*arguments)


def test_budgets_that_count_no_whole_things_are_refused() -> None:
    for size in (True, 2.5, "7", None):
        with pytest.raises(ValueError, match="is not a whole number of documents"):
            documents(size)
    assert documents(np.int64(5)).amounts == (5,)
    for costs in (np.full(4, 1.5), np.array([1.0, np.nan, 2.0, 3.0]), np.ones(4, bool)):
        with pytest.raises(ValueError, match="token counts must be whole numbers, not"):
            Budget((2,), costs).check(4)
    with pytest.raises(ValueError, match="row 1 has 0 tokens"):
        Budget((2,), np.array([1, 0, 2])).check(3)
    with pytest.raises(ValueError, match=f"row 2 has {2**24 + 1} tokens"):
        Budget((2,), np.array([1, 1, 2**24 + 1])).check(3)
    with pytest.raises(ValueError, match="2 quotas, and no groups"):
        Budget((2, 1)).check(3)
    with pytest.raises(ValueError, match="budget 2 is not between 0 and the 1 documents of group b"):
        Budget((1, 2), None, np.array([0, 1, 0]), ("a", "b")).check(3)


@pytest.mark.parametrize("text", ["1e99999999tok", "1e99999999", "1e9999%", "9" * 60])
def test_a_number_too_long_to_be_meant_is_refused_at_once(text: str) -> None:
    with pytest.raises(ValueError):
        parse_tokens(text) if text.endswith("tok") else parse_budget(text, 10)


def test_tokens_are_read_exactly() -> None:
    assert parse_tokens("2e9tok") == 2 * 10**9
    assert parse_tokens(" 5000 tok") == 5000
    assert parse_tokens("10%") is parse_tokens(5000) is None
    for text in ("1.5tok", "-1tok", "tok", "1/2tok", "ntok"):
        with pytest.raises(ValueError, match="not a whole number of tokens"):
            parse_tokens(text)


def test_quotas_follow_the_groups_sizes_and_add_up() -> None:
    groups = ["b"] * 7 + ["a"] * 2 + [""] * 1
    found = quotas(5, groups)
    assert found.names == ("", "a", "b")
    assert found.amounts == (1, 1, 3)
    assert found.groups.tolist() == [2] * 7 + [1] * 2 + [0]
    tokens = quotas(100, ["x", "y", "x"], np.array([50, 30, 100]))
    assert tokens.amounts == (83, 17)
    assert quotas(0, []).amounts == (0,)
    assert quotas(1, ["a", "a\0"]).names == ("a", "a\0")
    with pytest.raises(ValueError, match="budget 11 asks for more than the 10 there are"):
        quotas(11, groups)


@given(n=st.integers(1, 12), tokens=st.booleans(), groups=st.integers(1, 3), seed=st.integers(0, 10**6))
def test_a_budget_is_filled_by_the_best_that_fit(n: int, tokens: bool, groups: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores, ties = rng.integers(0, 4, n).astype(float), rng.permutation(n).astype(np.uint64)
    costs = rng.integers(1, 6, n) if tokens else None
    group = rng.integers(0, groups, n) if groups > 1 else None
    room = Budget((0,) * groups, costs, group).available(n)
    budget = Budget(tuple(int(rng.integers(0, r + 1)) for r in room), costs, group)
    left, expected = list(budget.amounts), []
    for row in sorted(range(n), key=lambda i: (-scores[i], int(ties[i]))):
        g, cost = 0 if group is None else int(group[row]), 1 if costs is None else int(costs[row])
        if cost <= left[g]:
            left[g] -= cost
            expected.append(row)
    assert budget.fill(scores, ties).tolist() == sorted(expected)
