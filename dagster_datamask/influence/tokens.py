"""Texts as tokens: a byte-level BPE trained or found, documents encoded for probing, sequences packed for training.

Here: everything between a text and whole numbers. Not here: which texts (the stages), and what a model makes of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
from numpy.lib import format as npy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dagster_datamask.scoring.models import resolve_model
from dagster_datamask.scoring.text import NO_TOKENS, NULL_TEXT, replace_surrogates
from dagster_datamask.scoring.tokenizers import token_ids
from dagster_datamask.shards.writer import atomic

END_OF_TEXT = "<|endoftext|>"
# every byte, and the end of a text
SMALLEST_VOCABULARY = 257
# how published tokenizers call the end of a text
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_BATCH = 256

Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents as a language model reads them one at a time.

    ids: of those that have tokens, in input order; tokens: int64[·] each, at most the context; lengths: int64[n] of the
    whole documents, the end-of-text included; refused: {id: reason} of those without a token.
    """

    ids: list[str]
    tokens: list[np.ndarray]
    lengths: np.ndarray
    refused: dict[str, str]

    @property
    def cut(self) -> np.ndarray:
        """bool[n]: which documents are longer than the context and go on after their tokens here."""
        return self.lengths > np.fromiter(map(len, self.tokens), np.int64, len(self.tokens))


@dataclass(frozen=True)
class Packed:
    """What `pack` did: whole sequences written; documents with tokens and without; tokens of all documents, one
    end-of-text each included; left_over: the last of them, too few for a sequence."""

    sequences: int
    documents: int
    empty: int
    tokens: int
    left_over: int


def train_tokenizer(texts: Iterable[str | None], vocabulary: int) -> Tokenizer:
    """A byte-level BPE of at most `vocabulary` tokens, the first of them the end-of-text.

    Fewer come out where the texts have no more pairs to merge. The order of the texts and the number of threads leave
    no trace. Raises ValueError below SMALLEST_VOCABULARY and where no text has a character.
    """
    if vocabulary < SMALLEST_VOCABULARY:
        raise ValueError(
            f"a byte-level vocabulary needs {SMALLEST_VOCABULARY} tokens or more (all bytes and the end-of-text), "
            f"not {vocabulary}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    seen = False

    def usable() -> Iterator[str]:
        nonlocal seen
        for text in texts:
            if text:
                seen = True
                yield replace_surrogates(text)

    tokenizer.train_from_iterator(usable(), trainer)
    if not seen:
        raise ValueError("no text to train a tokenizer on: every one is null or empty")
    return tokenizer


def load_tokenizer(ref: str, setting: str = "tokenizer") -> Tokenizer:
    """The `tokenizer.json` that `ref` names: a file, a folder, `package:…`, a hub id or a URL (`resolve_model`).

    Raises ModelUnavailable, and ValueError naming the file that is no tokenizer or knows no end of a text.
    """
    path = resolve_model(ref, filename="tokenizer.json", setting=setting).path
    try:
        tokenizer = Tokenizer.from_file(str(path))
    # the library raises Exception itself
    except Exception as error:
        raise ValueError(f"{path}: not a tokenizer.json of the tokenizers library ({error})") from error
    # the file may ask for either, and a document's end is to be seen
    tokenizer.no_truncation()
    tokenizer.no_padding()
    try:
        end_of_text(tokenizer)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return tokenizer


def end_of_text(tokenizer: Tokenizer) -> int:
    """The id of the token that ends a document. Raises ValueError naming those that are known."""
    for token in _ENDS:
        found = tokenizer.token_to_id(token)
        if found is not None:
            return found
    raise ValueError(f"the tokenizer has no end-of-text token; give it one of: {', '.join(_ENDS)}")


def encode(tokenizer: Tokenizer, ids: Sequence[str], texts: Sequence[str | None], context: int) -> Documents:
    """Each document's tokens and the end-of-text, of which the first `context` are taken.

    A document without tokens is refused by its id: a loss needs a token to predict.
    """
    kept: list[str] = []
    tokens: list[np.ndarray] = []
    lengths: list[int] = []
    refused: dict[str, str] = {}
    end = end_of_text(tokenizer)
    for rows in _batches(zip(ids, texts, strict=True)):
        encoded = token_ids(tokenizer, [replace_surrogates(t or "") for _, t in rows])
        for (doc_id, text), found in zip(rows, encoded, strict=True):
            if not len(found):
                refused[doc_id] = NULL_TEXT if text is None else NO_TOKENS
                continue
            kept.append(doc_id)
            lengths.append(len(found) + 1)
            tokens.append(np.append(found[:context], end)[:context])
    return Documents(kept, tokens, np.array(lengths, np.int64), refused)


def pack(tokenizer: Tokenizer, texts: Iterable[str | None], context: int, path: Path) -> Packed:
    """Write the documents, each followed by the end-of-text, as rows of `context` tokens to the .npy file `path`.

    uint16 where the vocabulary allows, else int32; `sequences` maps the file. One batch of texts is in memory at a
    time, and the file is there whole or not at all. Raises ValueError where not one sequence is filled.
    """
    kind = np.dtype("<u2" if tokenizer.get_vocab_size() <= 1 << 16 else "<i4")
    end = end_of_text(tokenizer)
    documents = empty = tokens = count = 0
    rest = np.zeros(0, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as temp, temp.open("wb") as file:
        _header(file, 0, context, kind)
        for batch in _batches(texts):
            parts = [rest]
            for found in token_ids(tokenizer, [replace_surrogates(t or "") for t in batch]):
                if len(found):
                    parts.append(np.append(found, end).astype(kind))
                    documents += 1
                    tokens += len(found) + 1
                else:
                    empty += 1
            joined = np.concatenate(parts)
            whole = len(joined) // context
            file.write(joined[: whole * context].tobytes())
            count, rest = count + whole, joined[whole * context :].copy()
        if not count:
            raise ValueError(
                f"{documents} documents have {tokens} tokens together, and a sequence takes {context}: "
                "give more documents or a shorter context"
            )
        # the header leaves room for a longer first axis, so that it can be told last
        file.seek(0)
        _header(file, count, context, kind)
    return Packed(count, documents, empty, tokens, len(rest))


def sequences(path: Path) -> np.ndarray:
    """uint16 or int32[n, context]: a file of `pack`, mapped into memory."""
    found: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    return found


def _batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    every = iter(items)
    while batch := list(islice(every, _BATCH)):
        yield batch


def _header(file: BinaryIO, count: int, context: int, kind: np.dtype) -> None:
    npy.write_array_header_1_0(file, {"shape": (count, context), "fortran_order": False, "descr": kind.str})
