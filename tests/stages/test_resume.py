"""kill -9 at any moment, then run again: every published byte equals that of one clean run."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dagster_datamask import keyed
from tests.conftest import SNAPSHOTS
from tests.stages.conftest import tree

SNAPSHOT = SNAPSHOTS[0]
OVERRIDES = ("select.split=10",)  # four splits
REPOSITORY = Path(__file__).parents[2]

# just before a finished temp file takes its name: one moment within each long stage, and each kind of file
MOMENTS = (
    "/raw_shards/{s}/{g}/001_00000.parquet",
    "/raw_shards/{s}/{g}/000_00000.parquet.done.json",
    "/raw_shards/{s}/{g}/quarantined_shards.parquet",
    "/raw_shards/{s}/current.json",
    "/edu_scores/{s}/{g}/001_00000.parquet",
    "/pruned_documents/{s}/{g}/000_00000.parquet",
    "/e5_embeddings/{s}/{g}/000_00000.arrow",
    "/e5_embeddings/{s}/{g}/001_00000.arrow.done.json",
    "/datamask_masks/{s}/{g}/.work/split_00002.arrow",
    "/datamask_masks/{s}/{g}/splits/00001.parquet",
    "/datamask_masks/{s}/{g}/splits/00002.json",
    "/datamask_masks/{s}/{g}/001_00000.parquet",
    "/datamask_masks/{s}/current.json",
    "/fineweb_mask_manifest/{s}/{g}/001_00000.parquet.done.json",
    "/fineweb_mask_manifest/{s}/{g}/manifest.json",
    "/fineweb_mask/{s}/{g}/001_00000.parquet",
)


class Victim:
    """A process that runs the stages once per order; see tests/stages/killing.py."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process

    def run(self, order: str = "") -> tuple[int, int | None]:
        """(exit code, file events where it came to the end)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()
        code, events = self._process.stdout.readline().split()
        return int(code), None if events == "-" else int(events)


@contextmanager
def victim(source: Path, root: Path, labels: Path) -> Iterator[Victim]:
    command = [sys.executable, "-m", "tests.stages.killing", source, root, labels, SNAPSHOT, *OVERRIDES]
    with subprocess.Popen(
        [str(part) for part in command],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        yield Victim(process)


@pytest.fixture(scope="module")
def clean(
    tmp_path_factory: pytest.TempPathFactory, small_source: Path, fitted_root: Path, labels: Path
) -> tuple[dict[str, bytes], int]:
    """(every file of one undisturbed run, its number of file events)."""
    root = tmp_path_factory.mktemp("clean") / "root"
    shutil.copytree(fitted_root, root)
    with victim(small_source, root, labels) as undisturbed:
        code, events = undisturbed.run()
    assert code == 0
    assert events is not None
    assert events > 100
    files = tree(root)
    assert sum("/splits/" in name for name in files) == 9  # a plan, four results and their facts
    assert not [name for name in files if name.endswith(".tmp") or "/.work/" in name]
    return files, events


def moments(files: dict[str, bytes]) -> list[str]:
    """The moments with the fingerprints of the clean run."""
    found = []
    for moment in MOMENTS:
        asset = moment.split("/")[1]
        (generation,) = {
            name.split("/")[2] for name in files if name.startswith(f"{asset}/{SNAPSHOT}/") and name.count("/") > 2
        }
        found.append(moment.format(s=SNAPSHOT, g=generation))
    return found


def test_killed_in_the_long_stages_and_at_random(
    tmp_path: Path, small_source: Path, fitted_root: Path, labels: Path, clean: tuple[dict[str, bytes], int]
) -> None:
    files, events = clean
    root = tmp_path / "root"
    shutil.copytree(fitted_root, root)
    chosen = [m for m in moments(files) if "e5_embeddings" in m or "splits/00002" in m]
    # every stage opens its lease and rewrites its pointer even when it is done, so a quarter of the events is left
    at_random = int(keyed.rng(0, "kill").integers(1, events // 4))
    with victim(small_source, root, labels) as killed:
        for order in (*chosen, str(at_random)):
            assert killed.run(order)[0] == -signal.SIGKILL, order
        assert killed.run()[0] == 0
    assert tree(root) == files


@pytest.mark.slow
def test_killed_at_every_chosen_moment_and_at_two_dozen_random_ones(
    tmp_path: Path, small_source: Path, fitted_root: Path, labels: Path, clean: tuple[dict[str, bytes], int]
) -> None:
    files, events = clean
    rng = keyed.rng(1, "kill")
    orders = [[order] for order in moments(files)]
    # a second and a third kill on top of the first: resumed runs have fewer events left, so the later ones may miss
    orders += [[str(int(rng.integers(1, events // (k + 1)))) for k in range(3)] for _ in range(8)]
    root = tmp_path / "root"
    with victim(small_source, root, labels) as killed:
        for sequence in orders:
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(fitted_root, root)
            codes = [killed.run(order)[0] for order in sequence]
            assert codes[0] == -signal.SIGKILL, sequence
            assert set(codes) <= {0, -signal.SIGKILL}, sequence
            assert killed.run()[0] == 0, sequence
            assert tree(root) == files, sequence


@pytest.mark.slow
def test_killed_from_outside_at_moments_of_the_clock(
    tmp_path: Path, small_source: Path, fitted_root: Path, labels: Path, clean: tuple[dict[str, bytes], int]
) -> None:
    files, _ = clean
    root = tmp_path / "root"
    shutil.copytree(fitted_root, root)
    rng = keyed.rng(2, "kill")
    code = (
        "import sys; from pathlib import Path; from tests.project import *; "
        "p = Project(settings_for(*map(Path, sys.argv[1:4]), 'select.split=10')); print('ready', flush=True); "
        "[p.stage(n, sys.argv[4]) for n in SNAPSHOT_STAGES]"
    )
    command = [sys.executable, "-c", code, str(small_source), str(root), str(labels), SNAPSHOT]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = 0
    for _ in range(8):
        with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(float(rng.uniform(0.1, 2.0)))
            process.kill()
        killed += process.returncode == -signal.SIGKILL
    assert killed > 0
    with victim(small_source, root, labels) as last:
        assert last.run()[0] == 0
    assert tree(root) == files
