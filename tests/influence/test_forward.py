from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, GraniteConfig, GraniteForCausalLM

from dagster_datamask.influence.forward import Batch, NextToken, Trained, gpt2_states, mean_loss
from dagster_datamask.influence.language_model import load_checkpoint

from .small import checkpoint, documents, reference
from .test_language_model import tiny_llama

STEP = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "clip": 1.0}


def batches(*lengths: int) -> list[Batch]:
    return [Batch(torch.from_numpy(documents(1, length, f"batch {k}"))) for k, length in enumerate(lengths)]


def of_reference() -> list[Batch]:
    found = reference()
    return [Batch(torch.from_numpy(found.tokens), torch.from_numpy(found.mask))]


def granite() -> GraniteForCausalLM:
    """A model whose logits are its embeddings' products divided by 8."""
    config = GraniteConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        logits_scaling=8.0,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return GraniteForCausalLM(config)


def models(folder: Path) -> dict[str, torch.nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        published = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)
        # first weights are too small to see anything by
        wide = GPT2LMHeadModel(GPT2Config(**{**published.to_dict(), "initializer_range": 0.5}))
        by_layer = GPT2LMHeadModel(
            GPT2Config(**{**published.to_dict(), "scale_attn_by_inverse_layer_idx": True, "initializer_range": 0.5})
        )
        return {
            "gpt2": wide,
            "gpt2 with scales by layer": by_layer,
            "llama": AutoModelForCausalLM.from_pretrained(tiny_llama(folder)),
            "granite": granite(),
        }


def test_logits_are_the_models_own(tmp_path: Path) -> None:
    tokens = torch.from_numpy(documents(3))
    at = torch.tensor([0, 5, 17, 30, 46])
    for name, model in models(tmp_path).items():
        with torch.no_grad():
            wanted = model.eval()(tokens).logits.flatten(0, 1)[at]
        following = NextToken(model)
        with torch.inference_mode():
            torch.testing.assert_close(following(tokens, at), wanted, rtol=1e-5, atol=1e-5, msg=name)
            losses = functional.cross_entropy(wanted, torch.arange(5), reduction="none")
            torch.testing.assert_close(following.losses(tokens, at, torch.arange(5)), losses, rtol=1e-5, atol=1e-5)
        # with gradients the products are other kernels
        torch.testing.assert_close(following(tokens, at).detach(), wanted, rtol=1e-5, atol=1e-5, msg=name)


def test_only_a_plain_gpt2_is_computed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr(
        "dagster_datamask.influence.forward.gpt2_states", lambda *a: called.append(1) or gpt2_states(*a)
    )
    for name, model in models(tmp_path).items():
        called.clear()
        NextToken(model)
        assert bool(called) == (name == "gpt2"), name


def test_gradients_are_the_models_own() -> None:
    tokens = torch.from_numpy(documents(2))
    model, other = checkpoint().model, NextToken(checkpoint().model)
    functional.cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    batch = Batch(tokens)
    functional.cross_entropy(other(batch.tokens, batch.at), batch.targets).backward()
    for (name, wanted), found in zip(model.named_parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-7, msg=name)


def test_few_logits_at_once_are_the_same_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    following, (batch,) = NextToken(checkpoint().model), of_reference()
    whole = mean_loss(following, [batch])
    monkeypatch.setattr("dagster_datamask.influence.forward._LOGITS", 32)
    monkeypatch.setattr("dagster_datamask.influence.forward._LEAST_ROWS", 3)
    assert float(mean_loss(following, [batch])) == pytest.approx(float(whole), abs=1e-6)


def test_a_batch_predicts_what_counts() -> None:
    tokens = torch.tensor([[4, 5, 6], [7, 8, 9]])
    whole = Batch(tokens)
    assert whole.at.tolist() == [0, 1, 3, 4] and whole.targets.tolist() == [5, 6, 8, 9]
    some = Batch(tokens, torch.tensor([[True, False, True], [False, True, False]]))
    assert some.at.tolist() == [1, 3] and some.targets.tolist() == [6, 8]


def test_copies_step_as_each_does_alone() -> None:
    # padding to the longest must not be seen
    lengths = (16, 9, 2, 16)
    many, one = Trained(checkpoint(), copies=4, **STEP), Trained(checkpoint(), **STEP)
    start = one.snapshot()
    losses = []
    for _ in range(3):
        before = many.step(batches(*lengths))
        losses.append((before, many.mean_losses(of_reference())))
    for k, batch in enumerate(batches(*lengths)):
        one.restore(start)
        for before, after in losses:
            assert float(before[k]) == pytest.approx(float(one.step([batch])), abs=1e-5)
            assert float(after[k]) == pytest.approx(float(one.mean_losses(of_reference())[0]), abs=1e-5)
    many.restore(start)
    assert many.mean_losses(of_reference()).tolist() == [many.mean_losses(of_reference())[0].item()] * 4


def test_what_is_restored_is_never_written_into() -> None:
    """`load_state_dict` keeps the tensors it is given, and the optimizer then writes into them."""
    start = checkpoint()
    trained = Trained(start, **STEP)
    snapshot = trained.snapshot()
    kept = [t.clone() for t in snapshot]
    for _ in range(2):
        trained.restore(snapshot)
        trained.step(batches(16))
    assert all(torch.equal(a, b) for a, b in zip(snapshot, kept, strict=True))
    assert start.identity == checkpoint().identity

    # that it would be: the state of torch's own way of restoring
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(2)
    optimizer.step()
    saved = optimizer.state_dict()
    first = saved["state"][0]["exp_avg"].clone()
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert not torch.equal(saved["state"][0]["exp_avg"], first)


def test_a_trained_model_is_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    trained = Trained(checkpoint(), **STEP)
    trained.step(batches(16))
    made = trained.checkpoint(8, 1e-2, 1)
    identity = made.identity
    trained.step(batches(16))
    assert made.identity == identity != checkpoint().identity
    made.save(tmp_path / "made")
    found = load_checkpoint(tmp_path / "made")
    again = Trained(found, **STEP)
    again.step(batches(16))
    assert again.checkpoint(9, 1e-2, 2).identity == trained.checkpoint(9, 1e-2, 2).identity
    assert np.isfinite(float(again.mean_losses(of_reference())[0]))
