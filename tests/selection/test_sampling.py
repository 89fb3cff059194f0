from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_datamask import keyed
from dagster_datamask.accelerator import Accelerator
from dagster_datamask.selection.objectives import QualityDiversity
from dagster_datamask.selection.pool import prepare_pool
from dagster_datamask.selection.sampling import CpuDraws, TorchDraws, draws, ranks, top_s

from .oracles import ids_of, order_probabilities


@given(st.lists(st.integers(-3, 3), max_size=20), st.data())
def test_top_s_is_the_head_of_the_total_order(values: list[int], data: st.DataObject) -> None:
    scores = np.array(values, np.float64)
    size = data.draw(st.integers(0, len(values)))
    expected = sorted(sorted(range(len(values)), key=lambda i: (-values[i], i))[:size])
    assert top_s(scores, size).tolist() == expected
    assert sorted(np.flatnonzero(ranks(scores) <= size).tolist()) == expected


@pytest.mark.parametrize("size", [-1, 3])
def test_top_s_refuses_a_size_outside_the_pool(size: int) -> None:
    with pytest.raises(ValueError, match=f"cannot take the {size} best of 2"):
        top_s(np.zeros(2), size)


def both(group: int) -> list[CpuDraws | TorchDraws]:
    return [CpuDraws(keyed.rng(3, "test"), group), TorchDraws(Accelerator(), 3, group)]


@pytest.mark.parametrize("source", both(4000), ids=["numpy", "torch"])
def test_ordered_draws_have_plackett_luce_probabilities(source: CpuDraws | TorchDraws) -> None:
    logits = np.array([0.0, 1.0, -1.0, 0.5, 2.0, -0.3])
    expected = order_probabilities(logits, 3)
    counts: Counter[tuple[int, ...]] = Counter()
    rounds = 25
    for _ in range(rounds):
        keys = source.gumbel(source.put(logits))
        counts.update(map(tuple, source.fetch(source.order(keys, 3)).tolist()))
    total = sum(counts.values())
    assert total == rounds * 4000
    # chi-square over the 120 orders: mean 119, standard deviation 15.4
    chi = sum((counts[o] - total * p) ** 2 / (total * p) for o, p in expected.items())
    assert 60 < chi < 200


@pytest.mark.parametrize("source", both(64), ids=["numpy", "torch"])
@pytest.mark.parametrize("size", [1, 3, 7, 8])
def test_masks_hold_exactly_the_drawn(source: CpuDraws | TorchDraws, size: int) -> None:
    keys = source.gumbel(source.put(np.linspace(-1, 1, 8)))
    mask = source.fetch(source.mask(keys, size))
    order = source.fetch(source.order(keys, size))
    assert (mask.sum(axis=1) == size).all()
    assert all(set(np.flatnonzero(row)) == set(drawn) for row, drawn in zip(mask, order, strict=True))


def test_tied_keys_still_give_exact_sizes() -> None:
    source = CpuDraws(keyed.rng(0, "test"), 3)
    keys = np.array([[1, 1, 1, 1], [0, 2, 2, 2], [4, 3, 2, 1]], np.float32)
    assert source.mask(keys, 2).tolist() == [[1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 0, 0]]
    assert source.order(keys, 2).tolist() == [[0, 1], [1, 2], [0, 1]]


@pytest.mark.parametrize("source", both(2), ids=["numpy", "torch"])
def test_batches_are_uniform_distinct_and_sorted(source: CpuDraws | TorchDraws) -> None:
    hits = np.zeros(10)
    for _ in range(2000):
        batch = source.fetch(source.batch(10, 3))
        assert (np.diff(batch) > 0).all()
        hits[batch] += 1
    assert np.abs(hits / 2000 - 0.3).max() < 0.05


@pytest.mark.parametrize("source", both(70), ids=["numpy", "torch"])
def test_sums_are_the_product_of_the_masks_with_the_vectors(source: CpuDraws | TorchDraws) -> None:
    rng = np.random.default_rng(0)
    mask = (rng.random((70, 2000)) < 0.3).astype(np.float32)
    z = rng.standard_normal((2000, 5)).astype(np.float32)
    pool = prepare_pool(QualityDiversity(z, None, 0.0), ids_of(2000))
    batch = np.sort(rng.permutation(2000)[:1100])
    unit = z[pool.order[batch]] / np.linalg.norm(z[pool.order[batch]], axis=1, keepdims=True)
    rows = source.rows(pool.vectors, pool.order)
    found = source.fetch(source.sums(source.put(mask[:, :1100]), rows, source.index(batch), False))
    np.testing.assert_allclose(found, mask[:, :1100].astype(float) @ unit, atol=0.1 if source.xp is not np else 1e-3)
    np.testing.assert_allclose(source.fetch(source.single(rows(source.index(batch)))), unit, atol=1e-3)


def test_draws_depend_on_the_key_alone() -> None:
    def keys(seed: int, purpose: str, split: int) -> bytes:
        source = draws(Accelerator(), 40, seed, purpose, split)
        return source.gumbel(np.zeros(3000, np.float32)).tobytes()

    assert keys(0, "policy_gradient", 1) == keys(0, "policy_gradient", 1)
    assert len({keys(0, "p", 1), keys(1, "p", 1), keys(0, "p", 2), keys(0, "q", 1)}) == 4
