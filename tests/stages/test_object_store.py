"""Source and root on a real S3 server: every stage's bytes are a folder's, a second machine, secrets that stay put."""

import shutil
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_datamask import running
from dagster_datamask.settings import load_settings
from dagster_datamask.shards.source import Source
from dagster_datamask.stages.base import Outcome
from dagster_datamask.stages.baselines import BASELINES
from dagster_datamask.stages.corpus import unsolved
from dagster_datamask.stages.export import dataset_card, outdated
from dagster_datamask.stages.sql import query
from tests.conftest import SNAPSHOTS
from tests.project import SNAPSHOT_STAGES, Project, settings_for
from tests.s3 import KEY, SECRET, S3Server
from tests.stages.conftest import copied, tree
from tests.stages.group_mates import run_stage, through_stages, tiny, write_reference
from tests.stages.test_export import ALL, documents
from tests.stages.test_export import publish as publish_kept
from tests.stages.test_substrings import write_bytewise

pytest_plugins = ("tests.s3",)

SNAPSHOT = SNAPSHOTS[0]
Finished = tuple[Project, dict[str, Outcome]]
# what a bucket needs to be told, and a disk knows by itself
_OWN = (".leases/", ".listing.json", ".lease")


def published(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: body for name, body in files.items() if not any(part in name for part in _OWN)}


def objects(s3: S3Server, folder: str) -> dict[str, bytes]:
    """{path below the folder: bytes} of every object."""
    client, prefix = s3.client, f"bucket/{folder}/"
    return {name.removeprefix(prefix): client.cat_file(name) for name in client.find(prefix)}


def test_a_root_in_a_bucket_holds_the_bytes_of_a_folder_and_another_machine_finds_all_done(
    s3: S3Server, finished: Finished, small_source: Path, labels: Path, tmp_path: Path
) -> None:
    there, outcomes = finished
    here = Project(settings_for(small_source, f"{s3.url}/root", labels, f"storage.cache={tmp_path / 'here'}"))
    here.fit_global()
    here.full(SNAPSHOT)
    one, two = published(tree(there.store.root)), published(objects(s3, "root"))
    assert one.keys() == two.keys()
    assert [name for name in one if one[name] != two[name]] == []

    other = here.with_settings(**{"storage.cache": str(tmp_path / "there")})
    for name in SNAPSHOT_STAGES:
        s3.reset()
        again = other.stage(name, SNAPSHOT).published
        assert again is not None and again.facts == outcomes[name].published.facts
        # a lease, and nothing else
        assert s3.requests["PUT"] == 2, name
    assert published(objects(s3, "root")) == two

    shutil.rmtree(tmp_path / "there")
    s3.reset()
    counted = query(other.store, "SELECT decision, count(*) FROM manifest GROUP BY 1 ORDER BY 1").rows
    assert counted == query(there.store, "SELECT decision, count(*) FROM manifest GROUP BY 1 ORDER BY 1").rows
    assert not (tmp_path / "there").exists()


# ---- all other stages, family by family: the same is run on a folder and on a bucket

LATE = ("fineweb_mask_manifest", "fineweb_mask", "snapshot_report")


def repeats(project: Project, folder: Path) -> None:
    """Against earlier snapshots, and by vectors."""
    apart = project.with_settings(**{"select.scope": "snapshot"})
    for snapshot in SNAPSHOTS:
        apart.stage("text_duplicates", snapshot)
    apart.stage("near_duplicates", SNAPSHOT)


def cleaning(project: Project, folder: Path) -> None:
    sets = folder / "questions.parquet"
    pq.write_table(pa.table({"text": ["light bends when it enters glass and why colours separate"]}), sets)
    asked = {"clean.duplicates": "remove", "clean.near_duplicates": "remove", "clean.evaluation_sets": [str(sets)]}
    clean = project.with_settings(**asked, **{"clean.ngram": 5, "select.scope": "snapshot"})
    for snapshot in SNAPSHOTS:
        for name in ("text_duplicates", "contaminated_documents", "pruned_documents", "e5_embeddings"):
            clean.stage(name, snapshot)
        for name in ("kmeans_clusters", "near_duplicates", "datamask_masks", *LATE):
            clean.stage(name, snapshot)
    clean.stage("selection_report", "")


def two_baselines(project: Project, folder: Path) -> None:
    for name in ("baseline_random", "baseline_quality"):
        project.with_settings(**{"select.scope": "snapshot"}).stage(name, SNAPSHOT)


def all_baselines(project: Project, folder: Path) -> None:
    tokens = write_bytewise(folder / "bytewise") if not (folder / "bytewise").exists() else folder / "bytewise"
    asked = {"select.scope": "snapshot", "source.tokenizer": str(tokens), "baselines.gneissweb_tokens": 40}
    compared = project.with_settings(**asked)
    # its tokens are counted by that tokenizer
    for name in ("ultra_classifier", "raw_shards", "dclm_scores", "edu_scores", "wiki_scores", "quality_scores"):
        compared.stage(name, SNAPSHOT)
    for name in ("pruned_documents", "e5_embeddings", "kmeans_clusters", "ultra_scores", "exact_substrings"):
        compared.stage(name, SNAPSHOT)
    for name in BASELINES:
        compared.stage(name, SNAPSHOT)
    for strategy in ("baseline_gneissweb", "baseline_semdedup"):
        for name in LATE:
            compared.with_settings(**{"select.strategy": strategy}).stage(name, SNAPSHOT)


