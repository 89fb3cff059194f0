"""The language model that is probed: made new or found, with all that its next optimizer step depends on.

Here: a checkpoint, its identity and its files. Not here: training it (`pretraining`) and probing it (`rollouts`).

A folder of a checkpoint is the hub's layout, so that `transformers` loads it as any model, and beside it
`optimizer.safetensors` (AdamW's moments by parameter) and `training.json`. Nothing in it is pickled, and nothing
pickled is ever read.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from dagster_datamask import keyed
from dagster_datamask.scoring.batching import positions
from dagster_datamask.scoring.models import check_inert, resolve_model
from dagster_datamask.shards.writer import fsync_folder, write_json

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

FORMAT = "datamask-checkpoint-1"
OPTIMIZER_FILE, TRAINING_FILE, TOKENIZER_FILE = "optimizer.safetensors", "training.json", "tokenizer.json"
# GPT-2's spread of first weights
_SPREAD = 0.02


class NoOptimizerState(ValueError):
    """A checkpoint that comes without the moments that a probe is to reload."""


@dataclass(frozen=True)
class LanguageModelOptions:
    """A decoder of GPT-2's shape: layers of `width` with `heads`, `context` positions, `vocabulary` tokens. Input and
    output embeddings are one, and there is no dropout, so that a step depends on its documents alone."""

    layers: int = 2
    width: int = 64
    heads: int = 2
    context: int = 64
    vocabulary: int = 512

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"a language model needs {name} of 1 or more, not {getattr(self, name)}")
        if self.context < 2:
            raise ValueError(f"a context of {self.context} has no token to predict; 2 is the least")
        if self.width % self.heads:
            raise ValueError(f"{self.heads} heads do not divide a width of {self.width}")


@dataclass(frozen=True, eq=False)
class Moments:
    """AdamW's state: first and second moments by parameter, float32 of its shape, after `step` steps."""

    first: "dict[str, torch.Tensor]"
    second: "dict[str, torch.Tensor]"
    step: int


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A language model between two optimizer steps. Never changed in place: who trains or probes takes a copy.

    model: float32, on the CPU; moments: None where it came without; step: of its training; lr: of the step that led
    here, None where nobody told; position: sequences that its training has taken of its data.
    """

    model: "PreTrainedModel"
    moments: Moments | None = None
    step: int = 0
    lr: float | None = None
    position: int = 0

    @property
    def context(self) -> int:
        """Tokens that it sees at once. Raises ValueError where its configuration sets no limit."""
        limit = positions(self.model.config)
        if limit is None:
            raise ValueError(
                f"a {self.model.config.model_type} model states no max_position_embeddings: set its context"
            )
        return limit

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @cached_property
    def identity(self) -> str:
        """`blake2b:` and 32 hex digits over all that a probe depends on: configuration, weights, moments, step and
        learning rate; not over names of folders or versions of libraries."""
        parts: list[str | bytes] = [json.dumps(_architecture(self.model), sort_keys=True), repr((self.step, self.lr))]
        groups: list[tuple[str, Mapping[str, torch.Tensor]]] = [("weights", dict(self.model.named_parameters()))]
        if self.moments is not None:
            parts.append(str(self.moments.step))
            groups += [("first", self.moments.first), ("second", self.moments.second)]
        for group, tensors in groups:
            for name in sorted(tensors):
                values = tensors[name].detach().contiguous().numpy()
                parts += [group, name, str(values.shape), keyed.digest(values.tobytes())]
        return f"blake2b:{keyed.digest(*parts).hex()}"

    def describe(self) -> dict[str, Any]:
        """What metadata and cards record, as JSON values."""
        return {
            "checkpoint": self.identity,
            "architecture": self.model.config.model_type,
            "parameters": self.parameters,
            "context": self.context,
            "vocabulary": self.vocabulary,
            "step": self.step,
            "lr": self.lr,
            "optimizer": "AdamW's moments" if self.moments is not None else "no optimizer state",
        }

    def with_fresh_moments(self) -> "Checkpoint":
        """The same model with an optimizer that has taken no step."""
        return replace(self, moments=_no_moments(self.model))

    def save(self, folder: Path, tokenizer: Tokenizer | None = None) -> None:
        """Write the folder, whole or not at all; one that is there already is replaced. Equal checkpoints give equal
        bytes under one version of the libraries."""
        from safetensors.torch import save_file
        from transformers.utils import logging

        logging.disable_progress_bar()
        with _new_folder(folder) as temp:
            self.model.save_pretrained(temp)
            if self.moments is not None:
                moments = {f"first.{name}": t.contiguous() for name, t in self.moments.first.items()}
                moments |= {f"second.{name}": t.contiguous() for name, t in self.moments.second.items()}
                save_file(moments, temp / OPTIMIZER_FILE)
            if tokenizer is not None:
                (temp / TOKENIZER_FILE).write_text(tokenizer.to_str(), "utf-8")
            training = {"format": FORMAT, "step": self.step, "lr": self.lr, "position": self.position}
            write_json(temp / TRAINING_FILE, training | {"optimizer_step": self.moments.step if self.moments else None})


def new_checkpoint(options: LanguageModelOptions, seed: int = 0) -> Checkpoint:
    """A model that has seen nothing: GPT-2's first weights, N(0, 0.02²), those that lead back into the residual stream
    divided by √(2·layers); biases 0, norms 1. Every tensor's draw is keyed by its name."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=options.vocabulary,
        n_positions=options.context,
        n_embd=options.width,
        n_layer=options.layers,
        n_head=options.heads,
        # the same function as GPT-2's own, in one pass instead of seven
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue
            back = name.endswith("c_proj.weight")
            spread = _SPREAD / (2 * options.layers) ** 0.5 if back else _SPREAD
            draw = keyed.rng(seed, "first-weights", name).standard_normal(tuple(parameter.shape), dtype="float32")
            parameter.copy_(torch.from_numpy(draw) * spread)
    return Checkpoint(model.eval(), _no_moments(model))


