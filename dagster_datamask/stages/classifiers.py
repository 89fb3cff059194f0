"""quality_classifiers: the three quality models, found or trained, frozen under one fingerprint.

Also the way back: `open_scorer` gives the published classifier as a Scorer. What a classifier computes is `scoring`'s.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dagster_datamask.accelerator import Accelerator
from dagster_datamask.reporting.figures import calibration_figure
from dagster_datamask.scoring.base import Scorer
from dagster_datamask.scoring.encoders import Encoder, EncoderSpec, encoder_spec
from dagster_datamask.scoring.fasttext_scorer import FastTextScorer
from dagster_datamask.scoring.models import ModelUnavailable, content_revision, resolve_model
from dagster_datamask.scoring.quality import PARTS
from dagster_datamask.scoring.regression import EmbeddingHeadScorer, Head, TransformersRegressionScorer
from dagster_datamask.scoring.training import (
    DIMENSION,
    TrainingReport,
    read_labels,
    train_embedding_head,
    train_fasttext,
)
from dagster_datamask.settings import Settings, SettingsError
from dagster_datamask.shards.generations import Generation, Published, ShardRecord
from dagster_datamask.shards.writer import atomic
from dagster_datamask.stages.base import STAGES, Outcome, Run, finish

TRAINED = "trained"
_TRAINING_SEED = 0
_FASTTEXT_LABELS = {"dclm": "models.dclm_label", "wiki": "models.wiki_label"}
_NEGATIVE_LABEL = "cc"
# a demo's thousand texts fill DCLM's 100 dimensions with noise and 120 MB
_DEMO_DIMENSION = 16


def edu_encoder(settings: Settings) -> EncoderSpec:
    """The encoder under a trained Edu head, cut at score.edu_max_tokens."""
    spec = encoder_spec(settings.models.encoder, settings.models.encoder_prefix)
    return encoder_spec(
        settings.models.encoder,
        settings.models.encoder_prefix,
        min(settings.score.edu_max_tokens, spec.max_length),
    )


def precision(accelerator: Accelerator) -> str:
    """What of a device shows in the bits of a forward pass."""
    return f"{'cuda' if accelerator.is_cuda else 'cpu'} {accelerator.dtype}"


def quality_classifiers(run: Run) -> Outcome:
    """Publish `dclm`, `edu` and `wiki`: model files for those trained here, and facts that name the others' revision.

    Raises ModelUnavailable for a model that cannot be had, SettingsError for labels that are not set.
    """
    stage = STAGES["quality_classifiers"]
    settings = run.settings
    sources = {part: _source_of(settings, part) for part in PARTS}
    inputs = classifier_inputs(settings, run.accelerator)
    with run.generation(stage, None, inputs) as generation:
        records: list[ShardRecord] = []
        facts: dict[str, Any] = {}
        for part, source in sources.items():
            fact: dict[str, Any] = {
                "kind": "edu" if part == "edu" else "fasttext",
                "trained": source["trained"],
                # a path of this machine would make published files differ from machine to machine
                "ref": Path(ref).name if Path(ref := settings.get(f"models.{part}")).is_absolute() else ref,
                "demo_model": settings.profile == "demo" and source["trained"],
                "revision": source["identity"],
                "positive_label": settings.get(_FASTTEXT_LABELS[part]) if part in _FASTTEXT_LABELS else None,
            }
            if source["trained"]:
                run.log(f"quality_classifiers: training {part} from {source['labels']}")
                record, report = _train(run, generation, part, source["labels"])
                records.append(record)
                fact |= {"file": record.file, "report": report, "revision": f"sha256:{record.sha256}"}
            facts[part] = fact
        return finish(
            generation,
            records,
            "",
            facts=facts,
            expected_rows=sum(record.rows_in for record in records),
            figures=lambda published: {
                f"{part}: held-out rows": _held_out_figure(part, fact)
                for part, fact in facts.items()
                if "report" in fact
            },
        )


def made_by(fact: Mapping[str, Any]) -> str:
    """Where a published classifier's model comes from, for people."""
    if fact["demo_model"]:
        return "demo model"
    return "trained here" if fact["trained"] else "published"


