"""A shard's whole state in the body of a request and in a file: one head, and its arrays.

A request carries the snapshot of a learner, or the copy for a take-over. The files have the states that a node owned or
backed up, beside its checkpoint: they let a swarm continue that was switched off as a whole. They make no node an
owner: after its start a node offers them like a pulled replica, and the swarm continues from the highest copy. A file
has a few whole states under its own SHA-256; a damaged file is skipped, the others count. `p2pnode.lifecycle` reads and
writes the files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from p2pnode.overlay.environment import Executor
from p2pnode.overlay.transport import Buffer
from p2pnode.training.cooperative import VALUES_PER_ROW, off_loop
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.frames import (
    BadFrame,
    FrameReader,
    Part,
    blob_frames,
    frames,
    read_array,
    read_blob,
)
from p2pnode.training.exchange.messages import read_record, record_frames
from p2pnode.training.exchange.ownership_messages import StateHead
from p2pnode.training.exchange.peer_score import Nonsense
from p2pnode.training.exchange.store.records import StoredState
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import MAX_BELIEVED, TERM_LIMIT, Term
from p2pnode.training.shards.applied import Applied, DeltaId
from p2pnode.training.shards.robust import Norms
from p2pnode.training.shards.state import ShardState
from p2pnode.training.shards.value_batch import BadBatch
from p2pnode.training.shards.value_table import ValueTable


def describe(shard: int, term: Term, state: ShardState) -> StateHead:
    """The head of a state; `term` is the one that is valid once the receiver has the state."""
    return StateHead(
        shard=shard,
        term=term,
        version=state.version,
        sum_weight=state.sum_weight,
        era_step=state.era_step,
        era_term=Term(*state.era_term),
        folded_step=state.folded_step,
        has_momentum=state.momentum is not None,
        applied=state.applied.rows(),
        pending=[(*item.identity, item.weight, item.momentum, item.plain) for item in state.pending_deltas()],
        norms=state.norms.rows(),
        unlisted=state.unlisted,
        before=state.applied.before,
    )


class PlausibleSteps(NamedTuple):
    """The last step that a delta of any node may have, and the last with which an era may begin."""

    furthest: int
    likely: int


#: A version counts deltas: no step has as many. The bound grows faster than any version that was believed, so that
#: those who go on counting from it are believed too.
DELTAS_PER_STEP = 10_000
#: For what this node has written itself: whatever fits a message after more deltas.
ANY_STEPS = PlausibleSteps(MAX_BELIEVED, MAX_BELIEVED)


def implausible(head: StateHead, most: PlausibleSteps) -> str:
    """Why the head of a state is not believed; empty if it is.

    What follows the numbers of a state that is taken over must fit a message too; and a set of identities or an era
    that reaches into the future would have the deltas refused that are still to come.
    """
    most_version = min(MAX_BELIEVED - 1, most.furthest * DELTAS_PER_STEP)
    if head.version > most_version or max(head.folded_step, head.unlisted) >= MAX_BELIEVED:
        return "its counts are too high"
    if head.era_step > most.likely:
        return f"its era begins with step {head.era_step}"
    last = max((high for _, _, ranges in head.applied for _, high in ranges), default=0)
    if last > most.furthest:
        return f"it has deltas of step {last}"
    return f"it has forgotten steps up to {head.before}" if head.before > most.likely else ""


def restore(
    head: StateHead, parameters: int, value: Vector, momentum: Vector | None, pending: Sequence[Vector]
) -> ShardState:
    """The state of a head and its arrays; `pending` in the order of the head. The arrays are kept, not copied."""
    state = ShardState(
        value=value,
        parameters=parameters,
        momentum=momentum,
        sum_weight=head.sum_weight,
        version=head.version,
        era_step=head.era_step,
        era_term=head.era_term,
        applied=Applied.of_rows(head.applied, head.before),
        folded_step=head.folded_step,
        norms=Norms(head.norms),
        unlisted=head.unlisted,
    )
    for (node, start, step, weight, has_momentum, is_plain), delta in zip(head.pending, pending, strict=True):
        state.add_pending(DeltaId(node, start, step), weight, delta, momentum=has_momentum, plain=is_plain)
    return state


#: Bytes of one piece of a table: a value of the largest size, and what is written once.
MAX_PIECE_BYTES = 64 * 1024 * 1024


def body(snapshots: Iterable[tuple[StateHead, ShardState]]) -> Iterator[Buffer]:
    """The heads of the states, and their arrays, in the order that `read_state` expects; exact, because float32."""
    for head, state in snapshots:
        yield from record_frames(head.shard, head)
        if not head.publication:
            yield from frames(head.shard, state.value, "float32", Part.VALUE, version=head.version)
        if state.momentum is not None:
            yield from frames(head.shard, state.momentum, "float32", Part.MOMENTUM)
        for item in state.pending_deltas():
            yield from frames(head.shard, item.delta, "float32", Part.PENDING, step=item.identity.step)
        if state.table is not None:
            yield from _table_frames(head.shard, state.table)


def _table_frames(shard: int, table: ValueTable) -> Iterator[Buffer]:
    """A table, in pieces that are encoded when they are sent."""
    pieces = table.pieces()
    piece = next(pieces)
    for following in pieces:
        yield from blob_frames(shard, piece, Part.TABLE, is_last=False)
        piece = following
    yield from blob_frames(shard, piece, Part.TABLE)


async def _read_table(reader: FrameReader, shard: int) -> ValueTable:
    table, is_last = ValueTable(), False
    while not is_last:
        piece, is_last = await read_blob(reader, shard, Part.TABLE, MAX_PIECE_BYTES)
        try:
            table.add_piece(piece)
        except BadBatch as error:
            raise BadFrame(f"shard {shard}: {error}") from error
    return table


async def read_state(
    reader: FrameReader, shard: int, store: ShardStore, most: PlausibleSteps, executor: Executor
) -> tuple[Term, ShardState]:
    """Read one state from a body, and its term. Raises `BadFrame`, also for a head that does not fit the layout, or is
    not plausible, or names a value which this node does not hold; `Nonsense` for values that no training gives."""
    if shard >= len(store):
        raise BadFrame(f"shard {shard} of {len(store)}")
    head = await read_record(reader, shard, StateHead)
    if head.shard != shard:
        raise BadFrame(f"the state of shard {head.shard} in the place of {shard}")
    rows = len(head.applied) + len(head.pending)
    if reason := await off_loop(executor, VALUES_PER_ROW * rows, implausible, head, most):
        raise BadFrame(f"the state of shard {head.shard} is not plausible: {reason}")
    size, parameters = store.size(head.shard), store.parameters(head.shard)
    if head.publication:
        if (base := store.base(head.shard, head.publication)) is None:
            raise BadFrame(f"shard {head.shard}: the catch-up has begun anew, and its base is gone")
        value = base.copy()
    else:
        value, _, _ = await read_array(reader, head.shard, Part.VALUE, size)
    momentum = None
    if head.has_momentum and parameters:
        momentum, _, _ = await read_array(reader, head.shard, Part.MOMENTUM, parameters)
    pending = [(await read_array(reader, head.shard, Part.PENDING, size))[0] for _ in head.pending]
    work = VALUES_PER_ROW * rows + size * (2 + len(pending))
    state, is_in_range = await off_loop(executor, work, _restored, head, parameters, value, momentum, pending)
    if store.holds_values:
        state.table = await _read_table(reader, head.shard)
    if not is_in_range:
        raise Nonsense(f"the state of shard {head.shard} has values out of range")
    return head.term, state


def _restored(
    head: StateHead, parameters: int, value: Vector, momentum: Vector | None, pending: list[Vector]
) -> tuple[ShardState, bool]:
    """The state, and whether its values may be used."""
    state = restore(head, parameters, value, momentum, pending)
    return state, state.is_in_range()


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
