"""The keys and counters of two nodes that have met: what each datagram between them costs, one AEAD.

A sealed datagram is `0x12, index (8), counter (8), AES-256-GCM of the datagram`; the header is authenticated, the nonce
is the counter, each direction has its own key. What arrives twice, or behind a window of 1,024 counters (IPsec's rule,
RFC 4303 section 3.4.3), is refused; so is anything older than the pair. Pure.
"""

from __future__ import annotations

import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from overlay.sealing.handshake import INDEX_BYTES, SEALED, TAG_BYTES
from overlay.sealing.refusal import Refused

_HEADER = struct.Struct(f">B{INDEX_BYTES}sQ")
HEADER_BYTES = _HEADER.size
#: What sealing adds to a datagram.
SEAL_BYTES = HEADER_BYTES + TAG_BYTES
_NONCE = struct.Struct(">4xQ")
WINDOW = 1024
#: First byte of a datagram that wants an answer (Kademlia's framing, `overlay.kademlia.messages`).
QUESTION = b"\0"
#: Far below the 2^32 blocks that one AES-GCM key should see (NIST SP 800-38D), at 90 blocks a datagram.
MOST_DATAGRAMS = 1 << 24


class Session:
    """One session with one start of one node. `index` is ours, put before what is sent to us."""

    __slots__ = (
        "_asked",
        "_in",
        "_out",
        "_seen",
        "_their_index",
        "born",
        "confirmed",
        "epoch",
        "heard",
        "highest",
        "index",
        "node_id",
        "offered",
        "sent",
        "silent_since",
        "used",
    )

    def __init__(
        self,
        node_id: bytes,
        epoch: str,
        index: bytes,
        their_index: bytes,
        key_in: bytes,
        key_out: bytes,
        now: float,
        *,
        offered: bool,
    ) -> None:
        self.node_id = node_id
        self.epoch = epoch
        self.index = index
        self.offered = offered  # we began
        self.confirmed = offered  # it has used the pair, so its offer was no old one
        self.born = self.used = self.heard = now
        #: When the second of the questions was asked that nothing was heard after; a single one may want no answer.
        self.silent_since: float | None = None
        self._asked = 0
        self.sent = 0
        self.highest = 0
        self._their_index = their_index
        self._in = AESGCM(key_in)
        self._out = AESGCM(key_out)
        self._seen = 0

    def confirm(self) -> None:
        """The other side has used the session."""
        self.confirmed = True

    def seal(self, datagram: bytes, now: float) -> bytes:
        """One datagram as it goes on the wire."""
        self.sent += 1
        self.used = now
        if datagram[:1] == QUESTION:
            self._asked += 1
            if self._asked == 2:
                self.silent_since = now
        header = _HEADER.pack(SEALED, self._their_index, self.sent)
        return header + self._out.encrypt(_NONCE.pack(self.sent), datagram, header)

    def open(self, sealed: bytes, now: float) -> tuple[bytes, bool]:
        """The datagram, and whether it is newer than all before. Raises `Refused`; then nothing has changed."""
        header = sealed[:HEADER_BYTES]
        counter = _HEADER.unpack(header)[2]
        age = self.highest - counter
        if counter == 0 or age >= WINDOW or (age >= 0 and self._seen >> age & 1):
            raise Refused("replayed")
        try:
            datagram = self._in.decrypt(_NONCE.pack(counter), sealed[HEADER_BYTES:], header)
        except InvalidTag:
            raise Refused("forged") from None
        newest = age < 0
        if newest:
            self._seen = (self._seen << -age | 1) & ((1 << WINDOW) - 1) if -age < WINDOW else 1
            self.highest = counter
        else:
            self._seen |= 1 << age
        self.used = self.heard = now
        self._asked, self.silent_since = 0, None
        return datagram, newest


def index_of(sealed: bytes) -> bytes:
    """To which of our pairs a sealed datagram belongs."""
    return sealed[1 : 1 + INDEX_BYTES]
