"""Processes of this machine: programs of their own, each with a pipe, that are given one item at a time.

The pools that are at hand (loky, concurrent.futures) end all work when one process is killed, and do not tell whose
item it was; here a loss costs the item that the process held. A process is started anew, never forked: libraries with
threads do not survive a fork. Not here: whether processes are worth their start, which depends on the work.
"""

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

import cloudpickle

from dagster_datamask.compute.base import (
    ONE_CORE,
    TRIES,
    Item,
    Poisoned,
    Requests,
    Result,
    Session,
    Told,
    packed,
    thread_variables,
    unpacked,
    use_threads,
)
from dagster_datamask.redaction import redact_logs

_SECONDS_TO_END = 10.0
# how often a process looks whether the one that started it is there: its pipe may be held open by a fork of that
_SECONDS_BETWEEN_LOOKS = 1.0
# after so long without a word it is said what is waited for
_SECONDS_BETWEEN_LINES = 60.0
_TOLD, _DONE, _FAILED = "told", "done", "failed"


class Processes:
    """`count` processes of this machine, as `Compute`. They start when they are needed and stay until `close`.

    threads: of each one's libraries; 0 shares this machine's cores out among them. log: is told of losses.
    Use it as a context, or close it. The processes end with it, and with this process, however that ends.
    """

    def __init__(self, count: int, threads: int = 0, log: Callable[[str], None] = lambda message: None) -> None:
        self.workers = count
        self.log = log
        self._threads = threads or max(1, len(os.sched_getaffinity(0)) // count)
        self._processes: list[_Process] = []
        self._jobs = 0

    def each(
        self,
        worker: Callable[[], Callable[[Item, Told], Result]],
        items: Sequence[Item],
        *,
        requests: Requests = ONE_CORE,
        told: Callable[[Item, int], None] = lambda item, rows: None,
    ) -> Iterator[tuple[Item, Result]]:
        """As Compute.each; `requests` are for a cluster. Raises ChildProcessError where no process can be started."""
        with self._job(worker) as job:
            yield from self._round(job, items, told)

    @contextmanager
    def session(
        self, worker: Callable[[], Callable[[Any, Told], Any]], *, requests: Requests = ONE_CORE
    ) -> Iterator[Session]:
        """As Compute.session."""
        with self._job(worker) as job:
            yield _Session(self, job)

    def close(self) -> None:
        """End the processes, at once."""
        for process in self._processes:
            process.kill()
        self._processes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _job(self, worker: Callable[[], Callable[[Any, Told], Any]]) -> Iterator["_Job"]:
        self._jobs += 1
        job = _Job(self._jobs, cloudpickle.dumps(worker))
        try:
            yield job
        finally:
            for process in self._processes:
                process.forget(job)

    def _round(self, job: "_Job", items: Sequence[Any], told: Callable[[Any, int], None]) -> Iterator[tuple[Any, Any]]:
        waiting = deque(range(len(items)))
        tries: Counter[int] = Counter()
        poisoned: dict[Any, str] = {}
        failed: BaseException | None = None
        starts = 0
        try:
            while True:
                if failed is None:
                    self._hand_out(job, items, waiting)
                looked_at = [p for p in self._processes if p.at is not None or (p.starting and waiting and not failed)]
                if not looked_at:
                    break
                by_pipe = {process.pipe: process for process in looked_at}
                ready = wait(list(by_pipe), _SECONDS_BETWEEN_LINES)
                if not ready:
                    at_work = ", ".join(str(process.item) for process in looked_at if process.at is not None)
                    self.log(
                        f"nothing heard of worker processes for {_SECONDS_BETWEEN_LINES:g} s; "
                        + (f"at work: {at_work}" if at_work else "they are starting")
                    )
                for pipe in ready:
                    process = by_pipe[pipe]  # type: ignore[index]
                    try:
                        kind, value = pickle.loads(process.pipe.recv_bytes())
                    except (EOFError, OSError):
                        at, item, why = process.at, process.item, process.ended()
                        self._processes.remove(process)
                        if at is None:
                            starts += 1
                            if starts == TRIES:
                                raise ChildProcessError(
                                    f"{TRIES} worker processes ended before they began ({why})"
                                ) from None
                            continue
                        tries[at] += 1
                        self.log(f"lost a worker process ({why}) at {item}, try {tries[at]} of {TRIES}")
                        if tries[at] < TRIES:
                            waiting.append(at)
                        else:
                            poisoned[item] = why
                        continue
                    if process.at is None:
                        process.starting, starts = False, 0
                    elif kind == _TOLD:
                        told(process.item, value)
                    elif kind == _FAILED:
                        process.at = None
                        failed = failed or unpacked(value)
                    else:
                        process.at = None
                        yield process.item, pickle.loads(value)
        finally:
            # what is at work when this ends is of no use to anyone
            for process in [p for p in self._processes if p.at is not None]:
                process.kill()
                self._processes.remove(process)
        if failed is not None:
            raise failed
        if poisoned:
            raise Poisoned(poisoned)

    def _hand_out(self, job: "_Job", items: Sequence[Any], waiting: deque[int]) -> None:
        """Give what waits to processes that wait, and start as many as the rest can use."""
        for process in [p for p in self._processes if p.at is None and not p.starting]:
            if not waiting:
                return
            # taken once: a sequence may make an item when it is asked for it
            item = items[waiting[0]]
            try:
                process.give(job, item, waiting[0])
            except OSError:
                # it ended while it had nothing to do
                process.kill()
                self._processes.remove(process)
            else:
                waiting.popleft()
        coming = sum(process.starting for process in self._processes)
        for _ in range(min(self.workers - len(self._processes), len(waiting) - coming)):
            self._processes.append(_Process(self._threads))


@dataclass(frozen=True)
class _Job:
    """What processes are to do with items: a worker, pickled once."""

    number: int
    worker: bytes


@dataclass(frozen=True)
class _Session:
    processes: Processes
    job: _Job

    def each(self, items: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        return self.processes._round(self.job, items, lambda item, rows: None)


class _Process:
    """One process as it is seen from here. `item`, `at`: what it holds or held last, and its place, None if done."""

    def __init__(self, threads: int) -> None:
        self.pipe, theirs = Pipe()
        self.item: Any = None
        self.at: int | None = None
        self.starting = True
        self._job = 0
        # a program of its own, not a second import of whatever this one's main module is
        program = f"import {__name__} as local; local.serve({theirs.fileno()}, {os.getpid()}, {threads})"
        self._program = subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            pass_fds=[theirs.fileno()],
            env=os.environ
            | thread_variables(threads)
            | {"PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)},
            stdin=subprocess.DEVNULL,
            # what a library prints is not the answer of a command
            stdout=2,
        )
        theirs.close()

    def give(self, job: _Job, item: Any, at: int) -> None:
        """Raises OSError where the process has ended."""
        if self._job != job.number:
            self.pipe.send_bytes(pickle.dumps(job.worker))
            self._job = job.number
        self.pipe.send_bytes(pickle.dumps((cloudpickle.dumps(item),)))
        self.item, self.at = item, at

    def forget(self, job: _Job) -> None:
        """Let go of what was built for a job."""
        if self._job == job.number:
            self._job = 0
            try:
                self.pipe.send_bytes(pickle.dumps(None))
            except OSError:
                # ended meanwhile, which the next item will show
                return

    def kill(self) -> None:
        """End it, whatever it does."""
        self.pipe.close()
        self._program.kill()
        self._program.wait()

    def ended(self) -> str:
        """How it ended, its pipe being closed from there."""
        try:
            code = self._program.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            code = 0
        self.kill()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def serve(handle: int, parent: int, threads: int) -> None:
    """The program of a process: build the worker that it is sent for its first item, do items one by one."""
    # an interrupt is the user's to the program that asks, which ends this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    redact_logs()
    pipe = Connection(handle)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, parent, messages), daemon=True).start()

    def send(kind: str, value: Any) -> None:
        pipe.send_bytes(cloudpickle.dumps((kind, value)))

    send(_TOLD, 0)
    worker: bytes | None = None
    work: Callable[[Any, Told], Any] | None = None
    while True:
        message = messages.get()
        if not isinstance(message, tuple):
            worker, work = message, None
            continue
        try:
            if work is None:
                assert worker is not None
                work = pickle.loads(worker)()
                # what it loaded went by the environment, and by the cores that there are
                use_threads(threads)
            result = cloudpickle.dumps(work(pickle.loads(message[0]), lambda rows: send(_TOLD, rows)))
        except Exception as error:
            send(_FAILED, packed(error))
        else:
            send(_DONE, result)


def _receive(pipe: Connection, parent: int, messages: "queue.SimpleQueue[Any]") -> None:
    """Take messages while the other thread works, and end the process with the one that started it."""
    try:
        while True:
            while not pipe.poll(_SECONDS_BETWEEN_LOOKS):
                if os.getppid() != parent:
                    os._exit(1)
            messages.put(pickle.loads(pipe.recv_bytes()))
    except (EOFError, OSError):
        os._exit(0)
