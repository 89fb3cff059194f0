"""What goes wrong, kind by kind, and what must have come of it.

Each kind draws its place and moment from the generator that it is given, disturbs one run, and proves what the run says
and leaves behind; then a run without disturbance has to give the bytes of one that was never disturbed. Killed
processes are `kills`' matter.
"""

import errno
import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import dagster as dg
import numpy as np
import pyarrow.parquet as pq

from dagster_datamask.jobs import build_jobs
from dagster_datamask.resources.storage import StorageResource
from dagster_datamask.scoring.encoders import Encoder
from dagster_datamask.sensors import new_shards
from dagster_datamask.sensors.new_shards import build_new_shards
from dagster_datamask.settings import Settings
from tests.chaos.campaign import MISSED, Injection, Wrong
from tests.chaos.filesystem import PLACES, READS, WRITES, Fault, weather
from tests.chaos.world import (
    SNAPSHOT,
    Attempt,
    World,
    broken,
    different,
    half_done,
    published,
    run,
)
from tests.project import text_of, write_shard

ALWAYS = float("inf")
IN_SNAPSHOT, AT_SHARD, IN_ROOT = PLACES
# what a disturbed run may come to: no step noticed, a step was tried again, or it failed and said which failure it is
ABSORBED, RETRIED, TRANSIENT, PERMANENT = "absorbed", "retried", "failed, transient", "failed, permanent"

Disturbance = AbstractContextManager[Callable[[], str]]


def must(right: bool, why: str) -> None:
    if not right:
        raise Wrong(why)


def came_to(attempt: Attempt) -> str:
    if attempt.success:
        return RETRIED if attempt.retries else ABSORBED
    must(not attempt.unsorted, f"a step failed by an error that nobody sorted: {attempt.told}")
    must(bool(attempt.told) and "\n" not in attempt.told, f"a failure is one line, not {attempt.told!r}")
    return TRANSIENT if attempt.kind == "transient" else PERMANENT


def disturb(
    world: World,
    root: Path,
    disturbance: Disturbance,
    *,
    may: tuple[str, ...],
    says: str = "",
    when: str = "",
    expected: Mapping[str, str] | None = None,
    source: Path | None = None,
    whole: bool = False,
    settles: bool = True,
    settings: Settings | None = None,
) -> Injection:
    """Run under the disturbance, then undisturbed, and prove both.

    may: what the first run may come to; says: a part of its message where it fails. expected: published bytes in the
    end, the world's where not given; source: where the documents lie; whole: the report is made, too; settles: a first
    run that goes well has published the expected bytes, where the source was the same throughout; settings: the
    world's for this root where not given.
    """
    if not root.exists():
        shutil.copytree(world.fitted, root)
    settings = settings or world.settings(root, documents=source)
    wanted = world.expected if expected is None else expected
    with disturbance as fired:
        attempt = run(settings, whole=whole)
        place = fired()
    if not place:
        return Injection("nowhere", when, MISSED)
    outcome = came_to(attempt)
    must(outcome in may, f"{place}: {outcome}, where it should be {' or '.join(may)}: {attempt.told}")
    must(outcome in (ABSORBED, RETRIED) or says in attempt.told, f"{place}: does not say {says!r}: {attempt.told}")
    must(not (wrong := half_done(root)), f"{place}: after the disturbed run: {wrong}")
    if attempt.success and settles:
        prove(root, wanted, f"{place}: the disturbed run went well, but", whole)
    # figures take as long as all else, so most runs do without them
    whole = whole or root.name[-1] in "05"
    again = run(settings, whole=whole)
    must(again.success, f"{place}: the run after it failed: {again.told}")
    prove(root, wanted, f"{place}: after the run that followed,", whole)
    return Injection(place, when, outcome + (f": {attempt.told}" if attempt.told else ""))


def prove(root: Path, expected: Mapping[str, str], who: str, whole: bool = True) -> None:
    """That the root holds the expected published bytes and nothing that must not be there."""
    wanted = {name: of for name, of in expected.items() if whole or not name.startswith("snapshot_report/")}
    wrong = different(published(root), wanted) + broken(root)
    must(not wrong, f"{who} {'; '.join(wrong[:5])} ({len(wrong)} in all)")


