"""raw_shards: the snapshot's rows, each under a unique id, read once and accounted for.

Only identity and readability are decided here, and tokens counted where the source does not tell; no score and no
model. Text itself is never copied.
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from dagster_datamask.keyed import digest, hash64
from dagster_datamask.scoring.models import ModelUnavailable, ResolvedModel
from dagster_datamask.scoring.text import decode_column
from dagster_datamask.scoring.tokenizers import load_tokenizer, resolve_tokenizer, token_counts
from dagster_datamask.shards.engine import BATCH_ROWS, Counts, map_shards
from dagster_datamask.shards.identity import Duplicates, base_ids, renamed
from dagster_datamask.shards.schemas import QUARANTINED, RAW, BadShard, ShardReplaced, joined
from dagster_datamask.shards.source import REVISION, Shard, Source
from dagster_datamask.shards.writer import table_file
from dagster_datamask.stages.base import STAGES, Check, Outcome, Run, finish

QUARANTINED_FILE = "quarantined_shards.parquet"
_ID_ROWS = 65_536
_UNLIMITED = 1.0
_RECOMPUTED = "token_count_recomputed"
LIMIT_PURPOSE = "limit"


def raw_shards(run: Run, source: Source, snapshot: str) -> Outcome:
    """Publish `doc_id, row, decision, reason, token_count` of every readable row of `snapshot`.

    Tokens of a text whose row has no count are counted with source.tokenizer, which is looked for only where a shard
    may lack counts; '' leaves them null.

    Raises ModelUnavailable for a tokenizer that is needed and not there, SourceError (no such snapshot, no shards),
    ColumnClash (columns that cannot stand in one table), ShardReplaced (the listing or a shard changed meanwhile) and,
    with on_bad_shard = fail, BadShard.
    """
    bad: dict[str, BadShard] = {}
    while True:
        listing = source.listing_fingerprint(snapshot)
        try:
            return _identify(run, source, snapshot, bad)
        except (BadShard, OSError) as error:
            # half of the old and half of the new is no verdict on either
            if source.listing_fingerprint(snapshot) != listing:
                raise ShardReplaced(f"{snapshot} changed while it was read: {error}") from error
            if not isinstance(error, BadShard):
                raise
            shard = error.path.rpartition("/")[2].removesuffix(".parquet")
            if run.settings.source.on_bad_shard == "fail" or shard in bad:
                raise
            # a page may turn out broken after rows of other shards were written; the fingerprint names the shards set
            # aside, so starting over never mixes the two
            run.log(f"quarantined: {error}")
            bad[shard] = error


def _identify(run: Run, source: Source, snapshot: str, bad: dict[str, BadShard]) -> Outcome:
    stage = STAGES["raw_shards"]
    by_name = {shard.name: shard for shard in source.shards(snapshot) if shard.name not in bad}
    footers = {name: source.footer(shard) for name, shard in by_name.items()}
    # the export would fail on these columns after all the work is done
    joined((by_name[name].path, footer.schema) for name, footer in footers.items())
    contents = {name: source.content(shard, as_listed=True) for name, shard in by_name.items()}
    total = sum(footer.rows for footer in footers.values())
    inputs = {"source": digest(*(part for item in contents.items() for part in item), size=16).hex()}
    inputs |= {f"quarantined {name}": digest(error.why, size=8).hex() for name, error in bad.items()}
    uncounted = [by_name[name].path for name, footer in footers.items() if footer.uncounted]
    tokenizer = run.settings.source.tokenizer if uncounted else ""
    if tokenizer:
        inputs["tokenizer"] = _resolved(tokenizer, uncounted[0]).revision
    counted: Counter[str] = Counter()
    with run.generation(stage, snapshot, inputs) as generation:
        duplicates = Duplicates(generation.work, total)

        def kernel() -> _Identify:
            duplicates.find(list(by_name), lambda name: _ids(source, by_name[name]))
            count = load_tokenizer(tokenizer) if tokenizer else None
            return _Identify(duplicates, run.settings.source.hash_below, count, counted)

        records = map_shards(
            generation,
            list(by_name),
            # every column is read, so that a broken page is found here and not by the export
            lambda name: _rows(source, by_name[name], None, BATCH_ROWS),
            kernel,
            RAW,
            ext=".parquet",
            total_rows=total,
            progress=run.progress(stage, snapshot),
            source=lambda name: {
                "content": _unchanged(source, by_name[name], contents[name]),
                _RECOMPUTED: counted[name],
            },
        )
        with table_file(generation.folder / QUARANTINED_FILE, QUARANTINED) as writer:
            writer.write(
                pa.table({"shard": list(bad), "reason": [error.why for error in bad.values()]}, schema=QUARANTINED)
            )
        complete = Check(
            "every_shard_readable",
            not bad,
            False,
            {"quarantined": "; ".join(f"{name} {error.why}" for name, error in bad.items()) or "none"},
        )
        facts = {
            "shards": len(records),
            "quarantined_shards": len(bad),
            "source_bytes": sum(shard.size for shard in by_name.values()),
            _RECOMPUTED: sum(record.source[_RECOMPUTED] for record in records),
            **({REVISION: source.revision} if source.revision else {}),
        }
        return finish(generation, records, ".parquet", facts=facts, expected_rows=total, checks=(complete,))


def _resolved(tokenizer: str, shard: str) -> ResolvedModel:
    try:
        return resolve_tokenizer(tokenizer)
    except ModelUnavailable as error:
        raise ModelUnavailable(
            f"{shard} has rows without token_count, and nothing to count their tokens with: {error}. Name a folder "
            "with tokenizer.json or vocab.json and merges.txt in source.tokenizer, or set source.tokenizer = '' to "
            "leave such counts null"
        ) from error


def _unchanged(source: Source, shard: Shard, content: str) -> str:
    """`content`, if the shard that was read since still holds it."""
    if source.content(shard) != content:
        raise ShardReplaced(f"{shard.path} changed while it was read; materialise raw_shards again")
    return content


class _Batch:
    """Rows of a shard from `first` on; columns may be missing."""

    def __init__(self, shard: str, first: int, rows: pa.RecordBatch) -> None:
        self.shard = shard
        self.first = first
        self.rows = rows

    def column(self, name: str) -> pa.Array | None:
        return self.rows.column(name) if name in self.rows.schema.names else None


def _rows(source: Source, shard: Shard, columns: tuple[str, ...] | None, rows: int) -> Iterator[_Batch]:
    first = 0
    for batch in source.batches(shard, columns, rows):
        yield _Batch(shard.name, first, batch)
        first += len(batch)


def _ids(source: Source, shard: Shard) -> Iterator[tuple[int, list[str]]]:
    for batch in _rows(source, shard, ("id",), _ID_ROWS):
        yield batch.first, base_ids(batch.column("id"), shard.name, batch.first, len(batch.rows))[0]


class _Identify:
    """The kernel: ids, duplicates, blank texts, and tokens where the source has not counted them.

    counted: rows whose tokens were counted here, by shard.
    """

    def __init__(
        self, duplicates: Duplicates, hash_below: float, tokenizer: Tokenizer | None, counted: Counter[str]
    ) -> None:
        self._duplicates = duplicates
        self._hash_below = hash_below
        self._tokenizer = tokenizer
        self._counted = counted
        self._shard: str | None = None
        self._rows: dict[int, int] = {}

    def __call__(self, batch: _Batch) -> tuple[pa.Table, int, Counts]:
        if batch.shard != self._shard:
            self._shard, self._rows = batch.shard, self._duplicates.of(batch.shard)
            self._counted[batch.shard] = 0
        count = len(batch.rows)
        own, without_id = base_ids(batch.column("id"), batch.shard, batch.first, count)
        blank = _blank(batch.column("text"))
        ids = list(own)
        decisions: list[str | None] = [None if why is None else "bad_row" for why in blank]
        reasons = [why or ("no_id" if absent else None) for why, absent in zip(blank, without_id, strict=True)]
        for k in range(count):
            kind = self._rows.get(batch.first + k)
            if kind is not None:
                ids[k] = renamed(own[k], batch.first + k, batch.shard, kind)
                decisions[k], reasons[k] = "duplicate", f"same id as an earlier row: {own[k]}"
        tokens = batch.column("token_count")
        table = pa.table(
            {
                "doc_id": ids,
                "row": np.arange(batch.first, batch.first + count),
                "decision": decisions,
                "reason": reasons,
                "token_count": pa.nulls(count, pa.int64()) if tokens is None else tokens.cast(pa.int64()),
            },
            schema=RAW,
        )
        if self._hash_below < _UNLIMITED:
            inside = hash64(own, 0, LIMIT_PURPOSE) < np.uint64(int(self._hash_below * 2**64))
            table = table.filter(pa.array(inside))
        if self._tokenizer is not None:
            table = self._count(self._tokenizer, batch, table)
        counts = Counter(
            decision or ("readable_without_id" if reason else "readable")
            for decision, reason in zip(table["decision"].to_pylist(), table["reason"].to_pylist(), strict=True)
        )
        counts["outside_limit"] = count - len(table)
        return table, count, counts

    def _count(self, tokenizer: Tokenizer, batch: _Batch, table: pa.Table) -> pa.Table:
        """The table with the tokens of the readable texts that have no count."""
        readable = pc.not_equal(pc.fill_null(table["decision"], ""), "bad_row")
        lacking = np.flatnonzero(pc.and_(readable, table["token_count"].is_null()).to_numpy(zero_copy_only=False))
        if not len(lacking):
            return table
        rows = table["row"].take(pa.array(lacking)).to_numpy() - batch.first
        texts, _ = decode_column(batch.rows.column("text").take(pa.array(rows)))
        tokens = table["token_count"].to_numpy(zero_copy_only=False).astype(np.float64)
        tokens[lacking] = token_counts(tokenizer, [text or "" for text in texts])
        self._counted[batch.shard] += len(lacking)
        column = pa.array(tokens, from_pandas=True).cast(pa.int64())
        return table.set_column(table.schema.get_field_index("token_count"), "token_count", column)


def _blank(texts: pa.Array | None) -> list[str | None]:
    """Why each text holds no words ("null_text", "blank_text"), or None. Any bytes are taken, valid UTF-8 or not."""
    if texts is None or pa.types.is_null(texts.type):
        return ["null_text"] * (0 if texts is None else len(texts))
    return [_why_blank(value) for value in texts.cast(pa.large_binary()).to_pylist()]


def _why_blank(value: bytes | None) -> str | None:
    if value is None:
        return "null_text"
    # most texts show a letter at once; only those that do not are decoded whole
    if value[:64].decode("utf-8", "ignore").strip() or value.decode("utf-8", "replace").strip():
        return None
    return "blank_text"
