"""warmup_model and stage_n/continued_model: the language model that is probed, and the same run continued.

Here: which documents it is trained on, its checkpoints as published files, and the reference sets its loss is measured
on. Not here: the model, its training and a reference set themselves (`influence`).

One run goes through all stages: weights, moments, step and schedule of a checkpoint go on in the next, on the documents
that the stage between chose in every snapshot published by then. Like all that is fitted, a checkpoint is frozen: a
snapshot that comes later is chosen with it, and has no part in it. Where a stage chooses otherwise of a snapshot that
it was trained on, the checkpoint is out of date.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from dagster_datamask.influence import tokens
from dagster_datamask.influence.language_model import Checkpoint, LanguageModelOptions, load_checkpoint, new_checkpoint
from dagster_datamask.influence.pretraining import Pretrained, PretrainingOptions, pretrain
from dagster_datamask.influence.reference import Example, Kept, Reference, build_reference, read_examples, text_key
from dagster_datamask.influence.rollouts import ProbeOptions, Prober
from dagster_datamask.reporting.figures import trajectory_figure
from dagster_datamask.scoring.models import content_revision, resolve_model
from dagster_datamask.scoring.text import decode_column
from dagster_datamask.settings import GroupMatesSettings, Settings, SettingsError
from dagster_datamask.shards.cursor import Cursor, read_batches
from dagster_datamask.shards.documents import DocumentReader
from dagster_datamask.shards.engine import BATCH_ROWS, every_seconds
from dagster_datamask.shards.generations import Generation, NotPublished, Published, Store
from dagster_datamask.shards.source import Source
from dagster_datamask.shards.writer import count_rows, table_file, write_json
from dagster_datamask.stages.base import STAGES, Check, Outcome, Run, checkpoint_of, fingerprints, finish
from dagster_datamask.stages.calibration import passing_over_bad_shards, pick_groups, picked_identity, sample_texts
from dagster_datamask.stages.classifiers import precision

CHECKPOINT = "checkpoint"
WARM_UP_FILE, TRAINING_FILE, TRAINED_ON_FILE = "sample.parquet", "training.json", "trained_on.arrow"
TRAINED = "trained"
_WARM_UP = "warm-up"
_TRAINED_ON = pa.schema([("text_key", pa.binary(16))])
# before a snapshot's name, in the inputs of continued_model
_CHOSEN = "chosen "
# the share of the first steps in which the learning rate rises; MATES takes 4 %, Group-MATES 6 %
_RISING = 0.05
_SAMPLED_TEXT_ROWS = 1000
_CURVE_POINTS = 200


def warmup_model(run: Run, source: Source) -> Outcome:
    """Publish the checkpoint that the first stage probes, its tokenizer and, where it is trained here, what on.

    With group_mates.checkpoint it is that one; else a model of GPT-2's shape takes group_mates.warmup_steps on
    documents drawn from the source by keyed hash, pruned ones included. Raises SourceError, ModelUnavailable, and
    BadShard with on_bad_shard = fail; else shards that cannot be read are passed over.
    """
    if run.settings.group_mates.checkpoint:
        return _given(run)
    return passing_over_bad_shards(run, source, "warmup_model", lambda bad: _warm_up(run, source, bad))


def _given(run: Run) -> Outcome:
    stage = STAGES["warmup_model"]
    asked = run.settings.group_mates
    with run.generation(stage, None, warm_up_identities(run.settings)) as generation:
        if generation.record(TRAINING_FILE, "") is None:
            checkpoint = load_checkpoint(asked.checkpoint, "group_mates.checkpoint")
            tokenizer = tokens.load_tokenizer(asked.tokenizer, "group_mates.tokenizer")
            checkpoint.save(generation.folder / CHECKPOINT, tokenizer)
            planned = checkpoint.step + asked.stages * asked.continue_steps
            _write_training(generation, checkpoint, np.zeros(0), planned, rows=0, counts={})
        return _finish(run, generation, {}, [])


def _warm_up(run: Run, source: Source, bad: set[str]) -> Outcome:
    stage = STAGES["warmup_model"]
    asked = run.settings.group_mates
    snapshots = run.settings.score.calibration_snapshots or source.filled()
    picked = pick_groups(source, snapshots, asked.warmup_documents, bad, _WARM_UP)
    keys = {
        "sample": picked_identity(source, picked),
        **warm_up_identities(run.settings),
        "precision": precision(run.accelerator),
    }
    with run.generation(stage, None, keys) as generation:
        if generation.record(WARM_UP_FILE, "") is None:
            rows = sample_texts(source, picked, asked.warmup_documents, _WARM_UP)
            with table_file(generation.folder / WARM_UP_FILE, rows.schema, _SAMPLED_TEXT_ROWS) as writer:
                writer.write(rows)
            generation.complete(WARM_UP_FILE, "", rows=len(rows), rows_in=0, counts={})
        if generation.record(TRAINING_FILE, "") is None:
            texts = _column(generation.folder / WARM_UP_FILE, "text")
            if asked.tokenizer == TRAINED:
                tokenizer = tokens.train_tokenizer(texts, asked.vocabulary)
            else:
                tokenizer = tokens.load_tokenizer(asked.tokenizer, "group_mates.tokenizer")
            options = LanguageModelOptions(
                layers=asked.layers,
                width=asked.width,
                heads=asked.heads,
                context=asked.context,
                vocabulary=tokenizer.get_vocab_size(),
            )
            planned = asked.warmup_steps + asked.stages * asked.continue_steps
            texts = _column(generation.folder / WARM_UP_FILE, "text")
            trained, packed = _train(
                run, generation, new_checkpoint(options, asked.seed), tokenizer, texts, planned, asked.warmup_steps
            )
            counts = {"trained_on": packed.documents, "no_text": packed.empty}
            rows_in = packed.documents + packed.empty
            _write_training(generation, trained.checkpoint, trained.losses, planned, rows=rows_in, counts=counts)
        drawn = {"snapshots": sorted({snapshot for snapshot, _, _ in picked})}
        return _finish(run, generation, drawn, [WARM_UP_FILE])


def warm_up_identities(settings: Settings) -> dict[str, str]:
    """What of a checkpoint and a tokenizer that were given goes into the fingerprint: their content."""
    asked = settings.group_mates
    found = {"tokenizer": TRAINED}
    if asked.tokenizer != TRAINED:
        setting = "group_mates.tokenizer"
        found["tokenizer"] = resolve_model(asked.tokenizer, filename="tokenizer.json", setting=setting).revision
    if asked.checkpoint:
        found["checkpoint"] = resolve_model(asked.checkpoint, setting="group_mates.checkpoint").revision
    return found


def _column(path: Path, name: str) -> Iterator[Any]:
    with pq.ParquetFile(path) as parquet:
        for batch in parquet.iter_batches(BATCH_ROWS, columns=[name]):
            yield from batch.column(0).to_pylist()


def continued_model(run: Run, source: Source, number: int) -> Outcome:
    """Publish the checkpoint after group_mates.continue_steps on what the stage chose of all published snapshots, and
    the loss on the two reference sets before and after.

    Raises NotPublished where the stage chose nothing yet, and OverlapError where a chosen document has the text of a
    reference row.
    """
    stage = STAGES[f"stage_{number}/continued_model"]
    asked = run.settings.group_mates
    inputs = run.inputs(stage, None)
    start = inputs[checkpoint_of(number)]
    chosen, missing = _chosen(run, number)
    if not chosen:
        raise NotPublished(
            f"stage {number} has chosen nothing yet under {run.store.where}; run the job group_mates_select_{number} "
            "of a snapshot first"
        )
    keys = {
        **fingerprints(inputs),
        **{f"{_CHOSEN}{snapshot}": published.fingerprint for snapshot, published in chosen.items()},
        **reference_identities(run.settings),
        "precision": precision(run.accelerator),
    }
    with run.generation(stage, None, keys) as generation:
        if generation.record(TRAINING_FILE, "") is None:
            tokenizer, checkpoint = open_checkpoint(start)
            references = open_references(run.settings, tokenizer, checkpoint.context)
            before = references.losses(checkpoint, run)
            keys_of = generation.folder / TRAINED_ON_FILE
            texts = _texts(run, source, chosen, references, keys_of)
            planned = start.facts["planned_steps"]
            until = checkpoint.step + asked.continue_steps
            trained, packed = _train(run, generation, checkpoint, tokenizer, texts, planned, until)
            after = references.losses(trained.checkpoint, run)
            generation.complete(TRAINED_ON_FILE, "", rows=count_rows(keys_of), rows_in=0, counts={})
            _write_training(
                generation,
                trained.checkpoint,
                trained.losses,
                planned,
                rows=packed.documents + packed.empty,
                counts={"trained_on": packed.documents, "no_text": packed.empty},
                more={
                    **{f"{name}_before": loss for name, loss in before.items()},
                    **{f"{name}_after": loss for name, loss in after.items()},
                },
            )
        everywhere = Check("every_snapshot_chosen", not missing, False, {"missing": ", ".join(missing) or "none"})
        told = {"stage": number, "snapshots": sorted(chosen)}
        return _finish(run, generation, told, [TRAINED_ON_FILE], (everywhere,))


def _chosen(run: Run, number: int) -> tuple[dict[str, Published], list[str]]:
    """({snapshot: what the stage chose of it}, snapshots that it has scored and not chosen from)."""
    name = f"stage_{number}/group_mates_selection"
    chosen = {snapshot: run.store.current(name, snapshot) for snapshot in run.store.snapshots(name)}
    begun = run.store.snapshots(f"stage_{number}/influence_scores")
    return chosen, [snapshot for snapshot in begun if snapshot not in chosen]


def chosen_since(store: Store, trained: Published) -> list[str]:
    """The snapshots of which a stage chose otherwise after its continued_model was trained on its choice; of another
    asset none. A snapshot that came later is none of them, nor one of which nothing is published any more."""
    name = f"{trained.asset.rpartition('/')[0]}/group_mates_selection"
    read = {key.removeprefix(_CHOSEN): made for key, made in trained.inputs.items() if key.startswith(_CHOSEN)}
    return [
        snapshot
        for snapshot, made in sorted(read.items())
        if (now := store.published(name, snapshot)) is not None and now.fingerprint != made
    ]


def _texts(
    run: Run, source: Source, chosen: Mapping[str, Published], references: "References", keys_of: Path
) -> Iterator[str | None]:
    """The chosen documents' texts, each proved to be no reference row's; their keys are written to `keys_of`."""
    with table_file(keys_of, _TRAINED_ON) as writer:
        for texts in _chosen_texts(run, source, chosen, references):
            keys = [text_key(text) for text in texts if text]
            writer.write(pa.table({"text_key": keys}, schema=_TRAINED_ON))
            yield from texts


def _chosen_texts(
    run: Run, source: Source, chosen: Mapping[str, Published], references: "References"
) -> Iterator[list[str | None]]:
    told = every_seconds(run.log, "reading what was chosen", "documents")
    total = sum(published.counts.get("kept", 0) for published in chosen.values())
    done = 0
    for snapshot, published in sorted(chosen.items()):
        reader = DocumentReader(source, run.current("raw_shards", snapshot))
        for shard in published.shards:
            cursor = Cursor(published.path(shard), ["doc_id", "selected"], BATCH_ROWS)
            for batch in reader.batches(shard, ["text"]):
                rows, positions = cursor.take(batch.ids)
                kept = positions[rows["selected"].to_numpy()]
                texts, _ = decode_column(batch.rows["text"].take(pa.array(kept)))
                ids = batch.ids.take(pa.array(kept)).to_pylist()
                names = [f"{snapshot}/{doc_id}" for doc_id in ids]
                references.refuse("the documents that were chosen", zip(names, texts, strict=True))
                yield texts
                done += len(texts)
                told(done, total, f"{snapshot} {shard}")
            cursor.end()


def trained_on(published: Published) -> Iterator[list[bytes]]:
    """The keys (`text_key`) of the texts that a language model took its own steps on, some at a time: none for one that
    was given."""
    if published.asset == "warmup_model":
        for table in warmed_up_on(published):
            yield [text_key(text) for text in table["text"].to_pylist() if text]
        return
    for table in read_batches(published.path(TRAINED_ON_FILE), None, BATCH_ROWS):
        yield table["text_key"].to_pylist()


def warmed_up_on(published: Published) -> Iterator[pa.Table]:
    """snapshot, doc_id and text of what the warm-up model was trained on here."""
    path = published.file(WARM_UP_FILE)
    if path.exists():
        with pq.ParquetFile(path) as parquet:
            for batch in parquet.iter_batches(BATCH_ROWS, columns=["snapshot", "doc_id", "text"]):
                yield pa.Table.from_batches([batch])


def _train(
    run: Run,
    generation: Generation,
    start: Checkpoint,
    tokenizer: Tokenizer,
    texts: Iterable[str | None],
    planned: int,
    until: int,
) -> tuple[Pretrained, tokens.Packed]:
    """Take the run from where it is to step `until` of the `planned` on these texts, to go on from where it was killed,
    and save the checkpoint."""
    asked = run.settings.group_mates
    path = generation.work / "sequences.npy"
    packed = tokens.pack(tokenizer, texts, min(asked.context, start.context), path)
    told = every_seconds(run.log, generation.asset, "steps")
    trained = pretrain(
        start,
        tokens.sequences(path),
        training_options(asked, planned),
        until=until,
        folder=generation.work / "training",
        accelerator=run.accelerator,
        progress=lambda step, steps, entry: told(step, steps, f"loss {entry['loss']:.4f}, lr {entry['lr']:.2e}"),
    )
    trained.checkpoint.save(generation.folder / CHECKPOINT, tokenizer)
    return trained, packed


def training_options(asked: GroupMatesSettings, planned: int) -> PretrainingOptions:
    """The one schedule of the warm-up and all stages, which ends with step `planned`. That of a checkpoint that was
    given begins where it is: its own warm-up and its steps, however many, were another's."""
    return PretrainingOptions(
        steps=planned,
        batch=asked.batch,
        lr=asked.lr,
        warmup=0 if asked.checkpoint else max(1, round(_RISING * asked.warmup_steps)),
        schedule=asked.schedule,
        seed=asked.seed,
        begins=planned - asked.stages * asked.continue_steps if asked.checkpoint else 0,
    )


