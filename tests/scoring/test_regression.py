import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dagster_datamask.accelerator import Accelerator
from dagster_datamask.scoring.base import ScoredBatch
from dagster_datamask.scoring.encoders import Encoder
from dagster_datamask.scoring.regression import (
    EmbeddingHeadScorer,
    Head,
    TransformersRegressionScorer,
    WindowedScorer,
    int_score,
)
from dagster_datamask.scoring.text import NO_TOKENS, NON_FINITE, NULL_TEXT, SURROGATES

from .conftest import change_weights, tiny_bert

TEXTS = ["two words", "a rather longer text about the cell and its parts", "x"]


@pytest.fixture
def edu(tmp_path: Path, minilm_path: Path) -> Path:
    return tiny_bert(tmp_path / "edu", minilm_path)


def logits(folder: Path, text: str, max_length: int = 64) -> float:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    inputs = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt", truncation=True, max_length=max_length)
    with torch.inference_mode():
        return float(AutoModelForSequenceClassification.from_pretrained(folder)(**inputs).logits.squeeze(-1))


@pytest.mark.parametrize(
    ("score", "rounded"),
    [(2.5, 2), (3.5, 4), (2.51, 3), (-0.7, 0), (0.5, 0), (1.5, 2), (4.5, 4), (7.9, 5), (float("inf"), 5)],
)
def test_int_score_is_the_published_rounding(score: float, rounded: int) -> None:
    assert int_score(score) == rounded


def test_int_score_of_nan_is_an_error() -> None:
    with pytest.raises(ValueError, match="NaN"):
        int_score(float("nan"))


def test_scores_are_the_models_logits(edu: Path, cpu: Accelerator) -> None:
    batch = TransformersRegressionScorer(edu, cpu, max_length=64).score(TEXTS)
    np.testing.assert_allclose(batch.scores, [logits(edu, text) for text in TEXTS], rtol=1e-5)
    assert batch.reasons == [None] * 3 and np.ptp(batch.scores) > 1e-3


@pytest.mark.parametrize("n", [0, 1, 2])
def test_few_rows(edu: Path, cpu: Accelerator, n: int) -> None:
    batch = TransformersRegressionScorer(edu, cpu, max_length=64).score(TEXTS[:n])
    assert batch.scores.shape == (n,) and batch.reasons == [None] * n


def test_scores_may_leave_the_scale(edu: Path, cpu: Accelerator) -> None:
    change_weights(edu, classifier_bias=lambda bias: bias + 40.0)
    assert (TransformersRegressionScorer(edu, cpu, max_length=64).score(TEXTS).scores > 5).all()
    change_weights(edu, classifier_bias=lambda bias: bias - 80.0)
    assert (TransformersRegressionScorer(edu, cpu, max_length=64).score(TEXTS).scores < 0).all()


def test_rows_without_score(edu: Path, cpu: Accelerator) -> None:
    scorer = TransformersRegressionScorer(edu, cpu, max_length=64)
    batch = scorer.score([None, "", "\t\n", "\x01", "word \ud800"])
    assert batch.reasons == [NULL_TEXT, NO_TOKENS, NO_TOKENS, NO_TOKENS, None]
    assert batch.notes == {SURROGATES: 1}


def test_nan_is_a_failed_row_and_no_zero(edu: Path, minilm_path: Path, cpu: Accelerator) -> None:
    from transformers import AutoTokenizer

    word = AutoTokenizer.from_pretrained(edu).convert_tokens_to_ids("poison")

    def poison(weights: torch.Tensor) -> torch.Tensor:
        weights[word] = float("nan")
        return weights

    change_weights(edu, word_embeddings_weight=poison)
    batch = TransformersRegressionScorer(edu, cpu, max_length=64).score(["fine", "poison"])
    assert batch.reasons == [None, NON_FINITE] and np.isnan(batch.scores[1])


def test_length_is_applied(edu: Path, cpu: Accelerator) -> None:
    short = TransformersRegressionScorer(edu, cpu, max_length=5).score(["a b c d e f g", "a b c"])
    np.testing.assert_allclose(short.scores[0], short.scores[1], rtol=1e-5)
    with pytest.raises(ValueError, match="max_length 65, but the model has 64 positions"):
        TransformersRegressionScorer(edu, cpu, max_length=65)


