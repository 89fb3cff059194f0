"""dataset_card: the kept documents of all snapshots as one folder for others, read back before it counts.

Here: which snapshots go in, each file written and compared with what was published, and the folder's own pages: the
card, the checksums, the ids. Not here: a format's bytes (`shards.formats`), and going back from ids to text (`apply`).
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dagster_datamask.reporting.tables import markdown_table
from dagster_datamask.scoring.models import resolve_model
from dagster_datamask.settings import Settings
from dagster_datamask.shards.cursor import read_batches
from dagster_datamask.shards.engine import BATCH_ROWS
from dagster_datamask.shards.formats import Document, Format, JsonLines, Megatron, WebDataset
from dagster_datamask.shards.generations import Generation, NotPublished, Published, ShardRecord, Store
from dagster_datamask.shards.layout import TEXT_GROUP_ROWS, laid_out
from dagster_datamask.shards.schemas import ADDED, ColumnClash
from dagster_datamask.shards.writer import ParquetWriter, atomic, file_sha256, fsync_folder, write_json
from dagster_datamask.stages.base import STAGES, Check, Outcome, Run, called, finish, mask_of
from dagster_datamask.stages.corpus import flat_name, named
from dagster_datamask.stages.manifest import SIDECAR, other_settings
from dagster_datamask.stages.scores import SIDE_ROWS

CARD = "dataset_card"
# the folder of a generation that is handed on, and the ids inside it
FOLDER = "dataset"
IDS_FOLDER = "ids"
README = "README.md"
CHECKSUMS = "SHA256SUMS"
IDS = pa.schema([("doc_id", pa.string()), ("snapshot", pa.string()), ("shard", pa.string()), ("row", pa.int64())])
_IDS = f"{IDS_FOLDER}/data"
# the configuration of all snapshots
_ALL = "default"
_RECEIPT = ".json"
# the hub's own words for how large a data set is
_SIZES = (
    (10**3, "n<1K"),
    (10**4, "1K<n<10K"),
    (10**5, "10K<n<100K"),
    (10**6, "100K<n<1M"),
    (10**7, "1M<n<10M"),
    (10**8, "10M<n<100M"),
    (10**9, "100M<n<1B"),
    (10**10, "1B<n<10B"),
    (10**11, "10B<n<100B"),
    (10**12, "100B<n<1T"),
)


@dataclass(frozen=True)
class Kept:
    """A snapshot as it is handed on: its kept documents, the manifest that kept them, and that one's sidecar."""

    snapshot: str
    documents: Published
    manifest: Published
    sidecar: dict[str, Any]


def exportable(store: Store) -> tuple[dict[str, Kept], dict[str, str]]:
    """({snapshot: what is handed on}, {snapshot that was begun: why it is not})."""
    found: dict[str, Kept] = {}
    left_out: dict[str, str] = {}
    for snapshot in store.snapshots("raw_shards"):
        documents = store.published("fineweb_mask", snapshot)
        manifest = store.published("fineweb_mask_manifest", snapshot)
        if documents is None or manifest is None:
            left_out[snapshot] = "fineweb_mask not published"
        elif documents.inputs["fineweb_mask_manifest"] != manifest.fingerprint:
            left_out[snapshot] = "its manifest was published anew; materialise fineweb_mask again"
        else:
            sidecar = json.loads(manifest.file(SIDECAR).read_text("utf-8"))
            found[snapshot] = Kept(snapshot, documents, manifest, sidecar)
    return found, left_out


def outdated(store: Store, settings: Settings) -> dict[str, str]:
    """{snapshot, or "settings": why the published export does not speak of it any more}."""
    found, left_out = exportable(store)
    published = store.published(CARD)
    if published is None:
        return dict.fromkeys(found, "nothing is exported yet")
    why = dict(left_out)
    stage = STAGES[CARD]
    if published.code_version != stage.version or published.settings != stage.identity(settings):
        why["settings"] = "exported under other settings or code"
    now = {_input(kept): kept.documents.fingerprint for kept in found.values()}
    for name in sorted(now.keys() | {key for key in published.inputs if " " in key}):
        if now.get(name) != published.inputs.get(name):
            why.setdefault(name.split(" ")[1], "new" if name not in published.inputs else "published anew or gone")
    return why


