"""A model card's tables against the report they are of."""

from importlib.metadata import version

import numpy as np
import pytest

from dagster_datamask.keyed import rng
from dagster_datamask.scoring.card import library_versions, model_card
from dagster_datamask.scoring.training import train_embedding_head


def card_of_a_head(grades: int) -> tuple[str, dict]:
    vectors = rng(0, "card").normal(size=(200, 4))
    targets = np.clip(np.rint(vectors[:, 0] + 2), 0, grades)
    _, report = train_embedding_head(vectors, targets, texts=[str(k) for k in range(200)], encoder="enc|x", seed=3)
    told = report.to_dict()
    return model_card(
        "edu_classifier", told, data="labels.parquet", data_revision="blake2b:0", model_revision="r"
    ), told


@pytest.mark.parametrize(("grades", "kind"), [(1, "a logistic regression"), (5, "a ridge regression")])
def test_a_card_holds_what_the_report_does(grades: int, kind: str) -> None:
    card, told = card_of_a_head(grades)
    assert card.startswith("# edu_classifier\n\nThis is " + kind)
    for label, rows in told["labels"].items():
        assert f"| {label} | {rows} |" in card
    assert sum(told["labels"].values()) == 200
    (true_neg, false_pos), (false_neg, true_pos) = told["confusion"]
    assert f"| negative | {true_neg} | {false_pos} |\n| positive | {false_neg} | {true_pos} |" in card
    assert f"| scikit-learn | {version('scikit-learn')} |" in card
    assert "| seed | 3 |" in card
    # a bar would end its cell
    assert r"| encoder | enc\|x |" in card
    assert f"| AUC | {told['auc']:.4g} |" in card
    assert ("rank correlation" in card) == (kind == "a ridge regression")
    columns = {line.replace(r"\|", "").count("|") for line in card.splitlines() if line.startswith("| prediction")}
    assert columns == {5}
    assert card == card_of_a_head(grades)[0]


def test_versions_name_this_package_and_the_libraries_of_the_kind() -> None:
    assert set(library_versions("fasttext")) == {"dagster-datamask", "fasttext-community", "numpy"}
    assert library_versions("ridge_head")["torch"] == version("torch")
