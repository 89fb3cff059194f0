import copy
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dagster_datamask.influence import rollouts
from dagster_datamask.influence.language_model import Checkpoint, NoOptimizerState, load_checkpoint
from dagster_datamask.influence.reference import Reference, of_sequences
from dagster_datamask.influence.rollouts import (
    ROLLOUTS,
    ProbeOptions,
    Prober,
    random_trajectories,
    records,
    reference_loss,
    roll_out,
)

from .small import checkpoint, documents, reference
from .test_language_model import tiny_llama

POOL = list(documents(12, name="pool"))
# documents of every length
POOL[1], POOL[3] = POOL[1][:7], POOL[3][:2]
NAMES = [f"doc-{i}" for i in range(12)]
TRAJECTORIES = np.array([[0, 1, 2, 3], [3, 4, 5, 0], [11, 10, 9, 8], [0, 1, 2, 4]])
OPTIONS = ProbeOptions(lr=5e-3, weight_decay=0.2, clip=0.7)


@pytest.fixture(scope="module")
def prober() -> Iterator[Prober]:
    with Prober(checkpoint(), reference(), OPTIONS, processes=1) as made:
        yield made


def plain_loop(start: Checkpoint, trajectory: list[int], options: ProbeOptions) -> tuple[float, list[float]]:
    """(the base loss, the loss after each step), by torch's optimizer and the model itself."""
    model = copy.deepcopy(start.model)
    betas = (options.beta1, options.beta2)
    optimizer = torch.optim.AdamW(model.parameters(), options.lr, betas=betas, weight_decay=options.weight_decay)
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(float(start.moments.step)),
            "exp_avg": start.moments.first[name].clone(),
            "exp_avg_sq": start.moments.second[name].clone(),
        }
    found = reference()
    labels = torch.from_numpy(np.where(found.mask, found.tokens, -100))

    def loss() -> float:
        with torch.no_grad():
            return float(model(torch.from_numpy(found.tokens), labels=labels).loss)

    losses = [loss()]
    for row in trajectory:
        tokens = torch.from_numpy(POOL[row])[None]
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        losses.append(loss())
    return losses[0], losses[1:]


@pytest.mark.parametrize("beta1", [0.9, 0.0])
def test_increments_are_those_of_a_plain_loop(beta1: float) -> None:
    options = replace(OPTIONS, beta1=beta1)
    found = roll_out(checkpoint(), reference(), POOL, TRAJECTORIES, options, processes=1)
    for row, trajectory in enumerate(TRAJECTORIES.tolist()):
        base, losses = plain_loop(checkpoint(), trajectory, options)
        assert found.base_loss == pytest.approx(base, abs=2e-6)
        np.testing.assert_allclose(found.losses[row], losses, atol=5e-6)
        np.testing.assert_allclose(found.increments[row], np.diff([base, *losses]), atol=1e-5)
    # what is compared is larger than what it is compared to
    assert np.abs(found.increments).min() > 1e-4


def test_momentum_credits_a_document_with_those_before_it() -> None:
    found = {
        beta1: roll_out(checkpoint(), reference(), POOL, TRAJECTORIES, replace(OPTIONS, beta1=beta1), processes=1)
        for beta1 in (0.0, 0.9)
    }
    # without momentum and with the same second moments the first step is the document's own gradient alone
    assert not np.allclose(found[0.0].increments[:, 0], found[0.9].increments[:, 0], atol=1e-4)


def test_increments_sum_to_the_last_cumulative(prober: Prober) -> None:
    found = prober.roll_out(POOL, TRAJECTORIES)
    np.testing.assert_allclose(found.increments.sum(axis=1), found.cumulative[:, -1], atol=1e-12)
    assert found.increments.dtype == np.float64 and found.base_loss == prober.base_loss and found.failed == 0
    # what two trajectories have in common they step alike
    assert found.losses[0, :3].tolist() == found.losses[3, :3].tolist() and found.losses[0, 3] != found.losses[3, 3]


def test_a_trajectory_is_the_same_bits_again_and_after_another(prober: Prober) -> None:
    first = prober.roll_out(POOL, TRAJECTORIES[:1]).losses
    assert prober.roll_out(POOL, TRAJECTORIES[:1]).losses.tolist() == first.tolist()
    prober.roll_out(POOL, TRAJECTORIES[1:])
    prober.brute_force(POOL[:3], 2)
    assert prober.roll_out(POOL, TRAJECTORIES[:1]).losses.tolist() == first.tolist()
    with Prober(checkpoint(), reference(), OPTIONS, processes=1) as another:
        assert another.roll_out(POOL, TRAJECTORIES[::-1]).losses[-1:].tolist() == first.tolist()
    assert prober.checkpoint.identity == checkpoint().identity


