"""Ray as a place to compute, on real clusters of this machine: two nodes, that lose workers and nodes, and grow."""

import errno
import fcntl
import importlib.metadata
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from dagster_datamask import __version__
from dagster_datamask.compute import cluster as module
from dagster_datamask.compute.base import INLINE, Inline, Poisoned, Requests, WorkerTraceback, packed
from dagster_datamask.compute.cluster import (
    ClusterUnavailable,
    ClusterUnfit,
    RayCluster,
    _Pool,
    _remove_if_left,
    _room,
    _Round,
    _there,
    _Worker,
)
from dagster_datamask.failures import is_transient, shard_of
from dagster_datamask.shards.engine import AT_SHARD
from tests.compute.conftest import NODE, until_ray_starts

ray = pytest.importorskip("ray", reason="the extra ray is not installed")

SECONDS = 300.0


@pytest.fixture(scope="module")
def connected(cluster: Any) -> Iterator[RayCluster]:
    place = RayCluster(cluster.address)
    yield place
    place.close()


@pytest.fixture
def place(connected: RayCluster) -> Iterator[RayCluster]:
    """The cluster, telling a log of its own."""
    connected.log = (told := list[str]()).append
    connected.told = told  # type: ignore[attr-defined]
    yield connected


def _doing(work: Callable[[Any, Callable[[int], None]], Any]) -> Callable[[], Any]:
    return lambda: work


def _until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_results_are_those_of_one_process(place: RayCluster) -> None:
    def worker() -> Callable[[int, Any], Any]:
        rng = np.random.default_rng(5)
        matrix = rng.normal(size=(64, 64)).astype(np.float32)

        def work(item: int, told: Callable[[int], None]) -> bytes:
            return (matrix @ np.full(64, item, np.float32)).tobytes()

        return work

    items = list(range(7))
    here = list(INLINE.each(worker, items))
    there = list(place.each(worker, items))
    assert sorted(there) == here
    assert [len(list(place.each(worker, items[:rows]))) for rows in (0, 1)] == [0, 1]
    assert place.workers == 2


def test_a_worker_is_built_once_and_both_nodes_work(place: RayCluster, tmp_path: Path) -> None:
    def worker() -> Callable[[int, Any], Any]:
        (tmp_path / f"built-{os.getpid()}").touch(exist_ok=False)

        def work(item: int, told: Callable[[int], None]) -> tuple[str, int]:
            # both are here before either is done
            (tmp_path / f"{item}").touch()
            while len(list(tmp_path.glob("[0-9]"))) < 2:
                time.sleep(0.02)
            return ray.get_runtime_context().get_node_id(), os.getpid()

        return work

    done = dict(place.each(worker, range(6)))
    assert len({node for node, _ in done.values()}) == len({pid for _, pid in done.values()}) == 2
    assert {path.name for path in tmp_path.glob("built-*")} == {f"built-{pid}" for _, pid in done.values()}


