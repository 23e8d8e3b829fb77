"""The HTTP API of a node: its status for people, the command line and monitors, and three requests for changes.

Every request passes `p2pnode.status.guard` first. The report then answers from memory, so no handler blocks the loop.
Paths and keys are described at `/openapi.json` (`p2pnode.status.openapi`). Every response carries the schema number in
the header `X-P2PNode-Schema`.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from p2pnode.config.settings import StatusSettings
from p2pnode.errors import ExitCode, P2PNodeError, UserError
from p2pnode.overlay.addresses import Address, is_loopback
from p2pnode.overlay.environment import Clock
from p2pnode.status import CHANGE_HEADER, MAX_LIMIT, SCHEMA, SCHEMA_HEADER
from p2pnode.status.guard import MAX_BODY_BYTES, Guard, Refusal, RequestFacts
from p2pnode.status.live import LiveFeed
from p2pnode.status.pages import HEADERS as FILE_HEADERS
from p2pnode.status.pages import File, read_files
from p2pnode.status.prometheus import CONTENT_TYPE, counter, render
from p2pnode.status.schema import Accepted, Alive, ErrorAnswer, Events, Readiness

if TYPE_CHECKING:
    from p2pnode.status.report import StatusReport

#: Streams held at once, of all clients together: tabs of the dashboard.
MAX_STREAMS = 32
#: Events that a stream begins with, unless it is asked for others.
RECENT_EVENTS = 300
#: A reader of a stream that takes nothing for this long is closed.
WRITE_TIMEOUT_S = 20.0
#: Promise 8: strangers who reach the port cannot take all descriptors of the daemon. One more is closed unread.
MAX_CONNECTIONS = 256
#: A connection that has sent no complete request for this long is closed.
IDLE_TIMEOUT_S = 30.0
#: Seconds a request in progress gets to end when the server closes.
CLOSE_TIMEOUT_S = 1.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class StatusServer:
    """Serves the report of a node at the address of `[status]`. Requests for changes need `token`."""

    def __init__(self, source: StatusReport, settings: StatusSettings, token: str, clock: Clock) -> None:
        self._source = source
        self._settings = settings
        self._guard = Guard(token=token, on_loopback=is_loopback(settings.host), names=settings.names)
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.AbstractServer | None = None
        self._feed = LiveFeed(source, clock)
        self._streams = 0
        self._files: dict[str, File] | None = None
        #: Refused requests by status code, for `/metrics`.
        self._refused: dict[int, int] = {}

    async def start(self) -> Address:
        """Listen; returns the bound address, its port never 0. Raises `UserError` (exit code 6)."""
        host = "127.0.0.1" if self._settings.host == "localhost" else self._settings.host
        where, is_v6 = Address(host, self._settings.port), ":" in host
        try:
            # Bound here: a loop would not take IPv4 at "::".
            listener = socket.create_server(
                where, family=socket.AF_INET6 if is_v6 else socket.AF_INET, backlog=128, dualstack_ipv6=is_v6
            )
        except OSError as error:
            raise _cannot_listen(where, error) from None
        listener.setblocking(False)
        try:
            application = web.Application(middlewares=[_json_errors, self._admit], client_max_size=MAX_BODY_BYTES)
            application.add_routes(self._routes())
            self._runner = web.AppRunner(
                application,
                access_log=None,
                handle_signals=False,
                shutdown_timeout=CLOSE_TIMEOUT_S,
                keepalive_timeout=IDLE_TIMEOUT_S,
                lingering_time=CLOSE_TIMEOUT_S,
            )
            await self._runner.setup()
            self._listener = await asyncio.get_running_loop().create_server(self._connected, sock=listener)
            self._feed.start()
        except BaseException:
            listener.close()
            await self.stop()
            raise
        return Address(*listener.getsockname()[:2])

    async def stop(self) -> None:
        """End connections, and close the port; idempotent."""
        await self._feed.stop()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def _connected(self) -> asyncio.Protocol:
        """The protocol of a new connection: HTTP, or one that closes it if there are too many."""
        server = self._runner.server if self._runner is not None else None
        if server is None or len(server.connections) >= MAX_CONNECTIONS:
            return _ClosedAtOnce()
        return server()

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = self._guard.check(_request_facts(request))
        if refusal is None:
            return await handler(request)
        self._refused[refusal.status] = self._refused.get(refusal.status, 0) + 1
        return _refused(refusal)

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self._file),
            web.get("/swarm", self._file),
            web.get("/static/{name}", self._file),
            web.get("/history", self._history),
            web.get("/stream", self._stream),
            web.get("/status", self._status),
            web.get("/peers", self._peers),
            web.get("/steps", self._steps),
            web.get("/events", self._events),
            web.get("/metrics", self._metrics),
            web.get("/healthz", self._healthz),
            web.get("/readyz", self._readyz),
            web.get("/openapi.json", self._openapi),
            *(web.post(path, self._change) for path in ("/leave", "/pause", "/resume")),
        ]

    async def _status(self, _: web.Request) -> web.Response:
        return _json(self._source.status())

    async def _peers(self, _: web.Request) -> web.Response:
        return _json(self._source.peers())

    async def _steps(self, request: web.Request) -> web.Response:
        return _json(self._source.steps(_number_parameter(request, "limit", 100, 1, MAX_LIMIT)))

    async def _events(self, request: web.Request) -> web.Response:
        since = _number_parameter(request, "since", 0, 0, 1 << 62)
        limit = _number_parameter(request, "limit", MAX_LIMIT, 1, MAX_LIMIT)
        page = self._source.events.since(since, limit)
        return _json(Events(schema=SCHEMA, events=page.events, dropped=page.dropped, last=page.last))

    async def _healthz(self, _: web.Request) -> web.Response:
        return _json(Alive(schema=SCHEMA, alive=True))

    async def _metrics(self, _: web.Request) -> web.Response:
        refused = {str(status): count for status, count in sorted(self._refused.items())}
        own = counter("p2pnode_http_refused_total", "Requests to this API that were refused.", status=refused)
        return web.Response(
            body=render([*self._source.metrics(), own]).encode(), headers=_HEADERS | {"Content-Type": CONTENT_TYPE}
        )

    async def _openapi(self, _: web.Request) -> web.Response:
        from p2pnode.status.openapi import description  # costs memory that most nodes never need

        return _json(description())

    async def _readyz(self, request: web.Request) -> web.Response:
        ready, reason = self._source.ready()
        if not self._guard.is_authenticated(_request_facts(request)):
            reason = ""
        return _json(Readiness(schema=SCHEMA, ready=ready, reason=reason), status=200 if ready else 503)

    async def _change(self, request: web.Request) -> web.Response:
        changes = {"/leave": self._source.leave, "/pause": self._source.pause, "/resume": self._source.resume}
        changes[request.path]()
        return _json(Accepted(schema=SCHEMA, accepted=request.path.removeprefix("/")), status=202)

    async def _history(self, _: web.Request) -> web.Response:
        # 200 KB, less than half of it in gzip; aiohttp compresses as much in a thread.
        response = _json(self._feed.history())
        response.enable_compression()
        return response

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events until the reader goes or the node ends: `update` once a second, and new `events`."""
        recent = max(0, self._source.events.last - RECENT_EVENTS)
        since = _number_parameter(request, "since", recent, 0, 1 << 62)
        if self._streams >= MAX_STREAMS:
            error = f"{MAX_STREAMS} streams are open already"
            return _refused(Refusal(429, error, "close another page of the dashboard", retry_s=5.0))
        response = web.StreamResponse(headers=_HEADERS | {"Content-Type": "text/event-stream"})
        self._streams += 1
        try:
            await response.prepare(request)
            message: bytes | None = self._feed.now()
            while message is not None:
                page = self._source.events.since(since, MAX_LIMIT)
                since = page.last
                text = _sent("update", message)
                if page.events or page.dropped:
                    answer = Events(schema=SCHEMA, events=page.events, dropped=page.dropped, last=page.last)
                    text += _sent("events", msgspec.json.encode(answer, enc_hook=str))
                # A reader that takes nothing for so long holds memory and a place.
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await response.write(text)
                message = await self._feed.next()
            await response.write(_sent("end", b"{}"))
        except ConnectionError:
            return response  # the reader has gone
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            return response
        finally:
            self._streams -= 1
        return response

    async def _file(self, request: web.Request) -> web.Response:
        if self._files is None:
            self._files = await asyncio.to_thread(read_files)
        file = self._files.get(request.path)
        if file is None:
            raise web.HTTPNotFound
        headers = FILE_HEADERS | {"ETag": file.tag, "Content-Type": file.content_type, SCHEMA_HEADER: str(SCHEMA)}
        if request.headers.get("If-None-Match") == file.tag:
            return web.Response(status=304, headers=headers)
        response = web.Response(body=file.body, headers=headers)
        response.enable_compression()
        return response


