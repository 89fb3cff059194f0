"""Classifiers trained on page formats, judged by people's labels of other pages, which no classifier here has seen.

The formats that count as good and as poor, the recipe and the seed are fixed: they stood before the first score.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from sklearn.metrics import roc_auc_score

from dagster_datamask.accelerator import Accelerator
from dagster_datamask.scoring.encoders import Encoder, encoder_spec
from dagster_datamask.scoring.fasttext_scorer import FastTextScorer
from dagster_datamask.scoring.regression import EmbeddingHeadScorer
from dagster_datamask.scoring.training import train_embedding_head, train_fasttext

from .conftest import MINILM

DATA = Path(__file__).parents[2] / "../shared/data"
GOOD = ("Knowledge Article", "Academic Writing", "Tutorial", "Q&A", "FAQ")
POOR = ("Spam / Ads", "Product Page", "Content Listing", "Truncated")
# DCLM's recipe but for the dimension, which is the demo's
DIMENSION, SEED = 16, 0

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Pages:
    """Labelled pages: ids, texts and labels 0/1; for those that people judged, who of them were of one mind."""

    ids: list[str]
    texts: list[str]
    labels: np.ndarray
    unanimous: np.ndarray


@pytest.fixture(scope="module")
def by_format() -> Pages:
    if not (DATA / "web_labels.parquet").is_file():
        pytest.skip(f"the labelled pages under {DATA} are not there")
    formats = pl.read_parquet(DATA / "web_labels.parquet").filter(pl.col("format").is_in([*GOOD, *POOR]))
    texts = pl.read_parquet(DATA / "fineweb_layout/data/*/*.parquet", columns=["id", "text"])
    pages = formats.join(texts, on="id", how="inner", maintain_order="left")
    assert len(pages) == len(formats)
    labels = pages["format"].is_in(GOOD).to_numpy()
    return Pages(pages["id"].to_list(), pages["text"].to_list(), labels, np.zeros(len(pages), dtype=bool))


@pytest.fixture(scope="module")
def judged(by_format: Pages) -> Pages:
    pages = pl.read_parquet(DATA / "quality_labels.parquet").filter(pl.col("kind") == "human_quality")
    texts = pages["text"].to_list()
    assert len(texts) == 499
    assert not set(texts) & set(by_format.texts)
    assert not set(pages["id"]) & set(by_format.ids)
    return Pages(pages["id"].to_list(), texts, pages["label"].to_numpy() == 1, pages["unanimous"].to_numpy())


def aucs(scores: np.ndarray, judged: Pages) -> tuple[float, float]:
    """Over all judged pages, and over those that all judges agreed on."""
    assert np.isfinite(scores).all()
    return (
        float(roc_auc_score(judged.labels, scores)),
        float(roc_auc_score(judged.labels[judged.unanimous], scores[judged.unanimous])),
    )


def test_fasttext_on_page_formats_agrees_with_people(by_format: Pages, judged: Pages, tmp_path: Path) -> None:
    train_fasttext(by_format.texts, by_format.labels.tolist(), tmp_path / "m.bin", seed=SEED, dim=DIMENSION)
    every, unanimous = aucs(FastTextScorer(tmp_path / "m.bin", "hq").score(judged.texts).scores, judged)
    assert every >= 0.75
    assert unanimous >= 0.85


def test_a_head_on_minilm_trained_on_page_formats_agrees_with_people_less(
    by_format: Pages, judged: Pages, minilm_path: Path
) -> None:
    stored = pl.read_parquet(DATA / "embeddings_minilm_l6_fp16.parquet")
    row_of = {name: row for row, name in enumerate(stored["id"])}
    vectors = stored["embedding"].to_numpy()[[row_of[name] for name in by_format.ids]]
    encoder = Encoder(encoder_spec(MINILM), Accelerator())
    head, _ = train_embedding_head(
        vectors, by_format.labels, texts=by_format.texts, encoder=encoder.spec.identity, seed=SEED
    )
    every, unanimous = aucs(EmbeddingHeadScorer(encoder, head).score(judged.texts).scores, judged)
    # chance is .5, its standard error about .025
    assert every >= 0.6
    assert unanimous >= 0.65
