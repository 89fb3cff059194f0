"""exact_substrings: what an earlier document of the shard says word for word, as spans to cut out of the later one.

Here: the shard's documents in parts of a fixed size, the tokenizer, the side file. Not here: what counts as repeated
(`cleaning.substrings`), and who cuts: texts are never rewritten but by `fineweb_mask` where GneissWeb's mask is kept.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from dagster_datamask.cleaning.substrings import Repeats, find_repeats, memory_needed, removed
from dagster_datamask.scoring.text import decode_column
from dagster_datamask.scoring.tokenizers import load_same_tokenizer, resolve_tokenizer, token_offsets
from dagster_datamask.settings import SettingsError
from dagster_datamask.shards.cursor import read_batches
from dagster_datamask.shards.documents import DocumentReader
from dagster_datamask.shards.engine import Counts
from dagster_datamask.shards.schemas import SUBSTRINGS
from dagster_datamask.shards.source import Source
from dagster_datamask.stages.base import STAGES, Outcome, Run, fingerprints, finish
from dagster_datamask.stages.scores import SIDE_ROWS

# Bytes of text that are searched at once: 3 GB of memory. The same on every machine, as a repeat is found within them.
PART_BYTES = 1 << 27
NOTHING_LEFT = "nothing is left after removal"


@dataclass(frozen=True, eq=False)
class Part:
    """Documents of a shard that are searched together. open: whether raw_shards left a document undecided; the texts
    of others are empty."""

    ids: list[str] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)
    open: list[bool] = field(default_factory=list)


def exact_substrings(run: Run, source: Source, snapshot: str) -> Outcome:
    """Publish, for every row of raw_shards, the spans that occur before it in its shard, and how much they are.

    Before it: in an earlier row of the part of the shard, as GneissWeb searches file by file. Rows that raw_shards has
    decided of are no text here. A document of which nothing but blanks would be left has the reason NOTHING_LEFT.
    Raises SettingsError without a source.tokenizer, ModelUnavailable, and MemoryPlanError before a part is searched.
    """
    stage = STAGES["exact_substrings"]
    ref = run.settings.source.tokenizer
    if not ref:
        raise SettingsError(
            "source.tokenizer is empty, and exact_substrings counts in tokens; name one, 'openai-community/gpt2' for "
            "GneissWeb's"
        )
    inputs = run.inputs(stage, snapshot)
    raw = inputs["raw_shards"]
    reader = DocumentReader(source, raw)
    keys = fingerprints(inputs) | {"tokenizer": resolve_tokenizer(ref).revision}
    with run.generation(stage, snapshot, keys) as generation:
        records = run.map_shards(
            stage,
            generation,
            raw.shards,
            lambda shard: _parts(reader, shard),
            lambda: _Find(run, keys["tokenizer"]),
            SUBSTRINGS,
            ext=".parquet",
            total_rows=raw.rows,
            origin=lambda shard: run.origin(stage, keys["tokenizer"], *reader.identity(shard)),
        )
        facts: Counter[str] = Counter()
        for shard in raw.shards:
            for table in read_batches(generation.path(shard, ".parquet"), list(_COUNTED), SIDE_ROWS):
                facts["documents_cut"] += pc.sum(pc.greater(table["removed_bytes"], 0)).as_py() or 0
                facts.update({name: pc.sum(table[name]).as_py() or 0 for name in _COUNTED})
        share = facts["removed_bytes"] / facts["bytes"] if facts["bytes"] else None
        return finish(
            generation,
            records,
            ".parquet",
            facts={name: facts[name] for name in ("documents_cut", *_COUNTED)} | {"removed_share": share},
            expected_rows=raw.rows,
        )


def cut_out(texts: pa.Array | pa.ChunkedArray, spans: pa.ChunkedArray) -> pa.Array:
    """The texts, a string column in UTF-8, each without its spans of `SUBSTRINGS`; null stays null."""
    left = [
        removed(text.encode("utf-8"), [(span["start"], span["end"]) for span in cut]).decode("utf-8") if cut else text
        for text, cut in zip(texts.to_pylist(), spans.to_pylist(), strict=True)
    ]
    return pa.array(left, texts.type)


_COUNTED = ("bytes", "removed_bytes", "removed_tokens")


def _parts(reader: DocumentReader, shard: str) -> Iterator[Part]:
    """The shard's documents, as many at once as have PART_BYTES, and at least one."""
    part, held = Part(), 0
    for batch in reader.batches(shard, ["text"]):
        texts, _ = decode_column(batch.rows["text"])
        undecided = batch.raw["decision"].is_null().to_pylist()
        for id_, text, open_ in zip(batch.ids.to_pylist(), texts, undecided, strict=True):
            body = (text or "").encode("utf-8") if open_ else b""
            if part.ids and held + len(body) > PART_BYTES:
                yield part
                part, held = Part(), 0
            part.ids.append(id_)
            part.texts.append(body)
            part.open.append(open_)
            held += len(body)
    if part.ids:
        yield part


class _Find:
    def __init__(self, run: Run, revision: str) -> None:
        self._tokenizer = load_same_tokenizer(run.settings.source.tokenizer, revision)
        self._min_tokens = run.settings.baselines.gneissweb_tokens
        self._accelerator = run.accelerator

    def __call__(self, part: Part) -> tuple[pa.Table, int, Counts]:
        self._accelerator.plan(
            "searching a shard for repeated substrings",
            memory_needed(part.texts),
            "write the snapshot as smaller shards",
        )
        found = find_repeats(part.texts, partial(token_offsets, self._tokenizer), self._min_tokens)
        reasons = [_why(text, repeats) for text, repeats in zip(part.texts, found, strict=True)]
        table = pa.table(
            {
                "doc_id": part.ids,
                "spans": [[{"start": start, "end": end} for start, end in r.spans.tolist()] for r in found],
                "bytes": [len(text) for text in part.texts],
                "removed_bytes": [int((r.spans[:, 1] - r.spans[:, 0]).sum()) for r in found],
                "removed_tokens": [r.tokens for r in found],
                "first_doc": [None if r.first is None else part.ids[r.first] for r in found],
                "reason": reasons,
            },
            schema=SUBSTRINGS,
        )
        return table, len(table), Counter(map(_outcome, part.open, found, reasons))


def _why(text: bytes, repeats: Repeats) -> str | None:
    cut = len(repeats.spans) and not removed(text, repeats.spans).decode("utf-8").strip()
    return NOTHING_LEFT if cut else None


def _outcome(open_: bool, repeats: Repeats, reason: str | None) -> str:
    if not open_:
        return "set_aside_by_raw_shards"
    if reason is not None:
        return "nothing_left"
    return "cut" if len(repeats.spans) else "untouched"
