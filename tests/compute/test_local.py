"""Processes of this machine: losses, errors, ends, back-pressure; what is asked of them is what one process gives."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dagster_datamask.compute import local
from dagster_datamask.compute.base import INLINE, Poisoned, Told, WorkerTraceback
from dagster_datamask.compute.local import Processes
from dagster_datamask.failures import is_transient, shard_of, told
from dagster_datamask.shards.engine import AT_SHARD
from dagster_datamask.shards.schemas import BadShard, ShardReplaced
from tests.signals import hear_signals


@pytest.fixture(scope="module")
def place() -> Iterator[Processes]:
    with Processes(2, threads=1) as processes:
        yield processes


def alive(pid: int) -> bool:
    """Whether a process is there, and no zombie that nobody waits for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pids: Sequence[int], seconds: float = 300.0) -> bool:
    until = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(alive, pids))


def squares() -> Callable[[int, Told], tuple[int, int, int]]:
    seen: list[int] = []

    def work(item: int, told: Told) -> tuple[int, int, int]:
        seen.append(item)
        for rows in range(1, item + 1):
            told(rows)
        return item * item, os.getpid(), len(seen)

    return work


@pytest.mark.parametrize("items", [[], [3], list(range(7))])
def test_every_item_is_done_once_and_told_of(place: Processes, items: list[int]) -> None:
    for at in (INLINE, place):
        heard: list[tuple[int, int]] = []
        found = list(at.each(squares, items, told=lambda item, rows, to=heard: to.append((item, rows))))
        assert sorted((item, square) for item, (square, _, _) in found) == [(item, item * item) for item in items]
        assert sorted(heard) == [(item, rows) for item in items for rows in range(1, item + 1)]


def test_a_worker_is_built_for_its_first_item_and_let_go_of_with_the_last(place: Processes) -> None:
    for _ in range(2):
        by_worker: dict[int, list[int]] = {}
        for _, (_, worker, count) in place.each(squares, [0] * 8):
            by_worker.setdefault(worker, []).append(count)
        assert len(by_worker) <= 2
        assert all(counts == list(range(1, len(counts) + 1)) for counts in by_worker.values())


def test_a_session_keeps_what_its_workers_hold_between_rounds(place: Processes) -> None:
    by_worker: dict[int, list[int]] = {}
    with place.session(squares) as session:
        for _ in range(5):
            for _, (_, worker, count) in session.each([0, 0]):
                by_worker.setdefault(worker, []).append(count)
    assert sum(map(len, by_worker.values())) == 10
    assert all(counts == list(range(1, len(counts) + 1)) for counts in by_worker.values())


def test_closures_of_a_test_s_own_are_sent(place: Processes) -> None:
    offset = 5
    assert dict(place.each(lambda: lambda item, told: item + offset, [1, 2])) == {1: 6, 2: 7}


