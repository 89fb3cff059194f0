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
from typing import Any, Literal, NamedTuple

import numpy as np

from dagster_datamask.selection.exact import HALF_ULP_32, HALF_ULP_64, gamma
from dagster_datamask.selection.objectives import map_blocks

# float64[k, d]: ẑ of the stored vectors at k positions
Rows = Callable[[np.ndarray], np.ndarray]

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
# listed live entries take less time than whole rows from this share of the kernel down, and a pool of this size up
_SPARSE = 0.02
_SMALL = 512
# bytes of a listed entry: a float32 and an int32, by row, by column, and once more while the lists are made
_LISTED = 24
# the share of the room that kept rows, or else lists by their estimated size, may take
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
        # the last column makes every product 1 + cosine
        self._rows = np.hstack([z, np.ones((z.shape[0], 1), np.float32)])
        self.z = self._rows[:, :-1]
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
        chosen = self._rows[positions]
        parts = map_blocks(lambda a, b: chosen @ self._rows[a:b].T, self.n, block=_COLUMNS)
        return np.concatenate(parts, axis=1)

    def band(self, start: int, stop: int) -> np.ndarray:
        """float32[stop − start, N]: the kernel's rows start..stop, not to be written to."""
        if self._kernel is not None:
            return self._kernel[start:stop]
        return self._rows[start:stop] @ self._rows.T

    def sums(self, positions: np.ndarray, cover: np.ndarray) -> np.ndarray:
        """float64[k]: Σ_y max(K_xy, cover_y) over each of k kernel rows x; cover: float32[N], ≥ 1."""
        n = self.n
        if self.is_dense:
            return row_sums(self._dense(), positions, cover)
        totals = np.zeros(positions.size)
        for a in range(0, positions.size, _BAND):
            chosen = self._rows[positions[a : a + _BAND]]

            def tile(start: int, stop: int, chosen: np.ndarray = chosen) -> np.ndarray:
                entries = chosen @ self._rows[start:stop].T
                np.maximum(entries, cover[start:stop], out=entries)
                return entries.sum(axis=1, dtype=np.float64)

            for part in map_blocks(tile, n, block=_COLUMNS):
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
        return Cover(math.fsum(nearest) / n, gamma(3 * self.z.shape[1] + 16, HALF_ULP_64), nearest, positions)

    def gains(self, cover: Cover) -> np.ndarray:
        """float64[N]: FL(U ∪ x) − FL(U) or more, for every x; exactly 0 for U's members.

        N²·d operations in float32, every product raised by its largest rounding error (`product_error`).
        """
        n, d = self.n, self.z.shape[1]
        kernel = self._dense() if self.is_dense else None
        # with the 1 of the kernel in them partial sums reach 2
        slack = product_error(d) if kernel is None else 2.0 * product_error(d + 1)
        lowest = cover.nearest - cover.error - slack + (0.0 if kernel is None else 1.0)
        threshold = np.nextafter(lowest.astype(np.float32), np.float32(-np.inf))

        def total(start: int, stop: int) -> np.ndarray:
            sums = np.zeros(stop - start)
            for a in range(0, n, _COLUMNS):
                b = min(a + _COLUMNS, n)
                tile = self.z[start:stop] @ self.z[a:b].T if kernel is None else kernel[start:stop, a:b]
                over = tile - threshold[a:b]
                np.maximum(over, 0.0, out=over)
                sums += over.sum(axis=1, dtype=np.float64)
            return sums

        if kernel is None:
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
                np.matmul(self._rows[start:stop], self._rows[start:].T, out=kernel[start:stop, start:])
                for a in range(stop, self.n, _BAND):
                    kernel[a : a + _BAND, start:stop] = kernel[start:stop, a : a + _BAND].T

            map_blocks(fill, self.n, block=_BAND)
            self.passes += self.n / 2
            self._kernel = kernel
        return self._kernel


class _Lists(NamedTuple):
    """Entries of the kernel and the documents they are shared with, a list for each of some documents: those of the
    k-th lie from starts[k] on, lengths[k] of them."""

    others: np.ndarray
    entries: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


