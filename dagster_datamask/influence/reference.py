"""The reference set: what a model's loss is measured on, and that nothing in it can be chosen or trained on.

Here: reading it, its tokens and which of them count, and the check that reference, held-out reference and pool have no
text in common. Not here: the loss itself (`forward`).
"""

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from dagster_datamask import keyed
from dagster_datamask.influence.tokens import end_of_text
from dagster_datamask.scoring.text import decode_column, replace_surrogates

# rows that are read at once, and rows of an overlap that an error names
_READ_ROWS = 4096
_NAMED = 3


class OverlapError(ValueError):
    """A text stands in two sets that must have none in common."""


@dataclass(frozen=True)
class Example:
    """One row of a reference file: its name for errors, what comes before, and what the loss is taken on. Plain text
    has no prompt."""

    name: str
    prompt: str
    answer: str

    @property
    def text(self) -> str:
        return f"{self.prompt} {self.answer}" if self.prompt else self.answer


@dataclass(frozen=True, eq=False)
class Reference:
    """tokens int64[n, L], padded at the end; mask bool[n, L]: the tokens whose loss counts, never a row's first; cut:
    how many examples lost tokens to the context."""

    tokens: np.ndarray
    mask: np.ndarray
    cut: int = 0

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2 or self.tokens.shape != self.mask.shape:
            raise ValueError(
                f"reference tokens {self.tokens.shape} and mask {self.mask.shape} are not of one shape [n, L]"
            )
        if not len(self.tokens):
            raise ValueError("the reference set is empty: no loss can be taken on it; give at least one example")
        bare = np.flatnonzero(~self.mask[:, 1:].any(axis=1))
        if bare.size:
            raise ValueError(f"reference row {int(bare[0])} has no token that counts; leave it out")
        if self.mask[:, 0].any():
            raise ValueError(f"reference row {int(self.mask[:, 0].argmax())}: nothing predicts its first token")

    @property
    def counted(self) -> int:
        """Tokens that the mean loss is over."""
        return int(self.mask.sum())

    @property
    def identity(self) -> str:
        parts = [np.ascontiguousarray(a).tobytes() for a in (self.tokens.astype("<i8"), self.mask)]
        return f"blake2b:{keyed.digest(str(self.tokens.shape), *parts).hex()}"


def of_sequences(tokens: np.ndarray) -> Reference:
    """The reference of token sequences int[n, L] all of whose tokens count, but for each first."""
    mask = np.ones(tokens.shape, bool)
    mask[:, :1] = False
    return Reference(np.asarray(tokens, np.int64), mask)


def read_examples(path: str | Path, limit: int, seed: int = 0, skip: int = 0) -> list[Example]:
    """At most `limit` examples of a file, after the first `skip`, in a keyed order of their texts: so two disjoint sets
    can come out of one file, and the order of its rows leaves no trace.

    path: parquet with columns `prompt` and `answer`, or `text`; or a text file, one example a paragraph. Rows whose
    answer is null or blank are left out, and of equal texts (`normalised`) one is kept. Only those kept so far are in
    memory. Raises FileNotFoundError, and ValueError naming the file where it is no such file or no example is left.
    """
    wanted = skip + limit
    if limit < 1:
        raise ValueError(f"a reference of {limit} examples is none; ask for 1 or more")
    best: dict[bytes, tuple[int, Example]] = {}
    for batch in _rows(str(path)):
        keys = [text_key(example.text) for example in batch]
        for key, rank, example in zip(
            keys, keyed.hash64([k.hex() for k in keys], seed, "reference"), batch, strict=True
        ):
            known = best.get(key)
            # of equal texts always the same one, wherever it stands
            if known is None or (example.prompt, example.answer) < (known[1].prompt, known[1].answer):
                best[key] = (int(rank), example)
        if len(best) > wanted + _READ_ROWS:
            best = _first(best, wanted)
    kept = list(_first(best, wanted).values())[skip:]
    if not kept:
        raise ValueError(
            f"{path}: {len(best)} different examples with an answer, and {skip} of them are taken: none is left"
        )
    return [example for _, example in kept]


