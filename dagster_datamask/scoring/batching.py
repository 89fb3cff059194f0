"""Token-budget batches for transformer models: longest first, halved when memory runs out.

Here belong: tokenising within a model's length, packing, retrying, working one item ahead. Not here: what a model
computes from a batch.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Measured with MiniLM and 256 tokens: 1,024 take as long and 4,096 15 % longer, for what no longer fits the cache.
CPU_BATCH_TOKENS = 2048
CUDA_BATCH_TOKENS = 131_072
HEAD_CHARACTERS_PER_TOKEN = 8
# what is read of a text whose head does not fill max_length: a text without spaces, or of characters without tokens
MOST_CHARACTERS = 1 << 20
RETRIED = "retried_in_float32"
_CPU_ALLOCATORS = ("DefaultCPUAllocator", "bad_alloc", "bad allocation")

T = TypeVar("T")
_END = object()


class OutOfMemory(RuntimeError):
    """One row alone does not fit into memory."""


@dataclass(frozen=True)
class Tokens:
    """Tokenised texts, unpadded and end to end.

    values: {model input: int32[sum of lengths]}, without the attention mask, which follows from the lengths; lengths:
    int64[n] in tokens, special ones included.
    """

    values: Mapping[str, np.ndarray]
    lengths: np.ndarray

    def row(self, index: int) -> dict[str, list[int]]:
        """One text's model inputs."""
        end = int(self.lengths[: index + 1].sum())
        return {name: flat[end - int(self.lengths[index]) : end].tolist() for name, flat in self.values.items()}

    def padded(self, tokenizer: "PreTrainedTokenizerBase", index: np.ndarray, device: str) -> dict[str, Any]:
        """The rows `index` as int64 tensors [len(index), longest of them] on the device, attention mask included."""
        import torch

        lengths = self.lengths[index]
        longest = int(lengths.max())
        columns = np.arange(longest)
        if tokenizer.padding_side == "right":
            present = columns < lengths[:, None]
        else:
            present = columns >= longest - lengths[:, None]
        firsts = np.cumsum(self.lengths) - self.lengths
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        source = np.repeat(firsts[index], lengths) + within
        padding = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id}
        inputs = {}
        for name, flat in self.values.items():
            inputs[name] = np.full(present.shape, padding.get(name, 0), dtype=np.int64)
            inputs[name][present] = flat[source]
        inputs["attention_mask"] = present.astype(np.int64)
        return {name: torch.from_numpy(array).to(device) for name, array in inputs.items()}


def tokenise(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], max_length: int) -> Tokens:
    """The texts cut to max_length tokens, special tokens included.

    Of a long text only a head is tokenised, up to white space: for a tokenizer that splits there first, as all of the
    registry do, what follows cannot change the tokens before, so the result is that of the whole text wherever the head
    fills max_length; elsewhere the whole text is taken, but never more than its first 1,048,576 characters.
    """
    heads = [_head(text, HEAD_CHARACTERS_PER_TOKEN * max_length) for text in texts]
    rows = _token_rows(tokenizer, heads, max_length)
    short = [i for i, row in enumerate(rows) if len(row["input_ids"]) < max_length and len(heads[i]) < len(texts[i])]
    more = _token_rows(tokenizer, [texts[i][:MOST_CHARACTERS] for i in short], max_length)
    for i, row in zip(short, more, strict=True):
        rows[i] = row
    names = list(rows[0]) if rows else ["input_ids"]
    values = {name: np.concatenate([np.zeros(0, np.int32), *(row[name] for row in rows)]) for name in names}
    return Tokens(values, np.array([len(row["input_ids"]) for row in rows], dtype=np.int64))


def _head(text: str, characters: int) -> str:
    if len(text) <= characters:
        return text
    words = text[:characters].rsplit(None, 1)
    # of white space alone there are none
    return words[0] if len(words) == 2 else text[:MOST_CHARACTERS]


def _token_rows(
    tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], max_length: int
) -> list[dict[str, np.ndarray]]:
    if not texts:
        return []
    encoded = tokenizer(list(texts), truncation=True, max_length=max_length, return_attention_mask=False)
    names = [name for name in tokenizer.model_input_names if name in encoded]
    return [{name: np.array(encoded[name][i], dtype=np.int32) for name in names} for i in range(len(texts))]


def ahead(items: Iterable[T]) -> Iterator[T]:
    """The items in their order, the next one made in a thread while one is worked on."""
    source = iter(items)
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, source, _END)
        while (item := following.result()) is not _END:
            following = thread.submit(next, source, _END)
            yield item  # type: ignore[misc]


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
    smaller: Callable[[int], None] = lambda tokens: None,
) -> list[int]:
    """out[batch] = forward(batch) over all batches of `rows`; returns the batch sizes that succeeded, in
    order.

    When memory runs out, the batch's token budget is halved for it and for all that follow, and `smaller` is told the
    new one. Raises OutOfMemory when a single row does not fit.
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
            smaller(half)
    return sizes


def run_finite(
    lengths: np.ndarray,
    rows: np.ndarray,
    batch_tokens: int,
    forward: Callable[[np.ndarray], np.ndarray],
    exactly: Callable[[np.ndarray], np.ndarray] | None,
    out: np.ndarray,
    notes: Counter[str],
    smaller: Callable[[int], None] = lambda tokens: None,
) -> tuple[list[int], np.ndarray]:
    """`run`, and what came back not finite once more by `exactly` (None: the first pass was exact already).

    Returns the batch sizes and the rows of `out` that are still not finite; notes counts the rows retried.
    """
    sizes = run(lengths, rows, batch_tokens, forward, out, smaller)
    bad = _not_finite(out, rows)
    if bad.size and exactly is not None:
        notes[RETRIED] += int(bad.size)
        sizes += run(lengths, bad, batch_tokens, exactly, out, smaller)
        bad = _not_finite(out, bad)
    return sizes, bad


def _not_finite(out: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return rows[~np.isfinite(out[rows]).all(axis=tuple(range(1, out.ndim)))]


def _attempt(forward: Callable[[np.ndarray], np.ndarray], batch: np.ndarray) -> np.ndarray | None:
    """forward(batch), or None if memory ran out; what the failed pass held is free again on return."""
    import torch

    try:
        return forward(batch)
    except (torch.OutOfMemoryError, MemoryError):
        pass
    except RuntimeError as error:
        # the CPU allocators of torch and of C++ have no exception class of their own
        if not any(name in str(error) for name in _CPU_ALLOCATORS):
            raise
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None
