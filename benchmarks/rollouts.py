"""Rollouts beside the plain loop: restore, step, evaluate, one after another in one process.

`python -m benchmarks.rollouts [--out FILE]` takes about three minutes on two quiet cores: trajectories of 10 documents
of models of 0.1 and 1.5 million parameters, with 32 sequences as the reference. The plain loop runs on one thread and
on all that torch takes, and is compared by the better. Rollouts a second are of wall time; seconds of the processor, of
a rollout in one process each, do not depend on how many processes there are.
"""

import argparse
import copy
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch.nn import functional

from benchmarks.measure import Row, against, at_most, in_turn, keep, machine, show
from dagster_datamask import keyed
from dagster_datamask.influence.language_model import Checkpoint, LanguageModelOptions, few_threads
from dagster_datamask.influence.pretraining import PretrainingOptions, pretrain
from dagster_datamask.influence.reference import Reference, of_sequences
from dagster_datamask.influence.rollouts import ProbeOptions, Prober, random_trajectories

STEPS = 10
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Size:
    model: LanguageModelOptions
    trajectories: int


SIZES = (
    Size(LanguageModelOptions(2, 64, 2, 64, 128), 20),
    Size(LanguageModelOptions(6, 128, 4, 128, 2048), 8),
)


def rollouts(size: Size, rounds: int = 2, processes: int | None = None) -> list[Row]:
    model, options = size.model, ProbeOptions()
    draws = keyed.rng(0, "benchmark/rollouts")
    documents, held_out = (draws.integers(model.vocabulary, size=(count, model.context)) for count in (100, 32))
    # moments as a training leaves them
    trained = pretrain(model, documents, PretrainingOptions(100, batch=4, warmup=4), until=6).checkpoint
    drawn = random_trajectories([str(i) for i in range(len(documents))], size.trajectories, STEPS, 0)
    ways = {"one thread": 1}
    if torch.get_num_threads() > 1:
        ways[f"{torch.get_num_threads()} threads"] = torch.get_num_threads()
    reference = of_sequences(held_out)
    with (
        Prober(trained, reference, options, processes=processes) as prober,
        Prober(trained, reference, options, processes=1) as alone,
    ):
        # the processes start with the first work
        prober.roll_out(documents, drawn)
        timed = in_turn(
            rounds,
            {
                "ours": lambda: prober.roll_out(documents, drawn).increments,
                "ours, one process": lambda: alone.roll_out(documents, drawn).increments,
                **{
                    name: lambda threads=threads: plain_loop(trained, reference, documents, drawn, options, threads)
                    for name, threads in ways.items()
                },
            },
        )
        many = prober.processes
    per_second = {name: size.trajectories / min(of.wall) for name, of in timed.items()}
    better = max(ways, key=lambda name: per_second[name])
    ours, plain = timed["ours"].results[0], timed[better].results[0]
    cpu = {name: min(timed[name].cpu) / size.trajectories for name in ("ours, one process", "one thread")}
    what = f"{trained.parameters / 1e6:.2f}M parameters, context {model.context}:"
    facts = {name: of.facts() for name, of in timed.items()} | {"plain": better, "largest": float(np.abs(plain).max())}
    return [
        against(
            f"{what} rollouts a second in {many} processes, and the plain loop's on {better}",
            per_second["ours"],
            per_second[better],
            least=2.0,
            facts=facts,
        ),
        against(
            f"{what} processor seconds of a rollout, one process and one thread each",
            cpu["ours, one process"],
            cpu["one thread"],
            unit="s",
        ),
        at_most(f"{what} largest difference of an increment", float(np.abs(ours - plain).max()), TOLERANCE),
    ]


def plain_loop(
    start: Checkpoint,
    measured: Reference,
    documents: np.ndarray,
    trajectories: np.ndarray,
    options: ProbeOptions,
    threads: int,
) -> np.ndarray:
    """float64[m, T]: increments as one would write them with transformers and torch.optim."""
    assert start.moments is not None and start.lr is not None
    reference = torch.from_numpy(measured.tokens)
    found = np.zeros(trajectories.shape)
    with few_threads(threads):
        model = copy.deepcopy(start.model)
        optimizer = torch.optim.AdamW(
            model.parameters(), start.lr, betas=(options.beta1, options.beta2), weight_decay=options.weight_decay
        )
        names = [name for name, _ in model.named_parameters()]
        state = {
            i: {
                "step": torch.tensor(float(start.moments.step)),
                "exp_avg": start.moments.first[name],
                "exp_avg_sq": start.moments.second[name],
            }
            for i, name in enumerate(names)
        }
        saved = {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}

        def loss(tokens: torch.Tensor) -> torch.Tensor:
            logits = model(tokens).logits[:, :-1]
            return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))

        with torch.no_grad():
            base = float(loss(reference))
        for k, trajectory in enumerate(trajectories.tolist()):
            model.load_state_dict(start.model.state_dict())
            optimizer.load_state_dict(copy.deepcopy(saved))
            before = base
            for t, row in enumerate(trajectory):
                optimizer.zero_grad()
                loss(torch.from_numpy(documents[row])[None]).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
                optimizer.step()
                with torch.no_grad():
                    after = float(loss(reference))
                found[k, t], before = after - before, after
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollouts", description=__doc__)
    parser.add_argument("--out", type=Path, help="keep the figures here, as JSON")
    arguments = parser.parse_args()
    before, started = machine(), time.perf_counter()
    rows = [row for size in SIZES for row in rollouts(size)]
    seconds = time.perf_counter() - started
    show(
        f"rollouts: {seconds:.0f} s on {before['cores']} cores, load {before['load']:.1f} before",
        rows,
        Console(width=150),
    )
    if arguments.out is not None:
        keep(arguments.out, "rollouts", {"machine": before, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