def dataset_card(run: Run) -> Outcome:
    """Publish `dataset/`: `data/<snapshot>/<shard>.parquet`, the same documents in the other formats asked for, their
    ids for those who hold the source (`ids/`), SHA256SUMS, and a README.md that `datasets` and the hub understand.

    Files of kept documents are linked, not copied. Shards of which nothing is kept have no file: `datasets` cannot read
    an empty one. A failing blocking check keeps all unpublished: a file that does not read back as what was kept, or a
    snapshot that was selected under settings other than those in force, or by other models than the rest.

    Raises NotPublished where no snapshot is finished, ColumnClash where snapshots have columns of one name that cannot
    stand in one table, ValueError where a format's library or tokenizer is missing.
    """
    stage = STAGES[CARD]
    found, left_out = exportable(run.store)
    if not found:
        raise NotPublished(f"no snapshot under {run.store.where} has published fineweb_mask; materialise one first")
    formats, tokenizer = _formats(run.settings)
    foreign = _foreign(run.in_force, list(found.values()))
    schema = _one_schema(found.values())
    inputs = {_input(kept): kept.documents.fingerprint for kept in found.values()} | tokenizer
    with run.generation(stage, None, inputs) as generation:
        folder = generation.folder / FOLDER
        files = _Files(generation, folder, schema, formats, run)
        # what must not be published need not be written
        chosen = [] if foreign else list(found.values())
        total = sum(kept.manifest.facts["kept"] for kept in chosen)
        for kept in chosen:
            for shard in kept.documents.shards:
                files.export(kept, shard, total)
        kinds = ["data", _IDS, *(format.kind for format in formats)]
        _write_ids_sidecar(folder, run.settings, chosen, files.receipts)
        _write_text(folder / README, card(run.settings, list(found.values()), schema, kinds, files.receipts))
        _write_text(folder / CHECKSUMS, _checksums(folder, files.receipts))
        sizes = {kind: sum(r["bytes"] for r in files.receipts if r["kind"] == kind) for kind in kinds}
        facts = {
            "documents": sum(record.rows for record in files.records),
            "tokens": _total(kept.manifest.facts["tokens_kept"] for kept in chosen),
            "snapshots": len(chosen),
            "files": len(files.receipts),
            **{f"bytes_{kind.partition('/')[0]}": size for kind, size in sizes.items()},
        }
        checks = (
            Check(
                "reads_back_as_kept",
                not files.different,
                True,
                {"files": len(files.receipts), "different": named(files.different) or "none"},
            ),
            Check("made_under_these_settings", not foreign, True, {"different": "; ".join(foreign) or "none"}),
            Check("every_snapshot_exported", not left_out, False, {"left_out": named(left_out) or "none"}),
        )
        return finish(
            generation,
            files.records,
            _RECEIPT,
            facts=facts,
            expected_rows=total,
            checks=checks,
        )


def _input(kept: Kept) -> str:
    return f"fineweb_mask {kept.snapshot}"


def _total(tokens: Iterable[int | None]) -> int | None:
    told = list(tokens)
    return None if None in told else sum(count for count in told if count is not None)


