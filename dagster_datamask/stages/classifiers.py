"""dclm_classifier, edu_classifier, wiki_classifier, ultra_classifier: each model found or trained, and frozen.

Each is an asset of its own, so that a new model makes exactly its scores stale. Also the way back: `open_scorer` gives
the published classifier as a Scorer. What a classifier computes is `scoring`'s.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dagster_datamask.accelerator import Accelerator
from dagster_datamask.reporting.figures import calibration_figure
from dagster_datamask.scoring.base import Scorer
from dagster_datamask.scoring.card import CARD_FILE, library_versions, model_card
from dagster_datamask.scoring.encoders import Encoder, EncoderSpec, encoder_spec
from dagster_datamask.scoring.fasttext_scorer import FastTextScorer
from dagster_datamask.scoring.models import ModelUnavailable, ResolvedModel, content_revision, resolve_model
from dagster_datamask.scoring.parallel import FastTextProcesses
from dagster_datamask.scoring.regression import EmbeddingHeadScorer, Head, TransformersRegressionScorer, WindowedScorer
from dagster_datamask.scoring.training import (
    DIMENSION,
    TrainingReport,
    head_targets,
    read_labels,
    train_embedding_head,
    train_fasttext,
)
from dagster_datamask.settings import Settings, SettingsError
from dagster_datamask.shards.generations import Generation, Published, ShardRecord
from dagster_datamask.shards.writer import atomic, file_sha256
from dagster_datamask.stages.base import STAGES, Outcome, Run, finish

TRAINED = "trained"
_TRAINING_SEED = 0
# fewer are scored before a further process has started
_ROWS_WORTH_A_PROCESS = 1024
# a demo's thousand texts fill DCLM's 100 dimensions with noise and 120 MB
_DEMO_DIMENSION = 16


@dataclass(frozen=True)
class _Convention:
    """What a fastText classifier was published with: its negative label, and the form of its texts."""

    negative_label: str
    normaliser: str


# RedPajama joins lines for its wiki reference as DCLM does
_FASTTEXT = {
    "dclm": _Convention("cc", "dclm"),
    "wiki": _Convention("cc", "dclm"),
    "ultra": _Convention("neg", "ultra_fineweb"),
}


def classifier_of(part: str) -> str:
    """The asset that holds the classifier `part` ("dclm", "edu", "wiki", "ultra")."""
    return f"{part}_classifier"


def edu_encoder(settings: Settings) -> EncoderSpec:
    """The encoder under a trained Edu head, cut at score.edu_max_tokens."""
    spec = encoder_spec(settings.models.encoder, settings.models.encoder_prefix)
    return encoder_spec(
        settings.models.encoder,
        settings.models.encoder_prefix,
        min(settings.score.edu_max_tokens, spec.max_length),
        backend=settings.embed.backend,
    )


def precision(accelerator: Accelerator) -> str:
    """What of a device shows in the bits of a forward pass."""
    return f"{'cuda' if accelerator.is_cuda else 'cpu'} {accelerator.dtype}"


def classifier(run: Run, part: str) -> Outcome:
    """Publish the classifier `part`: the file and the model card of one trained here, or the other's revision.

    Its facts name the conventions its scores are made by. Raises ModelUnavailable for a model that cannot be had,
    SettingsError for labels that are not set.
    """
    stage = STAGES[classifier_of(part)]
    settings = run.settings
    source = _source_of(settings, part)
    with run.generation(stage, None, classifier_inputs(settings, part, run.accelerator)) as generation:
        records: list[ShardRecord] = []
        ref = settings.get(f"models.{part}")
        fact: dict[str, Any] = {
            "trained": source.trained,
            # a path of this machine would make published files differ from machine to machine
            "ref": _name(ref),
            "demo_model": settings.profile == "demo" and source.trained,
            "revision": source.identity,
            **_conventions(settings, part),
        }
        if source.trained:
            run.log(f"{stage.name}: training from {source.labels}")
            record, report = _train(run, generation, part, source.labels)
            fact |= {
                "file": record.file,
                "revision": f"sha256:{record.sha256}",
                "data": _name(source.labels),
                "data_revision": source.identity,
                "seed": report["seed"],
                **{f"heldout_{name}": report[name] for name in ("auc", "precision", "recall", "calibration_error")},
                "labels": report["labels"],
                "libraries": library_versions(report["kind"]),
                "report": report,
            }
            records = [record, _card(generation, stage.name, fact)]
        return finish(
            generation,
            records,
            "",
            facts=fact,
            expected_rows=sum(record.rows_in for record in records),
            figures=lambda published: {"held-out rows": _held_out_figure(part, fact)} if "report" in fact else {},
        )


def made_by(fact: Mapping[str, Any]) -> str:
    """Where a published classifier's model comes from, for people."""
    if fact["demo_model"]:
        return "demo model"
    return "trained here" if fact["trained"] else "published"


