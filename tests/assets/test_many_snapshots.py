"""Corpus-wide assets beside 110 snapshots, ten more than Dagster follows: their checks compare the fingerprints."""

import json
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from dagster_datamask.definitions import build_definitions
from dagster_datamask.settings import Settings
from dagster_datamask.shards.generations import POINTER, Store
from dagster_datamask.shards.writer import write_json
from dagster_datamask.stages.base import STAGES, candidate_inputs
from dagster_datamask.stages.corpus import STATE, STATE_FILE
from tests.conftest import SNAPSHOTS

MANY = [f"CC-MAIN-{2000 + k // 50}-{k % 50:02d}" for k in range(110)]
# what Dagster shows as stale it finds among fewer upstream partitions than this
DAGSTERS_LIMIT = 100


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture
def corpus(own_root: Settings) -> Settings:
    """110 snapshots with vectors and a state solved from all of them: pointers, which is all that a check reads."""
    settings = own_root.replace({"select.scope": "corpus", "select.solver": "certified", "select.compare_steps": 0})
    store = Store(Path(settings.storage.root))
    for name in ("raw_shards", *candidate_inputs(settings)):
        for snapshot in SNAPSHOTS:
            (store.folder(name, snapshot) / POINTER).rename(pointer := store.folder(name, snapshot) / "template.json")
        template = json.loads(pointer.read_text("utf-8"))
        for snapshot in MANY:
            store.folder(name, snapshot).mkdir()
            made = {**template, "snapshot": snapshot, "fingerprint": f"{name} of {snapshot}"}
            made["inputs"] = {key: f"{key} of {snapshot}" for key in template["inputs"]}
            write_json(store.folder(name, snapshot) / POINTER, made)
    stage = STAGES[STATE]
    identity = stage.identity(settings)
    with store.generation(STATE, None, code_version=stage.version, settings=identity, inputs={}) as generation:
        entries = {
            snapshot: {"round": "r", "inputs": {name: f"{name} of {snapshot}" for name in candidate_inputs(settings)}}
            for snapshot in MANY
        }
        write_json(generation.folder / STATE_FILE, {"rounds": [], "snapshots": entries})
        generation.publish([], ".parquet", {})
    return settings


def waiting(settings: Settings, instance: dg.DagsterInstance) -> tuple[bool, dict[str, object]]:
    """(whether the state's check passes, its metadata), run as the UI's "Execute" runs it."""
    key = dg.AssetCheckKey(dg.AssetKey(STATE), "every_embedded_snapshot_solved")
    job = build_definitions(settings).resolve_implicit_global_asset_job_def()
    result = job.get_subset(asset_selection=set(), asset_check_selection={key}).execute_in_process(instance=instance)
    (evaluation,) = result.get_asset_check_evaluations()
    return evaluation.passed, {name: value.value for name, value in evaluation.metadata.items()}


def test_a_snapshot_published_anew_and_a_new_one_are_named_among_110(
    corpus: Settings, instance: dg.DagsterInstance
) -> None:
    assert len(MANY) > DAGSTERS_LIMIT
    assert waiting(corpus, instance) == (
        True,
        {"waiting": 0, "snapshots": "none", "remedy": "run the job solve_corpus"},
    )
    store = Store(Path(corpus.storage.root))
    pointer = store.folder("e5_embeddings", MANY[104]) / POINTER
    write_json(pointer, {**json.loads(pointer.read_text("utf-8")), "fingerprint": "another"})
    passed, told = waiting(corpus, instance)
    assert not passed and told["waiting"] == 1 and told["snapshots"] == f"{MANY[104]} (published anew since)"
    for name in ("raw_shards", *candidate_inputs(corpus)):
        pointer = store.folder(name, MANY[0]) / POINTER
        store.folder(name, "CC-NEW").mkdir()
        new = json.loads(pointer.read_text("utf-8"))
        write_json(store.folder(name, "CC-NEW") / POINTER, {**new, "snapshot": "CC-NEW"})
    passed, told = waiting(corpus, instance)
    assert not passed and told["waiting"] == 2 and "CC-NEW (new)" in str(told["snapshots"])


def test_changed_settings_make_all_110_wait(corpus: Settings, instance: dg.DagsterInstance) -> None:
    passed, told = waiting(corpus.replace({"select.lambda": 0.3}), instance)
    assert not passed and told["waiting"] == 110
    assert "solved under other settings or code" in str(told["snapshots"])
