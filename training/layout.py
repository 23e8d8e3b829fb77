"""The layout of the vector: its tensors, their order, and its division into shards.

Trainable parameters come first, sorted by canonical name, tied ones once; then the floating-point buffers that training
changes. All values are float32, whatever the model's own dtype. The trainer builds a `Layout`; the daemon compares and
divides it. Pure.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Literal

import msgspec

Kind = Literal["parameter", "buffer"]


class LayoutEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of the vector: `offset` and `size` count float32 values."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    offset: int
    size: int


class Layout(msgspec.Struct, frozen=True):
    """The vector's tensors in order; parameters before buffers, without gaps."""

    entries: tuple[LayoutEntry, ...]

    @property
    def total(self) -> int:
        """Number of float32 values in the vector."""
        return self.entries[-1].offset + self.entries[-1].size if self.entries else 0

    @property
    def parameter_total(self) -> int:
        """Number of values that are parameters; the rest, up to `total`, are buffers."""
        return sum(entry.size for entry in self.entries if entry.kind == "parameter")

    def digest(self) -> str:
        """Hex SHA-256 of the canonical encoding: equal digests mean equal vectors."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


def shard_bounds(total: int, shards: int) -> list[tuple[int, int]]:
    """`shards` equal slices `(start, stop)` of a vector of `total` values; the first ones take the remainder. A vector
    shorter than the number of shards gets one slice per value. That of a run without a model has no values, and its
    shards are slices of none. Raises `ValueError` for a negative total, or without a shard."""
    if total < 0 or shards < 1:
        raise ValueError(f"a vector of {total} values in {shards} shards")
    if not total:
        return [(0, 0)] * shards
    shards = min(shards, total)
    size, remainder = divmod(total, shards)
    starts = [index * size + min(index, remainder) for index in range(shards + 1)]
    return list(pairwise(starts))
