"""fastText over several processes that hold one copy of the model between them.

The library keeps Python's lock while it predicts, so threads gain nothing, and it copies a file into memory, so that
every process that loads for itself costs the model's size again. A server process, which has one thread, loads the
model once and forks its workers: they read the same pages, and nothing writes into them.

Here belong the server, its workers and their end. Not here: what a score is (`fasttext_scorer`).
"""

import gc
import json
import os
import signal
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

import numpy as np

from dagster_datamask.scoring.base import ScoredBatch
from dagster_datamask.scoring.fasttext_scorer import FastTextScorer

# texts that one worker takes at a time: some 15 ms of work
CHUNK_TEXTS = 64
# a worker has the next at hand when it is done with one
_AT_HAND = 2
_BATCHES_HELD = 2
_SECONDS_TO_END = 10.0
# a process without threads can fork; libraries that would start some are told not to
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1") | {
    "TOKENIZERS_PARALLELISM": "false"
}


class WorkerLost(ConnectionError):
    """A scoring process ended before its work was done; what was finished before is kept."""


class FastTextProcesses:
    """`FastTextScorer` over several processes: the same scores and reasons, in input order.

    processes: how many, at least 1; the rest as FastTextScorer takes it, whose errors are raised here. Use it as a
    context, or `close` it: the processes end with it, and with this process, however that ends.
    """

    def __init__(
        self,
        processes: int,
        path: Path,
        positive_label: str,
        normaliser: str = "dclm",
        tokenizer: Path | None = None,
    ) -> None:
        pairs = [Pipe() for _ in range(processes)]
        self._workers = [ours for ours, _ in pairs]
        arguments = {
            "path": str(path),
            "positive_label": positive_label,
            "normaliser": normaliser,
            "tokenizer": None if tokenizer is None else str(tokenizer),
        }
        handles = [theirs.fileno() for _, theirs in pairs]
        # a program of its own, not a fork of this one nor a second import of whatever this one's main module is
        self._server = subprocess.Popen(
            [sys.executable, "-P", "-c", f"import {__name__} as p; p.serve()", json.dumps([arguments, handles])],
            pass_fds=handles,
            env=os.environ | _ONE_THREAD | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        for _, theirs in pairs:
            theirs.close()
        try:
            for worker in self._workers:
                self._received(worker)
        except BaseException:
            self.close()
            raise

    def score(self, texts: Sequence[str | None]) -> ScoredBatch:
        """As FastTextScorer.score. Raises WorkerLost where a process was killed; after any error this is closed."""
        (scored,) = self.score_each([texts])
        return scored

    def score_each(self, batches: Iterable[Sequence[str | None]]) -> Iterator[ScoredBatch]:
        """`score` of each batch in turn; the processes have the next one already while the last is looked at.

        A batch is taken from `batches` when there is room for it: two are held. After any error, and where it is not
        read to its end, this is closed.
        """
        source = iter(batches)
        taken: deque[list[ScoredBatch | None]] = deque()
        chunks: deque[tuple[list[ScoredBatch | None], int, Sequence[str | None]]] = deque()
        free = deque(self._workers * _AT_HAND)
        at: dict[Connection, deque[tuple[list[ScoredBatch | None], int]]] = {w: deque() for w in self._workers}

        def hand_out() -> None:
            while free and chunks:
                parts, place, texts = chunks.popleft()
                worker = free.popleft()
                self._send(worker, texts)
                at[worker].append((parts, place))

        def collect() -> None:
            for ready in wait([worker for worker, given in at.items() if given]):
                assert isinstance(ready, Connection)
                parts, place = at[ready].popleft()
                parts[place] = self._received(ready)
                free.append(ready)

        try:
            more = True
            while more or taken:
                while more and len(taken) < _BATCHES_HELD:
                    texts = next(source, None)
                    more = texts is not None
                    if texts is not None:
                        starts = range(0, len(texts), CHUNK_TEXTS)
                        taken.append([None] * len(starts))
                        chunks += [(taken[-1], k, texts[start : start + CHUNK_TEXTS]) for k, start in enumerate(starts)]
                        hand_out()
                if taken:
                    while None in taken[0]:
                        collect()
                        hand_out()
                    yield _joined([part for part in taken.popleft() if part is not None])
        except BaseException:
            self.close()
            raise

    def describe(self) -> dict[str, Any]:
        """As FastTextScorer.describe."""
        self._send(self._workers[0], None)
        told: dict[str, Any] = self._received(self._workers[0])
        return told

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()
        try:
            self._server.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _send(self, worker: Connection, message: Any) -> None:
        try:
            worker.send(message)
        except OSError as error:
            raise self._lost() from error

    def _received(self, worker: Connection) -> Any:
        try:
            message = worker.recv()
        except (EOFError, OSError) as error:
            raise self._lost() from error
        if isinstance(message, Exception):
            raise message
        return message

    def _lost(self) -> WorkerLost:
        try:
            code = self._server.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            code = 0
        killed = -code if code < 0 else code - _BY_SIGNAL if code > _BY_SIGNAL else 0
        by = f" by {signal.Signals(killed).name}" if killed else ""
        return WorkerLost(
            f"a process that scores by fastText was ended{by}, by the system if memory ran out; run it again (finished "
            "shards are kept), with a smaller compute.processes if it recurs"
        )


def _joined(parts: list[ScoredBatch]) -> ScoredBatch:
    return ScoredBatch(
        np.concatenate([np.empty(0), *(part.scores for part in parts)]),
        [reason for part in parts for reason in part.reasons],
        sum((part.notes for part in parts), Counter[str]()),
    )


# how a shell tells that a signal ended a process: 128 and its number
_BY_SIGNAL = 128


def serve() -> None:
    """The server: load the model, fork a worker a connection, wait for them; the first that is killed ends all."""
    arguments, handles = json.loads(sys.argv[1])
    # an interrupt is the user's to the program that asks; with its end the connections end, and so do the workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connections = [Connection(handle) for handle in handles]
    try:
        scorer = FastTextScorer(**arguments)
    except Exception as error:
        # the first is asked first
        connections[0].send(error)
        return
    # no collection rewrites the headers of objects that the workers share
    gc.freeze()
    workers = set()
    while connections:
        connection = connections.pop()
        worker = os.fork()
        if not worker:
            for other in connections:
                other.close()
            _work(connection, scorer)
            os._exit(0)
        connection.close()
        workers.add(worker)
    while workers:
        worker, status = os.wait()
        workers.remove(worker)
        code = os.waitstatus_to_exitcode(status)
        if code:
            for left in workers:
                os.kill(left, signal.SIGKILL)
            sys.exit(_BY_SIGNAL - code if code < 0 else code)


def _work(connection: Connection, scorer: FastTextScorer) -> None:
    try:
        connection.send(None)
        while True:
            texts = connection.recv()
            try:
                connection.send(scorer.describe() if texts is None else scorer.score(texts))
            except OSError:
                raise
            except Exception as error:
                connection.send(error)
    except (EOFError, OSError):
        # the one who asked is gone
        return