def test_progress_is_told_of_items_at_work(place: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_LOOKS", 0.05)

    def work(item: str, told: Callable[[int], None]) -> None:
        for rows in range(100, 500, 100):
            told(rows)
            # no further than what was heard
            while not (tmp_path / f"{item}-{rows}").exists():
                time.sleep(0.01)

    heard: list[tuple[str, int]] = []

    def hear(item: str, rows: int) -> None:
        heard.append((item, rows))
        (tmp_path / f"{item}-{rows}").touch()

    ended = [(item, len(heard)) for item, _ in place.each(_doing(work), ["a", "b"], told=hear)]
    assert sorted(item for item, _ in ended) == ["a", "b"]
    for item, end in ended:
        rows = [rows for name, rows in heard if name == item]
        assert rows == sorted(rows) and {100, 200, 300, 400} <= set(rows) <= {0, 100, 200, 300, 400}
        # nothing is told of what is done
        assert item not in [name for name, _ in heard[end:]]


def test_a_killed_worker_costs_another_try_of_its_item_alone(place: RayCluster, tmp_path: Path) -> None:
    def work(item: int, told: Callable[[int], None]) -> int:
        (mine := tmp_path / f"of-{os.getpid()}").mkdir(exist_ok=True)
        with (tmp_path / f"tries-{item}").open("a") as file:
            file.write(".")
        if item == 3 and not (tmp_path / "killed").exists():
            # what this process did before has arrived, or that would be lost with it, too
            while any(not (tmp_path / f"taken-{path.name}").exists() for path in mine.iterdir()):
                time.sleep(0.02)
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        (mine / str(item)).touch()
        return item * item

    done = {}
    for item, result in place.each(_doing(work), range(8)):
        done[item] = result
        (tmp_path / f"taken-{item}").touch()
    assert done == {item: item * item for item in range(8)}
    tries = {int(path.name.removeprefix("tries-")): len(path.read_text()) for path in tmp_path.glob("tries-*")}
    assert tries == {item: 1 + (item == 3) for item in range(8)}
    lost = [line for line in place.told if line.startswith("lost worker ")]  # type: ignore[attr-defined]
    assert len(lost) == 1
    assert "on node " in lost[0] and "(its process was killed or crashed); tried again: 3" in lost[0]


def test_what_ends_every_worker_is_given_up_when_all_else_is_done(place: RayCluster, tmp_path: Path) -> None:
    def work(item: str, told: Callable[[int], None]) -> str:
        if item == "poison":
            with (tmp_path / "tries").open("a") as file:
                file.write(".")
            os._exit(7)
        return item.upper()

    done = []
    with pytest.raises(Poisoned, match=r"poison \(its process was killed or crashed\)") as caught:
        for item, result in place.each(_doing(work), ["poison", "a", "b", "c"]):
            done.append((item, result))
    assert sorted(done) == [("a", "A"), ("b", "B"), ("c", "C")]
    assert (tmp_path / "tries").read_text() == "..."
    assert caught.value.why == {"poison": "its process was killed or crashed"}


class Unsendable(OSError):
    """An error whose constructor takes what pickle does not know."""

    def __init__(self, *, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.lock = threading.Lock()


def test_an_error_arrives_as_itself_after_what_is_under_way(place: RayCluster, tmp_path: Path) -> None:
    def work(item: str, told: Callable[[int], None]) -> str:
        (tmp_path / f"{os.getpid()}-{item}").touch()
        # both workers are at work when one fails
        while len({path.name.partition("-")[0] for path in tmp_path.iterdir()}) < 2:
            time.sleep(0.02)
        if item == "bad":
            try:
                raise Unsendable(status=503)
            except OSError as error:
                wrapped = ValueError("shard 7 is not as it was")
                wrapped.add_note(f"{AT_SHARD}007")
                raise wrapped from error
        time.sleep(1)
        return item

    done = []
    with pytest.raises(ValueError, match=r"^shard 7 is not as it was\n") as caught:
        for item, _ in place.each(_doing(work), ["bad", *"abcdefghijklmno"]):
            done.append(item)
    error = caught.value
    assert str(error) == "shard 7 is not as it was"
    assert type(error) is ValueError and shard_of(error) == "007"
    assert any(note.startswith("in worker ") and " on node " in note for note in error.__notes__)
    assert type(error.__cause__) is Unsendable and error.__cause__.status == 503
    assert isinstance(error.__cause__.__cause__, WorkerTraceback)
    assert "raise wrapped from error" in str(error.__cause__.__cause__) or "in work" in str(error.__cause__.__cause__)
    assert not is_transient(error) and is_transient(error.__cause__)
    # what was under way was brought to its end, what was at hand was not begun; an error may take its time to arrive
    begun = {path.name.partition("-")[2] for path in tmp_path.iterdir()}
    assert done and begun == {"bad", *done} and begun < {"bad", *"abcdefghijklmno"}


def test_results_that_are_not_taken_hold_the_work_back(place: RayCluster, tmp_path: Path) -> None:
    def work(item: int, told: Callable[[int], None]) -> bytes:
        (tmp_path / str(item)).touch()
        return bytes(2**20)

    taken = 0
    ahead = []
    for _, result in place.each(_doing(work), range(16)):
        assert len(result) == 2**20
        taken += 1
        if taken in (3, 6):
            # far longer than the rest would take
            _until(lambda: len(list(tmp_path.iterdir())) > taken)  # noqa: B023
            time.sleep(0.8)
            ahead.append(len(list(tmp_path.iterdir())) - taken)
    assert taken == 16
    # two items a worker, of which one is the result that is held here
    assert all(0 < more < 4 for more in ahead), ahead


def test_no_worker_survives_a_round_that_is_left(place: RayCluster, tmp_path: Path) -> None:
    def work(item: int, told: Callable[[int], None]) -> int:
        (tmp_path / f"pid-{os.getpid()}").touch()
        time.sleep(600 if item else 0)
        return item

    each = place.each(_doing(work), range(6))
    assert next(each) == (0, 0)
    _until(lambda: len(list(tmp_path.iterdir())) > 0)
    each.close()  # type: ignore[attr-defined]
    pids = [int(path.name.removeprefix("pid-")) for path in tmp_path.iterdir()]
    _until(lambda: not any(map(_is_running, pids)))


def test_workers_of_a_session_keep_what_they_hold(place: RayCluster) -> None:
    def worker() -> Callable[[Any, Any], Any]:
        seen: list[int] = []

        def work(item: tuple[int, Callable[[int], int]], told: Callable[[int], None]) -> tuple[int, int]:
            number, function = item
            if number < 0 and seen:
                os.kill(os.getpid(), signal.SIGKILL)
            seen.append(number)
            return function(number), len(seen)

        return work

    with place.session(worker) as session:
        rounds = [
            [value for _, value in session.each([(n, lambda n, r=r: n + 10 * r) for n in range(4)])] for r in (0, 1)
        ]
        assert [sorted(value for value, _ in values) for values in rounds] == [[0, 1, 2, 3], [10, 11, 12, 13]]
        # no worker was built anew for the second round: eight items were seen by two
        assert sum(seen for _, seen in rounds[1]) > sum(seen for _, seen in rounds[0])
        # one that takes the place of a lost one holds nothing
        assert [value for _, value in session.each([(-1, abs)])] == [(1, 1)]


@pytest.mark.slow
def test_a_node_that_dies_is_not_the_items_doing_and_the_cluster_may_grow(
    place: RayCluster, cluster: Any, tmp_path: Path
) -> None:
    """Workers that only a third node has room for; it is killed under its item, and another comes later."""
    first = cluster.add_node(num_cpus=2, **NODE)
    pids = tmp_path / "pids"

    def work(item: int, told: Callable[[int], None]) -> str:
        with pids.open("a") as file:
            file.write(f"{os.getpid()}\n")
        if len(pids.read_text().split()) == 1:
            time.sleep(600)
        return str(ray.get_runtime_context().get_node_id())

    done: dict[int, str] = {}
    # Ray starts nodes in a main thread alone
    taking = threading.Thread(
        target=lambda: done.update(place.each(_doing(work), [0, 1], requests=Requests(cpus=2))), daemon=True
    )
    taking.start()
    _until(lambda: pids.exists() and pids.read_text().endswith("\n"))
    cluster.remove_node(first, allow_graceful=False)
    os.kill(int(pids.read_text()), signal.SIGKILL)
    second = cluster.add_node(num_cpus=2, **NODE)
    taking.join(SECONDS)
    assert set(done) == {0, 1}
    assert set(done.values()) == {second.node_id}
    (lost,) = [line for line in place.told if line.startswith("lost worker ")]  # type: ignore[attr-defined]
    assert "(its node died); tried again: 0" in lost or "(it no longer answers); tried again: 0" in lost
    cluster.remove_node(second)


@pytest.mark.slow
def test_shares_of_cores_and_accelerators(place: RayCluster, cluster: Any, tmp_path: Path) -> None:
    """Two workers on one accelerator, of which Ray counts shares and shows the number; none is needed for that."""
    node = cluster.add_node(num_cpus=1, num_gpus=1, **NODE)

    def work(item: int, told: Callable[[int], None]) -> tuple[str | None, int, str, int]:
        (tmp_path / str(item)).touch()
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.02)
        import torch

        return (
            os.environ.get("CUDA_VISIBLE_DEVICES"),
            os.getpid(),
            os.environ["OMP_NUM_THREADS"],
            torch.get_num_threads(),
        )

    try:
        done = dict(place.each(_doing(work), [0, 1], requests=Requests(cpus=0.5, gpus=0.5)))
    finally:
        cluster.remove_node(node)
    assert [(visible, threads, torch) for visible, _, threads, torch in done.values()] == [("0", "1", 1)] * 2
    assert len({pid for _, pid, _, _ in done.values()}) == 2


def test_threads_are_those_of_the_settings(cluster: Any, connected: RayCluster) -> None:
    def worker() -> Callable[[int, Any], tuple[str, int]]:
        import torch

        return lambda item, told: (os.environ["OMP_NUM_THREADS"], torch.get_num_threads())

    # more than there are cores, perhaps: elsewhere there may be, and the bits are the same
    three = RayCluster(cluster.address, 3)
    assert dict(three.each(worker, [0])) == {0: ("3", 3)}
    # it used the connection that was there, and leaves it
    three.close()
    assert ray.is_initialized() and connected.workers == 2


@pytest.mark.slow
def test_a_worker_with_other_code_is_refused(cluster: Any, connected: RayCluster, tmp_path: Path) -> None:
    """A copy of the package that changes between the start of a run and that of its worker, as two images differ."""
    package = Path(module.__file__).parents[1]
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    code = f"""
        from dagster_datamask.compute.cluster import ClusterUnfit, RayCluster

        with RayCluster({cluster.address!r}) as place, place.session(lambda: lambda item, told: item) as session:
            with open("dagster_datamask/keyed.py", "a") as file:
                file.write("# other code")
            try:
                print(list(session.each([0])))
            except ClusterUnfit as error:
                print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert re.fullmatch(
        r"worker \d+ on node \S+ has dagster-datamask of code (\w+) \(here (?!\1)\w+\); use one image for workers and "
        r"this process\n",
        done.stdout,
    ), done


def test_versions_do_not_hang_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a checkout where an old build left an egg-info, of which other nodes know nothing."""
    versions = module._worker_class(ray).versions
    before = versions()
    assert before["dagster-datamask"] == __version__ and "pyarrow" in before
    old = tmp_path / "dagster_datamask.egg-info"
    old.mkdir()
    (old / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: dagster-datamask\nVersion: 0.0.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.metadata.version("dagster-datamask") == "0.0.1"
    assert versions() == before


def test_a_folder_that_workers_do_not_see_is_named(
    cluster: Any, connected: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SECONDS_TO_SEE", 0.2)
    connected.workers  # noqa: B018
    place = RayCluster(cluster.address, shared=tmp_path / "root")
    (tmp_path / "root").mkdir()
    # what a killed run left
    (tmp_path / "root" / ".shared-0123").touch()
    assert dict(place.each(_doing(lambda item, told: item), [0])) == {0: 0}
    (token,) = (tmp_path / "root").iterdir()
    assert token.name != ".shared-0123"
    # a second run on the root takes the token of the first for no left one
    beside = RayCluster(cluster.address, shared=tmp_path / "root")
    assert dict(beside.each(_doing(lambda item, told: item), [0])) == {0: 0}
    assert len(list((tmp_path / "root").iterdir())) == 2
    beside.close()
    # as on a node that has another disk at this path
    token.unlink()
    with pytest.raises(ClusterUnfit, match=rf"does not see {tmp_path}/root as this process does; mount that folder on"):
        list(place.each(_doing(lambda item, told: item), [0]))
    place.close()
    assert not list((tmp_path / "root").iterdir())


def test_workers_end_with_a_driver_that_is_killed(cluster: Any, connected: RayCluster, tmp_path: Path) -> None:
    code = f"""
        import os, time
        from pathlib import Path
        from dagster_datamask.compute.cluster import RayCluster

        def work(item, told):
            Path({str(tmp_path)!r}, str(os.getpid())).touch()
            time.sleep(600)

        list(RayCluster({cluster.address!r}).each(lambda: work, [0, 1]))
    """
    driver = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    _until(lambda: len(list(tmp_path.iterdir())) == 2)
    driver.kill()
    driver.wait()
    _until(lambda: not any(_is_running(int(path.name)) for path in tmp_path.iterdir()))


def test_ray_of_this_machine_leaves_nothing_behind(tmp_path: Path) -> None:
    """In a process of its own: started, used, asked for too much, ended; its stdout has what was printed here alone.

    Between works its workers stay, without what was built for them, and one that ends meanwhile costs nothing.
    """
    code = """
        import os, signal, time
        from dagster_datamask.compute.base import Requests
        from dagster_datamask.compute.cluster import ClusterUnfit, RayCluster

        def work(item, told):
            if item == 2 and not os.path.exists("killed"):
                open("killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            print("from a worker")
            return item

        class Model:
            def __del__(self):
                open(f"let-go-{os.getpid()}", "w").close()

        def holding():
            model = Model()

            def work(item, told):
                assert model
                open(f"tries-{item}", "a").write(".")
                return os.getpid()

            return work

        def pids(items):
            return set(dict(place.each(lambda: lambda item, told: os.getpid(), items)).values())

        before = signal.getsignal(signal.SIGTERM)
        with RayCluster("", processes=2) as place:
            assert place.workers == 2
            assert signal.getsignal(signal.SIGTERM) is before
            # more cores than there are is all that there are
            print(sorted(dict(place.each(lambda: work, range(4), requests=Requests(cpus=64)))))
            try:
                list(place.each(lambda: work, [0], requests=Requests(gpus=64)))
            except ClusterUnfit as error:
                print(error)
            first = set(dict(place.each(holding, range(4))).values())
            while not all(os.path.exists(f"let-go-{pid}") for pid in first):
                time.sleep(0.05)
            kept = pids(range(4))
            assert len(first | kept) <= 2
            os.kill(kept.pop(), signal.SIGKILL)
            again = set(dict(place.each(holding, range(4, 8))).values())
            assert again
            assert [open(f"tries-{item}").read() for item in range(8)] == ["."] * 8
            # another kind of worker takes their room
            other = dict(place.each(holding, range(8, 10), requests=Requests(cpus=2)))
            assert not set(other.values()) & (first | kept | again)
            # what fails leaves no worker
            try:
                list(place.each(lambda: lambda item, told: 1 / 0, [0], requests=Requests(cpus=2)))
            except ZeroDivisionError:
                anew = dict(place.each(holding, [10], requests=Requests(cpus=2)))
                assert not set(anew.values()) & set(other.values())
            folder = place._folder
            assert folder.exists()
        assert not folder.exists()
        for name in os.listdir("."):
            os.unlink(name)
    """
    done = until_ray_starts(
        lambda: subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "RAY_ADDRESS": "192.0.2.77:6379"},
            capture_output=True,
            text=True,
        )
    )
    assert done.returncode == 0, done.stderr
    numbers, refused = done.stdout.strip().splitlines()
    assert numbers == "[0, 1, 2, 3]"
    assert refused.startswith("a worker asks for 1 CPU, 64 GPU, and Ray on this machine has 1 node of 2 CPU")
    assert refused.endswith("; lower compute.requests")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_where_no_cluster_answers_is_said_at_once(address: str) -> None:
    code = f"from dagster_datamask.compute.cluster import RayCluster; RayCluster({address!r}).workers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .startswith(
            f"dagster_datamask.compute.cluster.ClusterUnavailable: the Ray cluster at {address} cannot be had: "
            "[Errno 111] Connection refused; is it running, and is compute.ray_address right?"
        )
    )


