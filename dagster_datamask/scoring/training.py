"""Training of a user's own quality scorers from labelled texts, with an honest held-out report.

Here belong: reading labels, the fastText recipe of DCLM (Li et al. 2024), linear heads on frozen embeddings
as FineWeb-Edu trains its own (Penedo et al. 2024), their reports. Not here: scoring (`fasttext_scorer`,
`regression`), the model card (`card`).
"""

import math
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fasttext
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dagster_datamask.keyed import hash64
from dagster_datamask.scoring.fasttext_scorer import LABEL_PREFIX, TOKEN, FastTextScorer
from dagster_datamask.scoring.regression import SCALE_MAX, Head, int_score
from dagster_datamask.scoring.text import decode_column, normaliser_of, screen

Label = bool | int | float | str

MIN_ROWS = 20
HELD_OUT_SHARE = 0.2
CALIBRATION_BINS = 10
EDU_CUT = 3.0
# DCLM's: fastText's defaults but for the bigrams
LEARNING_RATE = 0.1
DIMENSION = 100
EPOCHS = 5
WORD_NGRAMS = 2
MAX_BUCKETS = 2_000_000
# below this many documents five epochs leave fastText near its start
DOCUMENTS_FOR_FIVE_EPOCHS = 20_000
MAX_EPOCHS = 100
RIDGE_PENALTIES = tuple(10.0**e for e in range(-4, 4))
LOGISTIC_C = 10.0


@dataclass(frozen=True)
class CalibrationBin:
    """Held-out rows whose prediction lies in [lower, upper): mean prediction and mean label; None where n is
    0."""

    lower: float
    upper: float
    n: int
    mean_predicted: float | None
    mean_observed: float | None


@dataclass(frozen=True)
class TrainingReport:
    """What a trained scorer does on the 20 % of texts held out by a keyed hash, together those that are equal but for
    white space and case.

    kind: `fasttext`, `logistic_head` or `ridge_head`. threshold: the prediction from which a row counts as
    positive (0.5 for a probability, 2.5 for a logistic head's 5·p, Edu's 3 for a ridge head, whose rows are
    positive from label 3 on); confusion counts held-out rows as [[true neg., false pos.], [false neg., true
    pos.]] at it. auc, precision, recall: None where the held-out rows lack a class or nothing is predicted
    positive. calibration_error: mean distance of a bin's mean prediction from its mean label, weighted by its
    rows (Naeini et al. 2015), on the prediction's own scale. spearman, rmse: ridge heads only. labels: all rows
    with text by their label, rounded for a ridge head. n_without_text: rows left out because their text is null
    or blank. settings: what the fit used.
    """

    kind: str
    n_train: int
    n_heldout: int
    n_without_text: int
    seed: int
    threshold: float
    precision: float | None
    recall: float | None
    auc: float | None
    calibration_error: float | None
    spearman: float | None
    rmse: float | None
    confusion: list[list[int]]
    calibration: list[CalibrationBin]
    labels: dict[str, int]
    settings: dict[str, float | int | str]

    def to_dict(self) -> dict[str, Any]:
        """JSON values; the same for the same data and seed on any machine of one library version."""
        return asdict(self)


def read_labels(path: str | Path) -> tuple[list[str | None], list[Label | None]]:
    """The columns `text` and `label` of a parquet file (any fsspec URL), in row order.

    label: boolean, integer, float or string. Raises FileNotFoundError, and ValueError naming the file and
    what is wrong with it: not parquet, a column missing (those found are named), a label type that is none of
    these.
    """
    with fsspec.open(str(path), "rb") as file:
        try:
            names = pq.read_schema(file).names
        except pa.ArrowInvalid as error:
            raise ValueError(f"{path}: not a readable parquet file ({error})") from error
        missing = [name for name in ("text", "label") if name not in names]
        if missing:
            raise ValueError(
                f"{path}: no column {' and '.join(map(repr, missing))}; it has: {', '.join(names)}. "
                "Labelled data needs `text` and `label`."
            )
        table = pq.read_table(file, columns=["text", "label"])
    texts, _ = decode_column(table["text"])
    kind = table["label"].type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        labels: list[Label | None] = list(decode_column(table["label"])[0])
    elif pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        labels = table["label"].to_pylist()
    else:
        raise ValueError(f"{path}: column 'label' is {kind}; it must be boolean, integer, float or string")
    return texts, labels


