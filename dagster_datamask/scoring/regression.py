"""Regression scorers: a transformers model with one output (FineWeb-Edu), a linear head on frozen
embeddings, and either over three windows of a long text.

Here belong: their forward pass and their file form. Not here: fitting a head (`training`), clamping into a
quality (`quality`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dagster_datamask.accelerator import Accelerator
from dagster_datamask.keyed import digest
from dagster_datamask.scoring.base import ScoredBatch, Scorer
from dagster_datamask.scoring.batching import (
    CPU_BATCH_TOKENS,
    CUDA_BATCH_TOKENS,
    HEAD_CHARACTERS_PER_TOKEN,
    positions,
    run_finite,
    tokenise,
)
from dagster_datamask.scoring.encoders import Encoder
from dagster_datamask.scoring.models import check_inert, content_revision, licence_of
from dagster_datamask.scoring.text import NO_TOKENS, NON_FINITE, screen

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LINKS = ("identity", "logistic")
SCALE_MAX = 5.0


def int_score(score: float) -> int:
    """FineWeb-Edu's rounding: int(round(max(0, min(score, 5)))), halves to even, so 2.5 is 2 and 3.5 is 4.

    The one place where a score is rounded; ValueError for NaN, which is a row without a score and not a 0.
    """
    if np.isnan(score):
        raise ValueError("a NaN score has no integer score: the row failed and is to be counted as unscored")
    return round(max(0.0, min(float(score), SCALE_MAX)))


class TransformersRegressionScorer:
    """The one output of a sequence-classification model, as FineWeb-Edu's classifier has it, kept as it is.

    path: a local directory in the hub's layout (config, tokenizer, weights). max_length: tokens, special ones
    included. The score is not clamped and may leave [0, 5]. In bfloat16 or float16 the head still runs in
    float32, or scores near 2.5 would come in steps of 0.016. Raises ValueError for a model with other than
    one output.
    """

    def __init__(
        self, path: Path, accelerator: Accelerator, max_length: int = 512, batch_tokens: int | None = None
    ) -> None:
        from transformers import AutoConfig, AutoTokenizer

        self.path = Path(path)
        if not (self.path / "config.json").is_file():
            raise ValueError(f"{self.path}: not a transformers directory (no config.json in it)")
        check_inert(self.path)
        config = AutoConfig.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        if config.num_labels != 1:
            raise ValueError(
                f"{self.path}: a model with {config.num_labels} outputs is a classifier, not a regression; "
                "a quality score needs one output"
            )
        limit = positions(config)
        if limit is not None and max_length > limit:
            raise ValueError(f"{self.path}: max_length {max_length}, but the model has {limit} positions")
        self.max_length = max_length
        self.accelerator = accelerator
        self.batch_tokens = batch_tokens or (CUDA_BATCH_TOKENS if accelerator.is_cuda else CPU_BATCH_TOKENS)
        self._tokenizer = AutoTokenizer.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        self._special_tokens = self._tokenizer.num_special_tokens_to_add()
        self._model = self._load(accelerator.dtype)
        self._exact: PreTrainedModel | None = None

    def _load(self, dtype: str) -> "PreTrainedModel":
        import torch
        from safetensors import SafetensorError
        from transformers import AutoModelForSequenceClassification
        from transformers.utils import logging

        logging.disable_progress_bar()
        try:
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                self.path,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=torch.float32,
                output_loading_info=True,
            )
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self.path}: its weights cannot be loaded ({error}); fetch the model again") from error
        if loading["missing_keys"]:
            raise ValueError(
                f"{self.path}: the weights lack {', '.join(sorted(loading['missing_keys']))}: "
                "the model has no trained regression head"
            )
        if dtype != "float32":
            model.to(getattr(torch, dtype))
            for name, module in model.named_children():
                if name != model.base_model_prefix:
                    module.float()
                    module.register_forward_pre_hook(lambda _, inputs: tuple(x.float() for x in inputs))
        return model.to(self.accelerator.device).eval()

    def score(self, texts: Sequence[str | None]) -> ScoredBatch:
        """float64[n] outputs; reasons `null_text`, `no_tokens`, `non_finite` (also after a retry in
        float32)."""
        clean, reasons, notes = screen(texts)
        rows = np.array([i for i, reason in enumerate(reasons) if reason is None], dtype=np.int64)
        tokens = tokenise(self._tokenizer, [clean[i] for i in rows], self.max_length)
        textual = np.flatnonzero(tokens.lengths > self._special_tokens)
        for i in np.flatnonzero(tokens.lengths <= self._special_tokens):
            reasons[rows[i]] = NO_TOKENS
        raw = np.full(len(rows), np.nan)

        def forward_with(model: "PreTrainedModel", batch: np.ndarray) -> np.ndarray:
            import torch

            with torch.inference_mode():
                output = model(**tokens.padded(self._tokenizer, batch, self.accelerator.device))
                return output.logits[:, 0].double().cpu().numpy()

        def forward_exactly(batch: np.ndarray) -> np.ndarray:
            self._exact = self._exact or self._load("float32")
            return forward_with(self._exact, batch)

        _, bad = run_finite(
            tokens.lengths,
            textual,
            self.batch_tokens,
            lambda batch: forward_with(self._model, batch),
            None if self.accelerator.dtype == "float32" else forward_exactly,
            raw,
            notes,
        )
        for i in bad:
            reasons[rows[i]] = NON_FINITE
        raw[bad] = np.nan
        scores = np.full(len(clean), np.nan)
        scores[rows] = raw
        return ScoredBatch(scores, reasons, notes)

    def describe(self) -> dict[str, Any]:
        """Length, precision, licence and the directory's content hash."""
        return {
            "kind": "transformers_regression",
            "directory": self.path.name,
            "revision": content_revision(self.path),
            "licence": licence_of(self.path),
            "max_length": self.max_length,
            "dtype": self.accelerator.dtype,
        }


