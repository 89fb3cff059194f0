"""Web-like documents at any number: FineWeb's columns in shards of snapshots, labels for classifiers, vectors.

Here: what is generated, each block from its own key, so that memory is flat and no order matters. Not here: what is
measured on it. Nothing of the text is real; its lengths are distributed as those of web pages.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dagster_datamask import keyed

SNAPSHOTS = ("CC-MAIN-2024-10", "CC-MAIN-2024-18", "CC-MAIN-2024-22", "CC-MAIN-2024-26")
SHARDS = 20
DIMENSION = 384
TOPICS = 256
# rows that are generated at once, and of a row group
BLOCK = 1000

# log-normal fit to the UTF-8 bytes of the 12,590 shared web pages: mean and deviation of ln(bytes), and their longest
_LOG_MEAN, _LOG_SD = 7.587, 1.034
_LONGEST = 142_756
# bytes a GPT-2 token of the same pages
_BYTES_PER_TOKEN = 4.07

_WORDS = 50_000
_COMMON_SHARE = 0.6
_DRAWS = 1 << 16
_ZIPF = 1.0
# one word in so many ends a sentence, and one sentence in so many a paragraph
_SENTENCE, _PARAGRAPH = 17, 5
_REPEATED_ID, _BLANK = 1e-3, 1e-4
# lengths of a vector's parts beside the centre that all share, of length 1: the mean cosine is 1/(1 + 0.35² + 0.55²)
_TOPIC_PART, _OWN_PART = 0.35, 0.55


@dataclass(frozen=True)
class Place:
    """A shard of the source and its number of rows."""

    snapshot: str
    shard: str
    rows: int


def places(documents: int) -> list[Place]:
    """The shards of so many documents, as equal as can be."""
    edges = [documents * k // SHARDS for k in range(SHARDS + 1)]
    each = SHARDS // len(SNAPSHOTS)
    return [Place(SNAPSHOTS[k // each], f"{k % each:03d}_00000", edges[k + 1] - edges[k]) for k in range(SHARDS)]


def write_source(folder: Path, documents: int) -> None:
    """`documents` rows in FineWeb's columns below `folder`, zstd parquet; shards that are there stay."""
    for place in places(documents):
        path = folder / "data" / place.snapshot / f"{place.shard}.parquet"
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        temp = path.with_suffix(".part")
        with pq.ParquetWriter(temp, _block(place, 0, 0).schema, compression="zstd") as writer:
            for first in range(0, place.rows, BLOCK):
                writer.write_table(_block(place, first, min(BLOCK, place.rows - first)), row_group_size=BLOCK)
        temp.replace(path)


def write_labels(path: Path, name: str, documents: int = 2000) -> None:
    """text, label of a classifier's training set: 1 for half of the topics, by the classifier's name, else 0."""
    rng = keyed.rng(0, "scale/labels", name)
    topics = rng.integers(0, TOPICS, documents)
    good = keyed.rng(0, "scale/taste", name).permutation(TOPICS) < TOPICS // 2
    written = texts(rng, topics, np.full(documents, 600))
    pq.write_table(pa.table({"text": written, "label": good[topics].astype(np.int64)}), path)


def vector_blocks(place: Place) -> Iterator[np.ndarray]:
    """float16[n, DIMENSION] unit vectors of the shard's rows, in their order: a centre that all share, the topic's
    direction and a part of one's own with a decaying spectrum; mean cosine 0.7."""
    centre, topics = _directions()
    spectrum = np.arange(1, DIMENSION + 1, dtype=np.float32) ** np.float32(-0.3)
    for first in range(0, place.rows, BLOCK):
        rows = min(BLOCK, place.rows - first)
        own = keyed.rng(0, "scale/vectors", place.snapshot, place.shard, first)
        z = own.standard_normal((rows, DIMENSION), dtype=np.float32) * spectrum
        z *= _OWN_PART / np.linalg.norm(z, axis=1, keepdims=True)
        z += centre + topics[_topics_of(place, first, rows)]
        z /= np.linalg.norm(z, axis=1, keepdims=True)
        yield z.astype(np.float16)


def centroids() -> np.ndarray:
    """float32[TOPICS, DIMENSION]: where the topics' vectors lie, unit length."""
    centre, topics = _directions()
    z = centre + topics
    return np.ascontiguousarray(z / np.linalg.norm(z, axis=1, keepdims=True))


@cache
def _directions() -> tuple[np.ndarray, np.ndarray]:
    rng = keyed.rng(0, "scale/directions")
    drawn = rng.standard_normal((1 + TOPICS, DIMENSION), dtype=np.float32)
    drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
    return drawn[0], drawn[1:] * np.float32(_TOPIC_PART)


