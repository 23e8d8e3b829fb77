"""Verifies the admission ticket that a member puts into the TLS server name, before TLS sends anything.

A TLS 1.3 server presents its certificate to any client, so an unauthenticated peer would learn which node listens. A
member therefore sends a ticket as the server name of its ClientHello. It contains 16 bytes of HMAC-SHA256 over a random
number, the time and the id of the recipient. The key of the HMAC is derived from the swarm key. A ticket is accepted
once, within the clock bound, and only if it is newer than this node's start. A connection without a valid ticket gets
no answer. A first `hello` does not know the recipient's id; its ticket names no recipient, and every node accepts it
once.

Pure. Bytes and the time come in, a verdict comes out.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import struct
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum

from p2pnode.overlay.errors import Refused
from p2pnode.overlay.sealing.handshake import CLOCK_BOUND_S
from p2pnode.overlay.sealing.swarm_key import KeyRing

RANDOM_BYTES, MAC_BYTES = 8, 16
_CLAIM = struct.Struct(f">{RANDOM_BYTES}sQ")
TICKET_BYTES = _CLAIM.size + MAC_BYTES
#: Tickets remembered. With more connections than this in two minutes, the oldest tickets are refused as late.
MAX_TICKETS = 32768


class TicketVerdict(Enum):
    """`INCOMPLETE`: the ClientHello has not arrived as a whole."""

    ADMITTED = "admitted"
    INCOMPLETE = "incomplete"


class TicketVerifier:
    """Makes and verifies tickets under the keys of a ring."""

    def __init__(
        self,
        keys: KeyRing,
        run: str,
        own_id: bytes,
        token: Callable[[int], bytes],
        *,
        started_wall: float,
        clock_differs: Callable[[float], None] = lambda _ahead_s: None,
    ) -> None:
        """`clock_differs(seconds)`: a member's clock is ahead by more than the bound (behind, where negative)."""
        self._clock_differs = clock_differs
        self._run = run
        self._own_id = own_id
        self._token = token
        self._too_old_us = int(started_wall * 1e6)
        self._accepted: OrderedDict[bytes, int] = OrderedDict()
        self._keys: list[bytes] = []
        self.use(keys)

    def use(self, keys: KeyRing) -> None:
        """Replace the valid keys."""
        self._keys = [key.derive(self._run, "admission") for key in keys]

    def make_ticket(self, recipient: bytes, wall: float) -> str:
        """A server name for one connection to `recipient`, or to any node if that is empty."""
        claim = _CLAIM.pack(self._token(RANDOM_BYTES), int(wall * 1e6))
        return base64.b32encode(claim + _mac(self._keys[0], claim, recipient)).decode("ascii").rstrip("=").lower()

    def verify(self, data: bytes, wall: float) -> TicketVerdict:
        """Check the first bytes of a connection. Raises `Refused`; its reason is the end of a counter's name."""
        name = server_name(data)
        if name is None:
            return TicketVerdict.INCOMPLETE
        try:
            ticket = base64.b32decode(name.upper() + b"=" * (-len(name) % 8))
        except (binascii.Error, ValueError):
            raise Refused("stranger") from None
        if len(ticket) != TICKET_BYTES:
            raise Refused("stranger")
        claim, mac = ticket[: _CLAIM.size], ticket[_CLAIM.size :]
        if not self._is_authentic(claim, mac):
            raise Refused("stranger")
        made_us = _CLAIM.unpack(claim)[1]
        ahead_s = made_us / 1e6 - wall
        if abs(ahead_s) > CLOCK_BOUND_S:
            self._clock_differs(ahead_s)
            raise Refused("clock")
        if made_us <= self._too_old_us:
            raise Refused("before_start")
        if claim in self._accepted:
            raise Refused("replayed")
        self._remember(claim, made_us)
        return TicketVerdict.ADMITTED

    def _is_authentic(self, claim: bytes, mac: bytes) -> bool:
        authentic = False  # every key and recipient is tried, so that the time reveals nothing
        for key in self._keys:
            for recipient in (self._own_id, b""):
                authentic |= hmac.compare_digest(mac, _mac(key, claim, recipient))
        return authentic

    def _remember(self, claim: bytes, made_us: int) -> None:
        self._accepted[claim] = made_us
        late_us = made_us - int(3 * CLOCK_BOUND_S * 1e6)
        while self._accepted and (len(self._accepted) > MAX_TICKETS or next(iter(self._accepted.values())) < late_us):
            self._too_old_us = max(self._too_old_us, self._accepted.popitem(last=False)[1])


def _mac(key: bytes, claim: bytes, recipient: bytes) -> bytes:
    return hmac.digest(key, b"p2pnode ticket 1\0" + claim + recipient, "sha256")[:MAC_BYTES]


#: That of p2pnode has about 520 bytes, or 1,800 with a post-quantum key share.
MAX_HELLO_BYTES = 4096
_RECORD_HEAD = 5
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0


def server_name(data: bytes) -> bytes | None:
    """The server name in a ClientHello (RFC 8446 section 4.1.2, RFC 6066 section 3); None while it is incomplete.

    Raises `Refused` for anything but one ClientHello in one record.
    """
    if data[:1] and data[0] != _HANDSHAKE:
        raise Refused("stranger")
    if len(data) < _RECORD_HEAD:
        return None
    size = int.from_bytes(data[3:5], "big")
    if size > MAX_HELLO_BYTES - _RECORD_HEAD or size < 4:
        raise Refused("stranger")
    record = data[_RECORD_HEAD : _RECORD_HEAD + size]
    if record[:1] and record[0] != _CLIENT_HELLO:
        raise Refused("stranger")
    if len(record) < size:
        return None
    hello = _Reader(record[4:])
    hello.skip(2 + 32)
    hello.skip(hello.read_int(1))
    hello.skip(hello.read_int(2))
    hello.skip(hello.read_int(1))
    extensions = _Reader(hello.take(hello.read_int(2)))
    while extensions.left:
        kind, content = extensions.read_int(2), _Reader(extensions.take(extensions.read_int(2)))
        if kind == _SERVER_NAME:
            names = _Reader(content.take(content.read_int(2)))
            if names.read_int(1) == _HOST_NAME:
                return names.take(names.read_int(2))
    raise Refused("stranger")


class _Reader:
    """Reads fields one after the other. Raises `Refused` where the data ends."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._offset = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._offset

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise Refused("stranger")
        self._offset += size
        return self._data[self._offset - size : self._offset]

    def skip(self, size: int) -> None:
        self.take(size)

    def read_int(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")
