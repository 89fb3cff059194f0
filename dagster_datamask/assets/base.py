"""From a stage to an asset: config and resources in, metadata and checks out, failures sorted.

The only place that translates between stages and Dagster, so that every asset has the same code version, data version,
row counts, schema, figures and blocking checks.
"""

import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import dagster as dg
import pyarrow as pa

from dagster_datamask.failures import KIND, PERMANENT, TRANSIENT, is_transient, shard_of, told
from dagster_datamask.keyed import digest
from dagster_datamask.partitions import asset_key, cc_snapshot
from dagster_datamask.reporting.tables import png_markdown
from dagster_datamask.resources.accelerator import AcceleratorResource
from dagster_datamask.resources.compute import ComputeResource
from dagster_datamask.resources.config import config_class, effective
from dagster_datamask.resources.models import ModelsResource
from dagster_datamask.resources.pods import op_tags
from dagster_datamask.resources.storage import StorageResource
from dagster_datamask.settings import Settings
from dagster_datamask.shards.engine import peak_memory_mb
from dagster_datamask.shards.generations import Published
from dagster_datamask.shards.source import Source
from dagster_datamask.stages.base import STAGES, Outcome, Run, Stage, lineage, mask_of

Compute = Callable[[Run, Source, str], Outcome]

# hubs and stores that are busy ask for patience, and for not being asked by all at the same moment: about 10, 30 and
# 70 s apart
RETRIES = dg.RetryPolicy(max_retries=3, delay=10, backoff=dg.Backoff.EXPONENTIAL, jitter=dg.Jitter.PLUS_MINUS)

# name, whether it blocks, what it says
_CheckSpec = tuple[str, bool, str]
_OF_A_MASK: tuple[_CheckSpec, ...] = (
    (
        "budget_met_exactly",
        True,
        "The mask keeps exactly the budget, or every survivor where there are fewer; of tokens, never more and less "
        "only by what no document fits into.",
    ),
    ("value_below_bound", True, "The mask's value does not exceed its upper bound: a negative gap is a bug."),
)
CHECKS: dict[str, tuple[_CheckSpec, ...]] = {
    "raw_shards": (("every_shard_readable", False, "No shard of the snapshot was set aside as unreadable."),),
    "quality_scores": (
        ("scorers_vary", False, "No scorer gives nearly all documents one score, or scores that hardly differ."),
    ),
    "text_duplicates": (
        ("every_earlier_snapshot_compared", False, "All earlier snapshots that were begun were compared with."),
        (
            "no_later_snapshot_compared_before",
            False,
            "No later snapshot was compared with another generation of this one, or with none.",
        ),
    ),
    "corpus_selection_state": (
        *_OF_A_MASK,
        ("every_snapshot_embedded", False, "Every snapshot that was begun has its embeddings, and so a part here."),
    ),
    "datamask_masks": _OF_A_MASK,
    "group_mates_selection": _OF_A_MASK[:1],
    **{name: _OF_A_MASK for name in STAGES if name.startswith("baseline_")},
    "influence_model": (
        ("ranks_unseen_documents", False, "Predicted and measured increments of documents not trained on agree."),
    ),
    "rollout_sets": (("every_loss_finite", False, "No step of a rollout led to a loss that is not a number."),),
    "continued_model": (
        ("every_snapshot_chosen", False, "Every snapshot that was scored for this stage is in what it was trained on."),
    ),
    "fineweb_mask_manifest": (
        ("made_under_these_settings", True, "Every input was made under the settings and models now in force."),
        ("kept_equals_budget", True, "As many rows are kept as the budget asks for and the pool can give."),
    ),
    "fineweb_mask": (("rows_equal_kept", True, "As many rows were written as the manifest keeps."),),
    "snapshot_report": (
        ("made_under_these_settings", True, "The snapshot was selected under the settings and models now in force."),
    ),
    "selection_report": (
        ("made_under_these_settings", True, "Every snapshot was selected under the settings now in force."),
        ("every_snapshot_reported", False, "Every snapshot is selected and has a report of what is published now."),
    ),
    "dataset_card": (
        ("reads_back_as_kept", True, "Every exported file, read again, holds what the manifest keeps and no more."),
        ("made_under_these_settings", True, "Every snapshot was selected under the settings now in force."),
        ("every_snapshot_exported", False, "Every snapshot that was begun is finished, and so in the export."),
    ),
}
_EVERY_ASSET: tuple[_CheckSpec, ...] = (
    ("rows_accounted_for", True, "Every row that came in has exactly one outcome: readable rows = sum of decisions."),
)

