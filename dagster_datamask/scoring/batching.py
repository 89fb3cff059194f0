"""Token-budget batches for transformer models: longest first, halved when memory runs out.

Here belong: tokenising within a model's length, packing, retrying. Not here: what a model computes from a
batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CPU_BATCH_TOKENS = 1024
CUDA_BATCH_TOKENS = 131_072


class OutOfMemory(RuntimeError):
    """One row alone does not fit into memory."""


@dataclass(frozen=True)
class Tokens:
    """Tokenised texts: per row the model's inputs, unpadded; lengths int64[n] in tokens, special ones
    included."""

    rows: list[dict[str, list[int]]]
    lengths: np.ndarray

    def padded(self, tokenizer: "PreTrainedTokenizerBase", index: np.ndarray, device: str) -> dict[str, Any]:
        """The rows `index` as tensors [len(index), longest of them] on the device."""
        batch = tokenizer.pad([self.rows[i] for i in index], return_tensors="pt")
        return {name: tensor.to(device) for name, tensor in batch.items()}


def tokenise(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], max_length: int) -> Tokens:
    """The texts cut to max_length tokens, special tokens included."""
    if not texts:
        return Tokens([], np.zeros(0, dtype=np.int64))
    encoded = tokenizer(list(texts), truncation=True, max_length=max_length)
    names = [name for name in tokenizer.model_input_names if name in encoded]
    rows = [{name: encoded[name][i] for name in names} for i in range(len(texts))]
    return Tokens(rows, np.array([len(row["input_ids"]) for row in rows], dtype=np.int64))


def pack(lengths: np.ndarray, rows: np.ndarray, batch_tokens: int) -> list[np.ndarray]:
    """`rows` in batches, longest row first (ties in row order), each of at most batch_tokens padded tokens.

    A row longer than the budget is a batch of its own. So that the largest need of memory comes first, where
    it fails early, and padding is small.
    """
    order = rows[np.lexsort((rows, -lengths[rows]))]
    batches: list[np.ndarray] = []
    start = 0
    while start < len(order):
        size = max(1, batch_tokens // max(1, int(lengths[order[start]])))
        batches.append(order[start : start + size])
        start += size
    return batches


def run(
    lengths: np.ndarray,
    rows: np.ndarray,
    batch_tokens: int,
    forward: Callable[[np.ndarray], np.ndarray],
    out: np.ndarray,
) -> list[int]:
    """out[batch] = forward(batch) over all batches of `rows`; returns the batch sizes that succeeded, in
    order.

    When memory runs out, the batch's token budget is halved for it and for all that follow. Raises
    OutOfMemory when a single row does not fit.
    """
    sizes: list[int] = []
    pending = pack(lengths, rows, batch_tokens)
    while pending:
        batch = pending[0]
        result = _attempt(forward, batch)
        if result is not None:
            out[batch] = result
            sizes.append(len(batch))
            del pending[0]
        elif len(batch) == 1:
            raise OutOfMemory(
                f"one text of {int(lengths[batch[0]])} tokens does not fit into the device's memory; "
                "lower max_length, or use another device or a smaller model"
            )
        else:
            half = len(batch) // 2 * int(lengths[batch].max())
            pending = pack(lengths, np.concatenate(pending), half)
    return sizes


def _attempt(forward: Callable[[np.ndarray], np.ndarray], batch: np.ndarray) -> np.ndarray | None:
    """forward(batch), or None if memory ran out; what the failed pass held is free again on return."""
    import torch

    try:
        return forward(batch)
    except torch.OutOfMemoryError:
        pass
    except RuntimeError as error:
        # the CPU allocator has no exception class of its own
        if "DefaultCPUAllocator" not in str(error):
            raise
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None
