"""selection_report: what adds up over snapshots, what is missing or stale, what is refused; at 110 snapshots, too."""

import json
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from dagster_datamask.keyed import hash64
from dagster_datamask.shards.generations import POINTER, NotPublished, Published
from dagster_datamask.shards.writer import table_file, write_json
from dagster_datamask.stages import selection_report as module
from dagster_datamask.stages.base import Outcome
from dagster_datamask.stages.report import NUMBERS, SAMPLE_FILE, read_sample
from dagster_datamask.stages.report_numbers import Numbers
from dagster_datamask.stages.selection_report import standing, unreported
from tests.conftest import SNAPSHOTS
from tests.project import SNAPSHOT_STAGES, Project
from tests.stages.conftest import copied, failed, rows_of, tree

FIRST, SECOND = SNAPSHOTS
Finished = tuple[Project, dict[str, Outcome]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, finished: Finished) -> Project:
    """Both snapshots, and their report. Copy it, never write into it."""
    project = copied(finished[0], tmp_path_factory.mktemp("both") / "root")
    project.full(SECOND)
    project.stage("selection_report", "")
    return project


@pytest.fixture
def own(both: Project, tmp_path: Path) -> Project:
    return copied(both, tmp_path / "root")


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing, stale or refused has nothing to do with figures."""
    monkeypatch.setattr(module, "figures", lambda *numbers: [])


def page(published: Published | None) -> str:
    assert published is not None
    return published.path("report").read_text("utf-8")


def waiting(outcome: Outcome) -> str:
    return str(failed(outcome)["every_snapshot_reported"]["snapshots"])


def test_the_corpus_is_the_sum_of_its_snapshots(both: Project) -> None:
    outcome = both.stage("selection_report", "")
    manifests = [both.store.current("fineweb_mask_manifest", name) for name in SNAPSHOTS]
    rows = pl.concat([rows_of(manifest) for manifest in manifests])
    assert outcome.counts == dict(rows["decision"].value_counts().iter_rows())
    assert outcome.rows_in == len(rows) == 130
    kept = rows.filter(pl.col("decision") == "kept")
    facts = outcome.facts
    assert (facts["snapshots"], facts["snapshots_in_figures"], facts["waiting"]) == (2, 2, 0)
    assert (facts["kept"], facts["tokens_kept"]) == (len(kept), kept["token_count"].sum())
    assert facts["quality_kept"] == pytest.approx(kept["quality"].mean())
    assert failed(outcome) == {}


def test_the_corpus_s_diversity_is_over_all_pairs(both: Project) -> None:
    samples = [read_sample(both.store.current("snapshot_report", name)) for name in SNAPSHOTS]
    z = np.concatenate([np.array(s.filter(s["selected"])["embedding"].to_pylist(), np.float64) for s in samples])
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    pairs = (z @ z.T)[~np.eye(len(z), dtype=bool)]
    assert both.stage("selection_report", "").facts["cosine_kept"] == pytest.approx(pairs.mean())


def test_the_page_has_every_snapshot_with_a_way_to_its_own(both: Project) -> None:
    outcome = both.stage("selection_report", "")
    html = page(outcome.published)
    assert len(html.encode()) == outcome.facts["page_bytes"] < 5_000_000
    assert html.count("data:image/png;base64,") == len(outcome.figures) == 7
    assert "all 72 documents that could be chosen" in html
    assert str(both.store.root) not in html
    assert outcome.published is not None
    for name in SNAPSHOTS:
        report = both.store.current("snapshot_report", name)
        link = f"../../snapshot_report/{name}/{report.fingerprint}/report.html"
        assert f'href="{link}"' in html
        assert (outcome.published.folder / link).resolve() == report.path("report").resolve()


def test_nothing_is_read_but_what_the_snapshots_published(own: Project) -> None:
    """Without source shards, vectors and manifests' rows the page is the same."""
    before = tree(own.store.root / "selection_report")
    shutil.rmtree(own.store.root / "selection_report")
    for asset in ("raw_shards", "e5_embeddings", "fineweb_mask_manifest", "datamask_masks"):
        for path in (own.store.root / asset).rglob("*"):
            if path.suffix in (".parquet", ".arrow"):
                path.unlink()
    own.stage("selection_report", "")
    assert tree(own.store.root / "selection_report") == before


