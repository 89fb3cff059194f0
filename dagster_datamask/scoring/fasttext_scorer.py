"""The probability of one label of a fastText classifier (`.bin` or `.ftz`).

Here belong: loading, the label check, and which texts have no score. Not here: training (`training`), the
choice of model or threshold.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fasttext
import numpy as np

from dagster_datamask.scoring.base import ScoredBatch
from dagster_datamask.scoring.fasttext_file import check_file
from dagster_datamask.scoring.models import content_revision
from dagster_datamask.scoring.text import NO_TOKENS, NON_FINITE, normaliser_of, screen

# the bytes at which fastText's own reader splits a line into words
TOKEN = re.compile("[^ \n\r\t\v\f\0]+")
_END_OF_LINE = "</s>"
LABEL_PREFIX = "__label__"


class FastTextScorer:
    """P(positive_label | text) of a supervised fastText model.

    path: a `.bin` or `.ftz` file. positive_label: with or without `__label__`; ValueError naming the known
    labels if the model has no such label. normaliser: a key of NORMALISERS, the form that the model was
    trained on; tokenizer: the file that `ultra_fineweb` needs.

    A text none of whose words is in the dictionary has no score (`no_tokens`): fastText would still answer,
    from the end-of-line mark and hash collisions of unknown word pairs. In a model with character n-grams
    those of an unknown word count as known, as the model was trained to read them. Known limit, kept because
    published scores have it: a free-standing `</s>` in a text ends it.
    """

    def __init__(
        self, path: Path, positive_label: str, normaliser: str = "dclm", tokenizer: Path | None = None
    ) -> None:
        self.path = Path(path)
        self.normaliser = normaliser
        self._tokenizer = tokenizer
        self._normalise = normaliser_of(normaliser, tokenizer)
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path}: no such fastText model; expected a .bin or .ftz file")
        check_file(self.path)
        try:
            self._model = fasttext.load_model(str(self.path))
        except ValueError as error:
            raise ValueError(f"{self.path}: not a fastText model ({error})") from error
        self._args = self._model.f.getArgs()
        if self._args.model != fasttext.FastText.model_name.supervised:
            raise ValueError(f"{self.path}: an unsupervised fastText model has no labels; give a classifier")
        self.labels: list[str] = list(self._model.get_labels(on_unicode_error="replace"))
        self._label_set = frozenset(self.labels)
        wanted = [positive_label, LABEL_PREFIX + positive_label]
        known = [label for label in wanted if label in self._label_set]
        if not known:
            raise ValueError(
                f"{self.path}: no label {positive_label!r}; the model knows "
                f"{', '.join(sorted(self.labels))}. "
                "Set positive_label to one of these."
            )
        self.positive_label = known[0]

    def score(self, texts: Sequence[str | None]) -> ScoredBatch:
        """float64[n] probabilities in [0, 1]; reasons `null_text`, `no_tokens`, `non_finite`.

        Raises ValueError, naming the file, where its weights are no numbers.
        """
        clean, reasons, notes = screen(texts)
        lines: list[str] = []
        rows: list[int] = []
        for row, text in enumerate(clean):
            if reasons[row] is not None:
                continue
            line = self._normalise(text)
            if self._has_known_token(line):
                lines.append(line)
                rows.append(row)
            else:
                reasons[row] = NO_TOKENS
        scores = np.full(len(clean), np.nan)
        if lines:
            # every label is asked for: with three or more, 1 − p of another one is not this one's probability
            try:
                labels, probabilities = self._model.predict(lines, k=-1)
            except RuntimeError as error:
                # of a weight that is no number it says only that
                raise ValueError(f"{self.path}: damaged weights ({error}); fetch the model again") from error
            for row, names, values in zip(rows, labels, probabilities, strict=True):
                # a label that hierarchical softmax left out lies below its search floor of 1e-5
                found = float(values[names.index(self.positive_label)]) if self.positive_label in names else 0.0
                if np.isfinite(found):
                    # fastText adds 1e-5 inside its logarithm, so a sure answer comes back above one
                    scores[row] = min(max(found, 0.0), 1.0)
                else:
                    reasons[row] = NON_FINITE
        return ScoredBatch(scores, reasons, notes)

    def _has_known_token(self, line: str) -> bool:
        for match in TOKEN.finditer(line):
            token = match.group()
            if token == _END_OF_LINE:
                return False
            if token in self._label_set:
                continue
            if self._model.get_word_id(token) >= 0:
                return True
            if self._args.maxn > 0 and len(self._model.get_subwords(token)[1]) > 0:
                return True
        return False

    def describe(self) -> dict[str, Any]:
        """Label, labels, normaliser, sizes, and the file's content hash."""
        return {
            "kind": "fasttext",
            "file": self.path.name,
            "revision": content_revision(self.path),
            "positive_label": self.positive_label,
            "labels": sorted(self.labels),
            "normaliser": self.normaliser,
            **({"tokenizer": content_revision(self._tokenizer)} if self._tokenizer else {}),
            "dimension": self._model.get_dimension(),
            "word_ngrams": self._args.wordNgrams,
            "quantised": self._model.is_quantized(),
        }