# columns whose name does not say what they hold, for the UI's table
COLUMN_DESCRIPTIONS = {
    "doc_id": "the document's id; shard#row where it has none",
    "snapshot": "partition",
    "shard": "file the row came from",
    "row": "place in that file, from 0",
    "strategy": "what selected: select.strategy",
    "decision": "what became of the row; null: readable and not decided yet",
    "stage": "asset that decided",
    "reason": "why, where there is more to say",
    "dclm": "DCLM classifier, 0..1",
    "edu": "educational value, about 0..5",
    "wiki": "wiki-reference classifier, 0..1",
    "quality": "combined quality, 0..15",
    "cluster": "nearest frozen centroid",
    "split": "part of the snapshot that was solved together",
    "score": "what the stage computes; in masks and manifest what the document was chosen by",
    "selected": "in the mask",
    "rank": "1 is the best score",
    "kept_id": "document that is kept instead, of which this is a duplicate",
    "kept_snapshot": "the snapshot of that document",
    "text_hash": "BLAKE2b of the text's bytes, 128 bits",
    "evaluation_set": "file of evaluation texts",
    "item": "row of that file, from 0",
    "start": "first character of the document's that is shared",
    "end": "character after the last that is shared",
    "words": "the shared words, as they are compared",
    "similarity": "cosine, with kept_id or the centroid",
    "spans": "bytes of the text, from start to before end, that an earlier one has",
    "bytes": "of the whole text, in UTF-8",
    "removed_bytes": "of these, in spans",
    "removed_tokens": "tokens in spans",
    "first_doc": "the earlier document that has the first span",
    "token_count": "tokens, as the source counts them",
    "mask_score": "what the document was chosen by",
    "embedding": "float16 vector; of e5_embeddings of length 1, of influence_scores one whose products are relations",
    "influence": "predicted change of the reference loss, in standard deviations; the lower the better",
}


@dataclass(frozen=True)
class StageAsset:
    """A stage and the function that runs it; `build` makes the asset for given settings."""

    stage: Stage
    compute: Compute
    # what its metadata tells beyond what every asset's does
    beside: Callable[[Run], dict[str, Any]] = lambda run: {}

    def build(self, settings: Settings) -> dg.AssetsDefinition:
        stage, work = self.stage, self.compute
        partitions = cc_snapshot if stage.partitioned else None

        def asset(
            context: dg.AssetExecutionContext,
            config: dg.Config,
            storage: StorageResource,
            accelerator: AcceleratorResource,
            models: ModelsResource,
            compute: ComputeResource,
        ) -> Iterator[dg.AssetCheckResult | dg.MaterializeResult]:
            started = time.monotonic()
            try:
                used = models.apply(effective(stage, config, settings))
                run = Run(
                    storage.store(),
                    used,
                    settings,
                    accelerator.of(stage, used),
                    context.log.info,
                    compute.compute(context.log.info, storage.root),
                )
                snapshot = context.partition_key if stage.partitioned else ""
                outcome = work(run, storage.documents(), snapshot)
                experiment = used.subset(stage.reads) != settings.subset(stage.reads)
                seconds = time.monotonic() - started
                # reads what was published, from a store that may fail like any other
                results = _results(stage, run, outcome, experiment, seconds, self.beside(run))
            except Exception as error:
                raise _failure(error) from error
            yield from results
            if outcome.published is None:
                raise _refused(stage, outcome)

        # Dagster reads the config's fields from the annotation, and they are this stage's settings
        asset.__annotations__["config"] = config_class(stage, settings)
        return dg.asset(
            key=asset_key(stage.name),
            description=stage.about,
            group_name=stage.group,
            deps=[asset_key(name) for name in stage.needs(settings)],
            partitions_def=partitions,
            code_version=code_version(stage, settings),
            owners=["team:datamask"],
            kinds={_kind(stage)},
            pool=_pool(stage, settings),
            op_tags=op_tags(stage, settings),
            check_specs=_check_specs(stage),
            retry_policy=RETRIES,
        )(asset)