def build_reference(tokenizer: Tokenizer, examples: Sequence[Example], context: int) -> Reference:
    """Tokens and mask of the examples: the answer's tokens and the end-of-text count, those of the prompt do not. A
    plain text is an answer to the end of another text.

    What is longer than the context loses the start of its prompt, and where its answer alone is longer, that one's end.
    Raises ValueError for no examples, and naming an example whose answer has no tokens.
    """
    end = end_of_text(tokenizer)
    rows: list[tuple[list[int], int]] = []
    cut = 0
    for example in examples:
        prompt, answer = (
            tokenizer.encode(replace_surrogates(text), add_special_tokens=False).ids
            # a tokenizer of bytes has the space with the word that follows
            for text in (example.prompt, f" {example.answer.lstrip()}" if example.prompt else example.answer)
        )
        if not answer:
            raise ValueError(f"reference row {example.name}: its answer has no tokens; leave it out")
        answer = [*answer, end]
        # without a prompt the end of another text is what comes before
        before = prompt or [end]
        cut += len(before) + len(answer) > context
        answer = answer[: context - 1]
        before = before[-(context - len(answer)) :]
        rows.append((before + answer, len(before)))
    length = max((len(tokens) for tokens, _ in rows), default=0)
    tokens, mask = np.full((len(rows), length), end, np.int64), np.zeros((len(rows), length), bool)
    for i, (row, start) in enumerate(rows):
        tokens[i, : len(row)] = row
        mask[i, start : len(row)] = True
    return Reference(tokens, mask, cut)


def normalised(text: str) -> str:
    """What makes two texts the same here: Unicode's compatibility form, caseless, every white space one space."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def text_key(text: str) -> bytes:
    """16 bytes that stand for the normalised text."""
    return keyed.digest(normalised(text))


@dataclass(frozen=True, eq=False)
class Kept:
    """The texts of reference sets by their key, to look others up among."""

    keys: dict[bytes, str] = field(default_factory=dict)

    @classmethod
    def of(cls, sets: Mapping[str, Sequence[Example]]) -> "Kept":
        """sets: {name: examples}. Raises OverlapError where two of the sets share a text."""
        kept = cls()
        for name, examples in sets.items():
            kept.refuse(name, ((example.name, example.text) for example in examples))
            kept.keys.update({text_key(example.text): f"{name} row {example.name}" for example in examples})
        return kept

    def refuse(self, what: str, rows: Iterable[tuple[str, str | None]]) -> None:
        """Raise OverlapError naming the rows (id, text) whose text is kept here; the rows are streamed."""
        found: list[str] = []
        more = 0
        for row, text in rows:
            known = self.keys.get(text_key(text)) if text else None
            if known is not None and len(found) < _NAMED:
                found.append(f"{row} (= {known})")
            elif known is not None:
                more += 1
        if found:
            raise OverlapError(
                f"{what}: {len(found) + more} rows have the text of a reference row: {', '.join(found)}"
                f"{f' and {more} more' if more else ''}; influence would be measured on what can be chosen, so take "
                "them out of one of the two"
            )


def _first(best: dict[bytes, tuple[int, Example]], count: int) -> dict[bytes, tuple[int, Example]]:
    return dict(sorted(best.items(), key=lambda item: (item[1][0], item[0]))[:count])


def _rows(path: str) -> Iterable[list[Example]]:
    with fsspec.open(path, "rb") as file:
        if not path.endswith(".parquet"):
            text = file.read().decode("utf-8", "replace")
            paragraphs = [p.strip() for p in text.replace("\r\n", "\n").split("\n\n")]
            yield [Example(f"paragraph {k}", "", p) for k, p in enumerate(paragraphs) if p]
            return
        try:
            parquet = pq.ParquetFile(file)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{path}: not a readable parquet file ({error})") from error
        names = parquet.schema_arrow.names
        columns = ["prompt", "answer"] if {"prompt", "answer"} <= set(names) else ["text"]
        if columns == ["text"] and "text" not in names:
            raise ValueError(
                f"{path}: no columns 'prompt' and 'answer' and no column 'text'; it has: {', '.join(names) or 'none'}. "
                "A reference set needs either"
            )
        row = 0
        for batch in parquet.iter_batches(_READ_ROWS, columns=columns):
            decoded = [decode_column(batch.column(name))[0] for name in columns]
            pairs = zip(*decoded, strict=True) if len(decoded) == 2 else ((None, text) for text in decoded[0])
            yield [
                Example(str(row + k), (prompt or "").strip(), answer)
                for k, (prompt, answer) in enumerate(pairs)
                if answer and not answer.isspace()
            ]
            row += batch.num_rows
