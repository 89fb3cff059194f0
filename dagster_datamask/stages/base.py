"""What every stage shares: its declaration, its inputs resolved once and proved to belong together, its outcome.

`STAGES` is the table of the system: name, code version, settings read, inputs. Fingerprints, Dagster's code versions,
the Launchpad's fields and the manifest's settings check all come from it, so they cannot disagree.
"""

import difflib
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from dagster_datamask.accelerator import Accelerator
from dagster_datamask.compute.base import INLINE, Compute, Inline, Poisoned, Requests, Told, own_threads
from dagster_datamask.compute.local import Processes
from dagster_datamask.keyed import digest
from dagster_datamask.settings import STRATEGIES, Settings, SettingsError
from dagster_datamask.shards.engine import Given, Kernel, Progress, Reader, each_shard, every_seconds, map_shards
from dagster_datamask.shards.generations import Generation, NotPublished, Published, ShardRecord, Store, total_counts
from dagster_datamask.shards.schemas import InconsistentFiles
from dagster_datamask.shards.writer import ROW_GROUP_ROWS

# Read by a stage, but identified by content: the fingerprint holds the revision of what the path or hub id names, so
# a moved folder changes nothing; and what is set aside of the one snapshot, so that the others stay as they are.
_LOCATIONS = frozenset(
    {
        "models.encoder",
        "models.dclm",
        "models.wiki",
        "models.edu",
        "models.ultra",
        "models.ultra_tokenizer",
        "score.dclm_labels",
        "score.wiki_labels",
        "score.edu_labels",
        "score.ultra_labels",
        "export.tokenizer",
        "source.tokenizer",
        "source.set_aside",
        "clean.evaluation_sets",
        "baselines.gneissweb_categories",
        "group_mates.checkpoint",
        "group_mates.tokenizer",
        "group_mates.reference",
        "group_mates.held_out",
    }
)


@dataclass(frozen=True)
class Stage:
    """A stage's declaration. `version` is raised by hand when its code gives other bytes for equal inputs."""

    name: str
    version: str
    reads: tuple[str, ...]
    inputs: tuple[str, ...]
    group: str
    about: str
    partitioned: bool = True
    on_accelerator: bool = False
    # whether that is where its shards are worked on, be it another machine, rather than in the run's own process
    device_in_workers: bool = False
    # whether it loads a fastText model, some of which take gigabytes of the machine's memory
    loads_fasttext: bool = False
    # of a Group-MATES stage, from 1; 0 for what belongs to none
    number: int = 0
    # rows from which on processes of this machine save more than their start costs, half a second of a core to three
    # each, most of it imports; None: never, as it uses all cores by itself or has little to do
    rows_worth_processes: int | None = None
    # what is read under some settings alone
    optional: tuple[tuple[str, Callable[[Settings], bool]], ...] = ()

    def needs(self, settings: Settings) -> tuple[str, ...]:
        """The inputs under these settings: what is read, depended on in Dagster, and part of the code version."""
        return self.inputs + tuple(name for name, wanted in self.optional if wanted(settings))

    def code_version(self, settings: Settings) -> str:
        """Dagster's code version: the stage's own, and the hash of the settings it reads."""
        return f"{self.version}-{settings.hash(self.reads)}"

    def identity(self, settings: Settings) -> dict[str, Any]:
        """The settings that enter the fingerprint."""
        return settings.subset(key for key in self.reads if key not in _LOCATIONS)


_SELECT = tuple(
    f"select.{name}"
    for name in (
        "lambda",
        "objective",
        "budget",
        "quota",
        "scope",
        "solver",
        "scale",
        "group",
        "lr",
        "steps",
        "batch",
        "gradient",
        "final",
        "l_min",
        "l_max",
        "split",
        "seed",
        "compare_steps",
        "influence",
    )
)


_COMBINATION = ("score.weights", "score.combine", "score.missing")


def _reads_constants(settings: Settings) -> bool:
    return settings.select.scale == "minmax" and settings.select.lambda_ > 0


def _reads_rows(settings: Settings) -> bool:
    return settings.select.in_tokens or settings.select.quota == "domain"


def _reads_clusters(settings: Settings) -> bool:
    return settings.select.quota == "cluster"


def removes_near_duplicates(settings: Settings) -> bool:
    """Whether what near_duplicates finds is not to be chosen."""
    return settings.clean.near_duplicates == "remove"


