"""Encodes the states that a node owned or backed up into files, beside its checkpoint. Pure.

They let a swarm continue that was switched off as a whole. They make no node an owner: after its start a node offers
them like a pulled replica, and the swarm continues from the highest copy. A file has a few whole states under its own
SHA-256; a damaged file is skipped, the others count. `p2pnode.lifecycle` reads and writes the files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.exchange.ownership_messages import StateHead
from p2pnode.training.exchange.store.records import StoredState
from p2pnode.training.exchange.store.state_stream import ANY_STEPS, describe, implausible, restore
from p2pnode.training.exchange.terms import TERM_LIMIT, Term
from p2pnode.training.shards.state import ShardState
from p2pnode.training.shards.value_batch import BadBatch
from p2pnode.training.shards.value_table import ValueTable

_DIGEST_BYTES = 32
_LENGTH_BYTES = 4
#: States of about this many bytes share a file. It bounds what one write copies and what one damaged file loses.
FILE_BYTES = 16 * 1024 * 1024


class BadStates(Exception):
    """A file is not what it should be; the text names the reason."""


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """What follows of each state: its arrays, float32, little-endian, and then the pieces of its table, by length."""

    genesis: bytes
    clean: bool
    states: list[tuple[StateHead, list[int]]]


def batches(sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Shards grouped into files; `sizes` are (shard, bytes)."""
    files: list[list[int]] = []
    remaining_bytes = 0
    for shard, size in sizes:
        if not files or size > remaining_bytes:
            files.append([])
            remaining_bytes = FILE_BYTES
        files[-1].append(shard)
        remaining_bytes -= size
    return files


def encode(genesis: bytes, states: Iterable[tuple[int, Term, ShardState]], *, clean: bool) -> list[bytes | memoryview]:
    """One file, in parts: the arrays are those of the states and are not copied."""
    heads: list[tuple[StateHead, list[int]]] = []
    arrays: list[bytes | memoryview] = []
    for shard, term, state in states:
        pieces = [] if state.table is None else list(state.table.pieces())
        heads.append((describe(shard, term, state), [len(piece) for piece in pieces]))
        held = [item.delta for item in state.pending_deltas()]
        moving = [] if state.momentum is None else [state.momentum]
        found = [array for array in (state.value, *moving, *held) if array.size]
        arrays += [np.ascontiguousarray(array, dtype="<f4").data.cast("B") for array in found]
        arrays += pieces
    head = msgspec.msgpack.encode(_Head(genesis, clean, heads))
    parts = [len(head).to_bytes(_LENGTH_BYTES, "big"), head, *arrays]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)  # releases the GIL, as does writing a part
    return [digest.digest(), *parts]


class _Contents:
    """The bytes behind the head of a file, taken in order."""

    def __init__(self, left: memoryview) -> None:
        self.left = left

    def take(self, size_bytes: int) -> memoryview:
        if size_bytes > len(self.left):
            raise BadStates("it is of another layout")
        piece, self.left = self.left[:size_bytes], self.left[size_bytes:]
        return piece

    def values(self, size: int) -> Vector:
        return np.frombuffer(self.take(4 * size), dtype="<f4").astype(np.float32)

    def table(self, sizes: list[int]) -> ValueTable:
        table = ValueTable()
        for size in sizes:
            try:
                table.add_piece(bytes(self.take(size)))
            except BadBatch as error:
                raise BadStates(str(error)) from error
        return table


def decode(
    raw: bytes, genesis: bytes, bounds: Sequence[tuple[int, int]], parameter_total: int
) -> dict[int, StoredState]:
    """The states of a file, by shard, but for those that could not be written again after more deltas. Raises
    `BadStates` if it is damaged, or of another swarm or layout."""
    contents = _Contents(memoryview(raw)[_DIGEST_BYTES:])
    if hashlib.sha256(contents.left).digest() != raw[:_DIGEST_BYTES]:
        raise BadStates("it is damaged")
    length = int.from_bytes(contents.take(_LENGTH_BYTES), "big")
    try:
        head = msgspec.msgpack.decode(contents.take(length), type=_Head)
    except msgspec.DecodeError as error:
        raise BadStates(f"its head cannot be read: {error}") from error
    if head.genesis != genesis:
        raise BadStates("it is of another swarm")
    found: dict[int, StoredState] = {}
    for one, sizes in head.states:
        if one.shard >= len(bounds):
            raise BadStates("it is of another layout")
        begin, end = bounds[one.shard]
        parameters = min(max(parameter_total - begin, 0), end - begin)
        value = contents.values(end - begin)
        momentum = contents.values(parameters) if one.has_momentum and parameters else None
        state = restore(one, parameters, value, momentum, [contents.values(end - begin) for _ in one.pending])
        if sizes:
            state.table = contents.table(sizes)
        if not implausible(one, ANY_STEPS) and one.term.number < TERM_LIMIT:
            found[one.shard] = StoredState(one.term, state, head.clean)
    if contents.left:
        raise BadStates("it is of another layout")
    return found