class Taken(Sequence[Any]):
    """Items that count how often they are asked for."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.asked = items, Counter[int]()

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, at: Any) -> Any:
        self.asked[at] += 1
        return self.items[at]


def test_an_item_is_made_when_its_turn_comes_and_once(place: Processes) -> None:
    items = Taken([1, 2, 3, 4, 5])
    most = 0
    for number, _ in enumerate(place.each(squares, items)):
        most = max(most, len(items.asked) - number - 1)
    assert items.asked == Counter(range(5))
    assert most <= 1


def noted(folder: Path, deadly: dict[str, tuple[int, int]]) -> Callable[[], Callable[[str, Told], int]]:
    """Each item leaves a line in a file of its own; {item: (signal, times)} ends the process that has it."""

    def worker() -> Callable[[str, Told], int]:
        def work(item: str, told: Told) -> int:
            path = folder / item
            with path.open("a") as file:
                file.write(f"{os.getpid()}\n")
            number, times = deadly.get(item, (0, 0))
            if len(path.read_text().split()) <= times:
                os.kill(os.getpid(), number)
                time.sleep(600)
            return os.getpid()

        return work

    return worker


def tries(folder: Path) -> dict[str, int]:
    return {path.name: len(path.read_text().split()) for path in folder.iterdir()}


def test_a_worker_that_is_killed_costs_its_item_alone_and_that_is_tried_again(tmp_path: Path) -> None:
    log: list[str] = []
    with Processes(2, threads=1, log=log.append) as place:
        found = dict(place.each(noted(tmp_path, {"c": (signal.SIGKILL, 2)}), list("abcdef")))
        assert sorted(found) == list("abcdef")
    assert tries(tmp_path) == {"a": 1, "b": 1, "c": 3, "d": 1, "e": 1, "f": 1}
    assert log == [
        "lost a worker process (SIGKILL) at c, try 1 of 3",
        "lost a worker process (SIGKILL) at c, try 2 of 3",
    ]


def test_items_that_end_every_worker_are_named_when_all_others_are_done(tmp_path: Path) -> None:
    deadly = {"a": (signal.SIGSEGV, 99), "d": (signal.SIGKILL, 99)}
    done = []
    with Processes(2, threads=1) as place, pytest.raises(Poisoned) as caught:
        for item, _ in place.each(noted(tmp_path, deadly), list("abcde")):
            done.append(item)
    assert sorted(done) == ["b", "c", "e"]
    assert caught.value.why == {"a": "SIGSEGV", "d": "SIGKILL"}
    assert tries(tmp_path) == {"a": 3, "b": 1, "c": 1, "d": 3, "e": 1}
    assert not is_transient(caught.value)


def test_while_nothing_is_heard_it_is_said_what_is_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_SECONDS_BETWEEN_LINES", 0.2)

    def worker() -> Callable[[str, Told], str]:
        def work(item: str, told: Told) -> str:
            while not (tmp_path / "said").exists():
                time.sleep(0.01)
            return item

        return work

    def log(line: str) -> None:
        lines.append(line)
        if line.endswith("at work: stuck"):
            (tmp_path / "said").touch()

    lines: list[str] = []
    with Processes(1, threads=1, log=log) as place:
        assert list(place.each(worker, ["stuck"])) == [("stuck", "stuck")]
    assert set(lines) <= {
        "nothing heard of worker processes for 0.2 s; at work: stuck",
        "nothing heard of worker processes for 0.2 s; they are starting",
    }


def test_a_process_that_leaves_of_itself_is_a_loss_too(place: Processes) -> None:
    with pytest.raises(Poisoned, match=r"x \(exit code 7\)"):
        list(place.each(lambda: lambda item, told: os._exit(7), ["x"]))


def test_a_worker_that_was_killed_with_nothing_to_do_costs_nothing(place: Processes) -> None:
    pids = {worker for _, (_, worker, _) in place.each(squares, [0] * 4)}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        while alive(pid):
            time.sleep(0.01)
    found = [square for _, (square, _, _) in place.each(squares, [2, 3])]
    assert sorted(found) == [4, 9]


def test_where_no_process_can_be_started_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.sys, "executable", "/bin/false")
    with (
        Processes(1) as place,
        pytest.raises(ChildProcessError, match=r"3 worker processes ended before they began \(exit code 1\)"),
    ):
        list(place.each(squares, [1]))


class Odd(ValueError):
    """Takes other arguments than it keeps, and holds what cannot be sent."""

    def __init__(self, path: str, *, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path, self.lock = path, (part for part in ())


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "make",
    [
        lambda: BadShard("S/x.parquet", "is empty"),
        lambda: ShardReplaced("x changed"),
        lambda: OSError("the network is gone"),
        lambda: FileNotFoundError(errno.ENOENT, "No such file", "x.parquet"),
        lambda: OSError(errno.EIO, "Input/output error"),
        lambda: caused(ValueError("no listing"), TimeoutError("late")),
        lambda: caused(OSError("no listing"), ValueError("bad")),
        lambda: Odd("x", why="is odd"),
        lambda: KeyError("x"),
        lambda: AssertionError(),
    ],
)
def test_an_error_is_what_it_was_where_it_was_raised(place: Processes, make: Callable[[], Exception]) -> None:
    def worker() -> Callable[[str, Told], None]:
        def fails_here(item: str, told: Told) -> None:
            error = make()
            error.add_note(f"{AT_SHARD}{item}")
            raise error

        return fails_here

    own = make()
    own.add_note(f"{AT_SHARD}shard")
    with pytest.raises(type(own)) as caught:
        list(place.each(worker, ["shard"]))
    error = caught.value
    assert type(error) is type(own) and str(error) == str(own)
    assert (is_transient(error), shard_of(error), told(error)) == (is_transient(own), shard_of(own), told(own))
    assert getattr(error, "path", None) == getattr(own, "path", None)
    assert getattr(error, "filename", None) == getattr(own, "filename", None)
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)  # type: ignore[arg-type]
    assert isinstance(causes[-1], WorkerTraceback)
    assert "fails_here" in str(causes[-1])


class Arriving(ValueError):
    """Leaves a file where it is made anew in another process than that which raised it."""

    def __init__(self, arrived: Path, raised_by: int) -> None:
        super().__init__("the first")
        self.of = (arrived, raised_by)
        if os.getpid() != raised_by:
            arrived.touch()

    def __reduce__(self) -> tuple[Any, ...]:
        return Arriving, self.of


def test_after_an_error_no_item_is_begun_and_the_processes_serve_again(place: Processes, tmp_path: Path) -> None:
    begun, arrived = tmp_path / "begun", tmp_path / "arrived"
    begun.mkdir()

    def worker() -> Callable[[int, Told], int]:
        def work(item: int, told: Told) -> int:
            (begun / str(item)).touch()
            if item == 0:
                raise Arriving(arrived, os.getpid())
            # what is under way ends once the error is known
            while not arrived.exists():
                time.sleep(0.01)
            return item

        return work

    with pytest.raises(Arriving, match="the first"):
        list(place.each(worker, list(range(20))))
    assert {path.name for path in begun.iterdir()} <= {"0", "1"}
    assert dict(place.each(lambda: lambda item, told: -item, [1])) == {1: -1}


def test_what_cannot_be_sent_back_is_an_error(place: Processes) -> None:
    with pytest.raises(TypeError, match="cannot pickle 'generator' object"):
        list(place.each(lambda: lambda item, told: (part for part in ()), [1]))


def test_results_do_not_pile_up_while_nobody_takes_them(place: Processes, tmp_path: Path) -> None:
    def worker() -> Callable[[int, Told], bytes]:
        def work(item: int, told: Told) -> bytes:
            (tmp_path / str(item)).touch()
            return bytes(1 << 20)

        return work

    for taken, _ in enumerate(place.each(worker, list(range(12))), 1):
        time.sleep(0.05)
        assert len(list(tmp_path.iterdir())) <= taken + 2 * place.workers
    assert len(list(tmp_path.iterdir())) == 12


def test_who_stops_taking_ends_what_is_under_way(tmp_path: Path) -> None:
    def worker() -> Callable[[int, Told], int]:
        def work(item: int, told: Told) -> int:
            (tmp_path / str(os.getpid())).touch()
            time.sleep(600 if item else 0)
            return item

        return work

    with Processes(2) as place:
        results = place.each(worker, [0, 1, 2])
        assert next(results) == (0, 0)
        while not len(list(tmp_path.iterdir())):
            time.sleep(0.01)
        results.close()
        assert sum(alive(int(path.name)) for path in tmp_path.iterdir()) <= 1
    assert gone([int(path.name) for path in tmp_path.iterdir()])


# a program that works with two processes until it is ended, and says which they are
PROGRAM = """
import os, sys, time
from dagster_datamask.compute.local import Processes

