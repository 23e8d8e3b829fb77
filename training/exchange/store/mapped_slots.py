"""Divides memory that is mapped from a file into slots of equal size, each of which has one user at a time. Pure.

A slot is free again when nothing refers to its memory any more: no array, no view of one, no memoryview. So whoever
still sends what is in a slot keeps it, and nothing is ever written over it. Where no slot is free the caller keeps what
it has in memory: the files are as large as what is normal.
"""

from __future__ import annotations

from weakref import finalize

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Buffer = bytes | bytearray | memoryview


class MappedSlots:
    """Slots of `slot_bytes` in `memory`."""

    def __init__(self, memory: memoryview, slot_bytes: int) -> None:
        self._memory = memory
        self.slot_bytes = slot_bytes
        self._free = list(range(len(memory) // max(1, slot_bytes)))[::-1]
        self._count = len(self._free)

    @property
    def used_bytes(self) -> int:
        """Of the slots in use."""
        return (self._count - len(self._free)) * self.slot_bytes

    def take(self) -> Bytes | None:
        """A slot, with any bytes in it; None if all are in use."""
        if not self._free:
            return None
        number = self._free.pop()
        slot = np.frombuffer(self._memory, np.uint8, self.slot_bytes, number * self.slot_bytes)
        finalize(slot, self._free.append, number).atexit = False
        return slot


class PayloadFile:
    """Copies of payloads, one after the other in a slot; the slot is free again when all of them are gone."""

    def __init__(self, slots: MappedSlots) -> None:
        self._slots = slots
        self._slot: Bytes | None = None
        self._end = 0

    @property
    def used_bytes(self) -> int:
        """Memory of the slots in use."""
        return self._slots.used_bytes

    def kept(self, payload: Buffer) -> Buffer:
        """A copy of the payload in the file, or the payload itself where no slot has room for it."""
        size = len(payload)
        if self._slot is None or self._end + size > self._slots.slot_bytes:
            slot = self._slots.take() if size <= self._slots.slot_bytes else None
            if slot is None:
                return payload
            self._slot, self._end = slot, 0
        place = self._slot[self._end : self._end + size]
        place[:] = np.frombuffer(payload, np.uint8)
        self._end += size
        return place.data.toreadonly()