def load_checkpoint(ref: str | Path, setting: str = "checkpoint") -> Checkpoint:
    """The checkpoint that `ref` names: a folder of `Checkpoint.save`, or any causal language model in the hub's layout
    (a folder, `package:…` or a hub id), whose moments and learning rate are then not known.

    Raises ModelUnavailable, and ValueError naming the folder and what is wrong with it: weights that are missing, not
    finite or pickled, moments of another model.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    # a bar for weights that load in a moment, on a stderr that belongs to the run's own progress
    logging.disable_progress_bar()
    folder = resolve_model(str(ref), setting=setting).path
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: not a transformers directory (no config.json in it)")
    if not any(folder.glob("model*.safetensors")):
        raise ValueError(
            f"{folder}: no weights as model.safetensors; pickled ones are not read, so save the model anew with "
            "safe_serialization"
        )
    check_inert(folder)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{folder}: its weights cannot be loaded as a causal language model ({error})") from error
    model, loading = loaded
    if loading["missing_keys"]:
        raise ValueError(f"{folder}: the weights lack {', '.join(sorted(loading['missing_keys']))}")
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(f"{folder}: {name} is not finite; take an earlier checkpoint")
    training = _training(folder)
    return Checkpoint(
        model.eval(),
        _moments(folder, model, training),
        int(training.get("step", 0)),
        training.get("lr"),
        int(training.get("position", 0)),
    )


@contextmanager
def few_threads(threads: int) -> Iterator[None]:
    """Torch on so many threads of the CPU: it orders its sums by their number, and a small model waits for them more
    than it gains."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _architecture(model: "PreTrainedModel") -> dict[str, Any]:
    config = model.config.to_dict()
    for name in ("transformers_version", "_name_or_path", "dtype", "use_cache", "architectures"):
        config.pop(name, None)
    return config


def _no_moments(model: "PreTrainedModel") -> Moments:
    import torch

    first = {name: torch.zeros_like(p, requires_grad=False) for name, p in model.named_parameters()}
    return Moments(first, {name: t.clone() for name, t in first.items()}, 0)


def _training(folder: Path) -> dict[str, Any]:
    path = folder / TRAINING_FILE
    if not path.is_file():
        return {}
    try:
        training = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not readable as JSON ({error}); take another checkpoint") from error
    if not isinstance(training, dict) or training.get("format") != FORMAT:
        raise ValueError(f"{path}: not of the format {FORMAT}; remove it to take the model without optimizer state")
    return training


def _moments(folder: Path, model: "PreTrainedModel", training: dict[str, Any]) -> Moments | None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / OPTIMIZER_FILE
    if not path.is_file() or training.get("optimizer_step") is None:
        return None
    try:
        stored = load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"{path}: not readable ({error}); remove it to take the model without optimizer state"
        ) from None
    kinds: dict[str, dict[str, torch.Tensor]] = {}
    for kind in ("first", "second"):
        kinds[kind] = {}
        for name, parameter in model.named_parameters():
            found = stored.get(f"{kind}.{name}")
            if found is None or found.shape != parameter.shape or not found.isfinite().all():
                raise ValueError(
                    f"{path}: the {kind} moment of {name} is missing, not finite or of another shape than the weights; "
                    "remove the file to take the model without optimizer state"
                )
            kinds[kind][name] = found.float()
    return Moments(kinds["first"], kinds["second"], int(training["optimizer_step"]))


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    temp = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
    # one of a killed process whose number this one has
    shutil.rmtree(temp, ignore_errors=True)
    temp.mkdir(parents=True)
    try:
        yield temp
        for file in temp.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        fsync_folder(temp)
        if folder.exists():
            shutil.rmtree(folder)
        temp.replace(folder)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    fsync_folder(folder.parent)