def _pool(stage: Stage, settings: Settings) -> str | None:
    """What runs at the same time take in turn: the accelerator, and room for a model in their machine's memory."""
    if stage.on_accelerator:
        return "gpu"
    # pods and Ray's workers have memory of their own, by compute.requests
    on_this_machine = settings.compute.backend == "local" and settings.compute.executor == "in_process"
    return "model" if stage.loads_fasttext and on_this_machine else None


def _kind(stage: Stage) -> str:
    """What the UI's badge says that an asset is made with or of."""
    if stage.on_accelerator:
        return "torch"
    if stage.name.endswith("_classifier"):
        return "fasttext"
    return "html" if stage.group == "reports" else "parquet"


def _failure(error: Exception) -> dg.Failure:
    """What the UI shows of an error, and whether Dagster and the sensor retry_failed_snapshots try again."""
    transient = is_transient(error)
    metadata: dict[str, Any] = {KIND: TRANSIENT if transient else PERMANENT}
    shard = shard_of(error)
    if shard is not None:
        metadata["shard"] = shard
    return dg.Failure(told(error), metadata=metadata, allow_retries=transient)


def code_version(stage: Stage, settings: Settings) -> str:
    """The stage's own version and a hash over its code and settings and those of all it is made from.

    Dagster compares an asset with its direct parents' data alone, so a change far up would show only where it is read;
    with the whole line in the version, all that follows shows as stale, and nothing else.
    """
    line = {name: STAGES[name].code_version(settings) for name in lineage([stage.name], settings)}
    return f"{stage.version}-{digest(json.dumps(line, sort_keys=True), size=6).hex()}"


def _check_specs(stage: Stage) -> list[dg.AssetCheckSpec]:
    with warnings.catch_warnings():
        # partitioned checks are a preview; without them a check does not say which snapshot it is about
        warnings.simplefilter("ignore", dg.PreviewWarning)
        return [
            dg.AssetCheckSpec(
                name,
                asset=asset_key(stage.name),
                description=description,
                blocking=blocking,
                partitions_def=cc_snapshot if stage.partitioned else None,
            )
            for name, blocking, description in _EVERY_ASSET + CHECKS.get(stage.name.rpartition("/")[2], ())
        ]


def stage_asset(name: str, beside: Callable[[Run], dict[str, Any]] = lambda run: {}) -> Callable[[Compute], StageAsset]:
    """Decorate `(run, source, snapshot) -> Outcome` as the asset of a stage; `beside(run)` is further metadata."""
    return lambda compute: StageAsset(STAGES[name], compute, beside)


def _results(
    stage: Stage, run: Run, outcome: Outcome, experiment: bool, seconds: float, beside: dict[str, Any]
) -> list[dg.AssetCheckResult | dg.MaterializeResult]:
    checks = [
        dg.AssetCheckResult(
            check_name=check.name,
            passed=check.passed,
            severity=dg.AssetCheckSeverity.ERROR if check.blocking else dg.AssetCheckSeverity.WARN,
            # with all digits: a value above its bound may be so in the last of them
            metadata={name: value for name, value in check.facts.items() if value is not None},
        )
        for check in outcome.checks
    ]
    if outcome.published is None:
        # no materialisation: a generation that a blocking check refused was not published
        return [*checks]
    return [
        dg.MaterializeResult(
            metadata=_metadata(stage, run, outcome, outcome.published, experiment, seconds) | beside,
            data_version=dg.DataVersion(outcome.published.fingerprint),
            check_results=checks,
        )
    ]


