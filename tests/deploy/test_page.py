"""docs/cluster.md: commands run where they need no cluster; the others name files, versions and options that exist."""

import itertools
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner as ClickRunner
from dagster._cli import create_dagster_cli
from dagster._daemon.cli import create_dagster_daemon_cli
from dagster_webserver.cli import dagster_webserver
from typer.testing import CliRunner

from dagster_datamask.cli import app
from dagster_datamask.settings import load_settings
from dagster_datamask.stages.base import STAGES, check_requests
from tests.conftest import SNAPSHOTS
from tests.deploy.chart import Chart, Values
from tests.deploy.conftest import Postgres
from tests.deploy.test_postgres import home_of
from tests.project import Project
from tests.s3 import S3Server, s3, s3_process
from tests.test_docs import commands, filled, write_workplace

__all__ = ["s3", "s3_process"]

REPO = Path(__file__).parents[2]
PAGE = "docs/cluster.md"
LINES = [shlex.split(line) for line in commands(PAGE)]


def of(*programs: str) -> list[list[str]]:
    return [line for line in LINES if line[0] in programs]


def test_every_command_is_one_that_is_tested() -> None:
    known = {"datamask", "dagster", "dagster-daemon", "dagster-webserver", "pg_dump", "kubectl", "helm", "docker"}
    assert {line[0] for line in LINES} == known


@pytest.mark.slow
def test_what_it_says_of_datamask_runs(
    project: Project, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From top to bottom, on a folder and on a bucket of a real S3 server."""
    words = write_workplace(tmp_path, project.settings) | {"BUCKET": s3.url, "SNAPSHOT": SNAPSHOTS[0]}
    monkeypatch.chdir(tmp_path)
    for name, value in {"DAGSTER_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert of("datamask")
    for line in of("datamask"):
        _, *argv = (filled(word, words) for word in line)
        result = CliRunner().invoke(app, argv, catch_exceptions=False)
        assert result.exit_code == 0, f"{line}\n{result.stderr}"
    assert any("/manifest" in name or "fineweb_mask_manifest" in name for name in s3.client.find("bucket/root"))


def test_what_it_says_of_the_history_runs(postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in postgres.environment.items():
        monkeypatch.setenv(name, value)
        # as PostgreSQL's own programs are told
        monkeypatch.setenv(name.replace("DAGSTER_PG_DB", "PGDATABASE").replace("DAGSTER_PG_", "PG"), value)
    monkeypatch.setenv("DAGSTER_HOME", home_of(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for program, *argv in of("dagster"):
        result = ClickRunner().invoke(create_dagster_cli(), argv, catch_exceptions=False)
        assert result.exit_code == 0, f"{program} {argv}\n{result.output}"
    (dump,) = of("pg_dump")
    subprocess.run(dump, check=True, timeout=600)
    assert postgres.ask("SELECT \"limit\" FROM concurrency_limits WHERE concurrency_key = 'gpu'") == 4
    assert (tmp_path / "history.dump").stat().st_size > 0


def test_what_it_says_of_long_running_programs_is_known_to_them() -> None:
    commands_of = {
        "dagster-daemon": create_dagster_daemon_cli().commands["run"],
        "dagster-webserver": dagster_webserver,
    }
    for program, *argv in of(*commands_of):
        options = {name for option in commands_of[program].params for name in option.opts}
        assert {word for word in argv if word.startswith("-")} <= options
        assert all((REPO / word).exists() for word in argv if word.endswith(".yaml"))


def test_what_it_makes_for_kubernetes_is_what_kubernetes_makes(tmp_path: Path) -> None:
    created = {
        (line[2], line[3] if line[2] == "configmap" else line[4]) for line in of("kubectl") if line[1] == "create"
    }
    wanted = {("secret", "dagster-postgresql-secret"), ("secret", "datamask-secrets"), ("secret", "datamask-ray-token")}
    wanted |= {
        ("configmap", "datamask-settings"),
        *((kind, "datamask-oauth2-proxy") for kind in ("secret", "configmap")),
    }
    assert created == wanted
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    shutil.copytree(REPO / "deploy", tmp_path / "deploy")
    for name in ("password.txt", "token.txt"):
        (tmp_path / name).write_text("x")
    for name in ("secrets.env", "oauth2-proxy.env"):
        (tmp_path / name).write_text("NAME=x\n")
    for line in of("kubectl"):
        if line[1] == "create":
            subprocess.run(
                [*line, "--dry-run=client", "-o", "yaml"], cwd=tmp_path, check=True, capture_output=True, timeout=600
            )


def test_what_it_gives_to_helm_kubectl_and_docker_is_there() -> None:
    chart = Chart(Values.read())
    image = chart.pods["code"]["spec"]["containers"][0]["image"]
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    (pinned,) = (name.partition("==")[2] for name in project["dependencies"] if name.startswith("dagster=="))
    for line in of("helm", "kubectl", "docker"):
        pairs = list(itertools.pairwise(line))
        assert all((REPO / name).exists() for name in [value for flag, value in pairs if flag == "-f"])
        assert {value for flag, value in pairs if flag == "--version"} <= {pinned}
        assert {value for flag, value in pairs if flag == "-t"} <= {image}
        if line[:2] == ["docker", "push"]:
            assert line[2] == image
        if line[1] == "port-forward":
            assert line[2:] == [
                f"service/{chart.service['metadata']['name']}",
                f"3000:{chart.service['spec']['ports'][0]['port']}",
            ]


def test_its_settings_are_settings(tmp_path: Path) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", (REPO / PAGE).read_text("utf-8"), re.DOTALL)
    assert blocks
    for number, block in enumerate(blocks):
        path = tmp_path / f"{number}.toml"
        path.write_text(block)
        settings = load_settings(str(path), env={})
        check_requests(settings)
        assert set(settings.compute.requests) <= set(STAGES)


def test_it_names_every_file_of_the_folder() -> None:
    page = (REPO / PAGE).read_text("utf-8")
    files = {path.name for path in (REPO / "deploy").iterdir()} - {"Dockerfile.dockerignore"}
    assert [name for name in sorted(files) if f"`{name}`" not in page and f"deploy/{name}" not in page] == []