def _apart(wanted: Callable[[Settings], bool]) -> Callable[[Settings], bool]:
    """Where each snapshot is chosen from apart from the others."""
    return lambda settings: settings.select.scope != "corpus" and wanted(settings)


def candidate_inputs(settings: Settings) -> tuple[str, ...]:
    """The assets of a snapshot that say which documents can be chosen, what they count and what quota they are in."""
    rows, clusters = _reads_rows(settings), _reads_clusters(settings)
    return (
        "pruned_documents",
        "e5_embeddings",
        *(("raw_shards",) if rows else ()),
        *(("kmeans_clusters",) if clusters else ()),
        *(("influence_scores",) if settings.select.influence else ()),
        *(("near_duplicates",) if removes_near_duplicates(settings) else ()),
    )


# {select.strategy: the asset whose mask the manifest keeps}; a baseline's is of its own name
_MASK_OF = {name: name for name in STRATEGIES} | {
    "datamask": "datamask_masks",
    "joint": "datamask_masks",
    "group_mates": "group_mates_selection",
}


def mask_of(settings: Settings) -> str:
    """The asset whose mask the manifest keeps under these settings."""
    return _MASK_OF[settings.select.strategy]


def strategy_of(mask: str) -> str:
    """The strategy that a mask is the one of, be it joint or not."""
    return next(strategy for strategy, asset in _MASK_OF.items() if asset == mask)


# what strategies are called on a page; baselines by their own names
_CALLED = {"datamask": "DataMask", "joint": "DataMask with influence", "group_mates": "Group-MATES"}


def called(strategy: str) -> str:
    """A strategy's name for people."""
    return _CALLED.get(strategy, strategy)


def _kept_by(mask: str) -> Callable[[Settings], bool]:
    return lambda settings: mask_of(settings) == mask


# every mask that a manifest can keep, of which it reads one
MASKS_OF_A_SNAPSHOT = tuple(dict.fromkeys(_MASK_OF.values()))
_MASK = tuple((mask, _kept_by(mask)) for mask in MASKS_OF_A_SNAPSHOT)


def _mask_without_near_duplicates(settings: Settings) -> bool:
    mask = STAGES[mask_of(settings)]
    # a part of the corpus's masks reads none itself
    reads = "near_duplicates" in mask.needs(settings) or "clean.near_duplicates" in mask.reads
    return removes_near_duplicates(settings) and reads


def _baseline(
    name: str,
    about: str,
    inputs: tuple[str, ...] = (),
    reads: tuple[str, ...] = (),
    of_vectors: bool = False,
    version: str = "1",
) -> Stage:
    """A selection to compare with: of all scored documents, or of those that datamask_masks chooses from."""
    return Stage(
        f"baseline_{name}",
        version,
        ("select.budget", *reads, *(("clean.near_duplicates",) if of_vectors else ())),
        ("pruned_documents", *(("e5_embeddings",) if of_vectors else ()), *inputs),
        "baselines",
        about,
        optional=(
            ("raw_shards", lambda settings: settings.select.in_tokens),
            *((("near_duplicates", removes_near_duplicates),) if of_vectors else ()),
        ),
    )


# the most stages that group_mates.stages may ask for
MOST_STAGES = 4


def _group_mates(*names: str) -> tuple[str, ...]:
    return tuple(f"group_mates.{name}" for name in names)


_LANGUAGE_MODEL = _group_mates(
    *("checkpoint", "tokenizer", "vocabulary", "layers", "width", "heads", "context"),
    *("warmup_steps", "batch", "lr", "schedule", "continue_steps", "stages", "seed"),
)
_REFERENCE = _group_mates("reference", "held_out", "reference_documents")
_INFLUENCE_MODEL = (
    *_group_mates("mode", "similarity", "bracket", "backbone", "influence_width", "epochs", "validation", "seed"),
    *("models.encoder", "models.encoder_prefix", "embed.max_tokens", "embed.batch_tokens", "embed.backend"),
)
_GROUP_SELECTION = (
    *_group_mates("method", "budgets", "tau", "stages", "seed"),
    *("select.budget", "select.scope", "select.split"),
)


def checkpoint_of(number: int) -> str:
    """The asset that holds the language model which a Group-MATES stage probes."""
    return "warmup_model" if number == 1 else f"stage_{number - 1}/continued_model"


def _has_stage(number: int) -> Callable[[Settings], bool]:
    return lambda settings: settings.group_mates.stages >= number


def _is_last(number: int) -> Callable[[Settings], bool]:
    return lambda settings: settings.group_mates.stages == number


