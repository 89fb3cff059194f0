import numpy as np
import pytest

from dagster_datamask import keyed
from dagster_datamask.selection.objectives import BadInput, QualityDiversity, canonical_order, map_blocks

from .oracles import ids_of, vectors

Q = np.array([2.0, 8.0, 5.0, 11.0])


def scaled(scale: str, constants: tuple[float, float] | None = None, quality: np.ndarray = Q) -> list[float]:
    pool = QualityDiversity(np.eye(4), quality, 0.5, scale, constants).prepare(ids_of(4))
    back = np.empty(4)
    back[pool.order] = pool.scaled
    return back.tolist()


def test_scales() -> None:
    assert scaled("raw") == Q.tolist()
    assert scaled("minmax", (1.0, 5.0)) == [0.25, 1.75, 1.0, 2.5]  # linear, and not clipped
    np.testing.assert_allclose(scaled("per_pool"), (Q - 2) / 9)
    np.testing.assert_allclose(scaled("zscore"), Q / Q.std())


@pytest.mark.parametrize("scale", ["raw", "per_pool", "zscore"])
def test_constant_quality_scales_to_zero(scale: str) -> None:
    assert scaled(scale, quality=np.full(4, 3.3)) == [0.0] * 4
    assert scaled("minmax", (3.0, 3.0)) == [0.0] * 4


def test_zscore_divides_diversity_by_the_spread_of_its_linear_scores() -> None:
    rng = np.random.default_rng(0)
    z = vectors(rng, 50, 4, 0.3)
    pool = QualityDiversity(z, rng.uniform(0, 1, 50), 0.25, "zscore").prepare(ids_of(50))
    assert 1 / pool.diversity_scale == pytest.approx(np.std(2 * z @ z.mean(axis=0)), rel=1e-12)
    assert pool.beta == pytest.approx(0.75 * pool.diversity_scale)
    alike = QualityDiversity(np.ones((3, 2)), None, 0.0, "zscore").prepare(ids_of(3))
    assert alike.beta == 0.0


def test_the_pool_does_not_depend_on_the_order_of_the_input() -> None:
    rng = np.random.default_rng(1)
    z, q, ids = rng.standard_normal((400, 7)).astype(np.float16), rng.uniform(0, 9, 400), ids_of(400)
    shuffle = rng.permutation(400)
    one = QualityDiversity(z, q, 0.3, "zscore").prepare(ids)
    other = QualityDiversity(z[shuffle], q[shuffle], 0.3, "zscore").prepare([ids[i] for i in shuffle])
    for name in ("vectors", "inverse_norms", "mean", "scaled", "ties"):
        assert getattr(one, name).tobytes() == getattr(other, name).tobytes()
    assert (one.checksum, one.beta) == (other.checksum, other.beta)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_stored_vectors_are_normalised_again(dtype: type) -> None:
    rng = np.random.default_rng(2)
    stored = (vectors(rng, 300, 20) * rng.uniform(0.5, 2, (300, 1))).astype(dtype)
    pool = QualityDiversity(stored, None, 0.0).prepare(ids_of(300))
    exact = stored[pool.order].astype(np.float64)
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    np.testing.assert_allclose(pool.rows(np.arange(300)), exact, atol=1e-15)
    np.testing.assert_allclose(pool.vectors, exact, atol=1e-7)
    np.testing.assert_allclose(pool.mean, exact.mean(axis=0), atol=1e-15)
    np.testing.assert_allclose(pool.total(np.array([3, 200])), exact[[3, 200]].sum(axis=0), atol=1e-15)
    np.testing.assert_allclose(pool.dots(np.array([5, 7]), exact[0]), exact[[5, 7]] @ exact[0], atol=1e-15)


