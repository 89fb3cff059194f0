"""The whole system as it is used: `dagster dev`, a backfill with one bad snapshot, the sensor, and the pages of the UI.

Tests run in file order on one server: the pages show what the backfill and the sensor did.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import FINISHED, GOOD, POISONED, REPOSITORY, Server, opened
from tests.project import SNAPSHOT_STAGES, write_shard

playwright = pytest.importorskip("playwright.sync_api", reason="browser tests need playwright: make e2e installs it")
pytestmark = pytest.mark.e2e

_LOCATION = REPOSITORY["repositoryLocationName"]


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


def materialise_dialog(page: Any, server: Server, asset: str) -> Any:
    """The dialog that "Materialize…" opens on an asset's page."""
    page.goto(f"{server.url}/assets/{asset}?view=partitions")
    page.get_by_role("button", name="Materialize").first.click()
    dialog = page.get_by_role("dialog")
    playwright.expect(dialog.get_by_text("Partition selection")).to_be_visible()
    return dialog


def backfills(server: Server) -> list[dict[str, Any]]:
    """All backfills, newest first."""
    data = server.query("{ partitionBackfillsOrError { ... on PartitionBackfills { results { id title } } } }")
    return list(data["partitionBackfillsOrError"]["results"])


class TestServer:
    def test_the_location_loads_under_its_one_name(self, server: Server) -> None:
        data = server.query(
            """{ workspaceOrError { ... on Workspace { locationEntries { name locationOrLoadError { __typename
              ... on PythonError { message } } } } } }"""
        )
        (entry,) = data["workspaceOrError"]["locationEntries"]
        assert entry["name"] == _LOCATION
        assert entry["locationOrLoadError"]["__typename"] == "RepositoryLocation", entry


class TestByHand:
    """What a person does with the mouse."""

    def test_a_partition_is_materialised(self, page: Any, server: Server, shots: Path) -> None:
        server.add_partitions(*GOOD, POISONED)
        dialog = materialise_dialog(page, server, "raw_shards")
        page.get_by_text("Select a partition or create one").click()
        page.keyboard.type(GOOD[0])
        page.get_by_role("menuitem").filter(has_text=GOOD[0]).first.click()
        page.keyboard.press("Escape")
        launch = dialog.get_by_role("button", name="Launch 1 run")
        playwright.expect(launch).to_be_enabled()
        page.wait_for_timeout(500)
        page.screenshot(path=shots / "01_materialise_a_partition.png")
        launch.click()
        (run,) = server.wait_for("the run", lambda: server.runs(dagster__partition=GOOD[0]))
        assert server.run_end(run["runId"]) == "SUCCESS"
        assert materialised(server, "raw_shards") == {GOOD[0]}

    def test_a_backfill_is_launched(self, page: Any, server: Server, shots: Path) -> None:
        dialog = materialise_dialog(page, server, "raw_shards")
        dialog.get_by_role("button", name="All", exact=True).click()
        launch = dialog.get_by_role("button", name="Launch backfill")
        playwright.expect(launch).to_be_enabled()
        page.screenshot(path=shots / "02_launch_a_backfill.png")
        launch.click()
        (backfill,) = server.wait_for("the backfill", lambda: backfills(server))
        assert server.backfill_end(backfill["id"]) == "COMPLETED_FAILED"
        assert materialised(server, "raw_shards") == set(GOOD)
        opened(page, server, f"/runs/b/{backfill['id']}", "raw_shards", "Failed")
        page.wait_for_timeout(1500)
        page.screenshot(path=shots / "03_backfill_with_one_poisoned_snapshot.png")


