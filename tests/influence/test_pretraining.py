from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from dagster_datamask.influence import pretraining
from dagster_datamask.influence.language_model import NoOptimizerState, load_checkpoint
from dagster_datamask.influence.pretraining import PretrainingOptions, pretrain

from .small import OPTIONS, checkpoint, documents
from .test_language_model import tiny_llama

DATA = documents(12).astype(np.uint16)
RUN = PretrainingOptions(7, batch=5, lr=1e-2, warmup=2, save_every=2)


class Killed(BaseException):
    pass


def killed_at(step: int):
    def progress(done: int, of: int, facts: dict) -> None:
        if done == step:
            raise Killed

    return progress


def test_rates_of_the_stable_schedule() -> None:
    options = PretrainingOptions(10, lr=1.0, warmup=2, decay=0.4, final=0.2)
    rates = [0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]
    assert [options.rate(step) for step in range(1, 11)] == pytest.approx(rates)
    never = replace(options, warmup=0, decay=0.0)
    assert [never.rate(step) for step in (1, 10)] == [1, 1]


def test_rates_of_the_cosine_schedule() -> None:
    options = PretrainingOptions(6, lr=1.0, warmup=2, schedule="cosine", final=0.0)
    assert [options.rate(step) for step in range(1, 7)] == pytest.approx(
        [0.5, 1, (1 + 2**-0.5) / 2, 0.5, (1 - 2**-0.5) / 2, 0]
    )
    assert replace(options, final=0.3).rate(6) == pytest.approx(0.3)
    assert PretrainingOptions(2, lr=1.0, warmup=2, schedule="cosine").rate(2) == 1.0


@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
def test_a_schedule_takes_no_account_of_steps_before_it(schedule: str) -> None:
    alone = PretrainingOptions(10, lr=1.0, warmup=2, schedule=schedule, decay=0.4)
    after = replace(alone, steps=1010, begins=1000)
    assert [after.rate(1000 + step) for step in range(1, 11)] == [alone.rate(step) for step in range(1, 11)]
    with pytest.raises(ValueError, match="a warm-up of 2 steps does not fit into 1"):
        replace(after, begins=1009)
    with pytest.raises(ValueError, match="a schedule of 1010 steps cannot begin after step 1011"):
        replace(after, begins=1011)


@pytest.mark.parametrize("tokens", [1024, 32])
def test_steps_are_those_of_torchs_adamw(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    # with 32 tokens at once a batch is made of several passes
    monkeypatch.setattr(pretraining, "CPU_BATCH_TOKENS", tokens)
    start = checkpoint()
    options = PretrainingOptions(10, batch=12, lr=5e-3, warmup=9, clip=0.5, weight_decay=0.2)
    found = pretrain(start, DATA, options)
    model = checkpoint().model
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.2)
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(7.0),
            "exp_avg": start.moments.first[name].clone(),
            "exp_avg_sq": start.moments.second[name].clone(),
        }
    data = torch.from_numpy(DATA.astype(np.int64))
    for step in (8, 9, 10):
        optimizer.param_groups[0]["lr"] = options.rate(step)
        optimizer.zero_grad()
        logits = model(data).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), data[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert found.losses[step - 8] == pytest.approx(float(loss.detach()), abs=1e-5)
    for name, parameter in model.named_parameters():
        got = dict(found.checkpoint.model.named_parameters())[name]
        torch.testing.assert_close(got, parameter, rtol=0, atol=2e-5)
        second = optimizer.state[parameter]["exp_avg_sq"]
        torch.testing.assert_close(found.checkpoint.moments.second[name], second, rtol=1e-3, atol=1e-9)
    assert (found.first_step, found.checkpoint.step, found.checkpoint.moments.step) == (8, 10, 10)
    assert found.checkpoint.lr == options.rate(10) and found.checkpoint.position == 36
    # the start is never written into
    assert start.identity == checkpoint().identity


def test_two_runs_are_the_same_bits() -> None:
    first, second = pretrain(OPTIONS, DATA, RUN), pretrain(OPTIONS, DATA, RUN)
    assert first.checkpoint.identity == second.checkpoint.identity and first.losses.tolist() == second.losses.tolist()
    assert pretrain(OPTIONS, DATA, replace(RUN, seed=1)).checkpoint.identity != first.checkpoint.identity


@pytest.mark.parametrize("step", [1, 2, 3, 5, 6, 7])
def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path, step: int) -> None:
    whole = pretrain(OPTIONS, DATA, RUN)
    with pytest.raises(Killed):
        pretrain(OPTIONS, DATA, RUN, folder=tmp_path / "run", progress=killed_at(step))
    # a writer that was killed leaves a temporary folder
    (tmp_path / "run" / ".step-00000004.1.tmp").mkdir()
    steps: list[int] = []
    again = pretrain(OPTIONS, DATA, RUN, folder=tmp_path / "run", progress=lambda k, of, facts: steps.append(k))
    assert again.checkpoint.identity == whole.checkpoint.identity and again.checkpoint.position == 35
    assert again.losses.tolist() == whole.losses.tolist() and again.first_step == 1
    assert steps == list(range(step - step % 2 + 1, 8))
    assert [p.name for p in sorted((tmp_path / "run").iterdir())] == [
        "run.json",
        "step-00000007",
        "step-00000007.losses.json",
    ]
    assert load_checkpoint(tmp_path / "run" / "step-00000007").identity == whole.checkpoint.identity


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    first = pretrain(OPTIONS, DATA, RUN, folder=tmp_path)
    again = pretrain(OPTIONS, DATA, RUN, folder=tmp_path, progress=killed_at(7))
    assert again.checkpoint.identity == first.checkpoint.identity and again.losses.tolist() == first.losses.tolist()


