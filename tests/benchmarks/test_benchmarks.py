"""Every subject of the benchmarks at toy size: that it measures what it says, whatever the seconds are."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks import certified, disf, dvrl, facility, gpu, gradient, sharded
from benchmarks.documents import BLOCK, SCORES, Documents, page_like, synthetic, synthetic_block
from benchmarks.measure import (
    Row,
    above,
    absent,
    against,
    at_least,
    at_most,
    in_child,
    in_turn,
    keep,
    machine,
    measured,
    show,
)
from dagster_datamask.accelerator import Accelerator
from dagster_datamask.selection.dvrl import DvrlOptions
from dagster_datamask.selection.policy_gradient import PolicyGradientOptions


def by_end(rows: list[Row]) -> dict[str, Row]:
    return {row.what.split(": ")[-1]: row for row in rows}


def pages() -> Documents:
    block = synthetic_block(0, 16, 300)
    return Documents("web pages 300 × 16", block.ids, block.embeddings.astype(np.float16), np.zeros(300))


def test_synthetic_pools_are_prefixes_of_one_another_with_mean_cosine_about_0_7() -> None:
    small, large = synthetic(1_000), synthetic(BLOCK + 10)
    assert small.ids == large.ids[:1_000] and np.array_equal(small.embeddings, large.embeddings[:1_000])
    assert len(set(large.ids)) == BLOCK + 10
    mean = large.embeddings.mean(axis=0, dtype=np.float64)
    assert 0.68 < mean @ mean < 0.72
    np.testing.assert_allclose(np.linalg.norm(large.embeddings, axis=1), 1.0, atol=1e-5)
    assert np.mean((large.quality >= SCORES[0]) & (large.quality <= SCORES[1])) > 0.8


def test_pages_are_multiplied_into_others_like_them() -> None:
    some = page_like(pages(), 500)
    z = some.embeddings.astype(np.float64)
    assert z.shape == (500, 16) and len(set(some.ids)) == 500 and some.embeddings.dtype == np.float16
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    copies = np.einsum("ij,ij->i", z[:200], z[300:])
    assert copies.max() < 1 - 1e-4 and copies.mean() > 0.8


def test_rows_judge_by_their_bars() -> None:
    assert at_most("", 2.0, 2.0).met and not at_most("", 2.1, 2.0).met
    assert at_least("", 2.0, 2.0).met and not at_least("", 1.9, 2.0).met
    assert against("", 1.0, 4.0, most=0.25).met and not against("", 1.1, 4.0, most=0.25).met
    assert against("", 1.0, 4.0, least=0.25).met and not against("", 0.9, 4.0, least=0.25).met
    assert against("", 1.0, 4.0).met is None and against("", 1.0, 4.0).ratio == 0.25
    assert above("", 1.0, 1.0).met and not above("", 0.9, 1.0).met
    assert absent("", "why").met is None


def test_works_are_timed_in_turn() -> None:
    order: list[str] = []
    timed = in_turn(2, {"a": lambda: order.append("a"), "b": lambda: order.append("b") or 7})
    assert order == ["a", "b", "a", "b"]
    assert timed["b"].results == [7, 7] and len(timed["a"].wall) == len(timed["a"].cpu) == 2


def test_a_childs_peak_is_what_the_work_itself_adds() -> None:
    found = in_child("tests.benchmarks.child:taking", megabytes=64)
    assert found["result"] == 64 * 125_000
    assert 0.95 < found["growth"] / 64e6 < 1.3


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child takes seconds to start."""
    for module in (certified, sharded, facility):
        monkeypatch.setattr(module, "in_child", lambda case, **arguments: measured(case, arguments))


@pytest.mark.usefixtures("in_this_process")
def test_certified() -> None:
    rows = certified.costs(synthetic(2_000, 32), [0.1], rounds=1)
    assert [row.what.split(": ")[1] for row in rows] == ["gap", "gap / achievable gain", "search", "whole"]
    assert 0 <= rows[0].ours < 1e-4 and rows[0].ours < rows[1].ours < 1e-3 and rows[2].ours < rows[3].ours
    assert [row.facts["growth"] >= 0 for row in certified.memory(3_000, 32)] == [True, True]
    value, gap, _ = certified.real(pages(), rounds=1)
    assert value.facts["upper_bound"] - value.ours == pytest.approx(gap.ours)