def _weighed(number: int) -> Callable[[Settings], bool]:
    """Where influence, as the last stage predicts it, is a term of the objective."""
    return lambda settings: settings.select.influence > 0 and settings.group_mates.stages == number


def _group_mates_stage(number: int) -> tuple[Stage, ...]:
    """What a Group-MATES stage is made of. Dagster knows no cycles, so each has its own assets; the checkpoint of one
    is what the next probes."""
    prefix = f"stage_{number}/"
    return (
        Stage(
            f"{prefix}rollout_sets",
            "4",
            (
                *_REFERENCE,
                *_group_mates(
                    *("probe_documents", "trajectories", "bootstrap_trajectories"),
                    *("steps", "k", "probe_lr", "beta1"),
                ),
                *_INFLUENCE_MODEL,
            ),
            # what the model was trained on in any stage is not probed
            (*(checkpoint_of(earlier) for earlier in range(1, number + 1)), "quality_calibration"),
            "group_mates",
            "Oracle influences: what single steps on probed documents, in rollouts, do to the reference loss.",
            partitioned=False,
            on_accelerator=True,
            number=number,
        ),
        Stage(
            f"{prefix}influence_model",
            "2",
            (*_INFLUENCE_MODEL, *_group_mates("clusters")),
            (f"{prefix}rollout_sets",),
            "group_mates",
            "The relational influence model fitted to the rollouts, its card, and clusters in influence space. "
            "spearman_within: how well it ranks unseen documents at one position; spearman_shuffled: how well it still "
            "does with another rollout's predecessors, which should be worse than spearman_pooled.",
            partitioned=False,
            on_accelerator=True,
            number=number,
        ),
        Stage(
            f"{prefix}influence_scores",
            "2",
            tuple(sorted({*_REFERENCE, "group_mates.seed", "group_mates.backbone"})),
            ("raw_shards", "pruned_documents", "e5_embeddings", f"{prefix}influence_model"),
            "group_mates",
            "Predicted influence of each document that can be chosen, the lower the better, and its influence vector.",
            on_accelerator=True,
            device_in_workers=True,
            number=number,
            optional=(("near_duplicates", removes_near_duplicates),),
        ),
        Stage(
            f"{prefix}group_mates_selection",
            "2",
            _GROUP_SELECTION,
            (
                "pruned_documents",
                "e5_embeddings",
                f"{prefix}influence_model",
                f"{prefix}influence_scores",
                *(f"stage_{earlier}/group_mates_selection" for earlier in range(1, number)),
            ),
            "group_mates",
            "The stage's part of the budget, chosen cluster by cluster from what earlier stages left.",
            number=number,
            optional=(
                ("raw_shards", lambda settings: settings.select.in_tokens),
                ("near_duplicates", removes_near_duplicates),
            ),
        ),
        Stage(
            f"{prefix}continued_model",
            "4",
            tuple(sorted({*_LANGUAGE_MODEL, *_REFERENCE, *_GROUP_SELECTION})),
            (checkpoint_of(number), f"{prefix}influence_model"),
            "group_mates",
            "The language model's run continued on what this stage chose of all published snapshots.",
            partitioned=False,
            on_accelerator=True,
            number=number,
        ),
    )


STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage(
            "dclm_classifier",
            "2",
            ("models.dclm", "models.dclm_label", "score.dclm_labels"),
            (),
            "global",
            "The DCLM classifier: fastText, from hub, path or URL, or trained from labelled parquet.",
            partitioned=False,
        ),
        Stage(
            "edu_classifier",
            "2",
            (
                "models.edu",
                "models.encoder",
                "models.encoder_prefix",
                "score.edu_labels",
                "score.edu_max_tokens",
                "score.edu_windows",
                "embed.batch_tokens",
                "embed.backend",
            ),
            (),
            "global",
            "The educational-value model: from hub or path, or a head on the encoder trained from labelled parquet.",
            partitioned=False,
            on_accelerator=True,
        ),
        Stage(
            "wiki_classifier",
            "2",
            ("models.wiki", "models.wiki_label", "score.wiki_labels"),
            (),
            "global",
            "The wiki-reference classifier: fastText, from hub, path or URL, or trained from labelled parquet.",
            partitioned=False,
        ),
        Stage(
            "quality_calibration",
            "3",
            (
                *_COMBINATION,
                "score.calibration_snapshots",
                "score.calibration_sample",
                "prune.ratio",
            ),
            ("dclm_classifier", "edu_classifier", "wiki_classifier"),
            "global",
            "A recorded, scored sample of documents, and the constants every snapshot takes from it: the qualities "
            "that count as 0 and 1 in the objective (q_lo, q_hi), and the cut of prune.threshold = frozen "
            "(prune_threshold).",
            partitioned=False,
            on_accelerator=True,
        ),
        Stage(
            "kmeans_centroids",
            "3",
            (
                "models.encoder",
                "models.encoder_prefix",
                "embed.max_tokens",
                "embed.batch_tokens",
                "embed.backend",
                "cluster.k",
                "cluster.sample",
                "cluster.iterations",
                "cluster.seed",
            ),
            ("quality_calibration",),
            "global",
            "Spherical k-means centroids of the calibration sample's survivors, frozen for all snapshots.",
            partitioned=False,
            on_accelerator=True,
        ),
        Stage(
            "raw_shards",
            "3",
            ("source.on_bad_shard", "source.set_aside", "source.hash_below", "source.tokenizer"),
            (),
            "documents",
            "Every row of the snapshot under a unique doc_id; duplicates, blank texts and bad shards counted.",
            rows_worth_processes=200_000,
        ),
        Stage(
            "text_duplicates",
            "1",
            (),
            ("raw_shards",),
            "cleaning",
            "Documents whose text is an earlier one's, byte for byte, in this snapshot or in one before it by name.",
        ),
        Stage(
            "contaminated_documents",
            "1",
            ("clean.evaluation_sets", "clean.ngram"),
            ("raw_shards",),
            "cleaning",
            "Documents that share clean.ngram words in a row with an evaluation set, with the words and their place.",
            rows_worth_processes=50_000,
        ),
        Stage(
            "dclm_scores",
            "1",
            ("models.dclm_label",),
            ("raw_shards", "dclm_classifier"),
            "quality",
            "Probability of the DCLM classifier's positive label, 0..1.",
            loads_fasttext=True,
        ),
        Stage(
            "edu_scores",
            "2",
            ("score.edu_max_tokens", "score.edu_windows", "embed.batch_tokens", "embed.backend"),
            ("raw_shards", "edu_classifier"),
            "quality",
            "Educational value, about 0..5, a float as the model gives it.",
            on_accelerator=True,
            device_in_workers=True,
        ),
        Stage(
            "wiki_scores",
            "1",
            ("models.wiki_label",),
            ("raw_shards", "wiki_classifier"),
            "quality",
            "Probability of the wiki-reference classifier's positive label, 0..1.",
            loads_fasttext=True,
        ),
        # for baselines alone: a model that cannot be had must block nothing else
        Stage(
            "ultra_classifier",
            "2",
            ("models.ultra", "models.ultra_label", "models.ultra_tokenizer", "score.ultra_labels"),
            (),
            "baselines",
            "The Ultra-FineWeb classifier: fastText, from hub, path or URL, or trained from labelled parquet.",
            partitioned=False,
        ),
        Stage(
            "ultra_scores",
            "1",
            ("models.ultra_label",),
            ("raw_shards", "ultra_classifier"),
            "baselines",
            "Probability of the Ultra-FineWeb classifier's positive label, 0..1, for its baseline.",
            loads_fasttext=True,
        ),
        Stage(
            "quality_scores",
            "2",
            _COMBINATION,
            ("raw_shards", "dclm_scores", "edu_scores", "wiki_scores"),
            "quality",
            "Quality 0..15: 5 x DCLM + Edu (clamped to 0..5) + 5 x Wiki, or their z-scores or ranks (score.combine).",
            rows_worth_processes=1_000_000,
            optional=(("quality_calibration", lambda settings: settings.score.combine != "sum"),),
        ),
        Stage(
            "pruned_documents",
            "3",
            ("prune.ratio", "prune.threshold", "clean.duplicates"),
            ("raw_shards", "quality_scores", "quality_calibration"),
            "quality",
            "The lowest share by quality (prune.ratio) marked as pruned, beside what cleaning found; all rows stay.",
            rows_worth_processes=1_000_000,
            optional=(
                ("text_duplicates", lambda settings: settings.clean.duplicates == "remove"),
                ("contaminated_documents", lambda settings: bool(settings.clean.evaluation_sets)),
            ),
        ),
        Stage(
            "e5_embeddings",
            "2",
            (
                "models.encoder",
                "models.encoder_prefix",
                "embed.documents",
                "embed.max_tokens",
                "embed.batch_tokens",
                "embed.backend",
            ),
            ("raw_shards", "pruned_documents"),
            "embeddings",
            "Unit float16 vectors of the surviving documents, memory-mapped Arrow.",
            on_accelerator=True,
            device_in_workers=True,
        ),
        Stage(
            "kmeans_clusters",
            "2",
            (),
            ("e5_embeddings", "kmeans_centroids"),
            "embeddings",
            "The nearest frozen centroid of each embedded document.",
            rows_worth_processes=500_000,
        ),
        Stage(
            "near_duplicates",
            "1",
            ("clean.epsilon",),
            ("pruned_documents", "e5_embeddings", "kmeans_clusters"),
            "cleaning",
            "SemDeDup: survivors that are nearly the same as one that stays (kept_id), by cosine within a cluster.",
        ),
        Stage(
            "exact_substrings",
            "1",
            ("baselines.gneissweb_tokens", "source.tokenizer"),
            ("raw_shards",),
            "cleaning",
            "Spans of baselines.gneissweb_tokens or more that the shard has had before, for GneissWeb to cut out.",
        ),
        Stage(
            "warmup_model",
            "2",
            (*_LANGUAGE_MODEL, *_group_mates("warmup_documents"), "score.calibration_snapshots"),
            (),
            "group_mates",
            "The language model that is probed: trained on a keyed sample of the source, or a checkpoint given.",
            partitioned=False,
            on_accelerator=True,
        ),
        *(stage for number in range(1, MOST_STAGES + 1) for stage in _group_mates_stage(number)),
        Stage(
            "influence_scores",
            "1",
            _group_mates("stages"),
            (),
            "group_mates",
            "Influence as the last stage predicts it, the lower the better: the joint objective's further term.",
            optional=tuple(
                (f"stage_{number}/influence_scores", _is_last(number)) for number in range(1, MOST_STAGES + 1)
            ),
        ),
        Stage(
            "group_mates_selection",
            "1",
            _group_mates("stages"),
            ("pruned_documents",),
            "group_mates",
            "What all Group-MATES stages chose of the snapshot, as one mask.",
            optional=(
                *((f"stage_{n}/group_mates_selection", _has_stage(n)) for n in range(1, MOST_STAGES + 1)),
                ("near_duplicates", removes_near_duplicates),
            ),
        ),
        Stage(
            "corpus_selection_state",
            "1",
            (
                "select.lambda",
                "select.objective",
                "select.budget",
                "select.quota",
                "select.scale",
                "select.on_new_snapshot",
                "select.influence",
                "clean.near_duplicates",
            ),
            (),
            "selection",
            "The masks of all embedded snapshots, chosen as one pool, with what a later snapshot is chosen beside.",
            partitioned=False,
            optional=(
                ("quality_calibration", _reads_constants),
                *((f"stage_{n}/influence_model", _weighed(n)) for n in range(1, MOST_STAGES + 1)),
            ),
        ),
        Stage(
            "datamask_masks",
            "2",
            (*_SELECT, "clean.near_duplicates"),
            ("pruned_documents", "e5_embeddings"),
            "selection",
            "The mask: lambda x quality + (1 - lambda) x diversity at the budget, with its certificate. value: what "
            "the mask reaches; upper_bound: what no mask of its size exceeds; gap: the difference; share: how much of "
            "what choosing can gain over a random mask is gained.",
            on_accelerator=True,
            optional=(
                ("quality_calibration", _apart(_reads_constants)),
                ("raw_shards", _apart(_reads_rows)),
                ("kmeans_clusters", _apart(_reads_clusters)),
                ("influence_scores", _apart(lambda settings: settings.select.influence > 0)),
                ("near_duplicates", _apart(removes_near_duplicates)),
                ("corpus_selection_state", lambda settings: settings.select.scope == "corpus"),
            ),
        ),
        _baseline("random", "As many documents as the budget asks for, drawn at random.", reads=("select.seed",)),
        _baseline(
            "fineweb_edu",
            "FineWeb-Edu: documents whose rounded educational value reaches baselines.edu_cut, drawn to the budget.",
            ("edu_scores",),
            ("baselines.edu_cut", "select.seed"),
        ),
        _baseline("fineweb_edu_top", "FineWeb-Edu: the documents of highest educational value.", ("edu_scores",)),
        _baseline(
            "dclm",
            "DCLM-Baseline: documents whose DCLM score reaches baselines.dclm_cut, drawn to the budget.",
            ("dclm_scores",),
            ("baselines.dclm_cut", "select.seed"),
        ),
        _baseline("dclm_top", "DCLM-Baseline: the documents of highest DCLM score.", ("dclm_scores",)),
        _baseline(
            "wiki",
            "Wiki reference: documents whose wiki score reaches baselines.wiki_cut, drawn to the budget.",
            ("wiki_scores",),
            ("baselines.wiki_cut", "select.seed"),
        ),
        _baseline("wiki_top", "Wiki reference: the documents of highest wiki score.", ("wiki_scores",)),
        _baseline(
            "ultra_fineweb",
            "Ultra-FineWeb: documents whose score reaches baselines.ultra_cut, drawn to the budget.",
            ("ultra_scores",),
            ("baselines.ultra_cut", "select.seed"),
        ),
        _baseline(
            "gneissweb",
            "GneissWeb: documents above baselines.gneissweb_percentile of DCLM and of Edu, by category, drawn to the "
            "budget; repeated substrings are cut out.",
            ("dclm_scores", "edu_scores", "exact_substrings"),
            ("baselines.gneissweb_percentile", "baselines.gneissweb_categories", "select.seed"),
            version="2",
        ),
        _baseline(
            "semdedup",
            "SemDeDup: the documents least like an earlier one of their cluster, epsilon solved for the budget.",
            ("kmeans_clusters",),
            of_vectors=True,
        ),
        _baseline("diversity", "Diversity alone (lambda = 0) of what pruning left, with its bound.", of_vectors=True),
        _baseline("quality", "Quality alone (lambda = 1) of what pruning left, with its bound.", of_vectors=True),
        Stage(
            "fineweb_mask_manifest",
            "4",
            ("select.strategy",),
            (
                "raw_shards",
                "dclm_scores",
                "edu_scores",
                "wiki_scores",
                "quality_scores",
                "pruned_documents",
                "e5_embeddings",
                "kmeans_clusters",
            ),
            "manifest",
            "One row per readable input row: what was decided, where and why; manifest.json says from what.",
            rows_worth_processes=1_000_000,
            optional=(
                *_MASK,
                ("near_duplicates", _mask_without_near_duplicates),
                # not read, but the texts are cut by what the mask was made from
                ("exact_substrings", _kept_by("baseline_gneissweb")),
            ),
        ),
        Stage(
            "fineweb_mask",
            "1",
            (),
            ("raw_shards", "fineweb_mask_manifest"),
            "manifest",
            "The kept documents with all their columns and scores, as parquet.",
            rows_worth_processes=200_000,
            optional=(("exact_substrings", _kept_by("baseline_gneissweb")),),
        ),
        Stage(
            "snapshot_report",
            "4",
            (),
            (
                "raw_shards",
                "pruned_documents",
                "e5_embeddings",
                "kmeans_clusters",
                "fineweb_mask_manifest",
            ),
            "reports",
            "What was kept of the snapshot and why, as one page: figures, certificate, documents with their reasons.",
            optional=_MASK,
        ),
        Stage(
            "selection_report",
            "4",
            (),
            (),
            "reports",
            "All snapshots on one page: what each keeps, the corpus's figures, and what is missing or stale.",
            partitioned=False,
        ),
        Stage(
            "dataset_card",
            "3",
            (
                "export.formats",
                "export.tokenizer",
                "export.end_of_text",
                "export.license",
                "export.source_name",
                "export.source_url",
            ),
            (),
            "export",
            "The kept documents of all snapshots as one folder for others: data set card, checksums, ids, formats.",
            partitioned=False,
        ),
    )
}


