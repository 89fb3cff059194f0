from itertools import combinations
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_datamask.selection.objectives import BadInput, QualityDiversity
from dagster_datamask.selection.solve import solve
from dagster_datamask.selection.sweep import parse_lambdas, sweep, sweep_file

from .oracles import ids_of, value_of, vectors


@pytest.mark.parametrize(
    ("text", "lambdas"),
    [
        ("0,0.1,0.5", (0, 0.1, 0.5)),
        ("1, 0 ,0.5,0.5", (0, 0.5, 1)),
        ("0:1:0.25", (0, 0.25, 0.5, 0.75, 1)),
        ("0:1:0.4", (0, 0.4, 0.8)),
        ("0.3:0.3:0.1,1", (0.3, 1)),
        ("0,0.05,…,0.2", (0, 0.05, 0.1, 0.15, 0.2)),
        ("0,0.5,...,1", (0, 0.5, 1)),
        ("0,0.1,...,0.3,0.9,1e-3", (0, 0.001, 0.1, 0.2, 0.3, 0.9)),
        ("1/3,2/3", (1 / 3, 2 / 3)),
    ],
)
def test_lambdas_as_people_write_them(text: str, lambdas: tuple[float, ...]) -> None:
    assert parse_lambdas(text) == lambdas


def test_a_range_has_the_decimals_written() -> None:
    assert parse_lambdas("0:1:0.05") == tuple(float(f"{k * 5 / 100:.2f}") for k in range(21))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' is no number"),
        ("0,half", "'half' is no number; write 0,0.1,0.5 or 0:1:0.05"),
        ("0,nan", "'nan' is no number"),
        ("0,1.5", "must lie in .0, 1., not 1.5"),
        ("-0.1,1", "not -0.1"),
        ("0.5", "is one λ; a sweep takes two or more"),
        ("0.5,0.5", "is one λ"),
        ("0:1", "a range is first:last:step"),
        ("0:1:0", "ascends by a step above 0"),
        ("1:0:0.1", "ascends"),
        ("0,…,1", "dots stand between"),
        ("0,0.1,…", "dots stand between"),
        ("0.1,0,…,1", "ascends"),
        ("0:1:1e-9", "1000000001 λ; 1001 are the most"),
    ],
)
def test_lambdas_that_cannot_be_are_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_lambdas(text)


def terms(z: np.ndarray, scaled: np.ndarray, chosen: tuple[int, ...]) -> tuple[float, float]:
    """(quality, diversity) of a mask from their definitions."""
    rows = list(chosen)
    return float(scaled[rows].mean()), -float((z[rows] @ z[rows].T).sum()) / len(rows) ** 2


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 4), st.sampled_from([0.0, 1.5]))
def test_no_mask_lies_beyond_any_line(seed: int, n: int, d: int, shift: float) -> None:
    rng = np.random.default_rng(seed)
    z, quality = vectors(rng, n, d, shift), rng.integers(0, 4, n).astype(np.float64)
    size = int(rng.integers(1, n + 1))
    found = sweep(z, quality, [0.7, 0.0, 1.0, 0.2], size, ids=ids_of(n))
    rows = found.rows()
    spread = np.ptp(quality)
    scaled = (quality - quality.min()) / spread if spread else np.zeros(n)
    masks = [terms(z, scaled, u) for u in combinations(range(n), size)]
    for row in rows:
        best = max(row["lambda"] * q + (1 - row["lambda"]) * v for q, v in masks)
        assert best <= row["upper_bound"] + 1e-12
        assert row["value"] == pytest.approx(row["lambda"] * row["quality"] + (1 - row["lambda"]) * row["diversity"])
    assert found.uniform is not None
    assert found.uniform == pytest.approx(np.mean(masks, axis=0), abs=1e-9)


