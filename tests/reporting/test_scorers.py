import io

import pytest
from PIL import Image

from dagster_datamask.reporting.scorers import correlation_figure


def pairs(*values: float | None, documents: int = 50) -> list[dict]:
    names = (("dclm", "edu"), ("dclm", "wiki"), ("edu", "wiki"))
    return [
        {"first": a, "second": b, "pearson": value, "spearman": value, "documents": documents}
        for (a, b), value in zip(names, values, strict=True)
    ]


@pytest.mark.parametrize(
    "drawn", [[], pairs(None, None, None, documents=0), pairs(0.5, None, -0.9), pairs(1.0, 1.0, 1.0, documents=2)]
)
def test_a_picture_of_few_bytes_that_is_the_same_each_time(drawn: list[dict]) -> None:
    png = correlation_figure(drawn, "How the scorers agree")
    assert png == correlation_figure(drawn, "How the scorers agree")
    assert len(png) < 60_000
    assert Image.open(io.BytesIO(png)).format == "PNG"


def test_other_numbers_give_another_picture() -> None:
    assert correlation_figure(pairs(0.1, 0.2, 0.3)) != correlation_figure(pairs(0.1, 0.2, 0.9))
