"""Which deltas this node has pushed, for the time after a restart of the whole swarm. Pure.

A killed swarm goes on from the newest copies on its disks. What it lost can be told only if it is written somewhere
else which deltas there were: each node records its own, in a small file that is written while it pushes.
"""

from __future__ import annotations

import msgspec

from training.exchange.ownership_messages import Identities
from training.shards.applied import Applied, DeltaId


class _File(msgspec.Struct, frozen=True, array_like=True):
    genesis: bytes
    generation: int
    rows: Identities


class BadRecord(Exception):
    """The file is damaged or of another swarm."""


class PushRecord:
    """The own deltas of this start and of earlier ones. `generation`: that of the terms when the last was pushed."""

    def __init__(self) -> None:
        self.generation = 0
        self._acknowledged = Applied()
        self._in_flight: DeltaId | None = None

    def begin(self, identity: DeltaId, generation: int) -> None:
        """A delta is about to be pushed: from now on an owner may have it."""
        self._in_flight, self.generation = identity, generation

    def end(self, identity: DeltaId, *, is_added: bool) -> None:
        """The push has ended; `is_added`: an owner has the delta, or may still get it."""
        if is_added:
            self._acknowledged.add(identity)
        if self._in_flight == identity:
            self._in_flight = None

    def deltas(self) -> Applied:
        """The identities of all that an owner may have."""
        found = self._acknowledged.copy()
        if self._in_flight is not None:
            found.add(self._in_flight)
        return found

    def encode(self, genesis: bytes) -> bytes:
        return msgspec.msgpack.encode(_File(genesis, self.generation, self.deltas().rows()))

    def load(self, raw: bytes, genesis: bytes) -> None:
        """What earlier starts recorded. Raises `BadRecord`."""
        try:
            file = msgspec.msgpack.decode(raw, type=_File)
        except msgspec.DecodeError as error:
            raise BadRecord(str(error)) from error
        if file.genesis != genesis:
            raise BadRecord("it is of another swarm")
        self.generation, self._acknowledged = file.generation, Applied.of_rows(file.rows)