def test_float64_vectors_beyond_float32_still_have_a_direction() -> None:
    pool = QualityDiversity(np.array([[1e200, 0.0], [0.0, 1e-150]]), None, 0.0)
    with pytest.raises(BadInput, match=r"'doc-0' \(row 0\): the embedding is not finite"):
        pool.prepare(ids_of(2))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.nan, r"2 documents: 'doc-1' \(row 1\), 'doc-3' \(row 3\): the embedding is not finite"),
        (np.inf, r"2 documents: 'doc-1' \(row 1\), 'doc-3' \(row 3\): the embedding is not finite"),
        (0.0, r"2 documents: 'doc-1' \(row 1\), 'doc-3' \(row 3\): the embedding is zero"),
    ],
)
def test_bad_vectors_are_named(value: float, message: str) -> None:
    z = np.ones((5, 3))
    z[[1, 3]] = value
    with pytest.raises(BadInput, match=message):
        QualityDiversity(z, None, 0.0).prepare(ids_of(5))


def test_a_long_list_of_bad_rows_is_cut_and_counted() -> None:
    with pytest.raises(BadInput, match=r"^9 documents: 'doc-0' .* 'doc-4' \(row 4\) and 4 more: "):
        QualityDiversity(np.zeros((9, 3)), None, 0.0).prepare(ids_of(9))


def test_bad_scores_are_named_unless_lambda_is_zero() -> None:
    quality = np.array([1.0, np.nan, 2.0, np.inf])
    with pytest.raises(BadInput, match=r"2 documents: 'doc-1' \(row 1\), 'doc-3' \(row 3\): the score is not finite"):
        QualityDiversity(np.eye(4), quality, 0.1, "raw").prepare(ids_of(4))
    pool = QualityDiversity(np.eye(4), quality, 0.0, "raw").prepare(ids_of(4))
    assert pool.quality is None
    assert not pool.linear.any()


def test_repeated_ids_are_named() -> None:
    with pytest.raises(BadInput, match=r"2 documents: 'a' \(row 2\), 'a' \(row 3\): the id is not unique"):
        canonical_order(["a", "b", "a", "a"], 4)
    with pytest.raises(ValueError, match="4 embeddings but 3 ids"):
        canonical_order(["a", "b", "c"], 4)


def test_colliding_hashes_of_distinct_ids_go_by_the_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed, "hash64", lambda ids, seed, purpose: np.array([7, 3, 7, 7], np.uint64))
    order, ties = canonical_order(["c", "z", "b", "a"], 4)
    assert order.tolist() == [1, 3, 2, 0]
    assert ties.tolist() == [3, 7, 7, 7]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.ones(3), None, 0.0), r"not float64 \[3\]"),
        ((np.ones((3, 2), np.int32), None, 0.0), r"not int32 \[3, 2\]"),
        ((np.ones((3, 0)), None, 0.0), "no dimensions"),
        ((np.ones((3, 2)), None, 1.5), r"λ must lie in \[0, 1\]"),
        ((np.ones((3, 2)), None, float("nan")), r"λ must lie in \[0, 1\]"),
        ((np.ones((3, 2)), np.ones(3), 0.5, "rank"), "scale 'rank' is none of"),
        ((np.ones((3, 2)), np.ones(2), 0.5, "raw"), r"3 embeddings but quality of shape \[2\]"),
        ((np.ones((3, 2)), None, 0.5, "raw"), "weighs quality, and there is none"),
        ((np.ones((3, 2)), np.ones(3), 0.5), "'minmax' needs its frozen constants"),
        ((np.ones((3, 2)), np.ones(3), 0.5, "minmax", (2.0, 1.0)), "not finite and in order"),
    ],
)
def test_parts_that_do_not_fit_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QualityDiversity(*arguments)


@pytest.mark.parametrize("n", [0, 1, 127, 128, 129, 5000])
def test_blocks_cover_everything_once_and_in_order(n: int) -> None:
    assert [i for part in map_blocks(lambda a, b: list(range(a, b)), n) for i in part] == list(range(n))
