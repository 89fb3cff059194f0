"""Real signals to real processes: the run, its workers, Ray's actors and its node; and what must have come of it."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.chaos.campaign import MISSED, Injection, Wrong
from tests.chaos.faults import must, prove
from tests.chaos.victims import Ended, Order, command, descendants, ended_soon, state
from tests.chaos.world import World, as_toml, half_done

KILLED = "killed, run again"
SURVIVED = "survived"
FAILED = "failed, run again"
# so that nothing hangs for ever; a machine that others use as well may need minutes to start Ray
_PATIENCE_SECONDS = 900.0
_TRIES = 3
# by what a process is known on its command line
WORKER, ACTOR, NODE = "local.serve", "ray::DatamaskWorker", "raylet/raylet"


def order(world: World, root: Path, name: str = "", **told: object) -> Order:
    """A run of the world's project on `root`, which is made where it is not there."""
    if not root.exists():
        shutil.copytree(world.fitted, root)
    backend = str(told.pop("backend", ""))
    config = root.with_name(f"{root.name}{name}.toml")
    config.write_text(world.config(root, backend), "utf-8")
    home = root.with_name(f"{root.name}{name}_home")
    home.mkdir(exist_ok=True)
    log = root.with_name(f"{root.name}{name}.log")
    return Order(str(config), str(root), str(home), str(log), **told)  # type: ignore[arg-type]


def undisturbed(world: World, root: Path) -> int:
    """File events of a whole run, counted once; its seconds are the world's, too."""
    if not world.events:
        started = time.monotonic()
        done = world.victims.run(order(world, root.with_name("undisturbed")))
        must(done.code == 0, f"an undisturbed run failed: {done.log[-2000:]}")
        prove(root.with_name("undisturbed"), world.expected, "an undisturbed run of the command:")
        world.events, world.seconds = done.events, time.monotonic() - started
    return world.events


def afterwards(world: World, root: Path, place: str, again: Ended) -> None:
    must(again.code == 0, f"{place}: the run after it ended with {again.code}: {again.log[-2000:]}")
    prove(root, world.expected, f"{place}: after the run that followed,")


