"""Answers that arrive in pieces: in order, while the sender is at work; and what silence, a break and a cut line do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from overlay.addresses import Address
from overlay.transport import Buffer, TransportError
from tests.harness.environment.virtual_loop import run
from tests.harness.swarms.answer_pieces import Pieces, send

ADDRESS = Address("10.0.0.1", 1)
EVERY_S = 2.0


async def body(count: int) -> AsyncIterator[Buffer]:
    for number in range(count):
        await asyncio.sleep(EVERY_S)
        yield bytes([number])


async def received(count: int, timeout_s: float, cut_s: float = 1e9, breaks_after: int | None = None) -> str:
    """The pieces that arrive, and why no more do."""
    loop, pieces, began = asyncio.get_running_loop(), Pieces(ADDRESS), asyncio.Event()
    start_s, delays = loop.time(), iter([0.9, 0.5, 0.1] * 10)
    pieces.timeout_s = timeout_s
    sending = asyncio.create_task(
        send(body(count), pieces, began.set, lambda: loop.time() - start_s >= cut_s, lambda: next(delays), breaks_after)
    )
    found = list[str]()
    try:
        await began.wait()
        async for piece in pieces:
            found += [str(piece[0])]
    except TransportError as error:
        found += [error.kind]
    await sending  # to the end, whatever has arrived
    return " ".join(found)


@pytest.mark.parametrize(
    ("timeout_s", "cut_s", "breaks_after", "expected"),
    [
        (3.0, 1e9, None, "0 1 2 3"),
        (1.0, 1e9, None, "timeout"),
        (3.0, 5.0, None, "0 1 timeout"),
        (3.0, 1e9, 2, "0 1 reset"),
    ],
)
def test_pieces_arrive_one_after_the_other_for_longer_than_anybody_is_silent(
    timeout_s: float, cut_s: float, breaks_after: int | None, expected: str
) -> None:
    """Eight seconds of an answer with a silence of two at a time; too long a silence, a cut line, or a break end it."""
    assert run(received(4, timeout_s, cut_s, breaks_after)) == expected
