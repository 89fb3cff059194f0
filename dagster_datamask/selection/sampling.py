"""Top-S and Gumbel top-S: exact sizes, and ties that fall to the lower position.

Here: taking the S best of a score, and the noise that turns a top-S into a draw from the Plackett–Luce distribution
of the logits, in NumPy on the CPU and in torch on a CUDA device. Not here: what the drawn masks are used for
(`policy_gradient`).
"""

from typing import Any, Protocol

import numpy as np

from dagster_datamask import keyed
from dagster_datamask.accelerator import Accelerator


def top_s(scores: np.ndarray, size: int) -> np.ndarray:
    """int64[size], ascending: the positions of the `size` largest scores, ties to the lower position.

    scores: [N] without NaN; O(N). Raises ValueError where size is not in 0..N.
    """
    n = scores.size
    if not 0 <= size <= n:
        raise ValueError(f"cannot take the {size} best of {n}")
    if size in (0, n):
        return np.arange(size)
    threshold = np.partition(scores, n - size)[n - size]
    above = np.flatnonzero(scores > threshold)
    tied = np.flatnonzero(scores == threshold)[: size - above.size]
    chosen = np.concatenate([above, tied])
    chosen.sort()
    return chosen


def ranks(scores: np.ndarray) -> np.ndarray:
    """int64[N]: 1 for the largest score, ties to the lower position."""
    rank = np.empty(scores.size, np.int64)
    rank[np.argsort(-scores, kind="stable")] = np.arange(1, scores.size + 1)
    return rank


class Draws(Protocol):
    """The random part of a policy-gradient step on one device. Arrays are NumPy's on the CPU, torch's elsewhere."""

    xp: Any
    """The array module, numpy or torch: the steps use only what the two spell alike."""

    def put(self, array: np.ndarray) -> Any:
        """The array as float32 on the device."""

    def fetch(self, array: Any) -> np.ndarray:
        """The array back in host memory; waits for the device."""

    def double(self, array: Any) -> Any:
        """The array as float64."""

    def single(self, array: Any) -> Any:
        """The array as float32."""

    def batch(self, n: int, size: int) -> Any:
        """int64[size], ascending: `size` of n positions, uniformly and without replacement."""

    def gumbel(self, logits: Any, group: int) -> Any:
        """float32[group, B]: logits plus Gumbel(0, 1) noise; the S largest of a row, largest first, are S draws
        without replacement from softmax(logits) in draw order (DataMask, Eq. 7)."""

    def mask(self, keys: Any, size: int) -> Any:
        """float32[group, B] of 0 and 1: the `size` largest keys of each row, exactly `size` of them."""

    def order(self, keys: Any, size: int) -> Any:
        """int64[group, size]: the positions of the `size` largest keys of each row, largest first."""


class CpuDraws:
    """Draws on the CPU. The exponentials come from NumPy's ziggurat: torch's generator takes longer than the rest
    of a step."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.xp = np
        self._generator = generator

    def put(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(array, np.float32)

    def fetch(self, array: np.ndarray) -> np.ndarray:
        return array

    def double(self, array: np.ndarray) -> np.ndarray:
        return array.astype(np.float64)

    def single(self, array: np.ndarray) -> np.ndarray:
        return array.astype(np.float32)

    def batch(self, n: int, size: int) -> np.ndarray:
        return np.sort(self._generator.choice(n, size, replace=False, shuffle=False))

    def gumbel(self, logits: np.ndarray, group: int) -> np.ndarray:
        noise = self._generator.standard_exponential((group, logits.size), dtype=np.float32)
        # the ziggurat can return 0, and an infinite key would hide the logit
        np.maximum(noise, np.float32(1e-30), out=noise)
        np.log(noise, out=noise)
        return np.subtract(logits, noise, out=noise)

    def mask(self, keys: np.ndarray, size: int) -> np.ndarray:
        columns = keys.shape[1]
        threshold = np.partition(keys, columns - size, axis=1)[:, columns - size, None]
        mask = (keys >= threshold).astype(np.float32)
        # float32 keys collide now and then
        for row in np.flatnonzero(mask.sum(axis=1) != size):
            mask[row] = 0.0
            mask[row, top_s(keys[row], size)] = 1.0
        return mask

    def order(self, keys: np.ndarray, size: int) -> np.ndarray:
        return np.argsort(-keys, axis=1, kind="stable")[:, :size]


class TorchDraws:
    """Draws on a torch device, from a generator seeded by the same key. Nothing here waits for the device but
    `fetch`."""

    def __init__(self, device: str, seed: int) -> None:
        import torch

        self.xp = torch
        self._device = device
        self._generator = torch.Generator(device=device)
        self._generator.manual_seed(seed)

    def put(self, array: np.ndarray) -> Any:
        return self.xp.from_numpy(np.ascontiguousarray(array, np.float32)).to(self._device)

    def fetch(self, array: Any) -> np.ndarray:
        return array.cpu().numpy()

    def double(self, array: Any) -> Any:
        return array.double()

    def single(self, array: Any) -> Any:
        return array.float()

    def batch(self, n: int, size: int) -> Any:
        shuffled = self.xp.randperm(n, generator=self._generator, device=self._device)
        return self.xp.sort(shuffled[:size]).values

    def gumbel(self, logits: Any, group: int) -> Any:
        noise = self.xp.empty((group, logits.shape[0]), dtype=self.xp.float32, device=self._device)
        noise.exponential_(generator=self._generator)
        return logits - noise.clamp_(min=1e-30).log_()

    def mask(self, keys: Any, size: int) -> Any:
        chosen = self.xp.topk(keys, size, dim=1, sorted=False).indices
        return self.xp.zeros_like(keys).scatter_(1, chosen, 1.0)

    def order(self, keys: Any, size: int) -> Any:
        return self.xp.topk(keys, size, dim=1).indices


def draws(accelerator: Accelerator, seed: int, purpose: str, *keys: keyed.Key) -> Draws:
    """The draws of one solve on the accelerator's device, keyed by (seed, purpose, *keys)."""
    generator = keyed.rng(seed, purpose, *keys)
    if not accelerator.is_cuda:
        return CpuDraws(generator)
    return TorchDraws(accelerator.device, int(generator.integers(2**63)))
