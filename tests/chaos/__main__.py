"""`python -m tests.chaos`: the campaign; with --seed, one injection of it again."""

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# one core is as good as two for a few rows, and a fork wants no threads
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from rich.console import Console

from tests.chaos import campaign, faults, kills
from tests.chaos.world import World

KINDS = {**faults.KINDS, **kills.KINDS}


def schedule(kinds: list[str] | None = None) -> Iterator[tuple[int, str, campaign.Kind]]:
    """Every injection of the campaign: seeds count through the kinds in turn, so that a part of it is of all kinds."""
    most = max(count for count, _ in KINDS.values())
    seed = 0
    for turn in range(most):
        for name, (count, act) in KINDS.items():
            if turn < count:
                if kinds is None or name in kinds:
                    yield seed, name, act
                seed += 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, action="append", help="only this injection; may be given several times")
    parser.add_argument("--kind", action="append", help="only injections of this kind; may be given several times")
    parser.add_argument("--log", type=Path, default=Path(".chaos/log.jsonl"))
    parser.add_argument("--keep", action="store_true", help="keep the folder of the roots")
    asked = parser.parse_args()
    if unknown := set(asked.kind or ()) - KINDS.keys():
        parser.error(f"--kind {unknown.pop()!r} is none of: {', '.join(KINDS)}")
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    logging.getLogger("dagster").setLevel(logging.CRITICAL)
    folder = Path(tempfile.mkdtemp(prefix="datamask_chaos_"))
    console.print(f"one undisturbed run, in {folder} ...")
    world = World.made(folder)
    chosen = [injection for injection in schedule(asked.kind) if asked.seed is None or injection[0] in asked.seed]
    with world.victims:
        entries = campaign.run(world, chosen, asked.log, console)
    console.print(campaign.summary(entries))
    wrong = campaign.wrong(entries)
    for entry in wrong:
        console.print(f"again: python -m tests.chaos --seed {entry.seed}", style="red")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
