"""Who may begin a TLS handshake: a ticket in the first bytes of a connection, judged before anything is answered.

TLS 1.3 has its server speak first, certificate and all, so a stranger would learn that a node is here and which. A
member therefore sends, as the server name of its ClientHello, a ticket that only holders of the swarm key can make: 16
bytes of HMAC-SHA256 over a random number, the time and the id of the node that is meant. It is taken once, within the
clock bound, and not if older than this node's start. Who has none gets silence and costs a few hundred bytes for a few
seconds. TLS itself is left as it is. A first `hello` means no id yet; its ticket is good for any node, once each.

Pure. Bytes and the time in, a decision out.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import struct
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum

from overlay.sealing.client_hello import server_name
from overlay.sealing.init_filter import CLOCK_BOUND_S
from overlay.sealing.refusal import Refused
from overlay.sealing.swarm_key import KeyRing

RANDOM_BYTES, MAC_BYTES = 8, 16
_CLAIM = struct.Struct(f">{RANDOM_BYTES}sQ")
TICKET_BYTES = _CLAIM.size + MAC_BYTES
#: Tickets remembered: at more than this many connections in two minutes the oldest count as late.
MOST_TICKETS = 32768


class Judgement(Enum):
    ADMITTED = "admitted"
    INCOMPLETE = "incomplete"


class TicketVerifier:
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
