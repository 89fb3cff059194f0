"""The definitions load anywhere, agree with the workspace, and every asset is documented and owned."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import dagster as dg
import pytest
import yaml

from dagster_datamask.definitions import build_definitions
from dagster_datamask.settings import load_settings
from dagster_datamask.stages.base import STAGES, active, lineage

REPO = Path(__file__).parents[1]

# Sockets, CUDA and model hubs are all out of reach: what loads here loads on any web server.
LOAD_WITH_NOTHING = """
import socket
def refuse(*args, **kwargs):
    raise OSError("no network in this test")
socket.socket.connect = refuse
socket.getaddrinfo = refuse
import sys
import dagster_datamask.definitions as module
print(len(list(module.defs.resolve_asset_graph().get_all_asset_keys())))
print(",".join(sorted({"torch", "transformers", "sentence_transformers", "sklearn"} & set(sys.modules))))
"""


def test_loads_without_network_gpu_credentials_or_settings_file(tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", LOAD_WITH_NOTHING],
        cwd=work,
        env={
            "PATH": os.defpath,
            "HOME": str(home),
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assets, heavy = done.stdout.splitlines()
    assert int(assets) == len(active(load_settings(os.devnull, env={})))
    assert heavy == "", "a code location that only lists assets must not pay for the model libraries"
    assert list(work.iterdir()) == []


def test_a_wrong_settings_file_is_one_clear_line_at_load(tmp_path: Path) -> None:
    (tmp_path / "datamask.toml").write_text("[select]\nlamda = 0.3\n")
    done = subprocess.run(
        [sys.executable, "-c", "import dagster_datamask.definitions"],
        cwd=tmp_path,
        env={"PATH": os.defpath, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 1
    assert "unknown setting select.lamda; did you mean 'select.lambda'?" in done.stderr.strip().splitlines()[-1]


def test_the_code_location_has_one_name() -> None:
    module = yaml.safe_load((REPO / "workspace.yaml").read_text())["load_from"][0]["python_module"]
    tool = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["dagster"]
    assert module["location_name"] == tool["code_location_name"]
    assert module["module_name"] == tool["module_name"]


@pytest.fixture(scope="module")
def defs() -> dg.Definitions:
    return build_definitions(load_settings(os.devnull, env={}))


def test_definitions_are_loadable(defs: dg.Definitions) -> None:
    dg.Definitions.validate_loadable(defs)


def test_every_asset_has_group_owner_code_version_and_description(defs: dg.Definitions) -> None:
    specs = {spec.key.to_user_string(): spec for spec in defs.resolve_all_asset_specs()}
    assert set(specs) == set(active(load_settings(os.devnull, env={})))
    for name, spec in specs.items():
        assert spec.group_name and spec.group_name != "default", name
        assert spec.owners, name
        assert spec.description and spec.description.endswith("."), name
        assert spec.code_version and spec.code_version.startswith(STAGES[name].version + "-"), name


def test_badges_say_what_an_asset_is_made_with(defs: dg.Definitions) -> None:
    kinds = {spec.key.to_user_string(): spec.kinds for spec in defs.resolve_all_asset_specs()}
    assert kinds["dclm_classifier"] == kinds["ultra_classifier"] == {"fasttext"}
    assert kinds["edu_classifier"] == kinds["e5_embeddings"] == {"torch"}
    assert kinds["snapshot_report"] == {"html"} and kinds["fineweb_mask"] == {"parquet"}


def test_every_check_says_what_it_means(defs: dg.Definitions) -> None:
    checks = defs.resolve_asset_graph().asset_check_keys
    assert {key.asset_key.to_user_string() for key in checks} == set(active(load_settings(os.devnull, env={})))
    for key in checks:
        spec = defs.resolve_asset_graph().get_check_spec(key)
        assert spec.description and spec.description.endswith("."), key


def pools_of(defs: dg.Definitions) -> dict[str, set[str]]:
    graph = defs.resolve_asset_graph()
    return {key.to_user_string(): graph.get(key).pools for key in graph.get_all_asset_keys()}


def test_the_accelerator_and_room_for_a_model_are_pools_and_nothing_else_is(defs: dg.Definitions) -> None:
    pools = pools_of(defs)
    assert {name for name, pool in pools.items() if pool == {"gpu"}} == {
        name for name, stage in active(load_settings(os.devnull, env={})).items() if stage.on_accelerator
    }
    assert {name for name, pool in pools.items() if pool == {"model"}} == {"dclm_scores", "wiki_scores", "ultra_scores"}
    assert set().union(*pools.values()) == {"gpu", "model"}


@pytest.mark.parametrize("elsewhere", ["compute.backend=ray", "compute.executor=k8s_job"])
def test_models_that_lie_in_other_memories_are_no_pool(elsewhere: str) -> None:
    pytest.importorskip("dagster_k8s", reason="the extra k8s is not installed")
    pools = pools_of(build_definitions(load_settings(os.devnull, [elsewhere], env={})))
    assert set().union(*pools.values()) == {"gpu"}


def test_no_asset_feeds_a_global_one_from_a_snapshot(defs: dg.Definitions) -> None:
    graph = defs.resolve_asset_graph()
    for key in graph.get_all_asset_keys():
        node = graph.get(key)
        if node.partitions_def is None:
            assert all(graph.get(parent).partitions_def is None for parent in node.parent_keys), key
        else:
            assert node.partitions_def.name == "cc_snapshot", key


OF_CORPUS = ("select.scope=corpus", "select.solver=certified")


@pytest.mark.parametrize(
    ("overrides", "read_by_masks"),
    [
        ([], {"quality_calibration"}),
        (["select.lambda=0"], set()),
        (["select.scale=raw", "select.budget=9tok"], {"raw_shards"}),
        (["select.quota=cluster"], {"quality_calibration", "kmeans_clusters"}),
        (["select.quota=domain"], {"quality_calibration", "raw_shards"}),
        ([*OF_CORPUS, "select.quota=cluster"], {"corpus_selection_state"}),
    ],
)
def test_edges_are_those_of_the_stage_table(overrides: list[str], read_by_masks: set[str]) -> None:
    settings = load_settings(os.devnull, overrides, env={})
    graph = build_definitions(settings).resolve_asset_graph()
    edges = {key.to_user_string(): graph.get(key).parent_keys for key in graph.get_all_asset_keys()}
    edges = {name: {key.to_user_string() for key in parents} for name, parents in edges.items()}
    assert edges == {name: set(stage.needs(settings)) for name, stage in active(settings).items()}
    assert edges["datamask_masks"] == {"pruned_documents", "e5_embeddings"} | read_by_masks


def test_the_sensor_that_solves_the_corpus_is_there_where_the_corpus_is_solved() -> None:
    def sensors(*overrides: str) -> set[str]:
        definitions = build_definitions(load_settings(os.devnull, overrides, env={}))
        return {sensor.name for sensor in definitions.sensors or []}

    assert sensors() == {"new_shards", "retry_failed_snapshots"}
    assert sensors(*OF_CORPUS) == {"new_shards", "retry_failed_snapshots", "new_embeddings"}


def test_a_changed_setting_moves_the_code_version_of_what_reads_it_and_of_what_follows() -> None:
    def versions(*overrides: str) -> dict[str, str]:
        specs = build_definitions(load_settings(os.devnull, overrides, env={})).resolve_all_asset_specs()
        return {spec.key.to_user_string(): spec.code_version or "" for spec in specs}

    def moved(*overrides: str) -> set[str]:
        after = versions(*overrides)
        return {name for name in before if before[name] != after[name]}

    before = versions()
    assert moved() == set()
    assert moved("storage.root=/elsewhere", "source.url=/there", "compute.memory_limit_gb=2") == set()
    selected = {"datamask_masks", "fineweb_mask_manifest", "fineweb_mask", "snapshot_report"}
    assert moved("select.lambda=0.3") == {"corpus_selection_state", *selected}
    assert moved("select.on_new_snapshot=resolve") == {"corpus_selection_state"}
    assert moved("select.quota=cluster") == {"corpus_selection_state", *selected}
    settings = load_settings(os.devnull, env={})
    after = {name: set(lineage([name], settings)) for name in active(settings)}
    assert moved("models.edu=other/model") == {name for name, line in after.items() if "edu_classifier" in line}
    assert moved("source.on_bad_shard=quarantine") == {name for name, line in after.items() if "raw_shards" in line}
    assert moved("group_mates.steps=3") == {name for name, line in after.items() if "stage_1/rollout_sets" in line}
    assert {"stage_2/group_mates_selection", "group_mates_selection"} <= moved("group_mates.steps=3")
    assert "warmup_model" not in moved("models.edu=other/model", "group_mates.steps=3")
