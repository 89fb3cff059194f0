"""A relation that is there: increments made by Eq. 13 itself, from vectors that the fit is given as features.

Here: the check that a gain would be found by this fit on as many trajectories. Not here: what a language model does.
"""

from typing import Any

import numpy as np

from benchmarks.influence_study.subjects import HELD_OUT, WORLD, Sizes
from dagster_datamask import keyed
from dagster_datamask.influence.relational import fit, relational_influence, sides
from dagster_datamask.influence.rollouts import random_trajectories

# few, so that two documents are often alike and often the opposite
_WIDTH = 3


def planted(sizes: Sizes = WORLD, seed: int = 0) -> dict[str, Any]:
    """{"increments", "predicted": {model: …}} of test trajectories, float64[m, T] as lists; "law": without the noise.

    Unit vectors h, f = h·w, so that increments have a mean of about 0 and z-scoring leaves the law's form as it is;
    α = β = 1, and noise of half the increments' own spread. Training, validation and test
    documents have none in common.
    """
    steps, tested = sizes.steps, sizes.test * sizes.steps
    rng = keyed.rng(seed, "study-planted-vectors")
    h = rng.standard_normal((sizes.probe + tested, _WIDTH)).astype(np.float32)
    h /= np.linalg.norm(h, axis=1, keepdims=True)
    f = h @ rng.standard_normal(_WIDTH)
    ids = [f"planted-{k}" for k in range(sizes.probe)]
    held = sides(ids, seed, HELD_OUT)
    drawn = []
    for rows, count in ((np.flatnonzero(~held), sizes.main), (np.flatnonzero(held), sizes.validation)):
        drawn.append(rows[random_trajectories([ids[i] for i in rows.tolist()], count, steps, seed)])
    learning = np.concatenate(drawn)
    test = sizes.probe + np.arange(tested).reshape(-1, steps)

    def law(trajectories: np.ndarray) -> np.ndarray:
        made = relational_influence(h, f, trajectories, 1.0, 1.0)
        return made + made.std() / 2 * rng.standard_normal(made.shape)

    labels, truth = law(learning), law(test)
    predicted = {"law": relational_influence(h, f, test, 1.0, 1.0).tolist()}
    for mode in ("individual", "relational"):
        options = sizes.options(seed, mode=mode)
        model, _ = fit(h[: sizes.probe], learning, labels, options, ids, encoder="the planted vectors themselves")
        found = model.embed(h)
        predicted[mode] = model.group_influence(found, model.influence(found), test).tolist()
    return {"increments": truth.tolist(), "predicted": predicted}
