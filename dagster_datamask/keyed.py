"""Hashes and random generators that depend on nothing but their key.

Every random draw and every tie-break in the project comes from here, keyed by (seed, purpose, id or split), so that
no result depends on process, worker count, shard order or Python's `hash()`. No I/O and no Dagster.
"""

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

Key = str | int


def digest(*parts: Key | bytes, size: int = 16) -> bytes:
    """`size` bytes of BLAKE2b over the parts, each length-prefixed so that ("a", "bc") and ("ab", "c") differ."""
    hasher = blake2b(digest_size=size)
    for part in parts:
        raw = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
        hasher.update(len(raw).to_bytes(8, "little"))
        hasher.update(raw)
    return hasher.digest()


def hash64(ids: Iterable[str], seed: int, purpose: str) -> np.ndarray:
    """uint64[n]: a stable hash of each id under the key (seed, purpose).

    Used for ties (purpose "tie"), splits ("split") and samples ("sample"): one key never reveals another's order.
    """
    key = digest(seed, purpose, size=32)
    raw = b"".join(blake2b(i.encode("utf-8", "surrogatepass"), digest_size=8, key=key).digest() for i in ids)
    return np.frombuffer(raw, dtype="<u8").astype(np.uint64, copy=False)


def hash128(ids: Iterable[str]) -> np.ndarray:
    """uint64[n, 2]: an unkeyed 128-bit hash of each id, wide enough to stand for the id itself (2⁻⁶⁴ at 2³² ids)."""
    raw = b"".join(blake2b(i.encode("utf-8", "surrogatepass"), digest_size=16).digest() for i in ids)
    return np.frombuffer(raw, dtype="<u8").reshape(-1, 2).astype(np.uint64, copy=False)


def rng(seed: int, purpose: str, *keys: Key) -> np.random.Generator:
    """A NumPy generator (SFC64, the fastest of NumPy's for long streams) keyed by (seed, purpose, *keys)."""
    words = np.frombuffer(digest(seed, purpose, *keys, size=32), dtype="<u4")
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence([int(w) for w in words])))