def _held_out_figure(part: str, fact: Mapping[str, Any]) -> bytes:
    report = fact["report"]
    auc = "" if report["auc"] is None else f", AUC {report['auc']:.3f}"
    return calibration_figure(
        report["calibration"], report["confusion"], title=f"{part} ({made_by(fact)}) on held-out rows{auc}"
    )


def classifier_inputs(settings: Settings, accelerator: Accelerator) -> dict[str, str]:
    """What the classifiers' fingerprint is made of: each model's or label file's revision, and how vectors are made."""
    sources = {part: _source_of(settings, part) for part in PARTS}
    inputs: dict[str, str] = {part: source["identity"] for part, source in sources.items()}
    if sources["edu"]["trained"]:
        inputs["encoder"] = edu_encoder(settings).identity
        inputs["precision"] = precision(accelerator)
    if settings.profile == "demo":
        inputs["profile"] = "demo"
    return inputs


def _source_of(settings: Settings, part: str) -> dict[str, Any]:
    ref = settings.get(f"models.{part}")
    if ref != TRAINED:
        return {"trained": False, "identity": resolve_model(ref, setting=part).revision}
    labels = settings.get(f"score.{part}_labels")
    if not labels:
        raise SettingsError(
            f"models.{part} = 'trained' needs score.{part}_labels, a parquet file with the columns text and label; "
            f"set it, or set models.{part} to a model"
        )
    if "://" not in labels and not Path(labels).exists():
        raise SettingsError(f"score.{part}_labels: {labels} does not exist")
    identity = content_revision(Path(labels)) if "://" not in labels else labels
    return {"trained": True, "labels": labels, "identity": identity}


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


def _fit_fasttext(run: Run, part: str, texts: list, targets: list, out: Path) -> TrainingReport:
    # fastText decides by the suffix whether it quantises, so it writes beside and the whole file is moved
    model = out.with_name(out.name + ".bin")
    try:
        report = train_fasttext(
            texts,
            targets,
            model,
            positive_label=run.settings.get(_FASTTEXT_LABELS[part]).removeprefix("__label__"),
            negative_label=_NEGATIVE_LABEL,
            seed=_TRAINING_SEED,
            dim=_DEMO_DIMENSION if run.settings.profile == "demo" else DIMENSION,
        )
        model.replace(out)
    finally:
        model.unlink(missing_ok=True)
    return report


def _fit_head(run: Run, part: str, texts: list, targets: list, out: Path) -> TrainingReport:
    encoder = Encoder(edu_encoder(run.settings), run.accelerator, run.settings.embed.batch_tokens)
    encoded = encoder.encode(texts)
    kept = [i for i, reason in enumerate(encoded.reasons) if reason is None]
    head, report = train_embedding_head(
        encoded.vectors[kept],
        [targets[i] for i in kept],
        texts=[texts[i] for i in kept],
        encoder=encoder.spec.identity,
        seed=_TRAINING_SEED,
    )
    head.save(out)
    return report


def open_scorer(part: str, classifiers: Published, settings: Settings, accelerator: Accelerator) -> Scorer:
    """The published classifier `part` ("dclm", "edu", "wiki").

    Raises ModelUnavailable if a model that was resolved when the classifiers were published is gone or has changed.
    """
    fact = classifiers.facts[part]
    if fact["trained"]:
        path = classifiers.folder / fact["file"]
        if part == "edu":
            encoder = Encoder(edu_encoder(settings), accelerator, settings.embed.batch_tokens)
            return EmbeddingHeadScorer(encoder, Head.load(path))
    else:
        found = resolve_model(settings.get(f"models.{part}"), setting=part)
        if found.revision != fact["revision"]:
            raise ModelUnavailable(
                f"models.{part}: {found.ref} is now {found.revision}, but quality_classifiers were published with "
                f"{fact['revision']}; run the job fit_global again"
            )
        path = found.path
    if part == "edu":
        return TransformersRegressionScorer(path, accelerator, settings.score.edu_max_tokens)
    return FastTextScorer(path, settings.get(_FASTTEXT_LABELS[part]))


def scorer_identity(part: str, classifiers: Published, accelerator: Accelerator) -> str:
    """What of the classifiers one scorer's fingerprint holds: its own revision, and for a network the precision."""
    revision = classifiers.facts[part]["revision"]
    return f"{revision} {precision(accelerator)}" if part == "edu" else revision
