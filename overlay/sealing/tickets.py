"""Who may begin a TLS handshake: a ticket in the first bytes of a connection, judged before anything is answered.

TLS 1.3 has its server speak first, certificate and all, so a stranger would learn that a node is here and which. A
member therefore sends, as the server name of its ClientHello, a ticket that only holders of the swarm key can make: 16
bytes of HMAC-SHA256 over a random number, the time and the id of the node that is meant. It is taken once, within the
clock bound, and not if older than this node's start. Who has none gets silence and costs a few hundred bytes for a few
seconds. TLS itself is left as it is. A first `hello` means no id yet; its ticket is good for any node, once each.

Pure: bytes and the time in, a judgement out.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import struct
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum

from overlay.sealing.sealer import CLOCK_BOUND_S
from overlay.sealing.session import Refused
from overlay.sealing.swarm_key import KeyRing

RANDOM_BYTES, MAC_BYTES = 8, 16
_CLAIM = struct.Struct(f">{RANDOM_BYTES}sQ")
TICKET_BYTES = _CLAIM.size + MAC_BYTES
#: A ClientHello of ours has about 520 bytes, 1,800 with a post-quantum key share.
MOST_HELLO_BYTES = 4096
_RECORD_HEAD = 5
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0
#: Tickets remembered: at more than this many connections in two minutes the oldest count as late.
MOST_TICKETS = 32768


class Judgement(Enum):
    ADMITTED = "admitted"
    INCOMPLETE = "incomplete"


class Admission:
    """Makes and takes tickets under the keys of a ring."""

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
        self._taken: OrderedDict[bytes, int] = OrderedDict()
        self._keys: list[bytes] = []
        self.use(keys)

    def use(self, keys: KeyRing) -> None:
        """These keys are valid from now on."""
        self._keys = [key.derive(self._run, "admission") for key in keys]

    def ticket(self, recipient: bytes, wall: float) -> str:
        """A server name for one connection to this node; to whoever answers, where `recipient` is empty."""
        claim = _CLAIM.pack(self._token(RANDOM_BYTES), int(wall * 1e6))
        return base64.b32encode(claim + _mac(self._keys[0], claim, recipient)).decode("ascii").rstrip("=").lower()

    def judge(self, beginning: bytes, wall: float) -> Judgement:
        """Judge the first bytes of a connection. Raises `Refused` with a reason fit for a counter's name."""
        name = server_name(beginning)
        if name is None:
            return Judgement.INCOMPLETE
        try:
            ticket = base64.b32decode(name.upper() + b"=" * (-len(name) % 8))
        except (binascii.Error, ValueError):
            raise Refused("stranger") from None
        if len(ticket) != TICKET_BYTES:
            raise Refused("stranger")
        claim, mac = ticket[: _CLAIM.size], ticket[_CLAIM.size :]
        if not self._fits(claim, mac):
            raise Refused("stranger")
        made_us = _CLAIM.unpack(claim)[1]
        ahead_s = made_us / 1e6 - wall
        if abs(ahead_s) > CLOCK_BOUND_S:
            self._clock_differs(ahead_s)
            raise Refused("clock")
        if made_us <= self._too_old_us:
            raise Refused("before_start")
        if claim in self._taken:
            raise Refused("replayed")
        self._take(claim, made_us)
        return Judgement.ADMITTED

    def _fits(self, claim: bytes, mac: bytes) -> bool:
        fits = False
        for key in self._keys:
            for recipient in (self._own_id, b""):
                fits |= hmac.compare_digest(mac, _mac(key, claim, recipient))
        return fits

    def _take(self, claim: bytes, made_us: int) -> None:
        self._taken[claim] = made_us
        late_us = made_us - int(3 * CLOCK_BOUND_S * 1e6)
        while self._taken and (len(self._taken) > MOST_TICKETS or next(iter(self._taken.values())) < late_us):
            self._too_old_us = max(self._too_old_us, self._taken.popitem(last=False)[1])


def _mac(key: bytes, claim: bytes, recipient: bytes) -> bytes:
    return hmac.digest(key, b"p2pnode ticket 1\0" + claim + recipient, "sha256")[:MAC_BYTES]


def server_name(beginning: bytes) -> bytes | None:
    """The server name in a ClientHello (RFC 8446 section 4.1.2, RFC 6066 section 3); None while bytes are missing.

    Raises `Refused` for anything else than one whole ClientHello in one record.
    """
    if beginning[:1] and beginning[0] != _HANDSHAKE:
        raise Refused("stranger")
    if len(beginning) < _RECORD_HEAD:
        return None
    size = int.from_bytes(beginning[3:5], "big")
    if size > MOST_HELLO_BYTES - _RECORD_HEAD or size < 4:
        raise Refused("stranger")
    record = beginning[_RECORD_HEAD : _RECORD_HEAD + size]
    if record[:1] and record[0] != _CLIENT_HELLO:
        raise Refused("stranger")
    if len(record) < size:
        return None
    hello = _Reader(record[4:])
    hello.skip(2 + 32)
    hello.skip(hello.number(1))
    hello.skip(hello.number(2))
    hello.skip(hello.number(1))
    extensions = _Reader(hello.take(hello.number(2)))
    while extensions.left:
        kind, content = extensions.number(2), _Reader(extensions.take(extensions.number(2)))
        if kind == _SERVER_NAME:
            names = _Reader(content.take(content.number(2)))
            if names.number(1) == _HOST_NAME:
                return names.take(names.number(2))
    raise Refused("stranger")


class _Reader:
    """Takes a message apart; what is not there is refused."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise Refused("stranger")
        self._at += size
        return self._data[self._at - size : self._at]

    def skip(self, size: int) -> None:
        self.take(size)

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")
