"""Hashes and random generators that depend on nothing but their key.

Every random draw and every tie-break in the project comes from here, keyed by (seed, purpose, id or split), so that
no result depends on process, worker count, shard order or Python's `hash()`. No I/O and no Dagster.
"""

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

Key = str | int

# ids that are hashed at once, and bytes of an id up to which it is read as it is
_HASHED = 1 << 15
_WIDE = 512


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
    Each id is mixed eight bytes at a time by two keyed multipliers and finished by a 64-bit avalanche, all ids at once:
    a cryptographic hash a piece would take longer than choosing among them.
    """
    start, *multipliers = (int.from_bytes(digest(seed, purpose, k, size=8), "little") for k in range(3))
    first, second = (np.uint64(m | 1) for m in multipliers)
    texts = ids if isinstance(ids, list) else list(ids)
    hashes = np.empty(len(texts), np.uint64)
    for a in range(0, len(texts), _HASHED):
        raw = [text.encode("utf-8", "surrogatepass") for text in texts[a : a + _HASHED]]
        h = np.uint64(start) ^ np.fromiter(map(len, raw), np.uint64, len(raw))
        # a document as an id is no reason to pad all the others to its length
        raw = [r if len(r) <= _WIDE else digest(r, size=64) for r in raw]
        lengths = np.fromiter(map(len, raw), np.int64, len(raw))
        shortest, width = int(lengths.min()), -(-int(lengths.max()) // 8) * 8
        words = np.frombuffer(b"".join([r.ljust(width, b"\0") for r in raw]), "<u8").reshape(len(raw), -1)
        for k in range(words.shape[1]):
            mixed = (h ^ (words[:, k] * first)) * second
            mixed ^= mixed >> np.uint64(29)
            # padding is no part of an id
            h = mixed if 8 * k < shortest else np.where(8 * k < lengths, mixed, h)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            h = (h ^ (h >> np.uint64(shift))) * np.uint64(factor)
        hashes[a : a + _HASHED] = h ^ (h >> np.uint64(31))
    return hashes


def hash128(ids: Iterable[str]) -> np.ndarray:
    """uint64[n, 2]: an unkeyed 128-bit hash of each id, wide enough to stand for the id itself (2⁻⁶⁴ at 2³² ids)."""
    raw = b"".join(blake2b(i.encode("utf-8", "surrogatepass"), digest_size=16).digest() for i in ids)
    return np.frombuffer(raw, dtype="<u8").reshape(-1, 2).astype(np.uint64, copy=False)


def rng(seed: int, purpose: str, *keys: Key) -> np.random.Generator:
    """A NumPy generator (SFC64, the fastest of NumPy's for long streams) keyed by (seed, purpose, *keys)."""
    words = np.frombuffer(digest(seed, purpose, *keys, size=32), dtype="<u4")
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence([int(w) for w in words])))
