"""fastText over the shared pages beside the raw library, over two processes beside one, and its memory.

Here: from parquet to parquet as the stage `dclm_scores` goes; the library in a bare loop reads, joins lines, asks for
one text at a time and writes as well. The model is of DCLM's size: 100 dimensions, word pairs in 2,000,000 buckets. It
is loaded before: a snapshot is scored for hours with one. Not here: embedding.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fasttext
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import Row, absent, against, at_most, in_child, in_turn
from dagster_datamask.accelerator import Accelerator
from dagster_datamask.scoring.base import Scorer
from dagster_datamask.scoring.fasttext_scorer import FastTextScorer
from dagster_datamask.scoring.parallel import FastTextProcesses
from dagster_datamask.settings import load_settings
from dagster_datamask.shards.documents import DocumentReader
from dagster_datamask.shards.engine import map_shards
from dagster_datamask.shards.generations import Store
from dagster_datamask.shards.schemas import SCORES
from dagster_datamask.shards.source import Source
from dagster_datamask.stages import classifiers, ingest, scores
from dagster_datamask.stages.base import STAGES, Run

DATA = Path(__file__).parents[1] / "../shared/data"
SNAPSHOT = "PAGES"
LABEL = "__label__hq"
_ABSENT = "the shared pages are not there"
_ROUNDS = 3


def _write_pages(folder: Path, snapshots: int) -> int:
    """The pages of the first `snapshots` snapshots as one shard, as large as there is; how many pages there are."""
    folders = sorted((DATA / "fineweb_layout/data").iterdir())[:snapshots]
    paths = [path for folder in folders for path in sorted(folder.glob("*.parquet"))]
    pages = pa.concat_tables([pq.read_table(path) for path in paths])
    (folder / "data" / SNAPSHOT).mkdir(parents=True)
    pq.write_table(pages, folder / "data" / SNAPSHOT / "000_00000.parquet", row_group_size=1000, compression="zstd")
    return len(pages)


def _train(folder: Path, texts: list[str], **options: int) -> Path:
    """A classifier of these texts, by turns of either label: what a text costs does not depend on what it learnt."""
    lines = folder / "train.txt"
    with lines.open("w", encoding="utf-8") as file:
        for k, text in enumerate(texts):
            file.write(f"__label__{('cc', 'hq')[k % 2]} {' '.join(text.split())}\n")
    model = fasttext.train_supervised(
        str(lines), wordNgrams=2, epoch=1, minCount=1, thread=1, seed=2, verbose=0, **options
    )
    model.save_model(str(folder / "model.bin"))
    lines.unlink()
    return folder / "model.bin"


def _prepared(folder: Path) -> tuple[Run, Source]:
    """raw_shards of the documents under `folder`/source."""
    settings = load_settings(
        None,
        [
            *(f"source.url={folder / 'source'}", f"storage.root={folder / 'root'}"),
            *(f"models.dclm={folder / 'model.bin'}", "compute.processes=1"),
        ],
        env={},
    )
    run = Run(Store(folder / "root"), settings, settings, Accelerator(), lambda message: None)
    pages = Source(settings.source.url)
    ingest.raw_shards(run, pages, SNAPSHOT)
    return run, pages


def _scored(run: Run, pages: Source, scorer: Scorer) -> Path:
    """All documents scored anew, file by file, as the stage does it."""
    raw = run.store.current("raw_shards", SNAPSHOT)
    reader = DocumentReader(pages, raw)
    scoring = scores.Scoring(scorer)
    with run.generation(STAGES["dclm_scores"], SNAPSHOT, {"raw_shards": raw.fingerprint}) as generation:
        for file in generation.folder.glob("*.parquet*"):
            file.unlink()
        map_shards(
            generation,
            raw.shards,
            lambda shard: scoring.each(reader.batches(shard, ["text"])),
            lambda: scoring,
            SCORES,
            ext=".parquet",
            total_rows=raw.rows,
            progress=lambda done, total, shard: None,
        )
        return generation.folder


def _bare(model: Any, pages: Source, out: Path) -> Path:
    """The library alone, as its page shows it: a file's texts, one line each, one question each, a file of answers."""
    out.mkdir(exist_ok=True)
    for shard in pages.shards(SNAPSHOT):
        table = pq.read_table(shard.path, columns=["id", "text"])
        found = []
        for text in table["text"].to_pylist():
            labels, probabilities = model.predict(" ".join(text.strip().splitlines()), k=2)
            found.append(dict(zip(labels, probabilities, strict=True))[LABEL])
        pq.write_table(pa.table({"id": table["id"], "score": found}), out / f"{shard.name}.parquet")
    return out


