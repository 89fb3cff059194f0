"""The influence model: what a document does to the reference loss, alone and beside what was chosen before it.

Here: the individual model (MATES) and the relational one (Group-MATES, arXiv 2502.14709, Eq. 13–14), fitting them to
the increments of rollouts, their card and their files. Not here: collecting rollouts (`rollouts`), drawing further
trajectories by a model (`bootstrap`), selection.

    Θ(x_t | x_1..x_(t−1)) = α·max(0, 1 − R̄_t/β)·f(x_t),    f(x) = w·h(x) + b,    Θ(x_1) = f(x_1)

R̄_t is the mean of R(x_i, x_t) over those before. R is always a product of two vectors, so that a running sum of them
stands for all that was chosen: h itself, of unit norm, for `cosine`; h as it is for `dot`; for `ffn` what a small
network of two layers makes of h, of unit norm. f is in units of the training increments' standard deviation, 0 being
their mean. A document of f > 0 is therefore drawn towards 0 too, and looks the better the more redundant it is: only
the low end of a ranking means what it says.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from threadpoolctl import threadpool_limits

from dagster_datamask import keyed
from dagster_datamask.accelerator import Accelerator
from dagster_datamask.scoring.batching import CPU_BATCH_TOKENS, CUDA_BATCH_TOKENS, Tokens, run, tokenise
from dagster_datamask.scoring.encoders import EncoderSpec
from dagster_datamask.scoring.models import check_inert
from dagster_datamask.selection.objectives import BadInput, map_blocks, name_documents
from dagster_datamask.selection.vectors import as_single

if TYPE_CHECKING:
    import torch
    from sentence_transformers import SentenceTransformer

Features = np.ndarray | Sequence[str]
Progress = Callable[[int, int, dict[str, Any]], None]

FORMAT = "datamask-influence-model-1"
MODEL_FILE, WEIGHTS_FILE, BACKBONE_FOLDER = "influence_model.json", "weights.safetensors", "backbone"
# the paper's, for an encoder, and ours for a projection that starts from nothing
FINE_TUNING_RATE, PROJECTION_RATE = 5e-5, 1e-3
# α, β and the bias are single numbers: at a network's rate they would not get where they belong
SCALAR_RATE = 1e-2
WARM_UP_STEPS = 50
# β stays between these where its bracket does not bound it
LEAST_BETA, LARGEST_BETA = 0.05, 1000.0
# below these a rank correlation says nothing
LEAST_TRAJECTORIES = 3
# rows that are multiplied at once, always as many, so that a row's product does not depend on how many come with it
_BLOCK = 256
_LEAST_NORM = 1e-12


def bracket(mean: np.ndarray, alpha: float, beta: float) -> np.ndarray:
    """α·max(0, 1 − R̄/β), float64 in the shape of `mean` (R̄): by what the company of others scales f (Eq. 13)."""
    scaled = np.asarray(mean, np.float64) / -beta
    scaled += 1.0
    np.maximum(scaled, 0.0, out=scaled)
    scaled *= alpha
    return scaled


def check_constants(alpha: float, beta: float) -> None:
    """Raise ValueError for an α or β with which the bracket would mean nothing."""
    if not (np.isfinite(alpha) and alpha >= 0):
        raise ValueError(f"alpha {alpha} must be 0 or more: a negative one turns the ranking round")
    if not (np.isfinite(beta) and beta > 0):
        raise ValueError(f"beta {beta} must be above 0: a negative one rewards redundancy")


@dataclass(frozen=True)
class InfluenceOptions:
    """What is fitted, and how.

    mode: "individual" has no bracket; similarity: R, see the module. bracket: "bounded" keeps β ≥ 1, so that with R ≤ 1
    the bracket is positive and keeps telling documents apart; "clamped" lets β fall below, and every document with
    R̄ ≥ β counts as 0. Products of `dot` have no bound, so they go with "clamped" alone. learned: whether α and β are
    fitted, from the values given, or stay there.

    backbone: "frozen" takes vectors of an encoder that stays as it is and puts a projection on them, linear or with one
    hidden layer of `hidden` units; "fine_tuned" takes texts, and trains the encoder beneath the projection as well,
    without dropout. width: of h. batch: trajectories; held_out: the share of documents, see `sides`; learning_rate:
    None takes 1e-3, or for fine-tuning 5e-5.
    """

    mode: Literal["individual", "relational"] = "relational"
    similarity: Literal["cosine", "dot", "ffn"] = "cosine"
    bracket: Literal["bounded", "clamped"] = "bounded"
    learned: bool = True
    alpha: float = 1.0
    beta: float = 1.0
    backbone: Literal["frozen", "fine_tuned"] = "frozen"
    hidden: int = 0
    width: int = 64
    epochs: int = 20
    batch: int = 16
    learning_rate: float | None = None
    weight_decay: float = 0.01
    held_out: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("mode", ("individual", "relational")),
            ("similarity", ("cosine", "dot", "ffn")),
            ("bracket", ("bounded", "clamped")),
            ("backbone", ("frozen", "fine_tuned")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} {getattr(self, name)!r} is none of: {', '.join(allowed)}")
        for name, least in (("width", 1), ("epochs", 1), ("batch", 1), ("hidden", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} {getattr(self, name)} must be {least} or more")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out {self.held_out} must lie between 0 and 1")
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise ValueError(f"learning_rate {self.learning_rate} must be above 0")
        check_constants(self.alpha, self.beta)
        if self.bracket == "bounded" and self.beta < 1:
            raise ValueError(f"beta {self.beta} is below 1, which bracket = 'bounded' does not allow; use 'clamped'")
        if self.bracket == "bounded" and self.similarity == "dot" and self.mode == "relational":
            raise ValueError("similarity 'dot' has no largest value, so no beta bounds it; use bracket = 'clamped'")

    @property
    def rate(self) -> float:
        if self.learning_rate is not None:
            return self.learning_rate
        return FINE_TUNING_RATE if self.backbone == "fine_tuned" else PROJECTION_RATE


@dataclass(frozen=True)
class Correlations:
    """Spearman's ρ of predictions and increments: `pooled` over all; `within`, the mean over positions of that among
    the trajectories; `per_policy`, pooled after both were z-scored inside each policy, so that a difference between the
    policies' means counts for nothing. None where there is nothing to rank."""

    pooled: float | None
    within: float | None
    per_policy: float | None
    labels: int


