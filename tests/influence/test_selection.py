import os
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_datamask import keyed
from dagster_datamask.influence import selection as module
from dagster_datamask.influence.selection import (
    RULES,
    Picks,
    budgets,
    fill_clusters,
    fill_clusters_individually,
    greedy,
    gumbel_top_k,
    individual,
    individual_in_clusters,
    select_in_clusters,
    token_budgets,
)
from dagster_datamask.selection.objectives import BadInput


def pool(seed: int, n: int, width: int = 6) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """float32[n, width] unit rows with a common part, float64[n] influences of both signs, ids."""
    rng = np.random.default_rng(seed)
    h = rng.standard_normal((n, width)) + 0.5
    h /= np.linalg.norm(h, axis=1, keepdims=True)
    return h.astype(np.float32), rng.standard_normal(n) - 0.5, [f"doc-{i}" for i in range(n)]


def naive(
    h: np.ndarray, f: np.ndarray, n: int, alpha: float, beta: float, ids: list[str]
) -> tuple[list[int], list[float]]:
    """Eq. 9–11 as written: every similarity to every document chosen so far, averaged anew at each step."""
    ties = keyed.hash64(ids, 0, "tie")
    wide = h.astype(np.float64)
    chosen: list[int] = []
    scores: list[float] = []
    for _ in range(n):
        options = []
        for x in range(len(f)):
            if x in chosen:
                continue
            score = float(f[x])
            if chosen:
                mean = sum(float(wide[i] @ wide[x]) for i in chosen) / len(chosen)
                score *= alpha * max(0.0, 1.0 - mean / beta)
            options.append((score, int(ties[x]), x))
        best = min(options)
        chosen.append(best[2])
        scores.append(best[0])
    return chosen, scores


def naive_merge(runs: dict[int, tuple[list[int], list[float]]], ids: list[str], n: int) -> list[tuple[int, int]]:
    """(row, cluster) of n steps that always take the lowest next score of all clusters."""
    ties = keyed.hash64(ids, 0, "tie")
    used = dict.fromkeys(runs, 0)
    found = []
    for _ in range(n):
        heads = [
            (scores[used[k]], int(ties[rows[used[k]]]), k) for k, (rows, scores) in runs.items() if used[k] < len(rows)
        ]
        k = min(heads)[2]
        found.append((runs[k][0][used[k]], k))
        used[k] += 1
    return found


def same(a: Picks, b: Picks) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("rows", "scores", "ranks", "clusters"))


@pytest.mark.parametrize("n", [0, 1, 2, 3, 40])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (1.3, 0.4), (0.7, 2.0)])
def test_greedy_is_the_naive_one(n: int, alpha: float, beta: float) -> None:
    h, f, ids = pool(n, n)
    picks = greedy(h, f, n, alpha=alpha, beta=beta, ids=ids)
    rows, scores = naive(h, f, n, alpha, beta, ids)
    assert picks.rows.tolist() == rows
    assert np.allclose(picks.scores, scores, rtol=1e-5, atol=1e-6)
    assert picks.ranks.tolist() == list(range(1, n + 1))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 14), st.data())