def card_of(published: Published) -> str | None:
    """The model card of a classifier that was trained here."""
    return published.path(CARD_FILE).read_text("utf-8") if published.facts["trained"] else None


def _held_out_figure(part: str, fact: Mapping[str, Any]) -> bytes:
    report = fact["report"]
    auc = "" if report["auc"] is None else f", AUC {report['auc']:.3f}"
    return calibration_figure(
        report["calibration"], report["confusion"], title=f"{part} ({made_by(fact)}) on held-out rows{auc}"
    )


def _conventions(settings: Settings, part: str) -> dict[str, Any]:
    if part == "edu":
        return {"max_tokens": settings.score.edu_max_tokens, "windows": settings.score.edu_windows}
    return {"positive_label": settings.get(f"models.{part}_label"), "normaliser": _FASTTEXT[part].normaliser}


def _name(ref: str) -> str:
    return Path(ref).name if Path(ref).is_absolute() else ref


def classifier_inputs(settings: Settings, part: str, accelerator: Accelerator) -> dict[str, str]:
    """What a classifier's fingerprint is made of: the model's or label file's revision, and how texts are read.

    Raises as `classifier` does.
    """
    source = _source_of(settings, part)
    inputs = {"labels" if source.trained else "model": source.identity}
    if part == "edu" and source.trained:
        inputs["encoder"] = edu_encoder(settings).identity
        inputs["precision"] = precision(accelerator)
    if part == "ultra":
        inputs["tokenizer"] = _ultra_tokenizer(settings).revision
    if settings.profile == "demo" and source.trained:
        inputs["profile"] = "demo"
    return inputs


def _ultra_tokenizer(settings: Settings) -> ResolvedModel:
    return resolve_model(settings.models.ultra_tokenizer, filename="tokenizer.json", setting="ultra_tokenizer")


@dataclass(frozen=True)
class _Source:
    trained: bool
    identity: str
    labels: str = ""


def _source_of(settings: Settings, part: str) -> _Source:
    ref = settings.get(f"models.{part}")
    if ref != TRAINED:
        return _Source(False, resolve_model(ref, setting=part).revision)
    labels = settings.get(f"score.{part}_labels")
    if not labels:
        raise SettingsError(
            f"models.{part} = 'trained' needs score.{part}_labels, a parquet file with the columns text and label; "
            f"set it, or set models.{part} to a model"
        )
    if "://" not in labels and not Path(labels).exists():
        raise SettingsError(f"score.{part}_labels: {labels} does not exist")
    return _Source(True, content_revision(Path(labels)) if "://" not in labels else labels, labels)


def _train(run: Run, generation: Generation, part: str, labels: str) -> tuple[ShardRecord, dict[str, Any]]:
    name = f"{part}.json" if part == "edu" else f"{part}.bin"
    record = generation.record(name, "")
    if record is None:
        texts, targets = read_labels(labels)
        fit = _fit_head if part == "edu" else _fit_fasttext
        with atomic(generation.folder / name) as temp:
            report = fit(run, part, texts, targets, temp)
        rows = report.n_train + report.n_heldout
        record = generation.complete(
            name,
            "",
            rows=rows,
            rows_in=len(texts),
            counts={"trained_on": report.n_train, "held_out": report.n_heldout, "no_text": len(texts) - rows},
            source=report.to_dict(),
        )
    return record, record.source


def _card(generation: Generation, name: str, fact: Mapping[str, Any]) -> ShardRecord:
    record = generation.record(CARD_FILE, "")
    if record is None:
        text = model_card(
            name,
            fact["report"],
            data=fact["data"],
            data_revision=fact["data_revision"],
            model_revision=fact["revision"],
        )
        with atomic(generation.folder / CARD_FILE) as temp:
            temp.write_text(text, "utf-8")
        record = generation.complete(CARD_FILE, "", rows=0, rows_in=0, counts={})
    return record


def _fit_fasttext(run: Run, part: str, texts: list, targets: list, out: Path) -> TrainingReport:
    convention = _FASTTEXT[part]
    # fastText decides by the suffix whether it quantises, so it writes beside and the whole file is moved
    model = out.with_name(out.name + ".bin")
    try:
        report = train_fasttext(
            texts,
            targets,
            model,
            positive_label=run.settings.get(f"models.{part}_label").removeprefix("__label__"),
            negative_label=convention.negative_label,
            seed=_TRAINING_SEED,
            dim=_DEMO_DIMENSION if run.settings.profile == "demo" else DIMENSION,
            normaliser=convention.normaliser,
            tokenizer=_ultra_tokenizer(run.settings).path if part == "ultra" else None,
        )
        model.replace(out)
    finally:
        model.unlink(missing_ok=True)
    return report


