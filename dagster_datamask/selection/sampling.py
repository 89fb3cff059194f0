"""Top-S and Gumbel top-S: exact sizes, and ties that fall to the lower position.

Here: taking the S best of a score, and the noise that turns a top-S into a draw from the Plackett–Luce distribution
of the logits, in NumPy on the CPU and in torch on a CUDA device. Not here: what the drawn masks are used for
(`policy_gradient`).
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from dagster_datamask import keyed
from dagster_datamask.accelerator import Accelerator
from dagster_datamask.selection.objectives import map_blocks
from dagster_datamask.selection.vectors import Vectors, as_single

# masks that are drawn and summed together
_BAND = 32
# rows that are gathered in one go
_GATHERED = 2048
# rows that are multiplied with the masks while they are in cache, and parts that a batch's sums are made of
_MULTIPLIED = 2048
_PARTS = 16
_LEAST = float(np.finfo(np.float32).tiny)


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

    @property
    def xp(self) -> Any:
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

    def gumbel(self, logits: Any) -> Any:
        """float32[group, B]: logits plus Gumbel(0, 1) noise; the S largest of a row, largest first, are S draws
        without replacement from softmax(logits) in draw order (DataMask, Eq. 7)."""

    def mask(self, keys: Any, size: int) -> Any:
        """float32[group, B] of 0 and 1: the `size` largest keys of each row, exactly `size` of them."""

    def order(self, keys: Any, size: int) -> Any:
        """int64[group, size]: the positions of the `size` largest keys of each row, largest first."""

    def sums(self, mask: Any, rows: Any, batch: Any, weighted: bool) -> Any:
        """float32[group, d]: the sum of each mask's unit rows of the batch; a mask is of 0 and 1, or weighted by
        tokens."""

    def filled(self, keys: Any, costs: Any, amount: float) -> Any:
        """float32[group, B] of 0 and 1: of each row's keys, largest first, those whose costs add up to `amount` at
        most, and the first in any case."""

    def index(self, columns: np.ndarray) -> Any:
        """Columns as an index on the device."""

    def rows(self, vectors: Vectors, order: np.ndarray) -> "Rows":
        """The pool's unit rows, to be asked for by canonical position; `order` gives the rows."""

    def banded(self, mask: Any, values: Callable[[Any, Any], Any]) -> Any:
        """float32[group]: values(xp, masks) of some masks at a time."""

    def close(self) -> None:
        """Release the threads."""


Rows = Callable[[Any], Any]


class HostRows:
    """Unit rows by canonical position, read where they are stored."""

    def __init__(self, vectors: Vectors, order: np.ndarray) -> None:
        self.vectors, self._order = vectors, order

    def __call__(self, batch: np.ndarray | slice) -> np.ndarray:
        """float32[B, d]."""
        parts = map_blocks(lambda a, b: self.vectors.unit(self.at(batch)[a:b]), self.at(batch).size, _GATHERED)
        return np.concatenate(parts) if parts else np.zeros((0, self.vectors.d), np.float32)

    def at(self, batch: np.ndarray | slice) -> np.ndarray:
        """int64[B]: where the batch is stored."""
        return self._order[batch]