def test_in_a_worker_a_place_is_that_process() -> None:
    assert isinstance(pickle.loads(pickle.dumps(RayCluster("ray://host:10001"))), Inline)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterUnfit, match=r"needs Ray .*; install the extra: pip install 'dagster-datamask\[ray\]'"):
        list(RayCluster("").each(_doing(lambda item, told: item), [0]))


@pytest.mark.parametrize(
    ("requests", "room"),
    [
        (Requests(), 11),
        (Requests(cpus=0.1), 115),
        (Requests(cpus=4), 2),
        (Requests(cpus=1, gpus=1), 2),
        (Requests(cpus=1, gpus=0.5), 3),
        (Requests(cpus=1, memory_gb=8), 4),
        (Requests(cpus=9), 0),
        (Requests(gpus=1, memory_gb=40), 0),
    ],
)
def test_room_is_counted_node_by_node(requests: Requests, room: int) -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 8.0, "memory": 32e9}},
        {"Alive": True, "Resources": {"CPU": 3.0, "GPU": 2.0, "memory": 7e9}},
        {"Alive": True, "Resources": {"CPU": 0.5, "memory": 8e9}},
        {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0, "memory": 512e9}},
    ]
    assert _room(nodes, requests) == room
    assert _there(nodes) == "1 node of 0.5 CPU, 8 GB; 1 node of 3 CPU, 2 GPU, 7 GB; 1 node of 8 CPU, 32 GB"


