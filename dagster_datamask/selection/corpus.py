"""A pool whose shards never sit in memory together, and the certified solver over it.

Here: the scratch files that a shard's documents become, and the solver that reads them a shard at a time, with the
operations of the solver in memory, so that the masks are equal, bit for bit, for any order and number of shards. Not
here: where documents come from and where masks are published (`stages.corpus`).
"""

import errno
import json
import math
import mmap
import os
import pickle
import platform
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import numpy as np
from threadpoolctl import ThreadpoolController

from dagster_datamask import keyed
from dagster_datamask.compute.base import INLINE, ONE_CORE, Compute, Poisoned, Requests, Session, Told
from dagster_datamask.selection.budgets import check_tokens
from dagster_datamask.selection.certificates import Certificate, Evaluation, Terms, certify, evaluate
from dagster_datamask.selection.certified import (
    CertifiedOptions,
    Progress,
    Relaxation,
    relax,
    round_and_polish,
    uniform_start,
)
from dagster_datamask.selection.exact import Cut, GridSum, ScalarSum
from dagster_datamask.selection.objectives import (
    BadInput,
    Given,
    check_terms,
    finite_scores,
    name_documents,
    score_scale,
)
from dagster_datamask.selection.passes import MEMORY, Part, Parts, Passes, Work
from dagster_datamask.selection.pool import checksum
from dagster_datamask.selection.vectors import LONGEST, SHORTEST, Vectors, one_thread, prepare
from dagster_datamask.shards.writer import atomic

# entries of vectors that a search goes through in about the seconds that a process takes to start; a pass of blocks on
# this process's threads uses all cores but for what holds Python's lock, about a third of it
_SPREAD = 1 << 29
# a file system of the network may show a new file late
_SECONDS_TO_SEE = 5.0


@dataclass(frozen=True, eq=False)
class Block:
    """Some of a shard's documents: ids; quality float64[k], finite, or None where λ = 0; vectors float16 or float32
    [k, d]; costs int64[k] tokens, or None; groups int64[k], or None; scores {further score: float64[k], finite}."""

    ids: Sequence[str]
    quality: np.ndarray | None
    vectors: np.ndarray
    costs: np.ndarray | None = None
    groups: np.ndarray | None = None
    scores: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoreTerm:
    """A further score's weight in the objective and, for scale "minmax", its (lo, hi)."""

    weight: float
    constants: tuple[float, float] | None = None


@dataclass(frozen=True)
class _Shard:
    """What is known of a shard's scratch files; nothing in it depends on other shards."""

    rows: int
    d: int
    dtype: str
    prints: int
    quality: bool
    costs: bool
    groups: bool
    scores: list[str]


