"""How much to keep: reading a budget of documents or tokens, sharing one out exactly, and filling it.

Here: budgets, quotas and the largest-remainder apportionment that splits them. Not here: which documents fill a budget
best (the solvers) and what pool it is counted against (the caller knows the scope).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from dagster_datamask.selection.exact import MOST_TOKENS, Scored, cut

TOKENS = "tok"


@dataclass(frozen=True, eq=False)
class Budget:
    """What is to be kept of N documents: `amounts[g]` documents of each group g, or tokens where `costs` are given.

    costs: int64[N], each document's tokens, in 1..2**24; groups: int64[N] in 0..G−1, None where there is one; asked:
    the whole amount asked for; short_by: what no group has room for.
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
        if self.costs is not None and n and not (self.costs.min() >= 1 and self.costs.max() <= MOST_TOKENS):
            bad = int(np.flatnonzero((self.costs < 1) | (self.costs > MOST_TOKENS))[0])
            raise ValueError(
                f"row {bad} has {int(self.costs[bad])} tokens; a token budget needs 1 to {MOST_TOKENS:,} in every "
                "document, so leave such rows out"
            )
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
        costs = np.ones(n, np.int64) if self.costs is None else self.costs
        groups = np.zeros(n, np.int64) if self.groups is None else self.groups
        held = [0] * len(self.amounts)
        for g in range(len(self.amounts)):
            held[g] = int(costs[groups == g].sum()) if len(self.amounts) > 1 else int(costs.sum())
        return held

    def fill(self, scores: np.ndarray, ties: np.ndarray) -> np.ndarray:
        """int64, ascending: the rows with the best scores (float64[N], no NaN) that meet the budget, ties to the lower.

        Under a token budget a document that does not fit any more is passed over, so the kept set never exceeds it and
        falls short by less than the smallest document left out.
        """
        part = Scored(scores, ties, self.costs, self.groups)
        at = cut(lambda: iter([part]), 1, self.amounts)
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


def documents(size: int) -> Budget:
    """A budget of `size` documents."""
    return Budget((size,))


def quotas(amount: int, groups: Sequence[str] | np.ndarray, costs: np.ndarray | None = None) -> Budget:
    """`amount` documents (or tokens, where costs are given) shared among the groups by largest remainder over their
    sizes. groups: the name of each document's group; names are taken in order of their spelling."""
    names, numbers = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
    sizes = np.bincount(numbers, weights=costs, minlength=names.size).astype(np.int64).tolist()
    shares = largest_remainder(amount, sizes, sizes) if names.size else [amount]
    return Budget(tuple(shares), costs, numbers.astype(np.int64), tuple(names.tolist()))


def parse_tokens(budget: str | int | float) -> int | None:
    """T where the budget is in tokens ("2e9tok", "5000 tok"), or None. Raises ValueError for what cannot be read."""
    if not isinstance(budget, str) or not budget.strip().endswith(TOKENS):
        return None
    try:
        amount = Fraction(budget.strip().removesuffix(TOKENS).strip())
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
