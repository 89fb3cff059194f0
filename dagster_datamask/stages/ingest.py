"""raw_shards: the snapshot's rows, each under a unique id, read once and accounted for.

Only identity and readability are decided here, and tokens counted where the source does not tell; no score and no
model. Text itself is never copied.
"""

import difflib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from dagster_datamask.compute.base import TRIES, Poisoned, Told
from dagster_datamask.keyed import digest, hash64
from dagster_datamask.scoring.models import ModelUnavailable, ResolvedModel
from dagster_datamask.scoring.text import decode_column
from dagster_datamask.scoring.tokenizers import load_same_tokenizer, resolve_tokenizer, token_counts
from dagster_datamask.settings import SettingsError
from dagster_datamask.shards.engine import BATCH_ROWS, Counts
from dagster_datamask.shards.generations import Published
from dagster_datamask.shards.identity import Duplicates, base_ids, hashes, renamed
from dagster_datamask.shards.schemas import QUARANTINED, RAW, BadShard, ShardReplaced, joined
from dagster_datamask.shards.source import REVISION, Footer, Shard, Source
from dagster_datamask.shards.writer import table_file
from dagster_datamask.stages.base import STAGES, Check, Outcome, Run, Stage, finish

QUARANTINED_FILE = "quarantined_shards.parquet"
# among the inputs, before the name of a shard that was left out; why it was, where the settings ask for it
_QUARANTINED = "quarantined "
_NAMED = "named in source.set_aside"
_ID_ROWS = 65_536
_UNLIMITED = 1.0
_RECOMPUTED = "token_count_recomputed"
LIMIT_PURPOSE = "limit"


def raw_shards(run: Run, source: Source, snapshot: str) -> Outcome:
    """Publish `doc_id, row, decision, reason, token_count` of every readable row of `snapshot`.

    Tokens of a text whose row has no count are counted with source.tokenizer, which is looked for only where a shard
    may lack counts; '' leaves them null. Shards of source.set_aside are not read, and those that cannot be read, or end
    whatever process reads them, with on_bad_shard = quarantine; quarantined_shards tells why. Of a shard's ids the
    hashes come back here, 16 bytes a row.

    Raises SettingsError where source.set_aside names a shard that is not there, ModelUnavailable for a tokenizer that
    is needed and not there, SourceError (no such snapshot, no shards), ColumnClash (columns that cannot stand in one
    table), ShardReplaced (the listing or a shard changed meanwhile) and, with on_bad_shard = fail, BadShard and
    Poisoned.
    """
    bad = _set_aside(run, source, snapshot)
    while True:
        listing = source.listing_fingerprint(snapshot)
        try:
            return _identify(run, source, snapshot, bad)
        except (BadShard, OSError, Poisoned) as error:
            # half of the old and half of the new is no verdict on either
            if source.listing_fingerprint(snapshot) != listing:
                raise ShardReplaced(f"{snapshot} changed while it was read: {error}") from error
            if isinstance(error, BadShard):
                found = {error.path.rpartition("/")[2].removesuffix(".parquet"): error.why}
            elif isinstance(error, Poisoned):
                # a signal's name here, Ray's words there: what is published does not tell the place
                found = dict.fromkeys(error.why, f"ends the process that reads it, {TRIES} of {TRIES} times")
                run.log(str(error))
            else:
                raise
            if run.settings.source.on_bad_shard == "fail" or found.keys() & bad.keys():
                raise
            # a page may turn out broken after rows of other shards were written; the fingerprint names the shards set
            # aside, so starting over never mixes the two
            for shard, why in found.items():
                run.log(f"quarantined: {snapshot}/{shard}: {why}")
            bad |= found


def _set_aside(run: Run, source: Source, snapshot: str) -> dict[str, str]:
    """{shard of source.set_aside: why it is not read}."""
    asked = run.settings.source.aside(snapshot)
    there = [shard.name for shard in source.shards(snapshot)] if asked else []
    for name in sorted(asked - set(there)):
        (near,) = difflib.get_close_matches(name, there, n=1, cutoff=0.0)
        raise SettingsError(
            f"source.set_aside: {snapshot} has no shard {name!r}; did you mean '{snapshot}/{near}'? Remove what is gone"
        )
    return dict.fromkeys(sorted(asked), _NAMED)


def set_aside(raw: Published) -> list[str]:
    """What `raw` was made without as source.set_aside named it, by snapshot and shard."""
    names = [key.removeprefix(_QUARANTINED) for key, why in raw.inputs.items() if why == _in_key(_NAMED)]
    return sorted(f"{raw.snapshot}/{name}" for name in names)


def _in_key(why: str) -> str:
    return digest(why, size=8).hex()


