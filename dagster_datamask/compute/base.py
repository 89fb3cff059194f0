"""What every place to compute has in common: work on many items, each done once, results as they come.

Here: the contract, and the simplest place, this process. Processes of this machine are `local`'s, a Ray cluster is
`cluster`'s. What the work is (shards, passes of a solver) is no matter of this package.
"""

import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, TypeVar

import cloudpickle
from threadpoolctl import threadpool_limits

from dagster_datamask.redaction import redacted

Item = TypeVar("Item")
Result = TypeVar("Result")

# told of one item: how many of its rows are done so far
Told = Callable[[int], None]
# built once a worker, for what is costly to load; then called for every item that the worker is given
Worker = Callable[[], Callable[[Any, Told], Any]]


# times that an item is given to a worker which is lost with it, before it is given up
TRIES = 3


class Poisoned(RuntimeError):
    """Items whose worker ended, on every try, before they were done; all other items are done."""

    def __init__(self, why: dict[Any, str], remedy: str = "") -> None:
        self.why = why
        items = ", ".join(f"{item} ({reason})" for item, reason in why.items())
        super().__init__(f"the worker was lost each time it was given: {items}{remedy and f'; {remedy}'}")


class WorkerTraceback(Exception):
    """Where in a worker it happened, as text: the last cause of an error that was raised there and is raised here."""

    def __str__(self) -> str:
        return f"in a worker:\n{self.args[0]}"


@dataclass(frozen=True)
class Requests:
    """What one worker takes of a cluster: cores, accelerators, memory. None leaves memory to the cluster."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory_gb: float | None = None


ONE_CORE = Requests()


class Session(Protocol):
    """Workers that stay, with what they hold, for work that comes in many short rounds."""

    def each(self, items: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        """Every item with its result, as `Compute.each` has it, `Poisoned` and errors included. Items are sent by
        cloudpickle, so they may hold functions; any worker may be given any of them, and one that takes the place of a
        lost worker is built anew. One round at a time."""


class Compute(Protocol):
    """A place to compute. `workers`: how many items are worked on at a time, at most."""

    @property
    def workers(self) -> int: ...

    def each(
        self,
        worker: Callable[[], Callable[[Item, Told], Result]],
        items: Sequence[Item],
        *,
        requests: Requests = ONE_CORE,
        told: Callable[[Item, int], None] = lambda item, rows: None,
    ) -> Iterator[tuple[Item, Result]]:
        """Every item with its result, in the order in which they are done.

        `worker` and what it refers to are sent to the workers, each of which calls it once, for its first item. Results
        should be small: they come back to this process. `told` is called here, with an item and how many of its rows
        are done. At most two items a worker are under way, and no more results than that wait to be taken.

        An exception in a worker is raised here, after what is under way has ended; no further item is begun. Raises
        Poisoned, when all others are done, for items whose worker was lost on every try.
        """

    def session(
        self, worker: Callable[[], Callable[[Any, Told], Any]], *, requests: Requests = ONE_CORE
    ) -> AbstractContextManager[Session]:
        """Workers for many rounds: each is built once and kept until the context ends."""

    def close(self) -> None:
        """End what was started for it."""


class Inline:
    """This process: items one after another."""

    workers = 1

    def each(
        self,
        worker: Callable[[], Callable[[Item, Told], Result]],
        items: Sequence[Item],
        *,
        requests: Requests = ONE_CORE,
        told: Callable[[Item, int], None] = lambda item, rows: None,
    ) -> Iterator[tuple[Item, Result]]:
        work: Callable[[Item, Told], Result] | None = None
        for item in items:
            work = work or worker()
            yield item, work(item, lambda rows, item=item: told(item, rows))  # type: ignore[misc]

    @contextmanager
    def session(
        self, worker: Callable[[], Callable[[Any, Told], Any]], *, requests: Requests = ONE_CORE
    ) -> Iterator[Session]:
        yield _InlineSession(worker)

    def close(self) -> None:
        """There is nothing to end."""


INLINE = Inline()


class _InlineSession:
    def __init__(self, worker: Callable[[], Callable[[Any, Told], Any]]) -> None:
        self._worker = worker
        self._work: Callable[[Any, Told], Any] | None = None

    def each(self, items: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        for item in items:
            self._work = self._work or self._worker()
            yield item, self._work(item, lambda rows: None)


def packed(error: BaseException) -> bytes:
    """An error and its causes, for another process: class, message, attributes and notes; what cannot be sent is left
    out. Secrets are taken out here, as the other process may not have them in its environment to know them by."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__
    text = redacted("".join(traceback.format_exception(error)))
    return pickle.dumps(([_pack_one(each) for each in chain], text))


