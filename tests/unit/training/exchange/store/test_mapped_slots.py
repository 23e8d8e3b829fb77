"""Slots of a mapped file: one user at a time, free again when nobody has anything of them."""

from __future__ import annotations

import random

from training.exchange.store.mapped_slots import MappedSlots, PayloadFile


def slots_of(count: int, slot_bytes: int = 64) -> MappedSlots:
    return MappedSlots(memoryview(bytearray(count * slot_bytes)), slot_bytes)


def test_a_slot_is_free_when_neither_array_nor_view_nor_memoryview_is_left() -> None:
    """A view of a part, and memory that is being sent, keep it."""
    slots = slots_of(2)
    first = slots.take()
    assert first is not None
    view, sent = first[8:16], first[:4].data
    assert slots.used_bytes == 64

    del first
    assert slots.used_bytes == 64
    del view
    assert slots.used_bytes == 64
    del sent
    assert slots.used_bytes == 0


def test_without_a_free_slot_there_is_none() -> None:
    """Two slots have two users, and no third one gets the memory of either."""
    slots = slots_of(2)
    taken = [slots.take(), slots.take()]

    assert slots.take() is None
    del taken[0]
    assert slots.take() is not None


def test_payloads_stay_as_they_were_whatever_is_dropped_and_added() -> None:
    """A thousand payloads in random order of dropping: each that is kept has its bytes. What finds no slot, or is
    larger than one, is kept as it is; and at the end the whole file is free but for the slot in use."""
    chance = random.Random(7)
    slots = slots_of(8)
    file, kept = PayloadFile(slots), list[tuple[bytes, bytes | bytearray | memoryview]]()
    in_file = in_memory = 0
    for number in range(1000):
        payload = bytes([number % 251]) * chance.randrange(1, 80)
        found = file.kept(payload)
        in_memory += found is payload
        in_file += found is not payload
        assert (found is payload) or len(payload) <= 64
        kept.append((payload, found))
        while len(kept) > 12 or (kept and chance.random() < 0.3):
            kept.pop(chance.randrange(len(kept)))
        assert all(bytes(held) == expected for expected, held in kept)
    assert in_file > 300
    assert in_memory > 100

    kept.clear()
    del found
    assert file.used_bytes <= 64


def test_a_payload_in_the_file_cannot_be_written_to() -> None:
    """It is sent from there, perhaps twice."""
    found = PayloadFile(slots_of(1)).kept(b"abc")

    assert isinstance(found, memoryview)
    assert found.readonly