def _refused(stage: Stage, outcome: Outcome) -> dg.Failure:
    failed = [check for check in outcome.checks if check.blocking and not check.passed]
    return dg.Failure(
        f"{stage.name} was not published: " + "; ".join(f"{check.name}: {_in_words(check.facts)}" for check in failed),
        metadata={KIND: PERMANENT},
        allow_retries=False,
    )


def _metadata(
    stage: Stage, run: Run, outcome: Outcome, published: Published, experiment: bool, seconds: float
) -> dict[str, Any]:
    # the UI keeps this order: results and figures, then what they were made from
    facts = dict(sorted(_facts(outcome.facts).items(), key=lambda fact: (_lines(fact[1]), _place(fact[0]))))
    metadata: dict[str, Any] = {"dagster/row_count": published.rows, **facts}
    metadata |= {name: dg.MetadataValue.md(png_markdown(png, name)) for name, png in outcome.figures.items()}
    metadata["rows_in"] = outcome.rows_in
    metadata |= {f"rows/{reason}": rows for reason, rows in outcome.counts.items()}
    metadata["experiment"] = experiment
    settings = run.settings.subset(stage.reads)
    if settings:
        metadata["settings"] = _table(settings)
    if stage.on_accelerator:
        device = run.accelerator.describe()
        limit = f", at most {device['memory_limit_gb']} GB" if device["memory_limit_gb"] else ""
        metadata["accelerator"] = f"{device['device']} ({device['device_name']}), {device['dtype']}{limit}"
    if published.ext == ".html":
        metadata["page"] = dg.MetadataValue.path(f"{published.where}/{published.shards[0]}{published.ext}")
    metadata |= {
        "path": dg.MetadataValue.path(published.where),
        "fingerprint": published.fingerprint,
        "seconds": round(seconds, 3),
        "peak_memory_mb": round(peak_memory_mb(), 1),
    }
    schema = published.schema()
    if schema is not None:
        metadata["dagster/column_schema"] = dg.TableSchema(
            columns=[
                dg.TableColumn(field.name, str(field.type), COLUMN_DESCRIPTIONS.get(field.name)) for field in schema
            ]
        )
        lineage = _lineage(stage, schema, mask_of(run.settings))
        if lineage:
            metadata["dagster/column_lineage"] = dg.TableColumnLineage(lineage)
    return metadata


# what is looked for first, in this order; all else follows as the stage tells it
_FIRST = (
    *("kept", "budget", "unit", "short_by", "value", "upper_bound", "gap", "share", "baseline", "quality_raw"),
    *("spearman_within", "spearman_pooled", "spearman_shuffled", "spearman_shuffled_within"),
)
# of a fraction in the UI: a bound and a value still differ where their gap is 1e-7
_DIGITS = 8
_IN_FIGURES = ("trajectories", "report", "histogram")


