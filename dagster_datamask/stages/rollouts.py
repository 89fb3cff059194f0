"""stage_n/rollout_sets: oracle influences of a stage's checkpoint, measured along random and bootstrap trajectories.

Here: the probed documents, the trajectories of both policies, and their records chunk by chunk. Not here: one
optimizer step and its reference loss (`influence.rollouts`), the model that is fitted to them (`stages.influence`).

What is probed are the survivors of quality_calibration's recorded sample, by keyed hash, without those whose text the
model was trained on, in the warm-up or in a stage. So a snapshot's run alone cannot move it. Of equal texts one is
probed, and of rows of one id the first, as everywhere. Trajectories are drawn inside the training side and inside the
held-out side of the documents, so that a model can be measured on texts that it has not seen.

A chunk of trajectories is a unit of work with a completion record: a killed run goes on at the chunk it was in.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from dagster_datamask.influence import tokens
from dagster_datamask.influence.bootstrap import bootstrap_trajectories
from dagster_datamask.influence.reference import text_key
from dagster_datamask.influence.relational import (
    LEAST_TRAJECTORIES,
    InfluenceModel,
    InfluenceOptions,
    Progress,
    fit,
    sides,
)
from dagster_datamask.influence.rollouts import ROLLOUTS, ProbeOptions, Prober, random_trajectories, records
from dagster_datamask.keyed import hash64
from dagster_datamask.scoring.encoders import Encoder
from dagster_datamask.settings import GroupMatesSettings, Settings, SettingsError
from dagster_datamask.shards.engine import BATCH_ROWS, every_seconds
from dagster_datamask.shards.generations import Generation, Published, ShardRecord
from dagster_datamask.shards.writer import atomic, table_file, write_json
from dagster_datamask.stages.base import STAGES, Check, Outcome, Run, checkpoint_of, fingerprints, finish
from dagster_datamask.stages.calibration import SAMPLE_FILE, selection_encoder
from dagster_datamask.stages.classifiers import precision
from dagster_datamask.stages.embeddings import vectors_of
from dagster_datamask.stages.language_model import (
    References,
    open_checkpoint,
    open_references,
    reference_identities,
    trained_on,
    warmed_up_on,
)

DOCUMENTS_FILE = "documents.arrow"
_INITIAL, _INITIAL_CARD = "initial", "initial.json"
RANDOM, BOOTSTRAP = "random", "bootstrap"
# trajectories in one file: what a killed run loses at most
CHUNK = 64
# a loss needs a token to be predicted from another
_LEAST_TOKENS = 2


def rollout_sets(run: Run, number: int) -> Outcome:
    """Publish the probed documents, and a record of every step of every trajectory in files of 64 trajectories.

    Raises SettingsError without a reference set, OverlapError where it shares a text with what is probed or trained on,
    NoOptimizerState for a checkpoint without moments, and SettingsError where too few documents are left to probe.
    """
    stage = STAGES[f"stage_{number}/rollout_sets"]
    asked = run.settings.group_mates
    inputs = run.inputs(stage, None)
    start = inputs[checkpoint_of(number)]
    keys = {**fingerprints(inputs), **influence_keys(run), **reference_identities(run.settings)}
    with run.generation(stage, None, keys) as generation:
        tokenizer, checkpoint = open_checkpoint(start)
        references = open_references(run.settings, tokenizer, checkpoint.context)
        record = _documents(run, generation, inputs, tokenizer, checkpoint.context, references)
        probed = _Probed.read(generation.folder, asked.validation, asked.seed)
        probed.check(asked)
        documents = tokens.encode(tokenizer, probed.names, probed.texts, checkpoint.context).tokens
        made = [record]
        options = ProbeOptions(lr=asked.probe_lr, beta1=asked.beta1)
        processes = run.settings.compute.processes or None
        with Prober(
            checkpoint, references.reference, options, accelerator=run.accelerator, processes=processes
        ) as prober:
            # the same draws at every checkpoint; documents leave the pool once a stage trained on them
            draw = _random(probed, asked.steps, asked.seed)
            made += _roll_out(run, generation, probed, documents, prober, RANDOM, asked.trajectories, draw)
            if asked.bootstrap_trajectories:
                draw, count = _bootstrap(run, generation, probed), asked.bootstrap_trajectories
                made += _roll_out(run, generation, probed, documents, prober, BOOTSTRAP, count, draw)
            base_loss, lr = prober.base_loss, prober.lr
        lost = sum(part.counts.get("not_finite", 0) for part in made)
        steps = asked.steps * (asked.trajectories + asked.bootstrap_trajectories)
        facts = {
            "documents": record.rows,
            "held_out_documents": int(probed.held_out.sum()),
            **record.source,
            "trajectories": asked.trajectories,
            "bootstrap_trajectories": asked.bootstrap_trajectories,
            "steps": asked.steps,
            "base_loss": base_loss,
            "lr": lr,
            "beta1": asked.beta1,
            "not_finite": lost,
            "reference_rows": len(references.reference.tokens),
            "reference_tokens": references.reference.counted,
            "checkpoint": checkpoint.identity,
            "language_model_step": checkpoint.step,
            **_spread(generation.folder, RANDOM),
            **_spread(generation.folder, BOOTSTRAP),
        }
        finite = Check("every_loss_finite", lost == 0, False, {"not_finite": lost, "steps": steps})
        return finish(generation, made, "", facts=facts, expected_rows=record.rows_in + steps, checks=(finite,))


def _documents(
    run: Run,
    generation: Generation,
    inputs: Mapping[str, Published],
    tokenizer: Tokenizer,
    context: int,
    references: References,
) -> ShardRecord:
    """The probed documents with text, length in tokens and, for a frozen encoder, vector; written once."""
    record = generation.record(DOCUMENTS_FILE, "")
    if record is not None:
        return record
    asked = run.settings.group_mates
    for table in warmed_up_on(inputs["warmup_model"]):
        rows_of_it = zip(_names(table), table["text"].to_pylist(), strict=True)
        references.refuse("the documents of the warm-up", rows_of_it)
    sample, left_out = _fresh(inputs)
    order = np.argsort(hash64(_names(sample), asked.seed, "probe"), kind="stable")[: asked.probe_documents]
    sample = sample.take(pa.array(order))
    names, texts = _names(sample), sample["text"].to_pylist()
    references.refuse("the documents that are probed", zip(names, texts, strict=True))
    encoded = tokens.encode(tokenizer, names, texts, context)
    lengths = dict(zip(encoded.ids, encoded.lengths.tolist(), strict=True))
    usable = np.array([lengths.get(name, 0) >= _LEAST_TOKENS for name in names], bool)
    dimension, vectors = 0, np.zeros((len(names), 0), np.float16)
    if asked.backbone == "frozen":
        encoder = Encoder(selection_encoder(run.settings), run.accelerator, run.settings.embed.batch_tokens)
        dimension, vectors = encoder.spec.dimension, np.zeros((len(names), encoder.spec.dimension), np.float16)
        progress = run.progress(STAGES[generation.asset], None)
        for a in range(0, len(names), BATCH_ROWS):
            found = encoder.encode(texts[a : a + BATCH_ROWS])
            vectors[a : a + BATCH_ROWS] = found.vectors
            usable[a : a + BATCH_ROWS] &= [reason is None for reason in found.reasons]
            progress(a + len(found.reasons), len(names), DOCUMENTS_FILE)
    rows = np.flatnonzero(usable)
    table = sample.take(pa.array(rows)).select(["snapshot", "doc_id", "text"])
    table = table.append_column("tokens", pa.array([lengths[names[row]] for row in rows.tolist()], pa.int64()))
    flat = pa.FixedSizeListArray.from_arrays(pa.array(vectors[rows].ravel()), dimension) if dimension else None
    if flat is not None:
        table = table.append_column("embedding", flat)
    with table_file(generation.folder / DOCUMENTS_FILE, table.schema) as writer:
        writer.write(table)
    return generation.complete(
        DOCUMENTS_FILE,
        "",
        rows=len(table),
        rows_in=len(names),
        counts={"probed": len(table), "nothing_to_probe": len(names) - len(table)},
        source={"cut_to_context": int((table["tokens"].to_numpy() > context).sum()), **left_out},
    )


def _fresh(inputs: Mapping[str, Published]) -> tuple[pa.Table, dict[str, int]]:
    """(snapshot, doc_id, text of the sample's survivors of which no other row has the text and on whose text no model
    was trained, how many rows are none for which of these reasons)."""
    calibration = inputs["quality_calibration"]
    sample = pq.read_table(calibration.path(SAMPLE_FILE), columns=["snapshot", "doc_id", "text", "quality"])
    # the sample holds rows of one id in their order in the snapshot
    own = _firsts(_names(sample))
    repeated_ids = len(sample) - len(own)
    sample = sample.take(own)
    survives = pc.greater_equal(sample["quality"], calibration.facts["prune_threshold"])
    sample = sample.filter(pc.fill_null(survives, False))
    keys = [text_key(text or "") for text in sample["text"].to_pylist()]
    wanted = set(keys)
    models = [published for name, published in inputs.items() if name != calibration.asset]
    trained = {key for published in models for some in trained_on(published) for key in wanted.intersection(some)}
    fresh = pa.array([key not in trained for key in keys], pa.bool_())
    different = _firsts([key for key in keys if key not in trained])
    return sample.filter(fresh).take(different), {
        "repeated_ids": repeated_ids,
        "trained_on": sum(key in trained for key in keys),
        "repeated_texts": (pc.sum(fresh).as_py() or 0) - len(different),
    }


def _firsts(values: Sequence[str | bytes]) -> pa.Array:
    """The places where a value stands for the first time, ascending."""
    first: dict[str | bytes, int] = {}
    for place, value in enumerate(values):
        first.setdefault(value, place)
    return pa.array(first.values(), pa.int64())


def _names(table: pa.Table) -> list[str]:
    """snapshot/doc_id: rows without an id of their own are named alike in every snapshot."""
    pairs = zip(table["snapshot"].to_pylist(), table["doc_id"].to_pylist(), strict=True)
    return [f"{snapshot}/{doc_id}" for snapshot, doc_id in pairs]


@dataclass(frozen=True, eq=False)
class _Probed:
    """The probed documents: names unique among snapshots, texts, features (float32[n, d] of a frozen encoder, or the
    texts), and which are held out."""

    names: list[str]
    texts: list[str]
    features: np.ndarray | list[str]
    held_out: np.ndarray

    @classmethod
    def read(cls, folder: Path, share: float, seed: int) -> "_Probed":
        with pa.memory_map(str(folder / DOCUMENTS_FILE)) as file:
            table = pa.ipc.open_file(file).read_all()
            names, texts = _names(table), table["text"].to_pylist()
            features = vectors_of(table).astype(np.float32) if "embedding" in table.column_names else texts
        return cls(names, texts, features, sides(names, seed, share))

    def check(self, asked: GroupMatesSettings) -> None:
        """Raise SettingsError where a side has fewer documents than a rollout has steps."""
        for held, what in ((False, "to train on"), (True, "held out")):
            there = int((self.held_out == held).sum())
            if there < asked.steps:
                raise SettingsError(
                    f"{len(self.names)} documents can be probed, {there} of them {what}, and a rollout takes "
                    f"group_mates.steps = {asked.steps}: raise score.calibration_sample or "
                    "group_mates.probe_documents, lower group_mates.warmup_documents, or change "
                    f"group_mates.validation = {asked.validation}"
                )

    def features_of(self, rows: np.ndarray) -> np.ndarray | list[str]:
        if isinstance(self.features, np.ndarray):
            return self.features[rows]
        return [self.features[i] for i in rows.tolist()]


# draw(rows of one side, how many, number of the first) -> int64[how many, T] of places in `rows`
Draw = Callable[[np.ndarray, int, int], np.ndarray]


def _drawn(probed: _Probed, draw: Draw, count: int, share: float, a: int, b: int) -> np.ndarray:
    """int64[b − a, T]: trajectories a to b of `count`, of which those of the held-out side come last."""
    held = min(count - 1, max(LEAST_TRAJECTORIES, round(share * count)))
    parts = []
    for side, first, last in ((False, a, min(b, count - held)), (True, max(a, count - held), b)):
        if first < last:
            rows = np.flatnonzero(probed.held_out == side)
            parts.append(rows[draw(rows, last - first, first)])
    return np.concatenate(parts)


def _random(probed: _Probed, steps: int, seed: int) -> Draw:
    def draw(rows: np.ndarray, count: int, first: int) -> np.ndarray:
        return random_trajectories([probed.names[i] for i in rows.tolist()], count, steps, seed, first)

    return draw


def _bootstrap(run: Run, generation: Generation, probed: _Probed) -> Draw:
    """The policy by the first model: random trajectories alone, fitted once."""
    asked = run.settings.group_mates
    relational = asked.mode == "relational"
    record = generation.record(_INITIAL_CARD, "")
    if record is None:
        data = _read(generation.folder, probed, RANDOM)
        model, card = fit(
            probed.features,
            data.trajectories,
            data.increments,
            influence_options(run.settings),
            probed.names,
            encoder=selection_encoder(run.settings),
            accelerator=run.accelerator,
            progress=fitting_progress(run, f"{generation.asset}, the bootstrap's model"),
        )
        put_folder(generation, model.save, _INITIAL)
        generation.keep(_INITIAL)
        write_json(generation.folder / _INITIAL_CARD, card.to_dict())
        generation.complete(_INITIAL_CARD, "", rows=0, rows_in=0, counts={})
    model = InfluenceModel.load(generation.folder / _INITIAL, run.accelerator)

    def draw(rows: np.ndarray, count: int, first: int) -> np.ndarray:
        h = model.embed(probed.features_of(rows))
        return bootstrap_trajectories(
            # an individual model knows no relation: 0 to all, and the bracket is 1
            model.relation(h) if relational else np.zeros((len(rows), 1), np.float32),
            model.influence(h),
            [probed.names[i] for i in rows.tolist()],
            count,
            asked.steps,
            asked.k,
            alpha=model.alpha,
            beta=model.beta,
            seed=asked.seed,
            first=first,
        )

    return draw


def _roll_out(
    run: Run,
    generation: Generation,
    probed: _Probed,
    documents: Sequence[np.ndarray],
    prober: Prober,
    policy: str,
    count: int,
    draw: Draw,
) -> list[ShardRecord]:
    """The policy's records, computing the chunks that are missing."""
    asked = run.settings.group_mates
    told = every_seconds(run.log, f"{generation.asset}, {policy}", "rollouts")
    made = []
    for number, a in enumerate(range(0, count, CHUNK)):
        name, b = f"{policy}_{number:05d}.parquet", min(a + CHUNK, count)
        record = generation.record(name, "")
        if record is None:
            trajectories = _drawn(probed, draw, count, asked.validation, a, b)
            result = prober.roll_out(documents, trajectories, probed.names)
            table = records(result, prober, probed.names, policy=policy, seed=asked.seed, first=a)
            with table_file(generation.folder / name, ROLLOUTS) as writer:
                writer.write(table)
            lost = len(table) - table["reason"].null_count
            counts = {policy: len(table) - lost, "not_finite": lost}
            record = generation.complete(name, "", rows=len(table), rows_in=len(table), counts=counts)
        made.append(record)
        told(b, count, name)
    return made


