"""The layout of the vector: its tensors, their order, and its division into shards.

Trainable parameters come first, sorted by canonical name, tied ones once; then the floating-point buffers that training
changes. All values are float32, whatever the model's own dtype. The trainer builds a `Layout`; the daemon compares and
divides it. Pure.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

Kind = Literal["parameter", "buffer"]

#: A shard with more values than so many is divided between two of its encoded blocks, so that an encoded delta of it
#: can be cut without loss (`training.encoding.cutting`): the largest blocks are those of `sparse`.
BLOCK_VALUES = 4096


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


def shard_bounds(total: int, shards: int, parts: int = 1) -> list[tuple[int, int]]:
    """`shards` equal slices `(start, stop)` of a vector of `total` values; the first ones take the remainder.

    `parts`: the run began with fewer shards, and each has been divided into so many. The slices of those are divided,
    so that no value is in a part of another shard than before; those of more than `BLOCK_VALUES` values at a multiple
    of that. A vector shorter than the number of shards gets one slice per value, and those are not divided. That of a
    run without a model is empty, and so are all its slices: its shards hold named values. Raises `ValueError` for what
    `is_partition` is not true of, and for a negative total.
    """
    if total < 0 or not is_partition(total, shards, parts):
        raise ValueError(f"a vector of {total} values in {shards} shards, {parts} of each former one")
    if not total:
        return [(0, 0)] * shards
    shards = min(shards // parts, total)
    size, remainder = divmod(total, shards)
    bounds: list[tuple[int, int]] = []
    start = 0
    for index in range(shards):
        stop = start + size + (1 if index < remainder else 0)
        cuts = [start + _cut(stop - start, part, parts) for part in range(parts)]
        bounds += zip(cuts, [*cuts[1:], stop], strict=True)
        start = stop
    return bounds


def _cut(length: int, part: int, parts: int) -> int:
    """Where a part of a slice begins. It depends on `part / parts` alone, so that the parts of parts are parts."""
    at = length * part // parts
    return at - at % BLOCK_VALUES if length > BLOCK_VALUES else at


def is_partition(total: int, shards: int, parts: int) -> bool:
    """Whether a vector of `total` values can have `shards` shards, `parts` of each one that the run began with, each
    with a value at least, or with a block of those that had more. Shards of named values (`total` 0) cannot be divided:
    a key belongs to one by its hash."""
    if not 1 <= parts <= shards or shards % parts:
        return False
    if parts == 1:
        return True
    first = shards // parts
    smallest, largest = total // first, -(-total // first)
    return smallest >= (parts if largest <= BLOCK_VALUES else BLOCK_VALUES * parts)