def unpacked(data: bytes) -> BaseException:
    """What `packed` made: the same classes, with the traceback of the worker as the last cause."""
    chain, text = pickle.loads(data)
    errors = [_unpack_one(*each) for each in chain]
    for error, cause in zip(errors, [*errors[1:], WorkerTraceback(text)], strict=True):
        error.__cause__ = cause
    return errors[0]


def _pack_one(error: BaseException) -> tuple[bytes, list[str]]:
    notes = [redacted(str(note)) for note in getattr(error, "__notes__", ())]
    try:
        sent = cloudpickle.dumps(error)
        if type(pickle.loads(sent)) is type(error) and not _tells(str(error), error.args, vars(error)):
            return sent, notes
    except Exception:
        # an error whose constructor takes other arguments than it keeps, or that holds what cannot be sent
        pass
    try:
        made = error.__reduce__()
        # an error of the system is made of more than its arguments
        args = made[1] if isinstance(made, tuple) and made[0] is type(error) else error.args
        sent = cloudpickle.dumps((type(error), _sendable(args), _sendable(vars(error))))
        if type(again := _unpack_one(sent, [])) is type(error) and not _tells(str(again)):
            return sent, notes
    except Exception:
        pass
    return pickle.dumps(RuntimeError(redacted(f"{type(error).__name__}: {error}"))), notes


def _tells(*values: Any) -> bool:
    """Whether a secret is in them, as they are written."""
    texts = [value if isinstance(value, str) else repr(value) for value in values]
    return any(redacted(text) != text for text in texts)


def _unpack_one(sent: bytes, notes: list[str]) -> BaseException:
    found = pickle.loads(sent)
    if not isinstance(found, BaseException):
        cls, args, state = found
        # made without its constructor, which takes what is not known here
        found = cls.__new__(cls, *args)
        vars(found).update(state)
    if notes:
        found.__notes__ = notes
    assert isinstance(found, BaseException)
    return found


def _sendable(values: Any) -> Any:
    """The tuple or dictionary without secrets, and with what cannot be pickled as its text."""

    def sent(value: Any) -> Any:
        if isinstance(value, str):
            return redacted(value)
        if type(value) in (dict, tuple, list):
            return _sendable(value)
        try:
            cloudpickle.dumps(value)
        except Exception:
            return redacted(repr(value))
        return redacted(repr(value)) if _tells(value) else value

    if isinstance(values, dict):
        return {name: sent(value) for name, value in values.items() if name != "__notes__"}
    return type(values)(sent(value) for value in values)


def thread_variables(threads: int) -> dict[str, str]:
    """The environment under which a process that starts computes on so many threads."""
    return dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), str(threads)
    )


def own_threads() -> int:
    """On how many threads this process computes: PyTorch's, as those of the networks show in bits."""
    return int(import_module("torch").get_num_threads())


def use_threads(threads: int) -> None:
    """From now on this process computes on so many threads, be there as many cores or fewer: libraries that are loaded,
    and those that will be."""
    os.environ.update(thread_variables(threads))
    if threads > len(os.sched_getaffinity(0)):
        # what is loaded later takes no more than there are cores, and it orders its sums by their number
        import_module("torch")
    threadpool_limits(threads)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(threads)
