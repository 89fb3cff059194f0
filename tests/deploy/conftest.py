"""A real PostgreSQL, in a folder of its own, with an empty database for every test."""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dagster_datamask.keyed import digest
from tests.ports import free_port


def _programs() -> Path | None:
    """The folder of PostgreSQL's server programs: in PATH, or where Debian puts them."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return next((folder for folder in reversed(folders) if (folder / "initdb").exists()), None)


@dataclass(frozen=True)
class Postgres:
    """An empty database, and what deploy/dagster.yaml asks the environment for."""

    environment: dict[str, str]

    def ask(self, statement: str) -> int:
        """A statement's only number."""
        with self._cursor() as cursor:
            cursor.execute(statement)
            return int(cursor.fetchone()[0])

    def tell(self, statement: str) -> None:
        with self._cursor() as cursor:
            cursor.execute(statement)

    @contextlib.contextmanager
    def _cursor(self) -> Iterator[Any]:
        psycopg2 = pytest.importorskip("psycopg2", reason="needs the extra postgres")
        host, port, user, _, database = self.environment.values()
        connection = psycopg2.connect(host=host, port=port, user=user, dbname=database)
        # CREATE DATABASE refuses to be part of a transaction
        connection.autocommit = True
        with contextlib.closing(connection), connection.cursor() as cursor:
            yield cursor


def _database(port: int, name: str) -> Postgres:
    return Postgres(
        {
            "DAGSTER_PG_HOST": "127.0.0.1",
            "DAGSTER_PG_PORT": str(port),
            "DAGSTER_PG_USER": "datamask",
            "DAGSTER_PG_PASSWORD": "",
            "DAGSTER_PG_DB": name,
        }
    )


@pytest.fixture(scope="session")
def server() -> Iterator[int]:
    """The port of a server of this session's own."""
    psycopg2 = pytest.importorskip("psycopg2", reason="needs the extra postgres")
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
    try:
        for _ in range(600):
            assert process.poll() is None, "the server ended"
            with contextlib.suppress(psycopg2.OperationalError):
                _database(port, "postgres").ask("SELECT 1")
                break
            time.sleep(0.5)
        yield port
    finally:
        # a fast shutdown, which waits for no client
        process.send_signal(signal.SIGINT)
        process.wait(300)
        shutil.rmtree(folder)


@pytest.fixture
def postgres(server: int, request: pytest.FixtureRequest) -> Postgres:
    """An empty database of the test's own."""
    name = f"test_{digest(request.node.name, size=8).hex()}"
    _database(server, "postgres").tell(f"CREATE DATABASE {name}")
    return _database(server, name)
