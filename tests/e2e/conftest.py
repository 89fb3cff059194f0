"""A real Dagster: webserver, daemon and code server as processes, on the small project's settings file."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dagster_datamask.settings import Settings
from dagster_datamask.shards.generations import Store
from tests.ports import free_port
from tests.project import settings_for, write_shard
from tests.signals import hear_signals
from tests.test_cli import write_config

REPO = Path(__file__).parents[2]
GOOD = ("CC-MAIN-2024-10", "CC-MAIN-2024-18")
POISONED = "CC-MAIN-2024-22"
REPOSITORY = {"repositoryName": "__repository__", "repositoryLocationName": "dagster_datamask"}
FINISHED = ("SUCCESS", "FAILURE", "CANCELED")
# what a machine shared with others needs at worst: nothing that works waits for them to pass
_SECONDS = 1800
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True)
class Server:
    """A running `dagster dev` and the project it serves."""

    url: str
    settings: Settings
    log: Path
    # the process group of all that `dagster dev` started
    pid: int

    @property
    def store(self) -> Store:
        return Store(Path(self.settings.storage.root))

    @property
    def source(self) -> Path:
        return Path(self.settings.source.url)

    def query(self, text: str, **variables: Any) -> dict[str, Any]:
        """The data of a GraphQL answer; any error fails the test with its text."""
        request = urllib.request.Request(
            f"{self.url}/graphql",
            json.dumps({"query": text, "variables": variables}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_SECONDS) as response:
            answer = json.loads(response.read())
        assert not answer.get("errors"), answer["errors"]
        return answer["data"]

    def add_partitions(self, *snapshots: str) -> None:
        for snapshot in snapshots:
            added = self.query(
                """mutation($repository: RepositorySelector!, $key: String!) {
                  addDynamicPartition(repositorySelector: $repository, partitionsDefName: "cc_snapshot",
                                      partitionKey: $key) { __typename } }""",
                repository=REPOSITORY,
                key=snapshot,
            )
            assert added["addDynamicPartition"]["__typename"] in (
                "AddDynamicPartitionSuccess",
                "DuplicateDynamicPartitionError",
            )

    def backfill(self, title: str, assets: Sequence[str], snapshots: Sequence[str]) -> str:
        """The id of a backfill that was launched over these."""
        launched = self.query(
            """mutation($params: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $params) {
              __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }""",
            params={
                "assetSelection": [{"path": [name]} for name in assets],
                "partitionNames": list(snapshots),
                "title": title,
            },
        )["launchPartitionBackfill"]
        assert launched["__typename"] == "LaunchBackfillSuccess", launched
        return str(launched["backfillId"])

    def backfill_end(self, backfill: str) -> str:
        """The status in which a backfill ends."""

        def finished() -> str:
            data = self.query(
                "query($id: String!) { partitionBackfillOrError(backfillId: $id) { ... on PartitionBackfill"
                " { status } } }",
                id=backfill,
            )
            status = str(data["partitionBackfillOrError"]["status"])
            return "" if status in ("REQUESTED", "COMPLETING", "CANCELING", "FAILING") else status

        return str(self.wait_for(f"backfill {backfill}", finished))

    def runs(self, **tags: str) -> list[dict[str, Any]]:
        """Runs with all these tags, newest first; `__` in a tag's name is `/`."""
        data = self.query(
            """query($tags: [ExecutionTag!]) { runsOrError(filter: {tags: $tags}) { ... on Runs { results {
              runId jobName status startTime endTime tags { key value } assetSelection { path } } } } }""",
            tags=[{"key": key.replace("__", "/"), "value": value} for key, value in tags.items()],
        )
        return list(data["runsOrError"]["results"])

    def run(self, run_id: str) -> dict[str, Any]:
        data = self.query(
            """query($id: ID!) { runOrError(runId: $id) { ... on Run { runId status startTime endTime
              tags { key value } } } }""",
            id=run_id,
        )
        return dict(data["runOrError"])

    def launch(self, snapshot: str, *assets: str, **tags: str) -> str:
        """The id of a run of these assets on one snapshot, launched as by hand; `__` in a tag's name is `/`."""
        named = {"dagster/partition": snapshot} | {key.replace("__", "/"): value for key, value in tags.items()}
        launched = self.query(
            """mutation($params: ExecutionParams!) { launchRun(executionParams: $params) { __typename
              ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }""",
            params={
                "selector": {
                    **REPOSITORY,
                    "jobName": "__ASSET_JOB",
                    "assetSelection": [{"path": [name]} for name in assets],
                    "assetCheckSelection": None,
                },
                "runConfigData": {},
                "mode": "default",
                "executionMetadata": {"tags": [{"key": key, "value": value} for key, value in named.items()]},
            },
        )["launchRun"]
        assert launched["__typename"] == "LaunchRunSuccess", launched
        return str(launched["run"]["runId"])

    def launch_job(self, job: str) -> str:
        """The id of a run of a job that belongs to no snapshot."""
        launched = self.query(
            """mutation($params: ExecutionParams!) { launchRun(executionParams: $params) { __typename
              ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }""",
            params={"selector": {**REPOSITORY, "jobName": job}, "runConfigData": {}, "mode": "default"},
        )["launchRun"]
        assert launched["__typename"] == "LaunchRunSuccess", launched
        return str(launched["run"]["runId"])

    def backfill_job(self, job: str, snapshots: Sequence[str]) -> str:
        """The id of a backfill of a job over these, as its page launches it."""
        launched = self.query(
            """mutation($params: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $params) {
              __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }""",
            params={
                "selector": {"repositorySelector": REPOSITORY, "partitionSetName": f"{job}_partition_set"},
                "partitionNames": list(snapshots),
                "title": job,
            },
        )["launchPartitionBackfill"]
        assert launched["__typename"] == "LaunchBackfillSuccess", launched
        return str(launched["backfillId"])

    def reload(self) -> None:
        """The code location anew, as its button does it: datamask.toml is read again."""
        answer = self.query(
            """mutation($name: String!) { reloadRepositoryLocation(repositoryLocationName: $name) {
              ... on WorkspaceLocationEntry { locationOrLoadError { __typename
              ... on PythonError { message } } } } }""",
            name=REPOSITORY["repositoryLocationName"],
        )["reloadRepositoryLocation"]
        assert answer["locationOrLoadError"]["__typename"] == "RepositoryLocation", answer

    def turn(self, sensor: str, *, on: bool) -> None:
        if on:
            self.query(
                "mutation($sensor: SensorSelector!) { startSensor(sensorSelector: $sensor) { __typename } }",
                sensor={**REPOSITORY, "sensorName": sensor},
            )
            return
        state = self.query(
            "query($sensor: SensorSelector!) { sensorOrError(sensorSelector: $sensor) { ... on Sensor { sensorState"
            " { id } } } }",
            sensor={**REPOSITORY, "sensorName": sensor},
        )["sensorOrError"]["sensorState"]
        stopped = self.query("mutation($id: String!) { stopSensor(id: $id) { __typename } }", id=state["id"])
        assert stopped["stopSensor"]["__typename"] == "StopSensorMutationResult", stopped

    def run_end(self, run_id: str) -> str:
        """The status in which a run ends."""

        def ended() -> str:
            status = str(self.run(run_id)["status"])
            return status if status in FINISHED else ""

        return str(self.wait_for(f"run {run_id}", ended))

    def wait_for(self, what: str, ready: Callable[[], Any]) -> Any:
        """What `ready` returns once it is true. Fails with the end of the server's log."""
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            found = ready()
            if found:
                return found
            time.sleep(2)
        raise AssertionError(f"{what}: not within {_SECONDS} s\n{self.log.read_text()[-4000:]}")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/server_info", timeout=60) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        pass
    finally:
        # the session's group holds what a stopped parent may have left behind
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(120)


