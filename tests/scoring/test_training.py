import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import roc_auc_score

from dagster_datamask.keyed import rng
from dagster_datamask.scoring.encoders import Encoder
from dagster_datamask.scoring.fasttext_scorer import FastTextScorer
from dagster_datamask.scoring.regression import EmbeddingHeadScorer
from dagster_datamask.scoring.training import read_labels, train_embedding_head, train_fasttext

from .conftest import labelled


def write(path: Path, **columns) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("n", [0, 1, 2])
def test_labels_of_every_type(tmp_path: Path, n: int) -> None:
    for values, kind in [
        ([True, None], pa.bool_()),
        ([1, 0], pa.int8()),
        ([2.5, None], pa.float32()),
        (["hq", "cc"], pa.string()),
        (["hq", None], pa.large_string()),
    ]:
        labels = pa.array(values[:n], kind)
        path = write(
            tmp_path / "labels.parquet", label=labels, other=labels, text=pa.array(["a", None][:n], pa.string())
        )
        assert read_labels(path) == (["a", None][:n], values[:n])


def test_unreadable_labels(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.parquet"):
        read_labels(tmp_path / "none.parquet")
    for junk in (b"", b"junk", b"PAR1junkPAR1"):
        (tmp_path / "junk.parquet").write_bytes(junk)
        with pytest.raises(ValueError, match=r"junk\.parquet: not a readable parquet file"):
            read_labels(tmp_path / "junk.parquet")
    path = write(tmp_path / "a.parquet", content=["x"], quality=[1])
    with pytest.raises(ValueError, match="no column 'text' and 'label'; it has: content, quality"):
        read_labels(path)
    with pytest.raises(ValueError, match="'label' is list"):
        read_labels(write(tmp_path / "b.parquet", text=["x"], label=[[1]]))


@pytest.mark.parametrize("suffix", [".bin", ".ftz"])
def test_the_files_bytes_depend_on_rows_and_seed_alone(tmp_path: Path, suffix: str) -> None:
    texts, labels = labelled(60)
    reports = [
        train_fasttext(t, y, tmp_path / f"{name}{suffix}", seed=seed, dim=4)
        for name, t, y, seed in [
            ("a", texts, labels, 3),
            ("b", texts, labels, 3),
            ("reversed", texts[::-1], labels[::-1], 3),
            ("names", texts, ["__label__hq" if y else "cc" for y in labels], 3),
            ("other", texts, labels, 4),
        ]
    ]
    first, *same, other = [
        (tmp_path / f"{name}{suffix}").read_bytes() for name in ("a", "b", "reversed", "names", "other")
    ]
    assert all(copy == first for copy in same) and other != first
    assert reports[0] == reports[1] and json.loads(json.dumps(reports[0].to_dict())) == reports[0].to_dict()
    assert len(list(tmp_path.iterdir())) == 5


def test_report_of_a_separable_set(tmp_path: Path) -> None:
    texts, labels = labelled(200)
    report = train_fasttext([*texts, None, " "], [*labels, True, False], tmp_path / "m.bin", seed=0, dim=8)
    assert report.n_train + report.n_heldout == 200 and report.n_without_text == 2
    assert 20 <= report.n_heldout <= 60
    assert report.auc == report.precision == report.recall == 1.0
    (true_neg, false_pos), (false_neg, true_pos) = report.confusion
    assert (false_pos, false_neg) == (0, 0) and true_neg + true_pos == report.n_heldout
    assert sum(b.n for b in report.calibration) == report.n_heldout
    assert report.spearman is None and report.rmse is None
    assert report.labels == {"hq": 100, "cc": 100}
    off = [b.n * abs(b.mean_predicted - b.mean_observed) for b in report.calibration if b.n]
    assert report.calibration_error == pytest.approx(sum(off) / report.n_heldout)
    assert 0 < report.calibration_error < 0.2


def test_equal_texts_are_on_one_side_and_keep_it(tmp_path: Path) -> None:
    texts, labels = labelled(100)
    once = train_fasttext(texts, labels, tmp_path / "m.bin", seed=5, dim=4)
    twice = train_fasttext(texts * 2, labels * 2, tmp_path / "m.bin", seed=5, dim=4)
    assert (twice.n_train, twice.n_heldout) == (2 * once.n_train, 2 * once.n_heldout)


def copies(text: str) -> list[str]:
    """One page as crawlers store it: broken elsewhere, padded, in capitals."""
    return [text, text.replace(" ", "\n", 2), f"  {text}\r\n", text.replace(" ", "\u00a0 "), text.upper()]


def test_copies_that_differ_in_white_space_and_case_are_on_one_side(tmp_path: Path) -> None:
    texts, labels = labelled(100)
    every = [copy for text in texts for copy in copies(text)]
    times = len(every) // len(texts)
    repeated = [label for label in labels for _ in range(times)]
    once = train_fasttext(texts, labels, tmp_path / "m.bin", seed=5, dim=4)
    many = train_fasttext(every, repeated, tmp_path / "m.bin", seed=5, dim=4)
    assert (many.n_train, many.n_heldout) == (times * once.n_train, times * once.n_heldout)
    _, head = train_embedding_head(unit_vectors(100), labels, texts=texts, encoder="enc", seed=5)
    _, heads = train_embedding_head(unit_vectors(100 * times), repeated, texts=every, encoder="enc", seed=5)
    assert (heads.n_train, heads.n_heldout) == (times * head.n_train, times * head.n_heldout)


def test_words_are_those_that_are_scored(tmp_path: Path) -> None:
    """fastText parts words at ASCII blanks alone: what stands on both sides of a no-break or an ideographic space is
    one word when a text is scored, and so when it is learnt."""
    words = {True: "good\u00a0sea", False: "bad\u3000road"}
    labels = [row % 2 == 0 for row in range(100)]
    texts = [f"{words[label]} page{row}" for row, label in enumerate(labels)]
    report = train_fasttext(texts, labels, tmp_path / "m.bin", seed=0, dim=8)
    assert report.auc == 1.0
    good, poor = FastTextScorer(tmp_path / "m.bin", "hq").score(list(words.values())).scores
    assert good > 0.9 and poor < 0.1


def test_label_marks_inside_a_text_are_not_its_label(tmp_path: Path) -> None:
    texts, labels = labelled(80)
    marked = [f"{text} __label__hq __label__other" for text in texts]
    train_fasttext(marked, labels, tmp_path / "m.bin", seed=0, dim=8)
    scorer = FastTextScorer(tmp_path / "m.bin", "hq")
    assert scorer.labels.sort() is None and sorted(scorer.labels) == ["__label__cc", "__label__hq"]
    good, poor = scorer.score(["the theorem follows", "buy cheap pills"]).scores
    assert good > 0.9 and poor < 0.1


def test_names_of_the_labels(tmp_path: Path) -> None:
    texts, labels = labelled(60)
    names = ["wiki" if label else "web" for label in labels]
    train_fasttext(texts, names, tmp_path / "m.bin", positive_label="wiki", negative_label="web", seed=0, dim=4)
    assert FastTextScorer(tmp_path / "m.bin", "wiki").score(["the theorem follows"]).scores[0] > 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [None]}, "row 0: no label"),
        ({"labels": [float("nan")]}, "row 0: no label"),
        ({"labels": ["wiki"]}, "row 0: label 'wiki' is neither 'hq' nor 'cc'"),
        ({"labels": [2]}, "row 0: label 2 is neither 0/1"),
        ({"labels": [0.5]}, "row 0: label 0.5"),
        ({"n": 19}, "19 labelled rows; at least 20"),
        ({"n": 0}, "0 labelled rows"),
        ({"one_class": True}, "0 are positive and .* negative"),
        ({"out": "m.model"}, r"m\.model: a fastText model's file ends in \.bin"),
        ({"positive_label": "cc"}, "both 'cc'"),
        ({"short": True}, "29 texts but 30 labels"),
    ],
)
def test_bad_labels_are_named_and_leave_nothing(tmp_path: Path, change: dict, message: str) -> None:
    n = change.get("n", 30)
    texts, labels = labelled(n)
    labels = [False] * n if "one_class" in change else [*change.get("labels", []), *labels][:n]
    texts = texts[1:] if "short" in change else texts
    with pytest.raises(ValueError, match=message):
        train_fasttext(
            texts,
            labels,
            tmp_path / change.get("out", "m.bin"),
            positive_label=change.get("positive_label", "hq"),
            seed=0,
        )
    assert not list(tmp_path.iterdir())


