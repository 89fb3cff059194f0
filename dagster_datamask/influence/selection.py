"""Selection by predicted influence: relational greedy in clusters, and the individual selections it is held against.

Here: the running-sum greedy, budgets of clusters in documents and in tokens, the individual top-n with and without
clusters, Gumbel top-n. Not here: where f, the vectors and the clusters come from (`relational`, `clusters`), files.

The lower the influence, the better: it is the predicted change of the reference loss. Sources: Group-MATES
(arXiv 2502.14709), Eq. 8–11 and 13; MATES (arXiv 2406.06046), section on sampling.
"""

import heapq
import os
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from threadpoolctl import threadpool_limits

from dagster_datamask import keyed
from dagster_datamask.influence.relational import bracket, check_constants
from dagster_datamask.selection.budgets import largest_remainder
from dagster_datamask.selection.objectives import BadInput, canonical_order, finite_scores, name_documents
from dagster_datamask.selection.vectors import as_single

Rule = Literal["proportional", "influence", "global"]
RULES: tuple[Rule, ...] = ("proportional", "influence", "global")

# rows that BLAS is given a multiple of, so that a row's product does not depend on how many come with it
_EVEN = 64
# rows of a cluster that a thread passes over at once, and rows from which on a cluster is all threads' work
_ROWS = 8192
_LARGE = 4 * _ROWS
# bytes of small clusters that are passed over together
_TOGETHER = 1 << 22


@dataclass(frozen=True, eq=False)
class Picks:
    """What was chosen of N documents, in the order of the choice.

    rows: int64[n]; scores: float64[n], the predicted influence at the pick, given what the cluster held before;
    ranks: int64[n], 1 for a cluster's first; clusters: int64[n], the cluster each was chosen in.

    Clusters are chosen in independently, so the order across them is that of a merge: always the cluster whose next
    document has the lowest score.
    """

    rows: np.ndarray
    scores: np.ndarray = field(repr=False)
    ranks: np.ndarray = field(repr=False)
    clusters: np.ndarray = field(repr=False)

    def amounts(self, clusters: int) -> np.ndarray:
        """int64[clusters]: how many were chosen in each."""
        return np.bincount(self.clusters, minlength=clusters)


def greedy(h: np.ndarray, f: np.ndarray, n: int, *, alpha: float, beta: float, ids: Sequence[str]) -> Picks:
    """The n documents that the relational greedy takes one by one out of all (Eq. 9–11 with Eq. 13 for the influence).

    h: float[N, width], the vectors whose products are R (`InfluenceModel.relation`), float16 and memory-mapped ones
    included; f: float[N]. The first is the lowest f, each further one the lowest α·max(0, 1 − R̄/β)·f, ties to the
    lower stable hash of the id. O(N·width) a pick: R̄ is the product with the running sum of what is chosen.

    Raises ValueError for a budget outside 0..N, repeated ids, a β that is not positive, and f or h that are not finite
    (of h, in the clusters that are chosen from), naming the documents.
    """
    labels = np.zeros(len(f), np.int64)
    return select_in_clusters(h, f, labels, n, alpha=alpha, beta=beta, ids=ids)


def select_in_clusters(
    h: np.ndarray,
    f: np.ndarray,
    labels: np.ndarray,
    n: int,
    *,
    alpha: float,
    beta: float,
    ids: Sequence[str],
    rule: Rule = "proportional",
) -> Picks:
    """`greedy` inside each cluster by itself, n documents in all (influence-aware clustering).

    labels: int[N], clusters numbered from 0, of which any may be empty. rule: see `budgets`; "global" sets no budgets,
    but takes n steps of the merge across clusters. Clusters are spread over all cores, and the result has the same bits
    on any number of them. A cluster's rows are widened to float32 while it is chosen from, no others.
    """
    check_constants(alpha, beta)
    pool = _pool(f, ids, labels, n)
    if h.ndim != 2 or len(h) != pool.size:
        raise ValueError(f"{pool.size} documents but vectors of shape {list(h.shape)}")
    runs = [_Run(members, np.zeros(h.shape[1])) for members in pool.members]
    if rule != "global":
        _extend(h, pool, ids, runs, budgets(f, labels, n, ids=ids, rule=rule), alpha, beta)
        return _picks(pool, runs, _merge(runs, n))
    wanted = [min(max(1, 2 * amount), run.size) for amount, run in zip(pool.proportional(n), runs, strict=True)]
    while n:
        _extend(h, pool, ids, runs, wanted, alpha, beta)
        order = _merge(runs, n, further=True)
        if len(order) == n:
            return _picks(pool, runs, order)
        used = np.bincount(order, minlength=len(runs))
        # clusters that are nearly used up go further along with the one that is, so that there are few rounds
        wanted = [
            min(2 * len(run.picked), run.size) if 2 * u > len(run.picked) else len(run.picked)
            for u, run in zip(used.tolist(), runs, strict=True)
        ]
    return _picks(pool, runs, array("q"))


