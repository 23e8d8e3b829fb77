"""Mutual TLS 1.3 between nodes: the contexts of both ends, and the node id in a certificate.

Both ends present a certificate under the swarm's authority (`overlay.sealing.certificate_maker`). `ssl` checks the
chain and that the peer has the private key; `id_of_certificate` reads the node id. Host names are not checked: the
server name is an admission ticket (`overlay.sealing.tickets`).
"""

from __future__ import annotations

import ssl
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import msgspec

from p2pnode.overlay.errors import OverlayError
from p2pnode.overlay.identity import Identity
from p2pnode.overlay.ids import node_id_of
from p2pnode.overlay.sealing.swarm_key import KeyRing

#: The process takes about 0.2 s, mostly to import `cryptography.x509`; much longer on a loaded machine.
PROCESS_TIMEOUT_S = 30.0


class CertificateRequest(msgspec.Struct, frozen=True, array_like=True):
    """Contains secrets: it goes through a pipe and nowhere else."""

    identity_seed: bytes
    run: str
    secrets: list[bytes]
    wall_s: float

    def __repr__(self) -> str:
        return f"CertificateRequest(run={self.run!r})"


class CertificateBundle(msgspec.Struct, frozen=True, array_like=True):
    """PEM texts: the certificates of the authorities, and the node's private key with its certificate."""

    authorities: list[str]
    chain: bytes

    def __repr__(self) -> str:
        return "CertificateBundle()"


class CertificateError(OverlayError):
    """The certificates could not be made; the text has the last line of the process's errors."""


def make_certificates(identity: Identity, keys: KeyRing, run: str, wall_s: float) -> CertificateBundle:
    """The certificates of a node that starts at `wall_s` (seconds since 1970). Raises `CertificateError`.

    Blocks for a fraction of a second: call it off the loop.
    """
    request = msgspec.msgpack.encode(CertificateRequest(identity.seed, run, [key.secret for key in keys], wall_s))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "p2pnode.overlay.sealing.certificate_maker"],
            input=request,
            capture_output=True,
            check=False,
            timeout=PROCESS_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CertificateError(f"the certificates could not be made: {type(error).__name__}") from None
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["it wrote no error"]
        raise CertificateError(f"the certificates could not be made: {last[0]}")
    return msgspec.msgpack.decode(done.stdout, type=CertificateBundle)


#: SubjectPublicKeyInfo of an Ed25519 key (RFC 8410): all of it but the 32 bytes of the key.
_ED25519_SPKI = bytes.fromhex("302a300506032b6570032100")
_SEQUENCE, _INTEGER, _VERSION = 0x30, 0x02, 0xA0


@dataclass(frozen=True)
class Credentials:
    """The TLS contexts of one node under its current keys."""

    server: ssl.SSLContext = field(repr=False)
    client: ssl.SSLContext = field(repr=False)

    @classmethod
    def of(cls, bundle: CertificateBundle, folder: Path | None = None) -> Credentials:
        """Contexts from PEM texts. `ssl` reads keys only from files: a temporary one of mode 0600 in `folder`."""
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".tls-") as file:
            file.write(bundle.chain)
            file.flush()
            server = _context(ssl.PROTOCOL_TLS_SERVER, bundle, file.name)
            client = _context(ssl.PROTOCOL_TLS_CLIENT, bundle, file.name)
        server.num_tickets = 0  # a resumed session would present no certificate
        return cls(server, client)


def _context(protocol: ssl._SSLMethod, bundle: CertificateBundle, chain: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(cadata="\n".join(bundle.authorities))
    context.load_cert_chain(chain)
    return context


class NotANodeCertificate(OverlayError):
    """The certificate is not one of a node."""


@lru_cache(maxsize=4096)
def id_of_certificate(der: bytes) -> bytes:
    """The node id of a certificate whose chain `ssl` has checked. Raises `NotANodeCertificate`.

    Reads the fields of TBSCertificate (RFC 5280 section 4.1) in order up to the key, and checks every length.
    """
    certificate, _ = _field(der, 0, _SEQUENCE)
    body, _ = _field(certificate, 0, _SEQUENCE)
    at = 0
    if body[:1] == bytes((_VERSION,)):
        at = _field(body, at, _VERSION)[1]
    for kind in (_INTEGER, _SEQUENCE, _SEQUENCE, _SEQUENCE, _SEQUENCE):  # serial, algorithm, issuer, validity, subject
        at = _field(body, at, kind)[1]
    _, end = _field(body, at, _SEQUENCE)
    spki = body[at:end]
    if len(spki) != len(_ED25519_SPKI) + 32 or not spki.startswith(_ED25519_SPKI):
        raise NotANodeCertificate("its key is no Ed25519 key")
    return node_id_of(spki[len(_ED25519_SPKI) :])


def _field(data: bytes, at: int, kind: int) -> tuple[bytes, int]:
    """The content of the DER field at an offset, and the offset after it."""
    if len(data) < at + 2 or data[at] != kind:
        raise NotANodeCertificate("it is no certificate of a p2pnode")
    length, start = data[at + 1], at + 2
    if length & 0x80:
        count = length & 0x7F
        if not 1 <= count <= 3:
            raise NotANodeCertificate("it is no certificate of a p2pnode")
        length, start = int.from_bytes(data[start : start + count], "big"), start + count
    end = start + length
    if end > len(data):
        raise NotANodeCertificate("it is no certificate of a p2pnode")
    return data[start:end], end
