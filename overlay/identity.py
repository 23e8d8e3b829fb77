"""The identity of a node: an Ed25519 key and the number of its start (the incarnation), both in the state directory.

The key is generated on the first start, readable by its owner only. The incarnation is on disk *before* anything is
sent, so that no two starts on one directory ever use the same number. It is the time of the start, in seconds since
1970, or one more than the last: a directory that is restored from an old copy goes on above all that it used since.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2pnode.overlay.environment import Disk, Entropy
from p2pnode.overlay.errors import OverlayError
from p2pnode.overlay.ids import node_id_of

KEY_FILE = "identity.key"
INCARNATION_FILE = "incarnation"
KEY_BYTES = 32


class UnreadableIdentity(OverlayError):
    """The state directory holds an identity that cannot be used. A new one in its place would make another node."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(
            f"cannot use {name} in the state directory: {detail}; "
            "restore it from a copy, or remove the file to start as a new node"
        )
        self.name = name
        self.detail = detail


@dataclass(frozen=True)
class Identity:
    """A private key and the id that follows from it."""

    node_id: bytes
    public_key: bytes
    _key: Ed25519PrivateKey = field(repr=False)

    def sign(self, data: bytes) -> bytes:
        """Ed25519 signature, 64 bytes."""
        return self._key.sign(data)

    def verifies(self, public_key: bytes, data: bytes, signature: bytes) -> bool:
        """Whether the holder of this public key (32 bytes) signed this. Never raises, whatever the bytes."""
        try:
            Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
        except (InvalidSignature, ValueError):
            return False
        return True

    @property
    def seed(self) -> bytes:
        """The private key, 32 bytes; only for the certificate that proves it
        (`overlay.sealing.tls`)."""
        return self._key.private_bytes_raw()


def identity_from_seed(seed: bytes) -> Identity:
    """The identity whose private key is these 32 bytes."""
    key = Ed25519PrivateKey.from_private_bytes(seed)
    public_key = key.public_key().public_bytes_raw()
    return Identity(node_id_of(public_key), public_key, key)


def load_identity(disk: Disk, entropy: Entropy) -> Identity:
    """The identity of this directory, generated on first use. Raises `UnreadableIdentity`, `OSError` (it cannot be
    written)."""
    try:
        seed = disk.read(KEY_FILE)
    except OSError as error:
        raise UnreadableIdentity(KEY_FILE, str(error)) from error
    if seed is None:
        seed = entropy.token(KEY_BYTES)
        disk.write(KEY_FILE, seed, private=True)
    if len(seed) != KEY_BYTES:
        raise UnreadableIdentity(KEY_FILE, f"it holds {len(seed)} bytes, a key has {KEY_BYTES}")
    return identity_from_seed(seed)


def next_incarnation(disk: Disk, wall_s: float) -> int:
    """The incarnation of this start, at `wall_s` seconds since 1970: above that of the last. It is on disk before it is
    returned. Raises `UnreadableIdentity`, `OSError`."""
    try:
        stored = disk.read(INCARNATION_FILE)
    except OSError as error:
        raise UnreadableIdentity(INCARNATION_FILE, str(error)) from error
    if stored is None:
        last = 0
    else:
        try:
            last = int(stored.decode("ascii"))
        except ValueError as error:
            raise UnreadableIdentity(INCARNATION_FILE, "it does not hold a number") from error
        if last < 0:
            raise UnreadableIdentity(INCARNATION_FILE, f"it holds {last}, an incarnation is not negative")
    incarnation = max(last + 1, int(wall_s))
    disk.write(INCARNATION_FILE, str(incarnation).encode("ascii"))
    return incarnation
