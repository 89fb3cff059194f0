"""A real Dagster: webserver, daemon and code server as processes, on the small project's settings file."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dagster_datamask.settings import Settings
from tests.project import settings_for, write_shard
from tests.test_cli import write_config

REPO = Path(__file__).parents[2]
GOOD = ("CC-MAIN-2024-10", "CC-MAIN-2024-18")
POISONED = "CC-MAIN-2024-22"
_START_SECONDS = 180


@dataclass(frozen=True)
class Server:
    """A running `dagster dev` and the project it serves."""

    url: str
    settings: Settings
    log: Path

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
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.loads(response.read())
        assert not answer.get("errors"), answer["errors"]
        return answer["data"]

    def wait_for(self, what: str, ready: Callable[[], Any], seconds: float = 300) -> Any:
        """What `ready` returns once it is true. Fails with the end of the server's log."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = ready()
            if found:
                return found
            time.sleep(2)
        raise AssertionError(f"{what}: not within {seconds:.0f} s\n{self.log.read_text()[-4000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/server_info", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _default_signals() -> None:
    # a child of a non-interactive shell inherits SIGINT ignored, and Dagster hands SIGTERM to SIGINT's handler
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


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
        process.wait(10)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, fitted_root: Path, labels: Path) -> Iterator[Server]:
    """`dagster dev` on three snapshots, one of them with a truncated shard; global assets fitted on disk."""
    folder = tmp_path_factory.mktemp("e2e")
    source, root, home = folder / "source", folder / "root", folder / "home"
    for snapshot in (*GOOD, POISONED):
        write_shard(source, snapshot, "000_00000", 40)
        write_shard(source, snapshot, "001_00000", 25)
    bad = source / "data" / POISONED / "001_00000.parquet"
    bad.write_bytes(bad.read_bytes()[:300])
    shutil.copytree(fitted_root, root)
    home.mkdir()
    shutil.copyfile(REPO / "dagster_datamask" / "dagster.yaml", home / "dagster.yaml")
    settings = settings_for(source, root, labels)
    config = write_config(settings, folder / "datamask.toml")
    port, log = _free_port(), folder / "dagster_dev.log"
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
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_default_signals,
        )
    server = Server(f"http://127.0.0.1:{port}", settings, log)
    try:
        server.wait_for("dagster dev", lambda: process.poll() is None and _answers(server.url), seconds=_START_SECONDS)
        yield server
    finally:
        _stop(process)
