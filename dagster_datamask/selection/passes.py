"""One pass over the documents: score them all, find the best, sum them up. What the certified solver is made of.

Here: the parts that documents come in, one for a pool in memory and one a shard for a corpus, and the operations over
them, whose results do not depend on how documents are spread over parts. Not here: which point to score at
(`certified`) and where shards come from (`corpus`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np

from dagster_datamask.selection.exact import Cut, GridSum, ScalarSum, Scored, cut
from dagster_datamask.selection.objectives import CONCAVE, Given
from dagster_datamask.selection.vectors import FEATURES, Feature, Vectors

# vertices that can be remembered, and rows of a sum of products
MEMORY = 128
_ROWS = 4096


class Part:
    """Documents that are at hand together, k of them, and what the solver knows of each.

    number: its place among the parts; linear: float64[k]; ties: uint64[k], distinct over all parts, the lower wins;
    hashes: uint64[k], of the ids; costs: int64[k] tokens or None; groups: int64[k] or None; columns: what a mask's
    means are taken of (`certificates.evaluate`).

    Scratch: scores float64[k]; member bool[k], the vertex last met; best bool[k], the best mask met; base float64[k],
    the weights that the hull starts from; bits uint8[MEMORY, ⌈k/8⌉], the vertices in the hull; order float64[k], the
    scores that the mask goes by. next_scores, next_member and next_base are what those three are once they are turned.
    """

    number: int
    vectors: Vectors
    linear: np.ndarray
    ties: np.ndarray
    hashes: np.ndarray
    costs: np.ndarray | None
    groups: np.ndarray | None
    columns: dict[str, np.ndarray]
    scores: np.ndarray
    next_scores: np.ndarray
    member: np.ndarray
    next_member: np.ndarray
    best: np.ndarray
    base: np.ndarray
    next_base: np.ndarray
    bits: np.ndarray
    order: np.ndarray

    @property
    def group(self) -> np.ndarray:
        """int64[k]: each document's group, 0 where there is one."""
        return np.zeros(self.ties.size, np.int64) if self.groups is None else self.groups

    @property
    def cost(self) -> np.ndarray:
        """int64[k]: what each document takes of a budget, 1 where documents are counted."""
        return np.ones(self.ties.size, np.int64) if self.costs is None else self.costs

    def scored(self, keys: np.ndarray, plain: bool = False) -> Scored:
        """What a cut of these keys needs; `plain` where groups and costs are of no account to it."""
        return Scored(keys, self.ties, None if plain else self.costs, None if plain else self.groups)


# what is done with a part, and with the element of `given` that is for it
Work = Callable[..., Any]


class Parts(Protocol):
    """Where parts are."""

    def __len__(self) -> int: ...

    def map(self, work: Work, given: Sequence[Any] | None = None) -> Iterator[Any]:
        """work(part), or work(part, given[its number]), of every part, in the parts' order.

        The work may be done elsewhere, and again where a worker was lost before it told what it found. So it goes by
        what it closes over and what the part holds, writes no array that its results depend on (what is made of scores,
        member or base becomes the next of them), and gives back what is small.
        """

    def turn(self, name: str) -> None:
        """Make what all parts have as the next scores, member or base that which they hold."""