def active(settings: Settings) -> dict[str, Stage]:
    """The stages that there are assets of: of Group-MATES no more than group_mates.stages."""
    return {name: stage for name, stage in STAGES.items() if stage.number <= settings.group_mates.stages}


def fitting_job(stage: Stage) -> str:
    """The job that fits an unpartitioned asset which stages of a snapshot read."""
    if stage.group != "group_mates":
        return "fit_baselines" if stage.group == "baselines" else "fit_global"
    return f"group_mates_{'continue' if stage.name.endswith('continued_model') else 'fit'}_{max(1, stage.number)}"


def check_requests(settings: Settings) -> None:
    """Raise SettingsError where compute.requests names what is no stage, naming the nearest."""
    for name in settings.compute.requests:
        if name not in STAGES:
            (near,) = difflib.get_close_matches(name, STAGES, n=1, cutoff=0.0)
            raise SettingsError(f"compute.requests: {name!r} is no asset; did you mean {near!r}?")


def lineage(names: Iterable[str], settings: Settings) -> list[str]:
    """`names` and all that they are made from under these settings, in the table's order."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += STAGES[name].needs(settings)
    return [name for name in STAGES if name in found]


# what the job fit_global fits once and freezes
FITTED = tuple(name for name, stage in STAGES.items() if stage.group == "global")


@dataclass(frozen=True)
class Check:
    """A check of a stage's result. A failing blocking check keeps the generation from being published."""

    name: str
    passed: bool
    blocking: bool
    facts: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What a stage did. `counts` says what became of the `rows_in` rows it answers for; their sum must equal it."""

    published: Published | None
    rows_in: int
    counts: dict[str, int]
    facts: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, bytes] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True)
class Run:
    """What a stage runs with: the root, its settings, the device, where to tell progress, and where shards are worked
    on.

    `in_force` are the settings of datamask.toml; `settings` differ from them where the Launchpad overrode some. Sent to
    a worker it has no log, no place but the worker itself, and one process: that one.
    """

    store: Store
    settings: Settings
    in_force: Settings
    accelerator: Accelerator
    log: Callable[[str], None]
    compute: Compute = INLINE

    def __reduce__(self) -> tuple[Any, ...]:
        settings, in_force = (s.replace({"compute.processes": 1}) for s in (self.settings, self.in_force))
        return Run, (self.store, settings, in_force, self.accelerator, _unheard)

    def map_shards(
        self,
        stage: Stage,
        generation: Generation,
        shards: Sequence[str],
        read: Reader,
        kernel: Callable[[], Kernel],
        schema: pa.Schema | Callable[[], pa.Schema],
        *,
        ext: str,
        total_rows: int,
        source: Callable[[str], Mapping[str, Any]] = lambda shard: {},
        origin: Callable[[str], str] = lambda shard: "",
        group_rows: int = ROW_GROUP_ROWS,
        given: Callable[[], Given] | None = None,
    ) -> list[ShardRecord]:
        """`shards.engine.map_shards` where this run computes, with what the stage takes there.

        Processes of this machine are used where they save more than their start costs, and not by a stage that uses all
        cores by itself. Raises Poisoned with the remedy.
        """
        here = isinstance(self.compute, Inline | Processes)
        with self._remedied(generation.snapshot, "all others are done. Where"):
            return map_shards(
                generation,
                shards,
                read,
                kernel,
                schema,
                ext=ext,
                total_rows=total_rows,
                progress=self.progress(stage, generation.snapshot),
                source=source,
                origin=origin,
                group_rows=group_rows,
                given=given,
                compute=INLINE if here and stage.rows_worth_processes is None else self.compute,
                requests=self.requests(stage),
                inline_below=(stage.rows_worth_processes or 0) if here else 0,
                apart=self._apart,
            )

    def each_shard(
        self,
        stage: Stage,
        snapshot: str,
        shards: Sequence[str],
        worker: Callable[[], Callable[[str, Told], Any]],
        scratch: Path,
        ext: str,
        *,
        total_rows: int | None = None,
    ) -> Generator[tuple[str, Any]]:
        """Every shard with what the worker makes of it, in any order, where `map_shards` would do it: for what comes
        before files, and is small. total_rows: of all shards; None where it is what is asked for, in this process.
        Marks of shards that are done here are in `scratch`. Raises Poisoned with the remedy."""
        worth = stage.rows_worth_processes
        few = worth is None or total_rows is None or len(shards) == 1 or total_rows < worth
        here = total_rows is None or isinstance(self.compute, Inline | Processes)
        compute = INLINE if here and few else self.compute
        with self._remedied(snapshot):
            yield from each_shard(
                worker, shards, scratch, ext, compute=compute, requests=self.requests(stage), apart=self._apart
            )

    def _apart(self) -> Processes:
        # of what a killed run began: on as many threads as here it has the bits that it would have had here
        return Processes(1, self.settings.compute.threads or own_threads(), log=self.log)

    @contextmanager
    def _remedied(self, snapshot: str | None, where: str = "where") -> Iterator[None]:
        try:
            yield
        except Poisoned as error:
            if isinstance(error.__cause__, Poisoned):
                # by what came before the files of these shards
                raise
            aside = ", ".join(f'"{snapshot}/{shard}"' for shard in error.why)
            raise Poisoned(
                error.why,
                f"{where} memory ran out give a worker more of it (a smaller compute.processes, on a cluster memory_gb "
                "in compute.requests) and run it again; to go on without, set source.set_aside = "
                f"[{aside}] and materialise raw_shards again",
            ) from error

    def requests(self, stage: Stage) -> Requests:
        """What one worker of the stage takes of a cluster: as compute.requests has it, else a core for each of
        compute.threads, and an accelerator where the stage computes on one."""
        asked = self.settings.compute.requests.get(stage.name)
        cpus = float(max(1, self.settings.compute.threads))
        gpus = 1.0 if stage.device_in_workers and self.accelerator.is_cuda else 0.0
        if asked is None:
            return Requests(cpus, gpus)
        return Requests(
            cpus if asked.cpus is None else asked.cpus, gpus if asked.gpus is None else asked.gpus, asked.memory_gb
        )

    def inputs(self, stage: Stage, snapshot: str | None, names: Sequence[str] | None = None) -> dict[str, Published]:
        """The published inputs of `stage`, resolved once, by name; those in `names`, or all.

        Raises NotPublished for what is missing and InconsistentFiles if two come from different ancestors.
        """
        found = {
            name: self.current(name, snapshot) for name in (stage.needs(self.settings) if names is None else names)
        }
        for published in found.values():
            for ancestor, fingerprint in published.inputs.items():
                other = found.get(ancestor)
                if other is not None and other.fingerprint != fingerprint and STAGES[ancestor].partitioned:
                    raise InconsistentFiles(
                        f"{published.asset} of {snapshot} was made from another generation of {ancestor} than the "
                        f"published one; materialise {published.asset} again"
                    )
        return found

    def current(self, name: str, snapshot: str | None) -> Published:
        """The published generation of an asset, of the snapshot where it has partitions.

        Raises NotPublished naming the job that makes it.
        """
        stage = STAGES[name]
        published = self.store.published(name, snapshot if stage.partitioned else None)
        if published is None and stage.group in ("group_mates", "baselines") and not stage.partitioned:
            order = ", or `datamask run`, which knows the order" if stage.group == "group_mates" else ""
            raise NotPublished(
                f"{name} is not published under {self.store.where}; run the job {fitting_job(stage)} first{order}"
            )
        return published or self.store.current(name, snapshot if stage.partitioned else None)

    @contextmanager
    def generation(self, stage: Stage, snapshot: str | None, inputs: Mapping[str, str]) -> Iterator[Generation]:
        """The stage's generation for these input fingerprints and the settings in force, under its lease."""
        with self.store.generation(
            stage.name,
            snapshot,
            code_version=stage.version,
            settings=stage.identity(self.settings),
            inputs=inputs,
            waiting=self.log,
        ) as generation:
            yield generation

    def origin(self, stage: Stage, *parts: str) -> str:
        """The origin of one shard's file: the stage's code and settings, and `parts`, all else that it is made of."""
        settings = json.dumps(stage.identity(self.settings), sort_keys=True)
        return digest(stage.name, stage.version, settings, *parts).hex()

    def progress(self, stage: Stage, snapshot: str | None) -> Progress:
        return every_seconds(self.log, f"{stage.name} {snapshot}" if snapshot else stage.name)


