"""The HTTP face of a node: what it is doing, for people, the command line and monitors; and three requests to it.

Reads go to a `StatusSource`, which answers from memory; no handler blocks the loop. Nothing here decides anything
about training. The API listens on the loopback and has no token yet, so the danger is a web page in the user's browser:
the Host header must name the loopback (DNS rebinding), and a POST needs a header that no form can send.
Paths and keys: DESIGN section 6; every response carries the schema number in `X-P2PNode-Schema`.
"""

from __future__ import annotations

import errno
import html
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec
from aiohttp import web

from overlay.transport import Address
from p2pnode.config import StatusSettings
from p2pnode.config_rules import is_loopback
from p2pnode.errors import ExitCode, UserError
from p2pnode.events import EventRing

SCHEMA = 1
#: The header a POST must carry: a form or an image on a foreign page cannot send it.
POST_HEADER = "X-P2PNode"
#: Bodies are not used; a client may send this many bytes of one all the same.
MAX_BODY_BYTES = 4096
#: Most entries one request for steps or events gets.
MAX_LIMIT = 2000
#: Longest long-poll, in seconds; proxies and clients tend to give up at 60.
MAX_WAIT_S = 60.0
#: Seconds a request in progress gets to end when the server closes.
CLOSE_S = 1.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class StatusSource(Protocol):
    """What the server asks of the daemon. Every call returns at once, from memory, on the loop's thread."""

    @property
    def events(self) -> EventRing: ...

    def status(self) -> dict[str, Any]:
        """The keys of DESIGN section 6; `schema` is added where it is missing."""
        ...

    def peers(self) -> list[dict[str, Any]]: ...

    def steps(self, limit: int) -> list[dict[str, Any]]:
        """The last `limit` steps, oldest first."""
        ...

    def ready(self) -> tuple[bool, str]:
        """Whether the node has joined and trains, and a sentence that says why not."""
        ...

    def leave(self) -> None:
        """Ask the node to leave; returns before it has."""
        ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class StatusServer:
    """Serves a source at `[status]`. `start` once, `stop` once."""

    def __init__(self, source: StatusSource, settings: StatusSettings) -> None:
        self._source = source
        self._settings = settings
        self._runner: web.AppRunner | None = None
        self._closing = False

    async def start(self) -> Address:
        """Listen; returns the bound address, its port never 0. Raises `UserError` (exit code 6)."""
        listener = _listen(self._settings.host, self._settings.port)
        try:
            application = web.Application(middlewares=[_answer_in_json, _guard], client_max_size=MAX_BODY_BYTES)
            application.add_routes(self._routes())
            self._runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=CLOSE_S)
            await self._runner.setup()
            await web.SockSite(self._runner, listener).start()
        except BaseException:
            listener.close()
            await self.stop()
            raise
        host, port = listener.getsockname()[:2]
        return Address(host, port)

    async def stop(self) -> None:
        """Release those who wait for events, end connections, close the port; idempotent."""
        self._closing = True
        self._source.events.wake()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self._page),
            web.get("/status", self._status),
            web.get("/peers", self._peers),
            web.get("/steps", self._steps),
            web.get("/events", self._events),
            web.get("/healthz", self._healthz),
            web.get("/readyz", self._readyz),
            web.post("/leave", self._leave),
            web.post("/pause", self._pause),
            web.post("/resume", self._resume),
        ]

    async def _status(self, _: web.Request) -> web.Response:
        return _json({"schema": SCHEMA, **self._source.status()})

    async def _peers(self, _: web.Request) -> web.Response:
        return _json(self._source.peers())

    async def _steps(self, request: web.Request) -> web.Response:
        return _json(self._source.steps(_number(request, "limit", 100, 1, MAX_LIMIT)))

    async def _events(self, request: web.Request) -> web.Response:
        since = _number(request, "since", 0, 0, 1 << 62)
        limit = _number(request, "limit", MAX_LIMIT, 1, MAX_LIMIT)
        timeout_s = _seconds(request, "timeout", 0.0, MAX_WAIT_S)
        if timeout_s and not self._closing:
            await self._source.events.wait_newer(since, timeout_s)
        page = self._source.events.since(since, limit)
        return _json({"schema": SCHEMA, "events": page.events, "dropped": page.dropped, "last": page.last})

    async def _healthz(self, _: web.Request) -> web.Response:
        return _json({"schema": SCHEMA, "alive": True})

    async def _readyz(self, _: web.Request) -> web.Response:
        ready, reason = self._source.ready()
        return _json({"schema": SCHEMA, "ready": ready, "reason": reason}, status=200 if ready else 503)

    async def _leave(self, _: web.Request) -> web.Response:
        self._source.leave()
        return _json({"schema": SCHEMA, "accepted": "leave"}, status=202)

    async def _pause(self, _: web.Request) -> web.Response:
        self._source.pause()
        return _json({"schema": SCHEMA, "accepted": "pause"}, status=202)

    async def _resume(self, _: web.Request) -> web.Response:
        self._source.resume()
        return _json({"schema": SCHEMA, "accepted": "resume"}, status=202)

    async def _page(self, _: web.Request) -> web.Response:
        summary = html.escape(str(self._source.status().get("summary", "")))
        reads = "".join(f'<li><a href="{path}">{path}</a> {what}</li>' for path, what in _READS)
        text = _PAGE.format(summary=summary, reads=reads)
        response = web.Response(text=text, content_type="text/html", headers=_HEADERS)
        response.headers["Content-Security-Policy"] = "default-src 'none'; style-src 'unsafe-inline'"
        return response


