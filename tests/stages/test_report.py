"""snapshot_report: its numbers against the published rows, the documents it shows, what it refuses, and its page."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from dagster_datamask.shards.generations import Published
from dagster_datamask.shards.schemas import InconsistentFiles
from dagster_datamask.stages.base import Outcome, Run, fingerprints
from dagster_datamask.stages.report import NUMBERS, read_sample, snapshot_report
from dagster_datamask.stages.report_examples import chosen
from dagster_datamask.stages.report_numbers import (
    DIVERSITY,
    LENGTHS,
    QUALITY,
    RANDOM,
    Least,
    Numbers,
    merged,
    strategies,
)
from tests.conftest import SNAPSHOTS
from tests.project import Project, write_shard
from tests.stages.conftest import WILD, copied, failed, rows_of, tree

FIRST = SNAPSHOTS[0]
Finished = tuple[Project, dict[str, Outcome]]


def page(published: Published) -> str:
    return published.path("report").read_text("utf-8")


def numbers(published: Published) -> Numbers:
    return Numbers.from_dict(json.loads((published.folder / NUMBERS).read_text("utf-8"))["numbers"])


def vectors(outcomes: dict[str, Outcome]) -> dict[str, np.ndarray]:
    """{doc_id: ẑ} of a finished snapshot."""
    published = outcomes["e5_embeddings"].published
    assert published is not None
    found = {}
    for shard in published.shards:
        with pa.memory_map(str(published.path(shard))) as file:
            for row in pa.ipc.open_file(file).read_all().to_pylist():
                if row["embedding"] is not None:
                    z = np.array(row["embedding"], np.float64)
                    found[row["doc_id"]] = z / np.linalg.norm(z)
    return found


def mean_cosine(z: np.ndarray) -> float:
    products = z @ z.T
    return float(products[~np.eye(len(z), dtype=bool)].mean())


class TestNumbers:
    def test_groups_are_those_of_the_manifest(self, finished: Finished) -> None:
        _, outcomes = finished
        told = numbers(outcomes["snapshot_report"].published)
        rows = rows_of(outcomes["fineweb_mask_manifest"].published)
        assert told.decisions == dict(rows["decision"].value_counts().iter_rows())
        for name, decisions in (
            ("scored", ["kept", "not_selected", "pruned", "bad_embedding"]),
            ("choosable", ["kept", "not_selected"]),
            ("kept", ["kept"]),
        ):
            group, of = told.groups[name], rows.filter(pl.col("decision").is_in(decisions))
            assert (group.documents, group.tokens) == (len(of), of["token_count"].sum())
            assert group.mean_quality == pytest.approx(of["quality"].mean())
            assert (
                group.quality.tolist()
                == np.bincount(np.rint(of["quality"].to_numpy()).astype(int), minlength=16).tolist()
            )
            assert group.lengths.tolist() == np.histogram(of["token_count"], LENGTHS)[0].tolist()
            assert group.uncounted == 0

    def test_diversity_is_the_mean_cosine_of_two_documents(self, finished: Finished) -> None:
        _, outcomes = finished
        told, z = numbers(outcomes["snapshot_report"].published), vectors(outcomes)
        rows = rows_of(outcomes["fineweb_mask_manifest"].published)
        for name, decisions in (("choosable", ["kept", "not_selected"]), ("kept", ["kept"])):
            ids = rows.filter(pl.col("decision").is_in(decisions))["doc_id"]
            assert told.cosine(name) == pytest.approx(mean_cosine(np.array([z[i] for i in ids])))
        facts = outcomes["snapshot_report"].facts
        assert facts["cosine_kept"] == told.cosine("kept")
        assert facts["quality_kept"] == pytest.approx(outcomes["datamask_masks"].facts["quality_raw"])

    def test_clusters_count_what_could_be_chosen(self, finished: Finished) -> None:
        _, outcomes = finished
        told = numbers(outcomes["snapshot_report"].published)
        rows = rows_of(outcomes["fineweb_mask_manifest"].published).filter(
            pl.col("decision").is_in(["kept", "not_selected"])
        )
        for cluster in range(told.clusters.shape[1]):
            of = rows.filter(pl.col("cluster") == cluster)
            kept = len(of.filter(pl.col("decision") == "kept"))
            assert told.clusters[:, cluster] == pytest.approx([len(of), kept, of["quality"].sum()])

    def test_numbers_survive_their_file_and_add_up(self, finished: Finished) -> None:
        told = numbers(finished[1]["snapshot_report"].published)
        twice = Numbers.empty(len(told.vectors["kept"]), told.clusters.shape[1], told.selections)
        twice.add(told)
        twice.add(Numbers.from_dict(json.loads(json.dumps(told.as_dict()))))
        assert twice.groups["kept"].documents == 2 * told.groups["kept"].documents
        assert twice.groups["scored"].lengths.tolist() == (2 * told.groups["scored"].lengths).tolist()
        assert twice.decisions["kept"] == 2 * told.decisions["kept"]
        assert np.array_equal(twice.vectors["kept"], 2 * told.vectors["kept"])
        assert np.array_equal(twice.clusters, 2 * told.clusters)

    def test_hosts_are_those_of_the_urls(self, finished: Finished) -> None:
        folder = finished[1]["snapshot_report"].published.folder
        hosts = json.loads((folder / NUMBERS).read_text("utf-8"))["hosts"]
        assert hosts == {"largest": [{"host": "example.org", "scored": 65, "kept": 7}], "before": 1, "after": 1}


class TestSample:
    @given(st.lists(st.integers(0, 20), max_size=60), st.integers(1, 9), st.integers(1, 13))
    def test_the_least_are_the_first_of_all_sorted(self, keys: list[int], size: int, batch: int) -> None:
        least, rows = Least(size), [(key, f"{k:03d}") for k, key in enumerate(keys)]
        for start in range(0, len(rows), batch):
            of = np.array([key for key, _ in rows[start : start + batch]], np.uint64)
            ids = [name for _, name in rows[start : start + batch]]

            def made(at: np.ndarray, of: np.ndarray = of, ids: list[str] = ids) -> pa.Table:
                names = [ids[i] for i in at]
                return pa.table({"key": of[at], "snapshot": [""] * len(at), "doc_id": names})

            least.offer(of, np.arange(len(of)), made)
        found = least.rows()
        got = [] if found is None else list(zip(found["key"].to_pylist(), found["doc_id"].to_pylist(), strict=True))
        assert got == sorted(rows)[:size]

    def test_the_sample_is_what_could_be_chosen(self, finished: Finished) -> None:
        _, outcomes = finished
        sample = pl.from_arrow(read_sample(outcomes["snapshot_report"].published).drop_columns("embedding"))
        rows = rows_of(outcomes["fineweb_mask_manifest"].published)
        choosable = rows.filter(pl.col("decision").is_in(["kept", "not_selected"]))
        assert isinstance(sample, pl.DataFrame)
        assert sorted(sample["doc_id"]) == sorted(choosable["doc_id"])
        assert set(sample.filter("selected")["doc_id"]) == set(rows.filter(pl.col("decision") == "kept")["doc_id"])
        assert sample["key"].is_sorted()

    def test_samples_together_are_the_sample_of_all(self, finished: Finished) -> None:
        sample = read_sample(finished[1]["snapshot_report"].published)
        parts = [sample.take(pa.array(np.arange(k, len(sample), 3))) for k in range(3)]
        together = merged(parts)
        assert together is not None and together.equals(sample.combine_chunks())
        assert merged([]) is None

    def test_other_masks_have_the_size_of_the_joint_one_and_are_the_best_in_their_way(self, finished: Finished) -> None:
        sample = read_sample(finished[1]["snapshot_report"].published)
        found = strategies(sample, "DataMask")
        assert [int(mask.sum()) for mask in found.masks.values()] == [7] * 4
        quality = sample["quality"].to_numpy()
        assert sorted(quality[found.masks[QUALITY]]) == sorted(quality)[-7:]
        worth = {row["name"]: row for row in found.worth()}
        assert worth[DIVERSITY]["cosine"] <= min(worth[name]["cosine"] for name in ("DataMask", QUALITY, RANDOM))
        for name, mask in found.masks.items():
            assert worth[name]["cosine"] == pytest.approx(mean_cosine(found.unit[mask]))
        overlap = found.overlap()
        assert np.array_equal(np.diag(overlap), np.ones(4))
        assert overlap[0, 1] == (found.masks["DataMask"] & found.masks[QUALITY]).sum() / 7

    def test_threads_change_nothing(self, finished: Finished) -> None:
        sample = read_sample(finished[1]["snapshot_report"].published)
        found = []
        for threads in (1, 2):
            with threadpool_limits(threads):
                found.append(strategies(sample, "DataMask"))
        places = [one.places for one in found]
        assert places[0] is not None and np.array_equal(places[0], places[1])
        assert all(np.array_equal(found[0].masks[name], found[1].masks[name]) for name in found[0].masks)

    @pytest.mark.parametrize("n", [0, 1, 2, 4])
    def test_few_documents_have_masks_but_no_map(self, finished: Finished, n: int) -> None:
        found = strategies(read_sample(finished[1]["snapshot_report"].published).slice(0, n), "DataMask")
        assert found.places is None
        assert {len(mask) for mask in found.masks.values()} == {n}

    def test_equal_documents_have_no_map(self, finished: Finished) -> None:
        sample = read_sample(finished[1]["snapshot_report"].published)
        first = sample["embedding"].combine_chunks().take(pa.array([0] * len(sample)))
        equal = sample.set_column(sample.schema.get_field_index("embedding"), "embedding", first)
        assert strategies(equal, "DataMask").places is None


class TestDocuments:
    def test_twenty_of_each_where_there_are_as_many(self, finished: Finished) -> None:
        _, outcomes = finished
        html = page(outcomes["snapshot_report"].published)
        assert html.count('<article class="good">') == 7
        assert html.count('<article class="bad">') == 20
        assert "7 kept documents" in html and "20 dropped documents" in html

    def test_some_of_every_decision_are_shown(self) -> None:
        def some(n: int) -> pa.Table:
            return pa.table({"doc_id": [str(k) for k in range(n)]})

        kept, dropped = chosen(
            {"kept": some(20), "not_selected": some(20), "pruned": some(20), "duplicate": some(20), "bad_row": some(1)}
        )
        assert (len(kept), len(dropped)) == (20, 20)
        _, dropped = chosen({"not_selected": some(20)})
        assert len(dropped) == 20
        _, dropped = chosen({"unscored": some(3), "pruned": some(2)})
        assert len(dropped) == 5
        assert chosen({}) == ([], [])

    def test_the_nearest_kept_document_is_beside_every_one_with_a_vector(self, finished: Finished) -> None:
        _, outcomes = finished
        html, z = page(outcomes["snapshot_report"].published), vectors(outcomes)
        rows = rows_of(outcomes["fineweb_mask_manifest"].published)
        kept = rows.filter(pl.col("decision") == "kept")["doc_id"].to_list()
        cards = re.findall(
            r"<article class=\"(?:good|bad)\"><header><b>([^<]+)</b> ([^<]+)</header>(.*?)</blockquote>"
            r"(?:\s*<article class=\"beside\"><header>[^<]*cosine (-?[\d.]+), quality [\d.]+: ([^<]+)</header>)?",
            html,
            re.DOTALL,
        )
        assert len(cards) == 27
        for verdict, name, _, cosine, other in cards:
            if name not in z:
                assert not other, verdict
                continue
            best = max((float(z[name] @ z[k]), k) for k in kept if k != name)
            assert (f"{best[0]:.3f}", best[1]) == (cosine, other)

    def test_every_card_says_why_and_how_far_from_the_cut(self, finished: Finished) -> None:
        _, outcomes = finished
        html = page(outcomes["snapshot_report"].published)
        masks = {row["doc_id"]: row for row in rows_of(outcomes["datamask_masks"].published).iter_rows(named=True)}
        kept, z = [name for name, row in masks.items() if row["selected"]], vectors(outcomes)
        lowest = outcomes["pruned_documents"].facts["lowest_surviving_quality"]
        rows = {
            row["doc_id"]: row for row in rows_of(outcomes["fineweb_mask_manifest"].published).iter_rows(named=True)
        }
        cards = re.findall(r"<b>((?:kept|dropped)[^<]*)</b> ([^<]+)</header>\n<dl>(.*?)</dl>", html)
        assert len(cards) == 27
        for verdict, name, facts in cards:
            row = rows[name]
            assert verdict.startswith("kept" if row["decision"] == "kept" else "dropped")
            assert f"<dt>decided by</dt><dd>{row['stage']}" in facts
            assert f"quality {row['quality']:.2f} of 15" in facts
            if row["decision"] == "pruned":
                assert f"quality {lowest - row['quality']:.2f} below the lowest that survives, {lowest:.2f}" in facts
            else:
                others = [z[k] for k in kept if k != name]
                cosine = float(np.mean([z[name] @ other for other in others]))
                assert re.search(rf"mean cosine with what (else )?is kept {cosine:.3f}; ", facts)
                rank = masks[name]["rank"]
                assert f"place {rank} of 36 by the solver&#x27;s score" in facts
                assert f"7 are kept: {abs(rank - 7)} places" in facts

    def test_texts_are_excerpts_and_run_nothing(self, project: Project, tmp_path: Path) -> None:
        evil = "<script>alert(1)</script> <img src=x onerror=alert(1)> " + "river & valley " * 200
        write_shard(tmp_path, "S", "000", 3, texts=[evil, evil + "a", "river\n\n water"], ids=["<i>", 'b"', "c"])
        own = project.with_settings(**{"source.url": str(tmp_path), "select.budget": "1"})
        html = page(own.full("S")["snapshot_report"].published)
        assert "<script" not in html and "<img src=x" not in html and "<i>" not in html
        quoted = re.findall(r"<blockquote>(.*?)</blockquote>", html, re.DOTALL)
        assert "river water" in quoted
        plain = [q.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&") for q in quoted]
        assert max(len(q) for q in plain) == 300


class TestPage:
    def test_it_is_one_small_page_with_every_figure_and_nothing_of_this_machine(self, finished: Finished) -> None:
        project, outcomes = finished
        outcome = outcomes["snapshot_report"]
        html = page(outcome.published)
        assert len(html.encode()) == outcome.facts["page_bytes"] < 1_000_000
        assert html.count("data:image/png;base64,") == len(outcome.figures) == 8
        assert set(re.findall(r'(?:src|href)="(?!data:image/png)([^"]{1,5})', html)) <= {f"#s{k}" for k in range(1, 99)}
        for path in outcome.published.folder.iterdir():
            if path.is_file() and not path.name.startswith("."):
                assert str(project.store.root).encode() not in path.read_bytes(), path.name
        assert "proven" in html and "99." in html
        for words in (
            "t-SNE of the embeddings of all 36 documents",
            "Diversity only (λ = 0) are solved on them",
            "<td>diversity, each document with itself too</td>",
        ):
            assert words in html

    def test_figures_of_an_event_stay_small(self, finished: Finished) -> None:
        assert sum(len(png) for png in finished[1]["snapshot_report"].figures.values()) < 120_000

    def test_a_second_run_makes_nothing_again(self, finished: Finished, tmp_path: Path) -> None:
        again = copied(finished[0], tmp_path / "root")
        before = tree(tmp_path / "root")
        path = again.store.current("snapshot_report", FIRST).path("report")
        stamp = path.stat().st_mtime_ns
        outcome = again.stage("snapshot_report", FIRST)
        assert (outcome.facts, outcome.figures) == (
            finished[1]["snapshot_report"].facts,
            finished[1]["snapshot_report"].figures,
        )
        assert path.stat().st_mtime_ns == stamp
        assert tree(tmp_path / "root") == before

    def test_made_again_from_nothing_it_has_the_same_bytes(self, finished: Finished, tmp_path: Path) -> None:
        again = copied(finished[0], tmp_path / "root")
        before = tree(tmp_path / "root" / "snapshot_report")
        shutil.rmtree(tmp_path / "root" / "snapshot_report")
        again.stage("snapshot_report", FIRST)
        assert tree(tmp_path / "root" / "snapshot_report") == before

    @pytest.mark.parametrize("rows", [0, 1, 2])
    def test_a_snapshot_of_hardly_any_rows_has_a_page_that_says_so(
        self, project: Project, tmp_path: Path, rows: int
    ) -> None:
        write_shard(tmp_path, "S", "000", rows)
        own = project.with_settings(**{"source.url": str(tmp_path), "select.budget": str(min(rows, 1))})
        outcome = own.full("S")["snapshot_report"]
        html = page(outcome.published)
        assert outcome.facts["kept"] == min(rows, 1)
        assert f"{min(rows, 1)} kept documents" in html
        if not rows:
            assert "S holds no readable document" in html
            assert outcome.published.rows == 0

    @pytest.mark.parametrize("kind", [pa.int64(), pa.list_(pa.string()), pa.dictionary(pa.int32(), pa.string())])
    def test_a_root_with_an_apostrophe_and_urls_of_any_type(
        self, project: Project, tmp_path: Path, kind: pa.DataType
    ) -> None:
        path = write_shard(tmp_path / "source", "S", "000", 2)
        table = pq.read_table(path)
        urls: dict[bool, list] = {True: ["https://a.org/x"] * 2, False: [1, 2] if kind == pa.int64() else [["b"], []]}
        texts = pa.types.is_dictionary(kind)
        at = table.schema.get_field_index("url")
        pq.write_table(table.set_column(at, "url", pa.array(urls[texts], kind)), path)
        root = tmp_path / "somebody's root"
        shutil.copytree(project.store.root, root)
        own = project.with_settings(
            **{"source.url": str(tmp_path / "source"), "storage.root": str(root), "select.budget": "1"}
        )
        published = own.full("S")["snapshot_report"].published
        hosts = json.loads((published.folder / NUMBERS).read_text("utf-8"))["hosts"]
        assert hosts["largest"] == ([{"host": "a.org", "scored": 2, "kept": 1}] if texts else [])

    def test_a_source_as_it_comes_in_the_wild(self, wild: Finished) -> None:
        _, outcomes = wild
        outcome = outcomes["snapshot_report"]
        html = page(outcome.published)
        rows = rows_of(outcomes["fineweb_mask_manifest"].published)
        assert outcome.counts == dict(rows["decision"].value_counts().iter_rows())
        assert "dropped: no usable text" in html and "dropped: a duplicate" in html and "(no text)" in html
        assert "places outside" not in html or outcome.facts["kept"] < outcome.facts["choosable"]
        assert outcome.facts["tokens_kept"] is None
        assert numbers(outcome.published).groups["kept"].uncounted > 0
        assert outcome.published.snapshot == WILD


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"select.split": 20, "select.compare_steps": 0}, "their gaps, weighted by budget, come to"),
        ({"select.scope": "snapshot", "select.compare_steps": 0}, "the snapshot as one pool"),
        ({"select.budget": "300tok", "select.compare_steps": 0}, "proven that no mask"),
        ({"select.lambda": 0.0}, "λ = 0, of the snapshot"),
        ({"select.quota": "cluster"}, "every quota has a cut of its own"),
        ({"select.objective": "facility_location", "select.solver": "greedy"}, "proven that no mask"),
        ({"select.objective": "disf", "select.solver": "greedy"}, "There is no bound to compare the mask with"),
        ({"select.solver": "semdedup"}, "near duplicate"),
        ({"select.budget": "0"}, "0 kept documents"),
    ],
)
def test_every_way_of_selecting_has_its_page(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, object], says: str
) -> None:
    # figures are drawn of numbers alone, and drawing them takes most of a report's time
    monkeypatch.setattr("dagster_datamask.stages.report.figures", lambda *numbers: [])
    own = copied(finished[0], tmp_path / "root").with_settings(**changed)
    for name in ("datamask_masks", "fineweb_mask_manifest"):
        own.stage(name, FIRST)
    html = page(own.stage("snapshot_report", FIRST).published)
    assert says in html


COMPARED = ("baseline_random", "baseline_fineweb_edu", "baseline_semdedup", "baseline_quality")


@pytest.fixture(scope="module")
def compared(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Outcome]:
    """The finished project with some baselines, and its report made anew."""
    own = copied(finished[0], tmp_path_factory.mktemp("compared") / "root")
    for name in COMPARED:
        own.stage(name, FIRST)
    return own, own.stage("snapshot_report", FIRST)


class TestOtherSelections:
    def test_their_numbers_are_those_of_their_documents(
        self, finished: Finished, compared: tuple[Project, Outcome]
    ) -> None:
        own, outcome = compared
        rows = rows_of(finished[1]["fineweb_mask_manifest"].published)
        z = vectors(finished[1])
        kept = {"DataMask": set(rows.filter(pl.col("decision") == "kept")["doc_id"])}
        for name in COMPARED:
            kept[name] = set(rows_of(own.store.current(name, FIRST)).filter("selected")["doc_id"])
        told = {row["selection"]: row for row in outcome.facts["selections"]}
        assert list(told) == ["DataMask", *sorted(COMPARED)]
        for name, ids in kept.items():
            of = rows.filter(pl.col("doc_id").is_in(ids))
            embedded = [i for i in ids if i in z]
            assert told[name]["documents"] == len(of) == 7
            assert told[name]["tokens"] == of["token_count"].sum()
            assert told[name]["mean tokens"] == pytest.approx(of["token_count"].mean())
            assert told[name]["mean quality"] == pytest.approx(of["quality"].mean())
            assert told[name]["with a vector"] == len(embedded)
            assert told[name]["mean cosine"] == pytest.approx(mean_cosine(np.array([z[i] for i in embedded])))
        assert told["baseline_random"]["with a vector"] < 7
        assert len(outcome.facts["overlaps"]) == 10
        for pair in outcome.facts["overlaps"]:
            a, b = kept[pair["a"]], kept[pair["b"]]
            assert pair["in both"] == len(a & b)
            assert pair["jaccard"] == pytest.approx(len(a & b) / len(a | b))
            assert pair["share of a"] == pair["share of b"] == pytest.approx(len(a & b) / 7)

    def test_they_are_on_the_page_and_in_the_fingerprint(self, compared: tuple[Project, Outcome]) -> None:
        own, outcome = compared
        html = page(outcome.published)
        for name in COMPARED:
            assert f"<td>{name}</td>" in html
            assert outcome.published.inputs[name] == own.store.current(name, FIRST).fingerprint
        assert {"Published selections, beside each other", "How far the published selections agree"} <= set(
            outcome.figures
        )

    def test_the_corpus_s_page_adds_them_up_where_all_snapshots_have_them(
        self, compared: tuple[Project, Outcome]
    ) -> None:
        own, outcome = compared
        corpus = own.stage("selection_report", "")
        assert corpus.facts["selections"] == outcome.facts["selections"]
        assert corpus.facts["overlaps"] == outcome.facts["overlaps"]
        assert "baseline_semdedup" in page(corpus.published)

    def test_one_made_otherwise_is_left_out_and_named(self, finished: Finished, tmp_path: Path) -> None:
        own = copied(finished[0], tmp_path / "root")
        own.with_settings(**{"select.budget": "20%"}).stage("baseline_random", FIRST)
        own.stage("baseline_dclm_top", FIRST)
        outcome = own.stage("snapshot_report", FIRST)
        assert [row["selection"] for row in outcome.facts["selections"]] == ["DataMask", "baseline_dclm_top"]
        assert "<td>baseline_random</td>\n<td>made under other settings or code</td>" in page(outcome.published)


class TestRefused:
    def test_settings_other_than_those_in_force(self, finished: Finished, tmp_path: Path) -> None:
        own = copied(finished[0], tmp_path / "root")
        before = own.store.current("snapshot_report", FIRST).fingerprint
        outcome = own.with_settings(**{"select.lambda": 0.3}).stage("snapshot_report", FIRST)
        assert outcome.published is None
        assert "select.lambda = 0.5 (in force: 0.3)" in failed(outcome)["made_under_these_settings"]["different"]
        assert own.store.current("snapshot_report", FIRST).fingerprint == before

    def test_an_experiment_whose_manifest_was_published_all_the_same(self, finished: Finished, tmp_path: Path) -> None:
        """The Launchpad's λ for masks and manifest both: what is in force still is the file's."""
        own = copied(finished[0], tmp_path / "root")
        changed = own.with_settings(**{"select.lambda": 0.3})
        for name in ("datamask_masks", "fineweb_mask_manifest"):
            changed.stage(name, FIRST)
        run = own.run()
        launched = Run(run.store, changed.settings, own.settings, run.accelerator, run.log)
        outcome = snapshot_report(launched, own.source, FIRST)
        assert outcome.published is None
        (check,) = outcome.checks
        assert (check.name, check.blocking, check.passed) == ("made_under_these_settings", True, False)
        assert "select.lambda = 0.3 (in force: 0.5)" in check.facts["different"]

    def test_a_manifest_of_other_masks_than_the_published(self, finished: Finished, tmp_path: Path) -> None:
        own = copied(finished[0], tmp_path / "root").with_settings(**{"select.seed": 1})
        own.stage("datamask_masks", FIRST)
        with pytest.raises(InconsistentFiles, match="made from another generation of datamask_masks"):
            own.stage("snapshot_report", FIRST)

    def test_a_source_that_was_rewritten_since(self, finished: Finished, tmp_path: Path) -> None:
        project = finished[0]
        source = tmp_path / "source"
        shutil.copytree(project.settings.source.url, source)
        own = copied(project, tmp_path / "root").with_settings(**{"source.url": str(source)})
        shutil.rmtree(own.store.folder("snapshot_report", FIRST))
        write_shard(source, FIRST, "001_00000", 25, texts=["other"] * 25)
        with pytest.raises(InconsistentFiles, match="was rewritten since raw_shards read it"):
            own.stage("snapshot_report", FIRST)


def test_its_fingerprint_is_of_what_it_shows(finished: Finished) -> None:
    _, outcomes = finished
    published = outcomes["snapshot_report"].published
    shown = ("datamask_masks", "e5_embeddings", "fineweb_mask_manifest", "kmeans_clusters", "pruned_documents")
    made = {name: outcomes[name].published for name in (*shown, "raw_shards")}
    assert published.inputs == fingerprints(made)