_HEADERS = {
    SCHEMA_HEADER: str(SCHEMA),
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}


def _sent(event: str, data: bytes) -> bytes:
    """One server-sent event; JSON has no line breaks."""
    return b"event: %b\ndata: %b\n\n" % (event.encode(), data)


def _json(value: Any, *, status: int = 200) -> web.Response:
    body = msgspec.json.encode(value, enc_hook=str)
    return web.Response(body=body, status=status, content_type="application/json", headers=_HEADERS)


def _refuse(status: int, error: str, hint: str = "") -> web.Response:
    return _json(ErrorAnswer(schema=SCHEMA, error=error, hint=hint), status=status)


def _refused(refusal: Refusal) -> web.Response:
    response = _refuse(refusal.status, refusal.error, refusal.hint)
    if refusal.retry_s:
        response.headers["Retry-After"] = str(math.ceil(refusal.retry_s))
    if refusal.challenge:
        response.headers["WWW-Authenticate"] = 'Bearer realm="p2pnode"'
    return response


def _request_facts(request: web.Request) -> RequestFacts:
    """What the guard decides by."""
    headers = request.headers
    return RequestFacts(
        method=request.method,
        path=request.path,
        host=headers.get("Host", ""),
        origin=headers.get("Origin"),
        authorization=headers.get("Authorization"),
        has_change_header=CHANGE_HEADER in headers,
        has_body=request.body_exists,
        body_bytes=request.content_length,
    )