class TestServerAtWork:
    def test_a_backfill_over_a_bad_snapshot_finishes_the_rest(self, server: Server) -> None:
        snapshots = (*GOOD, POISONED)
        backfill = server.backfill("three snapshots, one of them poisoned", SNAPSHOT_STAGES, snapshots)
        assert server.backfill_end(backfill) == "COMPLETED_FAILED"
        for name in SNAPSHOT_STAGES:
            assert materialised(server, name) == set(GOOD), name
        (failed,) = server.runs(dagster__backfill=backfill, dagster__partition=POISONED)
        assert failed["status"] == "FAILURE"
        step, message = failure_of(server, failed["runId"])
        assert step == "raw_shards"
        assert f"data/{POISONED}/001_00000.parquet" in message and "is not readable parquet" in message
        runs = [
            run for snapshot in GOOD for run in server.runs(dagster__backfill=backfill, dagster__partition=snapshot)
        ]
        assert [run["status"] for run in runs] == ["SUCCESS", "SUCCESS"]

    def test_the_sensor_is_turned_on_and_runs_a_snapshot_whose_shards_land(
        self, page: Any, server: Server, shots: Path
    ) -> None:
        fresh = "CC-MAIN-2024-26"
        opened(page, server, f"/locations/{_LOCATION}/sensors/new_shards", "new_shards")
        switch = page.locator("label:has(input[type=checkbox])").first
        switch.click()
        playwright.expect(page.locator("input[type=checkbox]").first).to_be_checked()
        write_shard(server.source, fresh, "000_00000", 40)

        def done() -> list[dict[str, Any]]:
            return [run for run in server.runs(dagster__partition=fresh) if run["status"] in FINISHED]

        (run,) = server.wait_for("the sensor's run", done)
        tags = {tag["key"]: tag["value"] for tag in run["tags"]}
        assert run["status"] == "SUCCESS" and run["jobName"] == "full"
        assert tags["dagster/sensor_name"] == "new_shards"
        assert tags["dagster/run_key"] == f"{fresh}:{tags['datamask/listing']}"
        assert fresh in materialised(server, "fineweb_mask")
        opened(page, server, f"/locations/{_LOCATION}/sensors/new_shards", "new_shards", "Adds a partition")
        page.wait_for_timeout(1500)
        page.screenshot(path=shots / "04_sensor_and_its_ticks.png")
        page.locator("label:has(input[type=checkbox])").first.click()
        playwright.expect(page.locator("input[type=checkbox]").first).not_to_be_checked()
        opened(page, server, f"/runs/{run['runId']}", "RUN_SUCCESS")
        page.wait_for_timeout(1500)
        page.screenshot(path=shots / "05_run_of_the_shard_that_landed.png")


class TestPages:
    def test_the_asset_graph(self, page: Any, server: Server, shots: Path) -> None:
        opened(page, server, "/asset-groups")
        for group in ("documents", "quality", "embeddings", "selection", "manifest", "global"):
            playwright.expect(page.get_by_text(group, exact=True).first).to_be_visible()
        page.wait_for_timeout(2000)
        page.screenshot(path=shots / "06_asset_graph.png")

    def test_the_mask_with_its_numbers_and_its_figure(self, page: Any, server: Server, shots: Path) -> None:
        opened(page, server, f"/assets/datamask_masks?view=partitions&partition={GOOD[0]}", "upper_bound", "gap")
        page.screenshot(path=shots / "07_mask_partition.png")
        page.get_by_text("[Show Markdown]").first.click()
        image = page.locator("img[src^='data:image/png;base64,']").first
        playwright.expect(image).to_be_visible()
        assert image.evaluate("image => image.complete && image.naturalWidth") > 300
        page.screenshot(path=shots / "08_mask_figure.png")
        page.keyboard.press("Escape")

    def test_the_overview_of_an_asset(self, page: Any, server: Server, shots: Path) -> None:
        opened(page, server, "/assets/fineweb_mask_manifest", "One row per readable input row", "datamask")
        page.wait_for_timeout(2000)
        page.screenshot(path=shots / "09_manifest_overview.png", full_page=True)

    def test_the_checks(self, page: Any, server: Server, shots: Path) -> None:
        opened(page, server, "/assets/datamask_masks?view=checks", "budget_met_exactly", "value_below_bound")
        page.screenshot(path=shots / "10_checks.png")

    def test_the_backfill_shows_which_snapshot_failed(self, page: Any, server: Server, shots: Path) -> None:
        backfill = next(b for b in backfills(server) if b["title"] == "three snapshots, one of them poisoned")
        opened(page, server, f"/runs/b/{backfill['id']}", "raw_shards", "Failed")
        page.wait_for_timeout(1500)
        page.screenshot(path=shots / "11_backfill.png")

    def test_raw_shards_tells_what_the_machine_is(self, page: Any, server: Server, shots: Path) -> None:
        opened(page, server, f"/assets/raw_shards?view=partitions&partition={GOOD[0]}", "doctor")
        last = page.get_by_text("wiki as fitted").first
        last.scroll_into_view_if_needed()
        playwright.expect(last).to_be_visible()
        page.screenshot(path=shots / "14_doctor_of_raw_shards.png")

    def test_the_failed_run_names_the_shard(self, page: Any, server: Server, shots: Path) -> None:
        run = server.runs(dagster__partition=POISONED)[-1]
        opened(page, server, f"/runs/{run['runId']}", "STEP_FAILURE")
        playwright.expect(page.get_by_text("is not readable parquet").first).to_be_visible()
        page.screenshot(path=shots / "12_failed_run.png")

    def test_the_launchpad_shows_settings_with_their_defaults(self, page: Any, server: Server, shots: Path) -> None:
        opened(page, server, f"/locations/{_LOCATION}/jobs/select/playground", "Launch Run")
        page.get_by_text("Scaffold missing config").or_(page.get_by_text("datamask_masks")).first.wait_for()
        editor = page.locator(".CodeMirror").first
        for setting in ("lambda", "budget"):
            playwright.expect(editor).to_contain_text(setting)
        page.screenshot(path=shots / "13_launchpad.png")