def train_fasttext(
    texts: Sequence[str | None],
    labels: Sequence[Label | None],
    out: Path,
    *,
    positive_label: str = "hq",
    negative_label: str = "cc",
    seed: int,
    dim: int = DIMENSION,
    normaliser: str = "dclm",
    tokenizer: Path | None = None,
) -> TrainingReport:
    """Train a two-label fastText classifier into `out` (`.bin`, or `.ftz` to quantise it to about 1 % of the
    size).

    labels: true/false, 1/0, or the two label names, with or without `__label__`. normaliser, tokenizer: the form
    of the texts, as in FastTextScorer. The recipe is DCLM's: texts as one line, bigrams, learning rate 0.1, 100
    dimensions, 5 epochs, minimum count 1; below 20,000 texts more epochs, at most 100, and no more hash buckets
    than the texts have tokens (next power of two). One thread, lines in a keyed order: the file's bytes depend on
    the rows and the seed alone, not on the rows' order. The file is written beside and renamed.

    Raises ValueError naming the row: a missing or foreign label; fewer than 20 rows; one class only; another
    suffix.
    """
    out = Path(out)
    if out.suffix not in (".bin", ".ftz"):
        raise ValueError(f"{out}: a fastText model's file ends in .bin, or in .ftz to be quantised")
    positive = _two_classes(labels, positive_label, negative_label)
    usable, kept, n_without_text = _with_text(texts, len(positive))
    positive = positive[kept]
    normalise = normaliser_of(normaliser, tokenizer)
    # label marks inside a text would be taken as its label; when scoring, fastText ignores them
    lines = [
        " ".join(token for token in TOKEN.findall(normalise(text)) if not token.startswith(LABEL_PREFIX))
        for text in usable
    ]
    held_out = _held_out(lines, seed)
    _require_both(positive, held_out)
    train = np.flatnonzero(~held_out)
    keys = hash64((lines[i] for i in train), seed, "fasttext-order")
    order = train[np.lexsort((positive[train], keys))]
    n_tokens = sum(lines[i].count(" ") + 1 for i in train)
    epochs = min(MAX_EPOCHS, max(EPOCHS, math.ceil(EPOCHS * DOCUMENTS_FOR_FIVE_EPOCHS / len(train))))
    buckets = min(MAX_BUCKETS, 1 << max(10, (n_tokens - 1).bit_length()))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".fasttext-") as scratch:
        source, part = Path(scratch) / "train.txt", Path(scratch) / f"model{out.suffix}"
        with source.open("w", encoding="utf-8", newline="\n") as file:
            for i in order:
                name = positive_label if positive[i] else negative_label
                file.write(f"{_marked(name)} {lines[i]}\n")
        model = fasttext.train_supervised(
            input=str(source),
            lr=LEARNING_RATE,
            dim=dim,
            epoch=epochs,
            wordNgrams=WORD_NGRAMS,
            bucket=buckets,
            minCount=1,
            thread=1,
            seed=_positive_int32(seed),
            verbose=0,
        )
        if out.suffix == ".ftz":
            model.quantize(qnorm=True, thread=1, verbose=0)
        model.save_model(str(part))
        held = np.flatnonzero(held_out)
        scored = FastTextScorer(part, positive_label, normaliser, tokenizer).score([usable[i] for i in held])
        part.replace(out)
    # a held-out text of unknown words alone has no score; as a prediction it is "not positive"
    predicted = np.where(np.isnan(scored.scores), 0.0, scored.scores)
    return _report(
        "fasttext",
        predicted,
        positive[held].astype(np.float64),
        n_train=len(train),
        n_without_text=n_without_text,
        seed=seed,
        threshold=0.5,
        label_cut=0.5,
        scale=1.0,
        labels={positive_label: int(positive.sum()), negative_label: int((~positive).sum())},
        settings={
            "positive_label": positive_label,
            "negative_label": negative_label,
            "normaliser": normaliser,
            "learning_rate": LEARNING_RATE,
            "dimension": dim,
            "epochs": epochs,
            "word_ngrams": WORD_NGRAMS,
            "buckets": buckets,
            "quantised": str(out.suffix == ".ftz").lower(),
        },
    )