class CpuDraws:
    """Draws on the CPU. The exponentials come from NumPy's ziggurat: torch's generator takes longer than the rest
    of a step.

    A group is worked on in fixed bands of masks, each with a generator of its own, on all cores: the draws and the
    order of every sum are the same on any number of them.
    """

    def __init__(self, generator: np.random.Generator, group: int) -> None:
        self._bands = [slice(a, min(a + _BAND, group)) for a in range(0, group, _BAND)]
        self._generator, *self._noise = generator.spawn(1 + len(self._bands))
        self._threads = ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), len(self._bands)))

    @property
    def xp(self) -> Any:
        return np

    def close(self) -> None:
        self._threads.shutdown()

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

    def gumbel(self, logits: np.ndarray) -> np.ndarray:
        keys = np.empty((self._bands[-1].stop, logits.size), np.float32)

        def fill(k: int) -> None:
            noise = keys[self._bands[k]]
            self._noise[k].standard_exponential(dtype=np.float32, out=noise)
            # the ziggurat can return 0, and an infinite key would hide the logit
            np.maximum(noise, _LEAST, out=noise)
            np.log(noise, out=noise)
            np.subtract(logits, noise, out=noise)

        self._run(fill, keys.size)
        return keys

    def mask(self, keys: np.ndarray, size: int) -> np.ndarray:
        mask = np.empty_like(keys)
        cut = keys.shape[1] - size

        def fill(k: int) -> None:
            band, filled = keys[self._bands[k]], mask[self._bands[k]]
            np.greater_equal(band, np.partition(band, cut, axis=1)[:, cut, None], out=filled)
            # float32 keys collide now and then
            for row in np.flatnonzero(filled.sum(axis=1) != size):
                filled[row] = 0.0
                filled[row, top_s(band[row], size)] = 1.0

        self._run(fill, keys.size)
        return mask

    def order(self, keys: np.ndarray, size: int) -> np.ndarray:
        return np.argsort(-keys, axis=1, kind="stable")[:, :size]

    def sums(self, mask: np.ndarray, rows: HostRows, batch: np.ndarray | slice, weighted: bool) -> np.ndarray:
        at, vectors = rows.at(batch), rows.vectors
        inverse = vectors.inverse[at].astype(np.float32)

        def part(start: int, stop: int) -> np.ndarray:
            # rows are multiplied while they are in cache, and their lengths taken out of the masks instead
            total = np.zeros((mask.shape[0], vectors.d), np.float32)
            for a in range(start, stop, _MULTIPLIED):
                b = min(a + _MULTIPLIED, stop)
                total += (mask[:, a:b] * inverse[a:b]) @ as_single(vectors.stored[at[a:b]])
            return total

        # as many parts whatever the number of cores, so that their sum has the same bits
        sums = np.zeros((mask.shape[0], vectors.d), np.float32)
        for one in map_blocks(part, at.size, max(_MULTIPLIED, -(-at.size // _PARTS))):
            sums += one
        return sums

    def filled(self, keys: np.ndarray, costs: np.ndarray, amount: float) -> np.ndarray:
        return _filled(np, keys, costs, amount, np.argsort(-keys, axis=1, kind="stable"))

    def index(self, columns: np.ndarray) -> np.ndarray:
        return columns

    def rows(self, vectors: Vectors, order: np.ndarray) -> HostRows:
        return HostRows(vectors, order)

    def banded(self, mask: np.ndarray, values: Callable[[Any, Any], np.ndarray]) -> np.ndarray:
        result = np.empty(mask.shape[0], np.float32)

        def fill(k: int) -> None:
            result[self._bands[k]] = values(np, mask[self._bands[k]])

        self._run(fill, mask.size)
        return result

    def _run(self, work: Callable[[int], None], size: int) -> None:
        bands = range(len(self._bands))
        # less than this is done before another thread has woken up
        if size < 1 << 16:
            for k in bands:
                work(k)
        else:
            list(self._threads.map(work, bands))


class TorchDraws:
    """Draws on a torch device, from a generator seeded by the same key. Nothing here waits for the device but
    `fetch`."""

    def __init__(self, accelerator: Accelerator, seed: int, group: int) -> None:
        import torch

        self._torch = torch
        self._accelerator = accelerator
        self._device = accelerator.device
        self._group = group
        self._generator = torch.Generator(device=self._device)
        self._generator.manual_seed(seed)

    @property
    def xp(self) -> Any:
        return self._torch

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

    def gumbel(self, logits: Any) -> Any:
        noise = self.xp.empty((self._group, logits.shape[0]), dtype=self.xp.float32, device=self._device)
        noise.exponential_(generator=self._generator)
        return logits - noise.clamp_(min=_LEAST).log_()

    def mask(self, keys: Any, size: int) -> Any:
        chosen = self.xp.topk(keys, size, dim=1, sorted=False).indices
        return self.xp.zeros_like(keys).scatter_(1, chosen, 1.0)

    def order(self, keys: Any, size: int) -> Any:
        return self.xp.topk(keys, size, dim=1).indices

    def sums(self, mask: Any, rows: Rows, batch: Any, weighted: bool) -> Any:
        vectors = rows(batch)
        if mask.is_cuda and not weighted:
            return self.xp.mm(mask.half(), vectors, out_dtype=self.xp.float32)
        return mask @ vectors.float()

    def filled(self, keys: Any, costs: Any, amount: float) -> Any:
        return _filled(self.xp, keys, costs, amount, self.xp.argsort(-keys, dim=1))

    def index(self, columns: np.ndarray) -> Any:
        return self.xp.from_numpy(columns).to(self._device)

    def rows(self, vectors: Vectors, order: np.ndarray) -> Rows:
        self._accelerator.plan(
            f"a pool of {vectors.n:,} documents on {self._device}", 2 * vectors.n * vectors.d, "take smaller splits"
        )
        # half precision in memory, sums in single: a unit row's entries lose 5e-4 of themselves, in the search alone
        held = self.xp.empty((vectors.n, vectors.d), dtype=self.xp.float16, device=self._device)
        for a in range(0, vectors.n, _GATHERED):
            held[a : a + _GATHERED] = self.xp.from_numpy(vectors.unit(order[a : a + _GATHERED])).to(self._device)
        return lambda batch: held[batch]

    def banded(self, mask: Any, values: Callable[[Any, Any], Any]) -> Any:
        return values(self.xp, mask)

    def close(self) -> None:
        """Nothing to release: the device's memory goes with the arrays."""


def _filled(xp: Any, keys: Any, costs: Any, amount: float, order: Any) -> Any:
    spent = xp.cumsum(costs[order], 1)
    taken = spent <= amount
    taken[:, 0] = True
    mask = xp.zeros_like(keys)
    rows = xp.cumsum(xp.ones_like(order), 0) - 1
    mask[rows, order] = xp.asarray(taken, dtype=keys.dtype)
    return mask


def draws(accelerator: Accelerator, group: int, seed: int, purpose: str, *keys: keyed.Key) -> Draws:
    """The draws of one solve with groups of `group` masks, on the accelerator's device, keyed by (seed, purpose,
    *keys)."""
    generator = keyed.rng(seed, purpose, *keys)
    if not accelerator.is_cuda:
        return CpuDraws(generator, group)
    return TorchDraws(accelerator, int(generator.integers(2**63)), group)
