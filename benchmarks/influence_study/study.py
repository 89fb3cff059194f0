"""The run: every subject once, in as many processes as asked for, each kept as a file; then the clusters' speed.

Here: which subjects there are, what is kept, progress. Not here: what is measured (`measurements`), the page.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np

from benchmarks.documents import KEEP, synthetic
from benchmarks.group_selection import FULL_PICKS, group_selection
from benchmarks.influence_study import text, worlds
from benchmarks.influence_study.subjects import TEXT, WORLD, Sizes
from benchmarks.measure import machine
from dagster_datamask import keyed
from dagster_datamask.selection.budgets import largest_remainder
from dagster_datamask.shards.writer import write_json

# raised when the same sizes would give other numbers
VERSION = 3
WORLDS, SEEDS = 3, 3
# documents, and the clusters that they are put into
SPEED: dict[int, tuple[int, ...]] = {10_000: (10, 31, 100), 50_000: (10, 70, 500), 100_000: (10, 100, 1_000)}
_EVERY = 20.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """One subject: world `world` with a seed, or the web pages with the reference `place`."""

    place: str
    world: int
    seed: int
    sizes: Sizes

    @property
    def file(self) -> str:
        if self.place == worlds.PLACE:
            return f"world-{self.world}-seed-{self.seed}.json"
        return f"text-{self.seed}.json"

    @property
    def key(self) -> str:
        """Of all that decides the result."""
        return keyed.digest(VERSION, self.place, self.world, self.seed, json.dumps(self.sizes.to_dict())).hex()

    @property
    def effort(self) -> float:
        return self.sizes.cost * self.sizes.planned(self.seed)


def jobs(world: Sizes = WORLD, pages: Sizes = TEXT, count: int = WORLDS, seeds: int = SEEDS) -> list[Job]:
    """Worlds, those of the longest seed first, and then the two texts, which take as long as each other."""
    found = [Job(worlds.PLACE, w, s, world) for s in range(seeds) for w in range(count)]
    if text.is_there():
        found += [Job(name, 0, seed, pages) for name, seed in text.REFERENCES.items()]
    return found


def run(wanted: Sequence[Job], folder: Path, processes: int, say: Say) -> list[dict[str, Any]]:
    """What every job has found: from its file where that is of the same job, else measured now and kept."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [job for job in wanted if kept(job, folder) is None]
    if missing:
        say(f"{len(wanted) - len(missing)} of {len(wanted)} subjects are there already, {len(missing)} to go")
        _measure(missing, folder, processes, say)
    found = [kept(job, folder) for job in wanted]
    assert all(result is not None for result in found)
    return [result for result in found if result is not None]


def kept(job: Job, folder: Path) -> dict[str, Any] | None:
    path = folder / job.file
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found if found["key"] == job.key else None


def one(job: Job, folder: Path, done: Callable[[int], None]) -> None:
    """Measure a subject and keep its file."""
    # torch loads with it, and the parent needs it for nothing
    from benchmarks.influence_study.measurements import measure

    started = time.process_time()
    if job.place == worlds.PLACE:
        subject = worlds.of_world(job.world, job.seed, job.sizes, done)
    else:
        subject = text.of_text(job.place, job.sizes, done)
    about = {
        "key": job.key,
        "name": subject.name,
        "place": job.place,
        "world": job.world,
        "seed": job.seed,
        "counts": job.sizes.fitted(job.seed),
        "main": job.sizes.main,
        "test": job.sizes.test,
        "machine": machine(),
    }
    found = measure(subject, done)
    write_json(folder / job.file, about | found | {"cpu_seconds": time.process_time() - started})


def _measure(missing: Sequence[Job], folder: Path, processes: int, say: Say) -> None:
    total = sum(job.effort for job in missing)
    started = told = time.perf_counter()
    effort = 0.0
    context = get_context("forkserver")
    queue = context.Queue()
    with _one_thread(), ProcessPoolExecutor(processes, context, _start, (queue,)) as pool:
        running: dict[Future[None], Job] = {pool.submit(_work, job, folder): job for job in missing}
        while running:
            ended, _ = wait(running, timeout=2.0, return_when=FIRST_COMPLETED)
            while True:
                try:
                    effort += queue.get_nowait()
                except Empty:
                    break
            for future in ended:
                future.result()
                say(f"{running.pop(future).file} is there")
            now = time.perf_counter()
            if effort and now - told > _EVERY and running:
                told = now
                left = (now - started) * (total - effort) / effort
                say(f"{effort / total:.0%} of the probes and steps, about {left / 60:.0f} min to go")


_told: "Queue[float] | None" = None


def _start(queue: "Queue[float]") -> None:
    """What a process of the pool does first."""
    global _told
    _told = queue
    # one whose parent was killed would wait for work for ever
    threading.Thread(target=_leave_with_the_parent, daemon=True).start()


def _leave_with_the_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _work(job: Job, folder: Path) -> None:
    assert _told is not None
    waiting = 0.0

    def done(steps: int) -> None:
        nonlocal waiting
        waiting += steps * job.sizes.cost
        # a word a step would keep the parent busy
        if waiting > 500:
            _told.put(waiting)
            waiting = 0.0

    one(job, folder, done)
    _told.put(waiting)


@contextmanager
def _one_thread() -> Iterator[None]:
    """For the processes that start meanwhile: each has a core."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def speed(folder: Path, say: Say, sizes: dict[int, tuple[int, ...]] = SPEED) -> dict[str, Any]:
    """Seconds of the picks alone in clusters, and products counted, for each size of the pool; kept like a subject."""
    path = folder / "speed.json"
    key = keyed.digest(VERSION, repr(sizes)).hex()
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if found["key"] == key:
            return found
    runs = []
    before = machine()
    for n, clusters in sizes.items():
        say(f"group selection out of {n:,} documents")
        rows = group_selection(synthetic(n, dtype=np.float16), clusters, min(FULL_PICKS, n // 10))
        alone = rows[2 : 2 + 2 * len(clusters) : 2]
        runs.append(
            {
                "documents": n,
                "clusters": clusters,
                "seconds": [row.ours for row in alone],
                "whole": [row.ours for row in rows[1 : 1 + 2 * len(clusters) : 2]],
                "full": alone[0].other,
                "products": [_products(n, d) for d in clusters],
            }
        )
    found = {"key": key, "machine": before, "runs": runs}
    write_json(path, found)
    return found


def _products(n: int, clusters: int) -> int:
    """Similarities that the running-sum greedy takes: of every document of a cluster at each of its picks but the
    first."""
    labels = keyed.rng(0, "benchmark/clusters", clusters).integers(clusters, size=n)
    sizes = np.bincount(labels, minlength=clusters).tolist()
    amounts = largest_remainder(round(KEEP * n), sizes, sizes)
    return sum(size * max(amount - 1, 0) for size, amount in zip(sizes, amounts, strict=True))
