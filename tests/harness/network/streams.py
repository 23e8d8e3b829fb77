"""Requests on the simulated network: a stream is two ordered pipes with a bounded number of chunks on the way.

A small request costs three timers (there, back, silence) and one task (the handler). Only a body that is produced while
it is sent gets a task of its own. The rules are those of the real transport. Silence longer than `timeout_s` is a
`timeout`, and a killed end is a `reset`. Leaving the block early cancels the handler. A sender may reuse its buffer
when asked for the next.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from overlay.addresses import Address
from overlay.sockets.framing import BodyFailed, BodyWriter, known_size
from overlay.transport import (
    HANDLER_SILENCE_S,
    Body,
    Buffer,
    ReceivedResponse,
    Request,
    RequestRejected,
    Response,
    SizedBody,
    TransportError,
)
from tests.harness.network.line import PIECE_BYTES, Line

if TYPE_CHECKING:
    from tests.harness.network.network import MemoryTransport, Network

#: Chunks sent and not yet taken by the reader; the writer waits beyond that.
WINDOW = 8
#: A body given as a list or tuple of at most this many bytes travels with its head.
INLINE_BYTES = 64 * 1024


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
        lasting_chunk = lasting(chunk)
        self.send(self._push, lasting_chunk, 1, size=len(lasting_chunk))

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


class Stream:
    """One request from its connecting to the end of its answer."""

    def __init__(
        self, client: MemoryTransport, to: Address, name: str, head: bytes, body: Body, timeout_s: float
    ) -> None:
        self.network: Network = client.network
        self.client = client
        self.to = to
        self.server: MemoryTransport | None = None
        self.handler: asyncio.Task[None] | None = None
        self.up = Pipe(self, client.address, to, HANDLER_SILENCE_S)
        self.down = Pipe(self, to, client.address, timeout_s)
        self._name = name
        self._head = head
        self._body = body
        self._timeout_s = timeout_s
        #: When something last moved, in either direction, and when the peer began to respond.
        self.heard_s = 0.0
        self._waited_s = 0.0
        self._answer: asyncio.Future[bytes] = self.network.loop.create_future()
        self._sender: asyncio.Task[None] | None = None
        self._watch: asyncio.TimerHandle | None = None

    # -- the client's side

    async def ask(self) -> ReceivedResponse:
        network = self.network
        network.traffic.requests += 1
        self.client.streams[self] = True
        self.hear()
        self._watch = network.loop.call_later(self._timeout_s, self._check_silence)
        small = inline(self._body)
        if isinstance(self._body, SizedBody):
            self._body.track(lambda: self.up.received_bytes)
        size = len(self._head) + sum(map(len, small or ()))
        there, back = network.draw_delay(self.client.address, self.to), network.draw_delay(self.to, self.client.address)
        self.up.send(self._opened, small, size=size, after=there + back)
        if small is None:
            self._sender = network.loop.create_task(self._send_body(), name=f"body-{self._name}")
        return ReceivedResponse(await self._answer, self.down, waited_s=self._waited_s)

    def hear(self) -> None:
        self.heard_s = self.network.loop.time()

    def sender_of(self, pipe: Pipe) -> MemoryTransport | None:
        """Who writes into a pipe; None while nobody has accepted the request."""
        return self.client if pipe is self.up else self.server

    def receiver_of(self, pipe: Pipe) -> MemoryTransport | None:
        """Who reads from a pipe; None while nobody has accepted the request."""
        return self.server if pipe is self.up else self.client

    def _check_silence(self) -> None:
        if self._answer.done():
            return
        left_s = self.heard_s + self._timeout_s - self.network.loop.time()
        if left_s > 1e-6:
            self._watch = self.network.loop.call_later(left_s, self._check_silence)
        else:
            self._failed(TransportError("timeout", self.to, f"did not answer for {self._timeout_s:g} s"))

    async def _send_body(self) -> None:
        body = BodyWriter(self._body)
        try:
            while (chunk := await body.next()) is not None:
                await self.up.write(chunk)
            self.up.finish()
        except BodyFailed as failure:  # the caller's own iterator: its error is the caller's to see
            self._failed(failure.error)
            self.up.send(self._abandoned)
        finally:
            await body.close()

    def _answered(self, head: bytes, small: tuple[Buffer, ...] | None) -> None:
        self._waited_s = self.network.loop.time() - self.heard_s
        self.hear()
        if small is not None:
            self.down.fill(small)
        if not self._answer.done():
            self._answer.set_result(head)

    def _failed(self, error: Exception) -> None:
        if not self._answer.done():
            self._answer.set_exception(error)
        self.down.fail(error)

    async def leave(self) -> None:
        """The caller has left its block: free everything, and notify the server if it is not done."""
        if self._watch is not None:
            self._watch.cancel()
        complete = self.down.ended
        self.up.drop_unsent()
        self.down.drop_unsent()
        self.down.close()
        self.down.discard()
        self.client.streams.pop(self, None)
        if self.server is not None:
            self.server.streams.pop(self, None)
        if not complete:
            self.up.send(self._abandoned)
        if self._answer.done() and not self._answer.cancelled():
            self._answer.exception()  # retrieved, so that asyncio does not log it
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)

    # -- the server's side

    def _opened(self, small: tuple[Buffer, ...] | None) -> None:
        if self.network.answers_nothing(self.to, self.client.address):
            return
        server = self.network.serves(self.to)
        if server is None or server.on_request is None:
            self.down.send(
                self._failed, TransportError("refused", self.to, "refused the connection: no process listens")
            )
            return
        self.server = server
        server.streams[self] = True
        if small is not None:
            self.up.fill(small)
        source = Address(self.network.host_seen(self.client.address, self.to), self.network.stream_port())
        incoming = Request(self._name, source, self._head, self.up)
        self.handler = self.network.loop.create_task(
            self._serve(server, incoming), name=f"handle-{self._name}", context=server.context
        )
        server.handlers[self.handler] = True
        self.handler.add_done_callback(lambda task: server.handlers.pop(task, None))

    async def _serve(self, server: MemoryTransport, incoming: Request) -> None:
        assert server.on_request is not None
        try:
            try:
                reply = await server.on_request(incoming)
            except RequestRejected as rejection:
                self.down.send(self._failed, TransportError("rejected", self.to, str(rejection)))
                return
            await self._send_reply(reply)
        except Exception as error:
            self.down.send(self._failed, TransportError("reset", self.to, "broke the stream"))
            if self.up.error is None and self.down.error is None:  # otherwise it only noticed that the stream broke
                message = f"the handler of {self._name!r} at {self.to} failed"
                self.network.loop.call_exception_handler({"message": message, "exception": error})
        finally:
            self.up.discard()

    async def _send_reply(self, reply: Response) -> None:
        small = inline(reply.body)
        if small is not None:
            self.down.send(self._answered, reply.head, small, size=len(reply.head) + sum(map(len, small)))
            return
        self.down.send(self._answered, reply.head, None, size=len(reply.head))
        body = BodyWriter(reply.body)
        try:
            while (chunk := await body.next()) is not None:
                await self.down.write(chunk, HANDLER_SILENCE_S)
            self.down.finish()
        finally:
            await body.close()

    def _abandoned(self) -> None:
        self.up.fail(TransportError("reset", self.client.address, "broke the stream"))
        self.down.discard()
        if self.handler is not None:
            self.handler.cancel()

    # -- either side

    def end_of(self, transport: MemoryTransport, *, notify: bool) -> None:
        """The process of `transport` is gone, or is closed; the other end is notified if `notify`."""
        if transport is self.client:
            self.up.break_off(self._abandoned if notify else None)
            self._failed(TransportError("closed", self.to, "did not answer before the transport of this node closed"))
        if transport is self.server:
            self.down.break_off(self._failed if notify else None, TransportError("reset", self.to, "broke the stream"))


class StreamRequest:
    """What `MemoryTransport.request` returns: the `async with` around one `Stream`."""

    def __init__(
        self, client: MemoryTransport, to: Address, name: str, head: bytes, body: Body, timeout_s: float
    ) -> None:
        self._client = client
        self._to = to
        self._what = (name, head, body, timeout_s)
        self._stream: Stream | None = None

    async def __aenter__(self) -> ReceivedResponse:
        if not self._client.is_open:
            await BodyWriter(self._what[2]).close()
            raise self._client.closed_error(self._to)
        self._stream = Stream(self._client, self._to, *self._what)
        try:
            return await self._stream.ask()
        except BaseException:
            await self._stream.leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        assert self._stream is not None
        await self._stream.leave()


def inline(body: Body) -> tuple[Buffer, ...] | None:
    """A small body that stands already, copied; None where it has to flow."""
    size = known_size(body)
    if size is None or size > INLINE_BYTES or not isinstance(body, list | tuple):
        return None
    return tuple(lasting(chunk) for chunk in body if len(chunk))


def lasting(chunk: Buffer) -> Buffer:
    """The chunk, copied if its memory may change."""
    return chunk if isinstance(chunk, bytes) else bytes(chunk)