def test_what_an_item_may_have_done_is_counted_apart_from_what_it_cannot() -> None:
    """Three losses that it may have caused, or ten that it hardly can; what waited behind it is not charged."""
    round_ = _Round(deque([4]))
    had = [(0, "a"), (1, "b")]
    assert round_.lost(had, "killed", True) == "; tried again: a, b"
    assert list(round_.waiting) == [1, 4, 0]
    for _ in range(9):
        assert "given up" not in round_.lost([(0, "a")], "its node died", False)
    assert round_.lost([(0, "a")], "killed", True) == "; tried again: a"
    assert round_.lost(had, "killed", True) == "; given up: a; tried again: b"
    assert round_.poisoned == {"a": "killed"} and (1, True) not in round_.tries
    assert "given up: z" in [round_.lost([(9, "z")], "its node died", False) for _ in range(10)][-1]
    assert round_.lost([], "killed", True) == ""


def test_what_is_given_up_by_losses_of_nodes_is_no_verdict_on_it() -> None:
    round_ = _Round(deque())
    for _ in range(3):
        round_.lost([(0, "bad")], "killed", True)
    for _ in range(10):
        round_.lost([(1, "good")], "its node was preempted", False)
    with pytest.raises(
        ClusterUnavailable, match=r"not done are: good \(its node was preempted\), bad \(killed\)"
    ) as lost:
        round_.end()
    assert is_transient(lost.value)
    del round_.unlucky["good"]
    with pytest.raises(Poisoned) as poisoned:
        round_.end()
    assert poisoned.value.why == {"bad": "killed"}


