"""The handshake of two nodes of a swarm: two signed messages, from which both derive the keys of a session.

A SIGMA exchange (Krawczyk, 2003) in one round trip, as in WireGuard. Each side signs its Ed25519 identity, an ephemeral
X25519 key and its boot nonce. It sends them inside an AEAD under a key derived from the swarm key. Without the swarm
key both messages look random and cannot be made; with it, a node still cannot pretend to have another node's id. HKDF
derives the session keys from the X25519 secret; the swarm key's epoch and the run are the salt. Its info is both ids,
both boot nonces and the digests of both messages.

`InitFilter` decides which inits are answered: each one once, fresh, and with a valid signature. An init is fresh if its
sender's clock differs from the local one by at most `CLOCK_BOUND_S` and it was made after this node's start. The newest
time of each sender is remembered, so a recorded init is refused, also after a restart (WireGuard's rule, Donenfeld
2017, section 5.1). The cheap checks come first: only a fresh init costs a signature check.

Pure. Wire format: docs/protocol.md.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from p2pnode.overlay.errors import Refused
from p2pnode.overlay.identity import Identity
from p2pnode.overlay.ids import ID_BYTES, node_id_of
from p2pnode.overlay.sealing.swarm_key import SwarmKey

#: First byte of a datagram of a closed swarm. Those of an open swarm begin with 0 and 1.
INIT, RESPONSE, SEALED = 0x10, 0x11, 0x12
NONCE_BYTES = 12
TAG_BYTES = 16
INDEX_BYTES = 8
BOOT_NONCE_BYTES = 8
PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64
SESSION_KEY_BYTES = 32

#: public key, recipient id, boot, wall microseconds, index, ephemeral key; then the signature.
_INIT = struct.Struct(f">{PUBLIC_KEY_BYTES}s{ID_BYTES}s{BOOT_NONCE_BYTES}sQ{INDEX_BYTES}s{PUBLIC_KEY_BYTES}s")
#: the init's index, public key, boot, index, ephemeral key; then the signature.
_RESPONSE = struct.Struct(f">{INDEX_BYTES}s{PUBLIC_KEY_BYTES}s{BOOT_NONCE_BYTES}s{INDEX_BYTES}s{PUBLIC_KEY_BYTES}s")
_ENVELOPE_BYTES = 1 + NONCE_BYTES + TAG_BYTES
INIT_BYTES = _ENVELOPE_BYTES + _INIT.size + SIGNATURE_BYTES
RESPONSE_BYTES = _ENVELOPE_BYTES + _RESPONSE.size + SIGNATURE_BYTES

_INIT_CONTEXT = b"p2pnode offer 1\0"
_RESPONSE_CONTEXT = b"p2pnode acceptance 1\0"
_SESSION_CONTEXT = b"p2pnode pair 1\0"


class Epoch:
    """The keys that the datagrams of one run derive from one swarm key."""

    def __init__(self, key: SwarmKey, run: str) -> None:
        self.fingerprint = key.fingerprint
        self.context = key.derive(run, "datagram context")
        self._aead = AESGCM(key.derive(run, "first contact"))

    def seal(self, kind: int, content: bytes, nonce: bytes) -> bytes:
        """First byte, nonce, and the content encrypted under the epoch's key."""
        head = bytes((kind,))
        return head + nonce + self._aead.encrypt(nonce, content, head)

    def open(self, datagram: bytes) -> bytes | None:
        """The content, or None if it was not sealed under this key."""
        nonce = datagram[1 : 1 + NONCE_BYTES]
        try:
            return self._aead.decrypt(nonce, datagram[1 + NONCE_BYTES :], datagram[:1])
        except InvalidTag:
            return None


@dataclass(frozen=True, slots=True)
class HandshakeInit:
    """The first message: sender, recipient, the sender's boot nonce, the time, and the sender's session index."""

    public_key: bytes
    recipient: bytes
    boot_nonce: bytes
    sent_us: int
    index: bytes
    ephemeral: bytes
    content: bytes = field(repr=False)

    @property
    def node_id(self) -> bytes:
        return node_id_of(self.public_key)

    @classmethod
    def read(cls, content: bytes) -> HandshakeInit | None:
        if len(content) != _INIT.size + SIGNATURE_BYTES:
            return None
        public_key, recipient, boot_nonce, sent_us, index, ephemeral = _INIT.unpack_from(content)
        return cls(public_key, recipient, boot_nonce, sent_us, index, ephemeral, content)

    def is_signed(self, epoch: Epoch) -> bool:
        return _is_valid(self.public_key, _INIT_CONTEXT + epoch.context, self.content)


@dataclass(frozen=True, slots=True)
class HandshakeResponse:
    """The second message. `init_index` is the index of the init that it responds to."""

    init_index: bytes
    public_key: bytes
    boot_nonce: bytes
    index: bytes
    ephemeral: bytes
    content: bytes = field(repr=False)

    @property
    def node_id(self) -> bytes:
        return node_id_of(self.public_key)

    @classmethod
    def read(cls, content: bytes) -> HandshakeResponse | None:
        if len(content) != _RESPONSE.size + SIGNATURE_BYTES:
            return None
        init_index, public_key, boot_nonce, index, ephemeral = _RESPONSE.unpack_from(content)
        return cls(init_index, public_key, boot_nonce, index, ephemeral, content)

    def is_signed(self, epoch: Epoch, init: HandshakeInit) -> bool:
        context = _RESPONSE_CONTEXT + epoch.context + _digest(init.content)
        return _is_valid(self.public_key, context, self.content)


