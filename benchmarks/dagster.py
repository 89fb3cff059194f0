"""What the orchestration costs: the bars of `dagster dev`, of loading, of a sensor's tick, of a light run, of a page.

`python -m benchmarks.dagster [--only NAME] [--out FILE]`. Everything runs on a small project made on the spot with the
demo's encoder, under a home of its own. CPU seconds are those of a child process, above the same child without our
part, in turn; a page's seconds are the browser's, until the last snapshot is to be read. Linux alone.
"""

import argparse
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
from rich.console import Console

from benchmarks.measure import Row, absent, at_most, machine, show
from dagster_datamask.jobs import build_jobs
from dagster_datamask.partitions import cc_snapshot
from dagster_datamask.resources.storage import StorageResource
from dagster_datamask.sensors.new_shards import build_new_shards
from dagster_datamask.settings import Settings
from dagster_datamask.shards.generations import Store
from tests.conftest import SNAPSHOTS
from tests.e2e.conftest import REPO, Server, dagster_dev
from tests.project import Project, settings_for, write_labels, write_shard
from tests.test_cli import write_config

_ROUNDS = 3
_IDLE_SECONDS = 30
_SHARDS, _SNAPSHOTS = 10_000, 110
# read no text and load no model
LIGHT = ("quality_scores", "pruned_documents", "kmeans_clusters", "fineweb_mask_manifest")

_EMPTY_RUN = """
import dagster as dg

@dg.asset
def nothing(): ...

with dg.DagsterInstance.get() as instance:
    job = dg.Definitions([nothing], executor=dg.in_process_executor).resolve_implicit_global_asset_job_def()
    assert job.execute_in_process(instance=instance).success
"""
_LIGHT_RUN = """
import sys
import dagster as dg
from dagster_datamask.definitions import defs

snapshot, *names = sys.argv[1:]
with dg.DagsterInstance.get() as instance:
    job = defs.resolve_job_def("full")
    selection = [dg.AssetKey(name) for name in names]
    assert job.execute_in_process(instance=instance, partition_key=snapshot, asset_selection=selection).success
"""


def load(project: Path) -> list[Row]:
    """CPU seconds to load the definitions, above importing Dagster."""
    ours, theirs = _in_turn(project, ["-c", "import dagster_datamask.definitions"], ["-c", "import dagster"])
    return [
        at_most("load the definitions above import dagster", ours - theirs, 3, unit="CPU s", facts={"dagster": theirs})
    ]


def light_run(project: Path) -> list[Row]:
    """CPU seconds of a run of the light assets, above those of a run of nothing."""
    light = ["-c", _LIGHT_RUN, SNAPSHOTS[0], *LIGHT]
    store = Store(project / "root")

    def unmade() -> None:
        for name in LIGHT:
            shutil.rmtree(store.folder(name, SNAPSHOTS[0]), ignore_errors=True)

    ours, theirs = _in_turn(project, light, ["-c", _EMPTY_RUN], before=unmade)
    return [
        at_most(f"run {', '.join(LIGHT)} above an empty run", ours - theirs, 10, unit="CPU s", facts={"empty": theirs})
    ]


