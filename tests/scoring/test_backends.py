import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from dagster_datamask import keyed
from dagster_datamask.accelerator import Accelerator
from dagster_datamask.scoring import backends
from dagster_datamask.scoring.backends import BackendUnavailable, check_backend
from dagster_datamask.scoring.encoders import Encoder, encoder_spec
from dagster_datamask.scoring.models import model_cache
from dagster_datamask.scoring.text import NO_TOKENS, NON_FINITE, NULL_TEXT

from .conftest import MINILM, change_weights, tiny_bert
from .test_encoders import TEXTS, poison, pooled

pytest.importorskip("openvino", reason="the extra openvino is not installed")
LAYOUT = Path(__file__).parents[2] / "../shared/data/fineweb_layout/data"


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory):
    """A cache of this module's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def capable(dtype: str) -> bool:
    try:
        check_backend("openvino", "cpu", dtype)
    except BackendUnavailable:
        return False
    return True


@pytest.fixture(scope="module")
def pages() -> list[str]:
    """Sixteen of the shared pages."""
    paths = sorted(LAYOUT.glob("*/*.parquet"))
    if not paths:
        pytest.skip("the shared pages are not there")
    texts = [text for path in paths for text in pq.read_table(path, columns=["text"])["text"].to_pylist()]
    return [texts[i] for i in keyed.rng(0, "test/parity").permutation(len(texts))[:16]]


@pytest.fixture(scope="module")
def torch_vectors(encoder: Encoder, pages: list[str]) -> np.ndarray:
    return encoder.encode(pages).vectors


def least_cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float((np.sum(a * b, axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).min())


@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.999999), ("bfloat16", 0.9995), ("float16", 0.9999)])
def test_parity_with_torch_on_real_pages(pages: list[str], torch_vectors: np.ndarray, dtype: str, least: float) -> None:
    if not capable(dtype):
        pytest.skip(f"OpenVINO does not compute in {dtype} on this CPU")
    other = Encoder(encoder_spec(MINILM, backend="openvino"), Accelerator(dtype=dtype))
    found, again = other.encode(pages), other.encode(pages)
    assert found.reasons == [None] * len(pages)
    assert least_cosine(found.vectors, torch_vectors) > least
    assert found.vectors.tobytes() == again.vectors.tobytes()


@pytest.mark.parametrize("n", [0, 1, 2])
def test_few_rows(encoder: Encoder, n: int) -> None:
    other = Encoder(encoder_spec(MINILM, backend="openvino"), Accelerator())
    found = other.encode(TEXTS[:n])
    assert found.vectors.shape == (n, 384) and found.reasons == [None] * n
    np.testing.assert_allclose(found.vectors, encoder.encode(TEXTS[:n]).vectors, atol=1e-3)
    assert other.encode([None, "", "\x01"]).reasons == [NULL_TEXT, NO_TOKENS, NO_TOKENS]


@pytest.mark.parametrize("mode", ["mean", "cls"])
def test_pooling_is_the_models_own(tmp_path: Path, minilm_path: Path, cpu: Accelerator, mode: str) -> None:
    folder = str(pooled(tiny_bert(tmp_path / "tiny", minilm_path, outputs=None), mode))
    texts = [f"some words {'more ' * i}" for i in range(9)]
    torch_vectors = Encoder(encoder_spec(folder), cpu).encode(texts).vectors
    vectors = Encoder(encoder_spec(folder, backend="openvino"), cpu).encode(texts).vectors
    assert least_cosine(vectors, torch_vectors) > 0.999999


def test_a_row_that_is_not_finite_alone_is_lost(tmp_path: Path, minilm_path: Path, cpu: Accelerator) -> None:
    from transformers import AutoTokenizer

    tiny = pooled(tiny_bert(tmp_path / "tiny", minilm_path, outputs=None), "mean")
    word = AutoTokenizer.from_pretrained(tiny).convert_tokens_to_ids("poison")
    change_weights(tiny, word_embeddings_weight=poison(float("nan"), word))
    batch = Encoder(encoder_spec(str(tiny), backend="openvino"), cpu).encode(["fine", "poison", "fine too"])
    assert batch.reasons == [None, NON_FINITE, None]
    assert not batch.vectors[1].any() and batch.vectors[[0, 2]].any(axis=1).all()


def test_the_back_end_is_part_of_what_vectors_are() -> None:
    one, other = encoder_spec(MINILM), encoder_spec(MINILM, backend="openvino")
    assert one.identity != other.identity and other.identity.endswith("backend=openvino")
    assert other.describe()["backend"] == "openvino"


def test_a_model_is_converted_once_and_never_half(
    minilm_path: Path, cpu: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny = pooled(tiny_bert(tmp_path / "tiny", minilm_path, outputs=None), "mean")
    spec = encoder_spec(str(tiny), backend="openvino")
    first = Encoder(spec, cpu).encode(TEXTS).vectors
    (folder,) = model_cache().iterdir()
    assert sorted(file.name for file in folder.iterdir()) == ["model.bin", "model.xml"]
    made = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert Encoder(spec, cpu).encode(TEXTS).vectors.tobytes() == first.tobytes()
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == made

    def fail(*args: object, **options: object) -> None:
        Path(args[1]).parent.mkdir()  # type: ignore[arg-type]
        Path(args[1]).write_text("half")  # type: ignore[arg-type]
        raise OSError("no space left")

    for file in made:
        file.unlink()
    folder.rmdir()
    monkeypatch.setattr("openvino.save_model", fail)
    with pytest.raises(OSError, match="no space left"):
        Encoder(spec, cpu)
    assert list(model_cache().iterdir()) == []


def test_what_cannot_run_here_is_told_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"embed\.backend 'onnx' is none of: torch, openvino"):
        check_backend("onnx", "cpu", "float32")
    with pytest.raises(BackendUnavailable, match=r"the device is cuda:0; set compute\.device = 'cpu'"):
        check_backend("openvino", "cuda:0", "float32")

    class Old:
        """A CPU without any of the short formats."""

        def get_property(self, device: str, name: str) -> list[str]:
            assert (device, name) == ("CPU", "OPTIMIZATION_CAPABILITIES")
            return ["FP32", "INT8"]

    with monkeypatch.context() as patch:
        patch.setattr(backends, "_core", Old)
        check_backend("openvino", "cpu", "float32")
        with pytest.raises(BackendUnavailable, match=r"'bfloat16'.*set compute\.dtype = 'float32'"):
            check_backend("openvino", "cpu", "bfloat16")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'dagster-datamask\[openvino\]'"):
        check_backend("openvino", "cpu", "float32")


def test_nothing_is_told_to_others(tmp_path: Path) -> None:
    """OpenVINO's own package for that is kept out of the process, and leaves nothing in the home folder."""
    code = (
        "import sys; from dagster_datamask.scoring.backends import check_backend\n"
        "check_backend('openvino', 'cpu', 'float32')\n"
        "from openvino.tools.ovc import telemetry_utils\n"
        "print(telemetry_utils.tm.__name__, sys.modules['openvino_telemetry'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | {"HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["openvino.tools.ovc.telemetry_stub", "None"]
    assert list(tmp_path.iterdir()) == []
