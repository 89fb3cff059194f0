"""The documentation tells the truth: its commands run, its settings are all there, its files exist."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from dagster_datamask.cli import app
from dagster_datamask.settings import PROFILES, Settings, section_models
from dagster_datamask.shards.schemas import DECISIONS
from dagster_datamask.stages.sql import VIEWS
from tests.conftest import SNAPSHOTS
from tests.project import SNAPSHOT_STAGES, Project, settings_for

REPO = Path(__file__).parents[1]
GUIDES = (
    "docs/first-run.md",
    "docs/new-snapshot.md",
    "docs/tuning.md",
    "docs/choosing-a-solver.md",
    "docs/classifiers.md",
    "docs/manifest.md",
    "docs/recovering.md",
    "docs/export.md",
    "docs/reports.md",
    "docs/cleaning.md",
    "docs/baselines.md",
)
PAGES = tuple(str(path.relative_to(REPO)) for folder in (REPO, REPO / "docs") for path in sorted(folder.glob("*.md")))


def commands(page: str) -> list[str]:
    """Lines of the page's bash blocks, comments stripped."""
    blocks = re.findall(r"```bash\n(.*?)```", (REPO / page).read_text("utf-8"), re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def test_every_setting_is_documented_with_its_defaults() -> None:
    page = (REPO / "docs/settings.md").read_text("utf-8")
    for section, model in section_models().items():
        for attribute, field in model.model_fields.items():
            key = field.alias or attribute
            demo = PROFILES["demo"].get(section, {}).get(key)
            shown = "" if demo is None else f"`{json.dumps(demo)}`"
            assert f"| `{key}` | `{json.dumps(field.default)}` | {shown} |" in page, f"{section}.{key}"


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_exist(page: str) -> None:
    path = REPO / page
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text("utf-8")):
        if "://" in target:
            continue
        file, _, heading = target.partition("#")
        there = path.parent / file if file else path
        assert there.exists(), target
        assert not heading or heading in anchors(there), target


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_page_about_the_manifest_names_every_view_and_every_decision() -> None:
    page = (REPO / "docs/manifest.md").read_text("utf-8")
    named = {view for view in VIEWS if not view.startswith("baseline_")} | set(DECISIONS)
    assert [name for name in sorted(named) if f"`{name}`" not in page] == []


def test_make_targets_named_in_the_pages_exist() -> None:
    named = {c.split()[1] for page in PAGES for c in commands(page) if c.startswith("make ")}
    makefile = (REPO / "Makefile").read_text("utf-8")
    assert named >= {"demo", "dev", "test"}
    assert [t for t in sorted(named) if not re.search(rf"^{t}:", makefile, re.MULTILINE)] == []


def test_python_in_the_page_runs_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (REPO / "docs/selection.md").read_text("utf-8"), re.DOTALL)
    assert len([line for line in block.splitlines() if line]) <= 12
    exec(block, {})
    told = capsys.readouterr().out
    assert told.startswith("100 kept, value 0.2")
    assert float(told.split("within ")[1].split()[0]) <= 1e-3


def write_workplace(folder: Path, settings: Settings) -> dict[str, str]:
    """documents.parquet and datamask.toml, as who follows a page has them; returns what its capital words stand for."""
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(50, 8)).astype(np.float32)
    table = pa.table(
        {
            "id": [f"d{k}" for k in range(50)],
            "score": rng.random(50),
            "token_count": rng.integers(1000, 5000, 50),
            "source": [("web", "books", "code")[k % 3] for k in range(50)],
            "embedding": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 8),
        }
    )
    pq.write_table(table, folder / "documents.parquet")
    toml = ["profile = 'demo'"]
    for section in ("source", "storage", "score", "embed", "cluster", "select"):
        toml.append(f"[{section}]")
        for key, value in getattr(settings, section).model_dump(by_alias=True, exclude_defaults=True).items():
            toml.append(f"{key} = {json.dumps(value)}")
    (folder / "datamask.toml").write_text("\n".join(toml), "utf-8")
    return {"SOURCE": settings.source.url, "ROOT": settings.storage.root, "SNAPSHOT": SNAPSHOTS[0]}


def filled(text: str, words: dict[str, str]) -> str:
    return re.sub(rf"\b({'|'.join(words)})\b", lambda found: words[found[0]], text)


@pytest.mark.parametrize("page", ["README.md", "docs/own-data.md", "docs/selection.md"])
def test_commands_run_as_written(page: str, project: Project, tmp_path: Path) -> None:
    words = write_workplace(tmp_path, project.settings)
    run = [c for c in commands(page) if c.startswith("datamask ")]
    assert run
    for command in run:
        argv = [words.get(word, word) for word in shlex.split(command)]
        done = subprocess.run(
            [sys.executable, "-m", "dagster_datamask.cli", *argv[1:]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stderr[-2000:]}"


@pytest.fixture(scope="module")
def finished_root(
    tmp_path_factory: pytest.TempPathFactory, small_source: Path, fitted_root: Path, labels: Path
) -> Path:
    """A root with both snapshots finished, reports apart. Copy it, never write into it."""
    root = tmp_path_factory.mktemp("guides") / "root"
    shutil.copytree(fitted_root, root)
    project = Project(settings_for(small_source, root, labels))
    for snapshot in SNAPSHOTS:
        for name in SNAPSHOT_STAGES[: SNAPSHOT_STAGES.index("fineweb_mask") + 1]:
            project.stage(name, snapshot)
    return root


@pytest.mark.parametrize("page", GUIDES)
def test_a_guide_runs_as_written_from_top_to_bottom(
    page: str, finished_root: Path, small_source: Path, labels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Python and its commands, in the order of the page, in one working directory on a finished root."""
    shutil.copytree(finished_root, tmp_path / "root")
    words = write_workplace(tmp_path, settings_for(small_source, tmp_path / "root", labels))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    for name, value in {"DAGSTER_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    done = []
    for kind, block in re.findall(r"```(bash|python)\n(.*?)```", (REPO / page).read_text("utf-8"), re.DOTALL):
        if kind == "python":
            exec(filled(block, words), {})
            continue
        for line in block.splitlines():
            program, *argv = (filled(word, words) for word in shlex.split(line))
            if program == "dagster":
                subprocess.run([str(Path(sys.executable).with_name(program)), *argv], check=True, timeout=900)
            else:
                assert program == "datamask"
                result = CliRunner().invoke(app, argv, catch_exceptions=False)
                assert result.exit_code == 0, f"{line}\n{result.stderr}"
            done.append(line)
    assert done