class _Scripted(_Pool):
    """A pool without Ray, whose workers answer what the script says; the script sees the workers, in order of start."""

    def __init__(self, workers: int, script: Callable[[list[_Worker]], Iterator[tuple[_Worker, Any, Any]]]) -> None:
        self._ray = ray
        self._most, self.rounds, self._lost_in_a_row, self._can_do = workers, 0, 0, False
        self._said, self._greeted, self._log = time.monotonic(), True, lambda line: None
        self._workers: list[_Worker] = []
        self._script = script(self._workers)
        self._started = 0

    def _grow(self, waiting: int) -> None:
        for _ in range(self._most - len(self._workers)):
            self._started += 1
            actor = MagicMock()
            actor.work.remote.side_effect = lambda round_, place, item: ("ref", place, object())
            self._workers.append(_Worker(actor, None, f"worker {self._started}"))

    def _answer(self) -> Iterator[tuple[_Worker, Any, Any]]:
        yield next(self._script)

    def _let_go(self, worker: _Worker) -> list[tuple[int, Any]]:
        self._workers.remove(worker)
        return list(worker.under_way.values())

    def _reason(self, worker: _Worker, error: Exception) -> tuple[str, bool]:
        return str(error), "killed" in str(error)


def test_after_an_error_a_worker_that_was_silent_gives_nothing_back() -> None:
    def script(workers: list[_Worker]) -> Iterator[tuple[_Worker, Any, Any]]:
        first, second = workers
        yield first, next(iter(first.under_way)), pickle.dumps(("failed", packed(ValueError("x"))))
        second.probe, second.silence, second.until = "probe", RuntimeError("silent"), time.monotonic() + SECONDS
        yield second, "probe", (None, 0)

    # a turn more ends the script, which is an error of its own
    with pytest.raises(ValueError, match="x"):
        list(_Scripted(2, script).each(["a", "b"]))


