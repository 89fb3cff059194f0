"""Synthetic worlds as subjects: three worlds, each with three seeds of model, order, trajectories and fit."""

from collections.abc import Callable

import numpy as np

from benchmarks.influence_study.subjects import Documents, Sizes, Subject
from dagster_datamask.influence.pretraining import pretrain
from dagster_datamask.influence.reference import of_sequences
from dagster_datamask.influence.worlds import WorldOptions, bigram_features, world

PLACE = "worlds"
# as many as a small model learns to tell apart in the steps of its warm-up
TOPICS, RELEVANT = 12, 4


def of_world(number: int, seed: int, sizes: Sizes, done: Callable[[int], None]) -> Subject:
    """World `number` under a seed; done(n) is told of training steps."""
    trained = (sizes.warm_up + sizes.later) * sizes.batch
    tested = sizes.test * sizes.steps
    found = world(
        number,
        WorldOptions(
            vocabulary=sizes.model.vocabulary,
            topics=TOPICS,
            relevant=RELEVANT,
            length=sizes.model.context,
            pool=trained + sizes.probe + tested + sizes.pool,
            reference=sizes.reference,
            held_out=sizes.held_out,
        ),
    )
    early = pretrain(
        sizes.model,
        found.pool[: sizes.warm_up * sizes.batch],
        sizes.training(seed),
        until=sizes.warm_up,
        progress=lambda *_: done(1),
    ).checkpoint
    later = pretrain(
        early,
        found.pool[sizes.warm_up * sizes.batch : trained],
        sizes.training(seed),
        until=sizes.warm_up + sizes.later,
        progress=lambda *_: done(1),
    ).checkpoint
    ends = np.cumsum([trained, sizes.probe, tested, sizes.pool])
    probe, test, pool = (
        Documents(found.ids[a:b], found.pool[a:b], bigram_features(found.pool[a:b], sizes.features))
        for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    )
    clean = found.relevant & (found.noise == 0)
    return Subject(
        f"world {number}, seed {seed}",
        PLACE,
        seed,
        sizes,
        early,
        later,
        of_sequences(found.reference),
        of_sequences(found.held_out),
        probe,
        test,
        pool,
        "square roots of hashed bigram counts",
        np.flatnonzero(clean[ends[2] : ends[3]]),
    )
