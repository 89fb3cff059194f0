"""What the benchmarks choose from: synthetic vectors like the sentence encoders', and real web pages.

Here: pools, in memory or a block at a time, the same for every run. Not here: what is measured on them.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from dagster_datamask import keyed

MINILM = Path(__file__).parents[1] / "../shared/data/embeddings_minilm_l6_fp16.parquet"
KEEP = 0.1
# what the scores of a block lie in, but for a few
SCORES = (0.0, 15.0)
BLOCK = 10_000
# length of what is added to a unit vector to make another one of it
_NOISE = 0.3


@dataclass(frozen=True, eq=False)
class Documents:
    name: str
    ids: list[str]
    embeddings: np.ndarray
    quality: np.ndarray

    def head(self, n: int) -> "Documents":
        """The first n of them."""
        name = f"{self.name.rsplit(None, 3)[0]} {n:,} × {self.embeddings.shape[1]}"
        return Documents(name, self.ids[:n], self.embeddings[:n], self.quality[:n])


def synthetic_block(number: int, d: int = 768, rows: int = BLOCK) -> Documents:
    """Unit vectors, float32, with mean cosine about 0.7 (over all blocks of this d) and a decaying spectrum, and
    uniform scores that prefer one direction."""
    centre = keyed.rng(0, "benchmark/centre", d).standard_normal(d, dtype=np.float32)
    centre *= 1.55 / np.linalg.norm(centre)
    rng = keyed.rng(0, "benchmark/block", d, number)
    z = rng.standard_normal((rows, d), dtype=np.float32)
    z *= np.arange(1, d + 1, dtype=np.float32) ** np.float32(-0.3)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    quality = rng.uniform(*SCORES, rows) + 10.0 * z[:, 0]
    z += centre
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    return Documents(f"synthetic {rows:,} × {d}", [f"synthetic-{number}-{i}" for i in range(rows)], z, quality)


def synthetic(n: int, d: int = 768, dtype: type[np.floating] = np.float32) -> Documents:
    """The first n documents of the synthetic blocks."""
    z, quality, ids = np.empty((n, d), dtype), np.empty(n), []
    for a in range(0, n, BLOCK):
        block = synthetic_block(a // BLOCK, d, min(BLOCK, n - a))
        z[a : a + BLOCK], quality[a : a + BLOCK] = block.embeddings, block.quality
        ids += block.ids
    return Documents(f"synthetic {n:,} × {d}", ids, z, quality)


def web_pages() -> Documents | None:
    """The shared MiniLM vectors, float16, or None where they are not there."""
    if not MINILM.exists():
        return None
    table = pq.read_table(MINILM)
    ids = table["id"].to_pylist()
    z = table["embedding"].combine_chunks().flatten().to_numpy().reshape(len(ids), -1)
    return Documents(f"web pages {len(ids):,} × {z.shape[1]}", ids, z, np.zeros(len(ids)))


def page_block(pages: Documents, number: int) -> Documents:
    """Copies of the pages, float16, each moved in a direction of its own, with scores like the synthetic ones."""
    rng = keyed.rng(0, "benchmark/pages", number)
    z = pages.embeddings.astype(np.float32)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    z += rng.standard_normal(z.shape, dtype=np.float32) * np.float32(_NOISE / np.sqrt(z.shape[1]))
    quality = rng.uniform(*SCORES, len(z)) + 10.0 * z[:, 0]
    ids = [f"page-{number}-{i}" for i in range(len(z))]
    return Documents(f"page-like {len(z):,} × {z.shape[1]}", ids, z.astype(np.float16), quality)


def page_like(pages: Documents, n: int) -> Documents:
    """n documents like the web pages, float16."""
    return joined([page_block(pages, k) for k in range(-(-n // len(pages.ids)))]).head(n)


def joined(blocks: list[Documents]) -> Documents:
    whole = Documents(
        blocks[0].name,
        [id_ for block in blocks for id_ in block.ids],
        np.concatenate([block.embeddings for block in blocks]),
        np.concatenate([block.quality for block in blocks]),
    )
    return whole.head(len(whole.ids))