def _formats(settings: Settings) -> tuple[list[Format], dict[str, str]]:
    """(the formats beside parquet, what of them enters the fingerprint). Raises ValueError for what is missing."""
    asked = settings.export.formats
    formats: list[Format] = []
    inputs = {}
    if "webdataset" in asked:
        formats.append(WebDataset())
    if "jsonl.gz" in asked:
        formats.append(JsonLines())
    if "megatron" in asked:
        from tokenizers import Tokenizer

        if not (settings.export.tokenizer and settings.export.end_of_text):
            raise ValueError(
                "export.formats: megatron holds token ids; name export.tokenizer, and in export.end_of_text the token "
                "that closes a document"
            )
        model = resolve_model(settings.export.tokenizer, filename="tokenizer.json")
        tokenizer = Tokenizer.from_file(str(model.path))
        # every token of a document, however long: the encoder's own limits are no part of the text
        tokenizer.no_truncation()
        tokenizer.no_padding()
        end = tokenizer.token_to_id(settings.export.end_of_text)
        if end is None:
            raise ValueError(
                f"export.end_of_text = {settings.export.end_of_text!r} is no token of {settings.export.tokenizer}"
            )
        size = tokenizer.get_vocab_size()
        formats.append(Megatron(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, end, size))
        inputs["tokenizer"] = model.revision
    return formats, inputs


def _foreign(settings: Settings, found: Sequence[Kept]) -> list[str]:
    """What was selected under other settings than these, or by other models than the first snapshot, in words."""
    foreign = [
        f"{kept.snapshot}: {why}" for kept in found for why in other_settings(kept.snapshot, kept.sidecar, settings)
    ]
    first = found[0]
    return foreign + [
        f"{kept.snapshot}: {part} of another model than in {first.snapshot}"
        for kept in found[1:]
        for part, model in kept.sidecar["models"].items()
        if model != first.sidecar["models"][part]
    ]


def _one_schema(found: Iterable[Kept]) -> pa.Schema:
    """The union of the snapshots' columns: what a table of all of them has."""
    union = pa.schema([])
    for kept in found:
        if kept.documents.shards:
            own = pq.read_schema(kept.documents.path(kept.documents.shards[0])).remove_metadata()
            try:
                union = pa.unify_schemas([union, own], promote_options="permissive")
            except pa.ArrowTypeError as error:
                raise ColumnClash(
                    f"{kept.snapshot}: a column has another type than in the snapshots before it ({error}); give the "
                    "source's shards one type"
                ) from error
    return union


@dataclass(frozen=True)
class _File:
    """A file (or pair of files) of a shard: how it is written, what a reader sees in it, and what he should see."""

    kind: str
    suffixes: tuple[str, ...]
    write: Callable[[list[Path]], None]
    read: Callable[[list[Path]], Iterable[bytes]]
    expected: Callable[[], Iterable[bytes]]