def fill_clusters(
    h: np.ndarray,
    f: np.ndarray,
    labels: np.ndarray,
    shares: Sequence[int],
    costs: np.ndarray,
    *,
    alpha: float,
    beta: float,
    ids: Sequence[str],
) -> Picks:
    """`greedy` inside each cluster by itself, until its share of tokens (see `token_budgets`) is full.

    costs: int64[N], each document's tokens. A cluster gives documents in the order of its greedy up to the first that
    its share has no room for. What the shares have left in all goes to these, one a cluster, in the order of the merge,
    passing over those that do not fit. So no cluster gives more than its share and one document, and less than the
    costliest document is missing in all. Raises ValueError as `select_in_clusters` does, and for a share outside 0..the
    cluster's tokens.
    """
    check_constants(alpha, beta)
    pool = _pool(f, ids, labels, 0)
    if h.ndim != 2 or len(h) != pool.size:
        raise ValueError(f"{pool.size} documents but vectors of shape {list(h.shape)}")
    _check_shares(pool, shares, costs)
    runs = [_Run(members, np.zeros(h.shape[1])) for members in pool.members]
    wanted = [
        min(run.size, 1 + int(1.05 * share * run.size / max(1, int(_costs_of(pool, run.members, costs).sum()))))
        for run, share in zip(runs, shares, strict=True)
    ]
    while True:
        _extend(h, pool, ids, runs, wanted, alpha, beta)
        ends = [_within(pool, run, costs, share) for run, share in zip(runs, shares, strict=True)]
        # a cluster has gone far enough once it has met a document too many
        if all(end < len(run.picked) or end == run.size for end, run in zip(ends, runs, strict=True)):
            return _to_the_brim(pool, runs, ends, sum(shares), costs)
        wanted = [
            min(2 * len(run.picked) + 1, run.size) if end == len(run.picked) else len(run.picked)
            for end, run in zip(ends, runs, strict=True)
        ]


def fill_clusters_individually(
    f: np.ndarray, labels: np.ndarray, shares: Sequence[int], costs: np.ndarray, *, ids: Sequence[str]
) -> Picks:
    """The documents of lowest f of each cluster until its share of tokens is full, by the rule of `fill_clusters`."""
    pool = _pool(f, ids, labels, 0)
    _check_shares(pool, shares, costs)
    runs = []
    for members in pool.members:
        best = np.argsort(pool.f[members], kind="stable")
        runs.append(_Run(members, np.zeros(0), array("q", best), array("d", pool.f[members[best]])))
    ends = [_within(pool, run, costs, share) for run, share in zip(runs, shares, strict=True)]
    return _to_the_brim(pool, runs, ends, sum(shares), costs)


def token_budgets(
    f: np.ndarray,
    labels: np.ndarray,
    amount: int,
    costs: np.ndarray,
    *,
    ids: Sequence[str],
    rule: Literal["proportional", "influence"],
) -> list[int]:
    """How many tokens each cluster is to give, `amount` in all and no more than it has.

    `budgets` in tokens. "proportional": by largest remainder over the clusters' tokens; "influence": as many as it has
    among the documents of lowest f, the last of which counts as far as there is room. Raises ValueError for an amount
    outside 0..all tokens.
    """
    pool = _pool(f, ids, labels, 0)
    there = costs[pool.order]
    held = [int(there[members].sum()) for members in pool.members]
    if not 0 <= amount <= sum(held):
        raise ValueError(f"budget {amount} is not between 0 and the {sum(held)} tokens of the pool")
    if rule == "proportional":
        return largest_remainder(amount, held, held)
    if rule == "influence":
        best = pool.best(pool.size)
        ends = np.cumsum(there[best])
        counted = np.diff(np.minimum(ends, amount), prepend=0)
        shares = np.zeros(len(pool.members), np.int64)
        np.add.at(shares, pool.labels[best], counted)
        return shares.tolist()
    raise ValueError(f"budget rule {rule!r} is neither 'proportional' nor 'influence'")