@pytest.mark.usefixtures("undrawn")
class TestMissingOrStale:
    def test_nothing_selected_yet(self, project: Project) -> None:
        with pytest.raises(NotPublished, match="has a manifest; run the job full for one first"):
            project.stage("selection_report", "")

    def test_a_snapshot_that_was_never_begun(self, own: Project) -> None:
        for name in SNAPSHOT_STAGES:
            (own.store.folder(name, SECOND) / POINTER).unlink()
        outcome = own.stage("selection_report", "")
        assert waiting(outcome) == f"{SECOND} (not begun)"
        assert outcome.published is not None and outcome.facts["snapshots"] == 1
        assert "<td>not begun</td>" in page(outcome.published)

    @pytest.mark.parametrize(
        ("unpublished", "why", "drawn"),
        [
            (("fineweb_mask_manifest", "fineweb_mask", "snapshot_report"), "begun, but not selected", 1),
            (("snapshot_report",), "has no snapshot_report", 1),
        ],
    )
    def test_a_snapshot_that_is_half_done(
        self, own: Project, unpublished: tuple[str, ...], why: str, drawn: int
    ) -> None:
        for name in unpublished:
            (own.store.folder(name, SECOND) / POINTER).unlink()
        outcome = own.stage("selection_report", "")
        assert waiting(outcome) == f"{SECOND} ({why})"
        assert outcome.facts["snapshots_in_figures"] == drawn
        assert outcome.published is not None

    def test_an_input_that_was_published_anew(self, own: Project) -> None:
        pointer = own.store.folder("raw_shards", FIRST) / POINTER
        write_json(pointer, {**json.loads(pointer.read_text("utf-8")), "fingerprint": "0" * 24})
        outcome = own.stage("selection_report", "")
        assert waiting(outcome) == f"{FIRST} (selected from another generation of raw_shards than the published one)"
        assert outcome.facts["snapshots_in_figures"] == 2

    def test_a_refitted_global_asset(self, own: Project) -> None:
        pointer = own.store.folder("quality_calibration", None) / POINTER
        write_json(pointer, {**json.loads(pointer.read_text("utf-8")), "fingerprint": "0" * 24})
        assert set(standing(own.store, own.settings).values()) == {
            "selected from another generation of quality_calibration than the published one"
        }

    def test_other_centroids_leave_a_snapshot_out_of_the_figures(self, own: Project) -> None:
        sidecar = own.store.current("fineweb_mask_manifest", SECOND).folder / "manifest.json"
        told = json.loads(sidecar.read_text("utf-8"))
        told["fingerprints"]["kmeans_centroids"] = "0" * 24
        write_json(sidecar, told)
        (own.store.folder("selection_report", None) / POINTER).unlink()
        outcome = own.stage("selection_report", "")
        assert outcome.facts["snapshots_in_figures"] == 1
        assert f"the figures leave out: {SECOND}" in page(outcome.published)

    def test_a_report_of_an_earlier_manifest(self, own: Project) -> None:
        pointer = own.store.folder("snapshot_report", SECOND) / POINTER
        told = json.loads(pointer.read_text("utf-8"))
        told["inputs"]["fineweb_mask_manifest"] = "0" * 24
        write_json(pointer, told)
        outcome = own.stage("selection_report", "")
        assert waiting(outcome) == f"{SECOND} (its snapshot_report is of an earlier manifest)"
        assert outcome.facts["snapshots_in_figures"] == 1

    def test_older_code(self, own: Project) -> None:
        for name, what in (("fineweb_mask_manifest", "code_versions"), ("snapshot_report", "code_version")):
            folder = own.store.folder(name, FIRST)
            path = (
                folder / POINTER
                if name == "snapshot_report"
                else own.store.current(name, FIRST).folder / "manifest.json"
            )
            told = json.loads(path.read_text("utf-8"))
            before = json.dumps(told)
            told[what] = "0" if what == "code_version" else {**told[what], "edu_scores": "0"}
            write_json(path, told)
            assert standing(own.store, own.settings)[FIRST] in (
                "selected by another version of edu_scores",
                "its snapshot_report is by another version of the code",
            )
            write_json(path, json.loads(before))
        assert standing(own.store, own.settings) == {FIRST: "", SECOND: ""}

    def test_no_report_of_any_snapshot(self, own: Project) -> None:
        for name in SNAPSHOTS:
            (own.store.folder("snapshot_report", name) / POINTER).unlink()
        outcome = own.stage("selection_report", "")
        assert outcome.published is not None and outcome.facts["snapshots_in_figures"] == 0
        assert outcome.rows_in == 130

    def test_what_the_published_report_does_not_speak_of(self, own: Project) -> None:
        assert unreported(own.store, own.settings) == {}
        later = own.with_settings(**{"select.seed": 1})
        for name in SNAPSHOT_STAGES[SNAPSHOT_STAGES.index("datamask_masks") :]:
            later.stage(name, SECOND)
        assert unreported(later.store, later.settings) == {
            FIRST: "selected under other settings: select.seed = 0 (in force: 1)",
            SECOND: "selected since the report was made",
        }
        (own.store.folder("selection_report", None) / POINTER).unlink()
        assert unreported(own.store, own.settings)[FIRST] == "nothing is reported yet"


