"""Requests on the simulated network: a stream is two ordered pipes with a bounded number of chunks on the way.

A small request costs three timers (there, back, silence) and one task (the handler). Only a body that is produced while
it is sent gets a task of its own. The rules are those of the real transport. Silence longer than `timeout_s` is a
`timeout`, and a killed end is a `reset`. Leaving the block early cancels the handler. A sender may reuse its buffer
when asked for the next.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.sockets.framing import BodyFailed, BodyWriter, known_size
from p2pnode.overlay.transport import (
    HANDLER_SILENCE_S,
    MAX_HEAD_BYTES,
    Body,
    Buffer,
    ReceivedResponse,
    Request,
    RequestRejected,
    Response,
    SizedBody,
    TransportError,
)
from tests.harness.network.pipe import Pipe, copied

if TYPE_CHECKING:
    from tests.harness.network.network import Network
    from tests.harness.network.transport import MemoryTransport

#: A body given as a list or tuple of at most this many bytes travels with its head.
INLINE_BYTES = 64 * 1024


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
        if (refusal := network.refusal(self.client.address, self.to)) is not None:
            await asyncio.sleep(network.draw_delay(self.client.address, self.to))
            raise refusal
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
            is_relayed = isinstance(error, BodyFailed) and isinstance(error.error, TransportError)
            if self.up.error is None and self.down.error is None and not is_relayed:  # else a stream broke elsewhere
                message = f"the handler of {self._name!r} at {self.to} failed"
                self.network.loop.call_exception_handler({"message": message, "exception": error})
        finally:
            self.up.discard()

    async def _send_reply(self, reply: Response) -> None:
        if len(reply.head) > MAX_HEAD_BYTES:
            problem = f"answered, but announced a head of {len(reply.head)} bytes"
            self.down.send(self._failed, TransportError("foreign", self.to, problem))
            return
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
    return tuple(copied(chunk) for chunk in body if len(chunk))
