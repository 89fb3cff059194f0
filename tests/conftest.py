"""Fixtures of the whole suite: one small project, its global assets fitted once per session."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as examples

from tests.project import SNAPSHOT_STAGES, Project, settings_for, write_labels, write_shard
from tests.s3 import s3, s3_process

# what the user's shell says must not reach the tests, nor the tests the user's history of runs
for _name in ("DAGSTER_HOME", "DATAMASK_CONFIG", "DATAMASK_SOURCE", "DATAMASK_ROOT"):
    os.environ.pop(_name, None)

# the same examples in each run, and as long as a busy machine needs for one
examples.register_profile(
    "datamask", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
examples.load_profile("datamask")

__all__ = ["s3", "s3_process"]

EMBEDDED = SNAPSHOT_STAGES[: SNAPSHOT_STAGES.index("kmeans_clusters") + 1]
SNAPSHOTS = ("CC-MAIN-2024-10", "CC-MAIN-2024-18")


@pytest.fixture(scope="session")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labels(tmp_path_factory.mktemp("labels"))


@pytest.fixture(scope="session")
def small_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two snapshots of two shards, 40 and 25 rows."""
    source = tmp_path_factory.mktemp("source")
    for snapshot in SNAPSHOTS:
        write_shard(source, snapshot, "000_00000", 40)
        write_shard(source, snapshot, "001_00000", 25)
    return source


@pytest.fixture(scope="session")
def fitted_root(tmp_path_factory: pytest.TempPathFactory, small_source: Path, labels: Path) -> Path:
    """A root with the global assets published; copy it, never write into it."""
    root = tmp_path_factory.mktemp("fitted") / "root"
    Project(settings_for(small_source, root, labels)).fit_global()
    return root


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory, small_source: Path, fitted_root: Path, labels: Path) -> Project:
    """Both snapshots of the small project up to their vectors and clusters. Copy it, never write into it."""
    root = tmp_path_factory.mktemp("embedded") / "root"
    shutil.copytree(fitted_root, root)
    project = Project(settings_for(small_source, root, labels, "select.compare_steps=0", "select.scope=corpus"))
    for snapshot in SNAPSHOTS:
        for name in EMBEDDED:
            project.stage(name, snapshot)
    return project


@pytest.fixture
def project(tmp_path: Path, small_source: Path, fitted_root: Path, labels: Path) -> Project:
    """The small project on a root of its own, global assets fitted, nothing else published."""
    root = tmp_path / "root"
    shutil.copytree(fitted_root, root)
    return Project(settings_for(small_source, root, labels))