def test_processes_and_chunks_leave_no_trace(prober: Prober) -> None:
    drawn = random_trajectories(NAMES, 50, 4, 0)
    alone = prober.roll_out(POOL, drawn).losses
    with Prober(checkpoint(), reference(), OPTIONS, processes=2) as several:
        assert several.roll_out(POOL, drawn).losses.tolist() == alone.tolist()
        assert several.roll_out(POOL, drawn[20:]).losses.tolist() == alone[20:].tolist()
        chosen = several.brute_force(POOL, 2)
        (killed, *_) = several._pool._processes
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"that rolls out was killed.*smaller compute\.processes"):
            several.roll_out(POOL, drawn)
        # and starts anew
        assert several.roll_out(POOL, drawn).losses.tolist() == alone.tolist()
    assert chosen.influences.tobytes() == prober.brute_force(POOL, 2).influences.tobytes()


def test_single_probes_are_first_steps(prober: Prober) -> None:
    singles = prober.single_probes(POOL, np.arange(12))
    assert singles[TRAJECTORIES[:, 0]].tolist() == prober.roll_out(POOL, TRAJECTORIES).increments[:, 0].tolist()
    assert prober.single_probes(POOL, np.array([7])).tolist() == [singles[7]]
    assert prober.single_probes(POOL, np.zeros(0, np.int64)).tolist() == []


def test_brute_force_is_the_greedy_of_true_increments(prober: Prober) -> None:
    pool = POOL[:6]
    found = prober.brute_force(pool, 3)
    taken: list[int] = []
    for t in range(3):
        left = [row for row in range(6) if row not in taken]
        increments = prober.roll_out(pool, np.array([[*taken, row] for row in left])).increments[:, -1]
        np.testing.assert_allclose(found.influences[t, left], increments, atol=1e-12)
        assert np.isnan(found.influences[t, taken]).all()
        taken.append(left[int(increments.argmin())])
    assert found.rows.tolist() == taken
    whole = prober.roll_out(pool, found.rows[None])
    np.testing.assert_allclose(found.increments, whole.increments[0], atol=1e-12)
    assert found.base_loss == whole.base_loss


def test_equal_influences_are_told_apart_by_the_id(prober: Prober) -> None:
    twins = [POOL[0]] * 4
    first = {prober.brute_force(twins, 1, [f"{name}{k}" for k in range(4)]).rows[0] for name in "abcdefgh"}
    assert len(first) > 1
    ids = ["w", "x", "y", "z"]
    best = ids[prober.brute_force(twins, 1, ids).rows[0]]
    assert ids[::-1][prober.brute_force(twins, 1, ids[::-1]).rows[0]] == best


def test_a_loss_that_is_not_finite_is_recorded_and_counted() -> None:
    with Prober(checkpoint(), reference(), ProbeOptions(lr=1e30), processes=1) as prober:
        found = prober.roll_out(POOL, TRAJECTORIES)
        assert found.failed == 4 and np.isnan(found.increments).any(axis=1).all()
        # once gone, gone
        gone = np.isnan(found.losses)
        assert (np.diff(gone.astype(int), axis=1) >= 0).all()
        table = records(found, prober, NAMES, policy="random", seed=0)
        reasons = table["reason"].to_pylist()
        assert {"non_finite_loss"} <= set(reasons) and [r is not None for r in reasons] == gone.ravel().tolist()
        assert table["influence"].null_count == table["cumulative"].null_count == gone.sum()
        with pytest.raises(ValueError, match=r"choice \d: no document leads to a finite loss"):
            prober.brute_force(POOL, 4)
        # the next trajectory starts from the checkpoint, not from what is broken
        assert prober.base_loss == pytest.approx(reference_loss(checkpoint(), reference()), abs=1e-9)
        assert prober.roll_out(POOL, TRAJECTORIES).losses.tobytes() == found.losses.tobytes()


