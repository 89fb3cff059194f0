import os
from pathlib import Path

import faiss
import numpy as np
import pytest

from dagster_datamask.influence import clusters as module
from dagster_datamask.influence.clusters import fit_clusters, relatedness
from dagster_datamask.selection.objectives import BadInput
from dagster_datamask.selection.vectors import nearest


def blobs(seed: int, n: int, k: int = 5, width: int = 8, spread: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
    """(float32[n, width] unit rows around k axes, int64[n] which axis)."""
    rng = np.random.default_rng(seed)
    of = rng.integers(k, size=n)
    rows = np.eye(width)[of] + spread * rng.standard_normal((n, width))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32), of


def ids(n: int) -> list[str]:
    return [f"doc-{i}" for i in range(n)]


def test_separate_groups_are_found() -> None:
    vectors, of = blobs(0, 400)
    # a length says nothing
    scaled = vectors * np.random.default_rng(1).uniform(0.1, 10, size=(400, 1)).astype(np.float32)
    # more clusters than groups, so that no start leaves two groups to one
    found = fit_clusters(scaled, 15, ids=ids(400), seed=0)
    assert (found.k, found.asked, found.fitted, found.empty) == (15, 15, 400, 0)
    assert np.allclose(np.linalg.norm(found.centroids, axis=1), 1.0, atol=1e-5)
    labels, cosines = found.assign(scaled)
    # every cluster lies in one group
    assert len(set(zip(labels.tolist(), of.tolist(), strict=True))) == 15
    assert np.array_equal(np.bincount(labels, minlength=15), found.sizes)
    assert np.allclose(cosines, np.einsum("nd,nd->n", vectors, found.centroids[labels]), atol=1e-5)


def test_assignment_is_the_largest_cosine() -> None:
    rng = np.random.default_rng(2)
    vectors, centroids = rng.standard_normal((700, 6)).astype(np.float32), np.eye(6, dtype=np.float32)
    labels, _ = nearest(vectors, centroids)
    assert np.array_equal(labels, vectors.argmax(axis=1))
    order = rng.permutation(700)
    assert np.array_equal(nearest(vectors[order], centroids)[0], labels[order])
    for i in (0, 255, 256, 699):
        assert tuple(x[0] for x in nearest(vectors[i : i + 1], centroids)) == tuple(
            x[i] for x in nearest(vectors, centroids)
        )
    # the lower of equal ones, and no direction at all
    assert nearest(np.array([[1, 1, 0, 0, 0, 0], [0] * 6], np.float32), centroids)[0].tolist() == [0, 0]


def test_bits_do_not_depend_on_order_or_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, _ = blobs(3, 2000, k=6, spread=0.6)
    names = ids(2000)
    order = np.random.default_rng(0).permutation(2000)
    before = faiss.omp_get_max_threads()
    found = []
    try:
        for threads, rows in ((1, slice(None)), (3, order)):
            faiss.omp_set_num_threads(threads)
            monkeypatch.setattr(os, "sched_getaffinity", lambda _, threads=threads: set(range(threads)))
            part = vectors[rows]
            fitted = fit_clusters(part, 7, ids=[names[i] for i in np.arange(2000)[rows].tolist()], seed=4)
            labels = np.empty(2000, np.int64)
            labels[rows] = fitted.assign(part)[0]
            found.append((fitted.centroids.tobytes(), labels.tobytes(), fitted.fitted))
    finally:
        faiss.omp_set_num_threads(before)
    assert found[0] == found[1]
    # 256 rows a cluster
    assert found[0][2] == 1792
    assert fit_clusters(vectors, 7, ids=names, seed=5).centroids.tobytes() != found[0][0]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_no_more_clusters_than_distinct_rows(n: int) -> None:
    vectors = np.repeat(np.eye(3, dtype=np.float32)[:n], 4, axis=0)
    found = fit_clusters(vectors, 10, ids=ids(4 * n), seed=0)
    assert (found.k, found.asked, found.fitted) == (n, 10, 4 * n)
    assert found.sizes.tolist() == [4] * n and found.empty == 0


def test_a_cluster_may_be_empty() -> None:
    # two directions that differ by less than k-means tells apart
    vectors = np.array([[1.0, 0.0], [1.0, 1e-9], [1.0, 0.0]], np.float32)
    found = fit_clusters(vectors, 2, ids=ids(3), seed=0)
    assert found.k == 2 and found.sizes.sum() == 3 and found.empty == 1


def test_half_precision_on_disk(tmp_path: Path) -> None:
    vectors, _ = blobs(5, 300)
    stored = np.memmap(tmp_path / "h.bin", np.float16, "w+", shape=vectors.shape)
    stored[:] = vectors
    wide = np.asarray(stored, np.float32)
    assert np.array_equal(
        fit_clusters(stored, 5, ids=ids(300), seed=0).centroids, fit_clusters(wide, 5, ids=ids(300), seed=0).centroids
    )


def test_bad_input_is_named() -> None:
    vectors, _ = blobs(6, 20)
    with pytest.raises(ValueError, match="0 clusters"):
        fit_clusters(vectors, 0, ids=ids(20), seed=0)
    with pytest.raises(ValueError, match="nothing to cluster"):
        fit_clusters(vectors[:0], 3, ids=[], seed=0)
    with pytest.raises(ValueError, match="19 ids but vectors"):
        fit_clusters(vectors, 3, ids=ids(19), seed=0)
    vectors[4, 2] = np.nan
    with pytest.raises(BadInput, match=r"'doc-4' \(row 4\): the influence vector is not finite"):
        fit_clusters(vectors, 3, ids=ids(20), seed=0)
    with pytest.raises(BadInput, match="row 4: the vector is not finite"):
        nearest(vectors, np.eye(8, dtype=np.float32))
    assert nearest(vectors[:0], np.eye(8, dtype=np.float32))[0].shape == (0,)


def test_relatedness_is_over_all_pairs() -> None:
    rng = np.random.default_rng(7)
    vectors, labels = rng.standard_normal((40, 5)).astype(np.float32), rng.integers(4, size=40)
    labels[labels == 2] = 7
    products = vectors.astype(np.float64) @ vectors.T.astype(np.float64)
    different = ~np.eye(40, dtype=bool)
    inside = (labels[:, None] == labels[None]) & different
    found = relatedness(vectors, labels)
    for pairs, mean, sd in (
        (inside, found.inside_mean, found.inside_sd),
        (different & ~inside, found.across_mean, found.across_sd),
    ):
        assert mean == pytest.approx(products[pairs].mean())
        assert sd == pytest.approx(products[pairs].std())


def test_relatedness_of_too_few() -> None:
    row = np.ones((1, 2), np.float32)
    assert relatedness(row[:0], np.zeros(0, np.int64)) == module.Relatedness(None, None, None, None)
    assert relatedness(row, np.zeros(1, np.int64)) == module.Relatedness(None, None, None, None)
    assert relatedness(np.repeat(row, 2, 0), np.array([0, 1])) == module.Relatedness(None, None, 2.0, 0.0)
