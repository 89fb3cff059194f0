"""A language model of a few thousand parameters, its documents and its reference, for tests."""

from dataclasses import replace

import numpy as np
import torch

from dagster_datamask import keyed
from dagster_datamask.influence.language_model import Checkpoint, LanguageModelOptions, Moments, new_checkpoint
from dagster_datamask.influence.reference import Reference

OPTIONS = LanguageModelOptions(layers=2, width=16, heads=2, context=16, vocabulary=32)


def documents(count: int, length: int = 16, name: str = "documents", vocabulary: int = 32) -> np.ndarray:
    """int64[count, length] tokens, each often followed by its double."""
    rng = keyed.rng(0, "test", name)
    tokens = rng.integers(vocabulary, size=(count, length))
    for t in range(1, length):
        tokens[:, t] = np.where(rng.random(count) < 0.8, 2 * tokens[:, t - 1] % vocabulary, tokens[:, t])
    return tokens


def checkpoint(lr: float = 1e-3, seed: int = 0) -> Checkpoint:
    """A model in the middle of a training that nobody did: moments as if gradients had come, 7 steps, a rate."""
    start = new_checkpoint(OPTIONS, seed)
    first, second = {}, {}
    for name, parameter in start.model.named_parameters():
        draws = keyed.rng(seed, "test-moments", name).standard_normal((2, *parameter.shape), dtype=np.float32)
        first[name] = torch.from_numpy(draws[0] * 1e-3)
        second[name] = torch.from_numpy(draws[1] ** 2 * 1e-5)
    return replace(start, moments=Moments(first, second, 7), step=7, lr=lr)


def reference(rows: int = 5, length: int = 16) -> Reference:
    """Answers of different places and lengths, padded."""
    tokens = documents(rows, length, "reference")
    mask = np.zeros(tokens.shape, bool)
    for i in range(rows):
        mask[i, 2 + i : length - i] = True
    return Reference(tokens, mask)
