"""The whole system as it is used: `dagster dev`, a backfill with one bad snapshot, the sensor, and the pages of the UI.

Tests run in file order on one server: the pages show what the backfill and the sensor did.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import GOOD, POISONED, Server
from tests.project import SNAPSHOT_STAGES, write_shard

playwright = pytest.importorskip("playwright.sync_api", reason="browser tests need playwright: make e2e installs it")
pytestmark = pytest.mark.e2e

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_LOCATION = "dagster_datamask"
_REPOSITORY = {"repositoryName": "__repository__", "repositoryLocationName": _LOCATION}
_FINISHED = ("SUCCESS", "FAILURE", "CANCELED")


def runs_of(server: Server, snapshot: str) -> list[dict[str, Any]]:
    """Runs of a snapshot, newest first."""
    data = server.query(
        """query($snapshot: String!) {
          runsOrError(filter: {tags: [{key: "dagster/partition", value: $snapshot}]}) {
            ... on Runs { results { runId jobName status tags { key value } } } } }""",
        snapshot=snapshot,
    )
    return data["runsOrError"]["results"]


def failure_of(server: Server, run_id: str) -> tuple[str, str]:
    """(step, message) of the run's failed step, as the UI shows it."""
    data = server.query(
        """query($run: ID!) { logsForRun(runId: $run) { ... on EventConnection { events {
          __typename ... on ExecutionStepFailureEvent { stepKey failureMetadata { description } } } } } }""",
        run=run_id,
    )
    (event,) = [e for e in data["logsForRun"]["events"] if e["__typename"] == "ExecutionStepFailureEvent"]
    return event["stepKey"], event["failureMetadata"]["description"]


def materialised(server: Server, asset: str) -> set[str]:
    """Partitions of an asset with a materialisation."""
    data = server.query(
        """query($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode {
          assetPartitionStatuses { ... on DefaultPartitionStatuses { materializedPartitions } } } } }""",
        key={"path": [asset]},
    )
    return set(data["assetNodeOrError"]["assetPartitionStatuses"]["materializedPartitions"])