def test_records(prober: Prober) -> None:
    found = prober.roll_out(POOL, TRAJECTORIES[:2])
    table = records(found, prober, NAMES, policy="random", seed=5, first=7)
    assert table.schema == ROLLOUTS and len(table) == 8
    rows = table.to_pylist()
    assert [(r["trajectory_id"], r["position"], r["doc_id"]) for r in rows[2:6]] == [
        (7, 2, "doc-2"),
        (7, 3, "doc-3"),
        (8, 0, "doc-3"),
        (8, 1, "doc-4"),
    ]
    assert [r["influence"] for r in rows] == found.increments.ravel().tolist()
    assert [r["cumulative"] for r in rows] == found.cumulative.ravel().tolist()
    constant = {(r["policy"], r["checkpoint_id"], r["seed"], r["base_loss"], r["lr"], r["beta1"]) for r in rows}
    assert constant == {("random", checkpoint().identity, 5, found.base_loss, 5e-3, 0.9)}
    assert all(r["reason"] is None for r in rows)
    empty = records(prober.roll_out(POOL, TRAJECTORIES[:0]), prober, NAMES, policy="random", seed=5)
    assert len(empty) == 0 and empty.schema == ROLLOUTS


def test_the_loss_is_over_the_tokens_that_count() -> None:
    found = reference()
    base, _ = plain_loop(checkpoint(), [], OPTIONS)
    assert reference_loss(checkpoint(), found) == pytest.approx(base, abs=2e-6)
    # neither padding nor what stands before an answer's first token counts, nor how rows come together
    changed = found.tokens.copy()
    changed[3, 15:] = 9
    assert reference_loss(checkpoint(), Reference(changed, found.mask)) == reference_loss(checkpoint(), found)
    order = [3, 1, 4, 0, 2]
    mixed = Reference(found.tokens[order], found.mask[order])
    assert reference_loss(checkpoint(), mixed) == pytest.approx(reference_loss(checkpoint(), found), abs=1e-6)


def test_references_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = roll_out(checkpoint(), reference(), POOL, TRAJECTORIES, OPTIONS, processes=1)
    monkeypatch.setattr(rollouts, "CPU_BATCH_TOKENS", 20)
    found = roll_out(checkpoint(), reference(), POOL, TRAJECTORIES, OPTIONS, processes=1)
    np.testing.assert_allclose(found.losses, whole.losses, atol=2e-6)


@pytest.mark.parametrize("copies", [3, 8])
def test_many_at_once_are_as_one_after_another(monkeypatch: pytest.MonkeyPatch, prober: Prober, copies: int) -> None:
    monkeypatch.setattr(rollouts, "_copies", lambda checkpoint, accelerator: copies)
    with Prober(checkpoint(), reference(), OPTIONS, processes=1) as many:
        found = many.roll_out(POOL, TRAJECTORIES)
        np.testing.assert_allclose(found.losses, prober.roll_out(POOL, TRAJECTORIES).losses, atol=1e-5)
        # where a trajectory stands does not matter
        assert many.roll_out(POOL, TRAJECTORIES[2:3]).losses.tolist() == pytest.approx(found.losses[2:3], abs=1e-6)
        np.testing.assert_allclose(
            many.brute_force(POOL, 2).influences, prober.brute_force(POOL, 2).influences, atol=1e-5
        )


def test_the_learning_rate_is_the_checkpoints_own(prober: Prober) -> None:
    own = replace(OPTIONS, lr=None)
    found = roll_out(checkpoint(lr=5e-3), reference(), POOL, TRAJECTORIES, own, processes=1)
    assert found.losses.tolist() == prober.roll_out(POOL, TRAJECTORIES).losses.tolist()


def test_the_moments_are_the_checkpoints_own(prober: Prober) -> None:
    fresh = roll_out(checkpoint(), reference(), POOL, TRAJECTORIES, replace(OPTIONS, fresh_moments=True), processes=1)
    assert np.abs(fresh.losses - prober.roll_out(POOL, TRAJECTORIES).losses).min() > 1e-4
    bare = replace(checkpoint(), moments=None)
    with pytest.raises(
        NoOptimizerState, match=r"without optimizer state, and a probe reloads its moments; take .*fresh"
    ):
        Prober(bare, reference(), OPTIONS)
    asked = replace(OPTIONS, fresh_moments=True)
    assert roll_out(bare, reference(), POOL, TRAJECTORIES, asked, processes=1).losses.tolist() == fresh.losses.tolist()


def test_other_models_are_probed_alike(tmp_path: Path) -> None:
    llama = load_checkpoint(tiny_llama(tmp_path / "llama")).with_fresh_moments()
    found = roll_out(llama, reference(), POOL, TRAJECTORIES, OPTIONS, processes=1)
    _, losses = plain_loop(llama, TRAJECTORIES[0].tolist(), OPTIONS)
    np.testing.assert_allclose(found.losses[0], losses, atol=5e-6)


