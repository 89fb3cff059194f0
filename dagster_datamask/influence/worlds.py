"""Synthetic worlds in which it is known which documents help: for the study of influence and for tests.

Here: documents of Markov topics as rows of tokens, a reference and a second reference held out, and features of them.
Not here: real text, language models.

A world has topics, each a Markov chain over one vocabulary with a few likely successors a token. A document follows one
topic, and each of its tokens is replaced by a uniform one with the probability of its noise level. The references come
from the relevant topics alone, without noise: so a document helps the more, the less noisy it is and the more its topic
counts, and copies of a topic help less and less.
"""

from dataclasses import dataclass, field

import numpy as np

from dagster_datamask import keyed

# likely successors of a token in a topic, and the share of steps that take one of them
_SUCCESSORS = 4
_FOLLOWED = 0.9


@dataclass(frozen=True)
class WorldOptions:
    """vocabulary: tokens 0..vocabulary−1; topics, of which the first `relevant` are what the references are about;
    noise: the levels, of which each document has one, all equally often; pool, reference, held_out: documents of
    `length` tokens."""

    vocabulary: int = 128
    topics: int = 20
    relevant: int = 8
    noise: tuple[float, ...] = (0.0, 0.3, 0.7)
    length: int = 64
    pool: int = 2000
    reference: int = 32
    held_out: int = 128

    def __post_init__(self) -> None:
        if self.vocabulary <= _SUCCESSORS or self.length < 2:
            raise ValueError(
                f"a vocabulary of {self.vocabulary} and {self.length} tokens a document: more than {_SUCCESSORS} and "
                "at least 2 are needed"
            )
        if not 1 <= self.relevant <= self.topics:
            raise ValueError(f"{self.relevant} relevant topics of {self.topics}")
        if not self.noise or not all(0 <= level <= 1 for level in self.noise):
            raise ValueError(f"noise levels {self.noise} must be one or more shares between 0 and 1")


@dataclass(frozen=True, eq=False)
class World:
    """pool, reference, held_out: int64[n, length] tokens; ids: of the pool's documents; topics int64[n], noise
    float64[n]: of the pool's; relevant: bool[n], whether the topic is one of the references'."""

    ids: list[str]
    pool: np.ndarray = field(repr=False)
    topics: np.ndarray = field(repr=False)
    noise: np.ndarray = field(repr=False)
    relevant: np.ndarray = field(repr=False)
    reference: np.ndarray = field(repr=False)
    held_out: np.ndarray = field(repr=False)


def world(seed: int, options: WorldOptions = WorldOptions()) -> World:
    """The world of this seed. No document occurs twice, so pool, reference and held-out reference are disjoint.

    Raises ValueError where so many different documents cannot be drawn.
    """
    draws = keyed.rng(seed, "world", "topics").random((options.topics, options.vocabulary, options.vocabulary))
    # the first of a random order, for every topic and token its own
    successors = np.argsort(draws, axis=2, kind="stable")[:, :, :_SUCCESSORS]
    seen: set[bytes] = set()
    relevant = np.arange(options.relevant)
    reference, _, _ = _documents(seed, "reference", options.reference, relevant, (0.0,), successors, options, seen)
    held_out, _, _ = _documents(seed, "held_out", options.held_out, relevant, (0.0,), successors, options, seen)
    every = np.arange(options.topics)
    pool, topics, noise = _documents(seed, "pool", options.pool, every, options.noise, successors, options, seen)
    ids = [f"world-{seed}-{i:06d}" for i in range(options.pool)]
    return World(ids, pool, topics, noise, topics < options.relevant, reference, held_out)


def bigram_features(documents: np.ndarray, size: int = 1024) -> np.ndarray:
    """float32[n, size], unit norm: square roots of the counts of hashed pairs of neighbouring tokens of int[n, length]
    documents: what stands for a text encoder in a world."""
    pairs = documents[:, :-1].astype(np.uint64) << np.uint64(32) | documents[:, 1:].astype(np.uint64)
    different, at = np.unique(pairs, return_inverse=True)
    places = keyed.hash64([str(pair) for pair in different.tolist()], 0, "bigram") % np.uint64(size)
    columns = places.astype(np.int64)[at.reshape(pairs.shape)]
    counts = np.zeros((len(documents), size), np.float32)
    np.add.at(counts, (np.arange(len(documents))[:, None], columns), 1.0)
    counts = np.sqrt(counts)
    return counts / np.linalg.norm(counts, axis=1, keepdims=True)


def _documents(
    seed: int,
    name: str,
    count: int,
    topics: np.ndarray,
    levels: tuple[float, ...],
    successors: np.ndarray,
    options: WorldOptions,
    seen: set[bytes],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(int64[count, length] tokens, int64[count] topics, float64[count] noise), none of them in `seen`, which they
    join."""
    found: list[tuple[np.ndarray, int, float]] = []
    for attempt in range(100):
        rng = keyed.rng(seed, "world", name, attempt)
        topic = topics[rng.integers(topics.size, size=count)]
        noise = np.array(levels)[rng.integers(len(levels), size=count)]
        for row, t, level in zip(_follow(rng, topic, noise, successors, options), topic, noise, strict=True):
            if row.tobytes() not in seen and len(found) < count:
                seen.add(row.tobytes())
                found.append((row, int(t), float(level)))
        if len(found) == count:
            break
    else:
        raise ValueError(f"{count} different documents for the {name} cannot be drawn; lengthen them")
    tokens = np.array([row for row, _, _ in found], np.int64).reshape(count, options.length)
    return tokens, np.array([t for _, t, _ in found], np.int64), np.array([level for _, _, level in found], np.float64)


def _follow(
    rng: np.random.Generator, topic: np.ndarray, noise: np.ndarray, successors: np.ndarray, options: WorldOptions
) -> np.ndarray:
    """int64[n, length]: each topic's chain, then its noise."""
    n, length, vocabulary = topic.size, options.length, options.vocabulary
    tokens = rng.integers(vocabulary, size=(n, length))
    followed = rng.random((n, length)) < _FOLLOWED
    # likelier successors first: 1/2, 1/4, and what is left for the last two
    which = np.minimum(rng.geometric(0.5, size=(n, length)) - 1, _SUCCESSORS - 1)
    for t in range(1, length):
        after = successors[topic, tokens[:, t - 1], which[:, t]]
        tokens[:, t] = np.where(followed[:, t], after, tokens[:, t])
    replaced = rng.random((n, length)) < noise[:, None]
    return np.where(replaced, rng.integers(vocabulary, size=(n, length)), tokens)
