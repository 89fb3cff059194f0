"""Exports of real documentation: a few packages in every run, the whole of it in the slow ones."""

import hashlib
import multiprocessing
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_datamask.demo import corpus
from dagster_datamask.demo.corpus import SNAPSHOTS, choose, export_corpus, weak_label_tables
from dagster_datamask.demo.installed import Document, dependency_closure, harvest
from dagster_datamask.demo.layout import FINEWEB_SCHEMA, MARKER, CorpusSummary, ExportError, export_once


@pytest.fixture
def few_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    closure = dependency_closure()
    few = {name: closure[name] for name in ("click", "jinja2", "joblib", "markdown-it-py", "packaging", "yarl")}
    monkeypatch.setattr(corpus, "dependency_closure", lambda: few)


def _hashes(root: Path) -> dict[str, str]:
    return {
        str(f.relative_to(root)): hashlib.sha256(f.read_bytes()).hexdigest()
        for f in sorted(root.rglob("*"))
        if f.is_file()
    }


def _documents(packages: list[str]) -> list[Document]:
    return [Document(f"text {i}", f"https://a.example/{i}", "a.py", p, "docstring") for i, p in enumerate(packages)]


@pytest.mark.usefixtures("few_packages")
@pytest.mark.parametrize("documents", [1, 2, 7, 200])
def test_layout(tmp_path: Path, documents: int) -> None:
    summary = export_corpus(tmp_path / "demo", documents=documents)
    assert list(summary.rows) == list(SNAPSHOTS)
    assert sum(summary.rows.values()) == summary.documents == documents
    assert max(summary.rows.values()) - min(summary.rows.values()) <= 1
    ids: list[str] = []
    tokens = 0
    for snapshot in SNAPSHOTS:
        files = sorted((tmp_path / "demo" / "data" / snapshot).iterdir())
        assert [f.name for f in files] == ["000_00000.parquet", "001_00000.parquet"]
        for file in files:
            table = pq.read_table(file, partitioning=None)
            assert table.schema.equals(FINEWEB_SCHEMA)
            assert set(table["dump"].to_pylist()) <= {snapshot}
            assert table["language_score"].null_count == table.num_rows
            ids += table["id"].to_pylist()
            tokens += sum(table["token_count"].to_pylist())
            assert b"datamask.token_count" in pq.read_schema(file).metadata
    assert len(ids) == len(set(ids)) == documents
    assert tokens == summary.tokens > 50 * documents


@pytest.mark.usefixtures("few_packages")
def test_labels_come_from_outside_the_pool(tmp_path: Path) -> None:
    summary = export_corpus(tmp_path / "demo", documents=150)
    pool = {
        text
        for file in (tmp_path / "demo" / "data").rglob("*.parquet")
        for text in pq.read_table(file, partitioning=None)["text"].to_pylist()
    }
    assert len(pool) == 150
    for name in ("dclm", "wiki", "edu"):
        table = pq.read_table(tmp_path / "demo" / "labels" / f"{name}.parquet")
        assert table.schema.names == ["text", "label"]
        assert table.num_rows == summary.labels[name] > 20
        assert not pool & set(table["text"].to_pylist())
        if name != "edu":
            assert Counter(table["label"].to_pylist()) == {0: table.num_rows // 2, 1: table.num_rows // 2}
    edu = pq.read_table(tmp_path / "demo" / "labels" / "edu.parquet")["label"].to_pylist()
    assert 0.0 <= min(edu) < 1.0 < 3.0 < max(edu) <= 5.0


@pytest.mark.usefixtures("few_packages")
def test_equal_inputs_give_equal_bytes_and_a_second_call_does_nothing(tmp_path: Path) -> None:
    first = export_corpus(tmp_path / "a", documents=50)
    second = export_corpus(tmp_path / "b", documents=50)
    assert _hashes(tmp_path / "a") == _hashes(tmp_path / "b")
    assert first.inputs == second.inputs
    before = (tmp_path / "a" / MARKER).stat().st_mtime_ns
    assert export_corpus(tmp_path / "a", documents=50) == first
    assert (tmp_path / "a" / MARKER).stat().st_mtime_ns == before
    other = export_corpus(tmp_path / "b", documents=50, seed=1)
    assert other.inputs != first.inputs
    assert _hashes(tmp_path / "a") != _hashes(tmp_path / "b")


@pytest.mark.usefixtures("few_packages")
def test_more_than_there_is_names_both_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"hold \d+ documents at 60 per package; 100000 were asked for"):
        export_corpus(tmp_path / "demo", documents=100_000)
    assert not (tmp_path / "demo").exists()
    with pytest.raises(ValueError, match="at least one"):
        export_corpus(tmp_path / "demo", documents=0)