@contextmanager
def store_fault(fault: Fault) -> Iterator[Callable[[], str]]:
    with weather.with_fault(fault):
        yield lambda: f"{fault.operation} {Path(fault.fired[0]).name}" if fault.fired else ""


def drawn(
    world: World, rng: np.random.Generator, operations: tuple[str, ...] = READS, inside: str = ""
) -> tuple[str, int]:
    """An operation and which call of it, among those that an undisturbed run makes (at paths that hold `inside`)."""
    operation = operations[int(rng.integers(len(operations)))]
    return operation, int(rng.integers(1, world.asked[f"{operation} {inside}".strip()] + 1))


def _slow_down(path: str) -> Exception:
    from botocore.exceptions import ClientError

    answer = {"Error": {"Code": "SlowDown", "Message": "Please reduce your request rate."}}
    return ClientError({**answer, "ResponseMetadata": {"HTTPStatusCode": 503}}, "GetObject")  # type: ignore[arg-type]


ERRORS: dict[str, Callable[[str], Exception]] = {
    "timeout": lambda path: TimeoutError(f"{path}: no answer"),
    "slow_down": _slow_down,
    "reset": lambda path: ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    "forbidden": lambda path: PermissionError(errno.EACCES, "Permission denied", path),
    "broken_disk": lambda path: OSError(errno.EIO, "Input/output error", path),
}


def raising(error: Callable[[str], Exception]) -> Callable[[str, Any], Any]:
    def act(path: str, answer: Any) -> Any:
        raise error(path)

    return act


def source_error(name: str) -> Callable[[World, np.random.Generator, Path], Injection]:
    """One answer of the store is an error: what may pass is tried again in the same run."""

    def act(world: World, rng: np.random.Generator, root: Path) -> Injection:
        operation, first = drawn(world, rng)
        fault = Fault(operation, first, raising(ERRORS[name]))
        passes = name != "forbidden"
        # before any step there is nothing that could try again: the command ends with the error
        may = (RETRIED, ABSORBED, TRANSIENT) if passes else (PERMANENT,)
        return disturb(world, root, store_fault(fault), may=may, when=f"{operation} {first}")

    return act


