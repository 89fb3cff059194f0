"""What a causal language model computes here: losses of the next token, gradients and AdamW steps on all parameters at
once.

Here: torch alone; the modules around it import this one when they start to compute. Not here: what is trained or
probed on.

All parameters are views of one vector. So AdamW is one kernel instead of one a tensor, its state is restored by one
copy, and no saved tensor is ever the optimizer's own (torch's `load_state_dict` keeps what it is given, and the next
step would write into it).
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import GPT2LMHeadModel, PreTrainedModel
from transformers.activations import NewGELUActivation

from dagster_datamask.influence.language_model import Checkpoint, Moments

# logits that are held at once, and rows below which a product reads the output embeddings too often
_LOGITS = 1 << 19
_LEAST_ROWS = 128
# oneDNN's product with its bias and what follows in one pass over what it writes; None in a torch built without it
_IN_ONE_PASS = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


class NextToken(nn.Module):
    """A causal language model's logits at chosen positions alone.

    model: taken as it is and changed in place: no dropout, and the tanh form of GELU in one pass. GPT-2's decoder is
    computed here (`gpt2_states`), any other by its own class.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model.eval()
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, NewGELUActivation):
                    setattr(module, name, nn.GELU(approximate="tanh"))
        self._plain = _is_plain_gpt2(model)
        self._apart = self._agrees()

    def forward(self, tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """[k, vocabulary]: tokens int64[n, L]; at int64[k]: positions as row·L + column."""
        if self._apart:
            return self.model.get_output_embeddings()(self.states(tokens, at))
        return self.model(input_ids=tokens, use_cache=False).logits.flatten(0, 1)[at]

    def states(self, tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """[k, width]: the last hidden states at these positions."""
        if self._plain:
            return gpt2_states(self.model.base_model, tokens, at)
        found: torch.Tensor = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        return found.flatten(0, 1)[at]

    def losses(self, tokens: torch.Tensor, at: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """float32[k]: the loss of each target int64[k], without gradients in mind: few logits are held at once."""
        if not self._apart:
            return functional.cross_entropy(self(tokens, at).float(), targets, reduction="none")
        states, head = self.states(tokens, at), self.model.get_output_embeddings()
        rows = max(_LEAST_ROWS, _LOGITS // head.weight.shape[0])
        parts = zip(states.split(rows), targets.split(rows), strict=True)
        return torch.cat([_cross_entropy(head(x).float(), y) for x, y in parts])

    def _agrees(self) -> bool:
        """Whether the output embeddings alone lead from the last hidden states to the logits; some models scale or
        cap them."""
        if self.model.get_output_embeddings() is None:
            return False
        device = next(self.model.parameters()).device
        vocabulary = self.model.config.get_text_config().vocab_size
        at = torch.arange(4, device=device)
        tokens = at[None] % vocabulary
        with torch.inference_mode():
            whole = self.model(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
            apart = self.model.get_output_embeddings()(self.states(tokens, at))
        return whole.shape == apart.shape and torch.allclose(whole, apart, rtol=1e-4, atol=1e-4)


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """float32[k] of logits[k, vocabulary], which are written over: torch's own keeps a second table of that size."""
    wanted = logits.gather(1, targets[:, None])[:, 0]
    largest = logits.amax(dim=1, keepdim=True)
    return logits.sub_(largest).exp_().sum(dim=1).log_() + largest[:, 0] - wanted


def mean_loss(following: NextToken, batches: "Sequence[Batch]") -> torch.Tensor:
    """float64: the mean loss over all targets of the batches."""
    with torch.inference_mode():
        sums = [following.losses(batch.tokens, batch.at, batch.targets).double().sum() for batch in batches]
        return torch.stack(sums).sum() / sum(len(batch.targets) for batch in batches)


def gpt2_states(decoder: Any, tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """[k, width]: the last hidden states of a `GPT2Model` with its own parameters at positions int64[k] of tokens
    int64[n, L], without padding before them.

    The same sums as the model's own forward pass, whose masks, caches and checks cost a small model as much as its
    products.
    """
    n, length = tokens.shape
    x = (functional.embedding(tokens, decoder.wte.weight) + decoder.wpe.weight[:length]).flatten(0, 1)
    width = x.shape[-1]
    split = (n, length, 3, decoder.config.n_head, width // decoder.config.n_head)
    for block in decoder.h:
        attention, mlp = block.attn, block.mlp
        mixed = _linear(block.ln_1(x), attention.c_attn)
        query, key, value = mixed.view(split).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        found = found.transpose(1, 2).reshape(n * length, width)
        if block is decoder.h[-1]:
            # what follows stays within a token
            x, found = x[at], found[at]
        x = _linear(found, attention.c_proj).add_(x)
        x = _linear(_linear(block.ln_2(x), mlp.c_fc, gelu=True), mlp.c_proj).add_(x)
    states: torch.Tensor = decoder.ln_f(x)
    return states


def _linear(x: torch.Tensor, layer: Any, gelu: bool = False) -> torch.Tensor:
    """x·W + b of a `Conv1D`, and GELU's tanh form of it."""
    if _IN_ONE_PASS is None or x.is_cuda or not torch.is_inference_mode_enabled():
        found = torch.addmm(layer.bias, x, layer.weight)
        return functional.gelu(found, approximate="tanh") if gelu else found
    after: tuple[str, list[float], str] = ("gelu", [], "tanh") if gelu else ("none", [], "")
    fused: torch.Tensor = _IN_ONE_PASS(x, layer.weight.t(), layer.bias, *after)
    return fused


def _is_plain_gpt2(model: PreTrainedModel) -> bool:
    if not isinstance(model, GPT2LMHeadModel):
        return False
    config = model.config
    return (
        config.activation_function in ("gelu_new", "gelu_pytorch_tanh")
        and config.scale_attn_weights
        and not (config.scale_attn_by_inverse_layer_idx or config.add_cross_attention)
    )


class Trained:
    """`copies` of a checkpoint's model under one AdamW, each as a row of `weights` float32[copies, P].

    A step is that of `torch.optim.AdamW` on every copy by itself: the moments and the decay are element-wise, and
    gradients are clipped copy by copy. One copy runs through the model itself, more through `torch.func.vmap`. dtype:
    of a single copy's forward and backward pass when it trains; weights, moments and losses are float32.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        clip: float,
        device: str = "cpu",
        dtype: str = "float32",
        copies: int = 1,
    ) -> None:
        assert checkpoint.moments is not None
        model = copy.deepcopy(checkpoint.model).float().to(device)
        self.next = NextToken(model)
        self.clip, self.copies, self.device, self.dtype = clip, copies, device, dtype
        # tied weights are one parameter
        self._named = dict(self.next.named_parameters())
        flat = _flat(self._named.values()).to(device)
        self.weights = nn.Parameter(flat.repeat(copies, 1))
        self.weights.grad = torch.zeros_like(self.weights)
        if copies == 1:
            views, gradients = self._views(self.weights.data), self._views(self.weights.grad)
            for name, parameter in self._named.items():
                parameter.data, parameter.grad = views[name][0], gradients[name][0]
        self.optimizer = torch.optim.AdamW([self.weights], lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
        names = [name.removeprefix("model.") for name in self._named]
        moments = checkpoint.moments
        self._state = {
            "step": torch.tensor(float(moments.step), device=device),
            "exp_avg": _flat(moments.first[name] for name in names).to(device).repeat(copies, 1),
            "exp_avg_sq": _flat(moments.second[name] for name in names).to(device).repeat(copies, 1),
        }
        self.optimizer.state[self.weights] = self._state

    def snapshot(self) -> list[torch.Tensor]:
        """A copy of the first copy's weights and optimizer state."""
        moments = (self._state["exp_avg"], self._state["exp_avg_sq"])
        return [self._state["step"].clone(), *(t.detach()[0].clone() for t in (self.weights, *moments))]

    def restore(self, snapshot: Sequence[torch.Tensor]) -> None:
        """Give every copy this state, by value."""
        step, weights, first, second = snapshot
        with torch.no_grad():
            self._state["step"].copy_(step)
            self.weights.copy_(weights.expand_as(self.weights))
            self._state["exp_avg"].copy_(first.expand_as(self.weights))
            self._state["exp_avg_sq"].copy_(second.expand_as(self.weights))

    def checkpoint(self, step: int, lr: float, position: int) -> Checkpoint:
        """What has become of a single copy, as a checkpoint of its own."""
        assert self.copies == 1
        step_taken, _, *moments = self.snapshot()
        first, second = (
            {name.removeprefix("model."): t[0].cpu().clone() for name, t in self._views(moment[None]).items()}
            for moment in moments
        )
        model = copy.deepcopy(self.next.model).cpu()
        return Checkpoint(model, Moments(first, second, int(step_taken)), step, lr, position)

    def step(self, batches: "Sequence[Batch]") -> torch.Tensor:
        """One AdamW step of every copy on the mean loss of its batch; of a single copy on that of all batches together.

        Returns the losses before the step, [copies], on the device.
        """
        gradient = self.weights.grad
        assert gradient is not None
        backward = self._gradient if self.copies == 1 else self._stacked_gradient
        losses = backward(batches, gradient)
        if self.clip > 0:
            norms = gradient.norm(dim=1, keepdim=True)
            # torch.nn.utils.clip_grad_norm_'s rule
            gradient.mul_((self.clip / (norms + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        return losses

    def mean_losses(self, batches: "Sequence[Batch]") -> torch.Tensor:
        """float64[copies]: the mean loss over all targets of the batches, which every copy is given."""
        if self.copies == 1:
            return mean_loss(self.next, batches)[None]
        total = torch.zeros(self.copies, dtype=torch.float64, device=self.device)
        with torch.no_grad():
            parameters = self._views(self.weights.data)
            for batch in batches:
                total += _vmap(self._loss, (0, None, None, None, None))(
                    parameters, batch.tokens, batch.at, batch.targets, None
                )
        return total / sum(len(batch.targets) for batch in batches)

    def _loss(
        self,
        parameters: dict[str, torch.Tensor],
        tokens: torch.Tensor,
        at: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        logits = torch.func.functional_call(self.next, parameters, (tokens, at))
        losses = functional.cross_entropy(logits.float(), targets, reduction="none")
        return losses.double().sum() if weights is None else losses @ weights

    def _gradient(self, batches: "Sequence[Batch]", gradient: torch.Tensor) -> torch.Tensor:
        gradient.zero_()
        total = sum(len(batch.targets) for batch in batches)
        losses = torch.zeros(1, device=self.device)
        for batch in batches:
            with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.dtype == "bfloat16"):
                logits = self.next(batch.tokens, batch.at)
            loss = functional.cross_entropy(logits.float(), batch.targets, reduction="sum") / total
            loss.backward()
            losses += loss.detach()
        return losses

    def _stacked_gradient(self, batches: "Sequence[Batch]", gradient: torch.Tensor) -> torch.Tensor:
        length = max(batch.tokens.shape[1] for batch in batches)
        tokens = torch.zeros(self.copies, 1, length, dtype=torch.int64, device=self.device)
        targets = torch.zeros(self.copies, length - 1, dtype=torch.int64, device=self.device)
        # what pads a shorter document comes after it, where causal attention does not look, and weighs nothing
        weights = torch.zeros(self.copies, length - 1, device=self.device)
        for k, batch in enumerate(batches):
            n = batch.tokens.shape[1]
            tokens[k, 0, :n], targets[k, : n - 1], weights[k, : n - 1] = batch.tokens[0], batch.targets, 1.0 / (n - 1)
        at = torch.arange(length - 1, device=self.device)
        gradients, losses = _vmap(torch.func.grad_and_value(self._loss), (0, 0, None, 0, 0))(
            self._views(self.weights.data), tokens, at, targets, weights
        )
        torch.cat([gradients[name].flatten(1) for name in self._named], dim=1, out=gradient)
        return losses

    def _views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """{parameter: [copies, *its shape]} of [copies, P]."""
        views, start = {}, 0
        for name, parameter in self._named.items():
            views[name] = flat[:, start : start + parameter.numel()].view(-1, *parameter.shape)
            start += parameter.numel()
        return views


class Batch:
    """tokens int64[n, L] on a device, and which of their positions predict which targets int64[k]."""

    def __init__(self, tokens: torch.Tensor, counted: torch.Tensor | None = None) -> None:
        """counted: bool[n, L], the tokens that are targets; None: all but each row's first."""
        if counted is None:
            counted = torch.ones_like(tokens, dtype=torch.bool)
        target = counted.clone()
        target[:, 0] = False
        index = target.flatten().nonzero()[:, 0]
        self.tokens = tokens
        self.at = index - 1
        self.targets = tokens.flatten()[index]


def _vmap(work: Callable[..., Any], dims: tuple[int | None, ...]) -> Callable[..., Any]:
    """torch.func.vmap with attention as products, which it knows by heart; the fused kernels on a CPU it would loop
    over."""

    def run(*arguments: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return torch.func.vmap(work, dims)(*arguments)

    return run


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().float().flatten() for t in tensors])