class InMemory:
    """A pool as its one part, in memory, where nothing is done twice: what comes next takes the place of what is."""

    def __init__(
        self,
        vectors: Vectors,
        linear: np.ndarray,
        ties: np.ndarray,
        hashes: np.ndarray,
        costs: np.ndarray | None,
        groups: np.ndarray | None,
        columns: dict[str, np.ndarray],
    ) -> None:
        part, n = Part(), vectors.n
        part.number, part.vectors, part.linear, part.ties, part.hashes = 0, vectors, linear, ties, hashes
        part.costs, part.groups, part.columns = costs, groups, columns
        part.scores = part.next_scores = np.zeros(n)
        part.member = part.next_member = np.zeros(n, bool)
        part.best = np.zeros(n, bool)
        part.base = part.next_base = np.zeros(n)
        # only the pages that are written to are ever there
        part.bits = np.zeros((MEMORY, -(-n // 8)), np.uint8)
        part.order = np.zeros(n)
        self.part = part

    def __len__(self) -> int:
        return 1

    def map(self, work: Work, given: Sequence[Any] | None = None) -> Iterator[Any]:
        yield work(self.part) if given is None else work(self.part, given[0])

    def turn(self, name: str) -> None:
        pass


@dataclass(frozen=True, eq=False)
class Vertex:
    """The documents that `member` holds, as a point of the hull: `point`, the scaled means of the features over what is
    given and them (a cut document by its fraction), and `linear`, the mean of `linear` likewise; value: f of the whole
    documents alone."""

    point: np.ndarray = field(repr=False)
    linear: float
    value: float

    def bound(self, at: np.ndarray) -> float:
        """‖at‖² + the mean score at `at`, by which these documents were found to be the best: no point of the
        relaxation has a larger f."""
        return float(at @ at + self.linear - 2.0 * (at @ self.point))


@dataclass(frozen=True, eq=False)
class Gathered:
    """Documents picked from all parts, by ties: part and row say where they are; unit: float32[k, d]."""

    part: np.ndarray
    row: np.ndarray
    ties: np.ndarray
    linear: np.ndarray
    costs: np.ndarray
    groups: np.ndarray
    keys: np.ndarray
    base: np.ndarray
    inside: np.ndarray
    unit: np.ndarray = field(repr=False)

    def __len__(self) -> int:
        return self.row.size

    def joined(self, other: "Gathered") -> "Gathered":
        """Both, by ties."""
        columns = [np.concatenate([getattr(self, f.name), getattr(other, f.name)]) for f in fields(self)]
        order = np.argsort(columns[2])
        return Gathered(*(column[order] for column in columns))

    def at(self, number: int, chosen: np.ndarray) -> np.ndarray:
        """The rows in part `number` of the documents chosen (bool[k])."""
        return self.row[chosen & (self.part == number)]


@dataclass(frozen=True, eq=False)
class Fixed:
    """Documents that are in for good: how many of each group, and with what is given Σ √β φ and Σ linear."""

    held: np.ndarray
    point: np.ndarray
    linear: float


Rows = Callable[[Part], np.ndarray]


class Passes:
    """The operations over all parts for one problem: amounts[g] documents (or tokens) of each group g, of an objective
    mean of linear − Σ β‖mean of φ‖², what is `given` included in the means.

    A point is the concatenation of √β·mean of φ over the metrics of `weights`, so that f = linear − ‖point‖² and a
    document's score is linear_i − 2·Σ √β φ_i·point. `largest` bounds |linear_i|, and `magnitude` the sum of the sizes
    of its terms, where they cancel; given_linear is the given's mean of `linear`; reads counts the rows of embeddings
    that were read.
    """

    def __init__(
        self,
        parts: Parts,
        n: int,
        d: int,
        weights: dict[str, float],
        amounts: Sequence[int],
        largest: float,
        *,
        magnitude: float | None = None,
        tokens: bool = False,
        given: Given | None = None,
        given_linear: float = 0.0,
    ) -> None:
        self.parts, self.n, self.d = parts, n, d
        self.features: list[tuple[str, Feature, float]] = [
            (name, FEATURES[name], float(np.sqrt(weights[name]))) for name in CONCAVE if weights.get(name)
        ]
        self.beta = sum(scale * scale for _, _, scale in self.features)
        self.amounts, self.tokens, self.largest = list(amounts), tokens, largest
        self.given, self.given_linear = given, given_linear
        self.magnitude = abs(given_linear) + (largest if magnitude is None else magnitude)
        self.reads = 0
        self.held = 0
        self._total = GridSum(d, costs=tokens)
        self._linear = ScalarSum(largest)

    @property
    def passes(self) -> float:
        """Reads of the embeddings in units of all documents."""
        return self.reads / max(self.n, 1)

    @property
    def amount(self) -> int:
        """What is to be chosen, in documents or tokens."""
        return sum(self.amounts)

    @property
    def given_size(self) -> int:
        return 0 if self.given is None else self.given.size

    @property
    def size(self) -> int:
        """Entries of a point."""
        return sum(feature.size(self.d) for _, feature, _ in self.features)

    def map(self, work: Work, given: Sequence[Any] | None = None) -> list[Any]:
        """What `work` finds in every part, in the parts' order."""
        return list(self.parts.map(work, given))

    def pieces(self, point: np.ndarray) -> Iterator[tuple[Feature, float, np.ndarray]]:
        """(feature, √β, its piece of the point)."""
        at = 0
        for _, feature, scale in self.features:
            yield feature, scale, point[at : at + feature.size(self.d)]
            at += feature.size(self.d)

    def score(self, point: np.ndarray, extra: np.ndarray | None = None) -> None:
        """Score every document at the point: one pass over the embeddings. extra: float64[k] to add to the scores, of
        the one part there is."""
        pieces = list(self.pieces(point))

        def score(part: Part) -> None:
            scores = part.scores
            scores[:] = part.linear
            for feature, scale, piece in pieces:
                scores -= (2.0 * scale) * feature.rough(part.vectors, piece)
            if extra is not None:
                scores += extra

        self.map(score)
        self.reads += self.n

    def cut(self, keys: Rows, amounts: Sequence[int], plain: bool = False) -> Cut:
        """The cut of these amounts of the best keys; `plain` where groups and costs are of no account to it."""

        def each(find: Callable[[Scored], Any]) -> Iterable[Any]:
            return self.map(lambda part: find(part.scored(keys(part), plain)))

        return cut(each, len(self.parts), amounts)

    def take(self, best: Cut, keys: Rows = lambda part: part.scores) -> Vertex:
        """Make the documents above the cut the members.

        Only those that come and those that go are read; the sums are exact, so that the way leaves no trace in them.
        """
        nothing = self._nothing()

        def take(part: Part) -> tuple[_Moved, list[tuple[int, float, np.ndarray, float]]]:
            scored = part.scored(keys(part))
            partly = [
                (
                    int(part.ties[row]),
                    float(fraction * part.cost[row]),
                    part.vectors.double(np.array([row])),
                    float(part.linear[row]),
                )
                for row, fraction in zip(*best.partial(scored), strict=True)
            ]
            return nothing.moved(part, best.whole(scored)), partly

        found = self.map(take)
        self._move([moved for moved, _ in found])
        return self._vertex(sorted((one for _, partly in found for one in partly), key=lambda one: one[0]))

    def exchange(self, documents: Gathered, come: np.ndarray, gone: np.ndarray) -> Vertex:
        """Make some of the documents (bool[k]) members, and others not."""
        nothing = self._nothing()

        def exchange(part: Part, rows: tuple[np.ndarray, np.ndarray]) -> _Moved:
            held = part.member.copy()
            held[rows[0]], held[rows[1]] = True, False
            return nothing.moved(part, held)

        numbers = range(len(self.parts))
        self._move(self.map(exchange, [(documents.at(k, come), documents.at(k, gone)) for k in numbers]))
        return self._vertex([])

    def _nothing(self) -> "_Moved":
        exact = any(name == "pws" for name, _, _ in self.features)
        return _Moved(GridSum(self.d, costs=self.tokens) if exact else None, ScalarSum(self.largest))

    def _move(self, moved: Sequence["_Moved"]) -> None:
        """Take in by what the sums over the members have changed."""
        for each in moved:
            self._linear.join(each.linear)
            if each.total is not None:
                self._total.join(each.total)
            self.held += each.held
            self.reads += each.read
        self.parts.turn("member")

    def _vertex(self, fractions: list[tuple[int, float, np.ndarray, float]]) -> Vertex:
        point, linear = self._means([])
        value = linear - float(point @ point)
        if fractions:
            point, linear = self._means(fractions)
        return Vertex(point, linear, value)

    def _means(self, fractions: list[tuple[int, float, np.ndarray, float]]) -> tuple[np.ndarray, float]:
        """(point, mean of linear) of what is given, the members, and documents by (·, amount, ẑ, linear)."""
        everything = self.given_size + self.held + sum(weight for _, weight, _, _ in fractions)
        if not everything:
            return np.zeros(self.size), 0.0
        linear = self.given_size * self.given_linear + self._linear.value()
        linear += sum(weight * of_one for _, weight, _, of_one in fractions)
        pieces = [np.zeros(0)]
        for name, feature, scale in self.features:
            total = self._total.value() if name == "pws" else self._sum_members(feature)
            if self.given is not None:
                total = total + self.given.size * self.given.mean
            for _, weight, unit, _ in fractions:
                total = total + feature.total(unit, np.array([weight]))
            pieces.append(scale * total / everything)
        return np.concatenate(pieces), linear / everything

    def _sum_members(self, feature: Feature) -> np.ndarray:
        """Σ cost·φ over the members in canonical order, for a metric that has no exact sum and is of one part."""

        def sum_members(part: Part) -> np.ndarray:
            rows = np.flatnonzero(part.member)
            rows = rows[np.argsort(part.ties[rows])]
            total = np.zeros(feature.size(part.vectors.d))
            for a in range(0, rows.size, _ROWS):
                these = rows[a : a + _ROWS]
                total += feature.total(part.vectors.unit(these), part.cost[these].astype(np.float64))
            return total

        (found,) = self.map(sum_members)
        return found

    def total(self) -> tuple[np.ndarray, float]:
        """(Σ cost·√β φ, Σ cost·linear) of what is given and the members."""
        everything = self.given_size + self.held
        point, linear = self._means([])
        return point * everything, linear * everything

    def keep(self) -> None:
        """The members are the best mask so far."""

        def keep(part: Part) -> None:
            part.best[:] = part.member

        self.map(keep)

    def restore(self) -> Vertex:
        """Make the best mask the members again."""
        nothing = self._nothing()
        self._move(self.map(lambda part: nothing.moved(part, part.best)))
        return self._vertex([])

    def remember(self, slot: int) -> None:
        """Note the members as vertex `slot` of the hull."""

        def remember(part: Part) -> None:
            part.bits[slot] = np.packbits(part.member)

        self.map(remember)

    def spread(self, share: float) -> None:
        """Make `base` the same weight for all."""

        def spread(part: Part) -> None:
            part.base[:] = share

        self.map(spread)

    def collapse(self, start: float, shares: Mapping[int, float]) -> None:
        """Make `base` the weights of the point with this share of `base` and these shares of the slots."""

        def collapse(part: Part) -> None:
            base = part.base * start
            for slot, share in shares.items():
                base[np.unpackbits(part.bits[slot], count=base.size).astype(bool)] += share
            part.next_base[:] = base

        self.map(collapse)
        self.parts.turn("base")

    def count(self, chosen: Rows) -> int:
        return sum(self.map(lambda part: int(np.count_nonzero(chosen(part)))))

    def hold(self, chosen: Rows) -> Fixed:
        """The sums over the documents for which `chosen` is true."""
        groups, d, largest, tokens, features = len(self.amounts), self.d, self.largest, self.tokens, self.features

        def hold(part: Part) -> tuple[np.ndarray, GridSum, ScalarSum, np.ndarray, int]:
            total, linear = GridSum(d, costs=tokens), ScalarSum(largest)
            others = np.zeros(sum(feature.size(d) for _, feature, _ in features))
            rows = np.flatnonzero(chosen(part))
            linear.add(part.linear[rows])
            part.vectors.add_to(rows, total)
            held = np.bincount(part.group[rows], minlength=groups)
            if any(name != "pws" for name, _, _ in features):
                rows = rows[np.argsort(part.ties[rows])]
                pieces = [
                    np.zeros(feature.size(d))
                    if name == "pws"
                    else scale * feature.total(part.vectors.unit(rows), np.ones(rows.size))
                    for name, feature, scale in features
                ]
                others += np.concatenate(pieces)
            return held, total, linear, others, rows.size

        held, others = np.zeros(groups), np.zeros(self.size)
        total, linear = GridSum(d, costs=tokens), ScalarSum(largest)
        for of_part in self.map(hold):
            held += of_part[0]
            total.join(of_part[1])
            linear.join(of_part[2])
            others += of_part[3]
            self.reads += of_part[4]
        pieces = [
            scale * (total.value() + (self.given.size * self.given.mean if self.given is not None else 0.0))
            if name == "pws"
            else np.zeros(feature.size(d))
            for name, feature, scale in features
        ]
        point = np.concatenate([np.zeros(0), *pieces]) + others
        return Fixed(held, point, linear.value() + self.given_size * self.given_linear)

    def gather(self, chosen: Rows, keys: Rows = lambda part: part.scores) -> Gathered:
        """The documents for which `chosen` is true, in canonical order."""

        def gather(part: Part) -> list[np.ndarray]:
            rows = np.flatnonzero(chosen(part))
            columns = (part.ties, part.linear, part.cost, part.group, keys(part), part.base, part.member)
            picked = [column[rows] for column in columns]
            return [np.full(rows.size, part.number), rows, *picked, part.vectors.unit(rows)]

        whole = [np.concatenate(column) for column in zip(*self.map(gather), strict=True)]
        order = np.argsort(whole[2])
        self.reads += order.size
        return Gathered(*(column[order] for column in whole))


@dataclass(eq=False)
class _Moved:
    """By what the sums over the members of a part change: total, Σ cost·ẑ, where it is summed exactly, linear,
    Σ cost·linear, and held, what the members take of the budget; read: rows of embeddings that were read for it."""

    total: GridSum | None
    linear: ScalarSum
    held: int = 0
    read: int = 0

    def moved(self, part: Part, members: np.ndarray) -> "_Moved":
        """Make `members` (bool[k]) the part's next, and tell what that changes."""
        found = _Moved(None if self.total is None else self.total.empty(), self.linear.empty())
        for rows, sign in (
            (np.flatnonzero(members & ~part.member), 1),
            (np.flatnonzero(part.member & ~members), -1),
        ):
            if rows.size:
                costs = None if part.costs is None else part.costs[rows]
                found.linear.add(part.linear[rows], costs, sign)
                found.held += sign * (rows.size if costs is None else int(costs.sum()))
                found.read += rows.size
                if found.total is not None:
                    part.vectors.add_to(rows, found.total, part.costs, sign)
        part.next_member[:] = members
        return found
