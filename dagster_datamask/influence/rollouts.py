"""What a document does to a model: the reference loss after one optimizer step on it, minus the loss before.

Here: trajectories of such steps from a checkpoint, single probes, and the greedy choice by true influence. Not here:
what stands for influence where it is too dear to measure (`relational`), and which trajectories a model asks for
(`bootstrap`).

    I(M_t, x_t) = L(D_r | M_{t+1}) − L(D_r | M_t),    M_{t+1} = A(M_t, x_t)

(Group-MATES, arXiv 2502.14709.) A is one AdamW step on the one document, with the checkpoint's own moments and learning
rate; so with β₁ > 0 a step is mostly the gradients before it, and a document is credited with its predecessors' doing:
β₁ = 0 is the control. The loss before the first step is one number for a checkpoint and is measured once.

On the CPU trajectories run one after another on one thread, in as many processes as there are cores; on a CUDA device
many run at once. All is in float32. A trajectory's numbers depend on its documents, and on a CUDA device also on how
many run at once, never on the process or on what ran before.
"""

import copy
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from dagster_datamask import keyed
from dagster_datamask.accelerator import Accelerator
from dagster_datamask.influence.language_model import Checkpoint, NoOptimizerState, few_threads, load_checkpoint
from dagster_datamask.influence.reference import Reference
from dagster_datamask.scoring.batching import CPU_BATCH_TOKENS, CUDA_BATCH_TOKENS

if TYPE_CHECKING:
    from dagster_datamask.influence.forward import Batch

ROLLOUTS = pa.schema(
    [
        ("trajectory_id", pa.int64()),
        ("policy", pa.string()),
        ("checkpoint_id", pa.string()),
        ("seed", pa.int64()),
        ("position", pa.int32()),
        ("doc_id", pa.string()),
        ("influence", pa.float64()),
        ("cumulative", pa.float64()),
        ("base_loss", pa.float64()),
        ("lr", pa.float64()),
        ("beta1", pa.float64()),
        ("reason", pa.string()),
    ]
)
NON_FINITE_LOSS = "non_finite_loss"

# evaluations that a process is given at once: few, since at the end one waits for another
_EVALUATIONS = 10
# weights of all copies together on a CUDA device, and the most copies
_WEIGHTS, _COPIES = 1 << 28, 64
_CPU = Accelerator()

# (steps that lead to the state, documents to step on from there)
Task = tuple[tuple[np.ndarray, ...], list[list[np.ndarray]]]


@dataclass(frozen=True)
class ProbeOptions:
    """A, one optimizer step. lr: None takes the checkpoint's; clip: largest norm of the gradient, 0 for none;
    fresh_moments: start from an optimizer that has taken no step, for a checkpoint without state or as a control."""

    lr: float | None = None
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0
    fresh_moments: bool = False

    def __post_init__(self) -> None:
        if self.lr is not None and not (np.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"the learning rate of a probe must be positive and finite, not {self.lr}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), not {getattr(self, name)}")


@dataclass(frozen=True, eq=False)
class RolloutResult:
    """trajectories int64[m, T] of rows of the documents; losses float64[m, T]: the reference loss after each step, NaN
    from the first that is not finite on; base_loss: before any step."""

    trajectories: np.ndarray
    losses: np.ndarray
    base_loss: float

    @property
    def cumulative(self) -> np.ndarray:
        """float64[m, T]: L(D_r | M_{t+1}) − L(D_r | M_1)."""
        return self.losses - self.base_loss

    @property
    def increments(self) -> np.ndarray:
        """float64[m, T]: I(M_t, x_t); a row's sum is its last cumulative."""
        before = np.concatenate([np.full((len(self.losses), 1), self.base_loss), self.losses], axis=1)[:, :-1]
        return self.losses - before

    @property
    def failed(self) -> int:
        """Trajectories with a loss that is not finite."""
        return int(np.isnan(self.losses).any(axis=1).sum())


@dataclass(frozen=True, eq=False)
class Chosen:
    """What `brute_force` takes, in order: rows int64[n], increments float64[n]; influences float64[n, N]: of every
    document at each choice, NaN for those taken or not finite."""

    rows: np.ndarray
    increments: np.ndarray
    influences: np.ndarray
    base_loss: float


