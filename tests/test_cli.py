"""The command as a person meets it: one object or one line, the right exit code, nothing written by mistake."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner, Result

from dagster_datamask.cli import app
from dagster_datamask.scoring.encoders import ENCODERS
from dagster_datamask.settings import Settings
from dagster_datamask.shards.generations import Store
from tests.conftest import SNAPSHOTS
from tests.project import Project, settings_for, write_shard

Run = Callable[..., Result]


def write_config(settings: Settings, path: Path) -> Path:
    """The settings as a datamask.toml: what differs from the demo profile's defaults, and every path."""
    lines = ['profile = "demo"']
    for section, values in settings.model_dump(by_alias=True, exclude_none=True).items():
        if isinstance(values, dict):
            lines.append(f"[{section}]")
            lines += [f"{name} = {_toml(value)}" for name, value in values.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(name)} = {_toml(inner)}' for name, inner in value.items())}}}"
    return json.dumps(value)


@pytest.fixture
def settings(tmp_path: Path, small_source: Path, fitted_root: Path, labels: Path) -> Settings:
    shutil.copytree(fitted_root, tmp_path / "root")
    return settings_for(small_source, tmp_path / "root", labels)


@pytest.fixture
def datamask(tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command in an empty working directory with a settings file and a Dagster home of its own."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("DATAMASK_CONFIG", str(write_config(settings, tmp_path / "datamask.toml")))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "dagster_home"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def datamask(*args: str) -> Result:
        return CliRunner().invoke(app, [str(arg) for arg in args])

    return datamask


def one_line(result: Result, code: int = 2) -> str:
    """The single line on stderr of a command that refused its input; nothing on stdout."""
    assert result.exit_code == code, (result.exit_code, result.stdout, result.stderr)
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


def files(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


def kept(settings: Settings, snapshot: str) -> list[str]:
    published = Store(Path(settings.storage.root)).current("fineweb_mask", snapshot)
    return pl.read_parquet(published.folder / "*_00000.parquet")["doc_id"].to_list()


def decided(settings: Settings, snapshots: tuple[str, ...] = SNAPSHOTS) -> list[str]:
    store = Store(Path(settings.storage.root))
    return [
        doc
        for s in snapshots
        for doc in pl.read_parquet(store.current("fineweb_mask_manifest", s).folder / "*_00000.parquet")["doc_id"]
    ]


class TestRun:
    def test_the_whole_source(self, datamask: Run, settings: Settings) -> None:
        result = datamask("run", "--json")
        assert result.exit_code == 0, result.stderr
        told = json.loads(result.stdout)
        assert [(run["name"], run["success"]) for run in told["runs"]] == [(s, True) for s in SNAPSHOTS]
        for row in told["snapshots"]:
            assert row["readable_rows"] == 65 and row["kept"] == row["budget"] == 7
            assert row["value"] <= row["upper_bound"]
            assert len(kept(settings, row["snapshot"])) == 7

    def test_the_summary_for_people(self, datamask: Run, settings: Settings) -> None:
        result = datamask("run", "--snapshots", SNAPSHOTS[1])
        assert result.exit_code == 0, result.stderr
        assert SNAPSHOTS[1] in result.stdout and SNAPSHOTS[0] not in result.stdout
        assert f"7 documents kept; results under {settings.storage.root}/fineweb_mask" in result.stdout
        assert f"{SNAPSHOTS[1]}: done in" in result.stderr
        assert "Loading weights" not in result.stderr
        assert Store(Path(settings.storage.root)).published("raw_shards", SNAPSHOTS[0]) is None

    def test_json_is_one_object_on_stdout_and_all_else_on_stderr(
        self, datamask: Run, tmp_path: Path, settings: Settings
    ) -> None:
        """A process of its own: native libraries write to the descriptors, past anything a runner captures."""
        script = (
            "import sys\n"
            "from dagster_datamask.cli import app\n"
            "try:\n    app()\n"
            "finally:\n"
            "    print('models loaded:', 'sentence_transformers' in sys.modules, file=sys.stderr)\n"
        )
        outputs = []
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-c", script, "run", "--snapshots", SNAPSHOTS[0], "--json"],
                capture_output=True,
                text=True,
                timeout=900,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            assert done.returncode == 0, done.stderr
            outputs.append((json.loads(done.stdout), done.stderr))
            assert done.stdout.count("\n") == 1
        (first, told), (second, told_again) = outputs
        assert first["snapshots"] == second["snapshots"]
        assert "models loaded: True" in told
        assert "models loaded: False" in told_again

    def test_dry_run_tells_rows_and_bytes_and_writes_nothing(
        self, datamask: Run, tmp_path: Path, settings: Settings, small_source: Path
    ) -> None:
        before = files(tmp_path)
        result = datamask("run", "--dry-run", "--json", "--snapshots", SNAPSHOTS[0])
        assert result.exit_code == 0, result.stderr
        told = json.loads(result.stdout)
        assert told["rows"] == 65
        assert told["bytes"] == sum(p.stat().st_size for p in (small_source / "data" / SNAPSHOTS[0]).iterdir())
        assert told["documents_embedded"] == 36
        assert set(told["gpu_hours"]) == {"edu_scores", "e5_embeddings", "datamask_masks"}
        assert files(tmp_path) == before

    def test_a_bad_snapshot_fails_alone_with_exit_code_1(
        self, datamask: Run, tmp_path: Path, small_source: Path, fitted_root: Path, labels: Path
    ) -> None:
        source = tmp_path / "source"
        shutil.copytree(small_source, source)
        bad = source / "data" / SNAPSHOTS[0] / "001_00000.parquet"
        bad.write_bytes(bad.read_bytes()[:100])
        result = datamask("run", "--json", "--source", source)
        assert result.exit_code == 1
        told = json.loads(result.stdout)
        assert [(run["name"], run["success"]) for run in told["runs"]] == [(SNAPSHOTS[0], False), (SNAPSHOTS[1], True)]
        assert str(bad) in told["runs"][0]["failure"]
        assert f"{SNAPSHOTS[0]} failed: raw_shards:" in result.stderr
        assert [row["snapshot"] for row in told["snapshots"]] == [SNAPSHOTS[1]]


class TestRefused:
    """Input that cannot be worked with: one line, exit code 2, nothing written."""

    @pytest.mark.parametrize(
        ("args", "says"),
        [
            (("--snapshots", "CC-MAIN-1999-01"), f"no snapshot 'CC-MAIN-1999-01'; there are: {', '.join(SNAPSHOTS)}"),
            (("--source", "/no/such/folder"), "source /no/such/folder does not exist; set [source] url"),
            (("--source", "abc://x"), "source abc://x: "),
            (("--root", "hf://datasets/a/b"), "the hub takes commits"),
            (("--set", "select.lambda=1.5"), "select.lambda = 1.5: Input should be less than or equal to 1"),
            (("--set", "select.lamda=0.5"), "unknown setting select.lamda; did you mean 'select.lambda'?"),
            (("--set", "selekt.lambda=0.5"), "unknown section [selekt]; did you mean 'select'?"),
            (("--set", "select.lambda"), "override 'select.lambda' is not of the form section.key=value"),
            (("--set", "select.budget=lots"), "select.budget = 'lots'"),
            (("--set", "select.budget=0.5 of it"), "select.budget"),
            (("--config", "/no/such.toml"), "settings file /no/such.toml does not exist"),
            (("--limit", "0"), "--limit 0 keeps nothing; give at least 1"),
        ],
    )
    def test_in_one_line(self, datamask: Run, tmp_path: Path, args: tuple[str, ...], says: str) -> None:
        before = files(tmp_path)
        assert says in one_line(datamask("run", *args))
        assert files(tmp_path) == before

    def test_no_source(self, datamask: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("DATAMASK_CONFIG")
        assert "no source is set: give --source, DATAMASK_SOURCE or [source] url" in one_line(datamask("run"))
        assert not list(Path.cwd().iterdir())

    def test_a_budget_above_the_pool_fails_the_run_with_both_numbers(self, datamask: Run, settings: Settings) -> None:
        result = datamask("run", "--snapshots", SNAPSHOTS[0], "--set", "select.budget=39")
        assert result.exit_code == 1
        (line,) = [line for line in result.stderr.splitlines() if line.startswith(f"{SNAPSHOTS[0]} failed: ")]
        assert "asks for 39 of the 65 documents" in line and "left 36" in line
        assert Store(Path(settings.storage.root)).published("datamask_masks", SNAPSHOTS[0]) is None

    def test_an_unreachable_hub_model(self, datamask: Run, settings: Settings) -> None:
        before = files(Path(settings.storage.root))
        line = one_line(datamask("run", "--set", "models.dclm=nobody/no-model:model.bin"))
        assert "models.dclm" in line and "nobody/no-model" in line
        assert files(Path(settings.storage.root)) == before

    def test_an_unreachable_hub_model_on_an_empty_root(self, datamask: Run, tmp_path: Path) -> None:
        root = tmp_path / "new root"
        line = one_line(datamask("run", "--root", str(root), "--set", "models.encoder=nobody/no-model"))
        assert "models.encoder" in line and "nobody/no-model" in line
        assert not root.exists()

    def test_a_changed_model_is_fitted_before_any_snapshot(self, datamask: Run, tmp_path: Path, labels: Path) -> None:
        """A failing fit shows the order: no snapshot runs on the classifiers of before."""
        (tmp_path / "labels.parquet").write_bytes(b"no labels")
        result = datamask("run", "--set", f"score.dclm_labels={tmp_path / 'labels.parquet'}", "--json")
        assert result.exit_code == 1
        told = json.loads(result.stdout)
        assert [(run["name"], run["success"]) for run in told["runs"]] == [("fit_global", False)]
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("fit_global failed: ")]
        assert "labels.parquet" in line

    def test_a_misspelt_option_is_typers_own_error(self, datamask: Run) -> None:
        result = datamask("run", "--snapshot", "x")
        assert result.exit_code == 2 and "No such option" in result.stderr


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(5)
    vectors = rng.normal(size=(40, 8)).astype(np.float32)
    path = tmp_path_factory.mktemp("pool") / "pool.parquet"
    pl.DataFrame(
        {"id": [f"d{k}" for k in range(40)], "score": rng.random(40), "embedding": vectors},
        schema_overrides={"embedding": pl.Array(pl.Float32, 8)},
    ).write_parquet(path)
    return path


class TestSolve:
    @pytest.mark.parametrize("solver", ["certified", "policy_gradient", "top_k", "random"])
    def test_every_solver_keeps_the_budget_and_tells_the_gap(
        self, datamask: Run, pool: Path, tmp_path: Path, solver: str
    ) -> None:
        out = tmp_path / "mask.parquet"
        steps = ("--steps", "20") if solver == "policy_gradient" else ()
        args = ("--solver", solver, "--budget", "5", *steps, "--out", out, "--json")
        result = datamask("solve", pool, *args)
        assert result.exit_code == 0, result.stderr
        told = json.loads(result.stdout)
        assert (told["n"], told["budget"], told["kept"]) == (40, 5, 5)
        assert told["value"] == pytest.approx(0.5 * told["quality"] + 0.5 * told["diversity"])
        assert 0 <= told["gap"] == pytest.approx(told["upper_bound"] - told["value"])
        mask = pl.read_parquet(out)
        assert mask["id"].n_unique() == 40 and mask["selected"].sum() == 5
        again = tmp_path / "again.parquet"
        datamask("solve", pool, *args[:-2], again, "--json")
        assert again.read_bytes() == out.read_bytes()

    def test_certified_beats_the_others_at_the_same_objective(self, datamask: Run, pool: Path) -> None:
        value = {
            solver: json.loads(datamask("solve", pool, "--budget", "25%", "--solver", solver, *more, "--json").stdout)[
                "value"
            ]
            for solver, *more in (["certified"], ["policy_gradient", "--steps", "30"], ["top_k"], ["random"])
        }
        assert max(value, key=lambda name: value[name]) == "certified"

    def test_other_column_names(self, datamask: Run, pool: Path, tmp_path: Path) -> None:
        renamed = tmp_path / "renamed.parquet"
        pl.read_parquet(pool).rename({"id": "doc_id", "score": "quality", "embedding": "vector"}).write_parquet(renamed)
        columns = "id=doc_id,score=quality,embedding=vector"
        here = json.loads(datamask("solve", pool, "--json").stdout)
        there = json.loads(datamask("solve", renamed, "--columns", columns, "--json").stdout)
        own = ("seconds", "solver_seconds", "source")
        assert {k: v for k, v in here.items() if k not in own} == {k: v for k, v in there.items() if k not in own}

    def test_a_table_for_people(self, datamask: Run, pool: Path) -> None:
        result = datamask("solve", pool)
        assert result.exit_code == 0
        assert "upper_bound" in result.stdout and "kept" in result.stdout

    @pytest.mark.parametrize(
        ("args", "says"),
        [
            (("--solver", "magic"), "magic"),
            (("--objective", "dpp"), "objective 'dpp' is none of: pws"),
            (("--lambda", "1.5"), "1.5"),
            (("--budget", "41"), "41"),
            (("--budget", "some"), "some"),
            (("--columns", "id"), "--columns 'id' is not of the form id=name"),
            (("--columns", "id=nothing"), "nothing"),
            (("--device", "cuda:9"), "'cuda:9' is not on this machine"),
            (
                ("--solver", "policy_gradient", "--gradient", "up"),
                "gradient 'up' is neither 'independent' nor 'ordered'",
            ),
            (("--steps", "20"), "--steps is an option of policy_gradient, dvrl, not of certified"),
            (("--solver", "greedy", "--variant", "slow"), "variant 'slow' is none of: lazy"),
            (("--solver", "semdedup", "--budget", "9tok"), "has no column 'token_count'"),
            (("--budget", "1e99999999tok"), "not a whole number of tokens"),
        ],
    )
    def test_refused_in_one_line(
        self, datamask: Run, pool: Path, tmp_path: Path, args: tuple[str, ...], says: str
    ) -> None:
        out = tmp_path / "mask.parquet"
        assert says in one_line(datamask("solve", pool, "--out", out, *args))
        assert not out.exists()

    @pytest.mark.parametrize(
        ("name", "data", "says"),
        [
            ("missing.parquet", None, "missing.parquet: No such file or directory"),
            ("text.parquet", b"not parquet", "text.parquet"),
            ("pool.csv", b"id,score\n", "pool.csv"),
        ],
    )
    def test_a_bad_file_is_named(self, datamask: Run, tmp_path: Path, name: str, data: bytes | None, says: str) -> None:
        if data is not None:
            (tmp_path / name).write_bytes(data)
        assert says in one_line(datamask("solve", tmp_path / name))

    @pytest.mark.parametrize(("column", "value"), [("score", float("nan")), ("embedding", [0.0] * 8), ("id", "d0")])
    def test_a_bad_row_is_named(self, datamask: Run, pool: Path, tmp_path: Path, column: str, value: object) -> None:
        frame = pl.read_parquet(pool).to_dicts()
        frame[7][column] = value
        bad = tmp_path / "bad.parquet"
        pl.DataFrame(frame, schema_overrides={"embedding": pl.Array(pl.Float32, 8)}).write_parquet(bad)
        line = one_line(datamask("solve", bad))
        assert "d0" in line if column == "id" else "d7" in line


class TestSweep:
    def test_a_row_for_each_lambda(self, datamask: Run, pool: Path) -> None:
        result = datamask("sweep", pool, "--lambda", "0:1:0.25", "--budget", "5", "--json")
        assert result.exit_code == 0, result.stderr
        told = json.loads(result.stdout)
        assert (told["n"], told["budget"], told["out"]) == (40, 5, [])
        assert [row["lambda"] for row in told["rows"]] == [0, 0.25, 0.5, 0.75, 1]
        alone = json.loads(datamask("solve", pool, "--lambda", "0.25", "--budget", "5", "--json").stdout)
        for name in ("value", "quality", "quality_raw", "diversity", "upper_bound", "gap", "share"):
            assert told["rows"][1][name] == alone[name]

    @pytest.mark.parametrize(
        ("out", "written"),
        [
            ("front", {"front/sweep.csv", "front/sweep.png"}),
            ("front.csv", {"front.csv", "front.png"}),
            ("front.parquet", {"front.parquet", "front.png"}),
            ("front.png", {"front.png", "front.csv"}),
            ("front.html", {"front.html"}),
        ],
    )
    def test_table_and_figure_are_written(
        self, datamask: Run, pool: Path, tmp_path: Path, out: str, written: set[str]
    ) -> None:
        folder = tmp_path / "out"
        result = datamask("sweep", pool, "--lambda", "0,0.5,1", "--out", folder / out, "--json")
        assert result.exit_code == 0, result.stderr
        told = json.loads(result.stdout)
        assert set(files(folder)) == written == {str(Path(path).relative_to(folder)) for path in told["out"]}
        for path in map(Path, told["out"]):
            if path.suffix == ".png":
                assert path.read_bytes().startswith(b"\x89PNG")
            elif path.suffix == ".html":
                assert "data:image/png" in path.read_text() and "<table>" in path.read_text()
            else:
                table = pl.read_csv(path) if path.suffix == ".csv" else pl.read_parquet(path)
                assert table["value"].to_list() == [row["value"] for row in told["rows"]]

    def test_a_table_for_people(self, datamask: Run, pool: Path) -> None:
        result = datamask("sweep", pool, "--lambda", "0,1", "--budget", "5")
        assert result.exit_code == 0
        assert "5 of 40 documents" in result.stdout and "diversity" in result.stdout

    @pytest.mark.parametrize(
        ("args", "says"),
        [
            (("--lambda", "0.5"), "--lambda '0.5' is one λ; a sweep takes two or more"),
            (("--lambda", "0,2"), "λ must lie in [0, 1], not 2"),
            (("--budget", "41"), "41"),
            (("--columns", "score=nothing"), "nothing"),
            (("--out", "front.txt"), "--out front.txt: name a folder or a file that ends in"),
        ],
    )
    def test_refused_in_one_line(self, datamask: Run, pool: Path, args: tuple[str, ...], says: str) -> None:
        assert says in one_line(datamask("sweep", pool, *args))
        assert not any(Path().iterdir())


class TestDiff:
    def test_two_masks(self, datamask: Run, pool: Path, tmp_path: Path) -> None:
        for lam in ("0", "1"):
            assert datamask("solve", pool, "--lambda", lam, "--out", tmp_path / f"{lam}.parquet").exit_code == 0
        out = tmp_path / "changes.csv"
        result = datamask("diff", tmp_path / "0.parquet", tmp_path / "1.parquet", "--out", out, "--json")
        assert result.exit_code == 0, result.stderr
        told = json.loads(result.stdout)
        masks = [pl.read_parquet(tmp_path / f"{lam}.parquet").filter("selected")["id"].to_list() for lam in "01"]
        assert told["kept_by_both"] == len(set(masks[0]) & set(masks[1]))
        assert set(pl.read_csv(out)["doc_id"]) == set(masks[0]) ^ set(masks[1]) != set()
        for_people = datamask("diff", tmp_path / "0.parquet", tmp_path / "1.parquet").stdout
        assert "jaccard" in for_people and told["changes"][0]["doc_id"] in for_people
        assert f"{told['kept_only_by_a']}: kept in A, not_selected in B" in for_people

    def test_ids_are_shown_as_they_are(self, datamask: Run, tmp_path: Path) -> None:
        for name, first in (("a", True), ("[b]", False)):
            pl.DataFrame({"id": ["[red]x", "<urn:y>"], "selected": [first, not first]}).write_parquet(tmp_path / name)
        told = datamask("diff", tmp_path / "a", tmp_path / "[b]").stdout
        assert "[red]x" in told and "<urn:y>" in told and f"{tmp_path}/[b]" in told
        assert "not selected in B" in told

    def test_two_manifests_tell_the_setting_that_differs(self, datamask: Run, settings: Settings) -> None:
        folder = Path(settings.storage.root) / "fineweb_mask_manifest" / SNAPSHOTS[0]
        generations = []
        for ratio in ("0.45", "0.8"):
            done = datamask("run", "--snapshots", SNAPSHOTS[0], "--set", f"prune.ratio={ratio}")
            assert done.exit_code == 0, done.stderr
            generations.append(Store(Path(settings.storage.root)).current("fineweb_mask_manifest", SNAPSHOTS[0]).folder)
        result = datamask("diff", generations[0], folder, "--json")
        assert result.exit_code == 0, result.stderr
        told = json.loads(result.stdout)
        assert told["causes"][0] == {"kind": "settings", "name": "prune.ratio", "a": 0.45, "b": 0.8}
        assert "fineweb_mask_manifest" not in {cause["name"] for cause in told["causes"]}
        assert told["documents_a"] == told["documents_b"] == 65 and told["documents_only_in_a"] == 0
        pruned = [row for row in told["changes"] if row["decision_b"] == "pruned"]
        assert pruned and all(row["stage_b"] == "pruned_documents" for row in pruned)
        assert "settings prune.ratio: 0.45 in A, 0.8 in B" in datamask("diff", generations[0], folder).stdout

    def test_refused_in_one_line(self, datamask: Run, pool: Path, tmp_path: Path) -> None:
        line = one_line(datamask("diff", pool, pool))
        assert "pool.parquet: has no column 'selected' or 'decision'" in line
        assert "no-such.parquet: No such file" in one_line(datamask("diff", "no-such.parquet", pool))


class TestApply:
    @pytest.fixture
    def ids(self, small_source: Path, tmp_path: Path) -> Path:
        path = tmp_path / "ids.parquet"
        chosen = [f"{SNAPSHOTS[0]}/000_00000/{k}" for k in (3, 17, 38)]
        pl.DataFrame({"doc_id": chosen, "snapshot": SNAPSHOTS[0]}).write_parquet(path)
        return path

    def test_the_kept_rows_in_the_sources_layout(self, datamask: Run, ids: Path, small_source: Path) -> None:
        result = datamask("apply", ids, small_source, "--out", "kept", "--json")
        assert result.exit_code == 0, result.stderr
        told = json.loads(result.stdout)
        assert (told["wanted"], told["rows"], told["missing"]) == (3, 3, 0)
        file = f"data/{SNAPSHOTS[0]}/000_00000.parquet"
        assert list(files(Path("kept"))) == [file]
        source = pl.read_parquet(small_source / file)
        assert pl.read_parquet(Path("kept") / file).equals(source[[3, 17, 38]])
        assert "3 documents of 3 written to again" in datamask("apply", ids, small_source, "--out", "again").stdout

    def test_what_is_missing_is_exit_code_1(self, datamask: Run, ids: Path, small_source: Path) -> None:
        more = pl.concat([pl.read_parquet(ids), pl.DataFrame({"doc_id": ["[red]gone"], "snapshot": SNAPSHOTS[0]})])
        more.write_parquet(ids)
        result = datamask("apply", ids, small_source, "--out", "kept")
        assert result.exit_code == 1
        assert f"missing: 1, all in missing.parquet; the first: [red]gone of {SNAPSHOTS[0]}" in result.stdout
        assert (
            result.stderr.splitlines()[-1].startswith("1 documents are not in ") and "--allow-missing" in result.stderr
        )
        assert list(files(Path("kept"))) == ["missing.parquet"]
        result = datamask("apply", ids, small_source, "--out", "kept", "--allow-missing", "--json")
        assert result.exit_code == 0
        told = json.loads(result.stdout)
        assert (told["rows"], told["missing_named"]) == (3, [{"doc_id": "[red]gone", "snapshot": SNAPSHOTS[0]}])

    def test_refused_in_one_line(self, datamask: Run, ids: Path, tmp_path: Path, small_source: Path) -> None:
        assert "no-ids: no manifest" in one_line(datamask("apply", "no-ids", small_source, "--out", "kept"))
        assert "source nowhere does not exist" in one_line(datamask("apply", ids, "nowhere", "--out", "kept"))
        assert not Path("kept").exists()


class TestSql:
    @pytest.fixture
    def asked(self, datamask: Run, settings: Settings) -> Run:
        Project(settings).stage("raw_shards", SNAPSHOTS[0])
        return lambda *args: datamask("sql", *args)

    def test_json_is_one_object_of_columns_and_rows(self, asked: Run) -> None:
        result = asked(
            "SELECT snapshot, count(*) AS n, NULL AS [1] FROM raw GROUP BY 1".replace("[1]", '"[1]"'), "--json"
        )
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout) == {"columns": ["snapshot", "n", "[1]"], "rows": [[SNAPSHOTS[0], 65, None]]}

    def test_a_table_of_the_first_fifty_rows_and_a_count(self, asked: Run) -> None:
        result = asked("SELECT doc_id, '[bold]x' AS mark FROM raw ORDER BY row, doc_id")
        assert result.exit_code == 0, result.stderr
        assert result.stdout.count("[bold]x") == 50
        assert "65 rows, the first 50; --json prints all" in result.stdout
        assert len(json.loads(asked("FROM raw", "--json").stdout)["rows"]) == 65

    def test_without_a_query_the_views(self, asked: Run) -> None:
        told = json.loads(asked("--json").stdout)
        assert told["columns"] == ["view", "column", "type"]
        assert ["raw", "decision", "VARCHAR"] in told["rows"]
        assert "decision" in asked().stdout

    def test_refused_in_one_line(self, asked: Run, tmp_path: Path) -> None:
        before = files(tmp_path)
        assert "syntax error" in one_line(asked("SELEC 1"))
        assert "The views are: raw." in one_line(asked("FROM masks"))
        assert "give one SELECT" in one_line(asked("COPY raw TO 'out.csv'"))
        assert files(tmp_path) == before


class TestDoctor:
    def test_tells_what_can_be_reached(self, datamask: Run) -> None:
        result = datamask("doctor", "--json")
        assert result.exit_code == 0, result.stderr
        rows = {row["what"]: row for row in json.loads(result.stdout)["checks"]}
        assert {row["state"] for row in rows.values()} == {"ok"}, rows
        assert rows["source"]["detail"].startswith("2 snapshots in ")

    def test_tells_what_is_missing_and_how_to_get_it(self, datamask: Run, tmp_path: Path) -> None:
        before = files(tmp_path)
        result = datamask(
            *("doctor", "--json", "--set", "models.dclm=nobody/no-model:model.bin", "--set", "compute.device=cuda:9"),
            *("--set", "source.url=/no/such", "--set", "score.wiki_labels=/no/labels.parquet"),
            *("--set", "models.ultra=/no/ultra.bin"),
        )
        assert result.exit_code == 0, result.stderr
        rows = {row["what"]: row for row in json.loads(result.stdout)["checks"]}
        missing = {what for what, row in rows.items() if row["state"] == "missing"}
        assert missing == {"models.dclm", "models.wiki", "accelerator", "source"}
        assert "there are: cpu" in rows["accelerator"]["detail"]
        # nothing but a baseline needs it
        assert rows["models.ultra"]["state"] == "note"
        assert "models.ultra in datamask.toml (for baselines alone)" in rows["models.ultra"]["detail"]
        assert files(tmp_path) == before

    def test_the_encoder_is_the_commit_that_stages_take(self, tmp_path: Path) -> None:
        """Without network, from a cache where the main branch has moved on from the registry's commit."""
        name = "BAAI/bge-small-en-v1.5"
        pinned, moved = str(ENCODERS[name].revision), "f" * 40
        cache = tmp_path / "hub" / "models--BAAI--bge-small-en-v1.5"
        for commit in (pinned, moved):
            (cache / "snapshots" / commit).mkdir(parents=True)
            for file in ("config.json", "model.safetensors"):
                (cache / "snapshots" / commit / file).write_text("{}")
        (cache / "refs").mkdir()
        (cache / "refs" / "main").write_text(moved)
        # the hub's client reads where its cache is once, when it is imported
        program = [sys.executable, "-m", "dagster_datamask.cli", "doctor", "--json"]
        for ref, commit in ((name, pinned), (f"{name}@main", moved)):
            done = subprocess.run(
                [*program, "--set", f"models.encoder={ref}"],
                env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=True,
            )
            rows = {row["what"]: row for row in json.loads(done.stdout)["checks"]}
            assert rows["models.encoder"]["state"] == "ok"
            assert rows["models.encoder"]["detail"] == f"{ref}, {commit}, licence mit"

    def test_tells_where_shards_are_worked_on(self, datamask: Run) -> None:
        for settings, state, detail in (
            (["compute.processes=1"], "ok", "local, 1 process"),
            (["compute.processes=3"], "ok", "local, 3 processes"),
            (["compute.requests={e5_embeding={cpus=2}}"], "missing", "did you mean 'e5_embeddings'?"),
        ):
            asked = datamask("doctor", "--json", *(part for setting in settings for part in ("--set", setting)))
            (row,) = (row for row in json.loads(asked.stdout)["checks"] if row["what"] == "compute")
            assert row["state"] == state and detail in row["detail"]

    def test_a_table_for_people(self, datamask: Run) -> None:
        result = datamask("doctor")
        assert result.exit_code == 0
        assert "accelerator" in result.stdout and "models.encoder" in result.stdout


class TestGc:
    def test_removes_old_generations_and_keeps_what_is_published(self, datamask: Run, settings: Settings) -> None:
        for seed in (0, 1):
            assert datamask("run", "--snapshots", SNAPSHOTS[0], "--set", f"select.seed={seed}").exit_code == 0
        generations = Path(settings.storage.root) / "datamask_masks" / SNAPSHOTS[0]
        assert len([path for path in generations.iterdir() if path.is_dir()]) == 2
        result = datamask("gc", "--keep", "1", "--json")
        assert result.exit_code == 0, result.stderr
        told = json.loads(result.stdout)
        assert told["bytes"] > 0
        assert sum(path.startswith("datamask_masks/") for path in told["removed"]) == 1
        current = Store(Path(settings.storage.root)).current("datamask_masks", SNAPSHOTS[0])
        assert [path for path in generations.iterdir() if path.is_dir()] == [current.folder]
        assert json.loads(datamask("gc", "--keep", "1", "--json").stdout) == {"removed": [], "bytes": 0}
        assert len(kept(settings, SNAPSHOTS[0])) == 7

    def test_keeping_none_is_refused(self, datamask: Run) -> None:
        assert "at least 1" in one_line(datamask("gc", "--keep", "0"))


def test_no_arguments_show_the_commands(datamask: Run) -> None:
    result = datamask()
    for command in ("run", "demo", "solve", "sweep", "diff", "doctor", "gc"):
        assert command in result.output


def test_a_settings_file_in_the_working_directory_is_found(
    datamask: Run, settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DATAMASK_CONFIG")
    write_config(settings, Path("datamask.toml"))
    write_shard(tmp_path / "mine", "CC-A", "000_00000", 3)
    assert json.loads(datamask("run", "--dry-run", "--json").stdout)["rows"] == 130
    monkeypatch.setenv("DATAMASK_SOURCE", str(tmp_path / "mine"))
    assert json.loads(datamask("run", "--dry-run", "--json").stdout)["rows"] == 3