def train_embedding_head(
    vectors: np.ndarray,
    targets: Sequence[Label | None] | np.ndarray,
    *,
    texts: Sequence[str],
    encoder: str,
    seed: int,
) -> tuple[Head, TrainingReport]:
    """Fit a linear head on unit embeddings; its output is on the 0…5 scale.

    vectors: float[n, d], all finite and non-zero (leave rows with a reason out first); targets: 0/1 or
    booleans for a logistic head (output 5·σ), numbers in [0, 5] for a ridge head, its penalty chosen by
    leave-one-out error on the training rows; texts: the n texts, by which rows are held out; encoder:
    `EncoderSpec.identity` of the vectors.

    Raises ValueError naming the row: a missing or NaN target, one outside [0, 5], a zero or non-finite
    vector; fewer than 20 rows; one class or one constant target only.
    """
    from sklearn.linear_model import LogisticRegression, RidgeCV

    wanted = head_targets(targets)
    if vectors.ndim != 2 or len(vectors) != len(wanted) or len(texts) != len(wanted):
        raise ValueError(
            f"{list(vectors.shape)} vectors, {len(wanted)} targets and {len(texts)} texts: "
            "there must be one row of each per document"
        )
    if len(wanted) < MIN_ROWS:
        raise ValueError(f"{len(wanted)} labelled rows; at least {MIN_ROWS} are needed to train and to hold out")
    wide = vectors.astype(np.float64)
    useless = np.flatnonzero(~np.isfinite(wide).all(axis=1) | ~wide.any(axis=1))
    if useless.size:
        raise ValueError(f"row {int(useless[0])}: its vector is zero or not finite; leave such rows out")
    held_out = _held_out(texts, seed)
    train, held = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    binary = bool(np.isin(wanted, (0.0, 1.0)).all())
    if binary:
        _require_both(wanted > 0, held_out)
        fit = LogisticRegression(C=LOGISTIC_C, max_iter=1000).fit(wide[train], wanted[train] > 0)
        head = Head(fit.coef_[0].astype(np.float64), float(fit.intercept_[0]), "logistic", encoder)
        settings: dict[str, float | int | str] = {"C": LOGISTIC_C}
    else:
        if np.ptp(wanted[train]) == 0:
            raise ValueError(f"every training target is {wanted[train[0]]}: there is nothing to learn")
        fit = RidgeCV(alphas=RIDGE_PENALTIES).fit(wide[train], wanted[train])
        head = Head(fit.coef_.astype(np.float64), float(fit.intercept_), "identity", encoder)
        settings = {"ridge_penalty": float(fit.alpha_)}
    report = _report(
        "logistic_head" if binary else "ridge_head",
        head.predict(vectors[held]),
        wanted[held] * (SCALE_MAX if binary else 1.0),
        n_train=len(train),
        n_without_text=0,
        seed=seed,
        threshold=SCALE_MAX / 2 if binary else EDU_CUT,
        label_cut=SCALE_MAX / 2 if binary else EDU_CUT,
        scale=SCALE_MAX,
        labels=dict(sorted(Counter(str(int_score(target)) for target in wanted).items())),
        settings={**settings, "dimension": int(vectors.shape[1]), "encoder": encoder},
    )
    return head, report


def _marked(label: str) -> str:
    return label if label.startswith(LABEL_PREFIX) else LABEL_PREFIX + label


def _positive_int32(seed: int) -> int:
    """fastText's seed is an int32, of which it takes 0 and 1 for the same; ours is any integer."""
    return int(hash64([str(seed)], seed, "fasttext-seed")[0] >> np.uint64(33)) | 2


def _two_classes(labels: Sequence[Label | None], positive_label: str, negative_label: str) -> np.ndarray:
    """bool[n]: whether each label is the positive one."""
    names = {_marked(positive_label): True, _marked(negative_label): False}
    if len(names) != 2:
        raise ValueError(f"positive and negative label are both {positive_label!r}")
    if len(labels) < MIN_ROWS:
        raise ValueError(f"{len(labels)} labelled rows; at least {MIN_ROWS} are needed to train and to hold out")
    values = np.zeros(len(labels), dtype=bool)
    for row, label in enumerate(labels):
        if label is None or (isinstance(label, float) and math.isnan(label)):
            raise ValueError(f"row {row}: no label; leave unlabelled rows out")
        if isinstance(label, str):
            if _marked(label) not in names:
                raise ValueError(
                    f"row {row}: label {label!r} is neither {positive_label!r} nor {negative_label!r}; "
                    f"name the two "
                    "labels of the data"
                )
            values[row] = names[_marked(label)]
        elif label in (0, 1):
            values[row] = bool(label)
        else:
            raise ValueError(f"row {row}: label {label!r} is neither 0/1 nor a label's name")
    return values


