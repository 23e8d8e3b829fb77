"""Records which deltas this node has pushed, so that a restart of the whole swarm can count the lost ones. Pure.

A killed swarm resumes from the newest copies on its disks. Those copies do not show which deltas are missing. So each
node writes the identities of its own deltas to a small file while it pushes.
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
    """The own deltas of this start and of earlier ones. `generation` is that of the terms at the last push."""

    def __init__(self) -> None:
        self.generation = 0
        self._acknowledged = Applied()
        self._in_flight: DeltaId | None = None

    def begin(self, identity: DeltaId, generation: int) -> None:
        """Called before a delta is pushed: from now on an owner may have it."""
        self._in_flight, self.generation = identity, generation

    def end(self, identity: DeltaId, *, is_added: bool) -> None:
        """The push has ended; `is_added`: an owner has the delta, or may still get it."""
        if is_added:
            self._acknowledged.add(identity)
        if self._in_flight == identity:
            self._in_flight = None

    def leave_out(self, identity: DeltaId) -> None:
        """No owner will get this delta: it is a part of a later one."""
        one = Applied()
        one.add(identity)
        self._acknowledged = self._acknowledged.without(one)

    def acknowledged(self) -> Applied:
        """The identities of the deltas whose pushes have ended, and that an owner has or may still get."""
        return self._acknowledged.copy()

    def deltas(self) -> Applied:
        """The identities of all deltas that an owner may have."""
        found = self._acknowledged.copy()
        if self._in_flight is not None:
            found.add(self._in_flight)
        return found

    def encode(self, genesis: bytes) -> bytes:
        return msgspec.msgpack.encode(_File(genesis, self.generation, self.deltas().rows()))

    def load(self, raw: bytes, genesis: bytes) -> None:
        """Take over the records of earlier starts. Raises `BadRecord`."""
        try:
            file = msgspec.msgpack.decode(raw, type=_File)
        except msgspec.DecodeError as error:
            raise BadRecord(str(error)) from error
        if file.genesis != genesis:
            raise BadRecord("it is of another swarm")
        self.generation, self._acknowledged = file.generation, Applied.of_rows(file.rows)
