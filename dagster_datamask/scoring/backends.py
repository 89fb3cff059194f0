"""A transformer on the CPU by OpenVINO: the same weights, another engine.

Here belong: converting a loaded transformer, keeping the result, running it. Not here: tokenising, pooling and
normalising, which are the encoder's under every engine.
"""

import importlib.metadata
import importlib.util
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster_datamask.keyed import digest
from dagster_datamask.scoring.models import model_cache

if TYPE_CHECKING:
    import torch

BACKENDS = ("torch", "openvino")
# the names of a precision: compute.dtype, OpenVINO's hint, what OpenVINO says that a device can do
_HINTS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_CAPABILITIES = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16"}
_CPU = "CPU"


class BackendUnavailable(ValueError):
    """A back end that was asked for cannot run here; the message says why not, and how to go on."""


def check_backend(backend: str, device: str, dtype: str) -> None:
    """Raise BackendUnavailable, before any model is loaded, where `backend` cannot compute in `dtype` on `device`."""
    if backend not in BACKENDS:
        raise ValueError(f"embed.backend {backend!r} is none of: {', '.join(BACKENDS)}")
    if backend == "torch":
        return
    if device != "cpu":
        raise BackendUnavailable(
            f"embed.backend = 'openvino' computes on the CPU, and the device is {device}; "
            "set compute.device = 'cpu', or embed.backend = 'torch'"
        )
    if importlib.util.find_spec("openvino") is None:
        raise BackendUnavailable(
            "embed.backend = 'openvino' needs the package openvino; "
            "install the extra (pip install 'dagster-datamask[openvino]'), or set embed.backend = 'torch'"
        )
    if _CAPABILITIES[dtype] not in _core().get_property(_CPU, "OPTIMIZATION_CAPABILITIES"):
        # OpenVINO would compute in float32 without a word, and the vectors would be recorded as what they are not
        raise BackendUnavailable(
            f"compute.dtype = {dtype!r}: OpenVINO does not compute in it on this CPU; set compute.dtype = 'float32'"
        )


def openvino_transformer(
    transformer: "torch.nn.Module", input_names: list[str], revision: str, dtype: str
) -> "torch.nn.Module":
    """A module that maps features {input name: int64[b, t]} to the same with `token_embeddings`, float32[b, t, d].

    transformer: a transformers model in float32 whose output has `last_hidden_state`; input_names: what it is given, in
    order; revision: names its weights in the cache, where the converted model is kept, so that it is converted once;
    dtype: the precision of the forward pass, one that `check_backend` let through. As many threads as torch has now.
    """
    import torch

    folder = model_cache() / digest("openvino", _versions(), revision, *input_names).hex()
    if not (folder / "model.xml").is_file():
        _convert(transformer, input_names, folder)
    compiled = _core().compile_model(
        folder / "model.xml",
        _CPU,
        {
            "INFERENCE_PRECISION_HINT": _HINTS[dtype],
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "NUM_STREAMS": 1,
        },
    )

    class _Compiled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._request = compiled.create_infer_request()

        def forward(self, features: dict[str, Any]) -> dict[str, Any]:
            inputs = [features[name].numpy() for name in input_names]
            # the request's own memory is used again by the next pass
            hidden = self._request.infer(inputs, share_inputs=True)[0]
            return {**features, "token_embeddings": torch.from_numpy(hidden)}

    return _Compiled()


def _core() -> Any:
    # On import, and on every conversion, openvino tells its maker of it, unless this package is not there.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino.Core()


def _versions() -> str:
    return " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("openvino", "torch", "transformers"))


def _convert(transformer: "torch.nn.Module", input_names: list[str], folder: Path) -> None:
    """Write `model.xml` and `model.bin` in a folder that appears whole or not at all."""
    import openvino
    import torch
    from transformers.utils import logging

    class _Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = transformer

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return self.transformer(**dict(zip(input_names, inputs, strict=True))).last_hidden_state

    example = tuple(torch.ones((2, 8), dtype=torch.int64) for _ in input_names)
    told = logging.get_verbosity()
    # tracing warns of every shape that it takes for constant; whether it was right to is what the tests of parity say
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            model = openvino.convert_model(_Hidden().eval(), example_input=example)
    finally:
        logging.set_verbosity(told)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        whole = Path(scratch) / "whole"
        openvino.save_model(model, whole / "model.xml", compress_to_fp16=False)
        try:
            whole.rename(folder)
        except OSError:
            # another process was sooner
            if not (folder / "model.xml").is_file():
                raise
