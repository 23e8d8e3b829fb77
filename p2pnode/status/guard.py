"""Who may ask what of the HTTP API: one decision per request, from plain facts.

Pure. The server brings the facts, the clock and the token; the answer is None or a refusal. It defends against four
parties: a web page that the user visits (Host, Origin, and a header that no form can send), a name made to point at
the loopback (Host: DNS rebinding), another user of the machine (the token, for everything that changes state), and
somebody who only wants the node to be busy (rates). On an address other than the loopback everything but the two
health checks needs the token.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from overlay.addresses import is_literal, is_loopback
from overlay.rate_limits import RateLimit, RateLimiter
from p2pnode.status.limits import CHANGE_HEADER

#: Bodies are not used; a client may send this many bytes of one all the same.
MAX_BODY_BYTES = 4096
#: Checks for supervisors that have no token: `/healthz` says nothing, `/readyz` without its reason.
OPEN_PATHS = frozenset({"/healthz", "/readyz"})

#: Per address that asks. The loopback is one address for all its users: a hundred a second are the command line, a
#: dashboard and a benchmark that looks every 10 ms at once, and cost the loop about a tenth of its time.
READS = RateLimit(rate_per_s=100.0, burst=200.0)
#: Nobody pauses or leaves more often; a loop in a script gets a pause and not an overrun event ring.
CHANGES = RateLimit(rate_per_s=2.0, burst=20.0)
#: Wrong tokens. Nobody guesses 256 bits; this keeps the attempt from being a load.
WRONG_TOKENS = RateLimit(rate_per_s=0.5, burst=10.0)

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:\s/@]+))(?::\d{1,5})?")


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """The facts of a request. Absent headers are None; `peer` is the address it comes from."""

    method: str
    path: str
    peer: str
    host: str
    origin: str | None
    authorization: str | None
    has_change_header: bool
    has_body: bool
    body_bytes: int | None

    @property
    def changes(self) -> bool:
        """Anything but a plain read counts as a change, known or not."""
        return self.method not in ("GET", "HEAD")


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer in place of the one asked for. `retry_s` is set with 429, `challenge` with 401."""

    status: int
    error: str
    hint: str = ""
    retry_s: float = 0.0
    challenge: bool = False


class Guard:
    """Judges requests to one listening address."""

    def __init__(self, *, token: str, on_loopback: bool, names: Sequence[str] = ()) -> None:
        """`names` are the DNS names, beside addresses, under which the node may be asked."""
        self._digest = _digest(token)
        self._on_loopback = on_loopback
        self._names = frozenset(name.lower() for name in names)
        self._reads: RateLimiter[str] = RateLimiter(READS)
        self._changes: RateLimiter[str] = RateLimiter(CHANGES)
        self._wrong: RateLimiter[str] = RateLimiter(WRONG_TOKENS)

    def is_authenticated(self, request: RequestFacts) -> bool:
        """Whether the asker may read everything: it is on this machine's loopback, or has the token."""
        return self._on_loopback or self._has_token(request)

    def check(self, request: RequestFacts, now: float) -> Refusal | None:
        """None lets the request through."""
        return (
            self._check_sender(request)
            or self._check_rate(request, now)
            or self._check_body(request)
            or self._check_rights(request, now)
        )

    def _check_sender(self, request: RequestFacts) -> Refusal | None:
        name = host_name(request.host)
        if not self._is_ours(name):
            shown = request.host[:80]
            if self._on_loopback:
                return Refusal(
                    403, f"the Host header {shown!r} does not name this machine", "ask for 127.0.0.1 or localhost"
                )
            hint = "ask for the address itself, or list the name in status.names"
            return Refusal(403, f"the Host header {shown!r} is no name of this node", hint)
        if request.origin is not None and not self._same_origin(request.origin, request.host, name):
            hint = "only pages of this node itself may ask it"
            return Refusal(403, f"a page of {request.origin[:80]} may not speak to this node", hint)
        return None

    def _is_ours(self, name: str) -> bool:
        if is_loopback(name) or name in self._names:
            return True
        # An address cannot be rebound. On the loopback nobody has a reason to write another one.
        return not self._on_loopback and is_literal(name)

    def _same_origin(self, origin: str, host: str, name: str) -> bool:
        # Behind a proxy that speaks TLS the page is https; that proxy's name is one of ours.
        return origin == f"http://{host}" or (name in self._names and origin == f"https://{host}")

    def _check_rate(self, request: RequestFacts, now: float) -> Refusal | None:
        quotas = self._changes if request.changes else self._reads
        wait_s = quotas.take(request.peer, now)
        if not wait_s:
            return None
        rate = quotas.allowance.rate_per_s
        error = f"more than {rate:g} requests a second from {request.peer}"
        return Refusal(429, error, f"ask again in {math.ceil(wait_s)} s", retry_s=wait_s)

    def _check_body(self, request: RequestFacts) -> Refusal | None:
        if request.body_bytes is None and request.has_body:
            return Refusal(411, "a body without a Content-Length is not read", "send no body: none is needed")
        if (request.body_bytes or 0) > MAX_BODY_BYTES:
            return Refusal(413, f"a body of {request.body_bytes} bytes is more than {MAX_BODY_BYTES}")
        return None

    def _check_rights(self, request: RequestFacts, now: float) -> Refusal | None:
        if request.changes and not request.has_change_header:
            error = f"{request.method} needs the header {CHANGE_HEADER}: 1"
            return Refusal(403, error, "it keeps foreign pages out")
        if not request.changes and (self._on_loopback or request.path in OPEN_PATHS):
            return None
        if self._has_token(request):
            return None
        if request.authorization is not None and (wait_s := self._wrong.take(request.peer, now)):
            hint = f"try again in {math.ceil(wait_s)} s, with the right one"
            return Refusal(429, f"too many wrong tokens from {request.peer}", hint, retry_s=wait_s)
        wanted = "changes to the node need" if request.changes else "beyond the loopback every request needs"
        problem = "the token is not this node's" if request.authorization is not None else f"{wanted} a token"
        hint = (
            "send the header Authorization: Bearer TOKEN with the content of status.token in the node's state "
            "directory; `p2pnode` does so by itself where it may read that file, or with --token-file"
        )
        return Refusal(401, problem, hint, challenge=True)

    def _has_token(self, request: RequestFacts) -> bool:
        scheme, _, given = (request.authorization or "").partition(" ")
        # Digests have one length, and are compared in constant time: neither length nor prefix can be measured.
        return scheme.lower() == "bearer" and hmac.compare_digest(_digest(given.strip()), self._digest)


def host_name(header: str) -> str:
    """The name in a Host header, without port and brackets, in lower case; empty for what is no such header."""
    found = _HOST.fullmatch(header)
    return "" if found is None else (found[1] or found[2]).lower()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
