import itertools

import numpy as np
import pytest

from dagster_datamask.influence.worlds import World, WorldOptions, bigram_features, world

SMALL = WorldOptions(topics=6, relevant=2, pool=600, reference=20, held_out=30)


@pytest.fixture(scope="module")
def small() -> World:
    return world(0, SMALL)


def test_a_world_depends_on_its_seed_alone(small: World) -> None:
    again, other = world(0, SMALL), world(1, SMALL)
    for name in ("pool", "topics", "noise", "reference", "held_out"):
        assert np.array_equal(getattr(small, name), getattr(again, name))
        assert not np.array_equal(getattr(small, name), getattr(other, name))
    assert small.ids == again.ids and len(set(small.ids)) == 600


def test_documents_are_as_asked(small: World) -> None:
    assert small.pool.shape == (600, 64) and small.reference.shape == (20, 64) and small.held_out.shape == (30, 64)
    every = np.concatenate([small.pool, small.reference, small.held_out])
    assert every.min() >= 0 and every.max() < 128
    assert len(np.unique(every, axis=0)) == 650
    assert set(small.noise.tolist()) == {0.0, 0.3, 0.7}
    assert np.array_equal(small.relevant, small.topics < 2)
    # six topics and three levels, equally often: four standard errors
    for counts in (np.bincount(small.topics, minlength=6), np.unique(small.noise, return_counts=True)[1]):
        share = 1 / len(counts)
        assert np.all(np.abs(counts - 600 * share) < 4 * np.sqrt(600 * share * (1 - share)))


def test_topics_are_chains_and_noise_breaks_them(small: World) -> None:
    def pairs(documents: np.ndarray) -> set[tuple[int, int]]:
        return set(zip(documents[:, :-1].ravel().tolist(), documents[:, 1:].ravel().tolist(), strict=True))

    clean = small.noise == 0
    of_topic = [pairs(small.pool[clean & (small.topics == topic)]) for topic in range(6)]

    def known(documents: np.ndarray, seen: set[tuple[int, int]]) -> float:
        found = [pair in seen for row in documents.tolist() for pair in itertools.pairwise(row)]
        return float(np.mean(found))

    likely = [known(small.reference, seen) for seen in of_topic]
    # each reference is about one of two topics
    assert min(likely[:2]) > max(likely[2:]) + 0.2
    levels = [known(small.pool[(small.topics == 0) & (small.noise == level)], of_topic[0]) for level in (0.0, 0.3, 0.7)]
    assert levels[0] == 1.0 and levels[0] > levels[1] + 0.2 > levels[2] + 0.3


def test_features_know_the_topic(small: World) -> None:
    features = bigram_features(small.pool)
    assert features.shape == (600, 1024) and features.dtype == np.float32
    assert np.allclose(np.linalg.norm(features, axis=1), 1.0, atol=1e-5)
    clean = np.flatnonzero(small.noise == 0)
    cosines = features[clean] @ features[clean].T
    np.fill_diagonal(cosines, -1)
    assert np.mean(small.topics[clean[cosines.argmax(axis=1)]] == small.topics[clean]) > 0.9
    # a document's features are its own
    assert np.array_equal(bigram_features(small.pool[5:7]), features[5:7])


def test_features_are_counts() -> None:
    features = bigram_features(np.array([[1, 2, 1, 2, 1]]), 1 << 16)
    assert sorted(features[features > 0].tolist()) == pytest.approx([np.sqrt(0.5), np.sqrt(0.5)])
    assert bigram_features(np.zeros((0, 5), np.int64)).shape == (0, 1024)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_tiny_worlds(n: int) -> None:
    found = world(3, WorldOptions(pool=n, reference=n, held_out=n))
    assert found.pool.shape == found.reference.shape == (n, 64) and len(found.ids) == found.noise.size == n


def test_options_that_mean_nothing() -> None:
    with pytest.raises(ValueError, match="21 relevant topics of 20"):
        WorldOptions(relevant=21)
    with pytest.raises(ValueError, match="noise levels"):
        WorldOptions(noise=(0.0, 1.5))
    with pytest.raises(ValueError, match="a vocabulary of 4"):
        WorldOptions(vocabulary=4)
    with pytest.raises(ValueError, match="different documents for the pool cannot be drawn; lengthen them"):
        world(0, WorldOptions(vocabulary=5, length=2, pool=30, reference=1, held_out=1))