@dataclass(frozen=True)
class Card:
    """What an influence model is, and what is known of it.

    label_mean, label_sd: of the training increments. held_out: on trajectories of held-out documents, by which the best
    epoch was chosen, so a little too good; shuffled: the same with the predecessors of another held-out trajectory, as
    far as they do not hold the document itself. trajectories: per policy, how many were trained on, held out, or left
    out because they have documents of both sides; not_finite: increments left out. history: pooled Spearman after each
    epoch. encoder: the vectors' identity.
    """

    mode: str
    similarity: str
    alpha: float
    beta: float
    label_mean: float
    label_sd: float
    held_out: Correlations
    shuffled: Correlations
    trajectories: dict[str, dict[str, int]]
    not_finite: int
    documents: dict[str, int]
    encoder: str
    settings: dict[str, Any]
    seed: int
    epochs: int
    best_epoch: int
    history: list[float | None]
    identity: str

    def to_dict(self) -> dict[str, Any]:
        """JSON values; the same for the same data and seed with one version of the libraries."""
        return asdict(self)


class InfluenceModel:
    """A fitted model on the CPU: its options (α and β those fitted), its encoder's identity and its weights.

    weights: float32 arrays by name. backbone: the fine-tuned SentenceTransformer and its spec, None where the encoder
    is frozen.
    """

    def __init__(
        self,
        options: InfluenceOptions,
        encoder: str,
        weights: dict[str, np.ndarray],
        alpha: float,
        beta: float,
        label_mean: float,
        label_sd: float,
        backbone: "Backbone | None" = None,
    ) -> None:
        self.options, self.encoder, self.weights = options, encoder, weights
        self.alpha, self.beta = alpha, beta
        self.label_mean, self.label_sd = label_mean, label_sd
        self.backbone = backbone

    @property
    def width(self) -> int:
        return self.options.width

    @property
    def dimension(self) -> int:
        """Of the encoder's vectors."""
        return self.weights["hidden.weight" if self.options.hidden else "project.weight"].shape[1]

    def embed(self, features: Features) -> np.ndarray:
        """float32[n, width]: h of float[n, d] vectors of the encoder, or of n texts where it was fine-tuned.

        A row's bits depend on the row alone where the encoder is frozen. Raises BadInput naming the first row that is
        not finite.
        """
        vectors = self._vectors(features)
        if vectors.ndim != 2 or vectors.shape[1] != self.dimension:
            raise ValueError(
                f"an influence model for vectors of dimension {self.dimension}, and features of shape "
                f"{list(vectors.shape)}; encode with {self.encoder}"
            )
        h = np.empty((len(vectors), self.width), np.float32)

        def block(a: int, b: int) -> None:
            rows = _padded(vectors[a:b])
            if not np.isfinite(rows).all():
                bad = a + int(np.argmin(np.isfinite(rows).all(axis=1)))
                raise BadInput(f"row {bad}: its features are not finite; leave it out or encode it again")
            if self.options.hidden:
                rows = np.maximum(self._layer("hidden", rows), 0.0)
            rows = self._layer("project", rows)
            h[a:b] = (_unit(rows) if self.options.similarity == "cosine" else rows)[: b - a]

        with threadpool_limits(1, "blas"):
            map_blocks(block, len(vectors), _BLOCK)
        return h

    def influence(self, h: np.ndarray) -> np.ndarray:
        """float64[n]: f of float[n, width] rows of `embed`. Multiplied by label_sd, and label_mean added, it is the
        predicted change of the reference loss by the document alone."""
        weight = self.weights["head.weight"][0].astype(np.float64)
        bias = float(self.weights["head.bias"][0])
        return np.einsum("nd,d->n", h.astype(np.float64), weight) + bias

    def relation(self, h: np.ndarray) -> np.ndarray:
        """[n, width]: the vectors whose products are R: what selection, bootstrap and clusters work on. They are `h`
        itself, on disk or not, but for `ffn`: float32 then, so take those by batches."""
        if self.options.similarity != "ffn":
            return h
        vectors = np.empty((len(h), self.width), np.float32)

        def block(a: int, b: int) -> None:
            rows = np.maximum(self._layer("relate", _padded(h[a:b])), 0.0)
            vectors[a:b] = _unit(self._layer("relate_out", rows))[: b - a]

        with threadpool_limits(1, "blas"):
            map_blocks(block, len(h), _BLOCK)
        return vectors

    def group_influence(self, h: np.ndarray, f: np.ndarray, trajectory: np.ndarray) -> np.ndarray:
        """float64 in the trajectory's shape: Θ of each document given those before it.

        h: rows of `embed`; f: float64[n]; trajectory: int64[T], or [m, T] for m of them, rows of h. In mode
        "individual" it is f.
        """
        if self.options.mode == "individual":
            return f[trajectory].astype(np.float64)
        used, at = np.unique(trajectory, return_inverse=True)
        relation = self.relation(h[used])
        return relational_influence(relation, f[used], at.reshape(trajectory.shape), self.alpha, self.beta)

    def _layer(self, name: str, rows: np.ndarray) -> np.ndarray:
        return rows @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _vectors(self, features: Features) -> np.ndarray:
        if self.backbone is None:
            if not isinstance(features, np.ndarray):
                raise ValueError("this influence model works on vectors of its encoder, which is frozen, not on texts")
            return features
        if isinstance(features, np.ndarray):
            raise ValueError("this influence model fine-tuned its encoder, so it works on texts, not on vectors")
        return self.backbone.encode(features)

    @property
    def identity(self) -> str:
        """`blake2b:…` over all that decides a prediction."""
        parts: list[str | bytes] = [json.dumps(self._describe(), sort_keys=True)]
        tensors = dict(self.weights)
        if self.backbone is not None:
            tensors |= {f"backbone.{name}": value for name, value in self.backbone.tensors().items()}
        for name in sorted(tensors):
            parts += [name, str(tensors[name].shape), np.ascontiguousarray(tensors[name]).tobytes()]
        return f"blake2b:{keyed.digest(*parts).hex()}"

    def _describe(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "encoder": self.encoder,
            "options": asdict(self.options),
            "alpha": self.alpha,
            "beta": self.beta,
            "label_mean": self.label_mean,
            "label_sd": self.label_sd,
            "backbone": None if self.backbone is None else self.backbone.describe(),
        }

    def save(self, folder: Path) -> None:
        """Write the model into `folder`: JSON, safetensors and, for a fine-tuned encoder, its directory. Equal models
        give equal bytes."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: np.ascontiguousarray(self.weights[name]) for name in sorted(self.weights)}, folder / WEIGHTS_FILE
        )
        if self.backbone is not None:
            self.backbone.save(folder / BACKBONE_FOLDER)
        text = json.dumps(self._describe() | {"identity": self.identity}, indent=1, sort_keys=True, allow_nan=False)
        (folder / MODEL_FILE).write_text(text + "\n", "utf-8")

    @classmethod
    def load(cls, folder: Path, accelerator: Accelerator = Accelerator()) -> "InfluenceModel":  # noqa: B008
        """Raises ValueError naming the folder where it holds no influence model, or another than its record says."""
        folder = Path(folder)
        try:
            stated = json.loads((folder / MODEL_FILE).read_text("utf-8"))
            if stated["format"] != FORMAT:
                raise ValueError(f"format {stated['format']!r}")
            backbone = None
            if stated["backbone"] is not None:
                backbone = Backbone.load(folder / BACKBONE_FOLDER, stated["backbone"], accelerator)
            model = cls(
                InfluenceOptions(**stated["options"]),
                stated["encoder"],
                load_file(folder / WEIGHTS_FILE),
                stated["alpha"],
                stated["beta"],
                stated["label_mean"],
                stated["label_sd"],
                backbone,
            )
            if model.identity != stated["identity"]:
                raise ValueError(f"its content is {model.identity}, its record says {stated['identity']}")
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ValueError(f"{folder}: not an influence model's folder ({error}); fit it again") from error
        return model


def relational_influence(
    vectors: np.ndarray, f: np.ndarray, trajectories: np.ndarray, alpha: float, beta: float
) -> np.ndarray:
    """float64[…, T]: Eq. 13 for trajectories int64[…, T] of rows of `vectors` (float[n, width], whose products are R)
    and f (float64[n])."""
    chosen = vectors[trajectories].astype(np.float64)
    before = np.cumsum(chosen, axis=-2)[..., :-1, :]
    counts = np.arange(1, trajectories.shape[-1])
    mean = np.einsum("...td,...td->...t", before, chosen[..., 1:, :]) / counts
    found = f[trajectories].astype(np.float64)
    found[..., 1:] *= bracket(mean, alpha, beta)
    return found


def sides(doc_ids: Sequence[str], seed: int, share: float) -> np.ndarray:
    """bool[n]: which documents are held out, by a keyed hash of the id. Rollouts are to be drawn inside a side each:
    of trajectories that are drawn across sides hardly any is wholly on one, and `fit` leaves the others out. A text
    under two ids can be on both sides, so give each text once."""
    return keyed.hash64(doc_ids, seed, "influence-side") < np.uint64(min(int(share * 2.0**64), 2**64 - 1))


def correlations(predicted: np.ndarray, increments: np.ndarray, policies: Sequence[str] | None = None) -> Correlations:
    """How well float64[m, T] predictions rank the increments float64[m, T]; what is NaN in either counts for nothing.
    policies: one a trajectory."""
    known = np.isfinite(predicted) & np.isfinite(increments)
    pooled = _spearman(predicted[known], increments[known])
    columns = [_spearman(predicted[k, t], increments[k, t]) for t, k in enumerate(known.T)]
    ranked = [rho for rho in columns if rho is not None]
    names = np.array(["" for _ in predicted] if policies is None else list(policies), dtype=object)
    standard = []
    for name in sorted(set(names.tolist())):
        inside = known & (names == name)[:, None]
        standard.append([_standardised(values[inside]) for values in (predicted, increments)])
    per_policy = _spearman(*(np.concatenate(part) for part in zip(*standard, strict=True))) if standard else None
    return Correlations(pooled, float(np.mean(ranked)) if ranked else None, per_policy, int(known.sum()))


def shuffled_context(
    model: InfluenceModel, h: np.ndarray, f: np.ndarray, trajectories: np.ndarray, seed: int
) -> np.ndarray:
    """float64[m, T]: what the model predicts for each document after the predecessors of another trajectory: NaN where
    those hold the document itself, which no real ones do, and throughout where there is no other trajectory."""
    m, length = trajectories.shape
    predicted = np.full((m, length), np.nan)
    if m < 2:
        return predicted
    order = keyed.rng(seed, "influence-shuffled").permutation(m)
    others = np.empty_like(trajectories)
    others[order] = trajectories[np.roll(order, 1)]
    for t in range(length):
        mixed = np.concatenate([others[:, :t], trajectories[:, t : t + 1]], axis=1)
        predicted[:, t] = model.group_influence(h, f, mixed)[:, -1]
        predicted[(others[:, :t] == trajectories[:, t : t + 1]).any(axis=1), t] = np.nan
    return predicted


def fit(
    features: Features,
    trajectories: np.ndarray,
    increments: np.ndarray,
    options: InfluenceOptions,
    doc_ids: Sequence[str],
    *,
    encoder: EncoderSpec | str,
    policies: Sequence[str] | None = None,
    accelerator: Accelerator = Accelerator(),  # noqa: B008
    progress: Progress | None = None,
) -> tuple[InfluenceModel, Card]:
    """Fit an influence model to rollouts, and measure it on trajectories of documents that it has not seen.

    features: float[n, d] vectors of the encoder, or n texts with backbone = "fine_tuned"; trajectories: int64[m, T],
    rows of features; increments: float64[m, T], the change of the reference loss by each step; encoder: the spec that
    the features come from, which fine-tuning starts from, or another name of them; policies: by which each trajectory
    was drawn, "random" where not given.

    The loss is the squared error of Θ against the z-scored increment, summed over positions, its mean over trajectories
    (AdamW, 50 steps of warm-up or a tenth of all, then linearly to 0; α, β and the bias at a rate of 1e-2). Mean and
    standard deviation are of training rows alone. The epoch with the highest pooled Spearman on the held-out side is
    kept. Increments that are not finite are left out and counted, and so are trajectories with documents of both sides.

    On the CPU torch runs on one thread meanwhile, so that two runs have the same bits. progress(epoch, epochs, facts)
    is called after each epoch. Raises ValueError where shapes or rows make no sense, naming the trajectory, and where
    too little is left to train or to hold out.
    """
    data = _Rollouts.check(features, trajectories, increments, options, doc_ids, policies)
    identity = encoder if isinstance(encoder, str) else encoder.identity
    if options.backbone == "fine_tuned" and isinstance(encoder, str):
        raise ValueError(f"encoder {encoder!r} is a name; backbone = 'fine_tuned' needs its EncoderSpec, to train it")
    with _deterministic(options.seed, accelerator):
        trainer = _Trainer(features, data, options, encoder, accelerator)
        model, best, history = trainer.train(progress)
    h, f, at = _held_out_vectors(model, features, data)
    predicted = model.group_influence(h, f, at)
    held = data.held_out
    names = [data.policies[i] for i in held.tolist()]
    shuffled = shuffled_context(model, h, f, at, options.seed)
    card = Card(
        mode=options.mode,
        similarity=options.similarity,
        alpha=model.alpha,
        beta=model.beta,
        label_mean=model.label_mean,
        label_sd=model.label_sd,
        held_out=correlations(predicted, data.increments[held], names),
        shuffled=correlations(shuffled, data.increments[held], names),
        trajectories=data.counts(),
        not_finite=int((~np.isfinite(data.increments)).sum()),
        documents={
            "training": np.unique(data.trajectories[data.training]).size,
            "held_out": np.unique(data.trajectories[held]).size,
        },
        encoder=identity,
        settings=asdict(options),
        seed=options.seed,
        epochs=options.epochs,
        best_epoch=best,
        history=history,
        identity=model.identity,
    )
    return model, card


@dataclass(frozen=True, eq=False)
class _Rollouts:
    """Checked rollouts: trajectories int64[m, T], increments float64[m, T], and which trajectories are on which
    side."""

    trajectories: np.ndarray
    increments: np.ndarray
    policies: list[str]
    training: np.ndarray
    held_out: np.ndarray

    @classmethod
    def check(
        cls,
        features: Features,
        trajectories: np.ndarray,
        increments: np.ndarray,
        options: InfluenceOptions,
        doc_ids: Sequence[str],
        policies: Sequence[str] | None,
    ) -> "_Rollouts":
        n = len(features)
        if len(doc_ids) != n:
            raise ValueError(f"{n} rows of features but {len(doc_ids)} ids")
        if trajectories.ndim != 2 or trajectories.shape != increments.shape or not trajectories.shape[1]:
            raise ValueError(
                f"trajectories of shape {list(trajectories.shape)} and increments of shape {list(increments.shape)}: "
                "both must be [m, T]"
            )
        m = len(trajectories)
        if policies is not None and len(policies) != m:
            raise ValueError(f"{m} trajectories but {len(policies)} policies")
        outside = np.flatnonzero(((trajectories < 0) | (trajectories >= n)).any(axis=1))
        if outside.size:
            raise ValueError(f"trajectory {int(outside[0])} has a row outside 0..{n - 1}, the rows of the features")
        ordered = np.sort(trajectories, axis=1)
        twice = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
        if twice.size:
            raise ValueError(f"trajectory {int(twice[0])} has a document twice; rollouts draw without replacement")
        used = np.unique(trajectories)
        if isinstance(features, np.ndarray):
            bad = used[[not np.isfinite(features[i]).all() for i in used.tolist()]] if used.size else used
            if bad.size:
                raise BadInput(f"{name_documents(doc_ids, bad)}: the features are not finite; leave these out")
        held = sides(doc_ids, options.seed, options.held_out)[trajectories]
        labelled = np.isfinite(increments)
        training = np.flatnonzero(~held.any(axis=1) & labelled.any(axis=1))
        held_out = np.flatnonzero(held.all(axis=1) & labelled.any(axis=1))
        for what, found, least in (("train on", training, 1), ("hold out", held_out, LEAST_TRAJECTORIES)):
            if found.size < least:
                raise ValueError(
                    f"of {m} trajectories {found.size} can be used to {what}, and {least} are needed: draw rollouts "
                    "inside each side (influence.relational.sides), draw more, or change held_out"
                )
        values = np.asarray(increments, np.float64)
        names = ["random"] * m if policies is None else list(policies)
        return cls(np.asarray(trajectories, np.int64), values, names, training, held_out)

    def counts(self) -> dict[str, dict[str, int]]:
        """Trajectories by policy and what became of them."""
        sizes = Counter(self.policies)
        trained, held = (Counter(self.policies[i] for i in rows.tolist()) for rows in (self.training, self.held_out))
        return {
            name: {"training": trained[name], "held_out": held[name], "left_out": size - trained[name] - held[name]}
            for name, size in sorted(sizes.items())
        }


class Backbone:
    """A SentenceTransformer whose weights are part of the model."""

    def __init__(self, model: "SentenceTransformer", prefix: str, max_length: int, accelerator: Accelerator) -> None:
        self.model, self.prefix, self.max_length = model, prefix, max_length
        self.accelerator = accelerator

    @classmethod
    def of(cls, spec: EncoderSpec, accelerator: Accelerator) -> "Backbone":
        return cls(_sentence_transformer(spec.path, accelerator), spec.prefix, spec.max_length, accelerator)

    def describe(self) -> dict[str, Any]:
        return {"prefix": self.prefix, "max_length": self.max_length}

    def tokens(self, texts: Sequence[str]) -> Tokens:
        """Raises BadInput naming the first row that has no text."""
        missing = next((i for i, text in enumerate(texts) if not isinstance(text, str)), None)
        if missing is not None:
            raise BadInput(f"row {missing}: there is no text; leave it out")
        return tokenise(self.model.tokenizer, [self.prefix + text for text in texts], self.max_length)

    def forward(self, tokens: Tokens, rows: np.ndarray) -> "torch.Tensor":
        """[len(rows), d] sentence embeddings, with their gradients."""
        batch = tokens.padded(self.model.tokenizer, rows, self.accelerator.device)
        return self.model(batch)["sentence_embedding"].float()

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """float32[n, d]."""
        import torch

        tokens = self.tokens(texts)
        vectors = np.empty((len(texts), self.model.get_embedding_dimension() or 0), np.float32)

        def forward(rows: np.ndarray) -> np.ndarray:
            with torch.inference_mode():
                return self.forward(tokens, rows).cpu().numpy()

        budget = CUDA_BATCH_TOKENS if self.accelerator.is_cuda else CPU_BATCH_TOKENS
        run(tokens.lengths, np.arange(len(texts)), budget, forward, vectors)
        return vectors

    def tensors(self) -> dict[str, np.ndarray]:
        return {name: value.detach().cpu().numpy() for name, value in self.model.state_dict().items()}

    def save(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self.model.save(str(folder), create_model_card=False, safe_serialization=True)

    @classmethod
    def load(cls, folder: Path, stated: dict[str, Any], accelerator: Accelerator) -> "Backbone":
        return cls(_sentence_transformer(folder, accelerator), stated["prefix"], stated["max_length"], accelerator)


def _sentence_transformer(path: Path, accelerator: Accelerator) -> "SentenceTransformer":
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging

    logging.disable_progress_bar()
    check_inert(path)
    model = SentenceTransformer(
        str(path),
        device=accelerator.device,
        local_files_only=True,
        trust_remote_code=False,
        model_kwargs={"dtype": "float32", "use_safetensors": True},
    )
    return model.eval()


class _Trainer:
    """The network while it is trained: the encoder, where it is, and the layers on it, with α and β."""

    def __init__(
        self,
        features: Features,
        data: _Rollouts,
        options: InfluenceOptions,
        encoder: EncoderSpec | str,
        accelerator: Accelerator,
    ) -> None:
        import torch
        from torch import nn

        self.data, self.options, self.device = data, options, accelerator.device
        self.identity = encoder if isinstance(encoder, str) else encoder.identity
        self.backbone = None
        if options.backbone == "fine_tuned" and not isinstance(encoder, str):
            if isinstance(features, np.ndarray):
                raise ValueError("backbone = 'fine_tuned' trains the encoder, so its features are texts, not vectors")
            self.backbone = Backbone.of(encoder, accelerator)
            self.used = np.unique(data.trajectories)
            self.tokens = self.backbone.tokens([features[i] for i in self.used.tolist()])
            dimension = encoder.dimension
        else:
            if not isinstance(features, np.ndarray) or features.ndim != 2:
                raise ValueError("backbone = 'frozen' takes the encoder's vectors, float[n, d]")
            self.features, dimension = features, features.shape[1]
        self.layers = nn.ModuleDict()
        if options.hidden:
            self.layers["hidden"] = nn.Linear(dimension, options.hidden)
        self.layers["project"] = nn.Linear(options.hidden or dimension, options.width)
        self.layers["head"] = nn.Linear(options.width, 1)
        if options.similarity == "ffn":
            self.layers["relate"] = nn.Linear(options.width, options.width)
            self.layers["relate_out"] = nn.Linear(options.width, options.width)
        self.layers.to(self.device)
        learned = options.learned and options.mode == "relational"
        # Θ is linear in 1/β, and no relation at all, 0, is a few steps away instead of infinitely many
        self.alpha, self.inverse_beta = (
            nn.Parameter(torch.tensor(value, device=self.device), requires_grad=learned)
            for value in (options.alpha, 1.0 / options.beta)
        )
        known = data.increments[data.training]
        known = known[np.isfinite(known)]
        self.mean, self.sd = float(known.mean()), float(known.std())
        if not self.sd > 0:
            raise ValueError(
                f"every increment to train on is {self.mean}: there is nothing to learn; roll out more trajectories or "
                "of more different documents (group_mates.trajectories, steps, probe_documents), or raise the step "
                "that is probed (group_mates.probe_lr)"
            )

    def train(self, progress: Progress | None) -> tuple[InfluenceModel, int, list[float | None]]:
        """(the model of the best epoch, that epoch, counted from 1, the held-out Spearman after each)."""
        import torch

        options, training = self.options, self.data.training
        labels = (self.data.increments - self.mean) / self.sd
        batches = -(-training.size // options.batch)
        optimizer = self._optimizer(batches * options.epochs)
        history: list[float | None] = []
        best, kept = 0, self._state()
        for epoch in range(1, options.epochs + 1):
            order = keyed.rng(options.seed, "influence-batches", epoch).permutation(training)
            total = 0.0
            for a in range(0, order.size, options.batch):
                rows = order[a : a + options.batch]
                optimizer[0].zero_grad()
                for part in self._pieces(rows):
                    target = torch.from_numpy(labels[part]).float().to(self.device)
                    error = (self.predict(self.data.trajectories[part]) - target.nan_to_num(0.0, 0.0, 0.0)) ** 2
                    loss = torch.where(target.isfinite(), error, 0.0).sum() / rows.size
                    loss.backward()
                    total += float(loss.detach()) * rows.size
                optimizer[0].step()
                optimizer[1].step()
                self._stay_inside()
            if not np.isfinite(total):
                raise ValueError(f"the fit diverged in epoch {epoch}; lower learning_rate from {options.rate:g}")
            history.append(self._held_out_spearman())
            # what cannot be ranked is no better than what was kept
            if best == 0 or _rank_of(history[-1]) > _rank_of(history[best - 1]):
                best, kept = epoch, self._state()
            if progress is not None:
                progress(epoch, options.epochs, {"loss": total / training.size, "spearman": history[-1]})
        return self._model(kept), best, history

    def _pieces(self, rows: np.ndarray) -> list[np.ndarray]:
        """Trajectories that are taken through the network at once: a batch, or, where the encoder's activations are
        held for the gradient, one."""
        size = self.options.batch if self.backbone is None else 1
        return [rows[a : a + size] for a in range(0, rows.size, size)]

    def predict(self, trajectories: np.ndarray) -> "torch.Tensor":
        """float32[B, T]: Θ of each document given those before it."""
        from torch.nn import functional

        options = self.options
        h = self._encode(trajectories)
        if options.hidden:
            h = functional.relu(self.layers["hidden"](h))
        h = self.layers["project"](h)
        if options.similarity == "cosine":
            h = functional.normalize(h, dim=-1, eps=_LEAST_NORM)
        f = self.layers["head"](h)[..., 0]
        if options.mode == "individual":
            return f
        if options.similarity == "ffn":
            h = self.layers["relate_out"](functional.relu(self.layers["relate"](h)))
            h = functional.normalize(h, dim=-1, eps=_LEAST_NORM)
        return group_influence_of(h, f, self.alpha, 1.0 / self.inverse_beta)

    def _encode(self, trajectories: np.ndarray) -> "torch.Tensor":
        import torch

        if self.backbone is None:
            return torch.from_numpy(np.asarray(self.features[trajectories], np.float32)).to(self.device)
        rows, at = np.unique(trajectories, return_inverse=True)
        vectors = self.backbone.forward(self.tokens, np.searchsorted(self.used, rows))
        return vectors[torch.from_numpy(at.reshape(trajectories.shape))]

    def _optimizer(self, steps: int) -> tuple["torch.optim.Optimizer", "torch.optim.lr_scheduler.LRScheduler"]:
        from torch.optim import AdamW
        from torch.optim.lr_scheduler import LambdaLR

        options = self.options
        bias = self.layers["head"].bias
        scalars = [p for p in (self.alpha, self.inverse_beta, bias) if p.requires_grad]
        layers = [p for p in self.layers.parameters() if p is not bias]
        groups = [
            {"params": layers, "lr": options.rate if self.backbone is None else max(options.rate, PROJECTION_RATE)},
            {"params": scalars, "lr": SCALAR_RATE, "weight_decay": 0.0},
        ]
        if self.backbone is not None:
            groups.append({"params": list(self.backbone.model.parameters()), "lr": options.rate})
        optimizer = AdamW(groups, weight_decay=options.weight_decay)
        warm_up = min(WARM_UP_STEPS, steps // 10)

        def factor(step: int) -> float:
            return (step + 1) / warm_up if step < warm_up else (steps - step) / (steps - warm_up)

        return optimizer, LambdaLR(optimizer, factor)

    def _stay_inside(self) -> None:
        """Put α and β back to where the bracket means what it says: the nearest point, after each step."""
        import torch

        with torch.no_grad():
            self.alpha.clamp_(min=0.0)
            largest = 1.0 if self.options.bracket == "bounded" else 1.0 / LEAST_BETA
            self.inverse_beta.clamp_(min=1.0 / LARGEST_BETA, max=largest)

    def _held_out_spearman(self) -> float | None:
        import torch

        rows = self.data.held_out
        with torch.no_grad():
            found = [self.predict(self.data.trajectories[part]) for part in self._pieces(rows)]
        return correlations(torch.cat(found).double().cpu().numpy(), self.data.increments[rows]).pooled

    def _state(self) -> dict[str, Any]:
        state = {f"layers.{name}": value for name, value in self.layers.state_dict().items()}
        if self.backbone is not None:
            state |= {f"backbone.{name}": value for name, value in self.backbone.model.state_dict().items()}
        state |= {"alpha": self.alpha, "inverse_beta": self.inverse_beta}
        return {name: value.detach().clone() for name, value in state.items()}

    def _model(self, state: dict[str, Any]) -> InfluenceModel:
        def part(name: str) -> dict[str, Any]:
            return {key.removeprefix(name): value for key, value in state.items() if key.startswith(name)}

        fitted = self.alpha.requires_grad
        if self.backbone is not None:
            self.backbone.model.load_state_dict(part("backbone."))
        return InfluenceModel(
            self.options,
            self.identity,
            {name: value.cpu().numpy() for name, value in part("layers.").items()},
            float(state["alpha"]) if fitted else self.options.alpha,
            1.0 / float(state["inverse_beta"]) if fitted else self.options.beta,
            self.mean,
            self.sd,
            self.backbone,
        )


def group_influence_of(
    vectors: "torch.Tensor", f: "torch.Tensor", alpha: "torch.Tensor", beta: "torch.Tensor"
) -> "torch.Tensor":
    """[B, T]: Eq. 13, as `relational_influence`, for vectors [B, T, width] and f [B, T] in order, with gradients."""
    import torch

    before = torch.cumsum(vectors, dim=1)[:, :-1]
    counts = torch.arange(1, vectors.shape[1], device=vectors.device, dtype=vectors.dtype)
    mean = (before * vectors[:, 1:]).sum(-1) / counts
    later = alpha * torch.clamp(1.0 - mean / beta, min=0.0) * f[:, 1:]
    return torch.cat([f[:, :1], later], dim=1)


def _held_out_vectors(
    model: InfluenceModel, features: Features, data: _Rollouts
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(h and f of the documents held out, the held-out trajectories as rows of them)."""
    trajectories = data.trajectories[data.held_out]
    used, at = np.unique(trajectories, return_inverse=True)
    h = model.embed(features[used] if isinstance(features, np.ndarray) else [features[i] for i in used.tolist()])
    return h, model.influence(h), at.reshape(trajectories.shape)


