"""Processes to be killed: `datamask run`, forked from one that has only imported.

`Victims` starts the program below and talks to it: a line of JSON starts a run, or waits for one. A run may be told to
kill or to stop itself at a given file event under its root, which is a moment that a seed can name; from outside it can
be killed at a moment of the clock. The signals are real, and nothing of the package is replaced but the waiting between
retries.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

REPOSITORY = Path(__file__).parents[2]
# what a process does to files, as the interpreter's audit hook tells it
_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link")
_SECONDS_TO_END = 300.0


@dataclass
class Order:
    """A run of a settings file: where its history lies, and the file event at which it gets `signal` from itself.

    workers: stages go to processes of this machine, or to Ray, however few rows they have.
    """

    config: str
    root: str
    home: str
    log: str
    event: int = 0
    signal: int = 0
    workers: bool = False


@dataclass
class Ended:
    """How a run ended: its exit code, negative for a signal; the file events that it saw, if it came to its end."""

    code: int
    events: int
    log: str


@dataclass
class Victims:
    """The program that forks runs. Use it as a context, or close it."""

    _program: subprocess.Popen[str] | None = None
    _orders: dict[int, Order] = field(default_factory=dict)

    def start(self, order: Order) -> int:
        """The process id of a run that has begun."""
        pid = int(self._ask({"run": asdict(order)}))
        self._orders[pid] = order
        return pid

    def wait(self, pid: int) -> Ended:
        """Wait for a run's end."""
        code, events = self._ask({"wait": pid}).split()
        log = Path(self._orders.pop(pid).log).read_text("utf-8", "replace")
        return Ended(int(code), int(events), log)

    def run(self, order: Order) -> Ended:
        return self.wait(self.start(order))

    def _ask(self, what: dict[str, Any]) -> str:
        if self._program is None:
            self._program = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.victims"],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        assert self._program.stdin is not None and self._program.stdout is not None
        self._program.stdin.write(json.dumps(what) + "\n")
        self._program.stdin.flush()
        answer = self._program.stdout.readline()
        if not answer:
            raise RuntimeError(f"the program that forks runs has ended with {self._program.wait()}")
        return answer

    def close(self) -> None:
        if self._program is not None:
            assert self._program.stdin is not None
            self._program.stdin.close()
            self._program.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def state(pid: int) -> str:
    """R, S, T (stopped), Z … of a process, "" where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def descendants(pid: int) -> list[int]:
    """All processes that a process has started, and they in turn."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                children = [int(child) for child in task.read_text("utf-8").split()]
            except (FileNotFoundError, ProcessLookupError):
                continue
            found += children
            waiting += children
    return found


def command(pid: int) -> str:
    """The command line of a process, "" where there is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def ended_soon(processes: list[int], seconds: float = 30.0) -> list[int]:
    """Which of these processes still live after some seconds."""
    until = time.monotonic() + seconds
    while (left := [pid for pid in processes if state(pid) not in ("", "Z")]) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def _run(order: Order, seen: int) -> None:
    os.setsid()
    handle = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ["DAGSTER_HOME"] = order.home
    events = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal events
        if event not in _EVENTS or not any(
            isinstance(part, str | os.PathLike) and str(part).startswith(order.root) for part in args
        ):
            return
        if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR):
            return
        events += 1
        if events == order.event:
            os.kill(os.getpid(), order.signal)

    sys.addaudithook(hook)
    from dagster_datamask import cli
    from tests.chaos.world import SNAPSHOT, at_once

    sys.argv = ["datamask", "run", "--config", order.config, "--snapshots", SNAPSHOT]
    try:
        with at_once(), cli_workers(order.workers):
            cli.main()
    finally:
        os.write(seen, str(events).encode())


class cli_workers:
    """Stages go where compute.backend says, however few rows they have."""

    def __init__(self, always: bool) -> None:
        self._always = always

    def __enter__(self) -> None:
        if self._always:
            from dagster_datamask.stages import base

            for stage in base.STAGES.values():
                if stage.rows_worth_processes is not None:
                    # the table is frozen, and the assets hold its very rows
                    object.__setattr__(stage, "rows_worth_processes", 0)

    def __exit__(self, *error: object) -> None:
        return None


def main() -> None:
    """Import all that a run imports, then fork one per order."""
    import sentence_transformers  # noqa: F401

    import tests.chaos.world  # noqa: F401
    from dagster_datamask import cli  # noqa: F401

    pipes: dict[int, int] = {}
    for line in sys.stdin:
        what = json.loads(line)
        if "run" in what:
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                code = 0
                try:
                    os.close(reader)
                    _run(Order(**what["run"]), writer)
                except SystemExit as ended:
                    code = ended.code if isinstance(ended.code, int) else 1 if ended.code else 0
                except BaseException as error:
                    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                    code = 99
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            os.close(writer)
            pipes[pid] = reader
            print(pid, flush=True)
        else:
            pid = what["wait"]
            _, status = os.waitpid(pid, 0)
            reader = pipes.pop(pid)
            events = os.read(reader, 20).decode() or "0"
            os.close(reader)
            print(os.waitstatus_to_exitcode(status), events, flush=True)


if __name__ == "__main__":
    # nobody who waits for an answer is told what libraries print
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