class Corpus:
    """The documents to choose from, as scratch files under `folder`, one folder a shard.

    scale is "minmax" with constants, or "raw": the scales that do not depend on what else is in the pool. scores:
    further terms of the objective, in the same scale, whose values every block has to bring. A shard whose scratch is
    whole is not read again. A document takes its vector as stored and 8 bytes each for norm, tie hash, quality and
    further scores, 8 for the order and 16 each for score and weight, 19 more for masks; memory is that of one shard's
    pages.

    Raises ValueError for another scale, or terms that make no objective.
    """

    def __init__(
        self,
        folder: Path,
        *,
        lam: float,
        scale: str,
        constants: tuple[float, float] | None,
        scores: Mapping[str, ScoreTerm] | None = None,
    ) -> None:
        if scale not in ("minmax", "raw"):
            raise ValueError(
                f"scale {scale!r} depends on the whole pool; over shards take 'minmax' with frozen constants, or 'raw'"
            )
        check_terms(lam, scale, constants, {"pws": 1.0})
        further = dict(scores or {})
        self.terms = Terms(lam, {"pws": 1.0}, {name: term.weight for name, term in further.items()})
        self.scale, self.constants = scale, constants if scale == "minmax" else None
        self._folder = folder
        for name, term in further.items():
            if scale == "minmax" and term.constants is None:
                raise ValueError(f"scale 'minmax' needs the constants (lo, hi) of score {name!r}; or use 'raw'")
        self._linear = _Linear(
            lam,
            score_scale(scale, constants, 0.0, 1.0, 1.0),
            {name: (term.weight, *score_scale(scale, term.constants, 0.0, 1.0, 1.0)) for name, term in further.items()},
        )
        self._shards: dict[str, _Shard] = {}
        self._total: GridSum | None = None

    def add(self, name: str, blocks: Callable[[], Iterable[Block]]) -> None:
        """Write the documents of one shard, or find them written. `name` is a file name; blocks() is read once.

        Raises BadInput naming the shard and the first documents whose vector is not finite or zero, or whose score is
        not finite; ValueError for vectors of another type or dimension.
        """
        folder = self._folder / name
        record = folder / "shard.json"
        if not record.exists():
            folder.mkdir(parents=True, exist_ok=True)
            record_of, total = _write(folder, name, blocks(), self.terms.lam > 0, list(self._linear.further))
            with atomic(record) as temp:
                temp.write_text(json.dumps(asdict(record_of) | {"total": total}), "utf-8")
        told: dict[str, Any] = json.loads(record.read_text("utf-8"))
        known = name in self._shards
        # Σ ẑ in whole units: kept of all together, as it is the larger part of what is known of a shard
        sums = np.array(told.pop("total"), object)
        self._shards[name] = _Shard(**told)
        if self.terms.lam > 0 and self._shards[name].rows and not self._shards[name].quality:
            raise ValueError(f"{folder} was written without scores, for λ = 0; remove it")
        kinds = {(s.d, s.quality, s.costs, s.groups, *s.scores) for s in self._shards.values() if s.rows}
        if len(kinds) > 1:
            raise ValueError(f"shard {name} has vectors or columns of another kind than those before: {sorted(kinds)}")
        if self._shards[name].rows and not known:
            self._total = self._total or GridSum(self._shards[name].d)
            self._total.total += sums

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those of these shards whose scratch is not whole."""
        return [name for name in names if not (self._folder / name / "shard.json").exists()]

    @contextmanager
    def sight(self) -> Iterator["Sight"]:
        """What tells workers whether they see the scratch folder, as long as the context lasts."""
        self._folder.mkdir(parents=True, exist_ok=True)
        sight = Sight(str(self._folder), f"{uuid.uuid4().hex}.token", platform.node())
        token = self._folder / sight.token
        token.touch()
        try:
            yield sight
        finally:
            token.unlink()

    @property
    def n(self) -> int:
        return sum(shard.rows for shard in self._shards.values())

    @property
    def names(self) -> list[str]:
        return list(self._shards)

    @property
    def d(self) -> int:
        return max((shard.d for shard in self._shards.values()), default=0)

    @property
    def dtype(self) -> str:
        """Of the stored vectors."""
        return "/".join(sorted({shard.dtype for shard in self._shards.values() if shard.rows})) or "float16"

    @property
    def checksum(self) -> str:
        return checksum(self.n, self.d, sum(shard.prints for shard in self._shards.values()))

    def mean(self) -> np.ndarray:
        """float64[d]: the mean of ẑ over all shards."""
        return np.zeros(self.d) if self._total is None else self._total.value() / max(self.n, 1)

    def selected(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(bool[k] in the mask, float64[k] the score it was ordered by) of a shard's documents, as they were added."""
        scratch = _Scratch(self._folder / name, self._shards[name].rows, "r")
        return np.array(scratch("best", bool)), np.array(scratch("order", np.float64))

    def mark(self, name: str, selected: np.ndarray) -> None:
        """Make a shard's part of a mask that was found elsewhere the one to be certified."""
        _Scratch(self._folder / name, self._shards[name].rows, "r+")("best", bool)[:] = selected

    @property
    def parts(self) -> "_OnDisk":
        """The shards as the solver's parts, in the order of their names, read by this process."""
        named = sorted((name, shard) for name, shard in self._shards.items() if shard.rows)
        return _OnDisk(str(self._folder), tuple(named), self._linear)

    @contextmanager
    def spread(self, compute: Compute, requests: Requests = ONE_CORE) -> Iterator[Parts]:
        """The same, worked on wherever `compute` has workers, as long as the context lasts.

        Raises ScratchUnseen, when the parts are first worked on, where a worker does not see the scratch folder.
        """
        # of a cluster, those that there is room for before ours take it
        parts, workers = self.parts, compute.workers
        with self.sight() as sight, compute.session(_Worker(parts, sight), requests=requests) as session:
            yield _Spread(parts, session, workers)

    def passes(self, amounts: Sequence[int], given: Given | None = None, parts: Parts | None = None) -> Passes:
        """The solver's operations over all shards."""
        parts = self.parts if parts is None else parts
        weights = {"quality": self.terms.lam, **self.terms.scores}
        largest, sizes = 0.0, dict.fromkeys(weights, 0.0)
        for of_linear, of_columns in parts.map(_largest):
            largest = max(largest, of_linear)
            for name in sizes.keys() & of_columns.keys():
                sizes[name] = max(sizes[name], abs(weights[name]) * of_columns[name])
        kinds = [shard for shard in self._shards.values() if shard.rows]
        return Passes(
            parts,
            self.n,
            self.d,
            self.terms.weights,
            amounts,
            largest,
            magnitude=sum(sizes.values()),
            tokens=bool(kinds) and kinds[0].costs,
            given=given,
            given_linear=self.terms.linear_of(given),
        )


