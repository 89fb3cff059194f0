"""`python -m benchmarks.influence_study [--out FOLDER] [--docs FOLDER] [--processes N]`: the claims of Group-MATES at a
scale that two cores can afford, and the page about them.

About 20 minutes on two quiet cores. A subject that is in the folder already is not measured again, so a run that was
stopped goes on. `--smoke` takes everything at toy size, to see that it runs.
"""

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from benchmarks.influence_study import estimates, page, study
from benchmarks.influence_study.statistics import RESAMPLES
from benchmarks.influence_study.subjects import SMOKE_TEXT, SMOKE_WORLD, TEXT, WORLD

_ROOT = Path(__file__).parents[2]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.influence_study", description=__doc__)
    parser.add_argument("--out", type=Path, default=_ROOT / ".benchmarks/influence", help="folder of the results")
    parser.add_argument("--docs", type=Path, default=_ROOT / "docs", help="folder of the page and its figures")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="at toy size; give --docs, or the page is overwritten")
    given = parser.parse_args(arguments)
    started = time.perf_counter()

    def say(message: str) -> None:
        print(f"[{(time.perf_counter() - started) / 60:5.1f} min] {message}", flush=True)

    world, pages, sizes, resamples = WORLD, TEXT, study.SPEED, RESAMPLES
    if given.smoke:
        world, pages, resamples = SMOKE_WORLD, SMOKE_TEXT, 200
        sizes = dict.fromkeys((300, 400, 500), (2, 5, 10))
    wanted = study.jobs(world, pages)
    results = study.run(wanted, given.out, given.processes, say)
    speed = study.speed(given.out, say, sizes)
    say("intervals")
    with ProcessPoolExecutor(given.processes, get_context("forkserver")) as pool:
        parts = list(pool.map(partial(estimates.replicates, resamples=resamples), results))
    found = estimates.estimates(results, parts)
    page.write(given.docs, results, speed, found, {job.place: job.sizes for job in wanted})
    say(f"{given.docs / page.FILE} is written")


if __name__ == "__main__":
    main()