def unit_vectors(n: int, d: int = 8) -> np.ndarray:
    raw = rng(0, "test-vectors").standard_normal((n, d))
    return (raw / np.linalg.norm(raw, axis=1, keepdims=True)).astype(np.float16)


def test_ridge_recovers_a_linear_target() -> None:
    vectors = unit_vectors(300)
    target = 2.5 + vectors.astype(np.float64)[:, 0] * 2
    head, report = train_embedding_head(vectors, target, texts=[str(i) for i in range(300)], encoder="enc", seed=0)
    assert report.kind == "ridge_head" and head.link == "identity" and head.encoder == "enc"
    np.testing.assert_allclose(head.predict(vectors), target, atol=1e-3)
    assert report.rmse is not None and report.rmse < 1e-3 and report.spearman is not None and report.spearman > 0.999
    assert report.precision == report.recall == report.auc == 1.0


def test_logistic_head_lies_on_the_scale_of_five_and_is_calibrated() -> None:
    vectors = unit_vectors(4000)
    chance = 1 / (1 + np.exp(-4 * vectors.astype(np.float64)[:, 0]))
    labels = rng(1, "test-labels").random(4000) < chance
    head, report = train_embedding_head(vectors, labels, texts=[str(i) for i in range(4000)], encoder="enc", seed=0)
    scores = head.predict(vectors)
    assert report.kind == "logistic_head" and ((scores >= 0) & (scores <= 5)).all()
    assert np.abs(scores - 5 * chance).mean() < 0.25
    assert report.auc is not None and abs(report.auc - roc_auc_score(labels, chance)) < 0.05
    gaps = [abs(b.mean_predicted - b.mean_observed) for b in report.calibration if b.n > 50]
    assert len(gaps) >= 4 and max(gaps) < 1.0