@dataclass(frozen=True)
class Head:
    """A linear head on unit embeddings: link(w·x + b) on the 0…5 scale.

    weights: float64[d]; link: `identity` (a regression, not clamped) or `logistic` (5·σ, from 0/1 labels);
    encoder: `EncoderSpec.identity` of the vectors that it was fitted on.
    """

    weights: np.ndarray
    bias: float
    link: str
    encoder: str

    def __post_init__(self) -> None:
        if self.link not in LINKS:
            raise ValueError(f"head: link {self.link!r} is none of: {', '.join(LINKS)}")
        if self.weights.ndim != 1 or not np.isfinite(self.weights).all() or not np.isfinite(self.bias):
            raise ValueError(f"head: weights must be one finite row, not {list(self.weights.shape)}")

    def predict(self, vectors: np.ndarray) -> np.ndarray:
        """float64[n] scores of float[n, d] unit vectors. ValueError where d is not the head's."""
        if vectors.ndim != 2 or vectors.shape[1] != len(self.weights):
            raise ValueError(f"head for dimension {len(self.weights)}, vectors of shape {list(vectors.shape)}")
        # row by row in float64, so that a score does not depend on how many rows are asked for at once
        linear = np.einsum("nd,d->n", vectors.astype(np.float64), self.weights) + self.bias
        if self.link == "identity":
            return linear
        return SCALE_MAX * np.exp(-np.logaddexp(0.0, -linear))

    @property
    def revision(self) -> str:
        """`blake2b:…` over everything that decides a score."""
        values = np.append(self.weights, self.bias).astype("<f8").tobytes()
        return f"blake2b:{digest(self.encoder, self.link, values).hex()}"

    def save(self, path: Path) -> None:
        """One JSON file, equal heads giving equal bytes; floats round-trip exactly. Written beside, then
        renamed."""
        path = Path(path)
        payload = {
            "format": "datamask-head-1",
            "encoder": self.encoder,
            "link": self.link,
            "bias": float(self.bias),
            "weights": [float(w) for w in self.weights],
        }
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(payload, indent=1, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Head":
        """Raises ValueError naming the file where it is not a head's."""
        try:
            payload = json.loads(Path(path).read_text(encoding="utf-8"))
            if payload["format"] != "datamask-head-1":
                raise ValueError(f"format {payload['format']!r}")
            weights = np.array(payload["weights"], dtype=np.float64)
            return cls(weights, float(payload["bias"]), payload["link"], payload["encoder"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: not an embedding head's file ({error})") from error


class EmbeddingHeadScorer:
    """A head on an encoder's vectors. ValueError where the head was fitted on another encoder's."""

    def __init__(self, encoder: Encoder, head: Head) -> None:
        if head.encoder != encoder.spec.identity:
            raise ValueError(
                f"the head was fitted on vectors of {head.encoder}, the encoder is {encoder.spec.identity}; "
                "use that encoder, or train the head anew"
            )
        self.encoder = encoder
        self.head = head

    def score(self, texts: Sequence[str | None]) -> ScoredBatch:
        """float64[n] on the 0…5 scale, from the same float16 vectors that are stored; reasons are the
        encoder's."""
        encoded = self.encoder.encode(texts)
        scores = self.head.predict(encoded.vectors)
        scores[[reason is not None for reason in encoded.reasons]] = np.nan
        return ScoredBatch(scores, encoded.reasons, encoded.notes)

    def describe(self) -> dict[str, Any]:
        """The encoder's conventions, the head's link and the hash of its weights."""
        return {
            "kind": "embedding_head",
            "revision": self.head.revision,
            "link": self.head.link,
            "encoder": self.encoder.describe(),
        }


class WindowedScorer:
    """The mean of a scorer's scores of a text's first, middle and last window; of its one window where that is all.

    path: the model's directory, for its tokenizer; max_length, prefix: the scorer's. A window holds as many tokens as
    the scorer reads. The first begins with the text and is what the scorer alone would read, the last ends with it,
    and the middle one lies about its middle character. A window that begins inside a word reads the word's rest.
    A text whose window has no score has none, for that window's reason.
    """

    def __init__(self, scorer: Scorer, path: Path, max_length: int, prefix: str = "") -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        self._scorer = scorer
        self._room = max_length - len(tokenizer(prefix)["input_ids"])
        # an instance of its own: its state is not to be changed under the scorer's
        self._tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def score(self, texts: Sequence[str | None]) -> ScoredBatch:
        """float64[n]; reasons are the scorer's."""
        clean, reasons, notes = screen(texts)
        windows: list[str] = []
        owners: list[int] = []
        for row, text in enumerate(clean):
            if reasons[row] is None:
                for start in self._starts(text):
                    windows.append(text[start:])
                    owners.append(row)
        scored = self._scorer.score(windows)
        of_row, good = np.array(owners, dtype=np.int64), np.isfinite(scored.scores)
        sums = np.bincount(of_row[good], scored.scores[good], minlength=len(clean))
        counts = np.bincount(of_row[good], minlength=len(clean))
        for window in np.flatnonzero(~good)[::-1]:
            reasons[owners[window]] = scored.reasons[window]
        scores = np.divide(sums, counts, out=np.full(len(clean), np.nan), where=counts > 0)
        scores[[reason is not None for reason in reasons]] = np.nan
        return ScoredBatch(scores, reasons, notes + scored.notes)

    def _starts(self, text: str) -> list[int]:
        """The characters at which the text's windows begin, without double ones."""
        characters = HEAD_CHARACTERS_PER_TOKEN * (self._room + 1)
        head = self._offsets(text[:characters])
        if len(head) <= self._room and len(text) > characters:
            head = self._offsets(text)
        if len(head) <= self._room:
            return [0]
        # of a long text parts alone are tokenised: what lies far off cannot change where a window's tokens are
        last = max(0, len(text) - characters)
        middle = max(0, len(text) // 2 - characters // 2)
        starts = {0}
        if behind := self._offsets(text[last:]):
            starts.add(last + behind[-self._room :][0][0])
        if about := self._offsets(text[middle : middle + characters]):
            centre = sum(end <= len(text) // 2 - middle for _, end in about)
            starts.add(middle + about[max(0, min(centre - self._room // 2, len(about) - self._room))][0])
        return sorted(starts)

    def _offsets(self, text: str) -> list[tuple[int, int]]:
        offsets: list[tuple[int, int]] = self._tokenizer.encode(text, add_special_tokens=False).offsets
        return offsets

    def describe(self) -> dict[str, Any]:
        """The scorer's, and that it reads three windows."""
        return {**self._scorer.describe(), "windows": "first_middle_last"}