def test_low_precision_keeps_a_fine_scale_and_retries(edu: Path, cpu: Accelerator) -> None:
    from transformers import AutoTokenizer

    word = AutoTokenizer.from_pretrained(edu).convert_tokens_to_ids("poison")

    def large(weights: torch.Tensor) -> torch.Tensor:
        weights[word] *= 1e6
        return weights

    change_weights(edu, word_embeddings_weight=large, classifier_bias=lambda bias: bias + 2.5)
    texts = [*TEXTS, "poison"]
    exact = TransformersRegressionScorer(edu, cpu, max_length=64).score(texts)
    half = TransformersRegressionScorer(edu, Accelerator(dtype="float16"), max_length=64).score(texts)
    assert half.notes == {"retried_in_float32": 1} and half.reasons == [None] * 4
    np.testing.assert_allclose(half.scores[3], exact.scores[3], rtol=1e-4)
    np.testing.assert_allclose(half.scores, exact.scores, atol=0.05)
    coarse = TransformersRegressionScorer(edu, Accelerator(dtype="bfloat16"), max_length=64).score(TEXTS).scores
    assert (coarse != torch.tensor(coarse).bfloat16().double().numpy()).any()


def test_what_is_no_regression_model(tmp_path: Path, minilm_path: Path, cpu: Accelerator) -> None:
    with pytest.raises(ValueError, match="3 outputs is a classifier"):
        TransformersRegressionScorer(tiny_bert(tmp_path / "three", minilm_path, outputs=3), cpu)
    with pytest.raises(ValueError, match=r"no config\.json"):
        TransformersRegressionScorer(tmp_path, cpu)
    bare = tiny_bert(tmp_path / "bare", minilm_path, outputs=None)
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config | {"id2label": {"0": "x"}, "label2id": {"x": 0}}))
    with pytest.raises(ValueError, match=r"lack.*classifier\.weight.*no trained regression head"):
        TransformersRegressionScorer(bare, cpu, max_length=64)


def test_weights_cut_short(edu: Path, cpu: Accelerator) -> None:
    weights = edu / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"its weights cannot be loaded .*fetch the model again"):
        TransformersRegressionScorer(edu, cpu, max_length=64)


def test_description(edu: Path, cpu: Accelerator) -> None:
    told = TransformersRegressionScorer(edu, cpu, max_length=64).describe()
    assert told["max_length"] == 64 and told["revision"].startswith("blake2b:") and str(edu) not in str(told)


@pytest.mark.parametrize("link", ["identity", "logistic"])
def test_head_round_trip_and_values(tmp_path: Path, link: str) -> None:
    head = Head(np.array([0.1, -1 / 3, 1e-17]), 2.0, link, "enc")
    head.save(tmp_path / "a.json")
    head.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["a.json", "b.json"]
    again = Head.load(tmp_path / "a.json")
    assert again.weights.tolist() == head.weights.tolist() and again.revision == head.revision
    linear = 2.0 + 0.1 * 3 - 1 / 3
    expected = linear if link == "identity" else 5 / (1 + np.exp(-linear))
    np.testing.assert_allclose(again.predict(np.array([[3.0, 1.0, 0.0]])), [expected])
    assert again.predict(np.zeros((0, 3))).shape == (0,)


def test_head_scores_do_not_depend_on_the_batch(rows: int = 7) -> None:
    generator = np.random.Generator(np.random.SFC64(0))
    vectors = generator.standard_normal((rows, 384)).astype(np.float16)
    head = Head(generator.standard_normal(384), 0.1, "identity", "enc")
    alone = [head.predict(vectors[i : i + 1])[0] for i in range(rows)]
    assert head.predict(vectors).tolist() == alone


def test_extreme_logits_stay_on_the_scale() -> None:
    head = Head(np.array([1e4]), 0.0, "logistic", "enc")
    assert head.predict(np.array([[1.0], [-1.0]])).tolist() == [5.0, 0.0]


def test_bad_heads(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="link 'tanh'"):
        Head(np.zeros(2), 0.0, "tanh", "enc")
    with pytest.raises(ValueError, match="finite"):
        Head(np.array([np.nan]), 0.0, "identity", "enc")
    with pytest.raises(ValueError, match="dimension 2, vectors of shape"):
        Head(np.zeros(2), 0.0, "identity", "enc").predict(np.zeros((1, 3)))
    for text in ("junk", "{}", "[]", '{"format": "other"}'):
        (tmp_path / "h.json").write_text(text)
        with pytest.raises(ValueError, match=r"h\.json: not an embedding head's file"):
            Head.load(tmp_path / "h.json")


