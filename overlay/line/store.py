"""Stores the announced capacity on disk, so that a restarted node has a first estimate.

A stored capacity counts for a day: the machine may have moved to another line. What is sent then corrects it.
"""

from __future__ import annotations

import msgspec

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.line.capacity import UNKNOWN, split
from p2pnode.overlay.line.rate import MeasuredLine

CAPACITY_FILE = "capacity.json"
MAX_AGE_S = 24 * 3600.0


class StoredCapacity(msgspec.Struct, frozen=True):
    """The announced capacity, and the wall-clock second at which it was the present one."""

    capacity: int
    at: float


class CapacityStore:
    """Reads the capacity of an earlier start into `line`, and writes what it announces."""

    def __init__(self, line: MeasuredLine, environment: Environment) -> None:
        self._line = line
        self._disk = environment.disk
        self._executor = environment.executor
        self._clock = environment.clock
        self._log = environment.log
        #: What the file has, if it was read or written in this start.
        self._written = UNKNOWN
        self._has_failed = False

    def load(self) -> None:
        """Begin with the stored capacity, if it is young enough. A file that cannot be read is logged."""
        try:
            data = self._disk.read(CAPACITY_FILE)
            if data is None:
                return
            found = msgspec.json.decode(data, type=StoredCapacity)
            if split(found.capacity)[0] == UNKNOWN:
                raise ValueError(f"{found.capacity} is no capacity")
        except (OSError, ValueError, RecursionError) as error:
            self._log.warning("stored_capacity_unreadable", file=CAPACITY_FILE, error=str(error))
            return
        if abs(self._clock.wall() - found.at) <= MAX_AGE_S and self._line.begin(found.capacity, "stored"):
            self._written = found.capacity

    async def write(self) -> None:
        """Write the capacity off the loop, if it is not the one in the file. One that was stored, and that nothing has
        changed since, keeps its age. The first failure is logged; the node can run without the file."""
        capacity = self._line.capacity
        if capacity in (UNKNOWN, self._written):
            return
        data = msgspec.json.encode(StoredCapacity(capacity, self._clock.wall()))
        try:
            await self._executor.run(self._disk.write, CAPACITY_FILE, data)
        except OSError as error:
            if not self._has_failed:
                self._log.warning("capacity_not_stored", file=CAPACITY_FILE, error=str(error))
            self._has_failed = True
            return
        self._has_failed, self._written = False, capacity