class Coverage:
    """What a growing selection covers, and what each document would add to it.

    Early on gains are sums over whole kernel rows. An entry K_xy can bring x a gain only while it exceeds y's cover,
    which never falls. Once few such entries are left they are listed, and from then on `current` holds every gain:
    adding u changes the cover of the y in u's row, and for each of those the gains of the x in y's column.

    With a dense kernel gains are the same whether listed or not. Without one rows are kept as they are asked for, while
    there is room, and an entry that is formed twice may differ in its last bit. current: float64[N] once there are
    lists, or None.
    """

    def __init__(self, facility: FacilityLocation) -> None:
        n = facility.n
        self.current: np.ndarray | None = None
        self._facility = facility
        self._cover = np.ones(n, np.float32)
        self._size = 0
        self._sample = np.zeros((0, n), np.float32)
        self._room = _MARGIN * (facility.memory_limit - (4.0 * n * n if facility.is_dense else 0.0))
        # rows kept until there are lists, and each document's among them
        kept = 0 if facility.is_dense else min(n, int(self._room / max(1, 4 * n)))
        self._kept = np.empty((kept, n), np.float32)
        self._filled = 0
        self._place = np.full(n, -1)

    def gains(self, positions: np.ndarray) -> np.ndarray:
        """float64[k]: FL(U ∪ x) − FL(U) for the documents x at these positions, U being what was added so far."""
        if self.current is not None:
            return self.current[positions]
        # all of them would take the room of those that are asked for again
        if positions.size <= len(self._kept):
            self._keep(positions[self._place[positions] < 0])
        at = self._place[positions]
        sums = np.empty(positions.size)
        sums[at >= 0] = row_sums(self._kept, at[at >= 0], self._cover)
        sums[at < 0] = self._facility.sums(positions[at < 0], self._cover)
        return (sums - self._cover.sum(dtype=np.float64)) / max(1, self._facility.n)

    def _keep(self, positions: np.ndarray) -> None:
        positions = positions[: len(self._kept) - self._filled]
        for a in range(0, positions.size, _BAND):
            some = positions[a : a + _BAND]
            self._kept[self._filled : self._filled + some.size] = self._facility.rows(some)
            self._place[some] = np.arange(self._filled, self._filled + some.size)
            self._filled += some.size

    def add(self, position: int) -> None:
        """Add the document at this position to U."""
        self._size += 1
        if self.current is not None:
            self._add_listed(position)
            return
        at = self._place[position]
        row = self._kept[at] if at >= 0 else self._facility.rows(np.array([position]))[0]
        np.maximum(self._cover, row, out=self._cover)
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
        # their room is the lists' from here on
        self._sample = self._kept = np.zeros((0, n), np.float32)

        def collect(start: int, stop: int) -> tuple[_Lists, _Lists | None]:
            band = facility.band(start, stop)
            by_row = None if facility.is_dense else _listed(band, band > self._cover)
            return _listed(band, band > self._cover[start:stop, None]), by_row

        parts = map_blocks(collect, n, block=int(np.clip(_TILE // n, 16, _BAND)))
        self._by_column = _joined([column for column, _ in parts])
        if not facility.is_dense:
            self._by_row = _joined([row for _, row in parts if row is not None])
            facility.passes += n
        # over the very entries that will change it, formed once
        self._sums = np.zeros(n)
        for a in range(0, n, _BAND):
            lengths = self._by_column.lengths[a : a + _BAND]
            part = slice(self._by_column.starts[a], self._by_column.starts[a] + lengths.sum())
            over = self._by_column.entries[part] - np.repeat(self._cover[a : a + _BAND], lengths)
            self._sums += np.bincount(self._by_column.others[part], over, n)
        self.current = self._sums / n

    def _add_listed(self, position: int) -> None:
        if self._facility.is_dense:
            entries = self._facility.band(position, position + 1)[0]
            raised = np.flatnonzero(entries > self._cover)
            new = entries[raised]
        else:
            row = slice(self._by_row.starts[position], self._by_row.starts[position] + self._by_row.lengths[position])
            raised, new = self._by_row.others[row], self._by_row.entries[row]
            higher = new > self._cover[raised]
            raised, new = raised[higher], new[higher]
        lists = self._by_column
        starts, lengths = lists.starts[raised], lists.lengths[raised]
        at = _ranges(starts, lengths)
        x, entries = lists.others[at], lists.entries[at]
        old, new_at = np.repeat(self._cover[raised], lengths), np.repeat(new, lengths)
        self._sums -= np.bincount(x, np.minimum(entries, new_at) - old, self._sums.size)
        self._cover[raised] = new
        np.divide(self._sums, self._sums.size, out=self.current)
        # entries that the cover has reached are dropped, in place
        live = entries > new_at
        ends = np.concatenate([[0], np.cumsum(lengths)])
        kept = np.diff(np.concatenate([[0], np.cumsum(live)])[ends])
        lists.lengths[raised] = kept
        at = _ranges(starts, kept)
        lists.others[at], lists.entries[at] = x[live], entries[live]


def group_values(xp: Any, mask: Any, rows: Any, size: int) -> Any:
    """[G]: FL of each mask over its batch, the batch being its own ground set.

    xp: numpy or torch; mask: float [G, B] of 0 and 1, at most `size` ones in each row; rows: float [B, d], unit rows.
    The batch's kernel is formed once, in strips of columns, and a mask's maximum is taken over the rows it holds;
    nothing waits for the device.
    """
    group, batch = mask.shape
    total = xp.zeros_like(mask.sum(1))
    if not size:
        return total
    held = xp.argsort(-mask, 1)[:, :size]
    # a mask of fewer holds its first document several times, and an empty one none
    ones = mask.sum(1)[:, None]
    held = xp.where(xp.cumsum(xp.ones_like(held), 1) <= ones, held, held[:, :1])
    strip = max(1, _GROUPED // batch)
    for a in range(0, batch, strip):
        kernel = rows @ rows[a : a + strip].T
        for j in range(group):
            total[j] += xp.clip(xp.amax(kernel[held[j]], 0), 0.0, None).sum()
    return total * mask.any(1) / batch


def row_sums(kernel: np.ndarray, rows: np.ndarray, cover: np.ndarray) -> np.ndarray:
    """float64[k]: Σ_y max(K_xy, cover_y) over k rows x of a kernel, [·, N]."""

    def sums(start: int, stop: int) -> np.ndarray:
        highest, wide, total = np.empty_like(cover), np.empty(cover.size), np.empty(stop - start)
        for k in range(start, stop):
            np.maximum(kernel[rows[k]], cover, out=highest)
            # a sum of float32 into float64 converts in small buffers and takes longer
            wide[:] = highest
            total[k - start] = wide.sum()
        return total

    parts = map_blocks(sums, rows.size, block=16)
    return np.concatenate(parts) if parts else np.zeros(0)


def product_error(d: int) -> float:
    """The most by which a float32 product of two rows of z can differ from ẑ_x·ẑ_y.

    γ_k = k·u/(1 − k·u): each row is scaled and rounded to float32, then d products are summed in any order; products
    below the smallest normal number are flushed.
    """
    return gamma(d + 12, HALF_ULP_32) + d * 2.0**-120


def _listed(band: np.ndarray, live: np.ndarray) -> _Lists:
    at, firsts = np.flatnonzero(live), np.arange(0, live.size, live.shape[1])
    lengths = np.diff(np.searchsorted(at, np.append(firsts, live.size)))
    entries = np.ravel(band)[at]
    at -= np.repeat(firsts, lengths)
    return _Lists(at.astype(np.int32), entries, np.cumsum(lengths) - lengths, lengths)


def _joined(parts: list[_Lists]) -> _Lists:
    others = np.concatenate([part.others for part in parts])
    entries = np.concatenate([part.entries for part in parts])
    lengths = np.concatenate([part.lengths for part in parts])
    return _Lists(others, entries, np.cumsum(lengths) - lengths, lengths)


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64[Σ lengths]: start, start + 1, … of each range in turn."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1] if ends.size else 0)
