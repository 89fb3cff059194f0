"""How much to keep: reading a budget of documents or tokens, sharing one out exactly, and filling it.

Here: budgets, quotas and the largest-remainder apportionment that splits them. Not here: which documents fill a budget
best (the solvers) and what pool it is counted against (the caller knows the scope).
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pyarrow as pa

from dagster_datamask.selection.exact import MOST_TOKENS, Scored, cut_of_one

TOKENS = "tok"
# characters of a number, and of its exponent: a larger one would be computed for hours
_LONGEST, _LONGEST_EXPONENT = 40, 3


@dataclass(frozen=True, eq=False)
class Budget:
    """What is to be kept of N documents: `amounts[g]` documents of each group g, or tokens where `costs` are given.

    costs: int64[N], each document's tokens, in 1..2**24; groups: int64[N] in 0..G−1, None where there is one; names:
    of the groups, for messages.
    """

    amounts: tuple[int, ...]
    costs: np.ndarray | None = field(default=None, repr=False)
    groups: np.ndarray | None = field(default=None, repr=False)
    names: tuple[str, ...] = ()

    @property
    def amount(self) -> int:
        return sum(self.amounts)

    @property
    def unit(self) -> str:
        return "documents" if self.costs is None else "tokens"

    def check(self, n: int) -> None:
        """Raise ValueError for a budget that N documents cannot meet, or that is not about N documents."""
        for name, column in (("token counts", self.costs), ("groups", self.groups)):
            if column is not None and column.shape != (n,):
                raise ValueError(f"{n} documents but {name} of shape {list(column.shape)}")
            if column is not None and not np.issubdtype(column.dtype, np.integer):
                raise ValueError(f"{name} must be whole numbers, not {column.dtype}")
        if self.costs is not None:
            check_tokens(self.costs)
        for amount in self.amounts:
            if isinstance(amount, bool) or int(amount) != amount:
                raise ValueError(f"budget {amount!r} is not a whole number of {self.unit}")
        if self.groups is None and len(self.amounts) != 1:
            raise ValueError(f"{len(self.amounts)} quotas, and no groups that they are for")
        if self.groups is not None and n and not 0 <= self.groups.min() <= self.groups.max() < len(self.amounts):
            raise ValueError(f"groups must be numbered 0 to {len(self.amounts) - 1}, one for each quota")
        for g, (amount, there) in enumerate(zip(self.amounts, self.available(n), strict=True)):
            if not 0 <= amount <= there:
                of = f" of group {self.names[g] if self.names else g}" if self.groups is not None else " of the pool"
                raise ValueError(f"budget {amount} is not between 0 and the {there} {self.unit}{of}")

    def available(self, n: int) -> list[int]:
        """What each group holds, in the budget's unit."""
        if self.groups is None:
            return [n if self.costs is None else int(self.costs.sum())]
        # a float64 counts tokens exactly up to 2**53
        held = np.bincount(self.groups, weights=self.costs, minlength=len(self.amounts))
        return [int(x) for x in held]

    def fill(self, scores: np.ndarray, ties: np.ndarray) -> np.ndarray:
        """int64, ascending: the rows with the best scores (float64[N], no NaN) that meet the budget, ties to the lower.

        Under a token budget a document that does not fit any more is passed over, so the kept set never exceeds it and
        falls short by less than the smallest document left out.
        """
        part = Scored(scores, ties, self.costs, self.groups)
        at = cut_of_one(part, self.amounts)
        whole = at.whole(part)
        if self.costs is None:
            return np.flatnonzero(whole)
        groups = np.zeros(scores.size, np.int64) if self.groups is None else self.groups
        held = np.bincount(groups[whole], weights=self.costs[whole], minlength=len(self.amounts)).astype(np.int64)
        room = np.array(self.amounts) - held
        left = np.flatnonzero(~whole & (self.costs <= room[groups]))
        for row in left[np.lexsort((ties[left], -scores[left]))].tolist():
            if self.costs[row] <= room[groups[row]]:
                whole[row] = True
                room[groups[row]] -= self.costs[row]
        return np.flatnonzero(whole)


def check_tokens(costs: np.ndarray) -> None:
    """Raise ValueError naming the first row whose tokens a token budget cannot count."""
    bad = np.flatnonzero((costs < 1) | (costs > MOST_TOKENS))
    if bad.size:
        raise ValueError(
            f"row {int(bad[0])} has {int(costs[bad[0]])} tokens; a token budget needs 1 to {MOST_TOKENS:,} in every "
            "document, so leave such rows out"
        )


def documents(size: int) -> Budget:
    """A budget of `size` documents. Raises ValueError for what is no whole number."""
    try:
        if isinstance(size, bool):
            raise TypeError
        return Budget((operator.index(size),))
    except TypeError:
        raise ValueError(f"budget {size!r} is not a whole number of documents") from None


def quotas(amount: int, groups: Sequence[str] | np.ndarray, costs: np.ndarray | None = None) -> Budget:
    """`amount` documents (or tokens, where costs are given) shared among the groups by largest remainder over their
    sizes. groups: the name of each document's group; names are taken in order of their spelling.

    Raises ValueError for an amount above what there is.
    """
    found = pa.array(groups, pa.string()).dictionary_encode()
    names = found.dictionary.to_pylist()
    if not names:
        return Budget((amount,), costs)
    spelled = sorted(range(len(names)), key=names.__getitem__)
    place = np.empty(len(names), np.int64)
    place[spelled] = np.arange(len(names))
    numbers = place[found.indices.to_numpy()]
    sizes = np.bincount(numbers, weights=costs, minlength=len(names)).astype(np.int64).tolist()
    if amount > sum(sizes):
        raise ValueError(f"budget {amount} asks for more than the {sum(sizes)} there are; ask for at most {sum(sizes)}")
    return Budget(tuple(largest_remainder(amount, sizes, sizes)), costs, numbers, tuple(names[k] for k in spelled))


def parse_tokens(budget: str | int | float) -> int | None:
    """T where the budget is in tokens ("2e9tok", "5000 tok"), or None. Raises ValueError for what cannot be read."""
    if not isinstance(budget, str) or not budget.strip().endswith(TOKENS):
        return None
    try:
        amount = exact_number(budget.strip().removesuffix(TOKENS).strip())
    except (ValueError, ZeroDivisionError):
        amount = Fraction(-1)
    if amount < 0 or amount.denominator != 1 or "/" in budget:
        raise ValueError(f"budget {budget!r} is not a whole number of tokens; write it as '2e9tok'")
    return int(amount)


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
    if isinstance(budget, int | np.integer):
        return False, Fraction(int(budget))
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
            return True, exact_number(text[:-1].strip()) / 100
        amount = exact_number(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"budget {budget!r} cannot be read; {hint}") from None
    if "/" in text or amount.denominator != 1:
        raise ValueError(f"budget {budget!r} is not a whole number of documents; {hint}")
    return False, amount


def exact_number(text: str) -> Fraction:
    """The number that a text writes, exactly. Raises ValueError for what is none, or too long to be meant."""
    exponent = text.lower().partition("e")[2].lstrip("+-")
    if len(text) > _LONGEST or len(exponent) > _LONGEST_EXPONENT:
        raise ValueError(f"{text[:_LONGEST]!r} is too long for a number")
    return Fraction(text)


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
        open_ = [k for k in open_ if not shares[k]]
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