def source_down(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """From a moment on the store answers nothing at all."""
    operation, first = drawn(world, rng)
    name = ("timeout", "slow_down", "reset")[int(rng.integers(3))]
    fault = Fault(operation, first, raising(ERRORS[name]), times=ALWAYS)
    return disturb(world, root, store_fault(fault), may=(TRANSIENT,), when=f"{name} from {operation} {first} on")


def short_read(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """A read gives fewer bytes than there are, without an error: no verdict on the shard."""
    _, first = drawn(world, rng, ("read",))
    share = float(rng.random())
    fault = Fault("read", first, lambda path, raw: raw[: int(len(raw) * share)])
    return disturb(world, root, store_fault(fault), may=(ABSORBED, RETRIED), when=f"read {first} to {share:.0%}")


def truncated(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """A shard ends early until somebody uploads it again."""
    source = own_source(world, root)
    shards = sorted(source.rglob("*.parquet"))
    shard = shards[int(rng.integers(len(shards)))]
    whole = shard.read_bytes()
    cut = int(rng.integers(0, len(whole)))

    @contextmanager
    def cut_short() -> Iterator[Callable[[], str]]:
        shard.write_bytes(whole[:cut])
        try:
            yield lambda: shard.name
        finally:
            shard.write_bytes(whole)

    try:
        return disturb(
            world,
            root,
            cut_short(),
            may=(PERMANENT,),
            says="Replace or remove the file",
            when=f"{cut} bytes",
            source=source,
        )
    finally:
        shutil.rmtree(source)


def own_source(world: World, root: Path) -> Path:
    """A copy of the documents, beside the root."""
    source = root.with_name(f"{root.name}_source")
    shutil.copytree(world.source, source)
    return source


def wrong_size(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """A listing tells another size than the object has."""
    # of folders there is no size
    operation, inside = (("ls", IN_SNAPSHOT), ("info", AT_SHARD))[int(rng.integers(2))]
    _, first = drawn(world, rng, (operation,), inside)
    factor = (0.0, 0.5, 2.0)[int(rng.integers(3))]

    def act(path: str, answer: Any) -> Any:
        entries = [answer] if isinstance(answer, dict) else answer
        changed = [{**e, "size": int(e["size"] * factor)} if e["type"] == "file" else e for e in entries]
        return changed[0] if isinstance(answer, dict) else changed

    fault = Fault(operation, first, act, inside=inside)
    may = (ABSORBED, RETRIED, TRANSIENT)
    return disturb(world, root, store_fault(fault), may=may, when=f"{operation} {first}, sizes times {factor}")


def stale_listing(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """A listing from before: it names a shard that is gone, or lacks one that has come."""
    _, first = drawn(world, rng, ("ls",), IN_SNAPSHOT)
    gone = bool(rng.integers(2))

    def act(path: str, answer: Any) -> Any:
        if gone:
            return [*answer, {**answer[-1], "name": answer[-1]["name"].replace(".parquet", "_old.parquet")}]
        return answer[:-1]

    fault = Fault("ls", first, act, inside=IN_SNAPSHOT)
    when = f"ls {first}, with a shard that is gone" if gone else f"ls {first}, without the last shard"
    # what a listing does not name cannot be known; the run after it makes good
    return disturb(world, root, store_fault(fault), may=(ABSORBED, RETRIED, TRANSIENT), when=when, settles=gone)


def rewritten(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """A shard is replaced by another version while it is read, for good: only the new one may be published."""
    source, shard, other = _two_versions(world, rng, root)
    operation, first = drawn(world, rng, ("info", "open", "read"))

    def act(path: str, answer: Any) -> Any:
        _replace(shard, other)
        return answer

    clean = root.with_name(f"{root.name}_clean")
    after = root.with_name(f"{root.name}_after")
    shutil.copytree(source, after)
    _replace(after / shard.relative_to(source), other)
    shutil.copytree(world.fitted, clean)
    first_run = run(world.settings(clean, documents=after), whole=True)
    must(first_run.success, f"an undisturbed run of the new version failed: {first_run.told}")
    fault = Fault(operation, first, act)
    try:
        # what was read before it is wholly of the old version, and the run goes well with it
        return disturb(
            world,
            root,
            store_fault(fault),
            may=(ABSORBED, RETRIED, TRANSIENT, PERMANENT),
            when=f"{operation} {first}",
            expected=published(clean),
            source=source,
            settles=False,
        )
    finally:
        for folder in (clean, after, source):
            shutil.rmtree(folder, ignore_errors=True)


def there_and_back(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """A shard is replaced and put back while it is read: nothing of the other version may be published."""
    source, shard, other = _two_versions(world, rng, root)
    own = shard.read_bytes()
    operation, first = drawn(world, rng, ("info", "open", "read"))
    # for so many answers the other version is there
    lasting = int(rng.integers(1, 12))
    left = [0]

    def act(path: str, answer: Any) -> Any:
        left[0] += 1
        if left[0] == 1:
            _replace(shard, other)
        elif left[0] == lasting + 1:
            _replace(shard, own)
        return answer

    fault = Fault(operation, first, act, times=ALWAYS)

    @contextmanager
    def for_a_while() -> Iterator[Callable[[], str]]:
        with store_fault(fault) as fired:
            try:
                yield fired
            finally:
                _replace(shard, own)

    try:
        return disturb(
            world,
            root,
            for_a_while(),
            may=(ABSORBED, RETRIED, TRANSIENT, PERMANENT),
            when=f"{operation} {first}, for {lasting} answers",
            source=source,
            settles=False,
        )
    finally:
        shutil.rmtree(source, ignore_errors=True)


def _two_versions(world: World, rng: np.random.Generator, root: Path) -> tuple[Path, Path, bytes]:
    """(a copy of the source, one of its shards, another version of that shard with the same ids)."""
    source = own_source(world, root)
    shards = sorted(source.rglob("*.parquet"))
    shard = shards[int(rng.integers(len(shards)))]
    table = pq.read_table(shard)
    drafts = root.with_name(f"{root.name}_drafts")
    texts = [text and text_of(f"another {text}") for text in table["text"].to_pylist()]
    draft = write_shard(
        drafts, SNAPSHOT, shard.stem, len(table), ids=table["id"].to_pylist(), texts=texts, group_rows=5
    )
    other = draft.read_bytes()
    shutil.rmtree(drafts)
    return source, shard, other


def _replace(path: Path, content: bytes) -> None:
    """As a store replaces an object: whole, and at another time."""
    part = path.with_name(f".{path.name}.upload")
    part.write_bytes(content)
    part.replace(path)


def disk_full(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """No file may grow beyond some bytes: the kernel refuses the write, wherever it comes from."""
    sizes = sorted(path.stat().st_size for path in world.whole.rglob("*") if path.is_file())
    limit = int(rng.integers(1, sizes[int(len(sizes) * 0.95)]))

    @contextmanager
    def limited() -> Iterator[Callable[[], str]]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            yield lambda: "a write"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return disturb(world, root, limited(), may=(PERMANENT,), says="make room", when=f"beyond {limit} bytes", whole=True)


def fsync_fails(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """The disk cannot keep what was written: the nth fsync gives an error, and the file must not count."""
    nth = int(rng.integers(1, 120))
    number = (errno.EIO, errno.ENOSPC)[int(rng.integers(2))]
    real, calls, fired = os.fsync, [0], []

    def fsync(handle: int) -> None:
        calls[0] += 1
        if calls[0] == nth:
            fired.append(Path(f"/proc/self/fd/{handle}").readlink().name)
            raise OSError(number, os.strerror(number))
        real(handle)

    @contextmanager
    def failing() -> Iterator[Callable[[], str]]:
        with mock.patch("os.fsync", fsync):
            yield lambda: f"fsync {fired[0]}" if fired else ""

    may = (RETRIED,) if number == errno.EIO else (PERMANENT,)
    return disturb(world, root, failing(), may=may, when=f"fsync {nth}, {errno.errorcode[number]}")


def torn(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """After a power failure on a disk that lied about fsync: a shard's file or record cut, empty or gone."""
    shutil.copytree(world.whole, root)
    records = sorted(root.glob(f"*/{SNAPSHOT}/*/*.done.json"))
    record = records[int(rng.integers(len(records)))]
    victim = record if rng.integers(2) else record.with_name(record.name.removesuffix(".done.json"))
    how = ("gone", "empty", "cut")[int(rng.integers(3))]
    # the pointer may have survived or not
    if rng.integers(2):
        (record.parent.parent / "current.json").unlink()
    content = victim.read_bytes()
    victim.unlink()
    if how != "gone":
        victim.write_bytes(b"" if how == "empty" else content[: int(rng.integers(1, len(content)))])
    place = f"{victim.relative_to(root).parts[0]} {victim.name}"
    attempt = run(world.settings(root), whole="snapshot_report" in place)
    must(came_to(attempt) == ABSORBED, f"{place} {how}: {came_to(attempt)}: {attempt.told}")
    # only the report itself may still lack its own
    prove(root, world.expected, f"{place} {how}: afterwards")
    return Injection(place, how, ABSORBED)


def store_error(name: str) -> Callable[[World, np.random.Generator, Path], Injection]:
    """One answer of the root's store is an error, before or after it did what was asked."""

    def act(world: World, rng: np.random.Generator, root: Path) -> Injection:
        operation, first, store = _at_root(world, rng, root, (*READS, *WRITES))
        fault = Fault(operation, first, raising(ERRORS[name]), inside=IN_ROOT)
        may = (PERMANENT,) if name == "forbidden" else (ABSORBED, RETRIED, TRANSIENT)
        return _at_store(world, store, fault, may, f"{operation} {first}")

    return act


def store_down(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """From a moment on the root's store answers nothing at all."""
    operation, first, store = _at_root(world, rng, root, ("info", "read", "write"))
    fault = Fault(operation, first, raising(ERRORS["timeout"]), times=ALWAYS, inside=IN_ROOT)
    return _at_store(world, store, fault, (TRANSIENT,), f"from {operation} {first} on")


def store_cuts(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """The root's store keeps, or gives, fewer bytes than there are, and says nothing."""
    operation, first, store = _at_root(world, rng, root, ("read", "write"))
    share = float(rng.random())
    fault = Fault(operation, first, lambda path, raw: raw[: int(len(raw) * share)], inside=IN_ROOT)
    return _at_store(world, store, fault, (ABSORBED, RETRIED, TRANSIENT), f"{operation} {first} to {share:.0%}")


def _at_root(world: World, rng: np.random.Generator, root: Path, operations: tuple[str, ...]) -> tuple[str, int, Path]:
    """(operation, which call of it, the folder behind the store) for a root on a store."""
    fitted = world.fitted_store()
    store = fitted.with_name(root.name)
    shutil.copytree(fitted, store)
    asked = world.asked_of_store
    possible = [operation for operation in operations if asked[f"{operation} {IN_ROOT}"]]
    operation = possible[int(rng.integers(len(possible)))]
    return operation, int(rng.integers(1, asked[f"{operation} {IN_ROOT}"] + 1)), store


def _at_store(world: World, store: Path, fault: Fault, may: tuple[str, ...], when: str) -> Injection:
    done = disturb(world, store, store_fault(fault), may=may, when=when, settings=world.settings_at(store))
    for folder in (store, world.cache_of(store)):
        shutil.rmtree(folder, ignore_errors=True)
    return done


def model_damaged(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """A model's file is cut, or some of its bytes are others, after it was published: no document is scored by it."""
    shutil.copytree(world.fitted, root)
    part = ("dclm", "edu", "wiki")[int(rng.integers(3))]
    (model,) = root.glob(f"{part}_classifier/*/{part}.{'json' if part == 'edu' else 'bin'}")
    own = model.read_bytes()
    how = ("cut", "empty", "garbled", "one bit")[int(rng.integers(4))]
    at = int(rng.integers(1, len(own) - 64))
    if how == "garbled":
        other = own[:at] + rng.bytes(64) + own[at + 64 :]
    else:
        other = {"cut": own[:at], "empty": b""}.get(how, own[:at] + bytes([own[at] ^ 1]) + own[at + 1 :])

    @contextmanager
    def damaged() -> Iterator[Callable[[], str]]:
        model.write_bytes(other)
        try:
            yield lambda: model.name
        finally:
            model.write_bytes(own)

    says = f"is not the file that {part}_classifier was published with"
    return disturb(world, root, damaged(), may=(PERMANENT,), says=says, when=f"{how} at byte {at}")


def head_of_nan(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """The file of the Edu head has a weight that is no number, and its hash is that of the record."""
    shutil.copytree(world.fitted, root)
    (model,) = root.glob("edu_classifier/*/edu.json")
    pointer = root / "edu_classifier" / "current.json"
    own, told = model.read_bytes(), pointer.read_bytes()
    head = json.loads(own)
    head["weights"][int(rng.integers(len(head["weights"])))] = float("nan")
    other = json.dumps(head).encode()

    @contextmanager
    def poisoned() -> Iterator[Callable[[], str]]:
        model.write_bytes(other)
        pointer.write_bytes(told.replace(sha256(own).hexdigest().encode(), sha256(other).hexdigest().encode()))
        try:
            yield lambda: model.name
        finally:
            model.write_bytes(own)
            pointer.write_bytes(told)

    return disturb(world, root, poisoned(), may=(PERMANENT,), says="weights must be one finite row", when="NaN")


def encoder_of_nan(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """Some rows of the encoder's output are no numbers: counted with their reason, never a vector or a score."""
    shutil.copytree(world.fitted, root)
    real, rows = Encoder._forward, [0]

    def forward(model: Any, features: dict[str, Any]) -> np.ndarray:
        vectors = np.array(real(model, features))
        hit = rng.random(len(vectors)) < 0.3
        vectors[hit] = np.nan
        rows[0] += int(hit.sum())
        return vectors

    settings = world.settings(root)
    with mock.patch.object(Encoder, "_forward", staticmethod(forward)):
        attempt = run(settings, whole=False)
    if not rows[0]:
        return Injection("nowhere", "30 % of the rows", MISSED)
    must(attempt.success, f"rows without a vector ended the run: {attempt.told}")
    must(not (wrong := broken(root)), f"with {rows[0]} rows of NaN: {wrong}")
    counts = json.loads((root / "e5_embeddings" / SNAPSHOT / "current.json").read_text("utf-8"))["counts"]
    bad = counts.get("bad_embedding:non_finite", 0)
    scored = json.loads((root / "edu_scores" / SNAPSHOT / "current.json").read_text("utf-8"))["counts"]
    must(bad + scored.get("non_finite", 0) > 0, f"{rows[0]} rows of NaN are counted nowhere: {counts}, {scored}")
    # what a device that errs has made, and all that was made of it, is for a person to remove
    for made in root.glob(f"*/{SNAPSHOT}"):
        shutil.rmtree(made)
    again = run(settings, whole=False)
    must(again.success, f"the run after it failed: {again.told}")
    prove(root, world.expected, "after its results were removed and the run that followed,", whole=False)
    return Injection(
        "encoder", f"{rows[0]} rows", f"counted: {bad} bad_embedding, {scored.get('non_finite', 0)} unscored"
    )


def clock_of_sensor(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """The clock jumps by hours between two ticks of new_shards: the snapshot is asked for once, soon after."""
    settings = world.settings(world.fitted)
    sensor = build_new_shards(settings, build_jobs(settings))
    now, hours = [1e9], float(rng.uniform(-48, 48))
    clock = mock.Mock(time=lambda: now[0], monotonic=lambda: 0.0)
    cursor, asked, ticks = None, [], 0
    with (
        dg.DagsterInstance.ephemeral() as instance,
        mock.patch.object(new_shards, "time", clock),
        mock.patch.dict(os.environ, DAGSTER_HOME=str(world.folder)),
    ):
        for tick in range(6):
            context = dg.build_sensor_context(instance=instance, cursor=cursor)
            result = sensor(context, storage=StorageResource.from_settings(settings))
            must(isinstance(result, dg.SensorResult), f"tick {tick}: {result}")
            cursor = result.cursor
            asked += [request.run_key for request in result.run_requests or []]
            ticks = ticks or (tick if asked else 0)
            now[0] += 30 + (hours * 3600 if tick == 0 else 0)
    must(len(set(asked)) == len(asked) == 1, f"asked for {asked} in six ticks")
    must(ticks <= 3, f"asked for only at tick {ticks}")
    return Injection("new_shards", f"by {hours:.1f} h", f"{ABSORBED}: asked for at tick {ticks}")


def clock_jumps(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """The wall clock jumps by hours, back and forth, at every other look at it."""
    hours = float(rng.uniform(1, 48))
    real, looks = time.time, [0]

    def now() -> float:
        looks[0] += 1
        return real() + (hours, -hours, 0.0)[looks[0] // 7 % 3] * 3600

    @contextmanager
    def jumping() -> Iterator[Callable[[], str]]:
        with mock.patch("time.time", now):
            yield lambda: "time.time" if looks[0] else ""

    return disturb(world, root, jumping(), may=(ABSORBED,), when=f"by {hours:.1f} h", whole=True)


def file_times_jump(world: World, rng: np.random.Generator, root: Path) -> Injection:
    """Files of the source and of the root are of another time, as if written under another clock."""
    source = own_source(world, root)
    hours = float(rng.uniform(-1000, 1000))
    shutil.copytree(world.whole, root)

    @contextmanager
    def shifted() -> Iterator[Callable[[], str]]:
        for path in sorted((*source.rglob("*"), *root.rglob("*"))):
            stat = path.stat()
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + int(hours * 3.6e12 * float(rng.random()))))
        yield lambda: "mtime"

    before = {path: path.stat().st_ino for path in root.rglob("*.arrow")}
    try:
        return disturb(world, root, shifted(), may=(ABSORBED,), when=f"by {hours:.0f} h", source=source, whole=True)
    finally:
        must(before == {path: path.stat().st_ino for path in root.rglob("*.arrow")}, "vectors were made anew")
        shutil.rmtree(source, ignore_errors=True)


KINDS: dict[str, tuple[int, Callable[[World, np.random.Generator, Path], Injection]]] = {
    **{f"source_{name}": (4, source_error(name)) for name in ERRORS},
    "source_down": (3, source_down),
    "source_short_read": (6, short_read),
    "source_truncated": (3, truncated),
    "source_wrong_size": (4, wrong_size),
    "source_stale_listing": (4, stale_listing),
    "source_rewritten": (5, rewritten),
    "source_there_and_back": (5, there_and_back),
    **{f"store_{name}": (2, store_error(name)) for name in ERRORS},
    "store_down": (2, store_down),
    "store_cuts": (4, store_cuts),
    "disk_full": (5, disk_full),
    "disk_fsync": (5, fsync_fails),
    "disk_torn": (8, torn),
    "model_damaged": (5, model_damaged),
    "model_head_of_nan": (1, head_of_nan),
    "model_encoder_of_nan": (2, encoder_of_nan),
    "clock_of_sensor": (3, clock_of_sensor),
    "clock_jumps": (3, clock_jumps),
    "clock_of_files": (2, file_times_jump),
}