def worker(folder=sys.argv[1]):
    def work(item, told):
        with open(os.path.join(folder, str(item)), "w") as file:
            file.write(str(os.getpid()))
        time.sleep(3600)
    return work

with Processes(2) as place:
    list(place.each(worker, [0, 1]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_process_outlives_the_one_that_started_it(tmp_path: Path, number: signal.Signals) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear_signals,
    )
    try:
        until = time.monotonic() + 300
        while time.monotonic() < until:
            pids = [path.read_text() for path in tmp_path.iterdir()]
            if len(pids) == 2 and all(pids):
                break
            time.sleep(0.05)
        assert len(pids) == 2
        # an interrupt at the terminal reaches all of them
        os.killpg(program.pid, number) if number == signal.SIGINT else program.send_signal(number)
        _, errors = program.communicate(timeout=300)
        assert gone([int(pid) for pid in pids])
        assert errors.count("Traceback") == (number == signal.SIGINT)
    finally:
        program.kill()
        program.wait()


def test_threads_are_as_asked_and_else_the_cores_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.os, "sched_getaffinity", lambda pid: set(range(8)))

    def worker() -> Callable[[int, Told], list[int]]:
        import numpy  # noqa: F401

        def work(item: int, told: Told) -> list[int]:
            # by the first item only, as some kernels load it
            import torch
            from threadpoolctl import threadpool_info

            return [torch.get_num_threads(), *(pool["num_threads"] for pool in threadpool_info())]

        return work

    for asked, expected in ((1, 1), (0, 4)):
        with Processes(2, threads=asked) as place:
            ((_, threads),) = place.each(worker, [0])
            assert set(threads) == {expected}


@pytest.mark.parametrize("threads", [1, len(os.sched_getaffinity(0)) + 1])
def test_this_process_computes_on_as_many_threads_as_it_is_told(threads: int) -> None:
    code = (
        "import json, numpy, os\n"
        "from dagster_datamask.compute.base import use_threads\n"
        f"use_threads({threads})\n"
        "import torch\n"
        "from threadpoolctl import threadpool_info\n"
        "print(json.dumps([torch.get_num_threads(), *(pool['num_threads'] for pool in threadpool_info())]))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout)) == {threads}
