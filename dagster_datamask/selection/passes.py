"""One pass over the documents: score them all, find the best, sum them up. What the certified solver is made of.

Here: the parts that documents come in, one for a pool in memory and one a shard for a corpus, and the operations over
them, whose results do not depend on how documents are spread over parts. Not here: which point to score at
(`certified`) and where shards come from (`corpus`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Protocol

import numpy as np

from dagster_datamask.selection.exact import Cut, GridSum, ScalarSum, Scored, cut
from dagster_datamask.selection.objectives import CONCAVE, Given
from dagster_datamask.selection.vectors import FEATURES, Feature, Vectors

# vertices that can be remembered, and rows of a sum of products
MEMORY = 128
_ROWS = 4096


@dataclass(eq=False)
class Part:
    """Documents that are at hand together, k of them, and what the solver knows of each.

    linear: float64[k]; ties: uint64[k], distinct over all parts, the lower wins; hashes: uint64[k], of the ids; costs:
    int64[k] tokens or None; groups: int64[k] or None; columns: what a mask's means are taken of
    (`certificates.evaluate`).

    Scratch: scores float64[k]; member bool[k], the vertex last met; best bool[k], the best mask met; base float64[k],
    the weights that the hull starts from; bits uint8[MEMORY, ⌈k/8⌉], the vertices in the hull; order float64[k], the
    scores that the mask goes by.
    """

    vectors: Vectors
    linear: np.ndarray
    ties: np.ndarray
    hashes: np.ndarray
    costs: np.ndarray | None
    groups: np.ndarray | None
    columns: dict[str, np.ndarray] = field(repr=False)
    scores: np.ndarray = field(repr=False)
    member: np.ndarray = field(repr=False)
    best: np.ndarray = field(repr=False)
    base: np.ndarray = field(repr=False)
    bits: np.ndarray = field(repr=False)
    order: np.ndarray = field(repr=False)

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


class Parts(Protocol):
    """Where parts come from."""

    def __len__(self) -> int: ...

    def open(self, number: int) -> AbstractContextManager[Part]:
        """The part, for as long as the context lasts."""


class InMemory:
    """A pool as its one part."""

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
        n = vectors.n
        self.part = Part(
            vectors,
            linear,
            ties,
            hashes,
            costs,
            groups,
            columns,
            scores=np.zeros(n),
            member=np.zeros(n, bool),
            best=np.zeros(n, bool),
            base=np.zeros(n),
            # only the pages that are written to are ever there
            bits=np.zeros((MEMORY, -(-n // 8)), np.uint8),
            order=np.zeros(n),
        )

    def __len__(self) -> int:
        return 1

    def open(self, number: int) -> AbstractContextManager[Part]:
        return nullcontext(self.part)


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

    def each(self) -> Iterator[tuple[int, Part]]:
        for number in range(len(self.parts)):
            with self.parts.open(number) as part:
                yield number, part

    def pieces(self, point: np.ndarray) -> Iterator[tuple[Feature, float, np.ndarray]]:
        """(feature, √β, its piece of the point)."""
        at = 0
        for _, feature, scale in self.features:
            yield feature, scale, point[at : at + feature.size(self.d)]
            at += feature.size(self.d)

    def score(self, point: np.ndarray) -> None:
        """Score every document at the point: one pass over the embeddings."""
        for _, part in self.each():
            part.scores[:] = part.linear
            for feature, scale, piece in self.pieces(point):
                part.scores -= (2.0 * scale) * feature.rough(part.vectors, piece)
        self.reads += self.n

    def cut(self, keys: Rows, amounts: Sequence[int], plain: bool = False) -> Cut:
        """The cut of these amounts of the best keys; `plain` where groups and costs are of no account to it."""
        return cut(lambda: (part.scored(keys(part), plain) for _, part in self.each()), len(self.parts), amounts)

    def take(self, best: Cut, keys: Rows = lambda part: part.scores) -> Vertex:
        """Make the documents above the cut the members.

        Only those that come and those that go are read; the sums are exact, so that the way leaves no trace in them.
        """
        fractions: list[tuple[int, float, np.ndarray, float]] = []
        for _, part in self.each():
            scored = part.scored(keys(part))
            whole = best.whole(scored)
            self._move(part, np.flatnonzero(whole & ~part.member), 1)
            self._move(part, np.flatnonzero(part.member & ~whole), -1)
            for row, fraction in zip(*best.partial(scored), strict=True):
                weight = float(fraction * part.cost[row])
                unit = part.vectors.double(np.array([row]))
                fractions.append((int(part.ties[row]), weight, unit, float(part.linear[row])))
        fractions.sort(key=lambda found: found[0])
        return self._vertex(fractions)

    def exchange(self, documents: Gathered, come: np.ndarray, gone: np.ndarray) -> Vertex:
        """Make some of the documents (bool[k]) members, and others not."""
        for number, part in self.each():
            self._move(part, documents.at(number, come), 1)
            self._move(part, documents.at(number, gone), -1)
        return self._vertex([])

    def _move(self, part: Part, rows: np.ndarray, sign: int) -> None:
        if not rows.size:
            return
        costs = None if part.costs is None else part.costs[rows]
        self._linear.add(part.linear[rows], costs, sign)
        self.held += sign * (rows.size if costs is None else int(costs.sum()))
        if any(name == "pws" for name, _, _ in self.features):
            part.vectors.add_to(rows, self._total, part.costs, sign)
        part.member[rows] = sign > 0
        self.reads += rows.size

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
        """Σ cost·φ over the members in canonical order, for a metric that has no exact sum."""
        with self.parts.open(0) as part:
            rows = np.flatnonzero(part.member)
            rows = rows[np.argsort(part.ties[rows])]
            total = np.zeros(feature.size(self.d))
            for a in range(0, rows.size, _ROWS):
                these = rows[a : a + _ROWS]
                total += feature.total(part.vectors.unit(these), part.cost[these].astype(np.float64))
            return total

    def total(self) -> tuple[np.ndarray, float]:
        """(Σ cost·√β φ, Σ cost·linear) of what is given and the members."""
        everything = self.given_size + self.held
        point, linear = self._means([])
        return point * everything, linear * everything

    def keep(self) -> None:
        """The members are the best mask so far."""
        for _, part in self.each():
            part.best[:] = part.member

    def restore(self) -> Vertex:
        """Make the best mask the members again."""
        for _, part in self.each():
            self._move(part, np.flatnonzero(part.best & ~part.member), 1)
            self._move(part, np.flatnonzero(part.member & ~part.best), -1)
        return self._vertex([])

    def remember(self, slot: int) -> None:
        """Note the members as vertex `slot` of the hull."""
        for _, part in self.each():
            part.bits[slot] = np.packbits(part.member)

    def collapse(self, start: float, shares: Mapping[int, float]) -> None:
        """Make `base` the weights of the point with this share of `base` and these shares of the slots."""
        for _, part in self.each():
            part.base *= start
            for slot, share in shares.items():
                part.base[np.unpackbits(part.bits[slot], count=part.base.size).astype(bool)] += share

    def count(self, chosen: Rows) -> int:
        return sum(int(np.count_nonzero(chosen(part))) for _, part in self.each())

    def hold(self, chosen: Rows) -> Fixed:
        """The sums over the documents for which `chosen` is true."""
        held = np.zeros(len(self.amounts))
        total, linear = GridSum(self.d, costs=self.tokens), ScalarSum(self.largest)
        others = np.zeros(self.size)
        for _, part in self.each():
            rows = np.flatnonzero(chosen(part))
            held += np.bincount(part.group[rows], minlength=held.size)
            linear.add(part.linear[rows])
            part.vectors.add_to(rows, total)
            self.reads += rows.size
            if any(name != "pws" for name, _, _ in self.features):
                rows = rows[np.argsort(part.ties[rows])]
                pieces = [
                    np.zeros(feature.size(self.d))
                    if name == "pws"
                    else scale * feature.total(part.vectors.unit(rows), np.ones(rows.size))
                    for name, feature, scale in self.features
                ]
                others += np.concatenate(pieces)
        pieces = [
            scale * (total.value() + (self.given.size * self.given.mean if self.given is not None else 0.0))
            if name == "pws"
            else np.zeros(feature.size(self.d))
            for name, feature, scale in self.features
        ]
        point = np.concatenate([np.zeros(0), *pieces]) + others
        return Fixed(held, point, linear.value() + self.given_size * self.given_linear)

    def gather(self, chosen: Rows, keys: Rows = lambda part: part.scores) -> Gathered:
        """The documents for which `chosen` is true, in canonical order."""
        found = []
        for number, part in self.each():
            rows = np.flatnonzero(chosen(part))
            columns = (part.ties, part.linear, part.cost, part.group, keys(part), part.base, part.member)
            picked = [column[rows] for column in columns]
            found.append((np.full(rows.size, number), rows, *picked, part.vectors.unit(rows)))
        whole = [np.concatenate(column) for column in zip(*found, strict=True)]
        order = np.argsort(whole[2])
        self.reads += order.size
        return Gathered(*(column[order] for column in whole))