def _write_training(
    generation: Generation,
    checkpoint: Checkpoint,
    losses: np.ndarray,
    planned: int,
    *,
    rows: int,
    counts: Mapping[str, int],
    more: Mapping[str, Any] | None = None,
) -> None:
    """The record that makes the checkpoint beside it count, with its loss curve."""
    write_json(
        generation.folder / TRAINING_FILE,
        {
            "facts": {
                **(more or {}),
                "loss_first": float(losses[0]) if losses.size else None,
                "loss_last": float(losses[-1]) if losses.size else None,
                "steps": int(losses.size),
                "planned_steps": planned,
                **checkpoint.describe(),
            },
            "losses": losses.tolist(),
        },
    )
    generation.keep(CHECKPOINT)
    generation.complete(TRAINING_FILE, "", rows=1, rows_in=rows, counts=counts)


def _finish(
    run: Run, generation: Generation, facts: Mapping[str, Any], others: list[str], checks: tuple[Check, ...] = ()
) -> Outcome:
    records = [record for name in (TRAINING_FILE, *others) if (record := generation.record(name, "")) is not None]
    told = json.loads((generation.folder / TRAINING_FILE).read_text("utf-8"))
    losses = told["losses"]
    return finish(
        generation,
        records,
        "",
        facts={**told["facts"], **facts},
        expected_rows=records[0].rows_in,
        figures=lambda published: _curve(published.asset, told["facts"]["step"], losses) if losses else {},
        checks=checks,
    )