@pytest.mark.usefixtures("undrawn")
def test_snapshots_selected_under_other_settings_are_refused_by_name(own: Project) -> None:
    before = own.store.current("selection_report").fingerprint
    later = own.with_settings(**{"select.lambda": 0.3})
    for name in SNAPSHOT_STAGES[SNAPSHOT_STAGES.index("datamask_masks") :]:
        later.stage(name, SECOND)
    for project, refused in ((own, f"{SECOND} (select.lambda = 0.3 (in force: 0.5))"), (later, f"{FIRST} (select")):
        outcome = project.stage("selection_report", "")
        assert outcome.published is None
        assert failed(outcome)["made_under_these_settings"]["different"].startswith(refused)
    assert own.store.current("selection_report").fingerprint == before


def _copy(store_root: Path, name: str, of: str, like: pa.Table) -> None:
    """A finished snapshot of another name, with ids of its own in its sample."""
    for asset in SNAPSHOT_STAGES:
        # what only a single snapshot's assets read is left where it is
        (pointer,) = (store_root / asset / of).glob(POINTER)
        folder = store_root / asset / name
        folder.mkdir()
        told = json.loads(pointer.read_text("utf-8"))
        write_json(folder / POINTER, told | {"snapshot": name})
        here, there = folder / told["fingerprint"], pointer.parent / told["fingerprint"]
        here.mkdir()
        for file in ("manifest.json", NUMBERS, "report.html"):
            if (there / file).exists():
                shutil.copyfile(there / file, here / file)
        if asset == "snapshot_report":
            keys = hash64([f"{name}/{i}" for i in like["doc_id"].to_pylist()], 0, "report")
            table = like.set_column(0, "key", pa.array(keys)).set_column(1, "snapshot", [[name] * len(like)])
            with table_file(here / SAMPLE_FILE, like.schema) as writer:
                writer.write(table.take(pa.array(np.argsort(keys))).cast(like.schema))


def test_110_snapshots(own: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dagster would compare with no more than 100 of them."""
    like = read_sample(own.store.current("snapshot_report", FIRST))
    names = [f"CC-MAIN-X-{k:03d}" for k in range(108)]
    for name in names:
        _copy(own.store.root, name, FIRST, like)
    assert unreported(own.store, own.settings) == dict.fromkeys(names, "selected since the report was made")
    seen: list[tuple[Numbers, int]] = []

    def figures(what: str, numbers: Numbers, found: object, *others: object) -> list:
        seen.append((numbers, len(found.table)))  # type: ignore[attr-defined]
        return []

    monkeypatch.setattr(module, "figures", figures)
    monkeypatch.setattr("dagster_datamask.stages.report_numbers._map", lambda table: None)
    outcome = own.stage("selection_report", "")
    assert outcome.facts["snapshots_in_figures"] == 110
    assert outcome.rows_in == 110 * 65
    (numbers, sampled), *_ = seen
    assert numbers.groups["kept"].documents == 110 * 7
    assert sampled == 2000
    assert page(outcome.published).count("<tr>") > 110
    assert unreported(own.store, own.settings) == {}
    pointer = own.store.folder("e5_embeddings", names[107]) / POINTER
    write_json(pointer, {**json.loads(pointer.read_text("utf-8")), "fingerprint": "0" * 24})
    assert list(unreported(own.store, own.settings)) == [names[107]]
    assert waiting(own.stage("selection_report", "")).startswith(f"{names[107]} (selected from another generation of")