def test_gradient() -> None:
    for form in ("independent", "ordered"):
        pool = gradient.recipe_pool(2_000, 16)
        assert pool.n == 2_000
        (row,) = gradient.steps(pool, PolicyGradientOptions(steps=100, group=4, batch=0.1, gradient=form), 3)
        assert len(row.facts["step_seconds"]) == 3 and len(row.facts["dense"]) == 3
        assert (row.met is None) == (form == "ordered")
    dense, gather = gradient.bare_operations(4, 50, 5, 8)
    np.testing.assert_allclose(dense(), gather().numpy(), rtol=1e-5)
    (row,) = gradient.share(synthetic(1_000, 16), 0.5, 300)
    assert 0.5 < row.ours <= 1 and row.met is None


def test_facility_location_without_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("submodlib", "apricot"):
        monkeypatch.setitem(sys.modules, name, None)
    rows = facility.compare(synthetic(200, 16), rounds=1)
    assert len(rows) == 3 and all(row.other == facility.EXTRA and row.met is None for row in rows)


@pytest.mark.filterwarnings("ignore")
def test_facility_location_beside_peers() -> None:
    pytest.importorskip("submodlib", reason=facility.EXTRA)
    pytest.importorskip("apricot", reason=facility.EXTRA)
    rows = facility.compare(synthetic(300, 16), rounds=1)
    values = [row for row in rows if row.what.endswith("objective")]
    assert len(values) == 3 and values[0].met
    assert all(0.9 < row.ratio < 1.1 for row in values) and values[2].ratio == pytest.approx(1, abs=1e-4)


def test_cover_value_is_facility_location() -> None:
    pool = synthetic(100, 8)
    found = facility.find(pool)
    assert facility.cover_value(facility.unit_rows(pool), found.indices) == pytest.approx(found.value, rel=1e-6)


@pytest.mark.usefixtures("in_this_process")
def test_facility_location_memory() -> None:
    row = facility.memory(300, 16)
    assert row.met and 0 < row.facts["result"] <= 1


def test_disf() -> None:
    for metric in disf.OURS:
        rows = disf.compare(synthetic(400, 8), metric, [100, 200], synthetic(400, 8))
        assert len(rows) == 5 + (metric == "disf_second_moment") and rows[0].met and rows[2].met
        assert rows[4].facts["extrapolated"] and rows[4].other == pytest.approx(4 * rows[3].other)


def test_dvrl() -> None:
    rows = dvrl.compare(
        synthetic(1_000, 16), 0.5, PolicyGradientOptions(steps=200, group=32, batch=0.5), DvrlOptions(steps=5, group=8)
    )
    assert [row.met for row in rows[:3]] == [True] * 3


@pytest.mark.usefixtures("in_this_process")
def test_sharded() -> None:
    shards = [sharded.halved(synthetic_block(k, 16, 500)) for k in range(3)]
    for lam in (0.0, 0.5):
        rows = by_end(sharded.compare("toy", shards, lam, gap=1e-4, passes=30, rounds=1))
        assert rows["documents that differ"].ours == 0
        assert rows["passes"].ours > 1
    (row,) = sharded.memory(1, 2, 1_000)
    assert 0 <= row.facts["many"]["result"] < 1e-3


def test_nothing_is_measured_without_a_cuda_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / "gpu.json")])
    gpu.main()
    assert "no CUDA device" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_the_device_is_compared_with_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(gpu.torch.cuda, "max_memory_allocated", lambda device: 0)
    rows = by_end(gpu.on_device(synthetic(1_000, 16, np.float16), Accelerator(), steps=50))
    assert rows["certified, |value − the CPU's|"].ours == 0 and rows["certified, |bound − the CPU's|"].ours == 0
    assert rows["certified, device memory / embeddings"].met is False
    assert rows["policy gradient, value − the CPU's certified bound"].ours < 0
    assert json.dumps([row.facts for row in rows.values()], allow_nan=False)


def test_runs_are_kept_a_subject_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "kept.json"
    keep(out, "a", {"rows": [1]})
    keep(out, "b", {"rows": [2]})
    keep(out, "a", {"rows": [3]})
    assert json.loads(out.read_text("utf-8")) == {"a": {"rows": [3]}, "b": {"rows": [2]}}
    assert {"cpu", "cores", "load", "python", "numpy"} <= set(machine())


def test_a_table_shows_every_row() -> None:
    console = Console(width=150, record=True, file=io.StringIO())
    show("a subject", [at_most("gap", 2e-6, 1e-6), against("time", 1.0, 4.0, most=0.3, unit="s")], console)
    text = console.export_text()
    assert "2e-06" in text and "NO" in text and "0.25" in text and "ratio ≤ 0.3" in text