def test_ties_fall_to_the_lower_hash(seed: int, n: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    # products of whole numbers have no rounding, so that equal scores are equal
    h = np.eye(3, dtype=np.float32)[rng.integers(3, size=n)]
    f = rng.integers(-2, 2, size=n).astype(np.float64)
    ids = [f"{seed}/{i}" for i in range(n)]
    size = data.draw(st.integers(0, n))
    picks = greedy(h, f, size, alpha=1.0, beta=1.0, ids=ids)
    assert picks.rows.tolist() == naive(h, f, size, 1.0, 1.0, ids)[0]
    order = rng.permutation(n)
    again = greedy(h[order], f[order], size, alpha=1.0, beta=1.0, ids=[ids[i] for i in order])
    assert order[again.rows].tolist() == picks.rows.tolist()


def test_one_cluster_is_the_whole() -> None:
    h, f, ids = pool(1, 60)
    whole = greedy(h, f, 30, alpha=1.1, beta=0.8, ids=ids)
    for rule in RULES:
        in_one = select_in_clusters(h, f, np.zeros(60, np.int64), 30, alpha=1.1, beta=0.8, ids=ids, rule=rule)
        assert same(whole, in_one)


# singletons, clusters without documents, in front, between and behind
CLUSTER_OF = np.array([2] * 9 + [5] + [3] * 20 + [7] + [1] * 10)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("n", [0, 1, 2, 7, 20, 40, 41])
def test_clusters_are_chosen_from_one_by_one(rule: module.Rule, n: int) -> None:
    h, f, ids = pool(2, 41)
    picks = select_in_clusters(h, f, CLUSTER_OF, n, alpha=1.2, beta=0.9, ids=ids, rule=rule)
    runs = {}
    amounts = None if rule == "global" else budgets(f, CLUSTER_OF, n, ids=ids, rule=rule)
    for k in range(8):
        members = np.flatnonzero(k == CLUSTER_OF)
        amount = members.size if amounts is None else amounts[k]
        rows, scores = naive(h[members], f[members], amount, 1.2, 0.9, [ids[i] for i in members])
        runs[k] = (members[rows].tolist(), scores)
    assert list(zip(picks.rows.tolist(), picks.clusters.tolist(), strict=True)) == naive_merge(runs, ids, n)
    for k in range(8):
        inside = picks.clusters == k
        assert picks.ranks[inside].tolist() == list(range(1, int(inside.sum()) + 1))
        assert np.allclose(picks.scores[inside], runs[k][1][: int(inside.sum())], rtol=1e-5, atol=1e-6)
    assert len(set(picks.rows.tolist())) == n
    if amounts is not None:
        assert picks.amounts(8).tolist() == amounts


def test_a_budget_across_clusters_goes_where_the_influence_is() -> None:
    h, f, ids = pool(3, 200)
    labels = np.arange(200) % 4
    f[labels == 2] -= 10.0
    shared = {
        rule: select_in_clusters(h, f, labels, 50, alpha=1.0, beta=3.0, ids=ids, rule=rule).amounts(4).tolist()
        for rule in RULES
    }
    assert shared["proportional"] == [13, 13, 12, 12]
    assert shared["influence"] == shared["global"] == [0, 0, 50, 0]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=40), st.data())
def test_budgets_add_up(labels: list[int], data: st.DataObject) -> None:
    n = len(labels)
    size = data.draw(st.integers(0, n))
    f = np.random.default_rng(n).standard_normal(n)
    ids = [str(i) for i in range(n)]
    sizes = np.bincount(np.array(labels, np.int64), minlength=1)
    for rule in ("proportional", "influence"):
        amounts = budgets(f, np.array(labels, np.int64), size, ids=ids, rule=rule)  # type: ignore[arg-type]
        assert sum(amounts) == size
        assert all(0 <= a <= s for a, s in zip(amounts, sizes, strict=True))
        if rule == "proportional":
            assert all(abs(a - size * s / max(1, n)) < 1 for a, s in zip(amounts, sizes, strict=True))


