"""Shards that end whatever process reads them: quarantined, named with a remedy, or set aside."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl
import pytest
import torch

from dagster_datamask.compute.base import Poisoned, Told
from dagster_datamask.compute.local import Processes
from dagster_datamask.failures import is_transient, shard_of, told
from dagster_datamask.settings import SettingsError
from dagster_datamask.stages.ingest import QUARANTINED_FILE
from tests import deadly
from tests.compute.places import Elsewhere, Placed
from tests.project import Project, write_shard

# as if it had broken pages that a reader does not survive; its footer is read by this process
POISON = "b_poison"


@pytest.fixture(scope="module")
def not_yet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("not_yet")


@pytest.fixture(scope="module")
def place(not_yet: Path) -> Iterator[Elsewhere]:
    """Two processes to which that shard is deadly, while it is not to this one."""
    before = dict(os.environ)
    os.environ |= {deadly.DEADLY: POISON, deadly.SPARED: str(os.getpid()), deadly.NOT_YET: str(not_yet)}
    with Processes(2, threads=1) as processes:
        yield Elsewhere(processes)
    os.environ.clear()
    os.environ |= before


@pytest.fixture(params=[0, 1], ids=["ids", "texts"])
def survived(request: pytest.FixtureRequest, not_yet: Path) -> int:
    """How often the shard is read to no harm: not even for its ids, or for these but not for all else."""
    for number in range(request.param):
        (not_yet / str(number)).touch()
    return int(request.param)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for shard in ("a", POISON, "c"):
        write_shard(tmp_path / "source", "S", shard, 9)
    return tmp_path / "source"


def placed(project: Project, source: Path, place: Elsewhere, **values: object) -> Placed:
    return Placed(project.settings.replace({"source.url": f"deadly://{source}", **values}), place)


def aside(outcome: object) -> list[dict[str, str]]:
    return pl.read_parquet(outcome.published.folder / QUARANTINED_FILE).to_dicts()  # type: ignore[attr-defined]


def test_a_shard_that_ends_its_readers_is_quarantined_and_the_rest_counts(
    project: Project, source: Path, place: Elsewhere, survived: int
) -> None:
    changed = placed(project, source, place, **{"source.on_bad_shard": "quarantine"})
    outcome = changed.stage("raw_shards", "S")
    assert aside(outcome) == [{"shard": POISON, "reason": "ends the process that reads it, 3 of 3 times"}]
    (check,) = (check for check in outcome.checks if not check.passed)
    assert check.name == "every_shard_readable" and not check.blocking
    assert outcome.rows_in == sum(outcome.counts.values()) == 18
    (source / "data" / "S" / f"{POISON}.parquet").unlink()
    without = Project(project.settings.replace({"source.url": str(source)})).stage("raw_shards", "S").published
    for shard in ("a", "c"):
        assert outcome.published.path(shard).read_bytes() == without.path(shard).read_bytes()
    # and once more, as it is found again
    write_shard(source, "S", POISON, 9)
    assert changed.stage("raw_shards", "S").published.fingerprint == outcome.published.fingerprint


def test_without_quarantine_it_is_named_with_the_remedy_that_goes_on(
    project: Project, source: Path, place: Elsewhere, survived: int
) -> None:
    """Others are done before it is told, unless it has no ids: which of theirs are duplicates is not known then."""
    changed = placed(project, source, place)
    with pytest.raises(Poisoned) as caught:
        changed.stage("raw_shards", "S")
    line = told(caught.value)
    assert f"{POISON} (SIGKILL)" in line and f'source.set_aside = ["S/{POISON}"]' in line and "\n" not in line
    assert not is_transient(caught.value) and shard_of(caught.value) is None
    assert project.store.published("raw_shards", "S") is None
    (generation,) = (path for path in (project.store.root / "raw_shards" / "S").iterdir() if path.is_dir())
    done = ["a.parquet.done.json", "c.parquet.done.json"] if survived else []
    assert sorted(path.name for path in generation.glob("*.done.json")) == done
    assert ("all others are done" in line) is bool(survived)
    assert list(generation.rglob("*.tmp*")) == []

    outcome = changed.with_settings(**{"source.set_aside": [f"S/{POISON}", "OTHER/a"]}).stage("raw_shards", "S")
    assert aside(outcome) == [{"shard": POISON, "reason": "named in source.set_aside"}]
    assert outcome.published.shards == ("a", "c")
    assert [check.name for check in outcome.checks if not check.passed] == ["every_shard_readable"]


def test_a_later_step_names_it_and_keeps_what_is_done(project: Project, source: Path, place: Elsewhere) -> None:
    raw = Project(project.settings.replace({"source.url": str(source)}))
    raw.stage("raw_shards", "S")
    changed = placed(project, source, place)
    with pytest.raises(Poisoned, match=rf"{POISON} \(SIGKILL\); all others are done"):
        changed.stage("dclm_scores", "S")
    (generation,) = (path for path in (project.store.root / "dclm_scores" / "S").iterdir() if path.is_dir())
    assert sorted(path.name for path in generation.glob("*.parquet")) == ["a.parquet", "c.parquet"]
    # what is not deadly to this process is done by it, and the others are not done again
    before = {path: path.stat().st_mtime_ns for path in generation.glob("*.parquet")}
    assert raw.stage("dclm_scores", "S").published.shards == ("a", POISON, "c")
    assert all(path.stat().st_mtime_ns == at for path, at in before.items())


def test_what_is_set_aside_is_passed_over_by_the_sample_too(project: Project, source: Path) -> None:
    for shard in ("a", "c"):
        (source / "data" / "S" / f"{shard}.parquet").unlink()
    shutil.copy(source / "data" / "S" / f"{POISON}.parquet", source / "data" / "S" / "a.parquet")
    (source / "data" / "S" / f"{POISON}.parquet").write_bytes(b"no parquet")
    changed = project.with_settings(
        **{"source.url": str(source), "source.set_aside": [f"S/{POISON}"], "score.calibration_sample": 5}
    )
    assert changed.stage("quality_calibration", "").published.rows == 5


def test_a_shard_that_is_set_aside_and_not_there_is_an_error_that_names_the_nearest(
    project: Project, source: Path
) -> None:
    changed = project.with_settings(**{"source.url": str(source), "source.set_aside": ["S/b_poisn"]})
    with pytest.raises(SettingsError, match=f"S has no shard 'b_poisn'; did you mean 'S/{POISON}'?"):
        changed.stage("raw_shards", "S")


def test_what_is_done_apart_is_done_on_as_many_threads_as_here(project: Project) -> None:
    """A shard that a killed run began is, and has the bits that it would have had here."""

    def worker() -> Callable[[int, Told], int]:
        return lambda item, told: torch.get_num_threads()

    before = torch.get_num_threads()
    try:
        for here in (1, 2):
            torch.set_num_threads(here)
            with project.run()._apart() as place:
                assert list(place.each(worker, [0])) == [(0, here)]
    finally:
        torch.set_num_threads(before)


DEADLY_HERE = """
import os, sys
from pathlib import Path
from dagster_datamask.compute.base import INLINE
from dagster_datamask.settings import Settings
from tests import deadly
from tests.project import Project, settings_for

