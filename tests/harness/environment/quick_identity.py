"""Signatures that cost less, for histories of many nodes in one process.

`quick_identities`: a keyed hash replaces Ed25519 (130 µs to sign and verify, 40,000 times while 200 nodes join), for
large histories that are not about identity. The verifier looks the secret up. In the protocol nothing changes: a
forged, replayed or foreign signature is not accepted.

`known_signatures`: Ed25519 as it is, but that what a key has signed in this process is not computed again to verify it.
Histories are the same to the byte.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from unittest import mock

from p2pnode.overlay import identity
from p2pnode.overlay.identity import Identity
from p2pnode.overlay.ids import node_id_of


class _QuickIdentity(Identity):
    """`secrets` are those of all nodes of the world, by public key."""

    secrets: dict[bytes, bytes]

    def sign(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self.secrets[self.public_key]).digest()

    def verifies(self, public_key: bytes, data: bytes, signature: bytes) -> bool:
        secret = self.secrets.get(public_key)
        return secret is not None and hashlib.blake2b(data, key=secret).digest() == signature


@contextlib.contextmanager
def quick_identities() -> Iterator[None]:
    """Nodes that load their identity inside get a quick one."""
    secrets: dict[bytes, bytes] = {}

    def from_seed(seed: bytes) -> Identity:
        public_key = hashlib.blake2b(seed, digest_size=32, person=b"public").digest()
        secrets[public_key] = seed
        made = _QuickIdentity(node_id_of(public_key), public_key, None)
        object.__setattr__(made, "secrets", secrets)
        return made

    with mock.patch.object(identity, "identity_from_seed", from_seed):
        yield


@contextlib.contextmanager
def known_signatures() -> Iterator[None]:
    """Identities know what any of them has signed inside; all else is verified."""
    known: set[tuple[bytes, bytes, bytes]] = set()
    signs, verifies = Identity.sign, Identity.verifies

    def sign(signer: Identity, data: bytes) -> bytes:
        signature = signs(signer, data)
        known.add((signer.public_key, data, signature))
        return signature

    def is_known(asking: Identity, public_key: bytes, data: bytes, signature: bytes) -> bool:
        return (public_key, data, signature) in known or verifies(asking, public_key, data, signature)

    with mock.patch.object(Identity, "sign", sign), mock.patch.object(Identity, "verifies", is_known):
        yield