class _ClosedAtOnce(asyncio.Protocol):
    """Closes a surplus connection before anything is read."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


@web.middleware
async def _json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn errors into JSON answers; an unexpected error reveals only its type."""
    try:
        return await handler(request)
    except _BadQuery as error:
        return _refuse(400, str(error))
    except web.HTTPNotFound:
        return _refuse(404, f"there is no {request.path}", "GET / lists what there is")
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        response = _refuse(405, f"{request.path} does not take {request.method}", f"it takes {allowed}")
        response.headers["Allow"] = allowed
        return response
    except web.HTTPException as error:
        return _refuse(error.status, error.reason)
    except Exception as error:
        request.app.logger.exception("a request of the status API failed: %s", request.path)
        return _refuse(500, f"{type(error).__name__} while answering {request.path}", "see the node's log")


class _BadQuery(P2PNodeError):
    """A query parameter is not usable; the text names it and what is allowed."""


def _number_parameter(request: web.Request, name: str, default: int, low: int, high: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and low <= int(text)):
        raise _BadQuery(f"{name} = {text[:40]!r} is not a whole number from {low} up")
    return min(int(text), high)


def _cannot_listen(address: Address, error: OSError) -> UserError:
    where = f"the status API cannot listen on {address}"
    if error.errno == errno.EADDRINUSE:
        return UserError(
            f"{where}: the port is in use",
            f"another node or program holds it (`p2pnode status --address {address}` shows whether it is a node); "
            "choose another with --status-port, or 0 for a free one",
            ExitCode.CANNOT_BIND,
        )
    if error.errno == errno.EACCES:
        hint = "ports below 1024 need privileges: choose another with --status-port"
    else:
        hint = "check status.host and status.port"
    reason = os.strerror(error.errno) if error.errno else error
    return UserError(f"{where}: {reason}", hint, ExitCode.CANNOT_BIND)