def run_at_files(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """The run is killed at a file event, and so is the one that follows it."""
    events = undisturbed(world, root)
    places, kills = [], 0
    # what follows has less to do
    for most in (events, events // 2):
        event = int(rng.integers(1, most))
        done = world.victims.run(order(world, root, event=event, signal=signal.SIGKILL))
        kills += done.code == -signal.SIGKILL
        places.append(str(event))
        must(done.code in (0, -signal.SIGKILL), f"event {event}: ended with {done.code}: {done.log[-2000:]}")
        must(not (wrong := half_done(root)), f"event {event}: after the kill: {wrong}")
    afterwards(world, root, f"events {places}", world.victims.run(order(world, root)))
    return Injection("the run", f"file events {' and '.join(places)} of {events}", KILLED if kills else MISSED, kills)


def run_on_a_store(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """The run on a root behind an object store is killed at a file event of the store or of the cache, and so is the
    one that follows it on the same machine."""
    fitted = world.fitted_store()
    store = fitted.with_name(root.name)
    shutil.copytree(fitted, store)
    cache = world.cache_of(store)

    def at(event: int = 0) -> Ended:
        config = store.with_name(f"{store.name}.toml")
        config.write_text(as_toml(world.settings_at(store)), "utf-8")
        home = store.with_name(f"{store.name}_home")
        home.mkdir(exist_ok=True)
        # the cache's folder begins with the store's name: events of both count
        log = store.with_name(f"{store.name}.log")
        return world.victims.run(Order(str(config), str(store), str(home), str(log), event, signal.SIGKILL))

    places, kills = [], 0
    # an upload opens a file and renames it; the cache has events of its own beside
    most = 2 * world.asked_of_store["write"]
    while kills < 2 and most > 1:
        event = int(rng.integers(1, most))
        done = at(event)
        must(done.code in (0, -signal.SIGKILL), f"event {event}: ended with {done.code}: {done.log[-2000:]}")
        must(not (wrong := half_done(store)), f"event {event}: after the kill: {wrong}")
        if done.code == 0:
            # it has fewer; what follows has less to do
            break
        kills += 1
        places.append(str(event))
        most //= 2
    again = at()
    must(again.code == 0, f"events {places}: the run after it ended with {again.code}: {again.log[-2000:]}")
    prove(store, world.expected, f"events {places}: after the run that followed,")
    for folder in (store, cache):
        shutil.rmtree(folder)
    return Injection("a run on a store", f"file events {' and '.join(places)}", KILLED if kills else MISSED, kills)


def run_at_moments(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """The run is killed from outside at a moment of the clock, and so is the one that follows it."""
    undisturbed(world, root)
    moments, kills = [], 0
    for most in (0.9, 0.4):
        share = float(rng.uniform(0.02, most))
        for _ in range(_TRIES):
            started = time.monotonic()
            pid = world.victims.start(order(world, root))
            while state(pid) not in ("Z", "") and time.monotonic() - started < share * world.seconds:
                time.sleep(0.005)
            took = time.monotonic() - started
            os.kill(pid, signal.SIGKILL)
            done = world.victims.wait(pid)
            must(not (wrong := half_done(root)), f"{took:.2f} s: after the kill: {wrong}")
            if done.code == -signal.SIGKILL:
                kills += 1
                moments.append(f"{took:.2f} s")
                break
            # the machine is less busy than when it was measured
            must(done.code == 0, f"ended with {done.code} before the moment came: {done.log[-2000:]}")
            world.seconds = took
            if not kills:
                shutil.rmtree(root)
    afterwards(world, root, f"killed after {moments}", world.victims.run(order(world, root)))
    return Injection("the run", f"after {' and '.join(moments)}", KILLED if kills else MISSED, kills)


def holder_stopped(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """The holder of a lease stands still while another run wants it; then it goes on, or is killed."""
    events = undisturbed(world, root)
    event, killed = int(rng.integers(1, events)), bool(rng.integers(2))
    first = world.victims.start(order(world, root, event=event, signal=signal.SIGSTOP))
    _until(lambda: state(first) in ("T", "Z", ""), f"event {event}: the run neither stops nor ends")
    if state(first) != "T":
        must(world.victims.wait(first).code == 0, "the run that was to be stopped failed")
        return Injection("nowhere", f"file event {event}", MISSED)
    second = world.victims.start(order(world, root, "_second"))
    time.sleep(float(rng.uniform(0.2, 3.0)))
    os.kill(first, signal.SIGKILL if killed else signal.SIGCONT)
    one, other = world.victims.wait(first), world.victims.wait(second)
    must(one.code == (-signal.SIGKILL if killed else 0), f"the holder ended with {one.code}: {one.log[-2000:]}")
    must(other.code == 0, f"the one that waited ended with {other.code}: {other.log[-2000:]}")
    prove(root, world.expected, "after both runs,")
    afterwards(world, root, "a third run", world.victims.run(order(world, root)))
    how = "stopped, then killed" if killed else "stopped, then continued"
    return Injection("the holder of a lease", f"file event {event}", f"{SURVIVED}: {how}")


def workers(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """Local worker processes are killed while the run goes on: it makes good what they held."""
    pid = world.victims.start(order(world, root, workers=True, backend="local"))
    kills, below = _kill_some(pid, rng, WORKER, 2)
    done = world.victims.wait(pid)
    must(not (left := ended_soon(below)), f"processes {left} outlived their run")
    must(done.code == 0, f"the run ended with {done.code} after {kills} workers were killed: {done.log[-3000:]}")
    prove(root, world.expected, f"after {kills} workers were killed,")
    afterwards(world, root, "workers", world.victims.run(order(world, root, backend="")))
    return Injection("worker processes", "at random", SURVIVED if kills else MISSED, kills)


def parent_of_workers(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """A run is killed whose worker processes are at work: they end, too, and what they finished counts."""
    pid = world.victims.start(order(world, root, workers=True, backend="local"))
    _until(lambda: bool(_named(pid, WORKER)) or state(pid) in ("Z", ""), "no worker process begins")
    time.sleep(float(rng.uniform(0.0, 8.0)))
    below = descendants(pid)
    os.kill(pid, signal.SIGKILL)
    done = world.victims.wait(pid)
    must(not (left := ended_soon(below)), f"processes {left} outlived their run")
    must(not (wrong := half_done(root)), f"after the kill: {wrong}")
    afterwards(world, root, "a run with workers", world.victims.run(order(world, root, backend="")))
    killed = done.code == -signal.SIGKILL
    return Injection("a run with workers", "at random", KILLED if killed else MISSED, int(killed))


def ray_actors(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """Ray's actors are killed while the run goes on."""
    pid = world.victims.start(order(world, root, backend="ray"))
    kills, below = _kill_some(pid, rng, ACTOR, 4)
    done = world.victims.wait(pid)
    must(not (left := ended_soon(below)), f"processes {left} outlived their run")
    must(done.code == 0, f"the run ended with {done.code} after {kills} actors were killed: {done.log[-3000:]}")
    prove(root, world.expected, f"after {kills} actors were killed,")
    return Injection("Ray actors", "at random", SURVIVED if kills else MISSED, kills)


def ray_node(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """The only node of a Ray cluster is killed: the run ends with one clear line, and the next one makes good."""
    pid = world.victims.start(order(world, root, backend="ray"))
    _until(lambda: bool(_named(pid, ACTOR)) or state(pid) in ("Z", ""), "no actor begins")
    time.sleep(float(rng.uniform(0.0, 5.0)))
    nodes, below = _named(pid, NODE), descendants(pid)
    for node in nodes:
        os.kill(node, signal.SIGKILL)
    done = world.victims.wait(pid)
    must(not (left := ended_soon(below)), f"processes {left} outlived their run")
    must(done.code in (0, 1, 2), f"the run ended with {done.code}: {done.log[-3000:]}")
    must("Traceback" not in done.log, f"no one clear line: {done.log[-3000:]}")
    must(not (wrong := half_done(root)), f"after the kill: {wrong}")
    afterwards(world, root, "Ray's node", world.victims.run(order(world, root, backend="")))
    return Injection("Ray's node", "at random", FAILED if done.code else SURVIVED, len(nodes))


def _named(pid: int, part: str) -> list[int]:
    return [child for child in descendants(pid) if part in command(child)]


def _kill_some(pid: int, rng: np.random.Generator, part: str, most: int) -> tuple[int, list[int]]:
    """Kill up to `most` processes below `pid` whose command has `part`, each at a random moment after it was seen.

    How many were killed, and all that was below `pid` the last time that one was.
    """
    kills, below = 0, descendants(pid)
    until = time.monotonic() + _PATIENCE_SECONDS
    while kills < most and time.monotonic() < until and state(pid) not in ("Z", ""):
        found = _named(pid, part)
        if found:
            time.sleep(float(rng.uniform(0.0, 3.0)))
            victim = found[int(rng.integers(len(found)))]
            if state(victim) not in ("Z", "") and part in command(victim):
                below = descendants(pid)
                os.kill(victim, signal.SIGKILL)
                kills += 1
        time.sleep(0.05)
    return kills, below


def _until(true: Callable[[], bool], why: str) -> None:
    until = time.monotonic() + _PATIENCE_SECONDS
    while not true():
        if time.monotonic() > until:
            raise Wrong(why)
        time.sleep(0.02)


KINDS: dict[str, tuple[int, Callable[[World, np.random.Generator, Path], Injection]]] = {
    "kill_run_at_files": (6, run_at_files),
    "kill_run_at_moments": (4, run_at_moments),
    "kill_run_on_a_store": (2, run_on_a_store),
    "stop_lease_holder": (4, holder_stopped),
    "kill_workers": (3, workers),
    "kill_parent_of_workers": (2, parent_of_workers),
    "kill_ray_actors": (2, ray_actors),
    "kill_ray_node": (1, ray_node),
}
