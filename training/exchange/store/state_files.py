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

from training.encoding.codecs import Vector
from training.exchange.ownership_messages import StateHead
from training.exchange.store.records import StoredState
from training.exchange.store.state_stream import ANY_STEPS, describe, implausible, restore
from training.exchange.terms import TERM_LIMIT, Term
from training.shards.state import ShardState
from training.shards.value_batch import BadBatch
from training.shards.value_table import ValueTable

_DIGEST_BYTES = 32
_LENGTH_BYTES = 4
#: States of about this many bytes share a file. It bounds what one write copies and what one damaged file loses.
FILE_BYTES = 16 * 1024 * 1024


class BadStates(Exception):
    """A file is not what it should be; the text names the reason."""


class _Head(msgspec.Struct, frozen=True, array_like=True):
    genesis: bytes
    clean: bool
    states: list[StateHead]
    #: In a run without a model: the bytes of each piece of the table of each state. The pieces follow, and no arrays.
    tables: list[list[int]] = []


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
    """One file, in parts: the arrays, float32, little-endian, are those of the states and are not copied."""
    taken = list(states)
    heads = [describe(shard, term, state) for shard, term, state in taken]
    tables = [list(state.table.pieces()) for _, _, state in taken if state.table is not None]
    sizes = [[len(piece) for piece in pieces] for pieces in tables]
    head = msgspec.msgpack.encode(_Head(genesis, clean, heads, sizes))
    parts: list[bytes | memoryview] = [len(head).to_bytes(_LENGTH_BYTES, "big"), head]
    parts += [piece for pieces in tables for piece in pieces]
    for _, _, state in taken:
        parts += [np.ascontiguousarray(array, dtype="<f4").data.cast("B") for array in _arrays(state)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)  # releases the GIL, as does writing a part
    return [digest.digest(), *parts]


def _arrays(state: ShardState) -> list[Vector]:
    held = [item.delta for item in state.pending_deltas()]
    moving = [] if state.momentum is None else [state.momentum]
    return [array for array in [state.value, *moving, *held] if array.size]


def decode(
    raw: bytes, genesis: bytes, bounds: Sequence[tuple[int, int]], parameter_total: int
) -> dict[int, StoredState]:
    """The states of a file, by shard, but for those that could not be written again after more deltas. Raises
    `BadStates` if it is damaged, or of another swarm or layout."""
    content = memoryview(raw)[_DIGEST_BYTES:]
    if len(content) < _LENGTH_BYTES or hashlib.sha256(content).digest() != raw[:_DIGEST_BYTES]:
        raise BadStates("it is damaged")
    start = _DIGEST_BYTES + _LENGTH_BYTES
    stop = start + int.from_bytes(raw[_DIGEST_BYTES:start], "big")
    try:
        head = msgspec.msgpack.decode(raw[start:stop], type=_Head)
    except msgspec.DecodeError as error:
        raise BadStates(f"its head cannot be read: {error}") from error
    if head.genesis != genesis:
        raise BadStates("it is of another swarm")
    if head.tables:
        return _with_tables(head, raw, stop, len(bounds))
    values = np.frombuffer(raw, dtype="<f4", offset=stop) if (len(raw) - stop) % 4 == 0 else np.zeros(0, np.float32)
    found: dict[int, StoredState] = {}
    taken = 0

    def take(size: int) -> Vector:
        nonlocal taken
        piece = values[taken : taken + size]
        if piece.size != size:
            raise BadStates("it is of another layout")
        taken += size
        return np.array(piece, dtype=np.float32)

    for one in head.states:
        if one.shard >= len(bounds):
            raise BadStates("it is of another layout")
        begin, end = bounds[one.shard]
        parameters = min(max(parameter_total - begin, 0), end - begin)
        value = take(end - begin)
        momentum = take(parameters) if one.has_momentum and parameters else None
        state = restore(one, parameters, value, momentum, [take(end - begin) for _ in one.pending])
        if not implausible(one, ANY_STEPS) and one.term.number < TERM_LIMIT:
            found[one.shard] = StoredState(one.term, state, head.clean)
    if taken != values.size:
        raise BadStates("it is of another layout")
    return found


def _with_tables(head: _Head, raw: bytes, start: int, shards: int) -> dict[int, StoredState]:
    """The states of a run without a model."""
    found: dict[int, StoredState] = {}
    if len(head.tables) != len(head.states):
        raise BadStates("it is of another layout")
    for one, sizes in zip(head.states, head.tables, strict=True):
        table = ValueTable()
        for size in sizes:
            try:
                table.add_piece(raw[start : start + size])
            except BadBatch as error:
                raise BadStates(str(error)) from error
            start += size
        if one.shard >= shards or one.pending:
            raise BadStates("it is of another layout")
        state = restore(one, 0, np.zeros(0, np.float32), None, [])
        state.table = table
        found[one.shard] = StoredState(one.term, state, head.clean)
    return found