def _unheard(message: str) -> None:
    """The log of a worker: progress is told where its results are taken."""


def fingerprints(inputs: Mapping[str, Published]) -> dict[str, str]:
    """{input: fingerprint}."""
    return {name: published.fingerprint for name, published in inputs.items()}


def finish(
    generation: Generation,
    records: list[ShardRecord],
    ext: str,
    *,
    facts: Mapping[str, Any],
    expected_rows: int,
    figures: Callable[[Published], Mapping[str, bytes]] = lambda published: {},
    checks: Sequence[Check] = (),
) -> Outcome:
    """Check that every row is accounted for, publish if all blocking checks pass, and sum up.

    Figures are drawn from what was published.
    """
    counts = total_counts(records)
    rows_in = sum(record.rows_in for record in records)
    accounted = Check(
        "rows_accounted_for",
        expected_rows == rows_in == sum(counts.values()),
        True,
        {"readable_rows": expected_rows, "rows_seen": rows_in, "sum_of_decisions": sum(counts.values())},
    )
    every = (accounted, *checks)
    blocked = any(check.blocking and not check.passed for check in every)
    published = None if blocked else generation.publish(records, ext, facts)
    return Outcome(
        published=published,
        rows_in=rows_in,
        counts=counts,
        facts=dict(facts),
        figures=dict(figures(published)) if published else {},
        checks=every,
    )