def _largest(part: Part) -> tuple[float, dict[str, float]]:
    """(the largest |linear|, the largest |value| of each column)."""
    columns = {name: float(np.abs(column).max(initial=0.0)) for name, column in part.columns.items()}
    return float(np.abs(part.linear).max(initial=0.0)), columns


@dataclass(frozen=True)
class _Linear:
    """What of the objective is linear: λ and quality's (offset, factor), and those of the further scores, each with its
    weight."""

    lam: float
    scale: tuple[float, float]
    further: dict[str, tuple[float, float, float]]

    def of(
        self, quality: np.ndarray | None, scores: Mapping[str, np.ndarray], rows: int
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(float64[k] it, {column: its scaled values})."""
        linear, columns = np.zeros(rows), {}
        if quality is not None:
            columns = {"quality": (quality - self.scale[0]) * self.scale[1], "quality_raw": quality}
            linear = self.lam * columns["quality"] if self.lam else linear
        for name, (weight, offset, factor) in self.further.items():
            columns[name] = (scores[name] - offset) * factor
            linear = linear + weight * columns[name]
        return linear, columns


@dataclass(frozen=True, eq=False)
class CorpusSelection:
    """A mask over all shards, which `Corpus.selected` hands out, and how good it is.

    history: for every pass the point that documents were scored at and the (score, tie) of the cut, of every group:
    what any shard finds the vertices from again; passes: reads of the embeddings by the search, in units of all
    documents, and certifying: those by the final float64 value and bound.
    """

    evaluation: Evaluation
    certificate: Certificate
    passes: float
    certifying: float
    trajectory: list[dict[str, Any]] = field(repr=False)
    history: list[dict[str, Any]] = field(repr=False)


def solve_corpus(
    corpus: Corpus,
    amounts: Sequence[int],
    *,
    given: Given | None = None,
    options: CertifiedOptions = CertifiedOptions(),  # noqa: B008
    progress: Progress | None = None,
    compute: Compute = INLINE,
    requests: Requests = ONE_CORE,
    log: Callable[[str], None] = lambda line: None,
) -> CorpusSelection:
    """Choose amounts[g] documents (tokens, where shards have costs) of each group and certify the choice, as
    `solve.solve` with solver "certified" does in memory.

    given: what is chosen already; the mask maximises the objective of the union. compute: where shards are worked on,
    which leaves no trace in what is chosen, by workers that take `requests` each; it is this process where that takes
    no longer (`pays`), or where a worker does not see the scratch folder or parts end whatever worker has them (memory
    that suffices one process and not several), of which `log` is told.
    Raises ValueError for an amount that the shards do not hold.
    """
    if pays(corpus, compute):
        try:
            with corpus.spread(compute, requests) as parts:
                return _solve(corpus, corpus.passes(amounts, given, parts), options, progress)
        except (ScratchUnseen, Poisoned) as why:
            log(f"the solver runs in this process: {why}")
    return _solve(corpus, corpus.passes(amounts, given), options, progress)


def pays(corpus: Corpus, compute: Compute) -> bool:
    """Whether other processes do more than make up for their start."""
    return min(compute.workers, len(corpus.parts)) > 1 and corpus.n * corpus.d >= _SPREAD


@one_thread()
def _solve(corpus: Corpus, passes: Passes, options: CertifiedOptions, progress: Progress | None) -> CorpusSelection:
    _check(passes)
    passes.map(_reset)
    state = None
    if passes.amount:
        state = relax(passes, uniform_start(passes, {"pws": corpus.mean()}, _linear_mean(passes)), options, progress)
    passes.map(_order_by_linear if state is None else _order_by_scores)
    if state is not None:
        round_and_polish(passes, state, options, progress)
    spent = passes.passes
    evaluation, certificate = certify_corpus(corpus, passes, state)
    return CorpusSelection(
        evaluation,
        certificate,
        spent,
        passes.passes - spent,
        [] if state is None else state.trajectory,
        [] if state is None else [_entry(point, cut) for point, cut in state.history],
    )


def _reset(part: Part) -> None:
    # a killed run may have left a half of its own here
    part.member[:], part.best[:], part.base[:] = False, False, 0.0


def _order_by_scores(part: Part) -> None:
    part.order[:] = part.scores


def _order_by_linear(part: Part) -> None:
    part.order[:] = part.linear


@one_thread()
def certify_corpus(corpus: Corpus, passes: Passes, state: Relaxation | None = None) -> tuple[Evaluation, Certificate]:
    """What the mask that the shards hold is worth, and its certificate, at the relaxation's point or the mask's own."""
    evaluation = evaluate(passes, corpus.terms)
    feasible = {
        "documents": corpus.n,
        "budget": passes.amount,
        "unit": "tokens" if passes.tokens else "documents",
        "vectors": corpus.checksum,
        "dtype": corpus.dtype,
        "lambda": corpus.terms.lam,
        "scale": corpus.scale,
        "constants": None if corpus.constants is None else list(corpus.constants),
        "diversity": dict(corpus.terms.diversity),
        "scores": dict(corpus.terms.scores),
        "quotas": len(passes.amounts) if len(passes.amounts) > 1 else None,
        "given": None if passes.given is None else passes.given.size,
    }
    if state is not None:
        point = state.bound_point
    else:
        scale = np.sqrt(corpus.terms.beta)
        point = scale * evaluation.mean_vector if scale else np.zeros(0)
    certificate = certify(
        passes,
        corpus.terms,
        evaluation,
        feasible,
        point,
        means={"pws": corpus.mean()} if corpus.terms.beta else {},
        linear=_linear_mean(passes),
        optimum=None if state is None else state.optimum,
    )
    return evaluation, certificate


def _check(passes: Passes) -> None:
    groups = len(passes.amounts)
    held = np.zeros(groups, np.int64)

    def there(part: Part) -> np.ndarray:
        found = np.zeros(groups, np.int64)
        if part.group.size and part.group.max() >= groups:
            raise ValueError(f"a document is of group {int(part.group.max())}, and there are {groups} quotas")
        np.add.at(found, part.group, part.cost)
        return found

    for of_part in passes.map(there):
        held += of_part
    for g, (amount, most) in enumerate(zip(passes.amounts, held.tolist(), strict=True)):
        if not 0 <= amount <= most:
            unit = "tokens" if passes.tokens else "documents"
            of = f"group {g}" if held.size > 1 else "the corpus"
            raise ValueError(f"budget {amount} is not between 0 and the {most} {unit} of {of}")


def _linear_mean(passes: Passes) -> float:
    total = ScalarSum(passes.largest)
    nothing = total.empty()

    def add(part: Part) -> ScalarSum:
        found = nothing.empty()
        found.add(part.linear)
        return found

    for of_part in passes.map(add):
        total.join(of_part)
    return total.value() / max(passes.n, 1)


def _entry(point: np.ndarray, cut: Cut) -> dict[str, Any]:
    # an empty group's cut lies at infinity, which JSON does not know
    scores = [score if np.isfinite(score) else None for score in cut.score.tolist()]
    return {"point": point.tolist(), "score": scores, "tie": cut.tie.tolist(), "fraction": cut.fraction.tolist()}


class _Scratch:
    """A shard's arrays, mapped from its folder; those that are written to come into being full of zeros."""

    def __init__(self, folder: Path | str, rows: int, mode: Literal["r", "r+"]) -> None:
        self._folder, self._rows = str(folder), rows
        self._writes = mode == "r+"
        self._access = mmap.ACCESS_READ if mode == "r" else mmap.ACCESS_WRITE
        self._maps: list[mmap.mmap] = []

    def __call__(self, name: str, dtype: Any, shape: tuple[int, ...] | None = None) -> np.ndarray:
        shape = (self._rows,) if shape is None else shape
        path = f"{self._folder}/{name}.bin"
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if not size:
            return np.zeros(shape, dtype)
        # numpy.memmap resolves the path each time, which takes ten times as long as all else here
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # what is written to may be the part that a full disk or a kill left
            if (there := os.fstat(handle).st_size) < size and (self._writes or not there):
                _make_room(handle, size, path)
            mapped = mmap.mmap(handle, size, access=self._access)
            self._maps.append(mapped)
            return np.frombuffer(mapped, dtype).reshape(shape)
        finally:
            os.close(handle)

    def flush(self) -> None:
        for mapped in self._maps:
            mapped.flush()


def zeros_on_disk(path: Path, dtype: Any, rows: int) -> np.ndarray:
    """dtype[rows] of zeros, mapped from a new file. Raises OSError where the disk has no room for it."""
    if not rows:
        return np.zeros(0, dtype)
    size = rows * np.dtype(dtype).itemsize
    with path.open("wb") as file:
        _make_room(file.fileno(), size, str(path))
    return np.memmap(path, dtype, "r+", shape=(rows,))


def _make_room(handle: int, size: int, path: str) -> None:
    """Raises OSError where the disk has none: writing to a map of what is not there ends the process."""
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise OSError(error.errno, error.strerror, path) from error
        # a file system that keeps no room
        os.ftruncate(handle, size)


# the scratch that there are two of, one that is and one that comes next
_TURNED: dict[str, Any] = {"scores": np.float64, "member": bool, "base": np.float64}
_SCRATCH: dict[str, Any] = {"best": bool, "order": np.float64}
_STORED: dict[str, Any] = {"ties": np.uint64, "costs": np.int64, "groups": np.int64}


class _Mapped(Part):
    """A shard's scratch, of which an array is mapped when it is first asked for."""

    def __init__(self, number: int, folder: str, shard: _Shard, linear: _Linear, turns: Mapping[str, int]) -> None:
        self.number = number
        self._shard, self._linear, self._turns = shard, linear, turns
        self._stored, self._scratch = _Scratch(folder, shard.rows, "r"), _Scratch(folder, shard.rows, "r+")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = self._map(name)
        setattr(self, name, found)
        return found

    def _map(self, name: str) -> Any:
        shard, turned = self._shard, name.removeprefix("next_")
        if turned in _TURNED:
            side = self._turns[turned] ^ (turned != name)
            return self._scratch(f"{turned}{side}", _TURNED[turned])
        if name in _SCRATCH:
            return self._scratch(name, _SCRATCH[name])
        if name == "bits":
            return self._scratch(name, np.uint8, (MEMORY, -(-shard.rows // 8)))
        if name == "vectors":
            stored = self._stored("vectors", shard.dtype, (shard.rows, shard.d))
            return Vectors(stored, self._stored("inverse", np.float64))
        if name == "hashes":
            return self.ties
        if name in ("linear", "columns"):
            quality = self._stored("quality", np.float64) if shard.quality else None
            further = {score: self._stored(_score_file(score), np.float64) for score in shard.scores}
            self.linear, self.columns = self._linear.of(quality, further, shard.rows)
            return getattr(self, name)
        if name in ("costs", "groups") and not getattr(shard, name):
            return None
        return self._stored(name, _STORED[name])

    def write_back(self) -> None:
        """See to it that other machines find what was written."""
        self._scratch.flush()


class _OnDisk:
    """The shards as the solver's parts, one mapped at a time."""

    def __init__(self, folder: str, shards: Sequence[tuple[str, _Shard]], linear: _Linear) -> None:
        self.folder, self._shards, self._linear = folder, shards, linear
        self.turns = dict.fromkeys(_TURNED, 0)

    def __len__(self) -> int:
        return len(self._shards)

    def part(self, number: int) -> _Mapped:
        name, shard = self._shards[number]
        return _Mapped(number, f"{self.folder}/{name}", shard, self._linear, self.turns)

    def map(self, work: Work, given: Sequence[Any] | None = None) -> Iterator[Any]:
        for number in range(len(self)):
            yield work(self.part(number)) if given is None else work(self.part(number), given[number])

    def turn(self, name: str) -> None:
        self.turns[name] ^= 1


class ScratchUnseen(RuntimeError):
    """A worker is on a machine that does not have the scratch folder."""


@dataclass(frozen=True, eq=False)
class _Task:
    """What a worker is given: some parts, what is to be done with them, pickled, and which side of them is which."""

    numbers: Sequence[int]
    work: bytes
    given: Sequence[Any] | None
    turns: Mapping[str, int]

    def __str__(self) -> str:
        return f"the solver's parts {self.numbers[0]} to {self.numbers[-1]}"


@dataclass(frozen=True)
class Sight:
    """token: a file in the folder which proves that the folder is the one that `host` has written to."""

    folder: str
    token: str
    host: str

    def check(self) -> None:
        """Raise ScratchUnseen where this process does not see the folder."""
        until = time.monotonic() + _SECONDS_TO_SEE
        while not (seen := Path(self.folder, self.token).exists()) and time.monotonic() < until:
            time.sleep(0.1)
        if not seen:
            raise ScratchUnseen(
                f"{platform.node()} does not have the scratch folder of {self.host}; with a root that both mount, all "
                "machines have their part in it"
            )


@dataclass(frozen=True, eq=False)
class _Worker:
    parts: _OnDisk
    sight: Sight

    def __call__(self) -> Callable[[_Task, Told], list[Any]]:
        self.sight.check()
        libraries, elsewhere = ThreadpoolController(), platform.node() != self.sight.host

        def work(task: _Task, told: Told) -> list[Any]:
            run, found = pickle.loads(task.work), []
            self.parts.turns = dict(task.turns)
            with one_thread(libraries):
                for k, number in enumerate(task.numbers):
                    part = self.parts.part(number)
                    found.append(run(part) if task.given is None else run(part, task.given[k]))
                    if elsewhere:
                        part.write_back()
            return found

        return work


class _Spread:
    """The parts, worked on by the workers of a session."""

    def __init__(self, parts: _OnDisk, session: Session, workers: int) -> None:
        self._parts, self._session = parts, session
        self._numbers = [some.tolist() for some in np.array_split(np.arange(len(parts)), min(len(parts), 2 * workers))]

    def __len__(self) -> int:
        return len(self._parts)

    def map(self, work: Work, given: Sequence[Any] | None = None) -> Iterator[Any]:
        sent = cloudpickle.dumps(work)
        tasks = [
            _Task(some, sent, None if given is None else [given[k] for k in some], dict(self._parts.turns))
            for some in self._numbers
        ]
        found: dict[int, Any] = {}
        for task, results in self._session.each(tasks):
            found.update(zip(task.numbers, results, strict=True))
        return iter([found[number] for number in range(len(self))])

    def turn(self, name: str) -> None:
        self._parts.turn(name)


def _score_file(name: str) -> str:
    return f"score_{name}"


def _check_block(name: str, block: Block) -> None:
    columns = {"vectors": block.vectors, "scores": block.quality, "token counts": block.costs, "groups": block.groups}
    columns |= {f"scores {score!r}": values for score, values in block.scores.items()}
    for what, column in columns.items():
        if column is not None and len(column) != len(block.ids):
            raise ValueError(f"shard {name}: {len(block.ids)} ids and {len(column)} {what}")
        if what in ("token counts", "groups") and column is not None and not np.issubdtype(column.dtype, np.integer):
            raise ValueError(f"shard {name}: {what} must be whole numbers, not {column.dtype}")
    if block.costs is not None:
        try:
            check_tokens(block.costs)
        except ValueError as error:
            raise ValueError(f"shard {name}: {error}") from None


def _write(
    folder: Path, name: str, blocks: Iterable[Block], scored: bool, further: list[str]
) -> tuple[_Shard, list[int]]:
    rows, d, dtype = 0, 0, "float16"
    files: dict[str, Any] = {}
    with ExitStack() as stack:

        def put(column: str, values: np.ndarray) -> None:
            if column not in files:
                files[column] = stack.enter_context((folder / f"{column}.bin").open("wb"))
            files[column].write(np.ascontiguousarray(values).data)

        for block in blocks:
            if not len(block.ids):
                continue
            _check_block(name, block)
            if rows and (block.vectors.shape[1], block.vectors.dtype.name) != (d, dtype):
                raise ValueError(f"shard {name}: vectors of {block.vectors.shape[1]} dimensions after vectors of {d}")
            d, dtype = block.vectors.shape[1], block.vectors.dtype.name
            if dtype not in ("float16", "float32"):
                raise ValueError(f"shard {name}: vectors must be float16 or float32, not {dtype}")
            wide = block.vectors.astype(np.float64)
            lengths = np.sqrt(np.einsum("ij,ij->i", wide, wide))
            bad = np.flatnonzero(~((lengths > SHORTEST) & (lengths < LONGEST)))
            if bad.size:
                raise BadInput(
                    f"shard {name}: {name_documents(block.ids, bad)}: the embedding is zero, not finite or of no "
                    "sensible length; leave these out"
                )
            if scored and block.quality is None:
                raise ValueError(f"shard {name}: there is no quality, and λ weighs it")
            if further != list(block.scores):
                raise ValueError(f"shard {name}: scores {list(block.scores)}, and the objective weighs {further}")
            try:
                if block.quality is not None:
                    put("quality", finite_scores(block.ids, block.quality, "score"))
                for score, values in block.scores.items():
                    put(_score_file(score), finite_scores(block.ids, values, f"score {score!r}"))
            except BadInput as error:
                raise BadInput(f"shard {name}: {error}") from None
            put("vectors", block.vectors)
            put("ties", keyed.hash64(list(block.ids), 0, "tie"))
            if block.costs is not None:
                put("costs", block.costs.astype(np.int64, casting="safe"))
            if block.groups is not None:
                put("groups", block.groups.astype(np.int64, casting="safe"))
            rows += len(block.ids)
    scratch = _Scratch(folder, rows, "r")
    with one_thread():
        prepared = prepare(scratch("vectors", dtype, (rows, max(d, 1))), scratch("ties", np.uint64))
    prepared.vectors.inverse.tofile(folder / "inverse.bin")
    for stale in [*_SCRATCH, "bits", *(f"{name}{side}" for name in _TURNED for side in (0, 1))]:
        (folder / f"{stale}.bin").unlink(missing_ok=True)
    total = [int(x) for x in prepared.total.total]
    columns = ("quality" in files, "costs" in files, "groups" in files)
    return _Shard(rows, d, dtype, prepared.prints, *columns, further if rows else []), total