def _facts(facts: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Numbers and short texts as they are, so that Dagster plots them; records as tables. What figures show is out."""
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        if value is None:
            continue
        if name == "certificate":
            flat |= _facts({k: v for k, v in value.items() if k != "feasible_set"})
        elif isinstance(value, float):
            flat[f"{prefix}{name}"] = _to_digits(value, _DIGITS)
        elif isinstance(value, bool | int | str):
            flat[f"{prefix}{name}"] = value
        elif name == "beside":
            flat |= _facts(value, "beside/")
        elif name not in _IN_FIGURES and value:
            flat[f"{prefix}{name}"] = _nested(value)
    return flat


def _place(name: str) -> int:
    return _FIRST.index(name) if name in _FIRST else len(_FIRST)


def _lines(value: Any) -> int:
    """How much room a fact takes: the longest table comes last."""
    return len(value.records) if isinstance(value, dg.TableMetadataValue) else 0


def _nested(value: Any) -> dg.MetadataValue:
    if isinstance(value, dict):
        if not all(isinstance(part, dict) for part in value.values()):
            return _table(_legible(value))
        value = [{"name": name, **part} for name, part in value.items()]
    if isinstance(value[0], dict):
        # what a row is about comes first: a record that was a file has its names in alphabetical order
        texts = {name for name, part in value[0].items() if isinstance(part, str)}
        rows = [dict(sorted(row.items(), key=lambda item: item[0] not in texts)) for row in value]
        return dg.MetadataValue.table([dg.TableRecord(_legible(row)) for row in rows])
    return dg.MetadataValue.text(
        ", ".join(str(_to_digits(part, _DIGITS) if isinstance(part, float) else part) for part in value)
    )


def _legible(row: dict[str, Any]) -> dict[str, Any]:
    """A record with its fractions to six digits: a table is read, and nothing is plotted from it."""
    return {name: _to_digits(value, 6) if isinstance(value, float) else value for name, value in row.items()}


def _to_digits(value: float, digits: int) -> float:
    """A fraction as people read it; what is published keeps all its digits."""
    return float(f"{value:.{digits}g}")


def _table(record: dict[str, Any]) -> dg.TableMetadataValue:
    rows = {name: value for name, value in record.items() if name not in _IN_FIGURES}
    return dg.MetadataValue.table(
        [
            dg.TableRecord({"name": name, "value": value if isinstance(value, str) else json.dumps(value)})
            for name, value in rows.items()
        ]
    )


# which column of which input a column comes from, beyond doc_id, which comes from raw_shards everywhere
_COLUMN_LINEAGE: dict[str, dict[str, tuple[tuple[str, str], ...]]] = {
    "quality_scores": {"score": (("dclm_scores", "score"), ("edu_scores", "score"), ("wiki_scores", "score"))},
    "pruned_documents": {"quality": (("quality_scores", "score"),), "decision": (("raw_shards", "decision"),)},
    "kmeans_clusters": {"cluster": (("e5_embeddings", "embedding"),), "similarity": (("e5_embeddings", "embedding"),)},
    "datamask_masks": dict.fromkeys(
        ("selected", "score", "rank"), (("e5_embeddings", "embedding"), ("pruned_documents", "quality"))
    ),
    "fineweb_mask_manifest": {
        "row": (("raw_shards", "row"),),
        "decision": (("pruned_documents", "decision"), ("datamask_masks", "selected"), ("e5_embeddings", "reason")),
        "reason": (("pruned_documents", "reason"), ("datamask_masks", "reason"), ("e5_embeddings", "reason")),
        "dclm": (("dclm_scores", "score"),),
        "edu": (("edu_scores", "score"),),
        "wiki": (("wiki_scores", "score"),),
        "quality": (("pruned_documents", "quality"),),
        "cluster": (("kmeans_clusters", "cluster"),),
        "split": (("datamask_masks", "split"),),
        "score": (("datamask_masks", "score"),),
        "token_count": (("raw_shards", "token_count"),),
    },
    "fineweb_mask": {
        column: (("fineweb_mask_manifest", "score" if column == "mask_score" else column),)
        for column in ("dclm", "edu", "wiki", "quality", "cluster", "split", "mask_score")
    },
}


def _lineage(stage: Stage, schema: pa.Schema, mask: str) -> dict[str, list[dg.TableColumnDep]]:
    """mask: the asset whose mask the manifest keeps."""
    sources = dict(_COLUMN_LINEAGE.get(stage.name, {}))
    if "raw_shards" in stage.inputs:
        sources["doc_id"] = (("raw_shards", "doc_id"),)
    return {
        column: [
            dg.TableColumnDep(asset_key=asset_key(mask if asset == "datamask_masks" else asset), column_name=name)
            for asset, name in origins
        ]
        for column, origins in sources.items()
        if column in schema.names
    }


def _in_words(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())