def corpus(project: Project, folder: Path) -> None:
    solved = project.with_settings(**{"select.solver": "certified"})
    solved.stage("corpus_selection_state", "")
    assert unsolved(solved.store, solved.settings) == {}
    for name in ("datamask_masks", "fineweb_mask_manifest"):
        solved.stage(name, SNAPSHOT)


def corpus_and_exports(project: Project, folder: Path) -> None:
    corpus(project, folder)
    solved = project.with_settings(**{"select.solver": "certified"})
    for snapshot in SNAPSHOTS:
        for name in ("datamask_masks", *LATE):
            solved.stage(name, snapshot)
    solved.stage("selection_report", "")
    for formats in ({"export.formats": ["parquet"]}, ALL):
        dataset_card(solved.with_settings(**formats).run())


def _of_stages(project: Project, folder: Path, *overrides: str) -> Project:
    reference = folder / "reference.parquet"
    if not reference.exists():
        write_reference(reference)
    asked = tiny(reference, "group_mates.stages=1", "select.scope=snapshot", "select.strategy=group_mates", *overrides)
    keys = [override.partition("=")[0] for override in asked]
    given = load_settings("/dev/null", ["profile=demo", *asked], env={}).subset(keys)
    return project.with_settings(**given)


def probes(project: Project, folder: Path) -> None:
    """A checkpoint is a folder of files, read back by the next stage."""
    staged = _of_stages(project, folder, "group_mates.trajectories=4", "group_mates.bootstrap_trajectories=2")
    for name in ("warmup_model", "stage_1/rollout_sets"):
        run_stage(staged, name)


def group_mates(project: Project, folder: Path) -> None:
    staged = _of_stages(project, folder)
    through_stages(staged, SNAPSHOTS[:1])
    joint = staged.with_settings(**{"select.strategy": "joint", "select.influence": 0.3})
    for name in LATE:
        staged.stage(name, SNAPSHOT)
    run_stage(joint, "influence_scores", SNAPSHOT)
    for name in ("datamask_masks", *LATE):
        joint.stage(name, SNAPSHOT)


Family = Callable[[Project, Path], None]
SLOW = (cleaning, all_baselines, corpus_and_exports, group_mates)


@pytest.mark.parametrize(
    "family",
    [repeats, two_baselines, corpus, probes, *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW)],
    ids=lambda family: family.__name__,
)
def test_every_stage_publishes_in_a_bucket_what_it_does_in_a_folder(
    s3: S3Server, embedded: Project, tmp_path: Path, family: Family
) -> None:
    here = copied(embedded, tmp_path / "root")
    s3.upload(tmp_path / "root", "root")
    # so small a cache that what no stage uses goes at once
    cache = {"storage.cache": str(tmp_path / "cache"), "storage.cache_gb": 1e-5}
    there = here.with_settings(**{"storage.root": f"{s3.url}/root", **cache})
    for project in (here, there):
        family(project, tmp_path)
    one, two = published(tree(tmp_path / "root")), published(objects(s3, "root"))
    assert one.keys() == two.keys()
    assert [name for name in one if one[name] != two[name]] == []


def test_an_export_in_a_bucket_is_a_folder_s(s3: S3Server, tmp_path: Path) -> None:
    settings = load_settings("/dev/null", [f"storage.root={tmp_path / 'root'}", "source.url=none"], env={})
    here = Project(settings).with_settings(**ALL)
    there = here.with_settings(**{"storage.root": f"{s3.url}/root", "storage.cache": str(tmp_path / "cache")})
    for project in (here, there):
        publish_kept(project.store, "A", s0=documents("a", "b"), s1=documents("c"))
        assert dataset_card(project.run()).published is not None
        assert outdated(project.store, project.settings) == {}
    one, two = published(tree(tmp_path / "root")), published(objects(s3, "root"))
    assert one.keys() == two.keys()
    assert [name for name in one if one[name] != two[name]] == []


@pytest.mark.slow
def test_a_run_on_a_bucket_alone_tells_no_secret_and_makes_what_a_folder_gets(
    s3: S3Server, small_source: Path, labels: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = settings_for(
        s3.upload(small_source, "source"), f"{s3.url}/root", labels, f"storage.cache={tmp_path / 'cache'}"
    )
    (tmp_path / "home").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "home")) as instance:
        runs = running.materialise(settings, Source(settings.source.url), [SNAPSHOT], instance)
        events = [str(entry) for run in runs for entry in instance.all_logs(run.run_id)]
    assert [run.failure for run in runs] == [None, None]
    assert len(events) > 100
    here = objects(s3, "root")
    shown = [*here.values(), *tree(tmp_path / "home").values(), *tree(tmp_path / "cache").values()]
    shown += [text.encode() for text in (*events, *capfd.readouterr())]
    assert [text for text in shown if SECRET.encode() in text or KEY.encode() in text] == []

    local = Project(settings.replace({"storage.root": str(tmp_path / "root")}))
    local.fit_global()
    local.full(SNAPSHOT)
    one, two = published(tree(tmp_path / "root")), published(here)
    assert one.keys() == two.keys()
    assert [name for name in one if one[name] != two[name]] == []
