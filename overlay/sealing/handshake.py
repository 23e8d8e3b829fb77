"""First contact between two nodes of a swarm: two signed messages, after which the pair has keys of its own.

SIGMA's shape (Krawczyk, 2003) with WireGuard's economy: each side sends its Ed25519 identity, an ephemeral X25519 key
and its boot nonce, signed, inside an AEAD under a key that only members can derive. Who has no swarm key sees noise
and cannot make any; who has it still cannot speak for another id. The keys of the pair follow by HKDF from the X25519
secret, salted by the swarm key's epoch and run, over both ids, both boot nonces and all that was said.

Pure. It keeps no state: freshness and replays are judged by `overlay.sealing.sealer`. Wire form: docs/protocol.md.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from overlay.identity import Identity
from overlay.ids import ID_BYTES, node_id_of
from overlay.sealing.swarm_key import SwarmKey

#: First byte of a sealed datagram. Open ones begin with 0 and 1.
OFFER, ACCEPTANCE, SEALED = 0x10, 0x11, 0x12
NONCE_BYTES = 12
TAG_BYTES = 16
INDEX_BYTES = 8
BOOT_BYTES = 8
PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64
PAIR_KEY_BYTES = 32

#: public key, recipient id, boot, wall microseconds, index, ephemeral key; then the signature.
_OFFER = struct.Struct(f">{PUBLIC_KEY_BYTES}s{ID_BYTES}s{BOOT_BYTES}sQ{INDEX_BYTES}s{PUBLIC_KEY_BYTES}s")
#: the offer's index, public key, boot, index, ephemeral key; then the signature.
_ACCEPTANCE = struct.Struct(f">{INDEX_BYTES}s{PUBLIC_KEY_BYTES}s{BOOT_BYTES}s{INDEX_BYTES}s{PUBLIC_KEY_BYTES}s")
_ENVELOPE_BYTES = 1 + NONCE_BYTES + TAG_BYTES
INIT_BYTES = _ENVELOPE_BYTES + _OFFER.size + SIGNATURE_BYTES
RESPONSE_BYTES = _ENVELOPE_BYTES + _ACCEPTANCE.size + SIGNATURE_BYTES

_OFFER_CONTEXT = b"p2pnode offer 1\0"
_ACCEPTANCE_CONTEXT = b"p2pnode acceptance 1\0"
_PAIR_CONTEXT = b"p2pnode pair 1\0"


class Epoch:
    """What one swarm key gives the datagrams of one run."""

    def __init__(self, key: SwarmKey, run: str) -> None:
        self.fingerprint = key.fingerprint
        self.context = key.derive(run, "datagram context")
        self._aead = AESGCM(key.derive(run, "first contact"))

    def enclose(self, kind: int, content: bytes, nonce: bytes) -> bytes:
        """First byte, nonce, and the content under the epoch's key."""
        head = bytes((kind,))
        return head + nonce + self._aead.encrypt(nonce, content, head)

    def disclose(self, datagram: bytes) -> bytes | None:
        """The content, or None where it was not enclosed under this key."""
        nonce = datagram[1 : 1 + NONCE_BYTES]
        try:
            return self._aead.decrypt(nonce, datagram[1 + NONCE_BYTES :], datagram[:1])
        except InvalidTag:
            return None


@dataclass(frozen=True, slots=True)
class HandshakeInit:
    """The first message: who speaks, to whom, since which boot, when, and where answers should be put."""

    public_key: bytes
    recipient: bytes
    boot: bytes
    sent_us: int
    index: bytes
    ephemeral: bytes
    content: bytes = field(repr=False)

    @property
    def node_id(self) -> bytes:
        return node_id_of(self.public_key)

    @classmethod
    def read(cls, content: bytes) -> HandshakeInit | None:
        if len(content) != _OFFER.size + SIGNATURE_BYTES:
            return None
        public_key, recipient, boot, sent_us, index, ephemeral = _OFFER.unpack_from(content)
        return cls(public_key, recipient, boot, sent_us, index, ephemeral, content)

    def is_signed(self, epoch: Epoch) -> bool:
        return _holds(self.public_key, _OFFER_CONTEXT + epoch.context, self.content)


@dataclass(frozen=True, slots=True)
class HandshakeResponse:
    """The second message, an answer to one offer."""

    offered: bytes
    public_key: bytes
    boot: bytes
    index: bytes
    ephemeral: bytes
    content: bytes = field(repr=False)

    @property
    def node_id(self) -> bytes:
        return node_id_of(self.public_key)

    @classmethod
    def read(cls, content: bytes) -> HandshakeResponse | None:
        if len(content) != _ACCEPTANCE.size + SIGNATURE_BYTES:
            return None
        offered, public_key, boot, index, ephemeral = _ACCEPTANCE.unpack_from(content)
        return cls(offered, public_key, boot, index, ephemeral, content)

    def is_signed(self, epoch: Epoch, offer: HandshakeInit) -> bool:
        context = _ACCEPTANCE_CONTEXT + epoch.context + _digest(offer.content)
        return _holds(self.public_key, context, self.content)


def make_init(
    identity: Identity, epoch: Epoch, recipient: bytes, boot: bytes, sent_us: int, index: bytes, ephemeral: bytes
) -> HandshakeInit:
    """An offer; `ephemeral` is the X25519 private key, 32 bytes used once."""
    public = _public(ephemeral)
    body = _OFFER.pack(identity.public_key, recipient, boot, sent_us, index, public)
    content = body + identity.sign(_OFFER_CONTEXT + epoch.context + body)
    return HandshakeInit(identity.public_key, recipient, boot, sent_us, index, public, content)


def make_response(
    identity: Identity, epoch: Epoch, offer: HandshakeInit, boot: bytes, index: bytes, ephemeral: bytes
) -> HandshakeResponse:
    """The answer to an offer whose signature holds."""
    public = _public(ephemeral)
    body = _ACCEPTANCE.pack(offer.index, identity.public_key, boot, index, public)
    content = body + identity.sign(_ACCEPTANCE_CONTEXT + epoch.context + _digest(offer.content) + body)
    return HandshakeResponse(offer.index, identity.public_key, boot, index, public, content)


def session_keys(
    epoch: Epoch, offer: HandshakeInit, acceptance: HandshakeResponse, ephemeral: bytes, other: bytes
) -> tuple[bytes, bytes] | None:
    """Keys from the offerer to the accepter and back, each 32 bytes; None for an ephemeral key of low order.

    `ephemeral` is our private key, `other` the peer's public one.
    """
    try:
        shared = X25519PrivateKey.from_private_bytes(ephemeral).exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        return None
    info = b"".join(
        (
            _PAIR_CONTEXT,
            offer.node_id,
            offer.boot,
            acceptance.node_id,
            acceptance.boot,
            _digest(offer.content),
            _digest(acceptance.content),
        )
    )
    keys = HKDF(SHA256(), 2 * PAIR_KEY_BYTES, salt=epoch.context, info=info).derive(shared)
    return keys[:PAIR_KEY_BYTES], keys[PAIR_KEY_BYTES:]


def _public(ephemeral: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(ephemeral).public_key().public_bytes_raw()


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _holds(public_key: bytes, context: bytes, content: bytes) -> bool:
    body, signature = content[:-SIGNATURE_BYTES], content[-SIGNATURE_BYTES:]
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, context + body)
    except (InvalidSignature, ValueError):
        return False
    return True
