"""A message as a body, which may be longer than a head."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import pytest

from p2pnode.overlay.transport import PART_BYTES, Buffer, gathered, in_parts


async def body_of(parts: Iterable[Buffer]) -> AsyncIterator[Buffer]:
    for part in parts:
        yield part


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, 2 * PART_BYTES + 1])
def test_a_message_arrives_whole(size: int) -> None:
    """In parts that are not copied."""
    message = bytes(range(256)) * (size // 256) + bytes(size % 256)
    parts = in_parts(message)
    assert all(len(part) <= PART_BYTES for part in parts)
    assert asyncio.run(gathered(body_of(parts), size)) == message


def test_a_longer_one_than_is_allowed_is_refused_before_it_is_in_memory() -> None:
    """The rest of the body is not read."""
    read: list[int] = []

    async def endless() -> AsyncIterator[Buffer]:
        while True:
            read.append(1)
            yield bytes(100)

    with pytest.raises(ValueError, match="more than 250 bytes"):
        asyncio.run(gathered(endless(), 250))
    assert len(read) == 3
