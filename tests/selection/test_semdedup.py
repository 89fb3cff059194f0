from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_datamask.accelerator import MemoryPlanError
from dagster_datamask.selection import semdedup as module
from dagster_datamask.selection.sampling import top_s
from dagster_datamask.selection.semdedup import (
    Deduplicated,
    SemDeDupOptions,
    nearest_earlier,
    representatives,
    semdedup,
)

from .oracles import vectors


def pool(seed: int, n: int, d: int, shift: float = 0.0, copies: int = 0) -> np.ndarray:
    """float32[n, d] unit rows, the last `copies` of them equal to rows before them."""
    rng = np.random.default_rng(seed)
    z = vectors(rng, n, d, shift).astype(np.float32)
    if copies:
        z[n - copies :] = z[rng.integers(n - copies, size=copies)]
    return z


def run(z: np.ndarray, budget: int, clusters: int | None = None, keep: str = "hard", **named) -> Deduplicated:
    options = SemDeDupOptions(clusters=clusters, iterations=4, keep=keep)  # type: ignore[arg-type]
    return semdedup(z, budget=budget, options=options, seed=0, split=0, **named)


def sees(clusters: np.ndarray, closeness: np.ndarray, keep: str) -> list[list[int]]:
    """For each document the earlier ones of its cluster, by the definition."""
    key = closeness if keep == "hard" else -closeness
    n = len(key)
    return [[j for j in range(n) if clusters[j] == clusters[i] and (key[j], j) < (key[i], i)] for i in range(n)]


@pytest.mark.parametrize("keep", ["hard", "easy"])
@pytest.mark.parametrize("tile", [3, 1024])
@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_nearest_earlier_is_the_definition(keep: str, tile: int, shift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TILE", tile)
    rng = np.random.default_rng(3)
    z = pool(3, 60, 4, shift)
    clusters = rng.integers(4, size=60).astype(np.int32)
    closeness = rng.integers(5, size=60).astype(np.float32)
    largest, earlier = nearest_earlier(z, clusters, closeness, keep)  # type: ignore[arg-type]
    cosines = z.astype(np.float64) @ z.T.astype(np.float64)
    firsts = 0
    for i, before in enumerate(sees(clusters, closeness, keep)):
        if not before:
            firsts += 1
            assert (largest[i], earlier[i]) == (-1.0, -1)
        else:
            assert earlier[i] == before[int(cosines[i, before].argmax())]
            assert largest[i] == pytest.approx(cosines[i, earlier[i]], abs=1e-6)
    assert firsts == 4


def by_epsilon(z: np.ndarray, found: Deduplicated, largest: np.ndarray, earlier: np.ndarray) -> set[int]:
    """What the paper's rule keeps at this ε."""
    return {i for i in range(len(z)) if earlier[i] < 0 or largest[i] <= 1.0 - found.epsilon + 1e-12}


@pytest.mark.parametrize("keep", ["hard", "easy"])
def test_epsilon_of_a_budget_gives_that_budget_back(keep: str) -> None:
    z = pool(1, 200, 6)
    for budget in (20, 21, 100, 199, 200):
        progress: list[tuple[int, int, dict]] = []
        found = run(z, budget, clusters=10, keep=keep, progress=lambda *entry, log=progress: log.append(entry))
        largest = np.where(found.score == 2.0, -1.0, -found.score)
        first = np.where(found.score == 2.0, -1, 0)
        assert by_epsilon(z, found, largest, first) == set(found.positions.tolist())
        assert found.positions.tolist() == top_s(found.score, budget).tolist()
        assert progress[-1][0] == progress[-1][1] and progress[-1][2] == {"compared": 200}


def test_smaller_epsilon_keeps_more() -> None:
    z = pool(2, 150, 5, copies=40)
    found = [run(z, budget, clusters=5) for budget in range(5, 151, 5)]
    assert all(a.epsilon >= b.epsilon for a, b in pairwise(found))
    assert all(set(a.positions) < set(b.positions) for a, b in pairwise(found))
    # 110 distinct vectors: what is kept beyond them repeats exactly
    assert found[-1].epsilon == 0.0


def test_copies_go_first_and_name_the_one_that_stays() -> None:
    z = pool(4, 120, 8, copies=30)
    found = run(z, 90, clusters=6)
    assert len(np.unique(z[found.positions], axis=0)) == 90
    dropped = np.setdiff1d(np.arange(120), found.positions)
    np.testing.assert_array_equal(z[found.kept[dropped]], z[dropped])
    np.testing.assert_array_equal(found.similarity[dropped], 1.0)
    assert np.isnan(found.similarity[found.positions]).all() and (found.kept[found.positions] == -1).all()
    # a copy tied with others at the cut stays by position
    one_more = np.setdiff1d(run(z, 91, clusters=6).positions, found.positions)
    assert one_more.tolist() == [min(dropped)]


def test_hard_keeps_the_farthest_and_easy_the_nearest() -> None:
    z = pool(5, 40, 3, shift=1.0)
    centre = z.sum(axis=0) / np.linalg.norm(z.sum(axis=0))
    closeness = z @ centre
    assert run(z, 1, clusters=1, keep="hard").positions.tolist() == [int(closeness.argmin())]
    assert run(z, 1, clusters=1, keep="easy").positions.tolist() == [int(closeness.argmax())]


def test_chain_of_dropped_documents_ends_at_a_kept_one() -> None:
    angles = np.array([0.0, 0.1, 0.2, 0.3, 1.5])
    z = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    # each is nearest to the one before; 4 is kept too
    kept, similarity = representatives(z, np.array([-1, 0, 1, 2, 3]), np.array([0, 4]))
    assert kept.tolist() == [-1, 0, 0, 0, -1]
    np.testing.assert_allclose(similarity[1:4], np.cos(angles[1:4]), atol=1e-6)
    kept, similarity = representatives(z, np.array([-1, 0, 1, -1, 3]), np.array([2]))
    assert kept.tolist() == [-1, -1, -1, -1, -1] and np.isnan(similarity).all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    n=st.integers(0, 40),
    d=st.integers(1, 4),
    clusters=st.integers(1, 12) | st.none(),
    keep=st.sampled_from(["hard", "easy"]),
    share=st.floats(0, 1),
    copied=st.floats(0, 1),
)
def test_every_budget_is_met_and_every_dropped_document_is_accounted_for(
    seed: int, n: int, d: int, clusters: int | None, keep: str, share: float, copied: float
) -> None:
    z = pool(seed, n, d, copies=int(copied * max(0, n - 1)))
    budget = round(share * n)
    found = run(z, budget, clusters, keep)
    chosen = set(found.positions.tolist())
    assert len(chosen) == budget == found.positions.size
    assert np.isfinite(found.score).all() and np.isfinite(found.epsilon)
    firsts = np.flatnonzero(found.score == 2.0)
    assert firsts.size == np.unique(found.clusters).size
    for i in range(n):
        if i in chosen or (i in firsts and budget < firsts.size):
            assert found.kept[i] == -1 and np.isnan(found.similarity[i])
        elif found.kept[i] < 0:
            assert budget < firsts.size
        else:
            assert found.kept[i] in chosen
            assert found.clusters[found.kept[i]] == found.clusters[i]
            assert found.similarity[i] == pytest.approx(float(z[i] @ z[found.kept[i]]), abs=1e-6)
    if budget >= firsts.size:
        assert set(firsts.tolist()) <= chosen


