"""Makes the certificates of a swarm: its authority, derived from the swarm key, and a node's certificate under it.

The authority is an Ed25519 key derived from the swarm key and the run; its certificate is identical on every node. A
node's certificate holds the key of its identity, whose hash is the node id. So a member can make certificates, but use
only those for keys it has. `ssl` checks the chain, `overlay.sealing.tls` reads the id.

`python -m overlay.sealing.certificate_maker` runs in a process of its own, because `cryptography.x509` takes memory and
time that a daemon should not spend. It reads a `CertificateRequest` from standard input and writes a
`CertificateBundle`, both MessagePack.
"""

from __future__ import annotations

import datetime
import sys

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from p2pnode.overlay.ids import node_id_of
from p2pnode.overlay.sealing.swarm_key import KeyRing, SwarmKey
from p2pnode.overlay.sealing.tls import CertificateBundle, CertificateRequest

#: Validity begins this much earlier, as clocks differ (by less: `overlay.sealing.handshake.CLOCK_BOUND_S`).
_CLOCK_SKEW = datetime.timedelta(days=1)
#: A node makes a new certificate at every start.
_VALIDITY = datetime.timedelta(days=3650)
_AUTHORITY_FROM = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_AUTHORITY_TO = datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC)


def authority(key: SwarmKey, run: str) -> tuple[Ed25519PrivateKey, x509.Certificate]:
    """The authority of one key and run. Deterministic, as Ed25519 signatures are (RFC 8032)."""
    private = Ed25519PrivateKey.from_private_bytes(key.derive(run, "certificate authority"))
    public = private.public_key()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"p2pnode swarm {key.fingerprint}")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(1)
        .not_valid_before(_AUTHORITY_FROM)
        .not_valid_after(_AUTHORITY_TO)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=False, certifies=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(private, None)
    )
    return private, certificate


def node_certificate(
    identity_seed: bytes, key: SwarmKey, run: str, now: datetime.datetime
) -> tuple[Ed25519PrivateKey, x509.Certificate]:
    """The certificate of the identity with this seed, under the authority of `key`."""
    private = Ed25519PrivateKey.from_private_bytes(identity_seed)
    public = private.public_key()
    issuer_key, issuer = authority(key, run)
    subject = node_id_of(public.public_bytes_raw()).hex()
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(issuer.subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _VALIDITY)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=True, certifies=False), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        .sign(issuer_key, None)
    )
    return private, certificate


def _usage(*, signs: bool, certifies: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=certifies,
        crl_sign=certifies,
        encipher_only=False,
        decipher_only=False,
    )


def make_bundle(request: CertificateRequest) -> CertificateBundle:
    """What a node needs for TLS: its certificate under the key in use, and the authorities of all valid keys."""
    ring = KeyRing(tuple(SwarmKey(secret) for secret in request.secrets))
    now = datetime.datetime.fromtimestamp(request.wall_s, datetime.UTC)
    private, certificate = node_certificate(request.identity_seed, ring.primary, request.run, now)
    return CertificateBundle(
        authorities=[authority(key, request.run)[1].public_bytes(Encoding.PEM).decode("ascii") for key in ring],
        chain=private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        + certificate.public_bytes(Encoding.PEM),
    )


def main() -> None:
    request = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=CertificateRequest)
    sys.stdout.buffer.write(msgspec.msgpack.encode(make_bundle(request)))


if __name__ == "__main__":
    main()