def _fit_head(run: Run, part: str, texts: list, targets: list, out: Path) -> TrainingReport:
    # the file's rows are named, and before the costly part
    wanted = head_targets(targets)
    encoder = Encoder(edu_encoder(run.settings), run.accelerator, run.settings.embed.batch_tokens)
    encoded = encoder.encode(texts)
    kept = [i for i, reason in enumerate(encoded.reasons) if reason is None]
    head, report = train_embedding_head(
        encoded.vectors[kept],
        wanted[kept],
        texts=[texts[i] for i in kept],
        encoder=encoder.spec.identity,
        seed=_TRAINING_SEED,
    )
    head.save(out)
    return replace(report, n_without_text=len(texts) - len(kept))


def open_scorer(published: Published, settings: Settings, accelerator: Accelerator) -> Scorer:
    """The published classifier.

    Raises ModelUnavailable if what was resolved when the classifier was published is gone or has changed.
    """
    part, fact = _part(published), published.facts
    if part != "edu":
        return FastTextScorer(**_fasttext(published, settings))
    if fact["trained"]:
        encoder = Encoder(edu_encoder(settings), accelerator, settings.embed.batch_tokens)
        head = EmbeddingHeadScorer(encoder, Head.load(_model(published, settings)))
        return _windowed(head, encoder.spec.path, encoder.spec.max_length, encoder.spec.prefix, fact)
    path = _model(published, settings)
    model = TransformersRegressionScorer(path, accelerator, settings.score.edu_max_tokens)
    return _windowed(model, path, model.max_length, "", fact)


@contextmanager
def scorer_for(published: Published, settings: Settings, accelerator: Accelerator, rows: int) -> Iterator[Scorer]:
    """`open_scorer`'s, for `rows` texts: fastText over compute.processes processes, where they have enough to do."""
    processes = min(settings.compute.processes or len(os.sched_getaffinity(0)), rows // _ROWS_WORTH_A_PROCESS)
    if _part(published) == "edu" or processes < 2:
        yield open_scorer(published, settings, accelerator)
    else:
        with FastTextProcesses(processes, **_fasttext(published, settings)) as scorer:
            yield scorer


def _part(published: Published) -> str:
    return published.asset.removesuffix(classifier_of(""))


def _fasttext(published: Published, settings: Settings) -> dict[str, Any]:
    tokenizer = None
    if "tokenizer" in published.inputs:
        found = _ultra_tokenizer(settings)
        tokenizer = _unchanged(found, published.inputs["tokenizer"], published.asset, "ultra_tokenizer")
    return {
        "path": _model(published, settings),
        "positive_label": published.facts["positive_label"],
        "normaliser": published.facts["normaliser"],
        "tokenizer": tokenizer,
    }


def _model(published: Published, settings: Settings) -> Path:
    if published.facts["trained"]:
        path = published.path(published.facts["file"])
        # damaged weights of the right size load, and score
        if f"sha256:{file_sha256(path)}" != published.facts["revision"]:
            raise ModelUnavailable(
                f"{path} is not the file that {published.asset} was published with: it was damaged or replaced; remove "
                f"it and materialise {published.asset} again"
            )
        return path
    part = _part(published)
    found = resolve_model(settings.get(f"models.{part}"), setting=part)
    return _unchanged(found, published.facts["revision"], published.asset, part)


def _windowed(scorer: Scorer, path: Path, max_length: int, prefix: str, fact: Mapping[str, Any]) -> Scorer:
    return scorer if fact["windows"] == "first" else WindowedScorer(scorer, path, max_length, prefix)


def _unchanged(found: ResolvedModel, revision: str, asset: str, setting: str) -> Path:
    if found.revision != revision:
        raise ModelUnavailable(
            f"models.{setting}: {found.ref} is now {found.revision}, but {asset} was published with {revision}; "
            f"materialise {asset} again"
        )
    return found.path


def scorer_identity(published: Published, accelerator: Accelerator) -> str:
    """What of a classifier its scores' fingerprint holds: its revision, how texts are read, a network's precision."""
    parts = [published.facts["revision"]]
    if published.asset == classifier_of("edu"):
        parts.append(precision(accelerator))
    if "tokenizer" in published.inputs:
        parts.append(published.inputs["tokenizer"])
    return " ".join(parts)
