"""A Ray cluster: workers are actors on any of its nodes, each built once and given items one after another.

Ray places the actors, asks for nodes where it scales, and tells of what is lost; an actor is never restarted by Ray, as
only we know which of its items may have ended it. Not here: machines, images and tokens, which are the cluster's.
"""

import fcntl
import logging
import os
import pickle
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import cloudpickle

from dagster_datamask.compute.base import (
    ONE_CORE,
    TRIES,
    Inline,
    Item,
    Poisoned,
    Requests,
    Result,
    Session,
    Told,
    packed,
    unpacked,
)

# times that an item may be under way where a node is lost or no longer answers, which an item hardly causes
NODE_TRIES = 10
# what each worker has: the item that it works on, and the next
_AT_HAND = 2
_OBJECT_STORE_BYTES = 80 * 2**20
_TOKEN = ".shared-"
_DONE, _FAILED, _STOPPED = "done", "failed", "stopped"
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_BETWEEN_COUNTS = 5.0
_SECONDS_BETWEEN_LINES = 60.0
# how long Ray may take to find out whether what no longer answers is dead
_SECONDS_TO_KNOW = 60.0
_SECONDS_TO_ANSWER = 20.0
# a file system of the network may show a new file late
_SECONDS_TO_SEE = 5.0
# sockets lie below this folder, and a socket's path is short
_LONGEST_FOLDER = 40
_WORKERS_IN_A_LINE = 8


class ClusterUnavailable(ConnectionError):
    """The cluster does not answer, or no worker lives on it; later it may."""


class ClusterUnfit(ValueError):
    """The cluster answers, but not as it has to: another token, other versions, no room for one worker."""


