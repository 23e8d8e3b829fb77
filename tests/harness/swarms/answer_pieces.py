"""The body of an answer on the light network that arrives while its sender is still at work.

Most answers are there at once, and are delivered whole. A relay sends the results of owners as they come, and signs of
life between them, for longer than the node that asked would wait for silence.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from overlay.addresses import Address
from overlay.transport import Buffer, Response, TransportError

if TYPE_CHECKING:
    from tests.harness.swarms.exchange_overlay import Overlay
    from tests.harness.swarms.exchange_swarm import World

#: Requests that are answered so.
IN_PIECES = ("relay",)


class Pieces:
    """Each piece as it comes, and `TransportError` where none comes for `timeout_s`."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._come: deque[bytes | TransportError | None] = deque()
        self._fresh = asyncio.Event()
        self.timeout_s = math.inf

    def put(self, piece: bytes | TransportError | None) -> None:
        """A piece has arrived, a break, or the end."""
        self._come.append(piece)
        self._fresh.set()

    def __aiter__(self) -> Pieces:
        return self

    async def __anext__(self) -> Buffer:
        if not self._come:
            self._fresh.clear()
            try:
                async with asyncio.timeout(self.timeout_s):
                    await self._fresh.wait()
            except TimeoutError as error:
                detail = f"was silent for {self.timeout_s:g} s"
                raise TransportError("timeout", self._address, detail) from error
        piece = self._come.popleft()
        if piece is None:
            raise StopAsyncIteration
        if isinstance(piece, TransportError):
            raise piece
        return piece


#: Head and body of an answer.
Answer = asyncio.Future[tuple[bytes, list[bytes] | Pieces]]


async def answer_in_pieces(
    world: World, source: Overlay, overlay: Overlay, is_reachable: Callable[[], bool], reply: Response, answer: Answer
) -> None:
    """Answer a request of `source` over the links of a world, as far as its node is reachable."""
    pieces, links, chance = Pieces(overlay.address), world.links, world.random
    is_lost = chance.random() < links.loss
    breaks_after = chance.randrange(4) if links.torn and chance.random() < links.torn else None

    def is_cut() -> bool:
        return is_lost or not source.running or not is_reachable()

    def begin() -> None:
        if not answer.done():
            source.met(overlay)
            answer.set_result((reply.head, pieces))

    await send(reply.body, pieces, begin, is_cut, world._delay, breaks_after)  # type: ignore[arg-type]


async def send(
    body: AsyncIterator[Buffer],
    pieces: Pieces,
    begin: Callable[[], object],
    is_cut: Callable[[], bool],
    delay_s: Callable[[], float],
    breaks_after: int | None,
) -> None:
    """Send a body: `begin` hears when its head arrives. Nothing arrives from the first moment on at which the line
    `is_cut`; the sender works on to the end all the same. `breaks_after`: so many pieces arrive, and then a break."""
    loop, line_cut, last_s = asyncio.get_running_loop(), False, 0.0

    def arrive(what: Callable[[], object]) -> None:
        nonlocal line_cut
        line_cut = line_cut or is_cut()
        if not line_cut:
            what()

    def later(what: Callable[[], object]) -> None:
        nonlocal last_s
        last_s = max(last_s, loop.time() + delay_s())
        loop.call_at(last_s, arrive, what)

    def put(piece: bytes | TransportError | None) -> None:
        later(lambda: pieces.put(piece))

    later(begin)
    count, reset = 0, TransportError("reset", pieces._address, "broke")
    try:
        async for piece in body:
            if count == breaks_after:
                put(reset)
            count += 1
            put(bytes(piece))
    except TransportError:
        put(reset)
        return
    finally:
        if (aclose := getattr(body, "aclose", None)) is not None:
            await aclose()
    put(None)