def test_equal_fits_give_equal_bytes(tmp_path: Path) -> None:
    vectors, labels = unit_vectors(80), [i % 3 == 0 for i in range(80)]
    texts = [str(i) for i in range(80)]
    for name in ("a", "b"):
        head, _ = train_embedding_head(vectors, labels, texts=texts, encoder="enc", seed=1)
        head.save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": [None] * 30}, "row 0: target None"),
        ({"targets": [1.0] * 29 + [float("nan")]}, "row 29: target nan"),
        ({"targets": ["3"] * 30}, "row 0: target '3'"),
        ({"targets": [5.5] + [1.0] * 29}, r"row 0: target 5\.5 lies outside \[0, 5\]"),
        ({"targets": [1] * 30}, "are positive and 0 negative"),
        ({"targets": [2.5] * 30}, r"every training target is 2\.5"),
        ({"targets": [0, 1]}, r"\[30, 8\] vectors, 2 targets"),
        ({"vectors": unit_vectors(2), "targets": [0, 1], "texts": ["a", "b"]}, "2 labelled rows"),
        ({"vectors": unit_vectors(0), "targets": [], "texts": []}, "0 labelled rows"),
        ({"vectors": np.vstack([unit_vectors(29), np.zeros((1, 8))])}, "row 29: its vector is zero"),
        ({"vectors": np.vstack([np.full((1, 8), np.nan), unit_vectors(29)])}, "row 0: its vector"),
    ],
)
def test_what_no_head_can_be_fitted_on(change: dict, message: str) -> None:
    good = {"vectors": unit_vectors(30), "targets": [0, 1] * 15, "texts": [str(i) for i in range(30)]}
    with pytest.raises(ValueError, match=message):
        train_embedding_head(**{**good, **change}, encoder="enc", seed=0)


def test_head_on_real_vectors(encoder: Encoder) -> None:
    texts, labels = labelled(60)
    encoded = encoder.encode(texts)
    head, report = train_embedding_head(encoded.vectors, labels, texts=texts, encoder=encoder.spec.identity, seed=0)
    assert report.auc == 1.0
    unseen = ["The proof uses induction over the length of the word.", "Cheap watches, order now, free shipping!"]
    good, poor = EmbeddingHeadScorer(encoder, head).score(unseen).scores
    assert good > poor
