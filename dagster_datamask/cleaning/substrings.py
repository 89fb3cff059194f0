"""Exact repeated substrings of a set of documents, and their removal (Lee et al. 2022, arXiv:2107.06499; GneissWeb).

Here: what is repeated, decided over bytes by a suffix array, and cutting it out of a text. Not here: which documents
are looked at together, the tokenizer, and files.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from pydivsufsort import divsufsort, kasai, longest_previous_factor, sa_search

# Memory for one byte of text while arrays are built: five of 32 bits, the joined text and the texts themselves. What is
# left of it while a document is tokenised, and what the document's tokens take beside. Measured: 22, 9 and 30.
BYTES_PER_BYTE = 24
_KEPT, _TOKENISED = 10, 32
# no byte of UTF-8, so no repeat reaches from one document into the next
_END = b"\xff"
# documents tokenised at once
_BATCH = 256

Tokenise = Callable[[list[str]], Iterable[np.ndarray]]


@dataclass(frozen=True, eq=False)
class Repeats:
    """What of one document is repeated.

    spans: int64[r, 2], ascending, apart from each other: bytes [start, end) of its UTF-8 form.
    tokens: the document's tokens that lie in them. first: the document that holds the first occurrence of the first
    span's beginning, by its place in the input; None where there is no span.
    """

    spans: np.ndarray
    tokens: int
    first: int | None


def find_repeats(texts: Sequence[bytes], tokenise: Tokenise, min_tokens: int) -> list[Repeats]:
    """What in each of the documents occurs before it in them, in runs of at least `min_tokens` tokens.

    texts: UTF-8, in the order in which an occurrence is the first. tokenise: for a list of texts int64[t, 2] each, the
    characters [start, end) of every token, ascending (`scoring.tokenizers.token_offsets`).

    A window of `min_tokens` tokens of a document is repeated where its bytes begin anywhere before: in an earlier
    document, whatever the tokens are there, or further up in its own, overlapping itself or not. What is repeated is
    the union of such windows, as in the suffix-array removal of Lee et al. that keeps the first occurrence, which is
    GneissWeb's. Windows consist of whole tokens, and a token of the byte-level BPE of GPT-2 that is part of a character
    stands for all of it, so no span begins or ends within a character.

    O(bytes) time but for a binary search a document; for memory see `memory_needed`. Only documents with a repeat of
    `min_tokens` bytes are tokenised: fewer hold no window, as every token has a byte.
    """
    lengths = np.fromiter((len(text) for text in texts), np.int64, len(texts))
    found = [_NOTHING] * len(texts)
    if int(lengths.sum()) <= min_tokens:
        return found
    data = np.frombuffer(bytearray(_END).join(texts), np.uint8)
    suffixes = divsufsort(data)
    previous = longest_previous_factor(data, suffixes, kasai(data, suffixes))
    starts = np.concatenate([[0], np.cumsum(lengths + 1)])[:-1]
    whole = np.flatnonzero(lengths)
    longest = np.zeros(len(texts), np.int64)
    # an empty document has no byte of its own to reduce over
    longest[whole] = np.maximum.reduceat(previous, starts[whole])
    # {(how many suffixes begin with a window, where they stand): its first occurrence}: many documents share one
    first_at: dict[tuple[int, int], int] = {}
    worth = np.flatnonzero(np.minimum(longest, lengths) >= min_tokens)
    for a in range(0, len(worth), _BATCH):
        batch = worth[a : a + _BATCH].tolist()
        for number, characters in zip(batch, tokenise([texts[n].decode("utf-8") for n in batch]), strict=True):
            tokens = _as_bytes(texts[number], characters)
            start = int(starts[number])
            repeated = _repeated(tokens, previous[start : start + len(texts[number])], min_tokens)
            if repeated.any():
                spans = _runs(tokens, repeated)
                window = tokens[np.flatnonzero(repeated)[0] :][:min_tokens]
                place = sa_search(data, suffixes, data[start + window[0, 0] : start + window[-1, 1]])
                if place not in first_at:
                    first_at[place] = int(suffixes[place[1] : place[1] + place[0]].min())
                found[number] = Repeats(
                    spans, _inside(tokens, spans), int(np.searchsorted(starts, first_at[place], side="right")) - 1
                )
    return found


def memory_needed(texts: Sequence[bytes]) -> int:
    """Bytes that `find_repeats` takes of these texts at its peak, the texts included."""
    whole, longest = sum(map(len, texts)), max(map(len, texts), default=0)
    return max(BYTES_PER_BYTE * whole, _KEPT * whole + _TOKENISED * longest)


def removed(text: bytes, spans: Sequence[Sequence[int]] | np.ndarray) -> bytes:
    """The text without its spans, ascending and apart from each other."""
    parts, at = [], 0
    for start, end in spans:
        parts.append(text[at:start])
        at = end
    return b"".join([*parts, text[at:]])


_NOTHING = Repeats(np.empty((0, 2), np.int64), 0, None)


def _as_bytes(text: bytes, characters: np.ndarray) -> np.ndarray:
    """Places in characters as places in bytes."""
    body = np.frombuffer(text, np.uint8)
    # all but continuation bytes begin a character
    at = np.append(np.flatnonzero((body & 0xC0) != 0x80), len(body))
    return at[np.asarray(characters, np.int64).reshape(-1, 2)]


def _repeated(tokens: np.ndarray, previous: np.ndarray, min_tokens: int) -> np.ndarray:
    """bool[t]: whether a token lies in a repeated window; `previous` as longest_previous_factor, of this document."""
    windows = max(len(tokens) - min_tokens + 1, 0)
    begin, end = tokens[:windows, 0], tokens[min_tokens - 1 :, 1]
    repeated = previous[begin] >= end - begin if windows else np.zeros(0, bool)
    # each repeated window adds one from its first token to its last
    steps = np.zeros(len(tokens) + 1, np.int64)
    steps[:windows] += repeated
    steps[min_tokens : min_tokens + windows] -= repeated
    return np.cumsum(steps[:-1]) > 0


def _runs(tokens: np.ndarray, repeated: np.ndarray) -> np.ndarray:
    """int64[r, 2]: the repeated tokens' bytes with what lies between neighbours, as spans apart from each other."""
    edges = np.flatnonzero(np.diff(repeated.astype(np.int8), prepend=0, append=0))
    runs = np.stack([tokens[edges[::2], 0], tokens[edges[1::2] - 1, 1]], axis=1)
    # parts of one character stand for all of it, and so may belong to two runs
    apart = np.flatnonzero(runs[1:, 0] > runs[:-1, 1])
    return np.stack([runs[np.append(0, apart + 1), 0], runs[np.append(apart, len(runs) - 1), 1]], axis=1)


def _inside(tokens: np.ndarray, spans: np.ndarray) -> int:
    span = np.searchsorted(spans[:, 0], tokens[:, 0], side="right") - 1
    return int(((span >= 0) & (tokens[:, 1] <= spans[span, 1])).sum())
