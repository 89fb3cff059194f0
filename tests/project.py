"""A small project for tests: documents written on the spot, settings that need no hub, and stages run one by one."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dagster_datamask import keyed
from dagster_datamask.accelerator import Accelerator
from dagster_datamask.settings import Settings, load_settings
from dagster_datamask.shards.remote import open_store
from dagster_datamask.shards.source import Source
from dagster_datamask.stages import (
    baselines,
    calibration,
    classifiers,
    cleaning,
    corpus,
    embeddings,
    ingest,
    manifest,
    masks,
    near_duplicates,
    quality,
    report,
    scores,
    selection_report,
    substrings,
)
from dagster_datamask.stages.base import FITTED, STAGES, Outcome, Run, lineage

PROSE = (
    "the river carries cold water from the mountain to the valley because snow melts in spring",
    "a careful experiment shows how light bends when it enters glass and why colours separate",
    "for example the baker weighs flour and water before the dough rests overnight",
    "historians explain that the old bridge was built of stone and repaired twice",
    "this means that a cell divides only after its material has been copied",
    "readers learn how the moon moves the tides and what a calendar measures",
)
NOISE = (
    "click here buy now cheap offer free shipping login cart checkout",
    "copyright all rights reserved terms privacy cookies accept decline",
    "home about contact menu search submit next previous page share tweet",
    "lorem size colour price stock sku item add wishlist compare",
)


def text_of(key: str, sentences: int = 6) -> str:
    """A text that depends on its key alone: prose, noise, or a mixture."""
    rng = keyed.rng(0, "text", key)
    prose = rng.random()
    lines = [
        (PROSE if rng.random() < prose else NOISE)[int(rng.integers(0, 4))] + f" {int(rng.integers(0, 1000))}"
        for _ in range(sentences)
    ]
    return ".\n".join(lines) + "."


def write_shard(
    source: Path,
    snapshot: str,
    shard: str,
    rows: int,
    *,
    ids: Sequence[str | None] | None = None,
    texts: Sequence[str | None] | None = None,
    urls: Sequence[str | None] | None = None,
    tokens: Sequence[int | None] | None = None,
    group_rows: int = 16,
) -> Path:
    """A FineWeb-shaped shard under `<source>/data/<snapshot>/`."""
    path = source / "data" / snapshot / f"{shard}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [f"{snapshot}/{shard}/{k}" for k in range(rows)] if ids is None else list(ids)
    body = [text_of(f"{snapshot}/{shard}/{k}") for k in range(rows)] if texts is None else list(texts)
    table = pa.table(
        {
            "text": pa.array(body, pa.string()),
            "id": pa.array(names, pa.string()),
            "dump": pa.array([snapshot] * rows, pa.string()),
            "url": pa.array(urls or [f"https://example.org/{k}" for k in range(rows)], pa.string()),
            "date": pa.array(["2024-01-01"] * rows, pa.string()),
            "file_path": pa.array(["s3://x"] * rows, pa.string()),
            "language": pa.array(["en"] * rows, pa.string()),
            "language_score": pa.array([0.9] * rows, pa.float64()),
            "token_count": pa.array(tokens or [len((t or "").split()) for t in body], pa.int64()),
        }
    )
    pq.write_table(table, path, row_group_size=group_rows)
    return path


def write_labels(folder: Path) -> Path:
    """dclm, wiki, ultra (0/1) and edu (0..5) label files of 80 rows each."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [". ".join((PROSE if k % 2 else NOISE)[(k + j) % 4] for j in range(4)) + f" {k}" for k in range(80)]
    for name in ("dclm", "wiki", "ultra"):
        pq.write_table(pa.table({"text": texts, "label": [k % 2 for k in range(80)]}), folder / f"{name}.parquet")
    grades = np.array([3.0 + k % 3 if k % 2 else k % 3 for k in range(80)], dtype=np.float64)
    pq.write_table(pa.table({"text": texts, "label": grades}), folder / "edu.parquet")
    return folder