def tick(project: Path) -> list[Row]:
    """Seconds of a sensor's tick over many shards: the first, and the next, which compares with it."""
    settings = _settings(project)
    source = Path(settings.source.url)
    many = project / "many"
    template = next(source.glob("data/*/*.parquet"))
    for snapshot in range(_SHARDS // 100):
        folder = many / "data" / f"CC-MAIN-{2000 + snapshot // 52}-{snapshot % 52:02d}"
        folder.mkdir(parents=True)
        for shard in range(100):
            # a link has a file's listing, without its bytes
            os.link(template, folder / f"{shard:03d}_00000.parquet")
    settings = settings.replace({"source.url": str(many)})
    sensor = build_new_shards(settings, build_jobs(settings))
    seconds = []
    with dg.DagsterInstance.ephemeral() as instance:
        cursor = None
        for _ in range(2):
            context = dg.build_sensor_context(instance=instance, cursor=cursor)
            began = time.perf_counter()
            cursor = sensor(context, storage=StorageResource.from_settings(settings)).cursor
            seconds.append(time.perf_counter() - began)
    shutil.rmtree(many)
    return [at_most(f"a tick over {_SHARDS:,} shards", max(seconds), 10, unit="s", facts={"seconds": seconds})]


def dev(project: Path) -> list[Row]:
    """`dagster dev` at rest, and the page of a partitioned asset with 110 snapshots."""
    keys = [f"CC-MAIN-{2000 + k // 52}-{k % 52:02d}" for k in range(_SNAPSHOTS)]
    with dagster_dev(project / "dev", _settings(project), REPO / "dagster_datamask" / "dagster.yaml") as server:
        with dg.DagsterInstance.from_config(str(project / "dev" / "home")) as instance:
            instance.add_dynamic_partitions(cc_snapshot.name or "", keys)
            for key in keys:
                instance.report_runless_asset_event(dg.AssetMaterialization("fineweb_mask", partition=key))
        time.sleep(_IDLE_SECONDS)
        resident, proportional = _memory(server.pid)
        rows = [
            at_most(
                "dagster dev idle, resident memory of its processes",
                resident / 1e9,
                1.0,
                unit="GB",
                facts={"shared_pages_counted_once_gb": proportional / 1e9},
            )
        ]
        began = time.perf_counter()
        server.query(
            """{ assetNodeOrError(assetKey: {path: ["fineweb_mask"]}) { ... on AssetNode {
              partitionKeys staleStatus assetPartitionStatuses { __typename ... on DefaultPartitionStatuses {
                materializedPartitions failedPartitions unmaterializedPartitions } }
              assetMaterializations(limit: 110) { partition timestamp } } } }"""
        )
        answered = time.perf_counter() - began
        page = _page(server, keys)
        what = f"asset page with {_SNAPSHOTS} snapshots"
        rows.append(at_most(f"{what}, what it asks the server", answered, 2, unit="s"))
        if page is None:
            rows.append(absent(f"{what}, in the browser", "no playwright or no Chromium here"))
        else:
            rows.append(at_most(f"{what}, in the browser", min(page), 2, unit="s", facts={"seconds": page}))
    return rows


def _page(server: Server, keys: list[str]) -> list[float] | None:
    """Seconds until the asset's page shows its last snapshot, some times over, the first with a cold cache."""
    try:
        from playwright.sync_api import expect, sync_playwright
    except ImportError:
        return None
    browser_path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser_path is None:
        return None
    seconds = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=browser_path,
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"],
        )
        page = browser.new_page(viewport={"width": 1600, "height": 1100})
        for _ in range(_ROUNDS):
            page.goto("about:blank")
            began = time.perf_counter()
            page.goto(f"{server.url}/assets/fineweb_mask?view=partitions", wait_until="commit")
            expect(page.get_by_text(f"{len(keys)} Partitions Selected")).to_be_visible(timeout=60_000)
            expect(page.get_by_text(keys[0]).first).to_be_attached(timeout=60_000)
            seconds.append(time.perf_counter() - began)
        browser.close()
    return seconds


def _memory(group: int) -> tuple[int, int]:
    """(resident bytes, bytes with shared pages counted once) of all processes of a process group's session."""
    resident = proportional = 0
    for folder in Path("/proc").glob("[0-9]*"):
        # a process may end while it is looked at
        with contextlib.suppress(OSError):
            if os.getsid(int(folder.name)) == group:
                rollup = (folder / "smaps_rollup").read_text().splitlines()[1:]
                sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in rollup}
                resident, proportional = resident + sizes["Rss"], proportional + sizes["Pss"]
    return resident, proportional


def _in_turn(project: Path, *commands: list[str], before: Callable[[], None] = lambda: None) -> list[float]:
    """The least CPU seconds of each Python child, run in turn under a home of their own; `before` goes before each."""
    home = project / "home"
    home.mkdir(exist_ok=True)
    shutil.copyfile(REPO / "dagster_datamask" / "dagster.yaml", home / "dagster.yaml")
    environment = os.environ | {
        "DAGSTER_HOME": str(home),
        "DATAMASK_CONFIG": str(project / "datamask.toml"),
        "OMP_NUM_THREADS": "1",
    }
    with dg.DagsterInstance.from_config(str(home)) as instance:
        instance.add_dynamic_partitions(cc_snapshot.name or "", list(SNAPSHOTS))
    least = [float("inf")] * len(commands)
    for _ in range(_ROUNDS):
        for k, command in enumerate(commands):
            before()
            start = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *command], cwd=project, env=environment, check=True, capture_output=True)
            end = resource.getrusage(resource.RUSAGE_CHILDREN)
            least[k] = min(least[k], end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime)
    return least


def _settings(project: Path) -> Settings:
    return settings_for(project / "source", project / "root", project / "labels", "select.compare_steps=0")


@contextlib.contextmanager
def small_project() -> Iterator[Path]:
    """A folder with a fitted project whose snapshots are selected, and its settings file."""
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        (project / "dev").mkdir()
        write_labels(project / "labels")
        for snapshot in SNAPSHOTS:
            write_shard(project / "source", snapshot, "000_00000", 40)
        write_config(_settings(project), project / "datamask.toml")
        made = Project(_settings(project))
        made.fit_global()
        for snapshot in SNAPSHOTS:
            made.full(snapshot)
        yield project


SUBJECTS: dict[str, Callable[[Path], list[Row]]] = {"load": load, "light_run": light_run, "tick": tick, "dev": dev}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dagster", description=__doc__)
    parser.add_argument("--only", choices=SUBJECTS, help="one subject")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    console = Console(width=140)
    told: dict[str, Any] = {"machine": machine(), "rows": {}}
    with small_project() as project:
        for name in [arguments.only] if arguments.only else SUBJECTS:
            rows = SUBJECTS[name](project)
            show(name, rows, console)
            told["rows"][name] = [vars(row) for row in rows]
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(told, indent=1, allow_nan=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