@contextlib.contextmanager
def dagster_dev(folder: Path, settings: Settings, instance: Path, **environment: str) -> Iterator[Server]:
    """`dagster dev` in `folder` on a free port, its home made from the `instance` file; everything ends with the block.

    Projects are given as settings, as a person gives them: in a file.
    """
    home = folder / "home"
    home.mkdir()
    shutil.copyfile(instance, home / "dagster.yaml")
    config = write_config(settings, folder / "datamask.toml")
    port, log = free_port(), folder / "dagster_dev.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "dagster", "dev", "-w", str(REPO / "workspace.yaml"), "-p", str(port)],
            cwd=folder,
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "DAGSTER_HOME": str(home),
                "DATAMASK_CONFIG": str(config),
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                **environment,
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=hear_signals,
        )
    server = Server(f"http://127.0.0.1:{port}", settings, log, process.pid)
    try:
        server.wait_for("dagster dev", lambda: process.poll() is None and _answers(server.url))
        yield server
    finally:
        _stop(process)


@pytest.fixture(scope="session")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go: $DATAMASK_E2E_SHOTS, which `make e2e` sets, or a temporary folder."""
    folder = Path(os.environ.get("DATAMASK_E2E_SHOTS") or tmp_path_factory.mktemp("shots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """A page of headless Chromium."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="browser tests need playwright: make e2e installs it"
    )
    browser_path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser_path is None:
        pytest.skip("no Chromium on this machine: make e2e installs it")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=browser_path,
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"],
        )
        page = browser.new_page(viewport={"width": 1600, "height": 1100})
        page.set_default_timeout(1000 * _SECONDS)
        playwright.expect.set_options(timeout=1000 * _SECONDS)
        yield page
        browser.close()


def opened(page: Any, server: Server, path: str, *texts: str) -> None:
    """Open a page and wait until every text is to be seen."""
    page.goto(f"{server.url}{path}")
    for text in texts:
        page.get_by_text(text).first.wait_for()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, fitted_root: Path, labels: Path) -> Iterator[Server]:
    """`dagster dev` on three snapshots, one of them with a truncated shard; global assets fitted on disk."""
    folder = tmp_path_factory.mktemp("e2e")
    source, root = folder / "source", folder / "root"
    for snapshot in (*GOOD, POISONED):
        write_shard(source, snapshot, "000_00000", 40)
        write_shard(source, snapshot, "001_00000", 25)
    bad = source / "data" / POISONED / "001_00000.parquet"
    bad.write_bytes(bad.read_bytes()[:300])
    shutil.copytree(fitted_root, root)
    settings = settings_for(source, root, labels)
    with dagster_dev(folder, settings, REPO / "dagster_datamask" / "dagster.yaml") as server:
        yield server
