import numpy as np
import pytest

from dagster_datamask import keyed
from dagster_datamask.selection.exact import GridSum
from dagster_datamask.selection.objectives import BadInput, Given, QualityDiversity, Score, canonical_order, map_blocks
from dagster_datamask.selection.pool import prepare_pool

from .oracles import ids_of, vectors

Q = np.array([2.0, 8.0, 5.0, 11.0])


def scaled(scale: str, constants: tuple[float, float] | None = None, quality: np.ndarray = Q) -> list[float]:
    pool = prepare_pool(QualityDiversity(np.eye(4), quality, 0.5, scale, constants), ids_of(4))
    return pool.scaled.tolist()


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
    pool = prepare_pool(QualityDiversity(z, rng.uniform(0, 1, 50), 0.25, "zscore"), ids_of(50))
    assert 1 / pool.terms.diversity["pws"] == pytest.approx(np.std(2 * z @ z.mean(axis=0)), rel=1e-12)
    assert pool.terms.beta == pytest.approx(0.75 * pool.terms.diversity["pws"])
    alike = prepare_pool(QualityDiversity(np.ones((3, 2)), None, 0.0, "zscore"), ids_of(3))
    assert alike.terms.beta == 0.0


def test_the_pool_does_not_depend_on_the_order_of_the_input() -> None:
    rng = np.random.default_rng(1)
    z, q, ids = rng.standard_normal((400, 7)).astype(np.float16), rng.uniform(0, 9, 400), ids_of(400)
    shuffle = rng.permutation(400)
    one = prepare_pool(QualityDiversity(z, q, 0.3, "zscore"), ids)
    other = prepare_pool(QualityDiversity(z[shuffle], q[shuffle], 0.3, "zscore"), [ids[i] for i in shuffle])
    assert one.unit().tobytes() == other.unit().tobytes()
    assert one.mean.tobytes() == other.mean.tobytes()
    for name in ("scaled", "linear", "ties"):
        assert one.canonical(getattr(one, name)).tobytes() == other.canonical(getattr(other, name)).tobytes()
    assert (one.checksum, one.terms, one.linear_mean) == (other.checksum, other.terms, other.linear_mean)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_stored_vectors_are_normalised_again(dtype: type) -> None:
    rng = np.random.default_rng(2)
    stored = (vectors(rng, 300, 20) * rng.uniform(0.5, 2, (300, 1))).astype(dtype)
    pool = prepare_pool(QualityDiversity(stored, None, 0.0), ids_of(300))
    exact = stored.astype(np.float64)
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    rows = np.array([3, 200, 5])
    np.testing.assert_allclose(pool.vectors.double(np.arange(300)), exact, atol=1e-15)
    np.testing.assert_allclose(pool.vectors.unit(rows), exact[rows], atol=1e-7)
    np.testing.assert_allclose(pool.unit(), exact[pool.order], atol=1e-7)
    np.testing.assert_allclose(pool.mean, exact.mean(axis=0), atol=1e-14)
    total = GridSum(20)
    pool.vectors.add_to(rows, total)
    np.testing.assert_allclose(total.value(), exact[rows].sum(axis=0), atol=1e-13)


@pytest.mark.parametrize(("dtype", "lengths"), [(np.float64, (1e200, 1e-150, 3.0)), (np.float32, (1e30, 1e-35, 3.0))])
def test_vectors_of_any_length_have_a_direction(dtype: type, lengths: tuple[float, ...]) -> None:
    stored = (np.array([[0.6, 0.8], [1.0, 0.0], [-0.8, 0.6]]) * np.array(lengths)[:, None]).astype(dtype)
    pool = prepare_pool(QualityDiversity(stored, None, 0.0), ids_of(3))
    expected = np.array([[0.6, 0.8], [1.0, 0.0], [-0.8, 0.6]])
    np.testing.assert_allclose(pool.vectors.double(np.arange(3)), expected, atol=1e-6)
    np.testing.assert_allclose(pool.vectors.unit(slice(0, 3)), expected, atol=1e-6)
    np.testing.assert_allclose(pool.mean, expected.mean(axis=0), atol=1e-6)


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
        prepare_pool(QualityDiversity(z, None, 0.0), ids_of(5))


def test_a_long_list_of_bad_rows_is_cut_and_counted() -> None:
    with pytest.raises(BadInput, match=r"^9 documents: 'doc-0' .* 'doc-4' \(row 4\) and 4 more: "):
        prepare_pool(QualityDiversity(np.zeros((9, 3)), None, 0.0), ids_of(9))


def test_bad_scores_are_named_unless_lambda_is_zero() -> None:
    quality = np.array([1.0, np.nan, 2.0, np.inf])
    with pytest.raises(BadInput, match=r"2 documents: 'doc-1' \(row 1\), 'doc-3' \(row 3\): the score is not finite"):
        prepare_pool(QualityDiversity(np.eye(4), quality, 0.1, "raw"), ids_of(4))
    pool = prepare_pool(QualityDiversity(np.eye(4), quality, 0.0, "raw"), ids_of(4))
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
        ((np.ones((3, 2)), None, 0.0, "raw", None, {"cosine": 1.0}), "metric 'cosine' is none of: pws"),
        ((np.ones((3, 2)), None, 0.0, "raw", None, {"pws": -1.0}), "weight of pws must lie in 0 to 1e.09, not -1.0"),
        ((np.ones((3, 2)), None, 0.0, "zscore", None, {"disf": 1.0}), "closed form for pws alone, not for disf"),
        ((np.ones((3, 2)), None, 0.0, "raw", None, {"pws": 1.0}, {"s": Score(np.ones(2), 1.0)}), r"'s' of shape \[2\]"),
        ((np.ones((3, 2)), None, 0.0, "raw", None, {"pws": 1.0}, {"s": Score(np.ones(3), np.inf)}), "not finite: inf"),
        ((np.ones((3, 2)), None, 0.0, "minmax", None, {"pws": 1.0}, {"s": Score(np.ones(3), 1.0)}), "constants .* 's'"),
        ((np.ones((3, 2)), None, 0.0, "raw", None, {"disf": 1.0}, {}, Given(1, np.ones(2))), "by pws alone"),
        ((np.ones((3, 2)), None, 0.0, "raw", None, {"pws": 1.0}, {}, Given(1, np.ones(3))), "have 2 dimensions"),
    ],
)
def test_parts_that_do_not_fit_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QualityDiversity(*arguments)


@pytest.mark.parametrize("n", [0, 1, 127, 128, 129, 5000])
def test_blocks_cover_everything_once_and_in_order(n: int) -> None:
    assert [i for part in map_blocks(lambda a, b: list(range(a, b)), n) for i in part] == list(range(n))