def test_embedding_head_scorer(encoder: Encoder) -> None:
    texts = ["The cell divides.", None, "buy now", " "]
    vectors = encoder.encode(texts).vectors
    head = Head(vectors[0].astype(np.float64), 1.0, "identity", encoder.spec.identity)
    batch = EmbeddingHeadScorer(encoder, head).score(texts)
    assert batch.reasons == [None, NULL_TEXT, None, NO_TOKENS]
    np.testing.assert_allclose(batch.scores[0], 2.0, atol=1e-3)
    np.testing.assert_array_equal(batch.scores[[0, 2]], head.predict(vectors[[0, 2]]))
    with pytest.raises(ValueError, match="fitted on vectors of other"):
        EmbeddingHeadScorer(encoder, Head(head.weights, 1.0, "identity", "other"))
    assert EmbeddingHeadScorer(encoder, head).describe()["encoder"]["max_length"] == 256


class Words:
    """A scorer of known values: the number that a text's first word is, of 4 words at most."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def score(self, texts: Sequence[str | None]) -> ScoredBatch:
        assert None not in texts
        self.read = [" ".join((text or "").split()[:4]) for text in texts]
        bad = ["fail" in text for text in self.read]
        values = [np.nan if b else float(text.split()[0]) for b, text in zip(bad, self.read, strict=True)]
        return ScoredBatch(np.array(values, dtype=np.float64), [NON_FINITE if b else None for b in bad])

    def describe(self) -> dict[str, Any]:
        return {"kind": "words"}


def counted(first: int, words: int) -> str:
    return " ".join(str(k) for k in range(first, first + words))


def test_three_windows_of_a_long_text_and_one_of_a_short_one(minilm_path: Path) -> None:
    inner = Words()
    # one token a word, two special ones: a window holds four words
    scorer = WindowedScorer(inner, minilm_path, max_length=6)
    batch = scorer.score([counted(11, 12), counted(11, 4), None, " ", counted(11, 5), "7"])
    assert inner.read == [
        *("11 12 13 14", "15 16 17 18", "19 20 21 22"),
        "11 12 13 14",
        *("11 12 13 14", "12 13 14 15"),
        "7",
    ]
    assert batch.scores[[0, 1, 4, 5]].tolist() == [15.0, 11.0, 11.5, 7.0]
    assert batch.reasons == [None, None, NULL_TEXT, NO_TOKENS, None, None]
    assert scorer.describe() == {"kind": "words", "windows": "first_middle_last"}
    assert scorer.score([]).scores.shape == (0,)


def test_windows_of_a_text_far_longer_than_a_window(minilm_path: Path) -> None:
    inner = Words()
    scorer = WindowedScorer(inner, minilm_path, max_length=6)
    text = " ".join(["10"] * 3000 + ["20"] * 3000 + ["30"] * 3000)
    assert scorer.score([text]).scores.tolist() == [20.0]
    assert inner.read == ["10 10 10 10", "20 20 20 20", "30 30 30 30"]
    # nothing to read at its end or middle: its beginning is all there is
    assert scorer.score(["1 2 3 4 5 6 7" + " " * 10_000]).scores.tolist() == [1.0]


def test_a_window_without_score_leaves_its_text_without_one(minilm_path: Path) -> None:
    scorer = WindowedScorer(Words(), minilm_path, max_length=6)
    batch = scorer.score(["1 2 3 4 5 6 7 fail", counted(11, 12), "3 \ud800"])
    assert batch.reasons == [NON_FINITE, None, None]
    assert np.isnan(batch.scores[0])
    assert batch.scores[1:].tolist() == [15.0, 3.0]
    assert batch.notes == {SURROGATES: 1}


def test_windows_of_the_real_scorers_are_the_mean_of_their_parts(edu: Path, encoder: Encoder, cpu: Accelerator) -> None:
    plain = TransformersRegressionScorer(edu, cpu, max_length=12)
    parts = ["blue rock " * 5, "cell wave " * 5, "shop cash " * 5]
    text = "".join(parts)
    windowed = WindowedScorer(plain, edu, plain.max_length).score([text, "a short one"])
    expected = plain.score([*parts, "a short one"]).scores
    np.testing.assert_allclose(windowed.scores, [expected[:3].mean(), expected[3]], rtol=1e-5)

    head = EmbeddingHeadScorer(encoder, Head(np.linspace(-1, 1, 384), 1.0, "identity", encoder.spec.identity))
    long = text * 12
    whole = WindowedScorer(head, encoder.spec.path, encoder.spec.max_length, encoder.spec.prefix)
    mean, first = whole.score([long]).scores[0], head.score([long]).scores[0]
    assert whole.score([text]).scores == head.score([text]).scores
    assert mean != first
