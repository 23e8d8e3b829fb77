"""Access control of the HTTP API: one decision per request, from plain facts.

Pure. The server passes the facts and the token in; the result is None or a refusal. Three attackers are kept out. A web
page that the user visits fails by Host, by Origin, and by a header that no form can send. A DNS name rebound to the
loopback fails by Host. Another user of the machine lacks the token that every change needs. On an address other than
the loopback everything but the two health checks and the files of the dashboard needs the token, whose 256 bits cannot
be guessed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass

from p2pnode.overlay.addresses import is_literal, is_loopback
from p2pnode.status import CHANGE_HEADER

#: Bodies are not used, but a client may send one of this size.
MAX_BODY_BYTES = 4096
#: Health checks for supervisors without a token: `/healthz` reveals nothing, `/readyz` leaves its reason out.
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
#: The dashboard's pages and scripts contain nothing about the node: a browser loads them, and then asks for the token.
OPEN_PAGES = frozenset({"/", "/swarm"})
OPEN_FOLDER = "/static/"

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:\s/@]+))(?::\d{1,5})?")


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What the guard decides by. Absent headers are None."""

    method: str
    path: str
    host: str
    origin: str | None
    authorization: str | None
    has_change_header: bool
    has_body: bool
    body_bytes: int | None

    @property
    def changes(self) -> bool:
        """Whether the method is anything but a plain read."""
        return self.method not in ("GET", "HEAD")


@dataclass(frozen=True, slots=True)
class Refusal:
    """The error that is answered instead. `retry_s` is set with status 429, `challenge` with 401."""

    status: int
    error: str
    hint: str = ""
    retry_s: float = 0.0
    challenge: bool = False


class Guard:
    """Checks the requests to one listening address."""

    def __init__(self, *, token: str, on_loopback: bool, names: Sequence[str] = ()) -> None:
        """`names`: DNS names that a Host header may contain, besides addresses."""
        self._digest = _digest(token)
        self._on_loopback = on_loopback
        self._names = frozenset(name.lower() for name in names)

    def is_authenticated(self, request: RequestFacts) -> bool:
        """Whether the client may read everything: it is on the loopback, or has the token."""
        return self._on_loopback or self._has_token(request)

    def check(self, request: RequestFacts) -> Refusal | None:
        """None lets the request through."""
        return self._check_sender(request) or _check_body(request) or self._check_rights(request)

    def _check_sender(self, request: RequestFacts) -> Refusal | None:
        name = host_name(request.host)
        if not self._names_this_node(name):
            shown = request.host[:80]
            if self._on_loopback:
                return Refusal(
                    403, f"the Host header {shown!r} does not name this machine", "ask for 127.0.0.1 or localhost"
                )
            hint = "ask for the address itself, or list the name in status.names"
            return Refusal(403, f"the Host header {shown!r} is no name of this node", hint)
        if request.origin is not None and not self._same_origin(request.origin, request.host, name):
            hint = "only pages of this node itself may use it"
            return Refusal(403, f"a page of {request.origin[:80]} may not use this node's API", hint)
        return None

    def _names_this_node(self, name: str) -> bool:
        if is_loopback(name) or name in self._names:
            return True
        # An IP address cannot be rebound. On the loopback no legitimate client uses another one.
        return not self._on_loopback and is_literal(name)

    def _same_origin(self, origin: str, host: str, name: str) -> bool:
        # Behind a TLS proxy the page is https; the proxy's name is then in `names`.
        return origin == f"http://{host}" or (name in self._names and origin == f"https://{host}")

    def _check_rights(self, request: RequestFacts) -> Refusal | None:
        if request.changes and not request.has_change_header:
            error = f"{request.method} needs the header {CHANGE_HEADER}: 1"
            return Refusal(403, error, "it keeps other sites' pages out")
        if not request.changes and (self._on_loopback or is_open(request.path)):
            return None
        if self._has_token(request):
            return None
        wanted = "changes to the node need" if request.changes else "beyond the loopback every request needs"
        problem = "the token is not this node's" if request.authorization is not None else f"{wanted} a token"
        hint = (
            "send the header Authorization: Bearer TOKEN with the content of status.token in the node's state "
            "directory; `p2pnode` does so by itself where it may read that file, or with --token-file"
        )
        return Refusal(401, problem, hint, challenge=True)

    def _has_token(self, request: RequestFacts) -> bool:
        scheme, _, given = (request.authorization or "").partition(" ")
        # Digests have equal length and are compared in constant time: neither length nor prefix of the token leaks.
        return scheme.lower() == "bearer" and hmac.compare_digest(_digest(given.strip()), self._digest)


def _check_body(request: RequestFacts) -> Refusal | None:
    if request.body_bytes is None and request.has_body:
        return Refusal(411, "a body without a Content-Length is not read", "send no body: none is needed")
    if (request.body_bytes or 0) > MAX_BODY_BYTES:
        return Refusal(413, f"a body of {request.body_bytes} bytes is more than {MAX_BODY_BYTES}")
    return None


def is_open(path: str) -> bool:
    """Whether reading this path needs no token anywhere."""
    return path in OPEN_PATHS or path in OPEN_PAGES or path.startswith(OPEN_FOLDER)


def host_name(header: str) -> str:
    """The name in a Host header, without port and brackets, in lower case; empty if the header is malformed."""
    found = _HOST.fullmatch(header)
    return "" if found is None else (found[1] or found[2]).lower()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
