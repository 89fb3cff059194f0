"""quality_calibration and kmeans_centroids: what is fitted once on a recorded sample and then frozen.

The sample is drawn from source shards by keyed hash and kept, text included, in quality_calibration's folder: so the
constants and centroids can be explained and refitted, and no snapshot run can move them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dagster_datamask.keyed import digest, hash64
from dagster_datamask.reporting.figures import cluster_sizes_figure, quality_histogram
from dagster_datamask.scoring.base import ScoredBatch, Scorer
from dagster_datamask.scoring.encoders import Encoder, EncoderSpec, encoder_spec
from dagster_datamask.scoring.quality import PARTS, Combination, Standard, calibrate, combine
from dagster_datamask.scoring.text import decode_column
from dagster_datamask.selection.vectors import nearest
from dagster_datamask.settings import ScoreSettings, Settings, SettingsError
from dagster_datamask.shards.engine import BATCH_ROWS
from dagster_datamask.shards.generations import Published
from dagster_datamask.shards.identity import base_ids
from dagster_datamask.shards.schemas import BadShard
from dagster_datamask.shards.source import Shard, Source
from dagster_datamask.shards.writer import table_file
from dagster_datamask.stages.base import STAGES, Outcome, Run, fingerprints, finish
from dagster_datamask.stages.classifiers import classifier_of, precision, scorer_for
from dagster_datamask.stages.quality import SAMPLE_FILE, integer_histogram, standard_of

CENTROIDS_FILE = "centroids.arrow"
_SAMPLE = pa.schema(
    [
        ("snapshot", pa.string()),
        ("doc_id", pa.string()),
        ("text", pa.large_string()),
        *((part, pa.float64()) for part in PARTS),
        ("quality", pa.float64()),
        ("reason", pa.string()),
    ]
)
_CENTROID = "centroid"
_MAX_CLUSTERS = 10_000
_SAMPLED_TEXT_ROWS = 1000
_PURPOSE = "sample"


def quality_calibration(run: Run, source: Source) -> Outcome:
    """Publish the scored sample and, as facts, q_lo, q_hi (quantiles 0.001 and 0.999) and the prune threshold.

    Raises SourceError, and BadShard with on_bad_shard = fail; else shards that cannot be read are passed over.
    """
    return passing_over_bad_shards(run, source, "quality_calibration", lambda bad: _calibrate(run, source, bad))


def passing_over_bad_shards(run: Run, source: Source, what: str, compute: Callable[[set[str]], Outcome]) -> Outcome:
    """compute(paths to pass over), again and again until no further shard proves to be unreadable.

    Those of source.set_aside are passed over from the start. Raises BadShard with on_bad_shard = fail.
    """
    asked = run.settings.source
    snapshots = {name.partition("/")[0] for name in asked.set_aside} & set(source.snapshots())
    bad = {
        shard.path for snapshot in snapshots for shard in source.shards(snapshot) if shard.name in asked.aside(snapshot)
    }
    while True:
        try:
            return compute(bad)
        except BadShard as error:
            if run.settings.source.on_bad_shard == "fail":
                raise
            run.log(f"{what}: passed over: {error}")
            bad.add(error.path)


def _calibrate(run: Run, source: Source, bad: set[str]) -> Outcome:
    stage = STAGES["quality_calibration"]
    settings = run.settings.score
    classifiers = {part: run.store.current(classifier_of(part)) for part in PARTS}
    picked = pick_groups(
        source, settings.calibration_snapshots or source.filled(), settings.calibration_sample, bad, _PURPOSE
    )
    inputs = {
        **{classifier.asset: classifier.fingerprint for classifier in classifiers.values()},
        "precision": precision(run.accelerator),
        "sample": picked_identity(source, picked),
    }
    with run.generation(stage, None, inputs) as generation, ExitStack() as opened:
        record = generation.record(SAMPLE_FILE, "")
        if record is None:
            rows = sample_texts(source, picked, settings.calibration_sample, _PURPOSE)
            scorers = {
                part: opened.enter_context(scorer_for(classifiers[part], run.settings, run.accelerator, len(rows)))
                for part in PARTS
            }
            progress = run.progress(stage, None)
            batches = []
            for start in range(0, len(rows), BATCH_ROWS):
                batches.append(_scored(rows.slice(start, BATCH_ROWS), scorers))
                progress(min(start + BATCH_ROWS, len(rows)), len(rows), SAMPLE_FILE)
            # z-scores and ranks are measured against the whole sample, so that comes first
            standard = None if settings.combine == "sum" else _standard(settings.combine, batches)
            with table_file(generation.folder / SAMPLE_FILE, _SAMPLE, _SAMPLED_TEXT_ROWS) as writer:
                for batch, parts in batches:
                    writer.write(_combined(batch, parts, settings, standard))
            scored = pq.read_table(generation.folder / SAMPLE_FILE, columns=["quality"])["quality"]
            record = generation.complete(
                SAMPLE_FILE,
                "",
                rows=len(rows),
                rows_in=len(rows),
                counts={"scored": len(scored) - scored.null_count, "unscored": scored.null_count},
            )
        quality = pq.read_table(generation.folder / SAMPLE_FILE, columns=["quality"])["quality"]
        constants = calibrate(quality.to_numpy(), run.settings.prune.ratio)
        measured = (
            {}
            if settings.combine == "sum"
            else {"measured_against": standard_of(settings.combine, generation.folder / SAMPLE_FILE).told()}
        )
        return finish(
            generation,
            [record],
            "",
            facts={**asdict(constants), "snapshots": sorted({snapshot for snapshot, _, _ in picked}), **measured},
            expected_rows=record.rows,
            figures=lambda published: {
                "quality of the sample": quality_histogram(
                    integer_histogram(quality.drop_null().to_numpy()).tolist(),
                    "Quality of the calibration sample",
                    beside_paper=settings.combine == "sum",
                )
            },
        )


Picked = list[tuple[str, Shard, list[int]]]


def pick_groups(source: Source, snapshots: list[str], rows: int, bad: set[str], purpose: str) -> Picked:
    """Row groups that hold about twice `rows` rows, spread over the snapshots by keyed hash of their names.

    Shards whose path is in `bad` are passed over. purpose: keys the hash, so that two samples are independent.
    """
    known = source.snapshots()
    for snapshot in snapshots:
        if snapshot not in known:
            raise SettingsError(
                f"score.calibration_snapshots: {snapshot!r} is not in {source.url}; there are: {', '.join(known)}"
            )
    shards = [(snap, shard) for snap in snapshots for shard in source.shards(snap) if shard.path not in bad]
    order = np.argsort(hash64([f"{snap}/{shard.name}" for snap, shard in shards], 0, purpose), kind="stable")
    chosen: dict[int, list[int]] = {}
    found = 0
    for index in order:
        if found >= 2 * rows:
            break
        snapshot, shard = shards[index]
        with source.open(shard) as parquet:
            sizes = [parquet.metadata.row_group(g).num_rows for g in range(parquet.num_row_groups)]
        # a share of each shard, so that one large shard never stands for all of them
        share = max(1, -(-2 * rows // len(shards)))
        groups = np.argsort(hash64([f"{snapshot}/{shard.name}/{g}" for g in range(len(sizes))], 0, purpose))
        for group in groups:
            if share <= 0:
                break
            chosen.setdefault(int(index), []).append(int(group))
            share -= sizes[group]
            found += sizes[group]
    return [(*shards[index], sorted(groups)) for index, groups in sorted(chosen.items())]


def picked_identity(source: Source, picked: Picked) -> str:
    """32 hex digits over the picked row groups: footers and not paths or times, so that a copy of the source gives the
    same."""
    return digest(
        *(f"{snap}/{shard.name} {source.footer(shard).digest} {groups}" for snap, shard, groups in picked), size=16
    ).hex()


def sample_texts(source: Source, picked: Picked, rows: int, purpose: str) -> pa.Table:
    """The `rows` documents of the picked row groups with the smallest keyed hash, as snapshot, doc_id, text."""
    best: pa.Table | None = None
    for snapshot, shard, groups in picked:
        for batch in _batches(source, snapshot, shard, groups):
            best = batch if best is None else pa.concat_tables([best, batch])
            if len(best) > 2 * rows + BATCH_ROWS:
                best = _smallest(best, rows, purpose)
    if best is None:
        return _SAMPLE.empty_table().select(["snapshot", "doc_id", "text"])
    return _smallest(best, rows, purpose)


def _batches(source: Source, snapshot: str, shard: Shard, groups: list[int]) -> Iterator[pa.Table]:
    with source.open(shard) as parquet:
        firsts = np.cumsum([0, *(parquet.metadata.row_group(g).num_rows for g in range(parquet.num_row_groups))])
    for group in groups:
        first = int(firsts[group])
        for batch in source.batches(shard, ("id", "text"), BATCH_ROWS, [group]):
            given = batch.column("id") if "id" in batch.schema.names else None
            ids, _ = base_ids(given, shard.name, first, len(batch))
            first += len(batch)
            yield pa.table(
                {
                    "snapshot": [snapshot] * len(batch),
                    "doc_id": ids,
                    "text": pa.array(decode_column(batch.column("text"))[0], pa.large_string()),
                }
            )


def _smallest(table: pa.Table, rows: int, purpose: str) -> pa.Table:
    keys = hash64(table["doc_id"].to_pylist(), 0, purpose)
    order = np.lexsort((np.array(table["snapshot"].to_pylist(), dtype=object), keys))
    return table.take(pa.array(order[:rows]))


def _scored(batch: pa.Table, scorers: Mapping[str, Scorer]) -> tuple[pa.Table, dict[str, ScoredBatch]]:
    texts = batch["text"].to_pylist()
    return batch, {part: scorer.score(texts) for part, scorer in scorers.items()}


def _standard(combination: Combination, batches: list[tuple[pa.Table, dict[str, ScoredBatch]]]) -> Standard:
    parts = {part: [parts[part].scores for _, parts in batches] for part in PARTS}
    return Standard.of(combination, {part: np.concatenate([np.empty(0), *scores]) for part, scores in parts.items()})


def _combined(
    batch: pa.Table, parts: Mapping[str, ScoredBatch], settings: ScoreSettings, standard: Standard | None
) -> pa.Table:
    quality, reasons = combine(
        *(parts[part].scores for part in PARTS),
        reasons={part: parts[part].reasons for part in PARTS},
        weights=(settings.weights[0], settings.weights[1], settings.weights[2]),
        standard=standard,
        missing=settings.missing,
    )
    for part in PARTS:
        batch = batch.append_column(part, pa.array(parts[part].scores, from_pandas=True))
    batch = batch.append_column("quality", pa.array(quality, from_pandas=True))
    return batch.append_column("reason", pa.array(reasons, pa.string()))


def selection_encoder(settings: Settings) -> EncoderSpec:
    """The encoder of e5_embeddings and kmeans_centroids."""
    return encoder_spec(
        settings.models.encoder,
        settings.models.encoder_prefix,
        settings.embed.max_tokens,
        backend=settings.embed.backend,
    )


def encoder_facts(spec: EncoderSpec) -> dict[str, Any]:
    """What is published of an encoder: all that makes its vectors, and its name instead of a path on this machine."""
    facts = spec.describe()
    for name in ("name", "ref"):
        if Path(facts[name]).is_absolute():
            facts[name] = Path(facts[name]).name
    return facts


def kmeans_centroids(run: Run) -> Outcome:
    """Publish float32 unit centroids of the calibration sample's survivors (spherical k-means, faiss).

    k is cluster.k, or min(10000, ⌈√n⌉); never more than the sample's distinct vectors.
    """
    stage = STAGES["kmeans_centroids"]
    cluster = run.settings.cluster
    inputs = run.inputs(stage, None)
    spec = selection_encoder(run.settings)
    calibration = inputs["quality_calibration"]
    keys = {**fingerprints(inputs), "encoder": spec.identity, "precision": precision(run.accelerator)}
    with run.generation(stage, None, keys) as generation:
        record = generation.record(CENTROIDS_FILE, "")
        if record is None:
            sample = pq.read_table(calibration.path(SAMPLE_FILE), columns=["doc_id", "text", "quality"])
            survivors = np.flatnonzero(sample["quality"].to_numpy() >= calibration.facts["prune_threshold"])
            sample = sample.take(survivors[: cluster.sample])
            # the vectors, faiss's copy of them, and the centroids
            run.accelerator.plan(
                f"k-means on {len(sample):,} documents", 3 * len(sample) * spec.dimension * 4, "lower cluster.sample"
            )
            vectors = _encoded(run, spec, sample)
            distinct = len(np.unique(vectors, axis=0))
            asked = cluster.k or min(_MAX_CLUSTERS, int(np.ceil(np.sqrt(len(vectors)))))
            k = min(asked, distinct)
            if not k:
                raise SettingsError(
                    "kmeans_centroids: no document of the calibration sample has a vector; raise "
                    "score.calibration_sample or name other score.calibration_snapshots"
                )
            run.log(f"kmeans_centroids: k = {k} on {len(vectors):,} vectors of {vectors.shape[1]} dimensions")
            centroids, sizes = _fit(vectors, k, cluster.iterations, cluster.seed)
            schema = pa.schema([(_CENTROID, pa.list_(pa.float32(), vectors.shape[1])), ("size", pa.int64())])
            with table_file(generation.folder / CENTROIDS_FILE, schema) as writer:
                flat = pa.FixedSizeListArray.from_arrays(pa.array(centroids.ravel()), vectors.shape[1])
                writer.write(pa.table({_CENTROID: flat, "size": sizes}))
            record = generation.complete(
                CENTROIDS_FILE,
                "",
                rows=k,
                rows_in=len(sample),
                counts={"fitted_on": len(vectors), "no_vector": len(sample) - len(vectors)},
                source={"asked": asked, "distinct_vectors": distinct},
            )
        sizes = _table(generation.folder / CENTROIDS_FILE)["size"].to_numpy()
        return finish(
            generation,
            [record],
            "",
            facts={
                "k": record.rows,
                "k_asked": record.source["asked"],
                "distinct_vectors": record.source["distinct_vectors"],
                "empty_clusters": int((sizes == 0).sum()),
                "encoder": encoder_facts(spec),
            },
            expected_rows=record.rows_in,
            figures=lambda published: {"cluster sizes in the sample": cluster_sizes_figure(sizes.tolist())},
        )


def _encoded(run: Run, spec: EncoderSpec, sample: pa.Table) -> np.ndarray:
    encoder = Encoder(spec, run.accelerator, run.settings.embed.batch_tokens)
    progress = run.progress(STAGES["kmeans_centroids"], None)
    vectors = [np.empty((0, spec.dimension), dtype=np.float32)]
    for start in range(0, len(sample), BATCH_ROWS):
        batch = sample.slice(start, BATCH_ROWS)
        encoded = encoder.encode(batch["text"].to_pylist())
        good = np.array([reason is None for reason in encoded.reasons], dtype=bool)
        vectors.append(encoded.vectors[good].astype(np.float32))
        progress(start + len(batch), len(sample), CENTROIDS_FILE)
    return np.concatenate(vectors)


def _fit(vectors: np.ndarray, k: int, iterations: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    model = faiss.Kmeans(
        vectors.shape[1],
        k,
        niter=iterations,
        seed=seed + 1,
        spherical=True,
        min_points_per_centroid=1,
        max_points_per_centroid=len(vectors),
    )
    model.train(vectors)
    centroids = np.ascontiguousarray(model.centroids, dtype=np.float32)
    sizes = np.zeros(k, dtype=np.int64)
    for start in range(0, len(vectors), BATCH_ROWS):
        sizes += np.bincount(nearest(vectors[start : start + BATCH_ROWS], centroids)[0], minlength=k)
    return centroids, sizes


def read_centroids(published: Published) -> np.ndarray:
    """float32[k, d]."""
    table = _table(published.path(CENTROIDS_FILE))
    flat = table[_CENTROID].combine_chunks()
    return flat.flatten().to_numpy().reshape(len(table), -1)


def _table(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()
