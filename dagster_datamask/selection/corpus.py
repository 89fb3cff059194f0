"""A pool whose shards never sit in memory together, and the certified solver over it.

Here: the scratch files that a shard's documents become, and the solver that reads them a shard at a time, with the
operations of the solver in memory, so that the masks are equal, bit for bit, for any order and number of shards. Not
here: where documents come from and where masks are published (`stages.corpus`).
"""

import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from threadpoolctl import threadpool_limits

from dagster_datamask import keyed
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
from dagster_datamask.selection.passes import MEMORY, Part, Passes
from dagster_datamask.selection.pool import checksum
from dagster_datamask.selection.vectors import LONGEST, SHORTEST, Vectors, prepare
from dagster_datamask.shards.writer import atomic


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
    """What is known of a shard's scratch files; nothing in it depends on other shards. total: Σ ẑ in whole units."""

    rows: int
    d: int
    dtype: str
    prints: int
    total: list[int]
    quality: bool
    costs: bool
    groups: bool
    scores: list[str]


class Corpus:
    """The documents to choose from, as scratch files under `folder`, one folder a shard.

    scale is "minmax" with constants, or "raw": the scales that do not depend on what else is in the pool. scores:
    further terms of the objective, in the same scale, whose values every block has to bring. A shard whose scratch is
    whole is not read again. A document takes its vector as stored and 8 bytes each for norm, tie hash, quality, further
    scores, score and weight, 18 more bytes for masks; memory is that of one shard's pages.

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
        self._offset, self._factor = score_scale(scale, constants, 0.0, 1.0, 1.0)
        for name, term in further.items():
            if scale == "minmax" and term.constants is None:
                raise ValueError(f"scale 'minmax' needs the constants (lo, hi) of score {name!r}; or use 'raw'")
        self._further = {
            name: (term.weight, *score_scale(scale, term.constants, 0.0, 1.0, 1.0)) for name, term in further.items()
        }
        self._shards: dict[str, _Shard] = {}

    def add(self, name: str, blocks: Callable[[], Iterable[Block]]) -> None:
        """Write the documents of one shard, or find them written. `name` is a file name; blocks() is read once.

        Raises BadInput naming the shard and the first documents whose vector is not finite or zero, or whose score is
        not finite; ValueError for vectors of another type or dimension.
        """
        folder = self._folder / name
        record = folder / "shard.json"
        if not record.exists():
            folder.mkdir(parents=True, exist_ok=True)
            record_of = _write(folder, name, blocks(), self.terms.lam > 0, list(self._further))
            with atomic(record) as temp:
                temp.write_text(json.dumps(asdict(record_of)), "utf-8")
        self._shards[name] = _Shard(**json.loads(record.read_text("utf-8")))
        if self.terms.lam > 0 and self._shards[name].rows and not self._shards[name].quality:
            raise ValueError(f"{folder} was written without scores, for λ = 0; remove it")
        kinds = {(s.d, s.quality, s.costs, s.groups, *s.scores) for s in self._shards.values() if s.rows}
        if len(kinds) > 1:
            raise ValueError(f"shard {name} has vectors or columns of another kind than those before: {sorted(kinds)}")

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
        total = GridSum(self.d)
        for shard in self._shards.values():
            if shard.rows:
                total.total += np.array(shard.total, object)
        return total.value() / max(self.n, 1)

    def selected(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(bool[k] in the mask, float64[k] the score it was ordered by) of a shard's documents, as they were added."""
        scratch = _Scratch(self._folder / name, self._shards[name].rows, "r")
        return np.array(scratch("best", bool)), np.array(scratch("order", np.float64))

    def mark(self, name: str, selected: np.ndarray) -> None:
        """Make a shard's part of a mask that was found elsewhere the one to be certified."""
        _Scratch(self._folder / name, self._shards[name].rows, "r+")("best", bool)[:] = selected

    def passes(self, amounts: Sequence[int], given: Given | None = None) -> Passes:
        """The solver's operations over all shards."""
        parts = _OnDisk(self._folder, self._shards, self._linear)
        weights = {"quality": self.terms.lam, **self.terms.scores}
        largest, sizes = 0.0, dict.fromkeys(weights, 0.0)
        for k in range(len(parts)):
            with parts.open(k) as part:
                largest = max(largest, float(np.abs(part.linear).max(initial=0.0)))
                for name in sizes.keys() & part.columns.keys():
                    sizes[name] = max(sizes[name], float(np.abs(weights[name] * part.columns[name]).max(initial=0.0)))
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

    def _linear(
        self, quality: np.ndarray | None, scores: Mapping[str, np.ndarray], rows: int
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        linear, columns = np.zeros(rows), {}
        if quality is not None:
            columns = {"quality": (quality - self._offset) * self._factor, "quality_raw": quality}
            linear = self.terms.lam * columns["quality"] if self.terms.lam else linear
        for name, (weight, offset, factor) in self._further.items():
            columns[name] = (scores[name] - offset) * factor
            linear = linear + weight * columns[name]
        return linear, columns


@dataclass(frozen=True, eq=False)
class CorpusSelection:
    """A mask over all shards, which `Corpus.selected` hands out, and how good it is.

    history: for every pass the point that documents were scored at and the (score, tie) of the cut, of every group:
    what any shard finds the vertices from again; passes: reads of the embeddings.
    """

    evaluation: Evaluation
    certificate: Certificate
    passes: float
    trajectory: list[dict[str, Any]] = field(repr=False)
    history: list[dict[str, Any]] = field(repr=False)


def solve_corpus(
    corpus: Corpus,
    amounts: Sequence[int],
    *,
    given: Given | None = None,
    options: CertifiedOptions = CertifiedOptions(),  # noqa: B008
    progress: Progress | None = None,
) -> CorpusSelection:
    """Choose amounts[g] documents (tokens, where shards have costs) of each group and certify the choice, as
    `solve.solve` with solver "certified" does in memory.

    given: what is chosen already; the mask maximises the objective of the union. Raises ValueError for an amount that
    the shards do not hold.
    """
    passes = corpus.passes(amounts, given)
    _check(passes)
    # a killed run may have left a half of its own here
    for _, part in passes.each():
        part.member[:], part.best[:], part.base[:] = False, False, 0.0
    with threadpool_limits(limits=1, user_api="blas"):
        state = None
        if passes.amount:
            state = relax(
                passes, uniform_start(passes, {"pws": corpus.mean()}, _linear_mean(passes)), options, progress
            )
        for _, part in passes.each():
            part.order[:] = part.scores if state is not None else part.linear
        if state is not None:
            round_and_polish(passes, state, options, progress)
        spent = passes.passes
        evaluation, certificate = certify_corpus(corpus, passes, state)
    return CorpusSelection(
        evaluation,
        certificate,
        spent,
        [] if state is None else state.trajectory,
        [] if state is None else [_entry(point, cut) for point, cut in state.history],
    )


@threadpool_limits.wrap(limits=1, user_api="blas")
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
    held = np.zeros(len(passes.amounts), np.int64)
    for _, part in passes.each():
        groups = part.group
        if groups.size and groups.max() >= held.size:
            raise ValueError(f"a document is of group {int(groups.max())}, and there are {held.size} quotas")
        np.add.at(held, groups, part.cost)
    for g, (amount, there) in enumerate(zip(passes.amounts, held.tolist(), strict=True)):
        if not 0 <= amount <= there:
            unit = "tokens" if passes.tokens else "documents"
            of = f"group {g}" if held.size > 1 else "the corpus"
            raise ValueError(f"budget {amount} is not between 0 and the {there} {unit} of {of}")


def _linear_mean(passes: Passes) -> float:
    total = ScalarSum(passes.largest)
    for _, part in passes.each():
        total.add(part.linear)
    return total.value() / max(passes.n, 1)


def _entry(point: np.ndarray, cut: Cut) -> dict[str, Any]:
    # an empty group's cut lies at infinity, which JSON does not know
    scores = [score if np.isfinite(score) else None for score in cut.score.tolist()]
    return {"point": point.tolist(), "score": scores, "tie": cut.tie.tolist(), "fraction": cut.fraction.tolist()}


class _Scratch:
    """A shard's arrays, mapped from its folder; those that are written to come into being full of zeros."""

    def __init__(self, folder: Path, rows: int, mode: Literal["r", "r+"]) -> None:
        self._folder, self._rows = str(folder), rows
        self._access = mmap.ACCESS_READ if mode == "r" else mmap.ACCESS_WRITE

    def __call__(self, name: str, dtype: Any, shape: tuple[int, ...] | None = None) -> np.ndarray:
        shape = (self._rows,) if shape is None else shape
        path = f"{self._folder}/{name}.bin"
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if not size:
            return np.zeros(shape, dtype)
        # numpy.memmap resolves the path each time, which takes ten times as long as all else here
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not os.fstat(handle).st_size:
                os.ftruncate(handle, size)
            return np.frombuffer(mmap.mmap(handle, size, access=self._access), dtype).reshape(shape)
        finally:
            os.close(handle)


class _OnDisk:
    """The shards as the solver's parts."""

    def __init__(self, folder: Path, shards: dict[str, _Shard], linear: Any) -> None:
        self._folder, self._shards, self._linear = folder, shards, linear
        self._names = sorted(name for name, shard in shards.items() if shard.rows)

    def __len__(self) -> int:
        return len(self._names)

    @contextmanager
    def open(self, number: int) -> Iterator[Part]:
        name = self._names[number]
        shard = self._shards[name]
        stored, scratch = (
            _Scratch(self._folder / name, shard.rows, "r"),
            _Scratch(self._folder / name, shard.rows, "r+"),
        )
        further = {name: stored(_score_file(name), np.float64) for name in shard.scores}
        quality = stored("quality", np.float64) if shard.quality else None
        linear, columns = self._linear(quality, further, shard.rows)
        yield Part(
            Vectors(stored("vectors", shard.dtype, (shard.rows, shard.d)), stored("inverse", np.float64)),
            linear,
            ties := stored("ties", np.uint64),
            ties,
            stored("costs", np.int64) if shard.costs else None,
            stored("groups", np.int64) if shard.groups else None,
            columns,
            scores=scratch("scores", np.float64),
            member=scratch("member", bool),
            best=scratch("best", bool),
            base=scratch("base", np.float64),
            bits=scratch("bits", np.uint8, (MEMORY, -(-shard.rows // 8))),
            order=scratch("order", np.float64),
        )


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


def _write(folder: Path, name: str, blocks: Iterable[Block], scored: bool, further: list[str]) -> _Shard:
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
    with threadpool_limits(limits=1, user_api="blas"):
        prepared = prepare(scratch("vectors", dtype, (rows, max(d, 1))), scratch("ties", np.uint64))
    prepared.vectors.inverse.tofile(folder / "inverse.bin")
    for stale in ("scores", "member", "best", "base", "bits", "order"):
        (folder / f"{stale}.bin").unlink(missing_ok=True)
    total = [int(x) for x in prepared.total.total]
    columns = ("quality" in files, "costs" in files, "groups" in files)
    return _Shard(rows, d, dtype, prepared.prints, total, *columns, further if rows else [])
