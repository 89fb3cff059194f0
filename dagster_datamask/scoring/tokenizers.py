"""Tokenizers by reference: `tokenizer.json`, or the vocabulary and merges of a byte-level BPE such as GPT-2's.

Here: finding and loading one, the tokens of texts of any length, their number and where they lie. Not here: what tokens
are counted or compared for, and tokenizers that are trained.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer, models, pre_tokenizers

from dagster_datamask.scoring.models import PACKAGE_PREFIX, ModelUnavailable, ResolvedModel, resolve_model

_FILE = "tokenizer.json"
# characters that are tokenised at once: the library holds some 150 bytes for each of them
_PIECE = 1 << 17
_PIECES = 1 << 18
# vocabulary and merges, as transformers and as GPT-2's authors call them
_PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


def resolve_tokenizer(ref: str, setting: str = "source.tokenizer") -> ResolvedModel:
    """Where the tokenizer is that `ref` names: a file, a folder, `package:<name>/<folder>`, a hub id or a URL.

    setting: the key to name in errors. Raises ModelUnavailable as `resolve_model` does.
    """
    here = ref.startswith(PACKAGE_PREFIX) or Path(ref).expanduser().exists()
    return resolve_model(ref, filename=None if here else _FILE, setting=setting)


def load_same_tokenizer(ref: str, revision: str, setting: str = "source.tokenizer") -> Tokenizer:
    """`load_tokenizer`'s on any machine. Raises ModelUnavailable where `ref` is another one there than `revision`."""
    found = resolve_tokenizer(ref, setting).revision
    if found != revision:
        raise ModelUnavailable(f"{setting}: {ref} is {found} on this machine and {revision} where the run began")
    return load_tokenizer(ref, setting)


def load_tokenizer(ref: str, setting: str = "source.tokenizer") -> Tokenizer:
    """The tokenizer of `ref`, which takes texts of any length whole.

    Raises ModelUnavailable for one that is not there, and ValueError naming the file that is none.
    """
    found = resolve_tokenizer(ref, setting).path
    files = [found] if found.is_file() else [found / _FILE]
    try:
        if files[0].is_file():
            tokenizer = Tokenizer.from_file(str(files[0]))
        else:
            files = _vocabulary(found, ref, setting)
            tokenizer = Tokenizer(models.BPE.from_file(*map(str, files)))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
    except ModelUnavailable:
        raise
    # the library raises Exception itself
    except Exception as error:
        named = " and ".join(map(str, files))
        raise ValueError(f"{named}: no tokenizer of the tokenizers library ({error}); correct {setting}") from error
    # the file may ask for either
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def token_offsets(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[np.ndarray]:
    """int64[t, 2] of each text: the characters [start, end) of its tokens, without special ones.

    A text beyond 131,072 characters is tokenised in pieces, cut before a blank between two words: there GPT-2's rule
    separates tokens anyway. Where a piece has no such blank its last token may be cut.
    """
    for _, parts in groupby(_encoded(tokenizer.encode_batch, texts), itemgetter(0)):
        yield np.concatenate([np.array(e.offsets, np.int64).reshape(-1, 2) + at for _, at, e in parts])


def token_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[np.ndarray]:
    """int64[t] of each text: its tokens, without special ones, in pieces as `token_offsets` has them."""
    for _, parts in groupby(_encoded(tokenizer.encode_batch_fast, texts), itemgetter(0)):
        yield np.concatenate([np.array(e.ids, np.int64) for _, _, e in parts])


def token_counts(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """int64[n]: how many tokens each text has, in memory that no text's length adds to; else as `token_ids`."""
    counts = np.zeros(len(texts), np.int64)
    for number, _, encoding in _encoded(tokenizer.encode_batch_fast, texts):
        counts[number] += len(encoding)
    return counts


def _encoded(encode: Callable[..., list[Encoding]], texts: Sequence[str]) -> Iterator[tuple[int, int, Encoding]]:
    """(the text's number, where the piece begins in it, the piece's tokens), in order and at least one of each text."""
    for batch in _batches((number, at, piece) for number, text in enumerate(texts) for at, piece in _pieces(text)):
        found = encode([piece for _, _, piece in batch], add_special_tokens=False)
        for (number, at, _), encoding in zip(batch, found, strict=True):
            yield number, at, encoding


def _pieces(text: str) -> Iterator[tuple[int, str]]:
    at = 0
    while len(text) - at > _PIECE:
        end = at + _PIECE
        cut = text.rfind(" ", at + 1, end)
        while cut > 0 and (text[cut - 1].isspace() or text[cut + 1].isspace()):
            cut = text.rfind(" ", at + 1, cut)
        end = cut if cut > 0 else end
        yield at, text[at:end]
        at = end
    yield at, text[at:]


def _batches(pieces: Iterable[tuple[int, int, str]]) -> Iterator[list[tuple[int, int, str]]]:
    batch: list[tuple[int, int, str]] = []
    held = 0
    for piece in pieces:
        batch.append(piece)
        held += len(piece[2])
        if held >= _PIECES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _vocabulary(folder: Path, ref: str, setting: str) -> list[Path]:
    for names in _PAIRS:
        files = [folder / name for name in names]
        if all(file.is_file() for file in files):
            return files
    there = ", ".join(sorted(p.name for p in folder.iterdir() if p.is_file())[:20]) or "no files"
    wanted = ", or ".join((_FILE, *(" and ".join(names) for names in _PAIRS)))
    raise ModelUnavailable(f"tokenizer {ref!r}: {folder} has no {wanted}; there: {there}; correct {setting}")
