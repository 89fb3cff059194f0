"""The benchmark of the corpus solver at toy size: that its vectors are what they are said to be, and what it counts."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import corpus_solver
from benchmarks.corpus_solver import BARS, DIMENSION, MiniLM, cosine_block, opened, products, read, solved, solving
from benchmarks.documents import BLOCK

N = 2 * BLOCK


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    opened(folder, N, 0.0, cosine_block, BLOCK)
    return folder


def stored(folder: Path, n: int = N) -> np.ndarray:
    files = [np.fromfile(path, np.float16) for path in sorted(folder.glob("*/vectors.bin"))]
    return np.concatenate(files).reshape(n, DIMENSION)


def test_drawn_vectors_have_the_mean_and_the_spectrum_of_the_pages() -> None:
    rng = np.random.default_rng(0)
    d = 24
    pages = rng.standard_normal((4000, d)) * np.arange(1, d + 1) ** -0.5 + 0.3 * rng.standard_normal(d)
    unit = pages / np.linalg.norm(pages, axis=1, keepdims=True)
    like = MiniLM(pages.astype(np.float16))
    drawn = np.concatenate([like.block(k, 10_000)[0] for k in range(4)]).astype(np.float64)
    np.testing.assert_allclose(np.linalg.norm(drawn, axis=1), 1.0, atol=1e-5)
    assert np.sum(drawn.mean(axis=0) ** 2) == pytest.approx(np.sum(unit.mean(axis=0) ** 2), abs=0.01)
    ours, theirs = (np.linalg.eigvalsh(np.cov(z.T))[::-1] for z in (drawn, unit))
    np.testing.assert_allclose(ours[:12], theirs[:12], rtol=0.1)
    # no two are one page
    assert np.max(drawn[:300] @ drawn[300:600].T) < 1 - 1e-3


def test_blocks_are_the_same_for_every_run_and_no_document_comes_twice(folder: Path, tmp_path: Path) -> None:
    z = stored(folder)
    assert len(np.unique(z, axis=0)) == N
    again = opened(tmp_path, N, 0.0, cosine_block, N)
    assert np.array_equal(stored(tmp_path), z) and again.n == N and again.names == ["0000"]
    unit = z.astype(np.float64)
    assert np.sum(unit.mean(axis=0) ** 2) == pytest.approx(0.7, abs=0.02)
    with pytest.raises(AssertionError):
        opened(tmp_path / "other", N, 0.0, cosine_block, BLOCK + 1)


def test_floors_go_through_all_vectors(folder: Path) -> None:
    assert read(folder) == N * DIMENSION * 2
    assert products(folder) == pytest.approx(float(stored(folder).astype(np.float64).sum()), rel=1e-3)


def test_rows_are_gap_passes_and_a_pass_of_every_lambda(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_solver, "LAMBDAS", (0.5,))
    gap, passes, pass_, cpu = solved("cosine", folder, N, cosine_block, BLOCK)
    assert gap.bar == "≤ 1e-06" and passes.bar == "≤ 30" and gap.met and passes.met
    facts = gap.facts
    assert passes.ours == facts["passes"] + facts["certifying"]
    # every point is scored at, and once more for the bound
    assert facts["points"] <= facts["passes"] and facts["certifying"] >= 1.1
    assert facts["bytes"] == N * DIMENSION * 2 and facts["mean_cosine"] == pytest.approx(0.7, abs=0.02)
    assert pass_.met is None and pass_.ratio is not None and cpu.ours is not None


def test_a_child_solves_what_is_written_and_writes_nothing(folder: Path, tmp_path: Path) -> None:
    found = solving(str(folder), BLOCK, "minilm")()
    assert 0 <= found["gap"] <= BARS["minilm"][0] and found["peak"] > BLOCK * DIMENSION * 2 and found["cpu"] > 0
    with pytest.raises(AssertionError, match="is written already"):
        solving(str(tmp_path), BLOCK, "cosine")()