def budgets(
    f: np.ndarray, labels: np.ndarray, n: int, *, ids: Sequence[str], rule: Literal["proportional", "influence"]
) -> list[int]:
    """How many each cluster is to give, n in all and no more than it has.

    "proportional": by largest remainder over the clusters' sizes (the paper's ⌈n|C|/N⌉ overshoots n); "influence": as
    many as it has among the n documents of lowest f, so that clusters compete.
    """
    pool = _pool(f, ids, labels, n)
    if rule == "proportional":
        return pool.proportional(n)
    if rule == "influence":
        return np.bincount(pool.labels[pool.best(n)], minlength=len(pool.members)).tolist()
    raise ValueError(f"budget rule {rule!r} is neither 'proportional' nor 'influence'")


def individual(f: np.ndarray, n: int, *, ids: Sequence[str]) -> Picks:
    """The n documents of lowest f, lowest first, ties to the lower stable hash of the id (Eq. 8)."""
    pool = _pool(f, ids, np.zeros(len(f), np.int64), n)
    best = pool.best(n)
    return Picks(pool.order[best], pool.f[best], np.arange(1, n + 1), np.zeros(n, np.int64))


def individual_in_clusters(f: np.ndarray, labels: np.ndarray, amounts: Sequence[int], *, ids: Sequence[str]) -> Picks:
    """The amounts[k] documents of lowest f of each cluster k: what `select_in_clusters` is to be compared with, since
    budgets of clusters alone change a selection.

    Raises ValueError for an amount outside 0..the cluster's size.
    """
    pool = _pool(f, ids, labels, sum(amounts))
    if len(amounts) < len(pool.members):
        raise ValueError(f"{len(pool.members)} clusters but {len(amounts)} amounts")
    runs = []
    for k, amount in enumerate(amounts):
        members = pool.members[k] if k < len(pool.members) else np.zeros(0, np.int64)
        if not 0 <= amount <= members.size:
            raise ValueError(f"amount {amount} is not between 0 and the {members.size} documents of cluster {k}")
        best = np.argsort(pool.f[members], kind="stable")[:amount]
        runs.append(_Run(members, np.zeros(0), array("q", best), array("d", pool.f[members[best]])))
    return _picks(pool, runs, _merge(runs, sum(amounts)))


