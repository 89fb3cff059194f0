"""The two dagster.yaml: the one for a machine and the one for PostgreSQL, which differ in little."""

from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).parents[2]
ONE_MACHINE = REPO / "dagster_datamask" / "dagster.yaml"
POSTGRES = REPO / "deploy" / "dagster.yaml"


def read(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text("utf-8")))


def test_both_free_the_slots_of_killed_runs_and_leave_failed_steps_alone() -> None:
    for path in (ONE_MACHINE, POSTGRES):
        settings = read(path)
        assert settings["run_monitoring"]["enabled"] is True
        assert settings["run_monitoring"]["free_slots_after_run_end_seconds"] == 30
        assert settings["run_retries"]["retry_on_asset_or_op_failure"] is False
        assert settings["concurrency"]["pools"] == {"granularity": "op", "default_limit": 1}


def test_they_differ_in_storage_and_in_how_much_goes_at_a_time() -> None:
    one, many = read(ONE_MACHINE), read(POSTGRES)
    assert one["concurrency"]["runs"].pop("max_concurrent_runs") < many["concurrency"]["runs"].pop(
        "max_concurrent_runs"
    )
    assert many["storage"]["postgres"]["postgres_db"]["scheme"] == "postgresql+psycopg2"
    only_there = {"storage", "sensors", "backfills"}
    assert {key: value for key, value in many.items() if key not in only_there} == one


def test_no_credential_stands_in_the_file() -> None:
    database = read(POSTGRES)["storage"]["postgres"]["postgres_db"]
    assert all(set(database[key]) == {"env"} for key in database if key != "scheme")