@pytest.mark.parametrize(
    ("documents_", "trajectories", "message"),
    [
        ([POOL[0], POOL[0][:0]], [[0, 1]], "document 'b' is empty: with 0 tokens"),
        ([POOL[0], POOL[0][:1]], [[0, 1]], "document 'b' is empty: with 1 tokens"),
        ([POOL[0], np.zeros(17, np.int64)], [[0, 1]], "document 'b' has 17 tokens, and the model sees 16; cut it"),
        ([POOL[0], np.array([1, 32])], [[0, 1]], "document 'b' has tokens outside the model's vocabulary of 32"),
        ([POOL[0], np.array([1, -1])], [[0, 1]], "document 'b' has tokens outside"),
        (POOL[:2], [[0, 2]], "row 2 is none of the 2 documents"),
        (POOL[:2], [[0, -1]], "row -1 is none of the 2 documents"),
        (POOL[:2], [[0, 1], [1, 1]], "trajectory 1 takes a document twice"),
        (POOL[:2], [0, 1], r"must be \[m, T ≥ 1\] rows of documents, not \[2\]"),
    ],
)
def test_what_cannot_be_rolled_out(prober: Prober, documents_: list, trajectories: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prober.roll_out(documents_, np.array(trajectories), ["a", "b"])


def test_what_cannot_be_probed() -> None:
    tokens = documents(2, 17)
    for found, message in [
        (of_sequences(tokens), "reference rows have 17 tokens, and the model sees 16"),
        (of_sequences(documents(2, vocabulary=40)), "the reference has tokens outside the model's vocabulary of 32"),
    ]:
        with pytest.raises(ValueError, match=message):
            Prober(checkpoint(), found, OPTIONS)
    for lr, message in [(None, "states no learning rate; give the probe's lr"), (0.0, "learning rate is 0.0")]:
        with pytest.raises(ValueError, match=message):
            Prober(replace(checkpoint(), lr=lr), reference())
    broken = checkpoint()
    with torch.no_grad():
        broken.model.transformer.wte.weight.mul_(1e38)
    with pytest.raises(ValueError, match=r"loss on the reference is (nan|inf); take an earlier checkpoint"):
        Prober(broken, reference(), OPTIONS)
    for change, message in [({"lr": -1.0}, "must be positive"), ({"beta1": 1.0}, r"beta1 must lie in \[0, 1\)")]:
        with pytest.raises(ValueError, match=message):
            ProbeOptions(**change)


@pytest.mark.parametrize("n", [1, 2])
def test_pools_of_one_and_two(prober: Prober, n: int) -> None:
    chosen = prober.brute_force(POOL[:n], n)
    assert sorted(chosen.rows.tolist()) == list(range(n)) and np.isfinite(chosen.increments).all()
    for count in (0, n + 1):
        with pytest.raises(ValueError, match=f"{count} documents to choose from {n}"):
            prober.brute_force(POOL[:n], count)


@given(st.integers(1, 8), st.integers(0, 6), st.integers(0, 9), st.randoms(use_true_random=False))
def test_random_trajectories(steps: int, count: int, first: int, order) -> None:
    ids = [f"d{i}" for i in range(8)]
    found = random_trajectories(ids, count, steps, 3, first)
    assert found.shape == (count, steps) and found.dtype == np.int64
    assert all(len(set(row)) == steps for row in found.tolist())
    # neither the cut into calls nor the order of rows leaves a trace
    assert found.tolist() == random_trajectories(ids, first + count, steps, 3)[first:].tolist()
    mixed = order.sample(ids, 8)
    assert [[mixed[i] for i in row] for row in random_trajectories(mixed, count, steps, 3, first).tolist()] == [
        [ids[i] for i in row] for row in found.tolist()
    ]


def test_trajectories_are_uniform() -> None:
    drawn = random_trajectories([str(i) for i in range(5)], 4000, 2, 0)
    pairs = np.bincount(drawn[:, 0] * 5 + drawn[:, 1], minlength=25).reshape(5, 5)
    assert (np.diag(pairs) == 0).all()
    # 200 wanted of each of the twenty, within five standard deviations
    assert np.abs(pairs[~np.eye(5, dtype=bool)] - 200).max() < 5 * (200 * 0.95) ** 0.5
    assert not np.array_equal(drawn, random_trajectories([str(i) for i in range(5)], 4000, 2, 1))


@pytest.mark.parametrize(("ids", "steps", "message"), [([], 1, "0 documents"), (["a"], 2, "1 documents cannot fill")])
def test_fewer_documents_than_steps(ids: list[str], steps: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        random_trajectories(ids, 1, steps, 0)
    with pytest.raises(ValueError, match="a trajectory of 0 steps"):
        random_trajectories(["a"], 1, 0, 0)