class _Files:
    """Writes each shard's files into the work folder, reads them back, and only then puts them where they belong."""

    def __init__(
        self, generation: Generation, folder: Path, schema: pa.Schema, formats: list[Format], run: Run
    ) -> None:
        self.receipts: list[dict[str, Any]] = []
        self.records: list[ShardRecord] = []
        self.different: dict[str, str] = {}
        self._generation = generation
        self._folder = folder
        self._schema = schema
        self._formats = formats
        self._progress = run.progress(STAGES[CARD], None)

    def export(self, kept: Kept, shard: str, total: int) -> None:
        name = flat_name(kept.snapshot, shard)
        record, receipts = self._done(name)
        if record is None:
            rows = kept.documents.record(shard).rows
            receipts = self._write(kept, shard) if rows else []
            if name in self.different:
                return
            write_json(self._generation.folder / f"{name}{_RECEIPT}", receipts)
            self._generation.keep(*(f"{FOLDER}/{receipt['path']}" for receipt in receipts))
            record = self._generation.complete(name, _RECEIPT, rows=rows, rows_in=rows, counts={"exported": rows})
        self.records.append(record)
        self.receipts += receipts
        self._progress(sum(record.rows for record in self.records), total, name)

    def _done(self, name: str) -> tuple[ShardRecord | None, list[dict[str, Any]]]:
        """The record and receipts of a shard whose files are all in place."""
        record = self._generation.record(name, _RECEIPT)
        if record is None:
            return None, []
        receipts = json.loads(self._generation.path(name, _RECEIPT).read_text("utf-8"))
        for receipt in receipts:
            path = self._folder / receipt["path"]
            if not path.exists() or path.stat().st_size != receipt["bytes"]:
                return None, []
        return record, receipts

    def _write(self, kept: Kept, shard: str) -> list[dict[str, Any]]:
        """Receipts of the shard's files; where one is not what it should be, `different` says so and none is placed."""
        name = flat_name(kept.snapshot, shard)
        origin = kept.documents.path(shard)
        if file_sha256(origin) != kept.documents.record(shard).sha256:
            self.different[name] = "fineweb_mask's file is not the one that was published"
            return []
        placed = []
        for file in self._files(kept, shard, origin):
            temps = [self._generation.work / f"file{suffix}" for suffix in file.suffixes]
            for temp in temps:
                temp.unlink(missing_ok=True)
            file.write(temps)
            if _digest(file.read(temps)) != _digest(file.expected()):
                self.different[name] = f"{file.kind} does not read back as what the manifest keeps"
                return []
            for temp, suffix in zip(temps, file.suffixes, strict=True):
                path = laid_out(self._folder, kept.snapshot, shard, kind=file.kind, ext=suffix)
                placed.append(self._place(temp, path) | {"kind": file.kind, "snapshot": kept.snapshot})
        return placed

    def _files(self, kept: Kept, shard: str, origin: Path) -> list[_File]:
        ids = [row["doc_id"] for row in _kept_rows(kept, shard)]
        files = [
            _File(
                "data",
                (".parquet",),
                lambda temps: _link_or_conform(origin, temps[0], self._schema),
                lambda temps: (_pair(d["doc_id"], d["text"]) for d in _documents(temps[0], ["doc_id", "text"])),
                lambda: (_pair(doc_id, d["text"]) for doc_id, d in zip(ids, _documents(origin, ["text"]), strict=True)),
            ),
            _File(
                _IDS,
                (".parquet",),
                lambda temps: _write_ids(temps[0], kept, shard),
                lambda temps: (d["doc_id"].encode() for d in _documents(temps[0], ["doc_id"])),
                lambda: (d["doc_id"].encode() for d in _documents(origin, ["doc_id"])),
            ),
        ]
        for format in self._formats:
            files.append(
                _File(
                    format.kind,
                    format.suffixes,
                    partial(_write_as, format, origin),
                    format.read,
                    partial(_seen_as, format, origin),
                )
            )
        return files

    def _place(self, temp: Path, path: Path) -> dict[str, Any]:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temp.open("rb") as file:
            os.fsync(file.fileno())
        temp.replace(path)
        fsync_folder(path.parent)
        return {
            "path": path.relative_to(self._folder).as_posix(),
            "bytes": path.stat().st_size,
            "sha256": file_sha256(path),
        }


def _kept_rows(kept: Kept, shard: str) -> Iterator[Document]:
    for table in read_batches(kept.manifest.path(shard), ["doc_id", "row", "decision"], SIDE_ROWS):
        yield from table.filter(pc.equal(table["decision"], "kept")).to_pylist()


def _documents(path: Path, columns: list[str] | None) -> Iterator[Document]:
    for table in read_batches(path, columns, BATCH_ROWS):
        yield from table.to_pylist()


def _write_as(format: Format, origin: Path, paths: list[Path]) -> None:
    format.write(paths, _documents(origin, None))


def _seen_as(format: Format, origin: Path) -> Iterator[bytes]:
    return map(format.seen, _documents(origin, None))


def _pair(doc_id: str, text: str) -> bytes:
    return json.dumps([doc_id, text]).encode()


def _digest(seen: Iterable[bytes]) -> str:
    """Hex digest over what a reader sees, in order."""
    hasher = sha256()
    for item in seen:
        hasher.update(len(item).to_bytes(8, "little"))
        hasher.update(item)
    return hasher.hexdigest()


def _link_or_conform(origin: Path, path: Path, schema: pa.Schema) -> None:
    """The file itself where its columns are those of all snapshots, else a copy with the missing ones as nulls."""
    if pq.read_schema(origin).remove_metadata().equals(schema):
        try:
            os.link(origin, path)
        except OSError:
            shutil.copyfile(origin, path)
        return
    writer = ParquetWriter(path, schema, TEXT_GROUP_ROWS)
    with closing(writer):
        for table in read_batches(origin, None, BATCH_ROWS):
            columns = {
                field.name: table[field.name].cast(field.type)
                if field.name in table.column_names
                else pa.nulls(len(table), field.type)
                for field in schema
            }
            writer.write(pa.table(columns, schema=schema))