def test_each_row_is_what_solve_finds_and_the_overlap_counts_common_documents() -> None:
    rng = np.random.default_rng(3)
    z, quality = vectors(rng, 60, 5, 0.5), rng.uniform(0, 15, 60)
    found = sweep(z, quality, [1, 0, 0.1], 12, ids=ids_of(60))
    assert found.lambdas == (0, 0.1, 1)
    before = None
    for lam, row, overlap in zip(found.lambdas, found.rows(), found.overlaps, strict=True):
        alone = solve(QualityDiversity(z, quality, lam, "per_pool"), 12, solver="certified", ids=ids_of(60))
        assert (row["value"], row["upper_bound"]) == (alone.value, alone.certificate.upper_bound)
        scaled = (quality - quality.min()) / np.ptp(quality)
        assert row["value"] == pytest.approx(
            value_of(QualityDiversity(z, quality, lam, "per_pool"), alone.indices.tolist(), scaled)
        )
        expected = None if before is None else len(before & set(alone.indices.tolist())) / 12
        assert row["overlap"] == overlap == expected
        before = set(alone.indices.tolist())
    # quality alone against diversity alone: the trade-off is real here, or the test says nothing
    assert 0 < min(o for o in found.overlaps if o is not None) < 1


@pytest.mark.parametrize(("n", "size"), [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2)])
def test_smallest_pools(n: int, size: int) -> None:
    z = vectors(np.random.default_rng(n), n, 3)
    found = sweep(z, np.arange(n, dtype=np.float64), [0, 1], size, ids=ids_of(n))
    assert [s.indices.size for s in found.selections] == [size, size]
    assert found.overlaps[1] == (None if not size else pytest.approx(found.overlaps[1]))
    assert (found.uniform is None) == (size == 0)


def test_one_lambda_is_no_sweep() -> None:
    with pytest.raises(ValueError, match="two different λ or more"):
        sweep(vectors(np.random.default_rng(0), 4, 2), np.arange(4.0), [0.5, 0.5], 2, ids=ids_of(4))


def test_progress_counts_the_lambdas() -> None:
    told: list[tuple[int, int, float]] = []
    z = vectors(np.random.default_rng(0), 20, 3)
    found = sweep(
        z, np.arange(20.0), [0, 0.5, 1], 4, ids=ids_of(20), progress=lambda k, of, e: told.append((k, of, e["value"]))
    )
    assert told == [(k + 1, 3, s.value) for k, s in enumerate(found.selections)]


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    z = vectors(rng, 30, 4).astype(np.float16)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(z.ravel()), 4)
    pq.write_table(
        pa.table({"id": ids_of(30), "score": rng.uniform(0, 5, 30), "embedding": lists}), tmp_path / "in.parquet"
    )
    return tmp_path / "in.parquet"


def test_a_file_is_swept(pool: Path) -> None:
    told = sweep_file(pool, [0, 0.5, 1], budget="20%")
    assert (told["n"], told["budget"], told["scale"], told["solver"]) == (30, 6, "per_pool", "certified")
    assert [row["lambda"] for row in told["rows"]] == [0, 0.5, 1]
    top = np.sort(pq.read_table(pool)["score"].to_numpy())[-6:]
    assert told["rows"][2]["quality_raw"] == pytest.approx(top.mean())
    assert told["rows"][0]["quality_raw"] < told["rows"][2]["quality_raw"]
    assert told["rows"][0]["diversity"] > told["rows"][2]["diversity"]


def test_faults_name_the_file(pool: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"in\.parquet: budget 31 asks for more than the 30"):
        sweep_file(pool, [0, 1], budget=31)
    table = pq.read_table(pool)
    pq.write_table(table.drop_columns(["score"]), tmp_path / "bare.parquet")
    with pytest.raises(ValueError, match=r"bare\.parquet: has no column 'score'"):
        sweep_file(tmp_path / "bare.parquet", [0, 1], budget=3)
    scores = table["score"].to_pylist()
    scores[4] = float("inf")
    pq.write_table(table.set_column(1, "score", pa.array(scores)), tmp_path / "bad.parquet")
    with pytest.raises(BadInput, match=r"bad\.parquet: .*'doc-4' \(row 4\): the score is not finite"):
        sweep_file(tmp_path / "bad.parquet", [0, 1], budget=3)
