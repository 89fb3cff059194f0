"""Training a language model on packed sequences, to be stopped and gone on with anywhere.

Here: the order of sequences, the learning rate's schedule, and checkpoints on the way. Not here: the model and its
files (`language_model`), and what a step computes (`forward`).

A step depends on the checkpoint before it, the data, the options and its own number alone. So a run that is killed
after any step and started again ends on the same weights, bit for bit on one device.
"""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dagster_datamask import keyed
from dagster_datamask.accelerator import Accelerator
from dagster_datamask.influence.language_model import (
    Checkpoint,
    LanguageModelOptions,
    NoOptimizerState,
    few_threads,
    load_checkpoint,
    new_checkpoint,
)
from dagster_datamask.scoring.batching import CPU_BATCH_TOKENS, CUDA_BATCH_TOKENS
from dagster_datamask.shards.writer import write_json

Progress = Callable[[int, int, dict[str, Any]], None]

CURVE_FILE, RUN_FILE = "losses.json", "run.json"
# sequences that are hashed at once
_HASHED = 1024
_CPU = Accelerator()


@dataclass(frozen=True)
class PretrainingOptions:
    """Of one whole run, however many calls it is made in.

    steps: of the schedule; batch: sequences a step; lr: the peak, reached over `warmup` steps in equal ones; schedule:
    "wsd" stays there until the last `decay` share of the steps and falls in a straight line, "cosine" falls all the
    way, either to `final` of the peak; clip: largest norm of the gradient, 0 for none; save_every: steps between
    checkpoints in the folder; threads: of the CPU, by which torch orders its sums (the bits depend on it); begins: the
    step after which the schedule begins, where the steps up to it were another's.
    """

    steps: int
    batch: int = 16
    lr: float = 1e-3
    warmup: int = 0
    schedule: Literal["wsd", "cosine"] = "wsd"
    decay: float = 0.1
    final: float = 0.01
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    seed: int = 0
    save_every: int = 500
    threads: int = 1
    begins: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "save_every", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if not 0 <= self.begins <= self.steps:
            raise ValueError(f"a schedule of {self.steps} steps cannot begin after step {self.begins}")
        if not 0 <= self.warmup <= self.steps - self.begins:
            raise ValueError(f"a warm-up of {self.warmup} steps does not fit into {self.steps - self.begins}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"the learning rate must be positive and finite, not {self.lr}")
        if self.schedule not in ("wsd", "cosine"):
            raise ValueError(f"schedule {self.schedule!r} is neither 'wsd' nor 'cosine'")
        for name in ("decay", "final"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share in [0, 1], not {getattr(self, name)}")

    def rate(self, step: int) -> float:
        """The learning rate of step begins + 1..steps."""
        step, steps = step - self.begins, self.steps - self.begins
        if step <= self.warmup:
            return self.lr * step / self.warmup
        if self.schedule == "cosine":
            done = (step - self.warmup) / max(1, steps - self.warmup)
            return self.lr * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done)))
        falling = max(1, round(self.decay * steps)) if self.decay else 0
        left = steps - step
        if left >= falling:
            return self.lr
        return self.lr * (self.final + (1 - self.final) * left / falling)


@dataclass(frozen=True, eq=False)
class Pretrained:
    """checkpoint: after the last step; losses: float64[steps of this call], each the mean loss of its batch before its
    step; first_step: the number of the first of them."""

    checkpoint: Checkpoint
    losses: np.ndarray
    first_step: int