_READS = [
    ("/status", "what this node is doing"),
    ("/peers", "whom it knows"),
    ("/steps", "the last steps; <code>?limit=</code>"),
    ("/events", "numbered events; <code>?since=&amp;timeout=&amp;limit=</code>"),
    ("/healthz", "the process lives"),
    ("/readyz", "it has joined and trains"),
]

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>p2pnode</title>
<style>body {{ font: 1rem/1.5 sans-serif; max-width: 40rem; margin: 2rem auto; padding: 0 1rem }}</style>
<h1>p2pnode</h1><p>{summary}</p><ul>{reads}</ul>
<p>POST <code>/leave</code>, <code>/pause</code>, <code>/resume</code> with the header <code>X-P2PNode: 1</code>;
or <code>p2pnode leave</code>, <code>pause</code>, <code>resume</code>.</p></html>
"""

_HEADERS = {
    "X-P2PNode-Schema": str(SCHEMA),
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}


def _json(value: Any, *, status: int = 200) -> web.Response:
    body = msgspec.json.encode(value, enc_hook=str)
    return web.Response(body=body, status=status, content_type="application/json", headers=_HEADERS)


def _refuse(status: int, error: str, hint: str = "") -> web.Response:
    return _json({"schema": SCHEMA, "error": error, "hint": hint}, status=status)


@web.middleware
async def _answer_in_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors in the same form as answers; a fault of ours is reported without its innards."""
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
        return _refuse(500, f"{type(error).__name__} while answering {request.path}", "the node's log has more")


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    host = request.headers.get("Host", "")
    if not is_loopback(_host_name(host)):
        return _refuse(403, f"the Host header {host!r} does not name this machine", "ask for 127.0.0.1 or localhost")
    if (request.content_length or 0) > MAX_BODY_BYTES:
        return _refuse(413, f"a body of {request.content_length} bytes is more than {MAX_BODY_BYTES}")
    if request.method not in ("GET", "HEAD"):
        origin = request.headers.get("Origin")
        if origin is not None and origin != f"http://{host}":
            return _refuse(403, f"a page of {origin} may not steer this node")
        if POST_HEADER not in request.headers:
            return _refuse(403, f"{request.method} needs the header {POST_HEADER}: 1", "it keeps foreign pages out")
    return await handler(request)


def _host_name(header: str) -> str:
    """The name in a Host header, without port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()


class _BadQuery(Exception):
    """A query parameter that cannot be used; the text says which and what is allowed."""


def _number(request: web.Request, name: str, default: int, low: int, high: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and low <= int(text)):
        raise _BadQuery(f"{name} = {text[:40]!r} is not a whole number from {low} up")
    return min(int(text), high)


def _seconds(request: web.Request, name: str, default: float, high: float) -> float:
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:  # also NaN
        raise _BadQuery(f"{name} = {text[:40]!r} is not a number of seconds")
    return min(value, high)


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. Made here and not by aiohttp, so that a port in use is told apart from everything else."""
    literal = "127.0.0.1" if host == "localhost" else host
    family = socket.AF_INET6 if ":" in literal else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((literal, port))
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _cannot_listen(Address(literal, port), error) from None
    return listener


def _cannot_listen(address: Address, error: OSError) -> UserError:
    where = f"the status API cannot listen on {address}"
    if error.errno == errno.EADDRINUSE:
        return UserError(
            f"{where}: the port is in use",
            f"another node or program holds it (`p2pnode status --address {address}` tells whether it is a node); "
            "choose another with --status-port, or 0 for a free one",
            ExitCode.CANNOT_BIND,
        )
    if error.errno == errno.EACCES:
        hint = "ports below 1024 need privileges: choose another with --status-port"
    else:
        hint = "check status.host and status.port"
    return UserError(f"{where}: {error.strerror or error}", hint, ExitCode.CANNOT_BIND)
