import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from dagster_datamask.influence.language_model import (
    OPTIMIZER_FILE,
    TOKENIZER_FILE,
    TRAINING_FILE,
    Checkpoint,
    LanguageModelOptions,
    Moments,
    few_threads,
    load_checkpoint,
    new_checkpoint,
)
from dagster_datamask.influence.tokens import load_tokenizer, train_tokenizer
from dagster_datamask.scoring.models import ModelUnavailable

from .small import OPTIONS, checkpoint, documents


def tiny_llama(folder: Path) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
            bos_token_id=None,
            eos_token_id=None,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_new_model_has_gpt2s_first_weights() -> None:
    made = new_checkpoint(LanguageModelOptions(layers=2, width=64, heads=2, context=64, vocabulary=128))
    assert made.parameters == 128 * 64 + 64 * 64 + 2 * (12 * 64**2 + 13 * 64) + 2 * 64 == 112_384
    assert (made.context, made.vocabulary, made.step, made.lr) == (64, 128, 0, None)
    for name, parameter in made.model.named_parameters():
        wanted = 0.01 if name.endswith("c_proj.weight") else 0.02
        if parameter.dim() == 2:
            assert float(parameter.detach().std()) == pytest.approx(wanted, rel=0.1), name
        else:
            assert (parameter == (1.0 if name.endswith("weight") else 0.0)).all()
    assert made.moments is not None and made.moments.step == 0
    assert not any(t.any() for t in (*made.moments.first.values(), *made.moments.second.values()))


def test_a_new_model_depends_on_its_seed_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = new_checkpoint(OPTIONS).identity
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert new_checkpoint(OPTIONS).identity == first != new_checkpoint(OPTIONS, seed=1).identity


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers of 1 or more"),
        ({"context": 1}, "a context of 1 has no token to predict"),
        ({"width": 10, "heads": 4}, "4 heads do not divide a width of 10"),
    ],
)
def test_models_that_cannot_be(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LanguageModelOptions(**change)


def test_a_checkpoint_comes_back_from_its_folder(tmp_path: Path) -> None:
    made = replace(checkpoint(), position=48)
    made.save(tmp_path / "a")
    found = load_checkpoint(tmp_path / "a")
    assert (found.step, found.lr, found.position) == (7, 1e-3, 48)
    assert found.identity == made.identity and found.moments is not None and found.moments.step == 7
    for name, moment in made.moments.first.items():
        assert torch.equal(found.moments.first[name], moment)
        assert torch.equal(found.moments.second[name], made.moments.second[name])
    found.save(tmp_path / "b")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_transformers_takes_the_folder_as_a_model(tmp_path: Path) -> None:
    made = checkpoint()
    made.save(tmp_path / "a")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    tokens = torch.from_numpy(documents(2))
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, made.model(tokens).logits)


def test_a_tokenizer_goes_along(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["some text"], 260)
    checkpoint().save(tmp_path / "a", tokenizer)
    assert load_tokenizer(str(tmp_path / "a")).to_str() == tokenizer.to_str()


def test_all_that_a_probe_depends_on_is_in_the_identity() -> None:
    made = checkpoint()
    nudged = {n: t.clone() for n, t in made.moments.first.items()}
    next(iter(nudged.values()))[0] += 1e-9
    moved = checkpoint()
    with torch.no_grad():
        next(moved.model.parameters())[0, 0] += 1e-6
    others = [
        replace(made, lr=2e-3),
        replace(made, step=8),
        replace(made, moments=None),
        replace(made, moments=replace(made.moments, step=8)),
        replace(made, moments=replace(made.moments, first=nudged)),
        replace(made, moments=Moments(made.moments.second, made.moments.first, 7)),
        made.with_fresh_moments(),
        moved,
    ]
    assert len({made.identity, *(other.identity for other in others)}) == 9
    assert replace(made, position=3).identity == checkpoint().identity == made.identity


def test_a_model_without_optimizer_state_says_so(tmp_path: Path) -> None:
    found = load_checkpoint(tiny_llama(tmp_path / "llama"))
    assert found.moments is None and found.lr is None and found.describe()["optimizer"] == "no optimizer state"
    assert found.describe()["architecture"] == "llama" and found.context == 16
    fresh = found.with_fresh_moments()
    assert fresh.moments is not None and set(fresh.moments.first) == {n for n, _ in found.model.named_parameters()}
    json.dumps(checkpoint().describe(), allow_nan=False)


