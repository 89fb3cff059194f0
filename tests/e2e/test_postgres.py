"""PostgreSQL as Dagster's storage, with the dagster.yaml of deploy/: parallel runs do not lock each other out."""

import contextlib
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import REPO, dagster_dev, free_port
from tests.project import settings_for, write_shard

pytestmark = pytest.mark.e2e
_SNAPSHOTS = tuple(f"CC-MAIN-2025-{week:02d}" for week in range(5, 55, 10))


def _programs() -> Path | None:
    """The folder of PostgreSQL's server programs: in PATH, or where Debian puts them."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return next((folder for folder in reversed(folders) if (folder / "initdb").exists()), None)


@dataclass(frozen=True)
class Postgres:
    """A server in a folder of its own, and what deploy/dagster.yaml asks the environment for."""

    environment: dict[str, str]
    # a statement's only number
    ask: Callable[[str], int]


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    psycopg2 = pytest.importorskip("psycopg2", reason="needs the extra postgres: make e2e installs it")
    programs = _programs()
    if programs is None:
        pytest.skip("no PostgreSQL on this machine: make e2e installs it")
    # the server refuses to run as root, and its user has to reach the folder
    user = None
    if os.geteuid() == 0:
        user = next(
            (name for name in ("postgres", "nobody") if name in {entry.pw_name for entry in pwd.getpwall()}), None
        )
        if user is None:
            pytest.skip("root cannot run PostgreSQL, and there is no other user")
    folder = Path(tempfile.mkdtemp(prefix="datamask-postgres-"))
    if user is not None:
        os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
    data, port = folder / "data", free_port()
    initdb = [programs / "initdb", "-D", data, "-U", "datamask", "--auth=trust", "--no-sync"]
    subprocess.run(initdb, user=user, cwd=folder, check=True, capture_output=True)
    process = subprocess.Popen(
        [programs / "postgres", "-D", data, "-p", str(port), "-k", folder, "-c", "listen_addresses=127.0.0.1"],
        user=user,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def ask(statement: str) -> int:
        connection = psycopg2.connect(host="127.0.0.1", port=port, user="datamask", dbname="postgres")
        with contextlib.closing(connection), connection.cursor() as cursor:
            cursor.execute(statement)
            return int(cursor.fetchone()[0])

    try:
        for _ in range(120):
            assert process.poll() is None, "the server ended"
            with contextlib.suppress(psycopg2.OperationalError):
                ask("SELECT 1")
                break
            time.sleep(0.5)
        yield Postgres(
            {
                "DAGSTER_PG_HOST": "127.0.0.1",
                "DAGSTER_PG_PORT": str(port),
                "DAGSTER_PG_USER": "datamask",
                "DAGSTER_PG_PASSWORD": "",
                "DAGSTER_PG_DB": "postgres",
            },
            ask,
        )
    finally:
        # a fast shutdown, which waits for no client
        process.send_signal(2)
        process.wait(30)
        shutil.rmtree(folder)


def test_parallel_runs_on_postgres(postgres: Postgres, tmp_path: Path, fitted_root: Path, labels: Path) -> None:
    source, root = tmp_path / "source", tmp_path / "root"
    for snapshot in _SNAPSHOTS:
        write_shard(source, snapshot, "000_00000", 40)
    shutil.copytree(fitted_root, root)
    settings = settings_for(source, root, labels)
    with dagster_dev(tmp_path, settings, REPO / "deploy" / "dagster.yaml", **postgres.environment) as server:
        server.add_partitions(*_SNAPSHOTS)
        backfill = server.backfill("in parallel", ("raw_shards", "dclm_scores", "wiki_scores"), _SNAPSHOTS)
        assert server.backfill_end(backfill) == "COMPLETED_SUCCESS"
        runs = server.runs(dagster__backfill=backfill)
        assert [run["status"] for run in runs] == ["SUCCESS"] * len(_SNAPSHOTS)
        # some two ran at one time, which is what SQLite's dagster.yaml keeps rare
        spans = sorted((run["startTime"], run["endTime"]) for run in runs)
        assert any(later < end for (_, end), (later, _) in itertools.pairwise(spans))
        for snapshot in _SNAPSHOTS:
            assert server.store.current("wiki_scores", snapshot).rows == 40
        text = server.log.read_text().lower()
        assert "is locked" not in text and "operationalerror" not in text
    assert postgres.ask("SELECT count(*) FROM runs") == len(_SNAPSHOTS)
    assert not list((tmp_path / "home").rglob("*.db")), "history on disk: SQLite was used"
