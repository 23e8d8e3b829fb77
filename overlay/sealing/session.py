"""A session between two nodes: one AES-256-GCM key and one counter for each direction.

A sealed datagram is `0x12, index (8), counter (8), AES-256-GCM of the datagram`. The header is authenticated and the
nonce is the counter. A datagram that arrives twice, or behind a window of 1,024 counters, is refused (IPsec's rule,
RFC 4303 section 3.4.3). A session costs one AEAD operation per datagram at each end. Pure.
"""

from __future__ import annotations

import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from p2pnode.overlay.errors import Refused
from p2pnode.overlay.sealing.handshake import INDEX_BYTES, SEALED, TAG_BYTES

_HEADER = struct.Struct(f">B{INDEX_BYTES}sQ")
HEADER_BYTES = _HEADER.size
#: What sealing adds to a datagram.
SEAL_BYTES = HEADER_BYTES + TAG_BYTES
_NONCE = struct.Struct(">4xQ")
WINDOW = 1024
#: First byte of a datagram that expects a response (Kademlia's framing, `overlay.kademlia.messages`).
REQUEST_PREFIX = b"\0"
#: Far below the 2^32 blocks that one AES-GCM key should see (NIST SP 800-38D), at 90 blocks a datagram.
MAX_DATAGRAMS = 1 << 24


class Session:
    """A session with one process of one node. The peer puts `index` in front of each datagram to this node."""

    __slots__ = (
        "_in",
        "_out",
        "_seen",
        "_their_index",
        "_unanswered",
        "confirmed",
        "created_at",
        "epoch_fingerprint",
        "highest",
        "index",
        "is_initiator",
        "last_received",
        "last_used",
        "node_id",
        "sent",
        "unanswered_since",
    )

    def __init__(
        self,
        node_id: bytes,
        epoch_fingerprint: str,
        index: bytes,
        their_index: bytes,
        key_in: bytes,
        key_out: bytes,
        now: float,
        *,
        is_initiator: bool,
    ) -> None:
        self.node_id = node_id
        self.epoch_fingerprint = epoch_fingerprint
        self.index = index
        self.is_initiator = is_initiator
        #: Whether the peer has used the session, which proves that its init was no recording.
        self.confirmed = is_initiator
        self.created_at = self.last_used = self.last_received = now
        #: When the second request since the last received datagram was sent: a single one may have no response.
        self.unanswered_since: float | None = None
        self._unanswered = 0
        self.sent = 0
        self.highest = 0
        self._their_index = their_index
        self._in = AESGCM(key_in)
        self._out = AESGCM(key_out)
        self._seen = 0

    def confirm(self) -> None:
        """The peer has used the session."""
        self.confirmed = True

    def seal(self, datagram: bytes, now: float) -> bytes:
        """The datagram as it is sent."""
        self.sent += 1
        self.last_used = now
        if datagram[:1] == REQUEST_PREFIX:
            self._unanswered += 1
            if self._unanswered == 2:
                self.unanswered_since = now
        header = _HEADER.pack(SEALED, self._their_index, self.sent)
        return header + self._out.encrypt(_NONCE.pack(self.sent), datagram, header)

    def open(self, sealed: bytes, now: float) -> tuple[bytes, bool]:
        """The datagram, and whether its counter is the highest so far. Raises `Refused` and then changes nothing."""
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
        self.last_used = self.last_received = now
        self._unanswered, self.unanswered_since = 0, None
        return datagram, newest


def index_of(sealed: bytes) -> bytes:
    """The index of the session that a sealed datagram belongs to."""
    return sealed[1 : 1 + INDEX_BYTES]
