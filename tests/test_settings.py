"""datamask.toml: every key typed, every mistake named, every source of a value in its place."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dagster_datamask.settings import (
    PROFILES,
    STRATEGIES,
    RequestSettings,
    Settings,
    SettingsError,
    known_keys,
    load_settings,
    section_models,
)
from dagster_datamask.stages.base import STAGES, mask_of

# settings with which every one of the values below goes
TOGETHER = (
    "select.solver=certified",
    *("select.strategy=joint", "select.influence=0.2"),
    *("group_mates.tokenizer=some/model", "group_mates.method=individual"),
)
# a value other than the default for every key a stage can read
OTHER = {
    "source.url": "elsewhere",
    "source.on_bad_shard": "quarantine",
    "source.set_aside": ["S/x"],
    "source.tokenizer": "other/model",
    "source.hash_below": 0.5,
    "storage.root": "elsewhere",
    "storage.cache": "elsewhere",
    "storage.cache_gb": 5.0,
    "models.encoder": "other/model",
    "models.encoder_prefix": "q: ",
    "models.dclm": "trained",
    "models.dclm_label": "__label__x",
    "models.wiki": "other.bin",
    "models.wiki_label": "__label__x",
    "models.edu": "trained",
    "models.ultra": "trained",
    "models.ultra_label": "__label__x",
    "models.ultra_tokenizer": "other/model",
    "score.dclm_labels": "a.parquet",
    "score.wiki_labels": "b.parquet",
    "score.edu_labels": "c.parquet",
    "score.edu_max_tokens": 64,
    "score.edu_windows": "first_middle_last",
    "score.ultra_labels": "d.parquet",
    "score.weights": [1.0, 2.0, 3.0],
    "score.combine": "rank",
    "score.missing": "others",
    "score.calibration_snapshots": ["S"],
    "score.calibration_sample": 10,
    "prune.ratio": 0.3,
    "prune.threshold": "frozen",
    "embed.documents": "all",
    "embed.max_tokens": 64,
    "embed.batch_tokens": 128,
    "embed.backend": "openvino",
    "cluster.k": 3,
    "cluster.sample": 10,
    "cluster.iterations": 3,
    "cluster.seed": 1,
    "clean.duplicates": "remove",
    "clean.evaluation_sets": ["/data/set.jsonl"],
    "clean.ngram": 8,
    "clean.near_duplicates": "remove",
    "clean.epsilon": 0.1,
    "baselines.edu_cut": 2,
    "baselines.dclm_cut": 0.1,
    "baselines.wiki_cut": 0.5,
    "baselines.ultra_cut": 0.9,
    "baselines.gneissweb_tokens": 20,
    "baselines.gneissweb_percentile": 0.3,
    "baselines.gneissweb_categories": "/data/categories.parquet",
    "select.strategy": "baseline_random",
    "select.lambda": 0.3,
    "select.budget": "5%",
    "select.objective": "disf_second_moment",
    "select.quota": "domain",
    "select.scope": "snapshot",
    "select.on_new_snapshot": "resolve",
    "select.solver": "greedy",
    "select.scale": "raw",
    "select.group": 64,
    "select.lr": 5.0,
    "select.steps": 100,
    "select.batch": 0.1,
    "select.gradient": "ordered",
    "select.final": "sampled",
    "select.l_min": -1.0,
    "select.l_max": 3.0,
    "select.split": 1000,
    "select.seed": 7,
    "select.compare_steps": 10,
    "select.influence": 0.3,
    "group_mates.stages": 3,
    "group_mates.checkpoint": "elsewhere",
    "group_mates.tokenizer": "other/model",
    "group_mates.vocabulary": 512,
    "group_mates.layers": 3,
    "group_mates.width": 128,
    "group_mates.heads": 2,
    "group_mates.context": 64,
    "group_mates.warmup_documents": 10,
    "group_mates.warmup_steps": 10,
    "group_mates.batch": 4,
    "group_mates.lr": 1e-4,
    "group_mates.schedule": "cosine",
    "group_mates.continue_steps": 5,
    "group_mates.reference": "a.parquet",
    "group_mates.held_out": "b.parquet",
    "group_mates.reference_documents": 8,
    "group_mates.probe_documents": 20,
    "group_mates.trajectories": 12,
    "group_mates.bootstrap_trajectories": 0,
    "group_mates.steps": 3,
    "group_mates.k": 2,
    "group_mates.probe_lr": 1e-4,
    "group_mates.beta1": 0.0,
    "group_mates.mode": "individual",
    "group_mates.similarity": "ffn",
    "group_mates.bracket": "clamped",
    "group_mates.backbone": "fine_tuned",
    "group_mates.influence_width": 16,
    "group_mates.epochs": 5,
    "group_mates.validation": 0.3,
    "group_mates.clusters": 4,
    "group_mates.method": "gumbel",
    "group_mates.budgets": "global",
    "group_mates.tau": 1.0,
    "group_mates.seed": 1,
    "export.formats": ["parquet", "jsonl.gz"],
    "export.tokenizer": "other/model",
    "export.end_of_text": "[SEP]",
    "export.license": "cc-by-4.0",
    "export.source_name": "Ours",
    "export.source_url": "https://example.org",
    "compute.device": "cpu",
    "compute.dtype": "float32",
    "compute.memory_limit_gb": 4.0,
    "compute.processes": 3,
    "compute.threads": 2,
    "compute.backend": "ray",
    "compute.ray_address": "auto",
    "compute.executor": "k8s_job",
    "compute.gpu_nodes": {"accelerator": "h200"},
    "compute.requests": {"e5_embeddings": RequestSettings(cpus=8.0, gpus=1.0, memory_gb=32.0)},
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory without a datamask.toml: the repository has one."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "datamask.toml"
    path.write_text(text, "utf-8")
    return path


def loaded(*overrides: str) -> Settings:
    return load_settings(None, overrides, env={})


def test_the_defaults_are_the_papers() -> None:
    settings = loaded()
    assert settings.profile == "paper"
    paper = {
        "prune.ratio": 0.45,
        "select.budget": "10%",
        "select.lambda": 0.5,
        "select.group": 128,
        "select.lr": 10.0,
        "select.steps": 10_000,
        "select.batch": 0.05,
        "select.split": 1_000_000,
        "select.l_min": 0.0,
        "select.l_max": 2.0,
        "select.seed": 0,
        "select.solver": "policy_gradient",
        "select.scale": "minmax",
        "embed.documents": "survivors",
        "source.on_bad_shard": "fail",
        "score.weights": [1.0, 1.0, 1.0],
    }
    assert settings.subset(paper) == dict(sorted(paper.items()))


def test_every_key_is_read_written_and_described() -> None:
    assert sorted(OTHER) == sorted(set(known_keys()) - {"profile"})
    settings = loaded(*TOGETHER)
    for key, value in OTHER.items():
        changed = settings.replace({key: value})
        assert settings.get(key) != value
        assert changed.get(key) == value
        assert [k for k in OTHER if changed.get(k) != settings.get(k)] == [key]
    for model in section_models().values():
        for name, field in model.model_fields.items():
            assert field.description, name


def test_a_hash_changes_exactly_for_the_stages_that_read_the_key() -> None:
    settings = loaded(*TOGETHER)
    before = {name: stage.code_version(settings) for name, stage in STAGES.items()}
    for key, value in OTHER.items():
        changed = settings.replace({key: value})
        moved = {name for name, stage in STAGES.items() if stage.code_version(changed) != before[name]}
        assert moved == {name for name, stage in STAGES.items() if key in stage.reads}, key
    for key, stages in {
        "select.lambda": {"corpus_selection_state", "datamask_masks"},
        "select.on_new_snapshot": {"corpus_selection_state"},
        "select.steps": {"datamask_masks"},
        "prune.threshold": {"pruned_documents"},
        "cluster.k": {"kmeans_centroids"},
        "source.on_bad_shard": {"raw_shards"},
        "source.set_aside": {"raw_shards"},
        "storage.root": set(),
        "source.url": set(),
        "compute.device": set(),
    }.items():
        assert {name for name, stage in STAGES.items() if key in stage.reads} == stages, key


def test_another_order_of_what_is_set_aside_is_no_other_setting() -> None:
    one, other = (
        loaded(f"source.set_aside={names}") for names in (["S/b", "S/a", "T/c"], ["T/c", "S/a", "S/b", "S/a"])
    )
    assert one == other
    assert one.source.set_aside == ["S/a", "S/b", "T/c"]


def test_every_key_but_where_and_on_what_is_read_by_some_stage() -> None:
    read = {key for stage in STAGES.values() for key in stage.reads}
    assert set(OTHER) - read == {
        "source.url",
        "storage.root",
        "storage.cache",
        "storage.cache_gb",
        "compute.device",
        "compute.dtype",
        "compute.processes",
        "compute.threads",
        "compute.backend",
        "compute.ray_address",
        "compute.executor",
        "compute.gpu_nodes",
        "compute.requests",
        "compute.memory_limit_gb",
    }
    assert read <= set(OTHER)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("select.lamda=0.3", "unknown setting select.lamda; did you mean 'select.lambda'?"),
        ("select.lambda_=0.3", "unknown setting select.lambda_; did you mean 'select.lambda'?"),
        ("prune.ration=0.3", "did you mean 'prune.ratio'?"),
        ("selct.lambda=0.3", "unknown section [selct]; did you mean 'select'?"),
        ("select.lambda.x=1", "unknown setting select.lambda.x; did you mean 'select.lambda'?"),
        ("select=5", "select is a section; write [select] and its keys below it"),
        ("select.lambda", "override 'select.lambda' is not of the form section.key=value"),
        ("profile=fast", "profile 'fast' is none of: paper, demo"),
        ("select.lambda=1.5", "select.lambda = 1.5: Input should be less than or equal to 1"),
        ("select.lambda=-0.1", "select.lambda = -0.1: Input should be greater than or equal to 0"),
        ("select.lambda=high", "select.lambda = 'high': Input should be a valid number"),
        ("select.lambda=true", "select.lambda = True: Input should be a valid number"),
        ("select.lambda=nan", "select.lambda = nan"),
        ("select.l_min=inf", "select.l_min = inf: Input should be a finite number"),
        ("select.steps=0", "select.steps = 0: Input should be greater than or equal to 1"),
        ("select.steps=3.0", "select.steps = 3.0: Input should be a valid integer"),
        ("select.seed=true", "select.seed = True: Input should be a valid integer"),
        ("select.group=1", "select.group = 1"),
        ("select.lr=0", "select.lr = 0"),
        ("select.batch=0", "select.batch = 0"),
        ("select.split=0", "select.split = 0"),
        ("select.solver=best", "select.solver = 'best': Input should be 'policy_gradient', 'certified'"),
        ("select.budget=lots", "budget 'lots' cannot be read"),
        ("select.budget=101%", "asks for more than"),
        ("select.budget=-5", "is negative"),
        ("select.budget=1.5tok", "budget '1.5tok' is not a whole number of tokens; write it as '2e9tok'"),
        ("select.objective=pairs", "objective 'pairs' is none of: pws, facility_location, disf, disf_second_moment"),
        ("select.objective=pws,disff=0.3", "objective 'disff' is none of: "),
        ("select.objective=pws,disff=0.3", "did you mean 'disf'?"),
        ("select.objective=pws=-1", "the weight of pws in objective 'pws=-1' is no number >= 0"),
        ("select.objective=pws=0", "objective 'pws=0' weighs nothing"),
        ("select.objective=pws,pws=2", "names pws more than once"),
        ("select.quota=host", "Input should be 'none', 'snapshot', 'cluster' or 'domain'"),
        ("select.quota=snapshot", "select.quota = snapshot shares out a corpus, and select.scope = split"),
        ("select.scope=all", "Input should be 'split', 'snapshot' or 'corpus'"),
        ("select.scope=corpus", "select.scope = corpus needs select.solver = certified, not policy_gradient"),
        ("prune.ratio=1", "prune.ratio = 1: Input should be less than 1"),
        ("score.weights=[1,2]", "takes three numbers >= 0 (DCLM, Edu, Wiki), not all zero"),
        ("score.weights=[0,0,0]", "not all zero"),
        ("score.weights=[1,-1,1]", "takes three numbers"),
        ("score.weights=[nan,1,1]", "score.weights.0 = nan: Input should be a finite number"),
        ("source.set_aside=['x.parquet']", "names shards as '<snapshot>/<shard>', and 'x.parquet' is none"),
        ("source.set_aside=['S/']", "names shards as '<snapshot>/<shard>', and 'S/' is none"),
        ("source.set_aside=['S/data/x']", "and 'S/data/x' is none"),
        ("source.on_bad_shard=skip", "Input should be 'fail' or 'quarantine'"),
        ("source.hash_below=0", "source.hash_below = 0"),
        ("storage.root=5", "storage.root = 5: Input should be a valid string"),
        ("export.formats=['jsonl.gz']", "takes 'parquet' and any of webdataset, jsonl.gz, megatron, each once"),
        ("export.formats=['parquet','parquet']", "each once"),
        ("export.formats=['parquet','csv']", "takes 'parquet' and any of webdataset, jsonl.gz, megatron"),
        ("compute.dtype=int8", "compute.dtype = 'int8'"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(override: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        loaded(override)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "source.url=s3://AKIAKEY:marker-secret@bucket/x",
        "storage.root=s3://bucket/x?secret=marker-secret",
        "storage.root=https://host/x?X-Amz-Signature=marker-secret",
        "storage.root=abfs://c@host/x?sig=marker-secret",
        "models.dclm=https://user:marker-secret@host/model.bin",
        "clean.evaluation_sets=['s3://b/x?a=1&access_token=marker-secret']",
    ],
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(override: str) -> None:
    with pytest.raises(SettingsError, match="is a URL with a password or key in it") as caught:
        loaded(override)
    assert override.partition("=")[0] in str(caught.value)
    assert "marker-secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["s3://bucket/x@y:z", "hf://datasets/org/name@main", "abfs://container@account/x", "s3://b/x?versionId=3"]
)
def test_a_url_without_a_secret_is_taken(url: str) -> None:
    assert loaded(f"source.url={url}").source.url == url


def test_a_section_and_its_key_in_one_breath_is_told_apart() -> None:
    with pytest.raises(SettingsError, match="select is a section"):
        loaded("select=5", "select.lambda=0.3")


def test_mistakes_in_the_file_name_the_file(tmp_path: Path) -> None:
    for text, message in (
        ("[select]\nlamda = 0.3\n", "unknown setting select.lamda; did you mean 'select.lambda'?"),
        ("[select]\nlambda = 2\n", "select.lambda = 2"),
        ("[select\n", "is not TOML"),
    ):
        path = written(tmp_path, text)
        with pytest.raises(SettingsError) as caught:
            load_settings(path, env={})
        assert str(path) in str(caught.value)
        assert message in str(caught.value)
    path.write_bytes(b"\xff")
    with pytest.raises(SettingsError, match="is not TOML"):
        load_settings(path, env={})
    with pytest.raises(SettingsError, match=r"settings file .*absent\.toml does not exist; write one, or unset"):
        load_settings(tmp_path / "absent.toml", env={})


def test_changes_are_checked_as_the_file_is() -> None:
    settings = loaded()
    with pytest.raises(SettingsError, match=r"the changed settings: unknown setting select\.lamda; did you mean"):
        settings.replace({"select.lamda": 0.3})
    with pytest.raises(SettingsError, match=r"the changed settings: select\.lambda = 3"):
        settings.replace({"select.lambda": 3})
    assert settings.replace({}) == settings


def test_numbers_are_read_as_budgets() -> None:
    for given, read in (("select.budget=0.1", "10%"), ("select.budget=5000", "5000"), ("select.budget=2.5%", "2.5%")):
        assert loaded(given).select.budget == read
    assert loaded("select.lr=5").select.lr == 5.0
    with pytest.raises(SettingsError, match=r"select\.budget"):
        loaded("select.budget=true")


def test_overrides_beat_the_environment_which_beats_the_file_which_beats_the_profile(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        'profile = "demo"\n[storage]\nroot = "/file"\n[source]\nurl = "/file"\n[select]\nlambda = 0.2\n'
        "[embed]\nmax_tokens = 99\n",
    )
    env = {"DATAMASK_CONFIG": str(path), "DATAMASK_ROOT": "/env", "DATAMASK_SOURCE": "/env"}
    settings = load_settings(None, ["storage.root=/override", "select.lambda=0.4"], env)
    assert settings.storage.root == "/override"
    assert settings.source.url == "/env"
    assert settings.select.lambda_ == 0.4
    assert settings.embed.max_tokens == 99
    assert settings.models.dclm == "trained"
    assert settings.score.edu_max_tokens == PROFILES["demo"]["score"]["edu_max_tokens"]
    assert load_settings(path, env={"DATAMASK_CONFIG": "/absent.toml"}).select.lambda_ == 0.2
    assert load_settings(path, ["profile=paper"], env={}).models.wiki == "trained"
    assert load_settings(path, ["profile=paper"], env={}).score.edu_max_tokens == 512


def test_evaluation_sets_are_named_from_the_files_folder(tmp_path: Path) -> None:
    path = written(tmp_path, '[clean]\nevaluation_sets = ["a.jsonl", "/data/b.parquet", "s3://c/d.jsonl"]\n')
    settings = load_settings(path, env={})
    assert settings.clean.evaluation_sets == [str(tmp_path / "a.jsonl"), "/data/b.parquet", "s3://c/d.jsonl"]
    path = written(tmp_path, "[clean]\nevaluation_sets = [1]\n")
    with pytest.raises(SettingsError, match=r"clean\.evaluation_sets\.0 = 1: Input should be a valid string"):
        load_settings(path, env={})


def test_relative_paths_are_those_of_the_file_or_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    path = written(
        tmp_path / "conf",
        '[source]\nurl = "in"\n[storage]\nroot = "../out"\n'
        '[models]\nencoder = "org/name"\ndclm = "./m.bin"\nwiki = "https://x/m.bin"\n'
        '[score]\nedu_labels = "e.parquet"\n',
    )
    settings = load_settings(path, env={})
    assert settings.source.url == str(tmp_path / "conf" / "in")
    assert settings.storage.root == str(tmp_path / "out")
    assert settings.models.encoder == "org/name"
    assert settings.models.dclm == str(tmp_path / "conf" / "m.bin")
    assert settings.models.wiki == "https://x/m.bin"
    assert settings.score.edu_labels == str(tmp_path / "conf" / "e.parquet")
    settings = load_settings(path, ["storage.root=here"], env={"DATAMASK_SOURCE": "memory://x"})
    assert settings.storage.root == str(tmp_path / "work" / "here")
    assert settings.source.url == "memory://x"


def test_the_file_beside_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert loaded().select.lambda_ == 0.5
    written(tmp_path, "[select]\nlambda = 0.1\n")
    assert loaded().select.lambda_ == 0.1


def test_settings_do_not_change_under_their_reader() -> None:
    settings = loaded()
    with pytest.raises(ValueError, match="frozen"):
        settings.select.seed = 3
    hash_ = settings.hash(OTHER)
    settings.replace({"select.seed": 3})
    assert settings.hash(OTHER) == hash_


def test_the_hash_is_the_same_in_another_process() -> None:
    keys = sorted(OTHER)
    code = (
        "import json, sys; from dagster_datamask.settings import load_settings; "
        "print(load_settings(None, [], env={}).hash(json.loads(sys.argv[1])))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code, json.dumps(keys[::-1])], capture_output=True, text=True, check=True
    )
    settings = loaded()
    own = settings.hash(keys)
    assert len(own) == 12
    assert other.stdout.strip() == own


class TestWhatCannotBeMet:
    def test_a_share_above_what_pruning_leaves(self) -> None:
        with pytest.raises(
            SettingsError, match=r"the overrides: select\.budget = 56% cannot be met: prune\.ratio = 0\.45 leaves 0\.55"
        ):
            load_settings(os.devnull, ["select.budget=56%"], env={})
        assert load_settings(os.devnull, ["select.budget=55%"], env={}).select.budget == "55%"
        assert load_settings(os.devnull, ["select.budget=56%", "prune.threshold=frozen"], env={})

    def test_logits_that_end_before_they_begin(self) -> None:
        with pytest.raises(SettingsError, match=r"select\.l_max = 1\.0 lies below select\.l_min = 3\.0"):
            load_settings(os.devnull, ["select.l_min=3.0", "select.l_max=1.0"], env={})

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (["solver=certified", "objective=pws=0.5,disf=0.5"], "certified knows pws, disf_second_moment, not disf"),
            (["solver=dvrl", "objective=facility_location"], "dvrl knows pws, not facility_location"),
            (["solver=greedy", "objective=pws,disf"], "greedy knows disf, not pws"),
            (
                ["solver=greedy", "objective=disf", "quota=domain"],
                "takes a number of documents without quotas for disf",
            ),
            (["solver=semdedup", "budget=9tok"], "semdedup takes a number of documents without quotas; change"),
            (["scale=zscore", "objective=disf"], "scale 'zscore' has a closed form for pws alone"),
            (["scope=snapshot", "solver=certified", "objective=disf_second_moment"], "needs select.objective = pws"),
            (
                ["scope=corpus", "solver=certified", "scale=per_pool"],
                "needs select.scale = minmax or raw, not per_pool",
            ),
        ],
    )
    def test_what_no_solver_takes(self, overrides: list[str], message: str) -> None:
        with pytest.raises(SettingsError) as caught:
            loaded(*(f"select.{override}" for override in overrides))
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_what_pruning_leaves_bounds_those_alone_that_choose_of_it(self, strategy: str) -> None:
        joint = ("select.influence=1", "select.solver=certified") if strategy == "joint" else ()
        asked = (f"select.strategy={strategy}", *joint, "prune.ratio=0.45")
        chosen_by = STAGES[mask_of(loaded(*asked))]
        of_vectors = "e5_embeddings" in chosen_by.inputs or strategy == "group_mates"
        assert loaded(*asked, "select.budget=55%")
        if of_vectors:
            with pytest.raises(SettingsError, match=r"select\.budget = 60% cannot be met: prune\.ratio = 0\.45 leaves"):
                loaded(*asked, "select.budget=60%")
        else:
            assert loaded(*asked, "select.budget=60%").select.budget == "60%"

    def test_a_budget_in_tokens_is_no_share_of_what_pruning_leaves(self) -> None:
        assert loaded("select.budget=2e9tok", "prune.ratio=0.9").select.in_tokens
        assert not loaded("select.budget=5%").select.in_tokens

    def test_metrics_that_lambda_leaves_out_bother_no_solver(self) -> None:
        assert loaded("select.lambda=1", "select.solver=certified", "select.objective=disf")

    @pytest.mark.parametrize("override", ["profile.x=1", "profile=[1]", "profile=1"])
    def test_a_profile_of_another_kind(self, override: str) -> None:
        with pytest.raises(SettingsError, match=r"profile .* is none of: paper, demo"):
            load_settings(os.devnull, [override], env={})

    def test_a_home_of_nobody(self) -> None:
        with pytest.raises(SettingsError, match=r"source\.url = '~nobody-here/x'"):
            load_settings(os.devnull, ["source.url=~nobody-here/x"], env={})

    def test_an_override_is_blamed_and_not_the_file(self, tmp_path: Path) -> None:
        config = tmp_path / "datamask.toml"
        config.write_text("[select]\nlambda = 0.2\n")
        with pytest.raises(SettingsError, match=r"^the overrides: select\.lambda = 3"):
            load_settings(config, ["select.lambda=3"], env={})
        config.write_text("[select]\nlambda = 2\n")
        with pytest.raises(SettingsError, match=rf"^{config}: select\.lambda = 2"):
            load_settings(config, [], env={})