def make_init(
    identity: Identity, epoch: Epoch, recipient: bytes, boot_nonce: bytes, sent_us: int, index: bytes, ephemeral: bytes
) -> HandshakeInit:
    """An init; `ephemeral` is the X25519 private key, 32 bytes used once."""
    public = _public(ephemeral)
    body = _INIT.pack(identity.public_key, recipient, boot_nonce, sent_us, index, public)
    content = body + identity.sign(_INIT_CONTEXT + epoch.context + body)
    return HandshakeInit(identity.public_key, recipient, boot_nonce, sent_us, index, public, content)


def make_response(
    identity: Identity, epoch: Epoch, init: HandshakeInit, boot_nonce: bytes, index: bytes, ephemeral: bytes
) -> HandshakeResponse:
    """The response to an init whose signature was verified."""
    public = _public(ephemeral)
    body = _RESPONSE.pack(init.index, identity.public_key, boot_nonce, index, public)
    content = body + identity.sign(_RESPONSE_CONTEXT + epoch.context + _digest(init.content) + body)
    return HandshakeResponse(init.index, identity.public_key, boot_nonce, index, public, content)


def session_keys(
    epoch: Epoch, init: HandshakeInit, response: HandshakeResponse, ephemeral: bytes, other: bytes
) -> tuple[bytes, bytes] | None:
    """Keys from initiator to responder and back, each 32 bytes; None for an ephemeral key of low order.

    `ephemeral` is the own private key, `other` the peer's public one.
    """
    try:
        shared = X25519PrivateKey.from_private_bytes(ephemeral).exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        return None
    info = b"".join(
        (
            _SESSION_CONTEXT,
            init.node_id,
            init.boot_nonce,
            response.node_id,
            response.boot_nonce,
            _digest(init.content),
            _digest(response.content),
        )
    )
    keys = HKDF(SHA256(), 2 * SESSION_KEY_BYTES, salt=epoch.context, info=info).derive(shared)
    return keys[:SESSION_KEY_BYTES], keys[SESSION_KEY_BYTES:]


def _public(ephemeral: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(ephemeral).public_key().public_bytes_raw()


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _is_valid(public_key: bytes, context: bytes, content: bytes) -> bool:
    body, signature = content[:-SIGNATURE_BYTES], content[-SIGNATURE_BYTES:]
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, context + body)
    except (InvalidSignature, ValueError):
        return False
    return True


#: Clocks of two members may differ by this much. Beyond it inits get no answer, and a warning is logged here.
CLOCK_BOUND_S = 60.0
#: Senders remembered, and clock warnings given: bounds, so that no flood of inits grows memory.
MAX_SENDERS = 16384
MAX_CLOCK_REPORTS = 64


class InitFilter:
    """State of the checks since the start; `check` raises `Refused` for every init that must not be answered."""

    def __init__(self, wall: float, clock_differs: Callable[[bytes, float], None]) -> None:
        """`clock_differs(node, seconds)`: a member's clock is ahead by more than the bound (behind, where negative)."""
        #: Newest init by (node, boot), the least recently seen first.
        self._newest: OrderedDict[tuple[bytes, bytes], int] = OrderedDict()
        #: Inits up to this time are refused: they are older than this start, or than a sender that was forgotten.
        self._too_old_us = microseconds(wall)
        self._clock_differs = clock_differs
        self._clocks_reported: dict[bytes, bool] = {}

    def check(self, init: HandshakeInit, epoch: Epoch, wall: float) -> None:
        """Accept an init once and remember it. Raises `Refused`."""
        sender = (init.node_id, init.boot_nonce)
        if init.sent_us <= self._newest.get(sender, 0):
            raise Refused("replayed")
        ahead_s = (init.sent_us - microseconds(wall)) / 1e6
        if abs(ahead_s) > CLOCK_BOUND_S:
            self._report_clock(init, epoch, ahead_s)
            raise Refused("clock")
        if init.sent_us <= self._too_old_us:
            raise Refused("before_start")
        if not init.is_signed(epoch):
            raise Refused("unsigned")
        self._newest[sender] = init.sent_us
        self._newest.move_to_end(sender)
        if len(self._newest) > MAX_SENDERS:
            self._too_old_us = max(self._too_old_us, self._newest.popitem(last=False)[1])

    def _report_clock(self, init: HandshakeInit, epoch: Epoch, ahead_s: float) -> None:
        """Once per node. Either clock may be wrong, or the init is an old recording."""
        if init.node_id in self._clocks_reported or len(self._clocks_reported) >= MAX_CLOCK_REPORTS:
            return
        if init.is_signed(epoch):
            self._clocks_reported[init.node_id] = True
            self._clock_differs(init.node_id, ahead_s)


def microseconds(wall: float) -> int:
    """The time of a handshake message, as it is on the wire."""
    return int(wall * 1e6)