def _write_ids(path: Path, kept: Kept, shard: str) -> None:
    rows = [(row["doc_id"], row["row"]) for row in _kept_rows(kept, shard)]
    writer = ParquetWriter(path, IDS)
    with closing(writer):
        writer.write(
            pa.table(
                {
                    "doc_id": [doc_id for doc_id, _ in rows],
                    "snapshot": [kept.snapshot] * len(rows),
                    "shard": [shard] * len(rows),
                    "row": [row for _, row in rows],
                },
                schema=IDS,
            )
        )


def _write_ids_sidecar(folder: Path, settings: Settings, found: Iterable[Kept], receipts: list[dict[str, Any]]) -> None:
    """`ids/manifest.json`: what the ids are of, from where, and the files' hashes."""
    (folder / IDS_FOLDER).mkdir(parents=True, exist_ok=True)
    write_json(
        folder / IDS_FOLDER / SIDECAR,
        {
            "source": {"name": settings.export.source_name, "url": settings.export.source_url},
            "license": settings.export.license,
            "snapshots": {kept.snapshot: kept.sidecar for kept in found},
            "files": {
                receipt["path"].removeprefix(f"{IDS_FOLDER}/"): receipt["sha256"]
                for receipt in receipts
                if receipt["kind"] == _IDS
            },
        },
    )


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as temp:
        temp.write_text(text, "utf-8")


def _checksums(folder: Path, receipts: list[dict[str, Any]]) -> str:
    """What `sha256sum --check` reads."""
    files = {receipt["path"]: receipt["sha256"] for receipt in receipts}
    files |= {name: file_sha256(folder / name) for name in (README, f"{IDS_FOLDER}/{SIDECAR}")}
    return "".join(f"{sha}  {path}\n" for path, sha in sorted(files.items()))


def card(
    settings: Settings, found: Sequence[Kept], schema: pa.Schema, kinds: Sequence[str], receipts: list[dict[str, Any]]
) -> str:
    """The README.md of the exported folder: the hub's front matter, and the same facts for people."""
    from huggingface_hub import DatasetCardData

    export = settings.export
    filled = [kept for kept in found if kept.documents.rows]
    documents = sum(kept.documents.rows for kept in found)
    names = [kept.snapshot for kept in filled]
    configs = [
        _config(_ALL, names) | {"default": True},
        # `datasets` takes what is called default for the default, and no snapshot has an @ in its name
        *(_config(f"@{name}" if name == _ALL else name, [name]) for name in names),
    ]
    own = called(settings.select.strategy)
    front = DatasetCardData(
        pretty_name=f"{export.source_name}, selected by {own}",
        license=export.license,
        size_categories=[next((name for limit, name in _SIZES if documents < limit), "n>1T")],
        task_categories=["text-generation"],
        configs=configs if filled else None,
    )
    tokens = _total(kept.manifest.facts["tokens_kept"] for kept in found)
    origin = f"[{export.source_name}]({export.source_url})" if export.source_url else export.source_name
    rows = [
        {
            "snapshot": kept.snapshot,
            "readable rows": kept.manifest.rows,
            "kept": kept.documents.rows,
            "tokens kept": kept.manifest.facts["tokens_kept"],
            "megabytes": sum(
                r["bytes"] / 1e6 for r in receipts if (r["snapshot"], r["kind"]) == (kept.snapshot, "data")
            ),
        }
        for kept in found
    ]
    sections = [
        f"---\n{front.to_yaml()}\n---",
        f"# {export.source_name}, selected by {own}",
        f"{documents:,} documents{'' if tokens is None else f' ({tokens:,} tokens, as the source counts them)'} of "
        f"{len(found)} {'snapshot' if len(found) == 1 else 'snapshots'}, chosen by {_how(settings)}. "
        f"{_texts(settings)}",
        markdown_table(rows, list(rows[0])),
        "## Reading it",
        _reading(configs[-1]["config_name"]) if filled else "Nothing was kept, so there is nothing to load.",
        "`sha256sum --check SHA256SUMS` proves that every file is as it was published.",
        "## Source and licence",
        f"Source: {origin}. Licence: `{export.license}`. What the licence and the documents' own authors ask for holds "
        "for this selection too.",
        "## Columns",
        markdown_table(
            [
                {
                    "column": field.name,
                    "type": str(field.type),
                    "from": "selection" if field.name in ADDED else "source",
                }
                for field in schema
            ],
            ["column", "type", "from"],
        ),
        "## How good the selection is",
        "A mask that maximises an objective comes with a proof: an upper bound on what any other mask of its size, "
        "from the same documents, could be worth.",
        "\n".join(f"- {_in_words(kept)}" for kept in found),
        "## What else is here",
        "\n".join(f"- {_KINDS[kind]}" for kind in kinds),
    ]
    return "\n\n".join(sections) + "\n"


