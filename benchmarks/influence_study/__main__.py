"""`python -m benchmarks.influence_study [--out FOLDER] [--docs FOLDER] [--processes N]`: the claims of Group-MATES at a
scale that two cores can afford, and the page about them.

About 20 minutes on two quiet cores. A subject that is in the folder already is not measured again, so a run that was
stopped goes on. `--smoke` takes everything at toy size, to see that it runs.
"""

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.influence_study import estimates, page, study, worlds
from benchmarks.influence_study.planted import planted
from benchmarks.influence_study.subjects import SMOKE_TEXT, SMOKE_WORLD, TEXT, WORLD

_ROOT = Path(__file__).parents[2]
_SMOKE = _ROOT / ".benchmarks/influence-smoke"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.influence_study", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder of the results; default .benchmarks/influence")
    parser.add_argument("--docs", type=Path, help="folder of the page and its figures; default docs")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="at toy size, page and all in .benchmarks/influence-smoke")
    given = parser.parse_args(arguments)
    usual = (_SMOKE, _SMOKE) if given.smoke else (_ROOT / ".benchmarks/influence", _ROOT / "docs")
    out, docs = given.out or usual[0], given.docs or usual[1]
    started = time.perf_counter()

    def say(message: str) -> None:
        print(f"[{(time.perf_counter() - started) / 60:5.1f} min] {message}", flush=True)

    world, pages, sizes = WORLD, TEXT, study.SPEED
    if given.smoke:
        world, pages, sizes = SMOKE_WORLD, SMOKE_TEXT, dict.fromkeys((300, 400, 500), (2, 5, 10))
    wanted = study.jobs(world, pages)
    results = study.run(wanted, out, given.processes, say)
    speed = study.speed(out, say, sizes)
    say("intervals")
    with ProcessPoolExecutor(given.processes, get_context("forkserver")) as pool:
        parts = list(pool.map(estimates.replicates, results))
    found = estimates.estimates(results, parts)
    # of no language model: they stand beside the worlds
    found.setdefault(worlds.PLACE, {}).update(estimates.speed(speed["runs"]) | estimates.check(planted(world)))
    page.write(docs, results, speed, found, {job.place: job.sizes for job in wanted})
    say(f"{docs / page.FILE} is written")


if __name__ == "__main__":
    main()