class Prober:
    """Probes one checkpoint on one reference; a context manager that holds its processes.

    processes: of the CPU; None takes one a core that this process may use. They start with the first work that pays for
    it. Raises NoOptimizerState for a checkpoint without moments that asks to reload them, and ValueError where the
    reference does not fit the model or its loss is not finite.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        reference: Reference,
        options: ProbeOptions = ProbeOptions(),
        *,
        accelerator: Accelerator = _CPU,
        processes: int | None = None,
    ) -> None:
        start = checkpoint.with_fresh_moments() if options.fresh_moments else checkpoint
        if start.moments is None:
            raise NoOptimizerState(
                "the checkpoint comes without optimizer state, and a probe reloads its moments; take a checkpoint that "
                "has it, or ask for fresh_moments"
            )
        lr = options.lr if options.lr is not None else checkpoint.lr
        if lr is None:
            raise ValueError("the checkpoint states no learning rate; give the probe's lr")
        if lr <= 0:
            raise ValueError(f"the checkpoint's learning rate is {lr}, with which no step moves; give the probe's lr")
        _fits(checkpoint, reference)
        self.checkpoint, self.reference, self.options, self.lr = checkpoint, reference, options, lr
        self.accelerator, self._start = accelerator, start
        cores = len(os.sched_getaffinity(0))
        self.processes = 1 if accelerator.is_cuda else cores if processes is None else processes
        self._pool: ProcessPoolExecutor | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        with few_threads(1):
            self._probe = _Probe(start, reference, options, lr, accelerator)
        if not np.isfinite(self.base_loss):
            raise ValueError(f"the checkpoint's loss on the reference is {self.base_loss}; take an earlier checkpoint")

    @property
    def base_loss(self) -> float:
        """L(D_r | M_1)."""
        return self._probe.base_loss

    def __enter__(self) -> "Prober":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def roll_out(
        self, documents: Sequence[np.ndarray] | np.ndarray, trajectories: np.ndarray, ids: Sequence[str] | None = None
    ) -> RolloutResult:
        """Step along each of trajectories int64[m, T], rows of the documents (int[·] tokens each, at most the context),
        always from the checkpoint. ids: the documents' names for errors.

        Raises ValueError for a row that is no document, one twice in a trajectory, a document that is empty, too short
        to predict a token of, longer than the context or of another vocabulary.
        """
        trajectories = np.asarray(trajectories, np.int64)
        if trajectories.ndim != 2 or trajectories.shape[1] < 1:
            raise ValueError(f"trajectories must be [m, T ≥ 1] rows of documents, not {list(trajectories.shape)}")
        self._check(documents, trajectories, ids)
        ordered = np.sort(trajectories, axis=1)
        twice = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
        if twice.size:
            raise ValueError(f"trajectory {int(twice[0])} takes a document twice; draw without replacement")
        losses = self._losses(documents, (), trajectories)
        return RolloutResult(trajectories, losses, self.base_loss)

    def single_probes(
        self, documents: Sequence[np.ndarray] | np.ndarray, rows: np.ndarray, ids: Sequence[str] | None = None
    ) -> np.ndarray:
        """float64[n]: I(M_1, x) of each row of the documents alone (MATES's oracle); NaN where the loss is not
        finite."""
        return self.roll_out(documents, np.asarray(rows, np.int64)[:, None], ids).increments[:, 0]

    def brute_force(
        self, documents: Sequence[np.ndarray] | np.ndarray, n: int, ids: Sequence[str] | None = None
    ) -> Chosen:
        """The greedy choice of n documents by true influence: n times the document that lowers the reference loss most
        from where those before have led (Group-MATES, Eq. 9–11); n·N steps and evaluations.

        Equal influences are told apart by a hash of the id, or of the row where there are no ids. Raises ValueError
        where there are fewer documents than n, or at one choice all losses are not finite.
        """
        count = len(documents)
        if not 1 <= n <= count:
            raise ValueError(f"{n} documents to choose from {count}: give 1 to {count}")
        every = np.arange(count)
        self._check(documents, every, ids)
        ties = keyed.hash64([str(i) for i in every] if ids is None else list(ids), 0, "tie")
        rows: list[int] = []
        influences, increments, before = np.full((n, count), np.nan), np.zeros(n), self.base_loss
        for t in range(n):
            left = np.setdiff1d(every, rows)
            losses = self._losses(documents, tuple(rows), left[:, None])[:, 0]
            influences[t, left] = losses - before
            finite = np.flatnonzero(np.isfinite(losses))
            if not finite.size:
                raise ValueError(
                    f"choice {t}: no document leads to a finite loss; lower the learning rate ({self.lr:g})"
                )
            best = finite[np.lexsort((left[finite], ties[left[finite]], losses[finite]))[0]]
            rows.append(int(left[best]))
            increments[t], before = losses[best] - before, float(losses[best])
        return Chosen(np.array(rows, np.int64), increments, influences, self.base_loss)

    def _losses(
        self, documents: Sequence[np.ndarray] | np.ndarray, prefix: tuple[int, ...], trajectories: np.ndarray
    ) -> np.ndarray:
        """float64[m, T]: the losses along each trajectory from where the prefix has led, NaN from the first that is not
        finite on."""
        m, steps = trajectories.shape
        size = max(1, _EVALUATIONS // steps // self._probe.copies) * self._probe.copies
        led = tuple(np.asarray(documents[i]) for i in prefix)
        tasks: Iterator[Task] = (
            (led, [[np.asarray(documents[i]) for i in row] for row in trajectories[a : a + size].tolist()])
            for a in range(0, m, size)
        )
        parts: list[np.ndarray] = [np.zeros((0, steps))]
        # to start processes takes longer than so little
        if self.processes == 1 or m <= 2 * size:
            with few_threads(1):
                parts += [self._probe.losses(task) for task in tasks]
        else:
            parts += self._in_processes(tasks)
        losses = np.concatenate(parts)
        losses[np.cumsum(~np.isfinite(losses), axis=1) > 0] = np.nan
        return losses

    def _in_processes(self, tasks: Iterator[Task]) -> list[np.ndarray]:
        pool = self._started()
        found: list[np.ndarray] = []
        try:
            # a few tasks a process are on their way, however many there are
            while some := list(islice(tasks, 16 * self.processes)):
                found += pool.map(_losses_of, some)
        except BrokenProcessPool as error:
            self.close()
            raise RuntimeError(
                "a process that rolls out was killed, perhaps for its memory, or could not start: a script of one's "
                "own that rolls out needs `if __name__ == '__main__':`; run it again (finished files are kept), with a "
                "smaller compute.processes if it recurs"
            ) from error
        return found

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = get_context("forkserver")
            # the libraries are read once, by a process that has done nothing else
            context.set_forkserver_preload(["dagster_datamask.influence.forward"])
            self._scratch = tempfile.TemporaryDirectory(prefix="datamask-probe-")
            folder = Path(self._scratch.name) / "checkpoint"
            self._start.save(folder)
            self._pool = ProcessPoolExecutor(
                self.processes, context, _start, (folder, self.reference, self.options, self.lr, self.accelerator)
            )
        return self._pool

    def _check(self, documents: Any, rows: np.ndarray, ids: Sequence[str] | None) -> None:
        for row in np.unique(rows).tolist():
            if not 0 <= row < len(documents):
                raise ValueError(f"row {row} is none of the {len(documents)} documents")
            tokens = np.asarray(documents[row])
            name = f"document {ids[row]!r}" if ids is not None else f"document {row}"
            if len(tokens) < 2:
                raise ValueError(
                    f"{name} is empty: with {len(tokens)} tokens there is none to predict; leave it out of the pool"
                )
            if len(tokens) > self.checkpoint.context:
                raise ValueError(
                    f"{name} has {len(tokens)} tokens, and the model sees {self.checkpoint.context}; cut it (`encode`)"
                )
            if int(tokens.max()) >= self.checkpoint.vocabulary or int(tokens.min()) < 0:
                raise ValueError(
                    f"{name} has tokens outside the model's vocabulary of {self.checkpoint.vocabulary}: it was made by "
                    "another tokenizer"
                )


def roll_out(
    checkpoint: Checkpoint,
    reference: Reference,
    documents: Sequence[np.ndarray] | np.ndarray,
    trajectories: np.ndarray,
    options: ProbeOptions = ProbeOptions(),
    *,
    ids: Sequence[str] | None = None,
    accelerator: Accelerator = _CPU,
    processes: int | None = None,
) -> RolloutResult:
    """`Prober.roll_out` for one call; whoever has several keeps a Prober."""
    with Prober(checkpoint, reference, options, accelerator=accelerator, processes=processes) as prober:
        return prober.roll_out(documents, trajectories, ids)


def reference_loss(checkpoint: Checkpoint, reference: Reference, accelerator: Accelerator = _CPU) -> float:
    """L(D_r | M): the mean loss over the reference's tokens that count. It takes no optimizer state."""
    from dagster_datamask.influence.forward import NextToken, mean_loss

    _fits(checkpoint, reference)
    with few_threads(1):
        following = NextToken(copy.deepcopy(checkpoint.model)).to(accelerator.device)
        return float(mean_loss(following, _reference_batches(reference, accelerator)))


def random_trajectories(ids: Sequence[str], count: int, steps: int, seed: int, first: int = 0) -> np.ndarray:
    """int64[count, steps]: rows of the documents, uniform and without replacement within a trajectory.

    Trajectory k is keyed by (seed, first + k) and draws ids, so neither the order of the rows nor the cut into calls
    leaves a trace. Raises ValueError where there are fewer documents than steps.
    """
    if steps < 1:
        raise ValueError(f"a trajectory of {steps} steps is none; ask for 1 or more")
    if len(ids) < steps:
        raise ValueError(f"{len(ids)} documents cannot fill a trajectory of {steps} steps; give more, or fewer steps")
    canonical = np.lexsort((np.array(list(ids), object), keyed.hash64(ids, seed, "rollout")))
    draws = [keyed.rng(seed, "rollout", k).choice(len(ids), steps, replace=False) for k in range(first, first + count)]
    return canonical[np.array(draws, np.int64).reshape(count, steps)]


def records(
    result: RolloutResult, prober: Prober, ids: Sequence[str], *, policy: str, seed: int, first: int = 0
) -> pa.Table:
    """The result as ROLLOUTS, one row a step; trajectory ids count from `first`. A step whose loss is not finite has no
    influence, and the reason why."""
    m, steps = result.trajectories.shape
    missing = np.isnan(result.losses).ravel()
    rows = m * steps
    return pa.table(
        {
            "trajectory_id": np.repeat(np.arange(first, first + m), steps),
            "policy": [policy] * rows,
            "checkpoint_id": [prober.checkpoint.identity] * rows,
            "seed": np.full(rows, seed, np.int64),
            "position": np.tile(np.arange(steps, dtype=np.int32), m),
            "doc_id": [ids[i] for i in result.trajectories.ravel().tolist()],
            "influence": pa.array(result.increments.ravel(), mask=missing),
            "cumulative": pa.array(result.cumulative.ravel(), mask=missing),
            "base_loss": np.full(rows, result.base_loss),
            "lr": np.full(rows, prober.lr),
            "beta1": np.full(rows, prober.options.beta1),
            "reason": [NON_FINITE_LOSS if gone else None for gone in missing.tolist()],
        },
        schema=ROLLOUTS,
    )


class _Probe:
    """The work itself, in one process: copies of the checkpoint that step and are restored."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        reference: Reference,
        options: ProbeOptions,
        lr: float,
        accelerator: Accelerator,
    ) -> None:
        from dagster_datamask.influence.forward import Trained

        self.copies = _copies(checkpoint, accelerator)
        self._device = accelerator.device
        self._trained = Trained(
            checkpoint,
            lr=lr,
            betas=(options.beta1, options.beta2),
            weight_decay=options.weight_decay,
            clip=options.clip,
            device=accelerator.device,
            copies=self.copies,
        )
        self._reference = _reference_batches(reference, accelerator, self.copies)
        self._base = self._trained.snapshot()
        self._led: tuple[bytes, ...] = ()
        self._state = self._base
        self.base_loss = float(self._trained.mean_losses(self._reference)[0])

    def losses(self, task: Task) -> np.ndarray:
        """float64[trajectories of the task, T]."""
        led, trajectories = task
        self._lead(led)
        found = np.zeros((len(trajectories), len(trajectories[0])))
        for a in range(0, len(trajectories), self.copies):
            group = trajectories[a : a + self.copies]
            # always as many at once, so that a trajectory's numbers do not depend on where it stands
            filled = group + [group[-1]] * (self.copies - len(group))
            self._trained.restore(self._state)
            for t in range(found.shape[1]):
                self._trained.step([self._batch(trajectory[t]) for trajectory in filled])
                found[a : a + len(group), t] = self._trained.mean_losses(self._reference).cpu().numpy()[: len(group)]
        return found

    def _lead(self, documents: tuple[np.ndarray, ...]) -> None:
        """Make the state after these documents the one that is restored; from the last such state on, where it is on
        the way."""
        wanted = tuple(document.tobytes() for document in documents)
        if wanted[: len(self._led)] != self._led:
            self._state, self._led = self._base, ()
        if wanted == self._led:
            return
        self._trained.restore(self._state)
        for document in documents[len(self._led) :]:
            self._trained.step([self._batch(document)] * self.copies)
        self._state, self._led = self._trained.snapshot(), wanted

    def _batch(self, document: np.ndarray) -> "Batch":
        return _batch(document[None], None, self._device)


def _copies(checkpoint: Checkpoint, accelerator: Accelerator) -> int:
    return max(1, min(_COPIES, _WEIGHTS // checkpoint.parameters)) if accelerator.is_cuda else 1


def _batch(tokens: np.ndarray, mask: np.ndarray | None, device: str) -> "Batch":
    import torch

    from dagster_datamask.influence.forward import Batch

    counted = None if mask is None else torch.from_numpy(mask.copy()).to(device)
    return Batch(torch.from_numpy(tokens.astype(np.int64)).to(device), counted)


def _reference_batches(reference: Reference, accelerator: Accelerator, copies: int = 1) -> "list[Batch]":
    """Examples of like length together; what comes after the last token that counts is left out."""
    tokens = (CUDA_BATCH_TOKENS if accelerator.is_cuda else CPU_BATCH_TOKENS) // copies
    ends = reference.mask.shape[1] - reference.mask[:, ::-1].argmax(axis=1)
    order = np.argsort(-ends, kind="stable")
    batches, start = [], 0
    while start < len(order):
        length = int(ends[order[start]])
        rows = order[start : start + max(1, tokens // length)]
        batches.append(_batch(reference.tokens[rows, :length], reference.mask[rows, :length], accelerator.device))
        start += len(rows)
    return batches


def _fits(checkpoint: Checkpoint, reference: Reference) -> None:
    if reference.tokens.shape[1] > checkpoint.context:
        raise ValueError(
            f"reference rows have {reference.tokens.shape[1]} tokens, and the model sees {checkpoint.context}; build "
            "the reference for its context"
        )
    if reference.tokens.max() >= checkpoint.vocabulary or reference.tokens.min() < 0:
        raise ValueError(
            f"the reference has tokens outside the model's vocabulary of {checkpoint.vocabulary}: it was made by "
            "another tokenizer"
        )


_probe: _Probe | None = None


def _start(folder: Path, reference: Reference, options: ProbeOptions, lr: float, accelerator: Accelerator) -> None:
    """What a process of the pool does first."""
    import torch

    global _probe
    # one whose parent was killed would wait for work for ever
    threading.Thread(target=_leave_with_the_parent, daemon=True).start()
    torch.set_num_threads(1)
    # the C library keeps free memory up to twice the largest block that was ever given back, and has to ask for the
    # rest page by page again; this is the largest that it takes note of
    torch.empty(31 << 20, dtype=torch.uint8)
    _probe = _Probe(load_checkpoint(folder), reference, options, lr, accelerator)


def _leave_with_the_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _losses_of(task: Task) -> np.ndarray:
    assert _probe is not None
    return _probe.losses(task)
