"""How many documents to keep: reading a budget, and sharing one out exactly.

Here: document budgets and the largest-remainder apportionment that splits them. Not here: which documents fill a
budget (the solvers) and what pool it is counted against (the caller knows the scope).
"""

import math
from collections.abc import Sequence
from fractions import Fraction


def parse_budget(budget: str | int | float, n: int) -> int:
    """S, the number of documents to keep out of n.

    A string is "10%" (a share of n) or "5000" (documents); an int is documents; a float is a share in [0, 1].
    A share b becomes ⌊b·n + ½⌋, computed exactly from the decimal written, so "2.5%" of 20 is 1 on every machine.

    Raises ValueError, naming the budget and n, for what cannot be read, is negative or exceeds n.
    """
    if n < 0:
        raise ValueError(f"a pool cannot have {n} documents")
    share, amount = _read(budget)
    if amount < 0:
        raise ValueError(f"budget {budget!r} is negative; ask for 0 or more of the {n} documents")
    size = math.floor(amount * n + Fraction(1, 2)) if share else int(amount)
    if (share and amount > 1) or size > n:
        raise ValueError(f"budget {budget!r} asks for more than the {n} documents there are; ask for at most {n}")
    return size


def _read(budget: str | int | float) -> tuple[bool, Fraction]:
    """(is it a share, its exact amount)."""
    hint = 'write a share as "10%" or 0.1, or a number of documents as "5000" or 5000'
    if isinstance(budget, bool):
        raise ValueError(f"budget {budget!r} is not a number; {hint}")
    if isinstance(budget, int):
        return False, Fraction(budget)
    if isinstance(budget, float):
        if not math.isfinite(budget):
            raise ValueError(f"budget {budget!r} is not finite; {hint}")
        if budget > 1:
            raise ValueError(f"budget {budget!r} is a float above 1, neither a share nor a count; {hint}")
        # the shortest decimal that reads back as this float is what its writer meant
        return True, Fraction(repr(budget))
    text = budget.strip()
    try:
        if text.endswith("%"):
            return True, Fraction(text[:-1].strip()) / 100
        amount = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"budget {budget!r} cannot be read; {hint}") from None
    if "/" in text or amount.denominator != 1:
        raise ValueError(f"budget {budget!r} is not a whole number of documents; {hint}")
    return False, amount


def largest_remainder(total: int, weights: Sequence[int], capacities: Sequence[int] | None = None) -> list[int]:
    """Whole shares of `total` in proportion to `weights` that add up to it exactly (Hamilton's method).

    Each gets the floor of its quota, then the largest remainders get one more each, ties to the earlier position.
    With `capacities` no share exceeds its own; what a full one cannot take is shared among the rest by the same rule.
    A positive total where every weight is 0 is shared equally.

    Raises ValueError for negative numbers, lengths that differ, or a total above the sum of the capacities.
    """
    if total < 0 or any(w < 0 for w in weights):
        raise ValueError(f"total and weights must not be negative: {total}, {list(weights)}")
    if capacities is None:
        if total and not weights:
            raise ValueError(f"{total} cannot be shared among no weights")
        return _apportion(total, list(weights))
    if len(capacities) != len(weights):
        raise ValueError(f"{len(weights)} weights but {len(capacities)} capacities")
    if total > sum(capacities):
        raise ValueError(f"{total} exceeds what there is room for, {sum(capacities)}")
    shares = [0] * len(weights)
    open_ = [k for k, capacity in enumerate(capacities) if capacity > 0]
    left = total
    while left:
        # positive weights come first: a zero weight takes part only when nobody else has room
        active = [k for k in open_ if weights[k] > 0] or open_
        extra = _apportion(left, [weights[k] for k in active])
        full = [k for k, e in zip(active, extra, strict=True) if e >= capacities[k]]
        if not full:
            for k, e in zip(active, extra, strict=True):
                shares[k] = e
            break
        for k in full:
            shares[k] = capacities[k]
            left -= capacities[k]
            open_.remove(k)
    return shares


def _apportion(total: int, weights: list[int]) -> list[int]:
    whole = sum(weights)
    if not whole:
        weights, whole = [1] * len(weights), len(weights)
    shares = [total * w // whole for w in weights] if whole else []
    by_remainder = sorted(range(len(weights)), key=lambda k: (-(total * weights[k] % whole), k))
    for k in by_remainder[: total - sum(shares)]:
        shares[k] += 1
    return shares