source, root, labels, not_yet = map(Path, sys.argv[1:])
os.environ |= {deadly.DEADLY: "b_poison", deadly.NOT_YET: str(not_yet)}
options = (f"source.url=deadly://{source}", "source.on_bad_shard=quarantine")
outcome = Project(settings_for(source, root, labels, *options)).stage("raw_shards", "S")
print(outcome.published.shards)
"""


# between footer and ids its bytes are read to be hashed, which decodes nothing
@pytest.mark.parametrize(
    ("reads", "mark"),
    [
        (0, "@S.footer"),
        pytest.param(2, ".ids", marks=pytest.mark.slow),
        pytest.param(3, ".parquet", marks=pytest.mark.slow),
    ],
)
def test_a_shard_that_ends_the_run_s_own_process_ends_one_run_alone(
    source: Path, labels: Path, tmp_path: Path, reads: int, mark: str
) -> None:
    """As where rows are few and nothing is done elsewhere: the first run ends, and the next one quarantines it."""
    (tmp_path / "not_yet").mkdir()

    def go() -> subprocess.CompletedProcess[str]:
        for number in range(reads):
            (tmp_path / "not_yet" / str(number)).touch()
        arguments = map(str, (source, tmp_path / "root", labels, tmp_path / "not_yet"))
        command = [sys.executable, "-c", DEADLY_HERE, *arguments]
        return subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)

    assert go().returncode == -signal.SIGKILL
    second = go()
    assert second.stdout == "('a', 'c')\n", second.stderr
    # what tells the next run not to read it in its own process
    assert [path.name for path in (tmp_path / "root").rglob(".began-*")] == [f".began-b_poison{mark}"]