def _curve(asset: str, last: int, losses: list[float]) -> dict[str, bytes]:
    every = max(1, len(losses) // _CURVE_POINTS)
    first = last - len(losses) + 1
    points = [{"step": first + k, "value": losses[k]} for k in range(0, len(losses), every)]
    title, what = f"{asset}: loss of each batch", "training loss (lower is better)"
    return {"training loss": trajectory_figure({"training loss": points}, title=title, what=what)}


def open_checkpoint(published: Published) -> tuple[Tokenizer, Checkpoint]:
    """Tokenizer and checkpoint of a published language model."""
    folder = published.file(CHECKPOINT)
    return tokens.load_tokenizer(str(folder)), load_checkpoint(folder)


@dataclass(frozen=True, eq=False)
class References:
    """The reference set that influence is measured on, the one held out (None where there is none), and their texts,
    which nothing that is probed, trained on or chosen may have."""

    reference: Reference
    held_out: Reference | None
    kept: Kept

    def refuse(self, what: str, rows: Iterable[tuple[str, str | None]]) -> None:
        """Raise OverlapError naming the rows (name, text) that have the text of a reference row."""
        self.kept.refuse(what, rows)

    def losses(self, checkpoint: Checkpoint, run: Run) -> dict[str, float]:
        """{set: mean token loss of the checkpoint on it}."""
        sets = {"reference_loss": self.reference, "held_out_loss": self.held_out}
        # a loss without a step: with whatever moments and rate
        given = ProbeOptions(lr=run.settings.group_mates.lr, fresh_moments=True)
        return {
            name: Prober(checkpoint, found, given, accelerator=run.accelerator, processes=1).base_loss
            for name, found in sets.items()
            if found is not None
        }


def other_sources(made: Mapping[str, Published], settings: Settings) -> list[tuple[str, str]]:
    """(asset, what) of the published assets that were made from another reference set, checkpoint or tokenizer than the
    files that the settings name hold now."""
    found = []
    for name, published in sorted(made.items()):
        now: dict[str, str] = {}
        if name == "warmup_model":
            now = warm_up_identities(settings)
        elif name.endswith(("/rollout_sets", "/continued_model")):
            now = {kind: reference_identities(settings).get(kind, "") for kind in ("reference", "held_out")}
        found += [(name, kind) for kind, identity in now.items() if published.inputs.get(kind, "") != identity]
    return found


def check_reference(settings: Settings) -> None:
    """Raise SettingsError where influence would have nothing to be measured on."""
    if not settings.group_mates.reference:
        raise SettingsError(
            "group_mates.reference is not set: influence is what a document does to the loss on a reference set; set "
            "it to a parquet with the columns prompt and answer, or text"
        )
    reference_identities(settings)


def open_references(settings: Settings, tokenizer: Tokenizer, context: int) -> References:
    """The reference sets as the model sees them. Of one file for both the held-out rows come after the others.

    Raises SettingsError where there is no reference set, OverlapError where the two share a text.
    """
    sets = _reference_sets(settings)
    kept = Kept.of(sets)
    built = {name: build_reference(tokenizer, examples, context) for name, examples in sets.items()}
    return References(built["group_mates.reference"], built.get("group_mates.held_out"), kept)


def reference_texts(settings: Settings) -> Kept:
    """The texts of both reference sets, to look documents up among. Raises as `open_references`."""
    return Kept.of(_reference_sets(settings))


def _reference_sets(settings: Settings) -> dict[str, list[Example]]:
    asked = settings.group_mates
    check_reference(settings)
    limit = asked.reference_documents
    sets = {"group_mates.reference": read_examples(asked.reference, limit, asked.seed)}
    if asked.held_out:
        skip = limit if asked.held_out == asked.reference else 0
        sets["group_mates.held_out"] = read_examples(asked.held_out, limit, asked.seed, skip)
    return sets


def reference_identities(settings: Settings) -> dict[str, str]:
    """What of the reference files goes into fingerprints: their content. Raises SettingsError for one that is not
    there."""
    found = {}
    for name in ("reference", "held_out"):
        path = settings.get(f"group_mates.{name}")
        if path and "://" not in path and not Path(path).exists():
            raise SettingsError(f"group_mates.{name}: {path} does not exist")
        if path:
            found[name] = path if "://" in path else content_revision(Path(path))
    return found