def topics_of(place: Place) -> np.ndarray:
    """int64[rows]: what each document of the shard is about."""
    firsts = range(0, place.rows, BLOCK)
    drawn = [_topics_of(place, first, min(BLOCK, place.rows - first)) for first in firsts]
    return np.concatenate([np.zeros(0, np.int64), *drawn])


def _topics_of(place: Place, first: int, rows: int) -> np.ndarray:
    return keyed.rng(0, "scale/topics", place.snapshot, place.shard, first).integers(0, TOPICS, rows)


def _block(place: Place, first: int, rows: int) -> pa.Table:
    rng = keyed.rng(0, "scale/documents", place.snapshot, place.shard, first)
    lengths = np.clip(rng.lognormal(_LOG_MEAN, _LOG_SD, rows), 1, _LONGEST)
    written = texts(rng, _topics_of(place, first, rows), lengths)
    blank = pa.array(rng.random(rows) < _BLANK)
    written = pc.if_else(blank, "", written)
    sizes = pc.binary_length(written).to_numpy(zero_copy_only=False)
    ids = [f"<urn:uuid:{UUID(bytes=rng.bytes(16))}>" for _ in range(rows)]
    for k in np.flatnonzero(rng.random(rows) < _REPEATED_ID).tolist():
        ids[k] = ids[k - 1]
    hosts = rng.zipf(1.3, rows) % 100_000
    dump = place.snapshot
    return pa.table(
        {
            "text": written,
            "id": pa.array(ids, pa.string()),
            "dump": pa.array([dump] * rows, pa.string()),
            "url": pa.array([f"https://site-{h}.example/{first + k}" for k, h in enumerate(hosts)], pa.string()),
            "date": pa.array(["2024-03-01T00:00:00Z"] * rows, pa.string()),
            "file_path": pa.array(
                [f"crawl-data/{place.snapshot}/segments/{first // 50_000:05d}.warc.gz"] * rows, pa.string()
            ),
            "language": pa.array(["en"] * rows, pa.string()),
            "language_score": rng.uniform(0.65, 1.0, rows),
            "token_count": pa.array(np.maximum(1, np.rint(sizes / _BYTES_PER_TOKEN)).astype(np.int64)),
        }
    )


def texts(rng: np.random.Generator, topics: np.ndarray, lengths: np.ndarray) -> pa.StringArray:
    """A text for every topic, of about so many bytes: words by Zipf's law, some in every topic's order of rank and
    some in this one's."""
    vocabulary, mean_bytes, draws = _vocabulary()
    counts = np.maximum(1, np.rint(lengths / mean_bytes)).astype(np.int64)
    total = int(counts.sum())
    ranks = draws[rng.integers(0, _DRAWS, total, dtype=np.uint32)]
    # a topic's words of each rank are other ones: the ranks moved on by a step of its own
    own = rng.random(total, dtype=np.float32) >= _COMMON_SHARE
    steps = np.repeat((topics.astype(np.int64) + 1) * (_WORDS // (TOPICS + 1)), counts)
    words = np.where(own, (ranks + steps) % _WORDS, ranks)
    endings = rng.integers(0, _SENTENCE * _PARAGRAPH, total, dtype=np.uint8)
    words += _WORDS * ((endings % _SENTENCE == 0).astype(np.int64) + (endings == 0))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(offsets), vocabulary.take(pa.array(words)))
    return pc.binary_join(lists, " ")


@cache
def _vocabulary() -> tuple[pa.StringArray, float, np.ndarray]:
    """(words, then the same as ends of sentences, then of paragraphs; the mean bytes a word takes in a text; the ranks
    that a uniform draw picks from)."""
    rng = keyed.rng(0, "scale/vocabulary")
    syllables = np.array([a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "ea", "ar", "en")])
    words: dict[str, None] = {}
    while len(words) < _WORDS:
        # the frequent words are short
        parts = 1 + min(3, len(words) // 100) if len(words) < 400 else 2 + int(rng.integers(0, 3))
        words["".join(syllables[rng.integers(0, len(syllables), parts)])] = None
    plain = list(words)
    weights = np.arange(1, _WORDS + 1, dtype=np.float64) ** -_ZIPF
    edges = np.cumsum(weights) / weights.sum()
    draws = np.searchsorted(edges, (np.arange(_DRAWS) + 0.5) / _DRAWS).astype(np.int64)
    sizes = np.array([len(word) for word in plain])
    own = _COMMON_SHARE * sizes[draws].mean() + (1 - _COMMON_SHARE) * sizes.mean()
    ending = (1 + 1 / _PARAGRAPH) / _SENTENCE
    every = plain + [f"{word}." for word in plain] + [f"{word}.\n" for word in plain]
    return pa.array(every, pa.string()), float(own + 1 + ending), draws