@pytest.mark.parametrize("rule", RULES)
def test_bits_do_not_depend_on_threads_or_batches(rule: module.Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    h, f, ids = pool(4, 3000, 24)
    labels = (np.random.default_rng(0).random(3000) ** 2 * 12).astype(np.int64)
    found = []
    for cores, together, rows, large in ((1, 1 << 22, 8192, 32768), (3, 1, 64, 192), (2, 1 << 16, 128, 700)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        monkeypatch.setattr(module, "_TOGETHER", together)
        monkeypatch.setattr(module, "_ROWS", rows)
        monkeypatch.setattr(module, "_LARGE", large)
        found.append(select_in_clusters(h, f, labels, 700, alpha=1.0, beta=0.9, ids=ids, rule=rule))
    assert same(found[0], found[1]) and same(found[0], found[2])


def test_half_precision_on_disk_is_read_as_it_is(tmp_path: Path) -> None:
    h, f, ids = pool(5, 300)
    on_disk = np.memmap(tmp_path / "h.bin", np.float16, "w+", shape=h.shape)
    on_disk[:] = h
    stored = np.memmap(tmp_path / "h.bin", np.float16, "r", shape=h.shape)
    labels = np.arange(300) % 7
    picks = select_in_clusters(stored, f, labels, 100, alpha=1.0, beta=1.0, ids=ids)
    wide = select_in_clusters(h.astype(np.float16).astype(np.float32), f, labels, 100, alpha=1.0, beta=1.0, ids=ids)
    assert same(picks, wide)


def test_individual_takes_the_lowest() -> None:
    _, f, ids = pool(6, 50)
    f[7] = f[3]
    picks = individual(f, 20, ids=ids)
    ties = keyed.hash64(ids, 0, "tie")
    assert picks.rows.tolist() == sorted(range(50), key=lambda i: (f[i], ties[i]))[:20]
    assert np.array_equal(picks.scores, f[picks.rows])


def test_individual_in_clusters_fills_each_amount() -> None:
    _, f, ids = pool(7, 41)
    amounts = budgets(f, CLUSTER_OF, 17, ids=ids, rule="proportional")
    picks = individual_in_clusters(f, CLUSTER_OF, amounts, ids=ids)
    assert picks.amounts(8).tolist() == amounts
    for k, amount in enumerate(amounts):
        members = np.flatnonzero(k == CLUSTER_OF)
        assert picks.rows[picks.clusters == k].tolist() == members[np.argsort(f[members])][:amount].tolist()
    # of sorted sequences the merge is the sorted whole
    assert np.all(np.diff(picks.scores) >= 0)
    with pytest.raises(ValueError, match="amount 2 is not between 0 and the 1 documents of cluster 5"):
        individual_in_clusters(f, CLUSTER_OF, [0, 0, 0, 0, 0, 2, 0, 0], ids=ids)


def test_gumbel_draws_by_the_law() -> None:
    f, tau = np.array([0.3, -0.4, 1.0]), 0.7
    weights = np.exp(-f / tau)
    counts: dict[tuple[int, int], int] = {}
    draws = 6000
    for seed in range(draws):
        first, second = gumbel_top_k(f, 2, tau=tau, ids=["a", "b", "c"], seed=seed).rows.tolist()
        counts[first, second] = counts.get((first, second), 0) + 1
    square = 0.0
    for a, b in permutations(range(3), 2):
        # without replacement: in proportion to the weights among those left
        expected = draws * weights[a] / weights.sum() * weights[b] / (weights.sum() - weights[a])
        square += (counts.get((a, b), 0) - expected) ** 2 / expected
    # the 0.999 quantile of χ² with 5 degrees of freedom
    assert square < 20.5


def test_gumbel_noise_belongs_to_the_id() -> None:
    _, f, ids = pool(8, 100)
    picks = gumbel_top_k(f, 30, tau=0.5, ids=ids, seed=1)
    order = np.random.default_rng(0).permutation(100)
    again = gumbel_top_k(f[order], 30, tau=0.5, ids=[ids[i] for i in order], seed=1)
    assert order[again.rows].tolist() == picks.rows.tolist()
    assert gumbel_top_k(f, 30, tau=1e-9, ids=ids, seed=1).rows.tolist() == individual(f, 30, ids=ids).rows.tolist()
    with pytest.raises(ValueError, match="tau 0"):
        gumbel_top_k(f, 1, tau=0.0, ids=ids, seed=1)


def test_bad_input_is_named() -> None:
    h, f, ids = pool(9, 10)
    labels = np.zeros(10, np.int64)

    def run(h: np.ndarray = h, f: np.ndarray = f, labels: np.ndarray = labels, n: int = 5, **named: float) -> None:
        select_in_clusters(h, f, labels, n, **{"alpha": 1.0, "beta": 1.0} | named, ids=ids)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="budget 11 is not between 0 and the 10 documents"):
        run(n=11)
    with pytest.raises(ValueError, match="budget -1"):
        run(n=-1)
    with pytest.raises(BadInput, match=r"1 document: 'doc-4' \(row 4\): the influence is not finite"):
        run(f=np.where(np.arange(10) == 4, np.nan, f))
    with pytest.raises(BadInput, match=r"'doc-6' \(row 6\): the influence vector is not finite"):
        run(h=np.where(np.arange(10)[:, None] == 6, np.inf, h))
    with pytest.raises(BadInput, match="the id is not unique"):
        individual(f, 2, ids=["a"] * 10)
    with pytest.raises(ValueError, match="beta 0"):
        run(beta=0.0)
    with pytest.raises(ValueError, match=r"alpha -1"):
        run(alpha=-1.0)
    with pytest.raises(ValueError, match="labels must be clusters' numbers"):
        run(labels=labels - 1)
    with pytest.raises(ValueError, match="vectors of shape"):
        run(h=h[:9])
    with pytest.raises(ValueError, match="'sizes' is neither"):
        budgets(f, labels, 3, ids=ids, rule="sizes")  # type: ignore[arg-type]


def naive_fill(
    runs: dict[int, tuple[list[int], list[float]]], shares: list[int], costs: np.ndarray, ids: list[str]
) -> set[int]:
    """Rows: of each cluster's whole order all up to the first that its share has no room for; then these, by score."""
    ties = keyed.hash64(ids, 0, "tie")
    taken: set[int] = set()
    further = []
    for k, (rows, scores) in runs.items():
        held = 0
        for row, score in zip(rows, scores, strict=True):
            if held + costs[row] > shares[k]:
                further.append((score, int(ties[row]), row))
                break
            held += int(costs[row])
            taken.add(row)
    room = sum(shares) - int(costs[sorted(taken)].sum())
    for _, _, row in sorted(further):
        if costs[row] <= room:
            taken.add(row)
            room -= int(costs[row])
    return taken


class TestTokens:
    @given(
        st.integers(0, 10_000), st.integers(0, 24), st.integers(1, 5), st.sampled_from(["proportional", "influence"])
    )
    @settings(max_examples=60, deadline=None)
    def test_it_is_the_greedy_of_each_cluster_to_its_share(self, seed: int, n: int, k: int, rule: str) -> None:
        h, f, ids = pool(seed, n)
        rng = np.random.default_rng(seed)
        labels, costs = rng.integers(0, k, n), rng.integers(0, 30, n)
        amount = int(rng.integers(0, costs.sum() + 1))
        shares = token_budgets(f, labels, amount, costs, ids=ids, rule=rule)
        held = np.bincount(labels, weights=costs, minlength=len(shares)).astype(int).tolist()
        assert sum(shares) == amount and all(share <= most for share, most in zip(shares, held, strict=True))
        relational, alone = {}, {}
        for cluster in range(len(shares)):
            members = np.flatnonzero(labels == cluster)
            own = [ids[i] for i in members]
            rows, scores = naive(h[members], f[members], len(members), 0.8, 1.5, own)
            relational[cluster] = [int(members[i]) for i in rows], scores
            best = individual(f[members], len(members), ids=own)
            alone[cluster] = members[best.rows].tolist(), best.scores.tolist()
        for picks, runs in (
            (fill_clusters(h, f, labels, shares, costs, alpha=0.8, beta=1.5, ids=ids), relational),
            (fill_clusters_individually(f, labels, shares, costs, ids=ids), alone),
        ):
            assert set(picks.rows.tolist()) == naive_fill(runs, shares, costs, ids)
            assert len(set(picks.rows.tolist())) == len(picks.rows)
            assert amount - max(costs.max(initial=0), 1) < costs[picks.rows].sum() <= amount
            assert [labels[row] for row in picks.rows] == picks.clusters.tolist()
            for cluster, (rows, _) in runs.items():
                mine = picks.rows[picks.clusters == cluster].tolist()
                assert mine == rows[: len(mine)]

    @pytest.mark.parametrize("amount", [1000, 5000, 20_000])
    def test_clusters_of_equal_size_give_equally_whatever_their_influence(self, amount: int) -> None:
        h, _, ids = pool(3, 400)
        u = np.random.default_rng(3).random(400)
        labels = np.repeat([0, 1], 200)
        f, costs = np.where(labels == 0, u - 2, u), np.where(u < 0.5, 10, 200)
        held = [int(costs[labels == k].sum()) for k in (0, 1)]
        shares = token_budgets(f, labels, amount, costs, ids=ids, rule="proportional")
        assert shares == [pytest.approx(amount * tokens / sum(held), abs=1) for tokens in held]
        for picks in (
            fill_clusters(h, f, labels, shares, costs, alpha=1.0, beta=1.0, ids=ids),
            fill_clusters_individually(f, labels, shares, costs, ids=ids),
        ):
            given_ = np.bincount(labels[picks.rows], weights=costs[picks.rows], minlength=2)
            assert np.abs(given_ - shares).max() < 200

    def test_by_influence_a_cluster_has_the_tokens_of_its_best(self) -> None:
        f, labels, costs = np.array([-3.0, -2.0, -1.0, 0.0]), np.array([0, 1, 0, 1]), np.array([5, 4, 3, 9])
        ids = list("abcd")
        shares = [token_budgets(f, labels, n, costs, ids=ids, rule="influence") for n in (0, 4, 7, 10, 13, 21)]
        assert shares == [[0, 0], [4, 0], [5, 2], [6, 4], [8, 5], [8, 13]]

    def test_what_cannot_be_is_refused(self) -> None:
        f, labels, costs, ids = np.zeros(2), np.array([0, 1]), np.array([5, 4]), ["a", "b"]
        with pytest.raises(ValueError, match=r"budget 10 is not between 0 and the 9 tokens of the pool"):
            token_budgets(f, labels, 10, costs, ids=ids, rule="proportional")
        with pytest.raises(ValueError, match=r"share 6 is not between 0 and the 5 tokens of cluster 0"):
            fill_clusters_individually(f, labels, [6, 0], costs, ids=ids)
        with pytest.raises(ValueError, match=r"2 clusters but 1 shares"):
            fill_clusters(np.eye(2), f, labels, [6], costs, alpha=1.0, beta=1.0, ids=ids)
        with pytest.raises(ValueError, match="budget rule 'global' is neither"):
            token_budgets(f, labels, 1, costs, ids=ids, rule="global")