def _cpu_seconds_of_workers() -> list[float]:
    """Of this process's grandchildren, the workers, so far."""
    found = []
    for child in _children(os.getpid()):
        for worker in _children(child):
            fields = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()
            found.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    return found


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _same(ours: Path, bare: Path) -> bool:
    """Whether every score is the library's own, but for what fastText gives above one."""
    for path in bare.glob("*.parquet"):
        mine, raw = (pq.read_table(folder / path.name)["score"].to_numpy() for folder in (ours, bare))
        known = np.isfinite(mine)
        if not (mine[known] == np.minimum(raw[known], 1.0)).all():
            return False
    return True


def pages(full: bool) -> list[Row]:
    """Documents a second: one process over the library, two processes over one; all pages with `full`, else a third."""
    if not DATA.is_dir():
        return [absent("fastText", _ABSENT)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        documents = _write_pages(folder / "source", 11 if full else 3)
        labelled = pq.read_table(DATA / "quality_labels.parquet", columns=["text"])["text"].to_pylist()
        path = _train(folder, labelled, dim=100, bucket=2_000_000)
        run, source = _prepared(folder)
        model, one = fasttext.load_model(str(path)), FastTextScorer(path, LABEL)
        with FastTextProcesses(2, path, LABEL) as two:
            before = _cpu_seconds_of_workers()
            timed = in_turn(
                _ROUNDS,
                {
                    "library": lambda: _bare(model, source, folder / "bare"),
                    "one": lambda: _scored(run, source, one),
                    "two": lambda: _scored(run, source, two),
                },
            )
            workers = [now - then for now, then in zip(_cpu_seconds_of_workers(), before, strict=True)]
        same = _same(timed["one"].results[0], timed["library"].results[0])
    rate = {kind: documents / min(work.wall) for kind, work in timed.items()}
    facts = {"documents": documents, "same_scores": same, **{kind: work.facts() for kind, work in timed.items()}}
    # what neighbours on the machine change less: two cores take half of all work, or as long as the busier process
    alone = sum(timed["library"].cpu) / sum(timed["one"].cpu)
    together = sum(timed["one"].cpu) / max((sum(workers) + sum(timed["two"].cpu)) / 2, *workers)
    facts["workers_cpu_seconds"] = workers
    told = {"unit": "/s", "facts": facts}
    return [
        against("one process, the library in a bare loop", rate["one"], rate["library"], least=0.9, **told),
        Row("… by cpu seconds", None, ratio=alone),
        against("two processes, one", rate["two"], rate["one"], least=1.7, **told),
        Row("… by cpu seconds, shared between two cores", None, ratio=together),
    ]


def memory(full: bool) -> list[Row]:
    """By how much the peak of memory while the stage scores 10,000 and 100,000 documents (with `full` the last) is
    above that of 1,000: what they grow by is some 20 MB, of which a ratio would tell nothing."""
    if not DATA.is_dir():
        return [absent("fastText, memory", _ABSENT)]
    sizes = (1_000, 10_000, 100_000) if full else (1_000, 10_000)
    growth = {n: in_child("benchmarks.scorers:scoring", n=n)["growth"] / 1e6 for n in sizes}
    return [
        at_most(
            f"dclm_scores: peak of {n:,} documents above that of {sizes[0]:,}",
            growth[n] - growth[sizes[0]],
            16,
            unit="MB",
            facts={"growth_mb": growth},
        )
        for n in sizes[1:]
    ]


def scoring(n: int) -> Callable[[], int]:
    """A work for `in_child`: n documents of some 2,000 characters through the stage in this process."""
    scratch = tempfile.TemporaryDirectory()
    folder = Path(scratch.name)
    (folder / "source" / SNAPSHOT).mkdir(parents=True)
    schema = pa.schema([("id", pa.string()), ("text", pa.string())])
    with pq.ParquetWriter(folder / "source" / SNAPSHOT / "000.parquet", schema) as writer:
        for start in range(0, n, 1_000):
            texts = [f"{start + k} " + f"word{k} " * 280 for k in range(1_000)]
            writer.write_table(pa.table({"id": [str(start + k) for k in range(1_000)], "text": texts}, schema=schema))
    _train(folder, texts, dim=16, bucket=10_000)
    run, source = _prepared(folder)
    classifiers.classifier(run, "dclm")

    def work() -> int:
        outcome = scores.scores(run, source, SNAPSHOT, "dclm")
        scratch.cleanup()
        return outcome.rows_in

    return work


SUBJECTS = {"fastText": pages, "fastText, memory": memory}
