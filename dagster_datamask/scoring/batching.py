"""Token-budget batches for transformer models: longest first, halved when memory runs out.

Here belong: tokenising within a model's length, packing, retrying. Not here: what a model computes from a
batch.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CPU_BATCH_TOKENS = 1024
CUDA_BATCH_TOKENS = 131_072
HEAD_CHARACTERS_PER_TOKEN = 8
RETRIED = "retried_in_float32"


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
    """The texts cut to max_length tokens, special tokens included.

    Of a long text only a head is tokenised, up to a space: for a tokenizer that splits at white space first, as all of
    the registry do, what follows cannot change the tokens before, so the result is that of the whole text wherever the
    head fills max_length; elsewhere the whole text is taken.
    """
    if not texts:
        return Tokens([], np.zeros(0, dtype=np.int64))
    heads = [_head(text, HEAD_CHARACTERS_PER_TOKEN * max_length) for text in texts]
    rows = _token_rows(tokenizer, heads, max_length)
    short = [i for i, row in enumerate(rows) if len(row["input_ids"]) < max_length and len(heads[i]) < len(texts[i])]
    if short:
        for i, row in zip(short, _token_rows(tokenizer, [texts[i] for i in short], max_length), strict=True):
            rows[i] = row
    return Tokens(rows, np.array([len(row["input_ids"]) for row in rows], dtype=np.int64))


def _head(text: str, characters: int) -> str:
    end = text.rfind(" ", 0, characters) if len(text) > characters else -1
    return text[:end] if end > 0 else text


def _token_rows(
    tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], max_length: int
) -> list[dict[str, list[int]]]:
    encoded = tokenizer(list(texts), truncation=True, max_length=max_length)
    names = [name for name in tokenizer.model_input_names if name in encoded]
    return [{name: encoded[name][i] for name in names} for i in range(len(texts))]


def positions(config: Any) -> int | None:
    """How many tokens a transformers model has positions for; None where its configuration sets no limit."""
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if limit is not None and "roberta" in config.model_type:
        # RoBERTa-like models number positions from the padding id on
        limit -= (config.pad_token_id or 0) + 1
    return limit


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


def run_finite(
    lengths: np.ndarray,
    rows: np.ndarray,
    batch_tokens: int,
    forward: Callable[[np.ndarray], np.ndarray],
    exactly: Callable[[np.ndarray], np.ndarray] | None,
    out: np.ndarray,
    notes: Counter[str],
) -> tuple[list[int], np.ndarray]:
    """`run`, and what came back not finite once more by `exactly` (None: the first pass was exact already).

    Returns the batch sizes and the rows of `out` that are still not finite; notes counts the rows retried.
    """
    sizes = run(lengths, rows, batch_tokens, forward, out)
    bad = _not_finite(out, rows)
    if bad.size and exactly is not None:
        notes[RETRIED] += int(bad.size)
        sizes += run(lengths, bad, batch_tokens, exactly, out)
        bad = _not_finite(out, bad)
    return sizes, bad


def _not_finite(out: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return rows[~np.isfinite(out[rows]).all(axis=tuple(range(1, out.ndim)))]


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