def head_targets(targets: Sequence[Label | None] | np.ndarray) -> np.ndarray:
    """float64[n] in [0, 5]. Raises ValueError naming the row of what is no finite number there."""
    values = np.zeros(len(targets))
    for row, target in enumerate(targets):
        if target is None or isinstance(target, str) or not math.isfinite(target):
            raise ValueError(f"row {row}: target {target!r} is no finite number; leave unlabelled rows out")
        if not 0 <= target <= SCALE_MAX:
            raise ValueError(f"row {row}: target {target} lies outside [0, {SCALE_MAX:g}]; rescale the targets")
        values[row] = float(target)
    return values


def _with_text(texts: Sequence[str | None], n_labels: int) -> tuple[list[str], np.ndarray, int]:
    """The texts that have any, which rows they are (bool[n]), and how many have none."""
    if len(texts) != n_labels:
        raise ValueError(f"{len(texts)} texts but {n_labels} labels: there must be one per text")
    clean, reasons, _ = screen(texts)
    kept = np.array([reason is None for reason in reasons], dtype=bool)
    return [text for text, keep in zip(clean, kept, strict=True) if keep], kept, int((~kept).sum())


def _held_out(texts: Sequence[str], seed: int) -> np.ndarray:
    """bool[n]: a text keeps its side when rows are added. Copies of a page differ in line breaks and spaces, which no
    classifier here reads, so texts that are equal but for white space and case are on one side."""
    same = (" ".join(text.split()).casefold() for text in texts)
    return hash64(same, seed, "heldout") < np.uint64(int(HELD_OUT_SHARE * 2**64))


def _require_both(positive: np.ndarray, held_out: np.ndarray) -> None:
    train = positive[~held_out]
    if train.all() or not train.any():
        n_pos, n = int(train.sum()), len(train)
        raise ValueError(
            f"of {n} training rows with text {n_pos} are positive and {n - n_pos} negative: both classes "
            f"are needed; "
            "add rows of the missing one"
        )


def _report(
    kind: str,
    predicted: np.ndarray,
    observed: np.ndarray,
    *,
    n_train: int,
    n_without_text: int,
    seed: int,
    threshold: float,
    label_cut: float,
    scale: float,
    labels: dict[str, int],
    settings: dict[str, float | int | str],
) -> TrainingReport:
    from scipy.stats import spearmanr
    from sklearn.metrics import roc_auc_score

    truth, called = observed >= label_cut, predicted >= threshold
    confusion = [
        [int((truth == row).astype(int) @ (called == column).astype(int)) for column in (False, True)]
        for row in (False, True)
    ]
    (_, false_pos), (false_neg, true_pos) = confusion
    regression = kind == "ridge_head"
    varied = len(observed) > 1 and np.ptp(observed) > 0 and np.ptp(predicted) > 0
    edges = np.linspace(0.0, scale, CALIBRATION_BINS + 1)
    bins = np.clip(np.searchsorted(edges, predicted, side="right") - 1, 0, CALIBRATION_BINS - 1)
    calibration = []
    for b in range(CALIBRATION_BINS):
        inside = bins == b
        calibration.append(
            CalibrationBin(
                float(edges[b]),
                float(edges[b + 1]),
                int(inside.sum()),
                float(predicted[inside].mean()) if inside.any() else None,
                float(observed[inside].mean()) if inside.any() else None,
            )
        )
    apart = [
        b.n * abs(b.mean_predicted - b.mean_observed)
        for b in calibration
        if b.mean_predicted is not None and b.mean_observed is not None
    ]
    return TrainingReport(
        kind=kind,
        n_train=n_train,
        n_heldout=len(observed),
        n_without_text=n_without_text,
        seed=seed,
        threshold=threshold,
        precision=true_pos / (true_pos + false_pos) if true_pos + false_pos else None,
        recall=true_pos / (true_pos + false_neg) if true_pos + false_neg else None,
        auc=float(roc_auc_score(truth, predicted)) if truth.any() and not truth.all() else None,
        calibration_error=sum(apart) / len(observed) if len(observed) else None,
        spearman=float(spearmanr(predicted, observed).statistic) if regression and varied else None,
        rmse=float(np.sqrt(np.mean((predicted - observed) ** 2))) if regression and len(observed) else None,
        confusion=confusion,
        calibration=calibration,
        labels=labels,
        settings=settings,
    )