def broken(folder: Path, what: str) -> None:
    weights = folder / "model.safetensors"
    if what == "config":
        (folder / "config.json").unlink()
    elif what == "pickled":
        torch.save(load_file(weights), folder / "pytorch_model.bin")
        weights.unlink()
    elif what == "junk":
        weights.write_bytes(b"junk")
    elif what in ("lacking", "not finite"):
        tensors = load_file(weights)
        name = "transformer.h.1.mlp.c_fc.weight"
        if what == "lacking":
            del tensors[name]
        else:
            tensors[name][0, 0] = float("nan")
        save_file(tensors, weights, {"format": "pt"})
    elif what == "moments":
        moments = load_file(folder / OPTIMIZER_FILE)
        del moments["second.transformer.wpe.weight"]
        save_file(moments, folder / OPTIMIZER_FILE)
    elif what == "moments of junk":
        (folder / OPTIMIZER_FILE).write_bytes(b"junk")
    elif what == "training":
        (folder / TRAINING_FILE).write_text("{")
    else:
        (folder / TRAINING_FILE).write_text('{"format": "other"}')


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("config", "not a transformers directory"),
        ("pickled", "no weights as model.safetensors; pickled ones are not read"),
        ("junk", "its weights cannot be loaded"),
        ("lacking", r"the weights lack transformer\.h\.1\.mlp\.c_fc\.weight"),
        ("not finite", r"transformer\.h\.1\.mlp\.c_fc\.weight is not finite"),
        ("moments", r"the second moment of transformer\.wpe\.weight is missing"),
        ("moments of junk", r"optimizer\.safetensors: not readable"),
        ("training", r"training\.json: not readable as JSON"),
        ("format", r"training\.json: not of the format"),
    ],
)
def test_broken_checkpoints_are_named(tmp_path: Path, what: str, message: str) -> None:
    checkpoint().save(tmp_path / "a")
    broken(tmp_path / "a", what)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path / "a")


def test_what_is_no_language_model(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"models\.checkpoint"):
        load_checkpoint(tmp_path / "none")
    config = BertConfig(vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
    BertModel(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match=r"the weights lack cls\."):
        load_checkpoint(tmp_path / "bert")


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    first = checkpoint()
    first.save(tmp_path / "a")

    class Unwritable:
        def to_str(self) -> str:
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        checkpoint(seed=1).save(tmp_path / "a", Unwritable())
    assert load_checkpoint(tmp_path / "a").identity == first.identity
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    second = checkpoint(seed=1)
    second.save(tmp_path / "a", train_tokenizer(["a"], 257))
    assert load_checkpoint(tmp_path / "a").identity == second.identity and (tmp_path / "a" / TOKENIZER_FILE).is_file()


def test_moments_without_their_step_are_no_optimizer_state(tmp_path: Path) -> None:
    checkpoint().save(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "a" / TRAINING_FILE).unlink()
    (tmp_path / "b" / OPTIMIZER_FILE).unlink()
    assert load_checkpoint(tmp_path / "a").moments is None and load_checkpoint(tmp_path / "b").moments is None
    assert load_checkpoint(tmp_path / "b").lr == 1e-3


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), few_threads(1):
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == before


def test_a_context_that_nobody_states() -> None:
    # positions by distance alone
    made = Checkpoint(BloomForCausalLM(BloomConfig(vocab_size=8, hidden_size=4, n_layer=1, n_head=1)))
    assert made.vocabulary == 8
    with pytest.raises(ValueError, match="states no max_position_embeddings"):
        _ = made.context


def test_identities_are_of_content_not_of_memory_layout() -> None:
    made = checkpoint()
    with torch.no_grad():
        for block in made.model.transformer.h:
            weight = block.mlp.c_fc.weight
            block.mlp.c_fc.weight = torch.nn.Parameter(weight.T.contiguous().T)
    assert not made.model.transformer.h[0].mlp.c_fc.weight.is_contiguous()
    assert made.identity == checkpoint().identity