def test_a_run_goes_on_over_other_data_under_one_schedule() -> None:
    rates: list[float] = []
    first = pretrain(OPTIONS, DATA, RUN, until=3, progress=lambda k, of, facts: rates.append(facts["lr"]))
    other = documents(6, name="other")
    second = pretrain(first.checkpoint, other, RUN, progress=lambda k, of, facts: rates.append(facts["lr"]))
    assert rates == [RUN.rate(step) for step in range(1, 8)]
    assert (second.first_step, second.checkpoint.step, second.checkpoint.position) == (4, 7, 20)
    assert first.losses.tolist() == pretrain(OPTIONS, DATA, RUN).losses[:3].tolist()


def test_it_learns_what_can_be_learnt() -> None:
    found = pretrain(OPTIONS, documents(200), PretrainingOptions(150, batch=16, lr=1e-2, warmup=10))
    # what a document's next token leaves open: a token's double with 0.8, or any
    double, other = 0.8 + 0.2 / 32, 0.2 / 32
    rest = -double * np.log(double) - 31 * other * np.log(other)
    assert found.losses[0] == pytest.approx(np.log(32), abs=0.1) and found.losses[-10:].mean() < rest + 0.2


@given(st.integers(1, 9), st.lists(st.integers(1, 7), min_size=1, max_size=9))
def test_every_sequence_once_before_any_again(count: int, sizes: list[int]) -> None:
    order = pretraining._Order(0, 0, count)
    rows, position = [], 0
    for size in sizes:
        rows += order.rows(position, size).tolist()
        position += size
    for epoch in range(0, len(rows), count):
        part = rows[epoch : epoch + count]
        assert len(set(part)) == len(part) and set(part) <= set(range(count))
    # from the middle as from the start
    assert pretraining._Order(0, 0, count).rows(sizes[0], position - sizes[0]).tolist() == rows[sizes[0] :]


@pytest.mark.parametrize("n", [1, 2])
def test_fewer_sequences_than_a_batch(n: int) -> None:
    found = pretrain(OPTIONS, DATA[:n], replace(RUN, steps=2))
    assert len(found.losses) == 2 and np.isfinite(found.losses).all() and found.checkpoint.position == 10


def test_other_models_are_trained_alike(tmp_path: Path) -> None:
    start = load_checkpoint(tiny_llama(tmp_path / "llama")).with_fresh_moments()
    found = pretrain(start, documents(40), PretrainingOptions(30, batch=8, lr=1e-2))
    assert found.losses[-1] < found.losses[0] - 0.2
    found.checkpoint.save(tmp_path / "trained")
    assert load_checkpoint(tmp_path / "trained").identity == found.checkpoint.identity


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be 1 or more"),
        ({"batch": 0}, "batch must be 1 or more"),
        ({"warmup": 8}, "a warm-up of 8 steps does not fit into 7"),
        ({"lr": 0.0}, "learning rate must be positive"),
        ({"schedule": "linear"}, "'linear' is neither"),
        ({"decay": 1.5}, "decay is a share"),
    ],
)
def test_options_that_no_run_can_have(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(RUN, **change)


def test_what_cannot_be_trained_on(tmp_path: Path) -> None:
    for data, message in [
        (DATA[:0], r"must be \[n ≥ 1, L ≥ 2\] tokens, not \[0, 16\]"),
        (DATA[0], r"not \[16\]"),
        (documents(3, 17), "sequences of 17 tokens, but the model has 16 positions"),
        (documents(3, vocabulary=40), "but the model's vocabulary is 32: they were made by another tokenizer"),
    ]:
        with pytest.raises(ValueError, match=message):
            pretrain(OPTIONS, data, RUN)
    with pytest.raises(ValueError, match="step 8 to stop at is none of those left: 7 are done and 7 planned"):
        pretrain(checkpoint(), DATA, RUN, until=8)
    with pytest.raises(NoOptimizerState, match="without optimizer state"):
        pretrain(replace(checkpoint(), moments=None), DATA, replace(RUN, steps=9))
    with pytest.raises(ValueError, match=r"step \d+: the loss is nan; lower the learning rate \(1e\+30\)"):
        pretrain(OPTIONS, DATA, replace(RUN, lr=1e30, warmup=0))
    pretrain(OPTIONS, DATA, RUN, until=2, folder=tmp_path)
    for data, options in ((DATA[1:], RUN), (DATA, replace(RUN, lr=2e-2))):
        with pytest.raises(ValueError, match="checkpoints of a run on other data or with other options"):
            pretrain(OPTIONS, data, options, until=2, folder=tmp_path)