def _all_are_lost(why: str) -> Callable[[list[_Worker]], Iterator[tuple[_Worker, Any, Any]]]:
    def script(workers: list[_Worker]) -> Iterator[tuple[_Worker, Any, Any]]:
        while True:
            worker = next(worker for worker in workers if worker.under_way)
            yield worker, next(iter(worker.under_way)), ray.exceptions.RayActorError(error_msg=why)

    return script


def test_items_that_all_end_their_workers_are_told_as_such() -> None:
    """On one worker, thirteen losses are no limit to what each of eight items has of tries."""
    items = list("abcdefgh")
    pool = _Scripted(1, _all_are_lost("killed"))
    with pytest.raises(Poisoned) as poisoned:
        list(pool.each(items))
    assert poisoned.value.why.keys() == set(items)
    assert pool._started == 24


def test_where_no_item_is_done_and_many_end_their_workers_something_is_wrong_with_those() -> None:
    with pytest.raises(ClusterUnfit, match=r"none of the first 14 items was done: each ended .*memory_gb") as unfit:
        list(_Scripted(1, _all_are_lost("killed")).each(range(1000)))
    assert not is_transient(unfit.value)
    with pytest.raises(ClusterUnavailable, match="14 workers on Ray were lost one after another") as lost:
        list(_Scripted(1, _all_are_lost("its node died")).each(range(1000)))
    assert is_transient(lost.value)


def test_a_token_that_cannot_be_locked_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS locks what is open to be written, and nothing else."""
    token = tmp_path / ".shared-0123"
    token.touch()

    def flock(file: Any, how: int) -> None:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if refused:
            raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(module.fcntl, "flock", flock)
    refused = True
    _remove_if_left(token)
    assert token.exists()
    refused = False
    _remove_if_left(token)
    assert not token.exists()
    _remove_if_left(token)
