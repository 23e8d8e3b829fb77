"""Arrays and payloads in a mapped file: one user at a time, free again when nobody has anything of them."""

from __future__ import annotations

import random

import numpy as np

from training.exchange.store.mapped_extents import UNIT_BYTES, ArraySpace, MappedExtents, PayloadFile

VALUES = UNIT_BYTES // 4


def space_of(units: int) -> ArraySpace:
    return ArraySpace(memoryview(bytearray(units * UNIT_BYTES)))


def array_of(units: float, first: int = 0) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.arange(first, first + int(units * VALUES), dtype=np.float32)


def test_arrays_move_once_and_into_an_extent_that_has_room() -> None:
    """An array that is in the file stays where it is, one that is too large stays in memory, and what is freed is used
    again."""
    space = space_of(1)
    values = array_of(1)

    there = space.moved(values)
    assert there is not values
    assert space.has(there)
    assert not space.has(values)
    np.testing.assert_array_equal(there, values)
    assert space.moved(there) is there
    assert space.moved(values) is values
    assert space.used_bytes == UNIT_BYTES

    view = there[4:]
    del there
    assert not space._arrays  # another array may have its id now
    assert space.moved(values) is values
    del view
    assert space.moved(values) is not values
    assert space_of(1).moved(too_large := array_of(1.25)) is too_large


def test_the_parts_of_an_array_fit_where_it_was() -> None:
    """Three arrays fill the file. One is divided into four, and then all parts into one: nothing else moves."""
    space = space_of(24)
    first, whole, last = (space.moved(array_of(8, first)) for first in (0, 10, 20))
    assert space.used_bytes == 24 * UNIT_BYTES
    copies = [part.copy() for part in np.split(whole, 4)]

    del whole
    parts = [space.moved(copy) for copy in copies]
    assert all(map(space.has, parts))
    np.testing.assert_array_equal(np.concatenate(parts), array_of(8, 10))

    del parts
    again = space.moved(array_of(8, 30))
    assert space.has(again)
    for held, expected in ((first, 0), (again, 30), (last, 20)):
        np.testing.assert_array_equal(held, array_of(8, expected))


def test_arrays_of_any_size_stay_as_they_were_whatever_is_dropped_and_added() -> None:
    """A thousand arrays in random order of dropping: each has its values, and at the end the file is free, as one."""
    chance = random.Random(11)
    print("seed 11")
    memory = memoryview(bytearray(20 * UNIT_BYTES + 100))
    space, kept, in_file = ArraySpace(memory), list[tuple[int, int, np.ndarray]](), 0
    for number in range(1000):
        size = chance.randrange(1, 6 * VALUES)
        found = space.moved(np.full(size, number, np.float32))
        in_file += space.has(found)
        kept.append((number, size, found))
        del found
        while len(kept) > 12 or (kept and chance.random() < 0.3):
            kept.pop(chance.randrange(len(kept)))
        assert all(held.size == length and (held == value).all() for value, length, held in kept)
    assert in_file > 300

    kept.clear()
    assert space.used_bytes == 0
    assert len(space._extents._free) == 1


def test_the_end_of_the_memory_is_used_to_its_last_byte() -> None:
    """The last extent may be shorter than a unit; without memory there is none."""
    extents = MappedExtents(memoryview(bytearray(UNIT_BYTES + 8)))
    taken = [extents.take(UNIT_BYTES), extents.take(8)]

    assert all(one is not None for one in taken)
    assert extents.take(1) is None
    assert MappedExtents(memoryview(b"")).take(1) is None


def test_an_extent_is_free_when_neither_array_nor_view_nor_memoryview_is_left() -> None:
    """A view of a part, and memory that is being sent, keep it; no third user gets the memory of either of two."""
    extents = MappedExtents(memoryview(bytearray(2 * UNIT_BYTES)))
    first, second = extents.take(UNIT_BYTES), extents.take(UNIT_BYTES)
    assert first is not None
    assert second is not None
    assert extents.take(1) is None
    view, sent = first[8:16], first[:4].data

    del first
    assert extents.used_bytes == 2 * UNIT_BYTES
    del view
    assert extents.used_bytes == 2 * UNIT_BYTES
    del sent
    assert extents.used_bytes == UNIT_BYTES
    assert extents.take(1) is not None


def payload_file(units: int) -> PayloadFile:
    return PayloadFile(memoryview(bytearray(units * UNIT_BYTES)), UNIT_BYTES)


def test_payloads_stay_as_they_were_whatever_is_dropped_and_added() -> None:
    """A thousand payloads in random order of dropping: each that is kept has its bytes. What finds no room, or
    is larger than an extent, is kept as it is; and at the end the whole file is free but for the extent in use."""
    chance = random.Random(7)
    file, kept = payload_file(8), list[tuple[bytes, bytes | bytearray | memoryview]]()
    in_file = in_memory = 0
    for number in range(1000):
        payload = bytes([number % 251]) * chance.randrange(1, UNIT_BYTES * 5 // 4)
        found = file.kept(payload)
        in_memory += found is payload
        in_file += found is not payload
        assert (found is payload) or len(payload) <= UNIT_BYTES
        kept.append((payload, found))
        while len(kept) > 12 or (kept and chance.random() < 0.3):
            kept.pop(chance.randrange(len(kept)))
        assert all(bytes(held) == expected for expected, held in kept)
    assert in_file > 300
    assert in_memory > 100

    kept.clear()
    del found
    assert file.used_bytes <= UNIT_BYTES


def test_a_payload_in_the_file_cannot_be_written_to() -> None:
    """It is sent from there, perhaps twice."""
    found = payload_file(1).kept(b"abc")

    assert isinstance(found, memoryview)
    assert found.readonly
