"""The table of values of a shard: encoded keys and values, and which updates they have. Pure.

The owner reads it and makes batches; owner, backup and learner apply the same ones, each once, in any order. Per key
the value with the highest order stays. An update that a retry brings again is known by its identity.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from p2pnode.training.shards.applied import Applied, DeltaId
from p2pnode.training.shards.value_batch import BadBatch, EncodedKey, NodeId, Number, Timestamp, ValueBatch

#: Memory of an entry beside its key and value, about.
ENTRY_BYTES = 200
#: Refusals whose reason is remembered for a retry.
MAX_REFUSED = 1024
#: Bytes of keys and values in one piece of a table on the wire or on disk; more where one value is larger.
PIECE_BYTES = 256 * 1024


class TableEntry(msgspec.Struct, frozen=True, gc=False):
    """An encoded value, its timestamp, and the order of the batch that it came with. Not known to the collector, which
    would look through all of them again and again: a hundred thousand take it 30 ms."""

    value: bytes
    timestamp: int
    order: int


_Row = tuple[EncodedKey, bytes, Timestamp, Number]
_Known = list[tuple[NodeId, Number, list[tuple[Number, Number]]]]


class _Piece(msgspec.Struct, frozen=True, array_like=True):
    rows: list[_Row]
    order: Number = 0
    known: _Known = []
    refused: list[tuple[NodeId, Number, Number, str]] = []


@dataclass(slots=True)
class ValueTable:
    """The values of one shard. `order` is that of the newest batch, `known` are the updates that it has or refused."""

    entries: dict[bytes, TableEntry] = field(default_factory=dict)
    order: int = 0
    known: Applied = field(default_factory=Applied)
    #: Why the last refused updates were refused.
    refused: dict[DeltaId, str] = field(default_factory=dict)
    #: Memory of the entries, about.
    size_bytes: int = 0

    def fate(self, identity: DeltaId) -> str | None:
        """What became of an update: None if it is not known, why it was refused, or the empty text: it is applied.

        Numbers of two origins do not compare, as steps do. So one that `known` has forgotten is taken for new."""
        return self.refused.get(identity, "") if identity in self.known else None

    def apply(self, batch: ValueBatch) -> None:
        """Take over the results of a batch, and remember its updates. A second time changes nothing."""
        for result in batch.results:
            former = self.entries.get(result.key)
            if former is None or batch.order > former.order:
                self._put(result.key, TableEntry(batch.value_of(result), result.timestamp, batch.order), former)
        self.order = max(self.order, batch.order)
        reasons = dict(batch.refused)
        for place, update in enumerate(batch.updates):
            self.known.add(update.identity)
            if place in reasons:
                self.refused[update.identity] = reasons[place]
            else:
                self.refused.pop(update.identity, None)
        while len(self.refused) > MAX_REFUSED:
            del self.refused[next(iter(self.refused))]

    def _put(self, key: bytes, entry: TableEntry, former: TableEntry | None) -> None:
        self.entries[key] = entry
        self.size_bytes += len(entry.value)
        self.size_bytes += len(key) + ENTRY_BYTES if former is None else -len(former.value)

    def copy(self) -> ValueTable:
        """An independent table; the values themselves, which never change, are shared."""
        return ValueTable(dict(self.entries), self.order, self.known.copy(), dict(self.refused), self.size_bytes)

    # -- on the wire and on disk --------------------------------------------------------------------------------

    def pieces(self) -> Iterator[bytes]:
        """The table in pieces, each encoded when it is asked for; at least one. It must not change meanwhile."""
        refused = [(*identity, reason) for identity, reason in self.refused.items()]
        piece = _Piece([], self.order, self.known.rows(), refused)
        size_bytes = 0
        for key, entry in self.entries.items():
            if size_bytes and size_bytes + len(key) + len(entry.value) > PIECE_BYTES:
                yield msgspec.msgpack.encode(piece)
                piece, size_bytes = _Piece([]), 0
            piece.rows.append((key, entry.value, entry.timestamp, entry.order))
            size_bytes += len(key) + len(entry.value)
        yield msgspec.msgpack.encode(piece)

    def add_piece(self, raw: bytes | memoryview) -> None:
        """Take over a piece of another table. Raises `BadBatch`."""
        try:
            piece = msgspec.msgpack.decode(raw, type=_Piece)
        except msgspec.DecodeError as error:
            raise BadBatch(f"no table of values: {error}") from error
        for key, value, timestamp, order in piece.rows:
            self._put(key, TableEntry(value, timestamp, order), self.entries.get(key))
        self.order = max(self.order, piece.order)
        self.known.merge(Applied.of_rows(piece.known))
        self.refused |= {DeltaId(node, start, number): reason for node, start, number, reason in piece.refused}