class RayCluster:
    """The cluster at `address`, as `Compute`; it is connected to when it is first needed, until `close`.

    address: as ray.init takes it ("auto", "host:port", "ray://host:port"); "" starts Ray on this machine with
    `processes` cores, 0 for all, and ends it. Where this process is connected already, by a resource of dagster-ray for
    one, that connection is used and left as it is. threads: of each worker's libraries; 0 for as many as the cores that
    it asks for. shared: a folder that workers have to see as this process does. log: is told of workers, and of losses.

    Workers on a cluster end with what they are for, as their room is others' too. Those of a Ray that was started here
    stay for what asks for the same next, as most of what a worker costs is its start; but not with an accelerator.
    """

    def __init__(
        self,
        address: str,
        threads: int = 0,
        *,
        processes: int = 0,
        shared: Path | None = None,
        log: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.address = address
        self.log = log
        self._threads = threads
        self._cores = processes or len(os.sched_getaffinity(0))
        self._shared = shared
        self._token: _Token | None = None
        self._ours = False
        self._folder: Path | None = None
        # actors without work, and what each takes
        self._spare: list[Any] = []
        self._spare_requests = ONE_CORE
        # so that what is said late of a round of other work is of no round of theirs
        self._rounds = 0

    @property
    def workers(self) -> int:
        """How many workers of one core the cluster has room for now."""
        return max(1, _room(self._connected().nodes(), Requests()))

    def each(
        self,
        worker: Callable[[], Callable[[Item, Told], Result]],
        items: Sequence[Item],
        *,
        requests: Requests = ONE_CORE,
        told: Callable[[Item, int], None] | None = None,
    ) -> Iterator[tuple[Item, Result]]:
        """As Compute.each. Raises ClusterUnavailable and ClusterUnfit beside what that raises."""
        with self._pool(worker, requests) as pool:
            yield from pool.each(items, told)

    @contextmanager
    def session(
        self, worker: Callable[[], Callable[[Any, Told], Any]], *, requests: Requests = ONE_CORE
    ) -> Iterator[Session]:
        """As Compute.session."""
        with self._pool(worker, requests) as pool:
            yield pool

    def close(self) -> None:
        """Disconnect; end what was started here."""
        if self._token is not None:
            self._token.remove()
            self._token = None
        self._spare.clear()
        if self._ours:
            _ray().shutdown()
            self._ours = False
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        # what is sent to a worker may hold the place it was sent from; a worker hands nothing on
        return Inline, ()

    @contextmanager
    def _pool(self, worker: Callable[[], Callable[[Any, Told], Any]], requests: Requests) -> Iterator["_Pool"]:
        ray = self._connected()
        # a Ray that was started here
        here = self._folder is not None
        if here:
            # the whole machine is the most that a worker of one machine can have
            requests = Requests(min(requests.cpus, self._cores), requests.gpus, requests.memory_gb)
        spare, self._spare = self._spare, []
        if requests != self._spare_requests:
            while spare:
                ray.kill(spare.pop())
        pool = _Pool(
            ray,
            cloudpickle.dumps(worker),
            requests,
            spare,
            self._rounds,
            threads=self._threads or max(1, int(requests.cpus)),
            token=None if self._token is None else self._token.path,
            elsewhere=not here,
            log=self.log,
        )
        try:
            yield pool
            if here and not requests.gpus:
                self._spare, self._spare_requests = pool.leave(), requests
        finally:
            self._rounds = pool.rounds
            pool.close()

    def _connected(self) -> Any:
        ray = _ray()
        if not ray.is_initialized():
            self._spare.clear()
            self._connect(ray)
            self._ours = True
        if self._shared is not None and self._token is None:
            self._token = _Token(self._shared)
        return ray

    def _connect(self, ray: Any) -> None:
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        # Ray prints each loss on stdout, which is for answers
        ray._private.worker._worker_logs_enabled = False
        in_main = threading.current_thread() is threading.main_thread()
        on_term = signal.getsignal(signal.SIGTERM) if in_main else None
        try:
            if self.address:
                _listens(self.address)
                ray.init(address=self.address, **quiet)
            else:
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
                # its workers are the run itself, not something beside it
                os.environ.setdefault("RAY_worker_niceness", "0")
                parent = tempfile.gettempdir()
                self._folder = Path(
                    tempfile.mkdtemp(prefix="ray-", dir=parent if len(parent) < _LONGEST_FOLDER - 13 else "/tmp")
                )
                ray.init(
                    address="local",
                    num_cpus=self._cores,
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    _temp_dir=str(self._folder),
                    **quiet,
                )
        except Exception as error:
            raise self._why_not(error) from error
        finally:
            # Ray's would exit where Dagster's ends a run in order
            if on_term is not None:
                signal.signal(signal.SIGTERM, on_term)

    def _why_not(self, error: Exception) -> Exception:
        at = f"the Ray cluster at {self.address}" if self.address else "Ray on this machine"
        said = " ".join(str(error).split())
        # of a traceback from the other side, what it says at its end
        line = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        # at times only the cause of a cause says so
        whole = "".join(traceback.format_exception(error))
        if any(word in whole for word in ("AuthenticationError", "InvalidAuthToken", "Unauthenticated")):
            return ClusterUnfit(
                f"{at} refuses this process's token; set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file with the "
                "cluster's token, which `ray get-auth-token` prints on its head node (RAY_AUTH_MODE=disabled, where "
                "the cluster was started so)"
            )
        if "version mismatch" in said.lower():
            return ClusterUnfit(f"{at} runs other versions than this process: {said}; use one image for both")
        remedy = (
            "is it running, and is compute.ray_address right? A machine outside the cluster connects by ray://host:10001"
            if self.address
            else "see compute.ray_address for a cluster that is running already"
        )
        return ClusterUnavailable(f"{at} cannot be had: {line}; {remedy}")


class _Token:
    """A file by which a worker knows a folder for the one of this process, locked while that lives."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{_TOKEN}*"):
            _remove_if_left(left)
        self.path = folder / f"{_TOKEN}{secrets.token_hex(8)}"
        # locked before it has the name by which others look whether it was left
        new = self.path.with_name(f".{self.path.name}.tmp")
        self._handle = os.open(new, os.O_CREAT | os.O_RDWR, 0o644)
        fcntl.flock(self._handle, fcntl.LOCK_EX)
        new.rename(self.path)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._handle)


def _remove_if_left(token: Path) -> None:
    try:
        # to be written, as NFS locks no other
        with token.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            token.unlink()
    except OSError:
        # gone meanwhile, of a run that lives, or another user's: a small file more hurts nobody
        return


@dataclass
class _Worker:
    """An actor as it is seen from here; `hello` is what it has yet to answer before it is given anything."""

    actor: Any
    hello: Any
    name: str = ""
    node_id: str = ""
    # {what will be its result: (place of the item, the item)}, in the order of sending, which is that of working
    under_way: dict[Any, tuple[int, Any]] = field(default_factory=dict)
    # the question how far it is, and when it was put
    asked: Any = None
    looked: float = 0.0
    at: int | None = None
    rows: int = 0
    # set where it no longer answers: the question whether it lives, until when, and by what that was seen
    probe: Any = None
    until: float = 0.0
    silence: Exception | None = None


@dataclass
class _Round:
    """What is left of the items of one round, by their places, and what became of those that cannot be done."""

    waiting: deque[int]
    done: int = 0
    # how often an item was lost, by whether it may have been its own doing
    tries: Counter[tuple[int, bool]] = field(default_factory=Counter)
    poisoned: dict[Any, str] = field(default_factory=dict)
    # given up too, but by losses that are none of their doing
    unlucky: dict[Any, str] = field(default_factory=dict)
    failed: BaseException | None = None

    def again(self, had: Sequence[tuple[int, Any]]) -> None:
        # after an error nothing is begun any more
        if self.failed is None:
            self.waiting.extendleft(place for place, _ in reversed(had))

    def lost(self, had: Sequence[tuple[int, Any]], why: str, own: bool) -> str:
        """Put back what a lost worker had, of which the first was worked on; what is said of it."""
        if not had or self.failed is not None:
            return ""
        (place, item), *rest = had
        self.tries[place, own] += 1
        self.again(rest)
        if self.tries[place, own] == (TRIES if own else NODE_TRIES):
            (self.poisoned if own else self.unlucky)[item] = why
            return f"; given up: {_named(had[:1])}" + (f"; tried again: {_named(rest)}" if rest else "")
        # what may have ended a worker comes after what did not
        self.waiting.append(place) if own else self.waiting.appendleft(place)
        return f"; tried again: {_named(had)}"

    def ended(self) -> int:
        """How many items a worker was lost at that they may have ended."""
        return sum(own for _, own in self.tries)

    def end(self) -> None:
        """Raise what the round failed with."""
        if self.failed is not None:
            raise self.failed
        if self.unlucky:
            # no verdict on what was lost by its own doing either: Poisoned says that all others are done
            lost = ", ".join(f"{item} ({why})" for item, why in (self.unlucky | self.poisoned).items())
            raise ClusterUnavailable(
                f"workers on Ray were lost, {NODE_TRIES} times by what was not the item's doing, and not done are: "
                f"{lost}; what is done is kept"
            )
        if self.poisoned:
            raise Poisoned(self.poisoned)


class _Pool:
    """Workers of one kind, from the first item to the end of the context that they are for.

    spare: actors of this kind that are there already; rounds: how many theirs had.
    """

    def __init__(
        self,
        ray: Any,
        worker: bytes,
        requests: Requests,
        spare: list[Any],
        rounds: int,
        *,
        threads: int,
        token: Path | None,
        elsewhere: bool,
        log: Callable[[str], None],
    ) -> None:
        self._ray = ray
        self._requests = requests
        self._threads = threads
        self._token = None if token is None else str(token)
        self._elsewhere = elsewhere
        self._log = log
        memory = {} if requests.memory_gb is None else {"memory": int(requests.memory_gb * 1e9)}
        actor = _worker_class(ray)
        self._actor = ray.remote(
            num_cpus=requests.cpus,
            num_gpus=requests.gpus,
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups={"told": 1},
            **memory,
        )(actor)
        self._versions = actor.versions()
        # sent to each node once
        self._worker = ray.put(worker)
        self._spare = spare
        self._workers: list[_Worker] = []
        self._room, self._counted = 0, 0.0
        # fewer than there is room for, after memory ran out
        self._fewer = 0
        self._most = 0
        # by no item's doing, since the last item that was done; and whether one ever was
        self._lost_in_a_row, self._can_do = 0, False
        self.rounds = rounds
        self._said = time.monotonic()
        self._greeted = False

    def each(self, items: Sequence[Any], told: Callable[[Any, int], None] | None = None) -> Iterator[tuple[Any, Any]]:
        """One round, as Compute.each."""
        self.rounds += 1
        round_ = _Round(deque(range(len(items))))
        try:
            while round_.waiting or any(worker.under_way for worker in self._workers):
                if round_.failed is None:
                    self._grow(len(round_.waiting))
                    self._hand_out(items, round_.waiting)
                if told is not None:
                    self._ask()
                self._say(len(items), round_.done)
                for worker in list(self._workers):
                    if worker.silence is not None and time.monotonic() > worker.until:
                        self._lose(worker, worker.silence, round_)
                for worker, ref, value in self._answer():
                    if isinstance(value, self._ray.exceptions.RayError):
                        if self._is_lost(worker, value):
                            self._lose(worker, value, round_)
                    elif ref == worker.asked:
                        worker.asked = None
                        before, (worker.at, worker.rows) = (worker.at, worker.rows), value
                        item = dict(worker.under_way.values()).get(worker.at)
                        if value != before and item is not None and told is not None:
                            told(item, worker.rows)
                    elif ref == worker.probe:
                        # it lives, but what it was sent may be lost
                        round_.again(self._let_go(worker))
                    else:
                        _, item = worker.under_way.pop(ref)
                        kind, result = pickle.loads(value)
                        if kind == _DONE:
                            self._lost_in_a_row, self._can_do = 0, True
                            round_.done += 1
                            yield item, result
                        elif kind == _FAILED:
                            self._fail(worker, unpacked(result), round_)
        finally:
            # what is at work when this ends is of no use to anyone
            for worker in [worker for worker in self._workers if worker.under_way]:
                self._let_go(worker)
        round_.end()

    def _fail(self, worker: _Worker, error: BaseException, round_: "_Round") -> None:
        error.add_note(f"in {worker.name}")
        if round_.failed is not None:
            self._log(f"also in {worker.name}: {type(error).__name__}: {error}")
            return
        round_.failed = error
        round_.waiting.clear()
        for other in self._workers:
            other.actor.stop.remote(self.rounds)

    def _lose(self, worker: _Worker, error: Exception, round_: "_Round") -> None:
        why, own = self._reason(worker, error)
        had = self._let_go(worker)
        what = round_.lost(had, why, own)
        self._log(f"lost {worker.name or 'a worker that was starting'} ({why}){what}")
        if round_.failed is not None:
            return
        most = 10 + 3 * self._most
        if own and had:
            # an item that ends workers is told by its tries, but not where as good as every item does
            if not self._can_do and (ended := round_.ended()) > most:
                raise ClusterUnfit(
                    f"none of the first {ended} items was done: each ended the worker on Ray that it was given; the "
                    f"last: {why}; give a worker more memory (memory_gb in compute.requests), or see its log"
                )
            return
        self._lost_in_a_row += 1
        if self._lost_in_a_row > most:
            raise ClusterUnavailable(
                f"{self._lost_in_a_row} workers on Ray were lost one after another, and no item was done between; "
                f"the last: {why}"
            )

    def leave(self) -> list[Any]:
        """The actors that have nothing to do, without what was built for this work; they are no more this pool's."""
        idle = [w for w in self._workers if w.hello is None and w.probe is None and not w.under_way]
        for worker in idle:
            self._workers.remove(worker)
            worker.actor.take.remote(None)
        spare, self._spare = self._spare, []
        return [*spare, *(worker.actor for worker in idle)]

    def close(self) -> None:
        """End all actors, those that wait for a place included."""
        for worker in list(self._workers):
            self._let_go(worker)
        while self._spare:
            self._ray.kill(self._spare.pop())

    def _grow(self, waiting: int) -> None:
        """As many workers as there are items and room; where the cluster may grow, as many again that wait for a place,
        which is what asks for nodes."""
        now = time.monotonic()
        if now - self._counted >= _SECONDS_BETWEEN_COUNTS:
            self._counted = now
            self._room = _room(self._ray.nodes(), self._requests)
        if not self._room and not self._elsewhere:
            raise ClusterUnfit(
                f"a worker asks for {_asked(self._requests)}, and Ray on this machine has "
                f"{_there(self._ray.nodes())}; lower compute.requests"
            )
        self._most = max(1, self._room - self._fewer)
        items = waiting + sum(len(worker.under_way) for worker in self._workers)
        for _ in range(min(items, 2 * self._most if self._elsewhere else self._most) - len(self._workers)):
            actor = self._spare.pop() if self._spare else self._actor.remote(self._threads, self._requests.gpus)
            actor.take.remote(self._worker)
            # one that was left may have ended since, which is heard before it has an item
            self._workers.append(_Worker(actor, actor.hello.remote(self._token)))

    def _hand_out(self, items: Sequence[Any], waiting: deque[int]) -> None:
        ready = [worker for worker in self._workers if worker.hello is None and worker.probe is None]
        for held in range(_AT_HAND):
            for worker in ready:
                # a second item where others have enough: it must not wait behind the first while a worker is idle
                if len(worker.under_way) == held and len(waiting) > (self._most if held else 0):
                    # taken once: a sequence may make an item when it is asked for it
                    item = items[waiting[0]]
                    place = waiting.popleft()
                    ref = worker.actor.work.remote(self.rounds, place, cloudpickle.dumps(item))
                    worker.under_way[ref] = place, item

    def _ask(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            due = now - worker.looked >= _SECONDS_BETWEEN_LOOKS
            if due and worker.under_way and worker.asked is None and worker.probe is None:
                worker.looked = now
                worker.asked = worker.actor.rows.remote()

    def _answer(self) -> Iterator[tuple[_Worker, Any, Any]]:
        """The next answer of any worker, or its error; none where all are at work. A worker's hello is heard here."""
        of: dict[Any, _Worker] = {}
        for worker in self._workers:
            if worker.probe is not None:
                of[worker.probe] = worker
            elif worker.hello is not None:
                of[worker.hello] = worker
            else:
                of |= dict.fromkeys(worker.under_way, worker)
        # results first, so that none waits behind a question
        questions = {worker.asked: worker for worker in self._workers if worker.asked is not None and not worker.probe}
        refs = [*of, *questions]
        if not refs:
            return
        ready, _ = self._ray.wait(refs, num_returns=1, timeout=_SECONDS_BETWEEN_LOOKS)
        for ref in ready:
            worker = of.get(ref) or questions[ref]
            try:
                value = self._ray.get(ref)
            except self._ray.exceptions.RayTaskError:
                raise
            except self._ray.exceptions.RayError as error:
                yield worker, ref, error
                continue
            if ref == worker.hello:
                self._welcome(worker, value)
            else:
                yield worker, ref, value

    def _welcome(self, worker: _Worker, said: dict[str, Any]) -> None:
        worker.hello, worker.node_id = None, said["node_id"]
        worker.name = f"worker {said['pid']} on node {said['node']}"
        theirs = said["versions"]
        differ = [
            f"{name} {theirs.get(name, 'missing')} (here {self._versions.get(name, 'missing')})"
            for name in self._versions | theirs
            if theirs.get(name) != self._versions.get(name)
        ]
        # workers of a Ray of our own are this installation, whatever is edited meanwhile
        if differ and self._elsewhere:
            raise ClusterUnfit(f"{worker.name} has {', '.join(differ)}; use one image for workers and this process")
        if not said["sees"]:
            assert self._token is not None
            raise ClusterUnfit(
                f"{worker.name} does not see {Path(self._token).parent} as this process does; mount that folder on "
                "every node at this path, or set storage.root to an object store"
            )
        if not self._greeted:
            self._greeted = True
            workers = f"{self._most} worker{'s' * (self._most > 1)}"
            self._log(f"Ray has room for {workers} of {_asked(self._requests)}; the first is {worker.name}")

    def _is_lost(self, worker: _Worker, error: Exception) -> bool:
        """Whether Ray knows that it is lost; if it does not yet, it is asked."""
        if not isinstance(error, self._ray.exceptions.ActorUnavailableError):
            return True
        if worker.probe is None:
            worker.until, worker.silence = time.monotonic() + _SECONDS_TO_KNOW, error
        else:
            # asked again, and not at once
            time.sleep(_SECONDS_BETWEEN_LOOKS / 10)
        worker.probe = worker.actor.rows.remote()
        return False

    def _reason(self, worker: _Worker, error: Exception) -> tuple[str, bool]:
        """Why it was lost, and whether the item that it worked on can have done it."""
        text = " ".join(str(error).split())
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        if getattr(error, "preempted", False) or "preempted" in text.partition("This can happen")[0]:
            return "its node was preempted", False
        if _memory_ran_out(text) or isinstance(error, self._ray.exceptions.OutOfMemoryError):
            # as many workers again would run out of it again
            self._fewer = min(self._fewer + 1, self._most - 1)
            return "ended by Ray as its node ran out of memory; raise memory_gb in compute.requests", True
        if (worker.node_id and worker.node_id not in alive) or "node has died" in text or "node is dead" in text:
            return "its node died", False
        if isinstance(error, self._ray.exceptions.ActorUnavailableError):
            return "it no longer answers", False
        if not isinstance(error, self._ray.exceptions.RayActorError):
            return text, False
        return "its process was killed or crashed", True

    def _let_go(self, worker: _Worker) -> list[tuple[int, Any]]:
        """End an actor; the items that it had, with their places, in order."""
        self._workers.remove(worker)
        if self._ray.is_initialized():
            self._ray.kill(worker.actor)
        return list(worker.under_way.values())

    def _say(self, total: int, done: int) -> None:
        now = time.monotonic()
        if now - self._said < _SECONDS_BETWEEN_LINES:
            return
        self._said = now
        at_work = [worker for worker in self._workers if worker.under_way]
        if not at_work and not any(worker.hello is None for worker in self._workers):
            self._log(
                f"no worker on Ray yet: each asks for {_asked(self._requests)}, and the cluster has "
                f"{_there(self._ray.nodes())}; waiting for room"
            )
            return
        shown = [
            f"{worker.name}: {_named([first])}" + (f" at {worker.rows:,} rows" if worker.at == first[0] else "")
            for worker in at_work[:_WORKERS_IN_A_LINE]
            for first in [next(iter(worker.under_way.values()))]
        ]
        more = f" and {len(at_work) - len(shown)} more" if len(at_work) > len(shown) else ""
        self._log(f"{done:,} of {total:,} done on Ray; at work: {'; '.join(shown)}{more}")


def _worker_class(ray: Any) -> Any:
    """What the actors are.

    Made in a function, and importing where it needs something, so that it is sent by value: a worker that lacks this
    package, or has another version of it, must be able to say so.
    """

    class DatamaskWorker:
        def __init__(self, threads: int, gpus: float) -> None:
            self._worker: bytes | None = None
            self._threads = threads
            self._gpus = gpus
            self._work: Any = None
            self._at: int | None = None
            self._rows = 0
            self._stopped = 0

        def take(self, worker: bytes | None) -> None:
            self._worker, self._work, self._at = worker, None, None

        def hello(self, token: str | None) -> dict[str, Any]:
            import os
            import time
            from pathlib import Path

            import ray

            until = time.monotonic() + _SECONDS_TO_SEE
            while not (sees := token is None or Path(token).exists()) and time.monotonic() < until:
                time.sleep(0.2)
            return {
                "pid": os.getpid(),
                "node": ray.util.get_node_ip_address(),
                "node_id": ray.get_runtime_context().get_node_id(),
                "versions": self.versions(),
                "sees": sees,
            }

        @staticmethod
        def versions() -> dict[str, str]:
            """What has to be the same here and in workers for equal bytes: Python, this package with a hash of its
            code, and the libraries that it requires."""
            import hashlib
            import importlib.metadata
            import importlib.util
            import platform
            from pathlib import Path

            found = {"Python": ".".join(platform.python_version_tuple()[:2])}
            spec = importlib.util.find_spec("dagster_datamask")
            if spec is None or not spec.submodule_search_locations:
                return found
            folder = Path(spec.submodule_search_locations[0])
            code = hashlib.sha256()
            for file in sorted(folder.rglob("*.py")):
                code.update(str(file.relative_to(folder)).encode() + file.read_bytes())
            found["dagster-datamask of code"] = code.hexdigest()[:12]
            # of what was installed, which has METADATA: a build leaves an egg-info in the folder of the code, which is
            # found from there alone and grows old
            known = importlib.metadata.distributions(name="dagster-datamask")
            installed = next((each for each in known if each.read_text("METADATA")), None)
            if installed is None:
                return found
            found["dagster-datamask"] = installed.version
            from packaging.requirements import Requirement

            for requirement in map(Requirement, installed.requires or []):
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    try:
                        found[requirement.name] = importlib.metadata.version(requirement.name)
                    except importlib.metadata.PackageNotFoundError:
                        continue
            return found

        def work(self, round_: int, place: int, item: bytes) -> bytes:
            import pickle

            import cloudpickle

            from dagster_datamask.compute.base import use_threads
            from dagster_datamask.redaction import redact_logs

            if round_ <= self._stopped:
                return pickle.dumps((_STOPPED, None))
            self._at, self._rows = place, 0
            try:
                if self._work is None:
                    redact_logs()
                    use_threads(self._threads)
                    if 0 < self._gpus < 1:
                        import torch

                        # of a device that is shared, as much memory as was asked for
                        if torch.cuda.is_available():
                            torch.cuda.set_per_process_memory_fraction(self._gpus)
                    assert self._worker is not None
                    self._work = pickle.loads(self._worker)()
                    # again for what was loaded since: PyTorch takes no more than there are cores by itself
                    use_threads(self._threads)
                return bytes(cloudpickle.dumps((_DONE, self._work(pickle.loads(item), self._told))))
            except BaseException as error:
                return pickle.dumps((_FAILED, packed(error)))

        def _told(self, rows: int) -> None:
            self._rows = rows

        @ray.method(concurrency_group="told")
        def rows(self) -> tuple[int | None, int]:
            return self._at, self._rows

        @ray.method(concurrency_group="told")
        def stop(self, round_: int) -> None:
            self._stopped = round_

    return DatamaskWorker


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ClusterUnfit(
            f"compute.backend = 'ray' needs Ray ({error}); install the extra: pip install 'dagster-datamask[ray]'"
        ) from error
    return ray


def _listens(address: str) -> None:
    """Raise OSError where nothing does: Ray would try for minutes."""
    parts = urlsplit(address if "://" in address else f"//{address}")
    if parts.hostname and parts.port:
        socket.create_connection((parts.hostname, parts.port), timeout=_SECONDS_TO_ANSWER).close()


def _room(nodes: Sequence[dict[str, Any]], requests: Requests) -> int:
    """How many workers the nodes that are alive hold, each worker on one of them."""
    asked = {"CPU": requests.cpus, "GPU": requests.gpus, "memory": (requests.memory_gb or 0.0) * 1e9}
    room = 0
    for node in nodes:
        if node["Alive"]:
            has = node["Resources"]
            # Ray counts in ten-thousandths
            room += min(
                (round(has.get(name, 0.0) * 1e4) // round(needed * 1e4) for name, needed in asked.items() if needed),
                default=int(has.get("CPU", 0)),
            )
    return room


def _asked(requests: Requests) -> str:
    parts = [f"{requests.cpus:g} CPU"]
    if requests.gpus:
        parts.append(f"{requests.gpus:g} GPU")
    if requests.memory_gb:
        parts.append(f"{requests.memory_gb:g} GB")
    return ", ".join(parts)


def _there(nodes: Sequence[dict[str, Any]]) -> str:
    """What each kind of node that is alive has."""
    kinds = Counter(
        _asked(Requests(has.get("CPU", 0.0), has.get("GPU", 0.0), round(has.get("memory", 0.0) / 1e9, 1)))
        for has in (node["Resources"] for node in nodes if node["Alive"])
    )
    return "; ".join(f"{count} node{'s' * (count > 1)} of {what}" for what, count in sorted(kinds.items())) or "no node"


def _memory_ran_out(text: str) -> bool:
    return "running low on memory" in text or "OUT_OF_MEMORY" in text


def _named(items: Sequence[tuple[int, Any]]) -> str:
    return ", ".join(name if len(name := str(item)) <= 60 else f"{name[:57]}…" for _, item in items)