_HOW = {
    "datamask": "quality and diversity jointly (DataMask, arXiv 2512.24265)",
    "joint": "quality, diversity (DataMask, arXiv 2512.24265) and predicted influence jointly",
    "group_mates": "their predicted influence on a language model, as a group (Group-MATES)",
}


def _how(settings: Settings) -> str:
    """What the documents were chosen by, in words."""
    strategy = settings.select.strategy
    return _HOW.get(strategy) or f"`{strategy}`, a baseline ({STAGES[mask_of(settings)].about.rstrip('.')})"


def _texts(settings: Settings) -> str:
    if "exact_substrings" in STAGES["fineweb_mask"].needs(settings):
        return "Passages that the source repeats were cut out of the texts; all other columns are the source's own."
    return "No text was changed: these are rows of the source with all their columns."


_KINDS = {
    "data": "`data/<snapshot>/<shard>.parquet`: the documents.",
    _IDS: "`ids/`: their ids without text. Who holds the source gets the documents back with "
    "`datamask apply ids SOURCE --out FOLDER`.",
    "jsonl": "`jsonl/<snapshot>/<shard>.jsonl.gz`: `text, id, metadata` a line, as datatrove's JsonlReader takes them.",
    "webdataset": "`webdataset/<snapshot>/<shard>.tar`: `.txt` and `.json` of each document.",
    "megatron": "`megatron/<snapshot>/<shard>.bin` and `.idx`: token ids for Megatron's IndexedDataset.",
}


def _config(name: str, snapshots: Sequence[str]) -> dict[str, Any]:
    return {
        "config_name": name,
        "data_files": [{"split": "train", "path": [f"data/{snapshot}/*.parquet" for snapshot in snapshots]}],
    }


def _reading(name: str) -> str:
    return (
        "```python\nimport datasets\n\n"
        f'datasets.load_dataset("PATH", split="train")  # all snapshots\n'
        f'datasets.load_dataset("PATH", "{name}", split="train")  # one of them\n```'
    )


def _in_words(kept: Kept) -> str:
    facts, certificate = kept.manifest.facts, kept.sidecar["certificate"]
    head = f"**{kept.snapshot}**: {facts['kept']:,} kept of {facts['pool']:,} {facts['unit']} that could be chosen"
    if facts["lambda"] is not None:
        head += f", at λ = {facts['lambda']:g} ({facts['objective']}, solver {facts['solver']})"
    head += ". "
    if certificate["gap"] is None:
        return head + f"No bound: {certificate['reason']}."
    told = (
        f"Its value is {kept.sidecar['value']:.6f}; no other mask is worth more than {certificate['upper_bound']:.6f}, "
        f"so it is within {certificate['gap']:.2g} of the best there can be."
    )
    share = certificate["share"]
    return head + told + ("" if share is None else f" That is at least {share:.2%} of what choosing gains over chance.")