def pretrain(
    start: Checkpoint | LanguageModelOptions,
    sequences: np.ndarray,
    options: PretrainingOptions,
    *,
    until: int | None = None,
    folder: Path | None = None,
    accelerator: Accelerator = _CPU,
    progress: Progress | None = None,
) -> Pretrained:
    """Take the steps from the start's to `until` (default: the schedule's last) on sequences int[n, L], which may be
    mapped from a file.

    start: a model still to be made, or a checkpoint, of which weights, moments and step go on and the data begin anew:
    so a run goes on over other data under one schedule. Every sequence is taken once before any is taken again, in an
    order keyed by the seed, the step at which the data began and the epoch. folder: where a checkpoint is kept every
    `save_every` steps, the latest alone, from which the same call goes on after it was killed.

    bfloat16 on a CUDA device whose accelerator says so; weights and moments stay float32. Raises ValueError for
    sequences that do not fit the model, a folder of another run, and a loss that is not finite.
    """
    import torch

    checkpoint = new_checkpoint(start, options.seed) if isinstance(start, LanguageModelOptions) else start
    # a position is that of the data before
    checkpoint = replace(checkpoint, position=0)
    until = options.steps if until is None else until
    _check(checkpoint, sequences, options, until)
    begun = checkpoint.step
    losses: list[float] = []
    if folder is not None:
        run = {
            "start": checkpoint.identity,
            "data": _content(sequences),
            "options": {**asdict(options), "betas": list(options.betas)},
            "until": until,
        }
        checkpoint, losses = _latest(folder, run) or (checkpoint, losses)

    from dagster_datamask.influence.forward import Batch, Trained

    with few_threads(options.threads if not accelerator.is_cuda else torch.get_num_threads()):
        trained = Trained(
            checkpoint,
            lr=options.lr,
            betas=options.betas,
            weight_decay=options.weight_decay,
            clip=options.clip,
            device=accelerator.device,
            dtype=accelerator.dtype,
        )
        order = _Order(options.seed, begun, len(sequences))
        tokens = CUDA_BATCH_TOKENS if accelerator.is_cuda else CPU_BATCH_TOKENS
        at_once = max(1, tokens // sequences.shape[1])
        position, rate = checkpoint.position, checkpoint.lr
        for step in range(checkpoint.step + 1, until + 1):
            rows = order.rows(position, options.batch)
            batches = [
                Batch(torch.from_numpy(sequences[rows[a : a + at_once]].astype(np.int64)).to(accelerator.device))
                for a in range(0, len(rows), at_once)
            ]
            rate = options.rate(step)
            trained.optimizer.param_groups[0]["lr"] = rate
            loss = float(trained.step(batches))
            if not math.isfinite(loss):
                raise ValueError(
                    f"step {step}: the loss is {loss}; lower the learning rate ({options.lr:g}) or lengthen the "
                    f"warm-up ({options.warmup} steps)"
                )
            losses.append(loss)
            position += options.batch
            if folder is not None and step % options.save_every == 0 and step < until:
                _keep(folder, trained.checkpoint(step, rate, position), losses)
            if progress is not None:
                progress(step, until, {"loss": loss, "lr": rate})
        done = checkpoint if checkpoint.step == until else trained.checkpoint(until, rate or options.lr, position)
    if folder is not None and checkpoint.step < until:
        _keep(folder, done, losses)
    return Pretrained(done, np.array(losses), begun + 1)


class _Order:
    """Which sequences a position of the data stands for: a permutation an epoch, of which one is held."""

    def __init__(self, seed: int, begun: int, count: int) -> None:
        self._key, self._count = (seed, "pretraining-order", begun), count
        self._epoch, self._permutation = -1, np.zeros(0, np.int64)

    def rows(self, position: int, size: int) -> np.ndarray:
        """int64[size]: from `position` on, over the ends of epochs."""
        return np.array([self._row(p) for p in range(position, position + size)], np.int64)

    def _row(self, position: int) -> int:
        epoch, place = divmod(position, self._count)
        if epoch != self._epoch:
            seed, purpose, begun = self._key
            self._epoch, self._permutation = epoch, keyed.rng(seed, purpose, begun, epoch).permutation(self._count)
        return int(self._permutation[place])


def _check(checkpoint: Checkpoint, sequences: np.ndarray, options: PretrainingOptions, until: int) -> None:
    if checkpoint.moments is None:
        raise NoOptimizerState(
            "the checkpoint to train on comes without optimizer state; take one that has it, or start its optimizer "
            "anew (`with_fresh_moments`)"
        )
    if sequences.ndim != 2 or not len(sequences) or sequences.shape[1] < 2:
        raise ValueError(f"training sequences must be [n ≥ 1, L ≥ 2] tokens, not {list(sequences.shape)}")
    if sequences.shape[1] > checkpoint.context:
        raise ValueError(
            f"sequences of {sequences.shape[1]} tokens, but the model has {checkpoint.context} positions: pack them "
            "anew"
        )
    if not checkpoint.step <= until <= options.steps:
        raise ValueError(
            f"step {until} to stop at is none of those left: {checkpoint.step} are done and {options.steps} planned"
        )
    largest = max(int(sequences[a : a + _HASHED].max()) for a in range(0, len(sequences), _HASHED))
    if largest >= checkpoint.vocabulary:
        raise ValueError(
            f"the sequences have a token {largest}, but the model's vocabulary is {checkpoint.vocabulary}: they were "
            "made by another tokenizer"
        )


def _content(sequences: np.ndarray) -> str:
    blocks = (np.ascontiguousarray(sequences[a : a + _HASHED]).tobytes() for a in range(0, len(sequences), _HASHED))
    return keyed.digest(str(sequences.shape), str(sequences.dtype), *(keyed.digest(block) for block in blocks)).hex()


def _keep(folder: Path, checkpoint: Checkpoint, losses: list[float]) -> None:
    place = folder / f"step-{checkpoint.step:08d}"
    # the losses first: a checkpoint that is there has them
    write_json(folder / f"{place.name}.{CURVE_FILE}", losses)
    checkpoint.save(place)
    for other in folder.glob("step-*"):
        if other.name.partition(".")[0] != place.name:
            shutil.rmtree(other) if other.is_dir() else other.unlink()


def _latest(folder: Path, run: dict[str, Any]) -> tuple[Checkpoint, list[float]] | None:
    """What the same run has left in the folder. Raises ValueError where it is another run's."""
    folder.mkdir(parents=True, exist_ok=True)
    for temp in folder.glob(".step-*.tmp"):
        shutil.rmtree(temp, ignore_errors=True)
    of = folder / RUN_FILE
    if not of.is_file():
        write_json(of, run)
        return None
    if json.loads(of.read_text("utf-8")) != run:
        raise ValueError(
            f"{folder}: holds checkpoints of a run on other data or with other options; give another folder"
        )
    steps = sorted(path for path in folder.glob("step-*") if path.is_dir())
    if not steps:
        return None
    losses = json.loads((folder / f"{steps[-1].name}.{CURVE_FILE}").read_text("utf-8"))
    return load_checkpoint(steps[-1]), losses
