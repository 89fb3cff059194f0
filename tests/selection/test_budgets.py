from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_datamask.selection.budgets import largest_remainder, parse_budget


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
