"""Certificates of a swarm: the authority that any holder of the key can derive, and a node's own certificate under it.

The authority is an Ed25519 key from the swarm key and the run, with a certificate that is the same, byte for byte, on
every node. A node's certificate is for its identity's key, so its hash is the node id: a holder of the swarm key can
make certificates, but only for keys it has. Checked by `ssl` (the chain) and by `overlay.sealing.tls` (the id).

`python -m overlay.sealing.certificate_maker` makes them in a process of its own: what `cryptography.x509` needs of
memory and time should not stay in a daemon. It reads an `CertificateRequest` from its standard input and writes a
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

from overlay.ids import node_id_of
from overlay.sealing.certificate_request import CertificateBundle, CertificateRequest
from overlay.sealing.swarm_key import KeyRing, SwarmKey

#: Clocks may differ, and a clock that is wrong by more has other troubles (`overlay.sealing.sealer`).
_BACK = datetime.timedelta(days=1)
#: Made anew at every start; nobody runs for ten years without one.
_LIFE = datetime.timedelta(days=3650)
_AUTHORITY_FROM = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_AUTHORITY_TO = datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC)


def authority(key: SwarmKey, run: str) -> tuple[Ed25519PrivateKey, x509.Certificate]:
    """The authority of one key and run; every byte follows from them (Ed25519 signatures do too, RFC 8032)."""
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
    """The certificate of the identity with this private key, under the authority of `key`."""
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
        .not_valid_before(now - _BACK)
        .not_valid_after(now + _LIFE)
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


def deliver(order: CertificateRequest) -> CertificateBundle:
    """All a node needs for TLS: its own certificate under the key in use, the authorities of all valid ones."""
    ring = KeyRing(tuple(SwarmKey(secret) for secret in order.secrets))
    now = datetime.datetime.fromtimestamp(order.wall_s, datetime.UTC)
    private, certificate = node_certificate(order.identity_seed, ring.primary, order.run, now)
    return CertificateBundle(
        authorities=[authority(key, order.run)[1].public_bytes(Encoding.PEM).decode("ascii") for key in ring],
        chain=private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        + certificate.public_bytes(Encoding.PEM),
    )


def main() -> None:
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=CertificateRequest)
    sys.stdout.buffer.write(msgspec.msgpack.encode(deliver(order)))


if __name__ == "__main__":
    main()