def influence_options(settings: Settings) -> InfluenceOptions:
    """How [group_mates] has the influence model fitted."""
    asked = settings.group_mates
    return InfluenceOptions(
        mode=asked.mode,
        similarity=asked.similarity,
        bracket=asked.bracket,
        backbone=asked.backbone,
        width=asked.influence_width,
        epochs=asked.epochs,
        held_out=asked.validation,
        seed=asked.seed,
    )


def influence_keys(run: Run) -> dict[str, str]:
    """What of encoder and device an influence model is made from."""
    return {"encoder": selection_encoder(run.settings).identity, "precision": precision(run.accelerator)}


def fitting_progress(run: Run, what: str) -> Progress:
    """An influence model's progress, told to the log now and then."""

    def told(epoch: int, epochs: int, facts: dict[str, Any]) -> None:
        if epoch in (1, epochs) or epoch % max(1, epochs // 5) == 0:
            spearman = facts["spearman"]
            ranks = "nothing to rank" if spearman is None else f"Spearman {spearman:.3f} on held-out documents"
            run.log(f"{what}: epoch {epoch} of {epochs}, loss {facts['loss']:.4f}, {ranks}")

    return told


def put_folder(generation: Generation, save: Callable[[Path], None], name: str = "") -> None:
    """Have `save(folder)` write its files, then move each into the generation's folder `name`, whole or not at all."""
    made = generation.work / "saved"
    shutil.rmtree(made, ignore_errors=True)
    save(made)
    for file in sorted(path for path in made.rglob("*") if path.is_file()):
        target = generation.folder / name / file.relative_to(made)
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic(target) as temp:
            file.replace(temp)


@dataclass(frozen=True, eq=False)
class Rollouts:
    """What an influence model is fitted to: documents by name, their features, trajectories int64[m, T] of them,
    increments float64[m, T], NaN where the loss was not finite, and the policy of each trajectory."""

    names: list[str]
    features: np.ndarray | list[str]
    trajectories: np.ndarray
    increments: np.ndarray
    policies: list[str]


def read_rollouts(published: Published) -> Rollouts:
    """All rollouts of a published rollout_sets."""
    asked = published.settings
    probed = _Probed.read(published.file(""), asked["group_mates.validation"], asked["group_mates.seed"])
    return _read(published.file(""), probed, RANDOM, BOOTSTRAP)


def _read(folder: Path, probed: _Probed, *policies: str) -> Rollouts:
    rows = {name: row for row, name in enumerate(probed.names)}
    parts = [(policy, pq.read_table(path)) for policy in policies for path in _files(folder, policy)]
    trajectories, increments, by = [], [], []
    for policy, table in parts:
        steps = int(table["position"].to_numpy().max()) + 1
        trajectories.append(np.array([rows[name] for name in table["doc_id"].to_pylist()], np.int64).reshape(-1, steps))
        increments.append(table["influence"].to_numpy().reshape(-1, steps))
        by += [policy] * len(trajectories[-1])
    return Rollouts(probed.names, probed.features, np.concatenate(trajectories), np.concatenate(increments), by)


def _files(folder: Path, policy: str) -> list[Path]:
    return sorted(folder.glob(f"{policy}_*.parquet"))


def _spread(folder: Path, policy: str) -> dict[str, float | None]:
    """Mean and standard deviation of a policy's increments."""
    found = [pq.read_table(path, columns=["influence"])["influence"] for path in _files(folder, policy)]
    values = np.concatenate([np.zeros(0), *(column.drop_null().to_numpy() for column in found)])
    if not values.size:
        return {f"{policy}_mean": None, f"{policy}_sd": None}
    return {f"{policy}_mean": float(values.mean()), f"{policy}_sd": float(values.std())}