@given(st.lists(st.sampled_from("abc"), max_size=30), st.integers(1, 5))
def test_choice_keeps_order_and_cap_and_loses_nothing(packages: list[str], cap: int) -> None:
    ordered = _documents(packages)
    reachable = sum(min(cap, n) for n in Counter(packages).values())
    pool, rest = choose(ordered, reachable, cap)
    assert len(pool) == reachable
    assert all(n <= cap for n in Counter(d.package for d in pool).values())
    position = {d.url: i for i, d in enumerate(ordered)}
    for part in (pool, rest):
        assert [position[d.url] for d in part] == sorted(position[d.url] for d in part)
    assert sorted(d.url for d in pool + rest) == sorted(d.url for d in ordered)
    with pytest.raises(ExportError):
        choose(ordered, reachable + 1, cap)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_labels_of_hardly_any_documents(count: int) -> None:
    tables = weak_label_tables(_documents(["a"] * count), rows=10)
    assert tables["edu"].num_rows == count
    assert tables["dclm"].num_rows == tables["wiki"].num_rows == 0


def test_labels_stop_at_the_rows_asked_for() -> None:
    documents = harvest({n: d for n, d in dependency_closure().items() if n in ("click", "joblib", "yarl")}).documents
    tables = weak_label_tables(documents, rows=20)
    assert {name: t.num_rows for name, t in tables.items()} == {"dclm": 20, "wiki": 20, "edu": 20}


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ExportError, match="is not a demo export"):
        export_once(tmp_path, "x", lambda folder: pytest.fail("must not be written"))
    assert (tmp_path / "mine.txt").read_text() == "keep"


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    assert export_once(tmp_path / "demo", "x", _tiny).root == str(tmp_path / "demo")


def _tiny(folder: Path) -> CorpusSummary:
    (folder / "a").write_text("a")
    return CorpusSummary("", "x", 0, 0, {}, 0, {}, {})


def _half(folder: Path) -> CorpusSummary:
    (folder / "half").write_text("half")
    (folder.parent / "ready").touch()
    time.sleep(3600)
    return _tiny(folder)


def test_a_killed_export_leaves_nothing_that_looks_done(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=export_once, args=(tmp_path / "demo", "x", _half))
    process.start()
    while not (tmp_path / "ready").exists():
        assert process.is_alive()
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not (tmp_path / "demo").exists()
    summary = export_once(tmp_path / "demo", "x", _tiny)
    assert summary.inputs == "x"
    assert sorted(f.name for f in (tmp_path / "demo").iterdir()) == ["a", MARKER]


@pytest.mark.slow
def test_the_whole_demo(tmp_path: Path) -> None:
    summary = export_corpus(tmp_path / "demo")
    assert summary.rows == dict.fromkeys(SNAPSHOTS, 750)
    assert summary.labels == {"dclm": 1_200, "wiki": 1_200, "edu": 1_200}
    assert summary.packages > 60
    again = export_corpus(tmp_path / "again")
    assert again.inputs == summary.inputs
    assert _hashes(tmp_path / "demo") == _hashes(tmp_path / "again")