class TestServer:
    def test_the_location_loads_under_its_one_name(self, server: Server) -> None:
        data = server.query(
            """{ workspaceOrError { ... on Workspace { locationEntries { name locationOrLoadError { __typename
              ... on PythonError { message } } } } } }"""
        )
        (entry,) = data["workspaceOrError"]["locationEntries"]
        assert entry["name"] == _LOCATION
        assert entry["locationOrLoadError"]["__typename"] == "RepositoryLocation", entry

    def test_a_backfill_over_a_bad_snapshot_finishes_the_rest(self, server: Server) -> None:
        for snapshot in (*GOOD, POISONED):
            added = server.query(
                """mutation($repository: RepositorySelector!, $key: String!) {
                  addDynamicPartition(repositorySelector: $repository, partitionsDefName: "cc_snapshot",
                                      partitionKey: $key) { __typename } }""",
                repository=_REPOSITORY,
                key=snapshot,
            )
            assert added["addDynamicPartition"]["__typename"] == "AddDynamicPartitionSuccess"
        launched = server.query(
            """mutation($params: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $params) {
              __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }""",
            params={
                "assetSelection": [{"path": [name]} for name in SNAPSHOT_STAGES],
                "partitionNames": [*GOOD, POISONED],
                "title": "three snapshots, one of them poisoned",
            },
        )
        backfill = launched["launchPartitionBackfill"]["backfillId"]

        def finished() -> str:
            data = server.query(
                "query($id: String!) { partitionBackfillOrError(backfillId: $id) { ... on PartitionBackfill"
                " { status } } }",
                id=backfill,
            )
            status = data["partitionBackfillOrError"]["status"]
            return "" if status in ("REQUESTED", "COMPLETING", "CANCELING", "FAILING") else status

        assert server.wait_for("the backfill", finished, 600) == "COMPLETED_FAILED"
        for name in SNAPSHOT_STAGES:
            assert materialised(server, name) == set(GOOD), name
        (failed,) = runs_of(server, POISONED)
        assert failed["status"] == "FAILURE"
        step, message = failure_of(server, failed["runId"])
        assert step == "raw_shards"
        assert f"data/{POISONED}/001_00000.parquet" in message and "is not readable parquet" in message
        assert [run["status"] for snapshot in GOOD for run in runs_of(server, snapshot)] == ["SUCCESS", "SUCCESS"]

    def test_the_sensor_runs_a_snapshot_whose_shards_land(self, server: Server) -> None:
        fresh = "CC-MAIN-2024-26"
        write_shard(server.source, fresh, "000_00000", 40)
        started = server.query(
            """mutation($sensor: SensorSelector!) { startSensor(sensorSelector: $sensor) { __typename
              ... on Sensor { sensorState { status } } ... on PythonError { message } } }""",
            sensor={**_REPOSITORY, "sensorName": "new_shards"},
        )
        assert started["startSensor"]["__typename"] == "Sensor", started

        def done() -> list[dict[str, Any]]:
            return [run for run in runs_of(server, fresh) if run["status"] in _FINISHED]

        (run,) = server.wait_for("the sensor's run", done, 400)
        tags = {tag["key"]: tag["value"] for tag in run["tags"]}
        assert run["status"] == "SUCCESS" and run["jobName"] == "full"
        assert tags["dagster/sensor_name"] == "new_shards"
        assert tags["dagster/run_key"] == f"{fresh}:{tags['datamask/listing']}"
        assert fresh in materialised(server, "fineweb_mask")
        stopped = server.query(
            """mutation($sensor: String!) { stopSensor(id: $sensor) { __typename } }""",
            sensor=self.sensor_id(server),
        )
        assert stopped["stopSensor"]["__typename"] == "StopSensorMutationResult", stopped

    def sensor_id(self, server: Server) -> str:
        data = server.query(
            "query($sensor: SensorSelector!) { sensorOrError(sensorSelector: $sensor) { ... on Sensor { sensorState"
            " { id } } } }",
            sensor={**_REPOSITORY, "sensorName": "new_shards"},
        )
        return data["sensorOrError"]["sensorState"]["id"]


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go: $DATAMASK_E2E_SHOTS, or a temporary folder."""
    folder = Path(os.environ.get("DATAMASK_E2E_SHOTS") or tmp_path_factory.mktemp("shots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def page(server: Server) -> Iterator[Any]:
    browser_path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser_path is None:
        pytest.skip("no Chromium on this machine: make e2e installs it")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=browser_path,
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"],
        )
        page = browser.new_page(viewport={"width": 1600, "height": 1100})
        page.set_default_timeout(60_000)
        yield page
        browser.close()


def opened(page: Any, server: Server, path: str, *texts: str) -> None:
    """Open a page and wait until every text is to be seen."""
    page.goto(f"{server.url}{path}")
    for text in texts:
        playwright.expect(page.get_by_text(text).first).to_be_visible(timeout=60_000)


class TestPages:
    def test_the_asset_graph(self, page: Any, server: Server, shots: Path) -> None:
        opened(page, server, "/asset-groups")
        for group in ("documents", "quality", "embeddings", "selection", "manifest", "global"):
            playwright.expect(page.get_by_text(group, exact=True).first).to_be_visible()
        page.wait_for_timeout(2000)
        page.screenshot(path=shots / "1_asset_graph.png")

    def test_the_mask_with_its_numbers_and_its_figure(self, page: Any, server: Server, shots: Path) -> None:
        opened(page, server, f"/assets/datamask_masks?view=partitions&partition={GOOD[0]}", "upper_bound", "gap")
        page.screenshot(path=shots / "2_mask_partition.png")
        page.get_by_text("[Show Markdown]").first.click()
        image = page.locator("img[src^='data:image/png;base64,']").first
        playwright.expect(image).to_be_visible()
        assert image.evaluate("image => image.complete && image.naturalWidth") > 300
        page.screenshot(path=shots / "3_mask_figure.png")
        page.keyboard.press("Escape")

    def test_the_overview_of_an_asset(self, page: Any, server: Server, shots: Path) -> None:
        opened(page, server, "/assets/fineweb_mask_manifest", "One row per readable input row", "datamask")
        page.wait_for_timeout(2000)
        page.screenshot(path=shots / "4_manifest_overview.png", full_page=True)

    def test_the_checks(self, page: Any, server: Server, shots: Path) -> None:
        opened(page, server, "/assets/datamask_masks?view=checks", "budget_met_exactly", "value_below_bound")
        page.screenshot(path=shots / "5_checks.png")

    def test_the_backfill_shows_which_snapshot_failed(self, page: Any, server: Server, shots: Path) -> None:
        (backfill,) = server.query("{ partitionBackfillsOrError { ... on PartitionBackfills { results { id } } } }")[
            "partitionBackfillsOrError"
        ]["results"]
        opened(page, server, f"/runs/b/{backfill['id']}", "raw_shards", "Failed")
        page.wait_for_timeout(1500)
        page.screenshot(path=shots / "6_backfill.png")

    def test_the_failed_run_names_the_shard(self, page: Any, server: Server, shots: Path) -> None:
        run = runs_of(server, POISONED)[-1]
        opened(page, server, f"/runs/{run['runId']}", "STEP_FAILURE")
        playwright.expect(page.get_by_text("is not readable parquet").first).to_be_visible()
        page.screenshot(path=shots / "7_failed_run.png")

    def test_the_launchpad_shows_settings_with_their_defaults(self, page: Any, server: Server, shots: Path) -> None:
        opened(page, server, f"/locations/{_LOCATION}/jobs/select/playground", "Launch Run")
        page.get_by_text("Scaffold missing config").or_(page.get_by_text("datamask_masks")).first.wait_for()
        page.wait_for_timeout(3000)
        page.screenshot(path=shots / "8_launchpad.png")
        shown = page.locator(".CodeMirror").first.inner_text()
        assert "lambda" in shown and "budget" in shown, shown

    def test_the_sensor_and_its_ticks(self, page: Any, server: Server, shots: Path) -> None:
        opened(page, server, f"/locations/{_LOCATION}/sensors/new_shards", "new_shards", "Adds a partition")
        page.wait_for_timeout(1500)
        page.screenshot(path=shots / "9_sensor.png")
