"""One direction of a stream on the simulated network: ordered, with a bounded number of chunks on the way."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.transport import Buffer, TransportError
from tests.harness.network.line import PIECE_BYTES, Line

if TYPE_CHECKING:
    from tests.harness.network.streams import Stream

#: Chunks sent and not yet taken by the reader; the writer waits beyond that.
WINDOW = 8


class Pipe:
    """One direction of a stream: things arrive in the order they were sent. Its far end is an iterator of the body."""

    def __init__(self, stream: Stream, source: Address, target: Address, silence_s: float) -> None:
        self.network = stream.network
        self.source = source
        self.target = target
        self.ended = False
        self._stream = stream
        self._silence_s = silence_s
        self._era = 0
        self._dead = False
        self._busy_until = 0.0
        self._last_arrival = 0.0
        self._held: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._flying = 0
        self._discards = False
        self._room: asyncio.Future[None] | None = None
        self._chunks: deque[tuple[Buffer, int]] = deque()
        #: Bytes written at the near end, and arrived at the far end.
        self.written_bytes = 0
        self.received_bytes = 0
        self._reader: asyncio.Future[None] | None = None
        self.error: Exception | None = None

    # -- the near end

    def send(self, arrive: Callable[..., None], *args: Any, size: int = 0, after: float = 0.0) -> None:
        """Have `arrive(*args)` called at the far end, after everything sent before."""
        if self._dead:
            return
        network = self.network
        self._count(size, 0)
        if lines := network.lines_between(self.source, self.target):
            pieces = [PIECE_BYTES] * (size // PIECE_BYTES) + [size % PIECE_BYTES]
            for piece in pieces[:-1]:
                self._pass(lines, self._era, piece, after, None, ())
            self._pass(lines, self._era, pieces[-1], after, arrive, args)
            network.traffic.bytes += size
            return
        ready = network.loop.time() + after
        if network.bandwidth is not None:
            ready = self._busy_until = max(ready, self._busy_until) + size / network.bandwidth
        # Strictly later: the loop's heap does not keep the order of timers for the same moment.
        after_last = math.nextafter(self._last_arrival, math.inf)
        arrival = max(after_last, ready + network.draw_delay(self.source, self.target))
        self._last_arrival = arrival
        network.traffic.bytes += size
        network.loop.call_at(arrival, self._arrive, self._era, size, arrive, args)

    def _pass(
        self, lines: list[Line], era: int, size: int, after: float, arrive: Callable[..., None] | None, args: Any
    ) -> None:
        """Send one piece through the lines; the propagation delay is that of the network."""
        network = self.network

        def fly() -> None:
            after_last = math.nextafter(self._last_arrival, math.inf)
            delay_s = network.draw_delay(self.source, self.target) + after
            arrival = self._last_arrival = max(after_last, network.loop.time() + delay_s)
            network.loop.call_at(arrival, land)

        def land() -> None:
            if len(lines) > 1:
                lines[1].carry(self, size, partial(self._arrive, era, size, arrive, args))
            else:
                self._arrive(era, size, arrive, args)

        lines[0].carry(self, size, fly)

    def _count(self, written: int, arrived: int) -> None:
        self.written_bytes += written
        self.received_bytes += arrived
        if arrived and (receiver := self._stream.receiver_of(self)) is not None:
            receiver.received_bytes += arrived
        if (sender := self._stream.sender_of(self)) is not None:
            sender.written_bytes += written
            sender.arrived_bytes += arrived
            sender.queued[self] = self.written_bytes - self.received_bytes
            if sender.queued[self] <= 0:
                del sender.queued[self]

    async def write(self, chunk: Buffer, silence_s: float | None = None) -> None:
        """Send one chunk of the body when the window allows it; the chunk may be reused when this returns."""
        while self._flying >= WINDOW and not self._discards:
            self._room = self.network.loop.create_future()
            began_s = self.network.loop.time()
            while not self._room.done():
                heard_s = max(began_s, self._stream.heard_s)
                left_s = None if silence_s is None else heard_s + silence_s - self.network.loop.time()
                if left_s is not None and left_s <= 1e-6:
                    self.error = TransportError("timeout", self.target, f"took nothing for {silence_s} s")
                    raise self.error
                await asyncio.wait([self._room], timeout=left_s)
        if self._discards:
            return
        self._flying += 1
        copied_chunk = copied(chunk)
        self.send(self._push, copied_chunk, 1, size=len(copied_chunk))

    def finish(self) -> None:
        self.send(self.end)

    def break_off(self, farewell: Callable[..., None] | None, *args: Any) -> None:
        """What is on the way vanishes, as does what is sent from now on; only `farewell` still arrives."""
        self._era += 1
        self._held.clear()
        self.drop_unsent()
        if farewell is not None:
            self.send(farewell, *args)
        self._dead = True

    def drop_unsent(self) -> None:
        """What has not arrived yet never will."""
        for line in self.network.lines_between(self.source, self.target):
            line.drop(self)
        self._count(self.received_bytes - self.written_bytes, 0)

    def discard(self) -> None:
        """The reader is gone: let the writer continue, and drop what it writes."""
        self._discards = True
        self._wake_writer()

    # -- on the way

    def _arrive(self, era: int, size: int, arrive: Callable[..., None] | None, args: tuple[Any, ...]) -> None:
        if era != self._era:
            return
        if self._held or self.network.stream_held(self.source, self.target):
            self._held.append((self._land, (size, arrive, args)))
            self.network.hold(self)
        else:
            self._land(size, arrive, args)

    def _land(self, size: int, arrive: Callable[..., None] | None, args: tuple[Any, ...]) -> None:
        if size:
            self._count(0, min(size, self.written_bytes - self.received_bytes))
        if arrive is not None:
            arrive(*args)
        else:
            self._stream.hear()

    def release(self) -> None:
        """The way is open again (unless it was closed meanwhile): what was held up arrives now."""
        while self._held:
            if self.network.stream_held(self.source, self.target):
                self.network.hold(self)
                return
            arrive, args = self._held.popleft()
            arrive(*args)

    # -- the far end

    def fill(self, chunks: tuple[Buffer, ...]) -> None:
        """A whole small body has arrived."""
        for chunk in chunks:
            self._push(chunk, 0)
        self.end()

    def _push(self, chunk: Buffer, counts: int) -> None:
        self._stream.hear()
        random = self.network.random
        if len(chunk) > 1 and self.network.fragment and random.random() < self.network.fragment:
            cut = random.randrange(1, len(chunk))
            self._chunks.append((chunk[:cut], 0))
            chunk = chunk[cut:]
        self._chunks.append((chunk, counts))
        self._wake_reader()

    def end(self) -> None:
        self.ended = True
        self._wake_reader()

    def fail(self, error: Exception) -> None:
        """The reader gets `error` after what has arrived already."""
        if self.error is None and not self.ended:
            self.error = error
        self._wake_reader()

    def close(self) -> None:
        """The reader has left its block."""
        self._chunks.clear()
        self.fail(TransportError("closed", self.source, "was left before its body was read"))

    def __aiter__(self) -> Pipe:
        return self

    async def __anext__(self) -> Buffer:
        while not self._chunks:
            if self.error is not None:
                raise self.error
            if self.ended:
                raise StopAsyncIteration
            await self._arrival()
        chunk, counts = self._chunks.popleft()
        if counts:
            self._flying -= counts
            self._stream.hear()
            self._wake_writer()
        return chunk

    async def _arrival(self) -> None:
        loop = self.network.loop
        self._reader = loop.create_future()
        self._timer = loop.call_later(self._silence_s, self._check_silence, loop.time())
        try:
            await self._reader
        finally:
            self._timer.cancel()
            self._reader = None

    def _check_silence(self, began_s: float) -> None:
        """Nothing has arrived for the reader: has anything moved, in either direction?"""
        loop = self.network.loop
        left_s = max(began_s, self._stream.heard_s) + self._silence_s - loop.time()
        if left_s > 1e-6:
            self._timer = loop.call_later(left_s, self._check_silence, began_s)
        else:
            self.fail(self._silence())

    def _silence(self) -> TransportError:
        return TransportError("timeout", self.source, f"was silent for {self._silence_s:g} s")

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _wake_writer(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)


def copied(chunk: Buffer) -> Buffer:
    """The chunk, copied if its memory may change."""
    return chunk if isinstance(chunk, bytes) else bytes(chunk)
