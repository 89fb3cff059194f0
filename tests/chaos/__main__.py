"""`python -m tests.chaos`: the campaign; with --seed, one injection of it again."""

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

# one core is as good as two for a few rows, and a fork wants no threads
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from rich.console import Console

from tests.chaos import campaign, faults, kills
from tests.chaos.victims import REPOSITORY
from tests.chaos.world import World

KINDS = {**faults.KINDS, **kills.KINDS}
# the least of a whole campaign
FAULTS, SIGKILLS = 100, 30


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


def lacking(entries: Iterable[campaign.Entry], asked: Iterable[int]) -> list[str]:
    """What a campaign that was asked for these seeds did not do, in words."""
    seeds = {entry.seed for entry in entries}
    kinds = {seed: name for seed, name, _ in schedule()}
    return [f"{kinds.get(seed, 'no injection')} has no entry: --seed {seed}" for seed in asked if seed not in seeds]


def too_few(entries: list[campaign.Entry]) -> list[str]:
    """What the whole campaign is below its least of, in words: a moment that did not come is no fault."""
    kills_done = campaign.injected(entry for entry in entries if entry.kind.startswith("kill_"))
    return [
        f"{done} {what}, and {least} are the least"
        for done, what, least in ((campaign.injected(entries), "faults", FAULTS), (kills_done, "SIGKILLs", SIGKILLS))
        if done < least
    ]


def whole(log: Path, console: Console) -> tuple[list[campaign.Entry], list[str]]:
    """The whole campaign in two processes, as most of what kills is waiting: (its entries, also in `log`, by seed; what
    of it was not done, in words)."""
    beside = log.with_name(f"kills_{log.name}")
    log.parent.mkdir(parents=True, exist_ok=True)
    beside.unlink(missing_ok=True)
    only = [f"--kind={kind}" for kind in kills.KINDS]
    with subprocess.Popen([sys.executable, "-m", "tests.chaos", *only, f"--log={beside}"], cwd=REPOSITORY) as killing:
        entries = part(None, list(faults.KINDS), log, console)
        killing.wait()
    told = beside.read_text("utf-8").splitlines() if beside.exists() else []
    entries = sorted((*entries, *(campaign.Entry(**json.loads(line)) for line in told)), key=lambda entry: entry.seed)
    campaign.write(log, entries)
    beside.unlink(missing_ok=True)
    short = [*lacking(entries, [seed for seed, _, _ in schedule()]), *too_few(entries)]
    if killing.returncode and not any(entry.kind in kills.KINDS for entry in campaign.wrong(entries)):
        short.append(f"the process that kills ended with {killing.returncode}")
    return entries, short


def part(seeds: list[int] | None, kinds: list[str] | None, log: Path, console: Console) -> list[campaign.Entry]:
    """Those injections of the campaign that are of these seeds and kinds, in a folder that stays if one is wrong."""
    logging.getLogger("dagster").setLevel(logging.CRITICAL)
    folder = Path(tempfile.mkdtemp(prefix="datamask_chaos_"))
    console.print(f"one undisturbed run, in {folder} ...")
    world = World.made(folder)
    chosen = [injection for injection in schedule(kinds) if seeds is None or injection[0] in seeds]
    with world.victims:
        entries = campaign.run(world, chosen, log, console)
    if not campaign.wrong(entries):
        shutil.rmtree(folder)
    return entries


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, action="append", help="only this injection; may be given several times")
    parser.add_argument("--kind", action="append", help="only injections of this kind; may be given several times")
    parser.add_argument("--log", type=Path, default=Path(".chaos/log.jsonl"))
    asked = parser.parse_args()
    if unknown := set(asked.kind or ()) - KINDS.keys():
        parser.error(f"--kind {unknown.pop()!r} is none of: {', '.join(KINDS)}")
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True, width=160)
    if asked.seed is None and asked.kind is None:
        entries, short = whole(asked.log.absolute(), console)
    else:
        entries = part(asked.seed, asked.kind, asked.log, console)
        seeds = [seed for seed, _, _ in schedule(asked.kind) if asked.seed is None or seed in asked.seed]
        short = lacking(entries, seeds)
    console.print(campaign.summary(entries))
    wrong = campaign.wrong(entries)
    for entry in wrong:
        console.print(f"again: python -m tests.chaos --seed {entry.seed}", style="red")
    for line in short:
        console.print(line, style="red")
    return 1 if wrong or short or not entries else 0


if __name__ == "__main__":
    sys.exit(main())