def gumbel_top_k(f: np.ndarray, n: int, *, tau: float, ids: Sequence[str], seed: int) -> Picks:
    """n documents drawn one after the other without replacement, each with probability ∝ exp(−f/τ) among those left.

    The n largest −f/τ + G, with Gumbel noise G of each id's own (MATES): adding the noise to +f/τ and taking the
    smallest is another law. Scores are f. Raises ValueError for a τ that is not positive and finite.
    """
    if not (np.isfinite(tau) and tau > 0):
        raise ValueError(f"tau {tau} is not a positive number")
    pool = _pool(f, ids, np.zeros(len(f), np.int64), n)
    # 52 bits, so that no uniform is 0 or rounds to 1
    uniform = ((keyed.hash64(ids, seed, "gumbel") >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    keys = (pool.f / tau + np.log(-np.log(uniform)[pool.order])).astype(np.float64)
    best = np.argsort(keys, kind="stable")[:n]
    return Picks(pool.order[best], pool.f[best], np.arange(1, n + 1), np.zeros(n, np.int64))


@dataclass(frozen=True, eq=False)
class _Pool:
    """N documents in the order of their ids' hashes, so that a tie goes to the lower position.

    order: int64[N], their rows as given; f, labels: in this order; members: each cluster's positions, ascending.
    """

    order: np.ndarray
    f: np.ndarray
    labels: np.ndarray
    members: list[np.ndarray]

    @property
    def size(self) -> int:
        return self.order.size

    def best(self, n: int) -> np.ndarray:
        """int64[n]: the positions of the lowest f, lowest first."""
        return np.argsort(self.f, kind="stable")[:n]

    def proportional(self, n: int) -> list[int]:
        sizes = [members.size for members in self.members]
        return largest_remainder(n, sizes, sizes)


def _pool(f: np.ndarray, ids: Sequence[str], labels: np.ndarray, n: int) -> _Pool:
    size = len(ids)
    if f.shape != (size,) or labels.shape != (size,):
        raise ValueError(f"{size} ids, influences of shape {list(f.shape)} and labels of shape {list(labels.shape)}")
    if not np.issubdtype(labels.dtype, np.integer) or (size and labels.min() < 0):
        raise ValueError("labels must be clusters' numbers, whole and not negative")
    if not 0 <= n <= size:
        raise ValueError(f"budget {n} is not between 0 and the {size} documents of the pool")
    values = finite_scores(ids, f, "influence")
    order, _ = canonical_order(ids, size)
    sorted_labels = labels[order].astype(np.int64, copy=False)
    ends = np.cumsum(np.bincount(sorted_labels, minlength=1))
    members = np.split(np.argsort(sorted_labels, kind="stable"), ends[:-1])
    return _Pool(order, values[order], sorted_labels, members)


@dataclass(eq=False)
class _Run:
    """How far a cluster was chosen from: members int64[c], positions in the pool; total: float64[width], the sum of the
    picked vectors; picked: places in `members`, in order; scores: at the picks."""

    members: np.ndarray
    total: np.ndarray
    picked: array = field(default_factory=lambda: array("q"))
    scores: array = field(default_factory=lambda: array("d"))

    @property
    def size(self) -> int:
        return self.members.size


def _merge(runs: list[_Run], n: int, further: bool = False) -> array:
    """The clusters of the n first picks of the merge. With `further`, where a cluster has more documents than were
    picked so far, it ends with the last of them."""
    order = array("q")
    used = [0] * len(runs)
    heads = [(run.scores[0], int(run.members[run.picked[0]]), k) for k, run in enumerate(runs) if run.picked]
    heapq.heapify(heads)
    while len(order) < n:
        _, _, k = heads[0]
        order.append(k)
        used[k] += 1
        run = runs[k]
        if used[k] < len(run.picked):
            heapq.heapreplace(heads, (run.scores[used[k]], int(run.members[run.picked[used[k]]]), k))
        elif further and used[k] < run.size:
            break
        else:
            heapq.heappop(heads)
    return order


def _costs_of(pool: _Pool, positions: np.ndarray, costs: np.ndarray) -> np.ndarray:
    return costs[pool.order[positions]]


def _check_shares(pool: _Pool, shares: Sequence[int], costs: np.ndarray) -> None:
    if len(shares) != len(pool.members):
        raise ValueError(f"{len(pool.members)} clusters but {len(shares)} shares")
    if costs.shape != (pool.size,) or not np.issubdtype(costs.dtype, np.integer) or (pool.size and costs.min() < 0):
        raise ValueError(f"costs must be {pool.size} whole numbers, not negative")
    for k, (members, share) in enumerate(zip(pool.members, shares, strict=True)):
        held = int(_costs_of(pool, members, costs).sum())
        if not 0 <= share <= held:
            raise ValueError(f"share {share} is not between 0 and the {held} tokens of cluster {k}")


def _within(pool: _Pool, run: _Run, costs: np.ndarray, share: int) -> int:
    """How many of a cluster's first picks its share has room for."""
    ends = np.cumsum(_costs_of(pool, run.members[run.picked], costs))
    return int(np.searchsorted(ends, share, side="right"))


def _to_the_brim(pool: _Pool, runs: list[_Run], ends: list[int], amount: int, costs: np.ndarray) -> Picks:
    """The first ends[k] picks of each cluster and, of their next ones, by score, those that `amount` has room for."""
    room, further = amount, []
    for k, (run, end) in enumerate(zip(runs, ends, strict=True)):
        room -= int(_costs_of(pool, run.members[run.picked[:end]], costs).sum())
        if end < run.size:
            further.append((run.scores[end], int(run.members[run.picked[end]]), k))
    for _, position, k in sorted(further):
        cost = int(costs[pool.order[position]])
        if cost <= room:
            ends[k] += 1
            room -= cost
    kept = [
        _Run(run.members, run.total, run.picked[:end], run.scores[:end]) for run, end in zip(runs, ends, strict=True)
    ]
    return _picks(pool, kept, _merge(kept, sum(ends)))


def _picks(pool: _Pool, runs: list[_Run], order: array) -> Picks:
    clusters = np.array(order, np.int64)
    counts = np.bincount(clusters, minlength=len(runs))
    ranks, rows, scores = (np.empty(clusters.size, kind) for kind in (np.int64, np.int64, np.float64))
    # a stable sort lists each cluster's places in the merge, first to last
    places, start = np.argsort(clusters, kind="stable"), 0
    for run, count in zip(runs, counts.tolist(), strict=True):
        at = places[start : start + count]
        ranks[at] = np.arange(1, count + 1)
        rows[at] = pool.order[run.members[run.picked[:count]]]
        scores[at] = run.scores[:count]
        start += count
    return Picks(rows, scores, ranks, clusters)


def _extend(
    h: np.ndarray, pool: _Pool, ids: Sequence[str], runs: list[_Run], wanted: Sequence[int], alpha: float, beta: float
) -> None:
    """Choose on in each cluster until `wanted` are picked."""
    open_ = [(run, amount) for run, amount in zip(runs, wanted, strict=True) if amount > len(run.picked)]
    # clusters of like size are padded to one size
    open_.sort(key=lambda task: (-_even(task[0].size), -task[1]))
    large = [task for task in open_ if task[0].size >= _LARGE]
    batches = list(_batches(open_[len(large) :], h.shape[1]))
    with threadpool_limits(1, "blas"), ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        for task in large:
            _Batch(h, pool, ids, [task]).choose(alpha, beta, threads)
        for _ in threads.map(lambda tasks: _Batch(h, pool, ids, tasks).choose(alpha, beta), batches):
            pass


def _even(rows: int) -> int:
    return -(-rows // _EVEN) * _EVEN


_Task = tuple[_Run, int]


def _batches(tasks: list[_Task], width: int) -> Iterator[list[_Task]]:
    start = 0
    while start < len(tasks):
        stop = start + max(1, _TOGETHER // (4 * width * _even(tasks[start][0].size)))
        yield sorted(tasks[start:stop], key=lambda task: len(task[0].picked) - task[1])
        start = stop


class _Batch:
    """Some clusters that are chosen from in step, most to be picked first: g clusters, padded to c rows.

    rows: float32[g, c, width]; f: float64[g, c]; taken: float64[g, c], 0 or, for what is picked and for padding, inf.
    """

    def __init__(self, h: np.ndarray, pool: _Pool, ids: Sequence[str], tasks: list[_Task]) -> None:
        self.runs, self.wanted = [run for run, _ in tasks], [amount for _, amount in tasks]
        shape = (len(tasks), _even(max(run.size for run in self.runs)))
        self.rows = np.zeros((*shape, h.shape[1]), np.float32)
        self.f, self.taken = np.zeros(shape), np.full(shape, np.inf)
        for g, run in enumerate(self.runs):
            at = pool.order[run.members]
            # a file is read from front to back
            forwards = np.argsort(at)
            for a in range(0, run.size, _ROWS):
                places = forwards[a : a + _ROWS]
                part = as_single(h[at[places]])
                bad = np.flatnonzero(~np.isfinite(part).all(axis=1))
                if bad.size:
                    named = name_documents(ids, at[places[bad]])
                    raise BadInput(f"{named}: the influence vector is not finite; leave these out or embed them again")
                self.rows[g, places] = part
            self.f[g, : run.size] = pool.f[run.members]
            self.taken[g, : run.size] = 0.0
            self.taken[g, run.picked] = np.inf

    def choose(self, alpha: float, beta: float, threads: ThreadPoolExecutor | None = None) -> None:
        """Pick until every cluster has what is wanted of it; one cluster alone may be passed over by all threads."""
        counts = np.array([len(run.picked) for run in self.runs])
        totals = np.array([run.total for run in self.runs])
        left = np.array(self.wanted) - counts
        for step in range(int(left[0])):
            # those that have enough come last
            g = int(np.count_nonzero(left > step))
            best, at = self._best(totals[:g], counts[:g], alpha, beta, threads)
            totals[:g] += self.rows[np.arange(g), at]
            self.taken[np.arange(g), at] = np.inf
            counts[:g] += 1
            for run, score, place in zip(self.runs, best.tolist(), at.tolist(), strict=False):
                run.scores.append(score)
                run.picked.append(place)
        for run, total in zip(self.runs, totals, strict=True):
            run.total = total

    def _best(
        self, totals: np.ndarray, counts: np.ndarray, alpha: float, beta: float, threads: ThreadPoolExecutor | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(float64[g] the lowest score of each cluster, int64[g] its place, the lower on ties)."""
        g = len(counts)
        narrow = totals.astype(np.float32)[:, :, None]
        seen = np.maximum(counts, 1)[:, None]

        def lowest(a: int) -> tuple[np.ndarray, np.ndarray]:
            f = self.f[:g, a : a + step]
            mean = np.matmul(self.rows[:g, a : a + step], narrow)[:, :, 0].astype(np.float64)
            mean /= seen
            scores = bracket(mean, alpha, beta)
            scores *= f
            if not counts.all():
                scores[counts == 0] = f[counts == 0]
            scores += self.taken[:g, a : a + step]
            at = scores.argmin(axis=1)
            return scores[np.arange(g), at], at

        if threads is None:
            step = self.f.shape[1]
            return lowest(0)
        step = _ROWS
        starts = range(0, self.f.shape[1], step)
        parts = list(threads.map(lowest, starts))
        scores = np.array([part[0][0] for part in parts])
        first = int(scores.argmin())
        return scores[first : first + 1], parts[first][1] + starts[first]