@contextmanager
def _deterministic(seed: int, accelerator: Accelerator) -> Iterator[None]:
    """Torch's own generator under a key, and on the CPU one thread, by whose number torch orders its sums."""
    import torch

    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(keyed.rng(seed, "influence-weights").integers(2**63)))
        if not accelerator.is_cuda:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _spearman(x: np.ndarray, y: np.ndarray) -> float | None:
    from scipy.stats import spearmanr

    if x.size < LEAST_TRAJECTORIES or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(spearmanr(x, y).statistic)


def _rank_of(rho: float | None) -> float:
    """Below every ρ where there was nothing to rank."""
    return -2.0 if rho is None else rho


def _standardised(values: np.ndarray) -> np.ndarray:
    spread = values.std() if values.size else 0.0
    return (values - values.mean()) / spread if spread > 0 else np.zeros(values.size)


def _padded(rows: np.ndarray) -> np.ndarray:
    padded = np.zeros((_BLOCK, rows.shape[1]), np.float32)
    padded[: len(rows)] = as_single(rows)
    return padded


def _unit(rows: np.ndarray) -> np.ndarray:
    norms = np.sqrt(np.einsum("nd,nd->n", rows, rows))
    return rows / np.maximum(norms, np.float32(_LEAST_NORM))[:, None]
