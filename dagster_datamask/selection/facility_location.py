"""Facility location: how well the chosen documents stand for all of them.

Here: FL(U) = (1/N) Σ_x max(0, max_{u∈U} ẑ_x·ẑ_u), its value and marginal gains with their rounding bounded, the
coverage that a growing selection keeps, and the values of a group of masks. Not here: which document to add next
(`greedy`) and what a mask is worth with its other terms (`certificates`).

The kernel holds 1 + ẑ_x·ẑ_y in float32. Entries in [1, 2] are whole multiples of 2⁻²³, and what lies below 1 is a
negative cosine that the clamp removes. So the gains of a `Coverage` are sums of such multiples and exact in float64:
they depend on no order of summation, and never rise as the selection grows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from dagster_datamask.selection.objectives import map_blocks

# float64[k, d]: ẑ of the stored vectors at k positions
Rows = Callable[[np.ndarray], np.ndarray]

_HALF_ULP_32 = 2.0**-24
_HALF_ULP_64 = 2.0**-53
# kernel rows formed together, and the part of them that stays in cache while it is summed
_BAND = 512
_COLUMNS = 4096
# entries of a product that are formed to be searched
_TILE = 1 << 24
# pairs evaluated together in float64, and pairs a document from which on one product takes less time
_PAIRS = 4096
_CROWDED = 8
# documents whose kernel rows tell how much of the kernel can still bring a gain
_SAMPLE = 128
# a list of a row's live entries takes less time than the row itself from this share down, and a pool of this size up
_SPARSE = 0.08
_SMALL = 512
# bytes of a listed entry: a float32 and the int32 column it lies in
_LISTED = 8
# the share of the room for lists that their estimated size may take
_MARGIN = 0.7
# entries of the kernel of a batch that a group of masks is compared on
_GROUPED = 1 << 22


@dataclass(frozen=True, eq=False)
class Cover:
    """How the documents of U cover the pool: value = FL(U) in float64, and error, the most that rounding moved it.

    nearest: float64[N], max(0, max_{u∈U} ẑ_x·ẑ_u) at each position x; members: int64[S], U's positions.
    """

    value: float
    error: float
    nearest: np.ndarray = field(repr=False)
    members: np.ndarray = field(repr=False)


class FacilityLocation:
    """FL over one pool of N unit vectors in canonical order.

    z: float32[N, d], unit rows, C-contiguous; memory_limit: bytes that kernel entries may take. kernel: "dense" keeps
    all N² of them, formed when first used; "blocks" forms rows as products each time; "auto" is dense where that takes
    at most three quarters of the limit, which leaves room for the lists of a `Coverage`.

    Raises ValueError for z of another kind, and for a dense kernel above the limit, with the estimate.
    """

    def __init__(
        self, z: np.ndarray, *, memory_limit: float = 4e9, kernel: Literal["auto", "dense", "blocks"] = "auto"
    ) -> None:
        if z.ndim != 2 or z.dtype != np.float32:
            raise ValueError(f"facility location takes float32 [N, d], not {z.dtype} {list(z.shape)}")
        if kernel not in ("auto", "dense", "blocks"):
            raise ValueError(f"kernel {kernel!r} is none of: auto, dense, blocks")
        size = 4 * z.shape[0] ** 2
        if kernel == "dense" and size > memory_limit:
            raise ValueError(
                f"a dense kernel of {z.shape[0]} documents takes {size / 1e9:.3g} GB and the limit is "
                f"{memory_limit / 1e9:.3g} GB; use kernel 'auto' or raise the limit"
            )
        self.z = z
        self.memory_limit = memory_limit
        self.is_dense = kernel == "dense" or (kernel == "auto" and size <= 0.75 * memory_limit)
        # kernel rows formed so far, each a product of the whole pool with one vector
        self.passes = 0.0
        self._kernel: np.ndarray | None = None

    @property
    def n(self) -> int:
        return self.z.shape[0]

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """float32[k, N]: the kernel's rows at k positions, 1 + ẑ_x·ẑ_y; a copy."""
        if self.is_dense:
            return self._dense()[positions]
        self.passes += positions.size
        chosen = self.z[positions]
        result = np.empty((positions.size, self.n), np.float32)

        def fill(start: int, stop: int) -> None:
            np.matmul(chosen, self.z[start:stop].T, out=result[:, start:stop])

        map_blocks(fill, self.n, block=_COLUMNS)
        result += 1.0
        return result

    def band(self, start: int, stop: int) -> np.ndarray:
        """float32[stop − start, N]: the kernel's rows start..stop, not to be written to."""
        if self._kernel is not None:
            return self._kernel[start:stop]
        result = self.z[start:stop] @ self.z.T
        result += 1.0
        return result

    def sums(self, positions: np.ndarray, cover: np.ndarray) -> np.ndarray:
        """float64[k]: Σ_y max(K_xy, cover_y) over each of k kernel rows x; cover: float32[N], ≥ 1."""
        n = self.n
        if self.is_dense:
            kernel = self._dense()

            def whole(start: int, stop: int) -> np.ndarray:
                highest, wide, total = np.empty(n, np.float32), np.empty(n), np.empty(stop - start)
                for k in range(start, stop):
                    np.maximum(kernel[positions[k]], cover, out=highest)
                    # a sum of float32 into float64 converts in small buffers and takes longer
                    wide[:] = highest
                    total[k - start] = wide.sum()
                return total

            parts = map_blocks(whole, positions.size, block=16)
            return np.concatenate(parts) if parts else np.zeros(0)
        totals = np.zeros(positions.size)
        for a in range(0, positions.size, _BAND):
            chosen = self.z[positions[a : a + _BAND]]
            for part in map_blocks(
                lambda c, e, chosen=chosen: _tile_sums(chosen, self.z[c:e], cover[c:e]), n, _COLUMNS
            ):
                totals[a : a + _BAND] += part
        self.passes += positions.size
        return totals

    def cover(self, positions: np.ndarray, rows64: Rows) -> Cover:
        """FL of U and every document's nearest member, in float64 from the stored vectors.

        positions: int64[S]; rows64: ẑ in float64 at given positions. The float32 product only tells which members can
        be the nearest: those within twice its largest rounding error of the best. N·S·d operations in float32.
        """
        n, size = self.n, positions.size
        if not size or not n:
            return Cover(0.0, 0.0, np.zeros(n), positions)
        chosen = self.z[positions]
        error = product_error(self.z.shape[1])

        def search(start: int, stop: int) -> np.ndarray:
            found = self.z[start:stop] @ chosen.T
            best = found.max(axis=1)
            # below this all cosines are negative
            live = found >= np.maximum(best - 2.0 * error, -error)[:, None]
            x, u = np.nonzero(live)
            nearest = np.zeros(stop - start)
            if x.size > _CROWDED * (stop - start):
                columns = np.flatnonzero(live.any(axis=0))
                own = rows64(np.arange(start, stop))
                for a in range(0, columns.size, _PAIRS):
                    dots = own @ rows64(positions[columns[a : a + _PAIRS]]).T
                    np.maximum(nearest, dots.max(axis=1), out=nearest)
                return nearest
            for a in range(0, x.size, _PAIRS):
                near, far = x[a : a + _PAIRS], u[a : a + _PAIRS]
                dots = np.einsum("ij,ij->i", rows64(start + near), rows64(positions[far]))
                np.maximum.at(nearest, near, dots)
            return nearest

        parts = map_blocks(search, n, block=int(np.clip(_TILE // size, 16, 2048)))
        self.passes += size
        nearest = np.concatenate(parts)
        return Cover(math.fsum(nearest) / n, _gamma(3 * self.z.shape[1] + 16, _HALF_ULP_64), nearest, positions)

    def gains(self, cover: Cover) -> np.ndarray:
        """float64[N]: FL(U ∪ x) − FL(U) or more, for every x; exactly 0 for U's members.

        N²·d operations in float32, every product raised by its largest rounding error (`product_error`).
        """
        n = self.n
        # 1 + cosine is rounded once more, and so is the float32 made of the threshold
        slack = product_error(self.z.shape[1]) + cover.error + 2.0**-23
        threshold = np.nextafter((1.0 + cover.nearest - slack).astype(np.float32), np.float32(0.0))

        def total(start: int, stop: int) -> np.ndarray:
            sums, band = np.zeros(stop - start), self.z[start:stop]
            kernel = self._dense()[start:stop] if self.is_dense else None
            for a in range(0, n, _COLUMNS):
                tile = kernel[:, a : a + _COLUMNS] if kernel is not None else band @ self.z[a : a + _COLUMNS].T + 1.0
                over = tile - threshold[a : a + _COLUMNS]
                np.maximum(over, 0.0, out=over)
                sums += over.sum(axis=1, dtype=np.float64)
            return sums

        if self.is_dense:
            self._dense()
        else:
            self.passes += n
        parts = map_blocks(total, n, block=_BAND)
        # the differences are rounded to float32, their sums to float64
        gains = np.concatenate(parts) * ((1.0 + 2.0**-22) / n) if parts else np.zeros(0)
        gains[cover.members] = 0.0
        return gains

    def _dense(self) -> np.ndarray:
        if self._kernel is None:
            kernel = np.empty((self.n, self.n), np.float32)

            def fill(start: int, stop: int) -> None:
                np.matmul(self.z[start:stop], self.z.T, out=kernel[start:stop])
                kernel[start:stop] += 1.0

            map_blocks(fill, self.n, block=_BAND)
            self.passes += self.n
            self._kernel = kernel
        return self._kernel


class Coverage:
    """What a growing selection covers, and what each document would add to it.

    Early on gains are read off whole kernel rows. An entry K_xy can bring a gain only while it exceeds y's cover, which
    never falls; once few entries are left they are listed row by row, and lists shrink as they are read. With a dense
    kernel gains are the same either way; without one an entry that is formed twice may differ in its last bit.
    """

    def __init__(self, facility: FacilityLocation) -> None:
        n = facility.n
        self._facility = facility
        self._cover = np.ones(n, np.float32)
        self._size = 0
        self._lists: list[tuple[np.ndarray, np.ndarray]] | None = None
        self._sample = np.zeros((0, n), np.float32)
        self._room = _MARGIN * (facility.memory_limit - (4.0 * n * n if facility.is_dense else 0.0))

    def gains(self, positions: np.ndarray) -> np.ndarray:
        """float64[k]: FL(U ∪ x) − FL(U) for the documents x at these positions, U being what was added so far."""
        n = self._facility.n
        if self._lists is None:
            return (self._facility.sums(positions, self._cover) - self._cover.sum(dtype=np.float64)) / n
        gains = np.empty(positions.size)
        for k, x in enumerate(positions.tolist()):
            columns, entries = self._lists[x]
            over = entries - self._cover[columns]
            live = over > 0
            over = over[live]
            gains[k] = over.sum(dtype=np.float64)
            if 4 * over.size < 3 * columns.size:
                # in place, so that what has shrunk takes no more memory
                columns, entries = columns[: over.size], entries[: over.size]
                columns[:], entries[:] = self._lists[x][0][live], self._lists[x][1][live]
                self._lists[x] = columns, entries
        return gains / n

    def add(self, position: int) -> None:
        """Add the document at this position to U."""
        self._size += 1
        if self._lists is not None:
            columns, entries = self._lists[position]
            self._cover[columns] = np.maximum(self._cover[columns], entries)
            return
        np.maximum(self._cover, self._facility.rows(np.array([position]))[0], out=self._cover)
        # the share of live entries falls like 1/|U|
        if self._facility.n >= _SMALL and (self._size < 64 or not self._size % 16):
            self._list_live()

    def _list_live(self) -> None:
        facility, n = self._facility, self._facility.n
        if not self._sample.size:
            self._sample = facility.rows(np.linspace(0, n - 1, _SAMPLE).astype(np.int64))
        share = np.count_nonzero(self._sample > self._cover) / self._sample.size
        if share > _SPARSE or share * n * n * _LISTED > self._room:
            return

        def collect(start: int, stop: int) -> list[tuple[np.ndarray, np.ndarray]]:
            band = facility.band(start, stop)
            live = band > self._cover
            entries, columns = band[live], np.nonzero(live)[1].astype(np.int32)
            ends = np.cumsum(np.count_nonzero(live, axis=1))[:-1]
            return list(zip(np.split(columns, ends), np.split(entries, ends), strict=True))

        parts = map_blocks(collect, n, block=int(np.clip(_TILE // n, 16, _BAND)))
        facility.passes += 0 if facility.is_dense else n
        self._lists = [row for part in parts for row in part]
        self._sample = self._sample[:0]


def group_values(xp: Any, mask: Any, rows: Any, size: int) -> Any:
    """[G]: FL of each mask over its batch, the batch being its own ground set.

    xp: numpy or torch; mask: float [G, B] of 0 and 1, `size` ones in each row; rows: float [B, d], unit rows. The
    batch's kernel is formed once, in strips of columns, and a mask's maximum is taken over the rows it holds; nothing
    waits for the device.
    """
    group, batch = mask.shape
    total = xp.zeros_like(mask[:, 0])
    if not size:
        return total
    held = xp.argsort(-mask, 1)[:, :size]
    strip = max(1, _GROUPED // batch)
    for a in range(0, batch, strip):
        kernel = rows @ rows[a : a + strip].T
        for j in range(group):
            total[j] += xp.clip(xp.amax(kernel[held[j]], 0), 0.0, None).sum()
    return total / batch


def product_error(d: int) -> float:
    """The most by which a float32 product of two rows of z can differ from ẑ_x·ẑ_y.

    γ_k = k·u/(1 − k·u): each row is scaled and rounded to float32, then d products are summed in any order; products
    below the smallest normal number are flushed.
    """
    return _gamma(d + 12, _HALF_ULP_32) + d * 2.0**-120


def _tile_sums(chosen: np.ndarray, columns: np.ndarray, cover: np.ndarray) -> np.ndarray:
    tile = chosen @ columns.T
    tile += 1.0
    np.maximum(tile, cover, out=tile)
    return tile.sum(axis=1, dtype=np.float64)


def _gamma(k: int, half_ulp: float) -> float:
    return k * half_ulp / (1.0 - k * half_ulp)