def _identify(run: Run, source: Source, snapshot: str, bad: dict[str, str]) -> Outcome:
    stage = STAGES["raw_shards"]
    by_name = {shard.name: shard for shard in source.shards(snapshot) if shard.name not in bad}
    footers = _footers(run, stage, source, snapshot, by_name)
    # the export would fail on these columns after all the work is done
    joined((by_name[name].path, footer.schema) for name, footer in footers.items())
    written = {name: source.written(shard) for name, shard in by_name.items()}
    contents = {name: source.content(shard, as_listed=True) for name, shard in by_name.items()}
    total = sum(footer.rows for footer in footers.values())
    inputs = {"source": digest(*(part for item in contents.items() for part in item), size=16).hex()}
    inputs |= {f"{_QUARANTINED}{name}": _in_key(why) for name, why in bad.items()}
    uncounted = [by_name[name].path for name, footer in footers.items() if footer.uncounted]
    tokenizer = run.settings.source.tokenizer if uncounted else ""
    if tokenizer:
        inputs["tokenizer"] = _resolved(tokenizer, uncounted[0]).revision
    counted: Counter[str] = Counter()
    with run.generation(stage, snapshot, inputs) as generation:

        def duplicates() -> Callable[[str], dict[int, int]]:
            found = Duplicates(generation.work, total)
            read = partial(_ids, source, by_name)
            hashed = run.each_shard(
                stage,
                snapshot,
                list(by_name),
                lambda: lambda name, told: hashes(read(name)),
                generation.work,
                ".ids",
                total_rows=total,
            )
            with closing(hashed):
                found.find(list(by_name), read, hashed)
            return found.of

        def kernel() -> _Identify:
            count = load_same_tokenizer(tokenizer, inputs["tokenizer"]) if tokenizer else None
            return _Identify(run.settings.source.hash_below, count, counted)

        records = run.map_shards(
            stage,
            generation,
            list(by_name),
            # every column is read, so that a broken page is found here and not by the export
            lambda name, later: _rows(source, by_name[name], None, BATCH_ROWS, later),
            kernel,
            RAW,
            ext=".parquet",
            total_rows=total,
            given=duplicates,
            source=lambda name: {
                "content": _unchanged(source, by_name[name], contents[name], written[name]),
                _RECOMPUTED: counted[name],
            },
        )
        # not in the order in which they were found, which differs as well
        bad = dict(sorted(bad.items()))
        with table_file(generation.folder / QUARANTINED_FILE, QUARANTINED) as writer:
            writer.write(pa.table({"shard": list(bad), "reason": list(bad.values())}, schema=QUARANTINED))
        complete = Check(
            "every_shard_readable",
            not bad,
            False,
            {"quarantined": "; ".join(f"{name} {why}" for name, why in bad.items()) or "none"},
        )
        facts = {
            "shards": len(records),
            "quarantined_shards": len(bad),
            "source_bytes": sum(footer.size for footer in footers.values()),
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


def _unchanged(source: Source, shard: Shard, content: str, written: str) -> str:
    """`content`, if the shard that was read since still holds it and nothing else stood there meanwhile."""
    if source.content(shard) != content or source.written(shard) != written:
        raise ShardReplaced(f"{shard.path} changed while it was read; materialise raw_shards again")
    return content


class _Batch:
    """Rows of a shard from `first` on; columns may be missing. later: {row: kind} of the shard's duplicates."""

    def __init__(self, shard: str, first: int, rows: pa.RecordBatch, later: dict[int, int]) -> None:
        self.shard = shard
        self.first = first
        self.rows = rows
        self.later = later

    def column(self, name: str) -> pa.Array | None:
        return self.rows.column(name) if name in self.rows.schema.names else None


def _rows(
    source: Source, shard: Shard, columns: tuple[str, ...] | None, rows: int, later: dict[int, int]
) -> Iterator[_Batch]:
    first = 0
    for batch in source.batches(shard, columns, rows):
        yield _Batch(shard.name, first, batch, later)
        first += len(batch)


def _footers(run: Run, stage: Stage, source: Source, snapshot: str, by_name: dict[str, Shard]) -> dict[str, Footer]:
    def footer(name: str, told: Told) -> Footer:
        return source.footer(by_name[name])

    # of this machine, be the root where it may, and there before what footers tell makes a generation
    marks = run.store.root
    marks.mkdir(parents=True, exist_ok=True)
    found = dict(run.each_shard(stage, snapshot, list(by_name), lambda: footer, marks, f"@{snapshot}.footer"))
    return {name: found[name] for name in by_name}


def _ids(source: Source, by_name: dict[str, Shard], name: str) -> Iterator[tuple[int, list[str]]]:
    shard = by_name[name]
    for batch in _rows(source, shard, ("id",), _ID_ROWS, {}):
        yield batch.first, base_ids(batch.column("id"), shard.name, batch.first, len(batch.rows))[0]


class _Identify:
    """The kernel: ids, duplicates, blank texts, and tokens where the source has not counted them.

    counted: rows whose tokens were counted here, by shard.
    """

    def __init__(self, hash_below: float, tokenizer: Tokenizer | None, counted: Counter[str]) -> None:
        self._hash_below = hash_below
        self._tokenizer = tokenizer
        self._counted = counted

    def __call__(self, batch: _Batch) -> tuple[pa.Table, int, Counts]:
        if not batch.first:
            self._counted[batch.shard] = 0
        count = len(batch.rows)
        own, without_id = base_ids(batch.column("id"), batch.shard, batch.first, count)
        blank = _blank(batch.column("text"))
        ids = list(own)
        decisions: list[str | None] = [None if why is None else "bad_row" for why in blank]
        reasons = [why or ("no_id" if absent else None) for why, absent in zip(blank, without_id, strict=True)]
        for k in range(count):
            kind = batch.later.get(batch.first + k)
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