@pytest.mark.parametrize("n", [1, 2, 50])
def test_equal_documents_leave_the_lowest_positions_of_what_nothing_parts(n: int) -> None:
    z = np.repeat(pool(0, 1, 5), n, axis=0)
    for budget in {0, 1, n - 1, n}:
        found = run(z, budget)
        assert found.positions.tolist() == list(range(budget))
        assert found.clusters.tolist() == [found.clusters[0]] * n
        if budget:
            assert found.kept.tolist() == [-1] * budget + [0] * (n - budget)


def test_opposite_documents_are_no_duplicates() -> None:
    z = np.array([[1.0, 0.0], [-1.0, 0.0]], np.float32)
    found = run(z, 1, clusters=1)
    assert found.positions.tolist() == [0] and found.kept.tolist() == [-1, 0]
    assert found.similarity[1] == -1.0 and found.score.tolist() == [2.0, 1.0]


def test_more_than_a_sample_is_clustered_by_its_nearest_centroid() -> None:
    z = pool(6, 600, 2)
    found = run(z, 300, clusters=2)
    means = np.stack([z[found.clusters == c].mean(axis=0) for c in (0, 1)])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    assert ((z @ means.T).argmax(axis=1) == found.clusters).mean() > 0.9


def test_seed_and_split_key_the_clusters() -> None:
    z = pool(7, 300, 6)
    options = SemDeDupOptions(clusters=8)

    def clusters(seed: int, split: int) -> list[int]:
        return semdedup(z, budget=100, options=options, seed=seed, split=split).clusters.tolist()

    assert clusters(0, 0) == clusters(0, 0)
    assert clusters(0, 0) != clusters(1, 0)
    assert clusters(0, 0) != clusters(0, 1)


def test_what_does_not_fit_is_refused_with_the_estimate() -> None:
    with pytest.raises(MemoryPlanError, match=r"SemDeDup of 500 documents in 23 clusters needs about 0\.\d\d GB"):
        run(pool(0, 500, 4), 100, memory_limit=1e6)


@pytest.mark.parametrize("budget", [-1, 6])
def test_budget_outside_the_pool_is_refused(budget: int) -> None:
    with pytest.raises(ValueError, match=f"budget {budget} is not between 0 and the 5 documents"):
        run(pool(0, 5, 3), budget)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"clusters": 0}, "clusters must be 1 or more"), ({"iterations": 0}, "1 iteration"), ({"keep": "all"}, "'all'")],
)
def test_options_that_make_no_sense_are_refused(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SemDeDupOptions(**options)