def settings_for(source: Path, root: Path, labels: Path, *overrides: str) -> Settings:
    """Demo settings cut down to seconds: 16 tokens a document, a sample of 40, a short gradient run beside."""
    return load_settings(
        # an empty file, so that the repository's own datamask.toml has no say
        os.devnull,
        [
            "profile=demo",
            # rows without a token_count stay without one
            "source.tokenizer=",
            f"source.url={source}",
            f"storage.root={root}",
            *(f"score.{part}_labels={labels / part}.parquet" for part in ("dclm", "wiki", "edu", "ultra")),
            "score.edu_max_tokens=16",
            "score.calibration_sample=40",
            "embed.max_tokens=16",
            "cluster.sample=40",
            "select.compare_steps=20",
            *overrides,
        ],
        env={},
    )


class Project:
    """A source, a root and settings, with every stage callable by its asset's name."""

    def __init__(self, settings: Settings, log: list[str] | None = None) -> None:
        self.settings = settings
        self.log: list[str] = [] if log is None else log
        self.source = Source(settings.source.url)
        self.store = open_store(settings.storage.root, settings.storage.cache, cache_gb=settings.storage.cache_gb)

    def run(self) -> Run:
        return Run(self.store, self.settings, self.settings, Accelerator(), self.log.append)

    def with_settings(self, **values: object) -> "Project":
        """The same project under changed settings: `with_settings(**{"select.lambda": 0.3})`."""
        return Project(self.settings.replace(values), self.log)

    def fit_global(self) -> None:
        for name in FITTED:
            self.stage(name, "")

    def full(self, snapshot: str) -> dict[str, Outcome]:
        return {name: self.stage(name, snapshot) for name in SNAPSHOT_STAGES}

    def stage(self, name: str, snapshot: str) -> Outcome:
        run, source = self.run(), self.source
        steps = {
            "dclm_classifier": lambda: classifiers.classifier(run, "dclm"),
            "edu_classifier": lambda: classifiers.classifier(run, "edu"),
            "wiki_classifier": lambda: classifiers.classifier(run, "wiki"),
            "ultra_classifier": lambda: classifiers.classifier(run, "ultra"),
            "quality_calibration": lambda: calibration.quality_calibration(run, source),
            "kmeans_centroids": lambda: calibration.kmeans_centroids(run),
            "raw_shards": lambda: ingest.raw_shards(run, source, snapshot),
            "text_duplicates": lambda: cleaning.text_duplicates(run, source, snapshot),
            "contaminated_documents": lambda: cleaning.contaminated_documents(run, source, snapshot),
            "dclm_scores": lambda: scores.scores(run, source, snapshot, "dclm"),
            "edu_scores": lambda: scores.scores(run, source, snapshot, "edu"),
            "wiki_scores": lambda: scores.scores(run, source, snapshot, "wiki"),
            "ultra_scores": lambda: scores.scores(run, source, snapshot, "ultra"),
            "quality_scores": lambda: quality.quality_scores(run, snapshot),
            "pruned_documents": lambda: quality.pruned_documents(run, snapshot),
            "e5_embeddings": lambda: embeddings.e5_embeddings(run, source, snapshot),
            "kmeans_clusters": lambda: embeddings.kmeans_clusters(run, snapshot),
            "near_duplicates": lambda: near_duplicates.near_duplicates(run, source, snapshot),
            "corpus_selection_state": lambda: corpus.corpus_selection_state(run, source),
            "datamask_masks": lambda: masks.datamask_masks(run, source, snapshot),
            "exact_substrings": lambda: substrings.exact_substrings(run, source, snapshot),
            **{name: lambda name=name: baselines.baseline(run, source, snapshot, name) for name in baselines.BASELINES},
            "fineweb_mask_manifest": lambda: manifest.fineweb_mask_manifest(run, snapshot),
            "fineweb_mask": lambda: manifest.fineweb_mask(run, source, snapshot),
            "snapshot_report": lambda: report.snapshot_report(run, source, snapshot),
            "selection_report": lambda: selection_report.selection_report(run, source),
        }
        return steps[name]()


# those that lead to a snapshot's documents with the settings as they come
SNAPSHOT_STAGES = tuple(
    name
    for name in lineage(
        ("kmeans_clusters", "fineweb_mask", "snapshot_report"), load_settings(os.devnull, ["profile=demo"], env={})
    )
    if STAGES[name].partitioned
)

__all__ = ["SNAPSHOT_STAGES", "Project", "settings_for", "text_of", "write_labels", "write_shard"]
