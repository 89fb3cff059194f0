import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dagster_datamask.accelerator import Accelerator
from dagster_datamask.scoring.encoders import ENCODERS, WINDOW_ROWS, Encoder, encoder_spec
from dagster_datamask.scoring.text import NO_TOKENS, NON_FINITE, NULL_TEXT, SURROGATES, ZERO_VECTOR

from .conftest import MINILM, change_weights, tiny_bert

TEXTS = [
    "The cell is the basic unit of life.",
    "Buy one, get one free: only today!",
    "Photosynthesis turns light into chemical energy. " * 30,
    "a",
]


def pooled(directory: Path, mode: str) -> Path:
    """Give a bare transformers directory the files of a SentenceTransformer that pools by `mode`."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    first = Transformer(str(directory), max_seq_length=32)
    SentenceTransformer(modules=[first, Pooling(16, mode), Normalize()], device="cpu").save(str(directory))
    return directory


@pytest.fixture
def tiny(tmp_path: Path, minilm_path: Path) -> Path:
    return pooled(tiny_bert(tmp_path / "tiny", minilm_path, outputs=None), "mean")


def test_registry_has_the_published_conventions() -> None:
    e5 = ENCODERS["intfloat/e5-base-v2"]
    assert (e5.prefix, e5.pooling, e5.max_length, e5.dimension) == ("query: ", "mean", 512, 768)
    assert ENCODERS["BAAI/bge-base-en-v1.5"].pooling == "cls"
    assert all(c.prefix == "query: " for name, c in ENCODERS.items() if "e5" in name)
    assert all(c.pooling == "cls" for name, c in ENCODERS.items() if "bge" in name or "arctic" in name)
    dimensions = {"small": 384, "base": 768, "large": 1024, "xs": 384, "s": 384, "m": 768, "l": 1024}
    for name, known in ENCODERS.items():
        size = re.search(r"-(small|base|large|xs|s|m|l)(-|$)", name)
        assert known.dimension == (dimensions[size[1]] if size else 384), name
        assert re.fullmatch("[0-9a-f]{40}", known.revision or "") or name.startswith("package:")


@pytest.mark.parametrize("ref", ["BAAI/bge-small-en-v1.5", "BAAI/bge-small-en-v1.5@" + "f" * 40])
def test_a_bare_id_of_the_registry_is_its_commit(ref: str, tmp_path: Path) -> None:
    """Without network, from a cache where the main branch has moved on."""
    pinned = ENCODERS["BAAI/bge-small-en-v1.5"].revision
    folder = tmp_path / "hub" / "models--BAAI--bge-small-en-v1.5"
    for commit in (pinned, "f" * 40):
        (folder / "snapshots" / str(commit)).mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (folder / "snapshots" / str(commit) / name).write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("f" * 40)
    code = "import sys; from dagster_datamask.scoring.encoders import encoder_spec; s = encoder_spec(sys.argv[1])\n"
    code += "print(s.name, s.revision, s.pooling, s.licence)"
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, ref], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["BAAI/bge-small-en-v1.5", ref.partition("@")[2] or pinned, "cls", "mit"]


def test_vectors_are_sentence_transformers_own(encoder: Encoder, minilm_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    oracle = SentenceTransformer(str(minilm_path), device="cpu", local_files_only=True).encode(TEXTS)
    batch = encoder.encode(TEXTS)
    assert batch.reasons == [None] * 4
    np.testing.assert_allclose(batch.vectors.astype(np.float64), oracle, atol=6e-4)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_few_rows(encoder: Encoder, n: int) -> None:
    batch = encoder.encode(TEXTS[:n])
    assert batch.vectors.shape == (n, 384) and batch.vectors.dtype == np.float16
    assert batch.reasons == [None] * n and sum(batch.batch_sizes) == n
    norms = np.linalg.norm(batch.vectors.astype(np.float64), axis=1)
    np.testing.assert_allclose(norms, 1, atol=1e-3)


def test_a_vector_depends_on_its_text_alone(encoder: Encoder) -> None:
    together = encoder.encode(TEXTS).vectors.astype(np.float64)
    alone = np.vstack([encoder.encode([text]).vectors for text in TEXTS]).astype(np.float64)
    backwards = encoder.encode(TEXTS[::-1]).vectors[::-1].astype(np.float64)
    np.testing.assert_allclose(together, alone, atol=1e-3)
    np.testing.assert_allclose(together, backwards, atol=1e-3)


def test_equal_calls_give_equal_bits(encoder: Encoder) -> None:
    first, second = encoder.encode(TEXTS), encoder.encode(TEXTS)
    assert first.vectors.tobytes() == second.vectors.tobytes()


def test_rows_without_vector(encoder: Encoder) -> None:
    batch = encoder.encode([None, "", " \n", "\x01\x02", "a\ud800", "word"])
    assert batch.reasons == [NULL_TEXT, NO_TOKENS, NO_TOKENS, NO_TOKENS, None, None]
    assert not batch.vectors[:4].any() and batch.vectors[4:].any(axis=1).all()
    assert batch.notes == {SURROGATES: 1}


def test_batches_follow_the_token_budget(encoder: Encoder) -> None:
    texts = ["word " * n for n in (1, 60, 2, 60)]
    small = Encoder(encoder.spec, encoder.accelerator, batch_tokens=64)
    assert small.encode(texts).batch_sizes == [1, 1, 2]
    np.testing.assert_allclose(
        small.encode(texts).vectors.astype(np.float64),
        encoder.encode(texts).vectors.astype(np.float64),
        atol=1e-3,
    )


def test_prefix_and_length_are_applied(encoder: Encoder, cpu: Accelerator) -> None:
    prefixed = Encoder(encoder_spec(MINILM, prefix="query: "), cpu)
    np.testing.assert_allclose(
        prefixed.encode(["light"]).vectors.astype(np.float64),
        encoder.encode(["query: light"]).vectors.astype(np.float64),
        atol=1e-3,
    )
    assert prefixed.encode(["\x01"]).reasons == [NO_TOKENS]
    short = Encoder(encoder_spec(MINILM, max_length=6), cpu)
    cut = short.encode(["one two three four five six", "one two three four"]).vectors
    np.testing.assert_allclose(cut[0].astype(np.float64), cut[1].astype(np.float64), atol=1e-3)
    assert prefixed.spec.identity != encoder.spec.identity != short.spec.identity


@pytest.mark.parametrize(("max_length", "message"), [(513, "the model has 512 positions"), (2, "no room for text")])
def test_impossible_lengths(max_length: int, message: str, cpu: Accelerator, minilm_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Encoder(encoder_spec(MINILM, max_length=max_length), cpu)


def test_a_local_copy_is_recognised_by_its_folder(minilm_path: Path, tmp_path: Path) -> None:
    layout = tmp_path / "models--intfloat--e5-base-v2" / "snapshots" / "abc"
    for folder in (tmp_path / "e5-base-v2", layout):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        spec = encoder_spec(str(folder))
        assert (spec.name, spec.prefix, spec.dimension) == ("intfloat/e5-base-v2", "query: ", 768)


def test_an_unknown_model_is_taken_by_its_own_files(tiny: Path, cpu: Accelerator) -> None:
    spec = encoder_spec(str(tiny))
    assert (spec.prefix, spec.pooling, spec.max_length, spec.dimension) == ("", "mean", 32, 16)
    assert spec.revision.startswith("blake2b:") and str(tiny) not in spec.identity
    assert Encoder(spec, cpu).encode(["some words"]).reasons == [None]


def test_default_prompt_of_an_unknown_model_is_its_prefix(tiny: Path) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(tiny), device="cpu", prompts={"q": "ask: "}, default_prompt_name="q")
    model.save(str(tiny))
    assert encoder_spec(str(tiny)).prefix == "ask: "


@pytest.mark.parametrize("mode", ["mean", "cls"])
def test_pooling_is_the_models_own(tmp_path: Path, minilm_path: Path, cpu: Accelerator, mode: str) -> None:
    from transformers import AutoModel, AutoTokenizer

    folder = pooled(tiny_bert(tmp_path / "tiny", minilm_path, outputs=None), mode)
    inputs = AutoTokenizer.from_pretrained(folder)(["two words"], return_tensors="pt")
    with torch.inference_mode():
        hidden = AutoModel.from_pretrained(folder)(**inputs).last_hidden_state[0]
    expected = hidden.mean(dim=0) if mode == "mean" else hidden[0]
    found = Encoder(encoder_spec(str(folder)), cpu).encode(["two words"]).vectors[0]
    np.testing.assert_allclose(found.astype(np.float64), (expected / expected.norm()).numpy(), atol=1e-3)


def test_contradictions_stop_at_load(tiny: Path, cpu: Accelerator) -> None:
    spec = encoder_spec(str(tiny))
    with pytest.raises(ValueError, match="pool by 'mean', its model card by 'cls'"):
        Encoder(replace(spec, pooling="cls"), cpu)
    with pytest.raises(ValueError, match="dimension 16, the registry says 768"):
        Encoder(replace(spec, dimension=768), cpu)
    (tiny / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"its files cannot be loaded .*fetch the model again"):
        Encoder(spec, cpu)
    with pytest.raises(ValueError, match=r"no config\.json"):
        Encoder(replace(spec, path=tiny / "1_Pooling" / "none"), cpu)


def poison(value: float, token: int):
    def change(weights: torch.Tensor) -> torch.Tensor:
        weights[token] = value
        return weights

    return change


def test_non_finite_and_zero_vectors_have_reasons(tiny: Path, cpu: Accelerator) -> None:
    from transformers import AutoTokenizer

    word = AutoTokenizer.from_pretrained(tiny).convert_tokens_to_ids("poison")
    change_weights(tiny, word_embeddings_weight=poison(float("nan"), word))
    batch = Encoder(encoder_spec(str(tiny)), cpu).encode(["fine", "poison", "fine too"])
    assert batch.reasons == [None, NON_FINITE, None]
    assert not batch.vectors[1].any() and batch.vectors[[0, 2]].any(axis=1).all()

    change_weights(
        tiny,
        layer_1_output_LayerNorm_weight=torch.zeros_like,
        layer_1_output_LayerNorm_bias=torch.zeros_like,
    )
    batch = Encoder(encoder_spec(str(tiny)), cpu).encode(["fine", "poison", None])
    assert batch.reasons == [ZERO_VECTOR, NON_FINITE, NULL_TEXT]
    assert not batch.vectors.any()


def test_a_row_that_overflows_in_float16_is_retried_in_float32(tiny: Path, cpu: Accelerator) -> None:
    from transformers import AutoTokenizer

    word = AutoTokenizer.from_pretrained(tiny).convert_tokens_to_ids("poison")

    def large(weights: torch.Tensor) -> torch.Tensor:
        # beyond float16's 65,504, harmless in float32 behind the layer norm
        weights[word] *= 1e6
        return weights

    change_weights(tiny, word_embeddings_weight=large)
    spec = encoder_spec(str(tiny))
    exact = Encoder(spec, cpu).encode(["fine", "poison"])
    half = Encoder(spec, Accelerator(dtype="float16")).encode(["fine", "poison"])
    assert exact.reasons == half.reasons == [None, None]
    assert half.notes == {"retried_in_float32": 1}
    np.testing.assert_array_equal(half.vectors[1], exact.vectors[1])
    np.testing.assert_allclose(half.vectors[0].astype(np.float64), exact.vectors[0].astype(np.float64), atol=1e-2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_stays_close(encoder: Encoder, dtype: str) -> None:
    low = Encoder(encoder.spec, Accelerator(dtype=dtype)).encode(TEXTS).vectors.astype(np.float64)
    exact = encoder.encode(TEXTS).vectors.astype(np.float64)
    assert (np.sum(low * exact, axis=1) > 0.999).all()


def test_out_of_memory_in_the_forward_pass(encoder: Encoder) -> None:
    failing = Encoder(encoder.spec, encoder.accelerator)

    def ceiling(module: torch.nn.Module, inputs: tuple) -> None:
        if inputs[0]["input_ids"].shape[0] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    failing._model[0].register_forward_pre_hook(ceiling)
    texts = ["one two", "three four", "five six", "seven eight"]
    batch = failing.encode(texts)
    assert batch.batch_sizes == [1, 1, 1, 1]
    # 4 texts of 4 tokens, then 2, then 1: and so it stays for what follows
    assert failing.batch_tokens == 4 and failing.work()["forward_passes"] == 6
    assert failing.encode(texts).batch_sizes == [1, 1, 1, 1] and failing.work()["forward_passes"] == 10
    np.testing.assert_allclose(
        batch.vectors.astype(np.float64), encoder.encode(texts).vectors.astype(np.float64), atol=1e-3
    )


def test_description_holds_every_convention_and_no_path(encoder: Encoder, minilm_path: Path) -> None:
    told = encoder.describe()
    assert told["prefix"] == "" and told["max_length"] == 256 and told["pooling"] == "mean"
    assert told["licence"] == "apache-2.0" and told["dtype"] == "float32"
    assert str(minilm_path) not in str(told)


def test_the_same_weights_elsewhere_have_the_same_identity(tiny: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny, tmp_path / "copy")
    assert encoder_spec(str(copy)).identity == encoder_spec(str(tiny)).identity


def test_windows_are_encoded_each_by_itself(tiny: Path, cpu: Accelerator) -> None:
    texts = [f"text {'word ' * (i * 7 % 23)}{i}" for i in range(WINDOW_ROWS + 6)]
    encoder = Encoder(encoder_spec(str(tiny)), cpu)
    whole = encoder.encode(texts)
    parts = [encoder.encode_prepared(encoder.prepare(part)) for part in (texts[:WINDOW_ROWS], texts[WINDOW_ROWS:])]
    assert whole.vectors.tobytes() == b"".join(part.vectors.tobytes() for part in parts)
    assert whole.batch_sizes == parts[0].batch_sizes + parts[1].batch_sizes
    assert whole.reasons == [None] * len(texts)


def test_work_is_told(tiny: Path, cpu: Accelerator) -> None:
    encoder = Encoder(encoder_spec(str(tiny)), cpu, batch_tokens=64)
    assert encoder.work()["padding"] == 0 and encoder.work()["largest_batch"] == 0
    # 3, 3, 12 and 22 tokens with the special ones: 22 alone, as 2 x 22 would fit but 12 comes next, then 3
    encoder.encode(["a", "b", "c " * 10, "d " * 20])
    told = encoder.work()
    assert told == {
        "forward_passes": 2,
        "largest_batch": 2,
        "padding": 1 - (22 + 12 + 3 + 3) / (2 * 22 + 2 * 3),
        "retried_in_float32": 0,
        "batch_tokens": 64,
    }


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (["config.json"], r"no config\.json"),
        (["modules.json"], r"no modules\.json, which states the steps behind it, such as pooling"),
        (["1_Pooling/config.json"], r"no 1_Pooling/config\.json, which modules\.json names"),
        (["tokenizer.json", "vocab.txt"], "no tokenizer in it"),
        (["model.safetensors"], r"cannot be loaded .*no file named model\.safetensors"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_directory_that_lacks_a_file(
    missing: list[str], message: str, minilm_path: Path, tmp_path: Path, cpu: Accelerator
) -> None:
    """Under a name of the registry and under one of its own."""
    for name in ("all-MiniLM-L6-v2", "mine"):
        folder = shutil.copytree(minilm_path, tmp_path / name)
        for file in missing:
            (folder / file).unlink()
        with pytest.raises(ValueError, match=message) as error:
            Encoder(encoder_spec(str(folder)), cpu)
        assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_a_pooling_that_leaves_out_the_prompt_takes_no_prefix(tiny: Path, cpu: Accelerator) -> None:
    import json

    file = tiny / "1_Pooling" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"include_prompt": False}))
    assert Encoder(encoder_spec(str(tiny)), cpu).encode(["word"]).reasons == [None]
    with pytest.raises(ValueError, match="pooling leaves out the prompt"):
        Encoder(encoder_spec(str(tiny), prefix="query: "), cpu)


def test_a_document_of_fifty_megabytes_is_its_head(encoder: Encoder) -> None:
    sentence = "Water boils at a lower temperature on a mountain. "
    large = sentence * (50_000_000 // len(sentence))
    batch = encoder.encode([large, sentence * 100, "short"])
    assert batch.reasons == [None] * 3
    assert batch.vectors[0].tobytes() == batch.vectors[1].tobytes()
    one_word = encoder.encode(["x" * 50_000_000, "x" * 101])
    # one word of more than 100 letters is unknown, however long
    assert one_word.vectors[0].tobytes() == one_word.vectors[1].tobytes()


def test_line_separators_are_space_and_nothing_else(encoder: Encoder) -> None:
    breaks = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
    assert encoder.encode([*breaks, breaks * 1000]).reasons == [NO_TOKENS] * (len(breaks) + 1)
    between = encoder.encode([f"one{c}two" for c in "\n\r\u2028\u2029 "]).vectors
    assert len({row.tobytes() for row in between}) == 1


def test_mixed_scripts_are_sentence_transformers_own(encoder: Encoder, minilm_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    texts = [
        "Ελληνικά и русский, العربية עברית",
        "हिन्दी 日本語 한국어 ไทย",
        "e\u0301 é 👩\u200d🔬 ﷺ ꙮ",
        "a\u202eb\u200fc",
    ]
    oracle = SentenceTransformer(str(minilm_path), device="cpu", local_files_only=True).encode(texts)
    batch = encoder.encode(texts)
    assert batch.reasons == [None] * 4
    np.testing.assert_allclose(batch.vectors.astype(np.float64), oracle, atol=6e-4)
