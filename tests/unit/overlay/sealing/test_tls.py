"""Mutual TLS between nodes: their certificates, whose each is, and which handshakes succeed."""

from __future__ import annotations

import datetime
import random
import ssl
import subprocess
import sys
import time
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import load_pem_x509_certificates
from cryptography.x509.oid import NameOID

from p2pnode.overlay.identity import identity_from_seed
from p2pnode.overlay.sealing.certificate_maker import authority, make_bundle, node_certificate
from p2pnode.overlay.sealing.swarm_key import KeyRing, SwarmKey
from p2pnode.overlay.sealing.tls import (
    CertificateBundle,
    CertificateError,
    CertificateRequest,
    Credentials,
    NotANodeCertificate,
    id_of_certificate,
    make_certificates,
)

KEY, NEXT_KEY = SwarmKey(b"\1" * 32), SwarmKey(b"\2" * 32)
NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def test_the_authority_follows_from_key_and_run() -> None:
    """Two nodes make the same authority, byte for byte; another run or key makes another."""
    made = [authority(key, run)[1].public_bytes(Encoding.DER) for key in (KEY, NEXT_KEY) for run in ("a", "b")]

    assert authority(KEY, "a")[1].public_bytes(Encoding.DER) == made[0]
    assert len(set(made)) == 4


def test_the_id_of_a_certificate_is_its_keys() -> None:
    """What is read from a node's certificate is the id of the identity it was made for."""
    for number in range(20):
        seed = number.to_bytes(32, "big")
        certificate = node_certificate(seed, KEY, "tests", NOW)[1]

        assert id_of_certificate(certificate.public_bytes(Encoding.DER)) == identity_from_seed(seed).node_id


def test_a_bundle_has_the_authorities_of_all_keys() -> None:
    """The certificate is under the first key; both authorities are trusted."""
    bundle = make_bundle(CertificateRequest(b"a" * 32, "tests", [KEY.secret, NEXT_KEY.secret], NOW.timestamp()))
    (certificate,) = load_pem_x509_certificates(bundle.chain)

    certificate.verify_directly_issued_by(authority(KEY, "tests")[1])
    assert b"PRIVATE KEY" in bundle.chain
    assert bundle.authorities == [
        authority(key, "tests")[1].public_bytes(Encoding.PEM).decode() for key in (KEY, NEXT_KEY)
    ]
    assert certificate.not_valid_before_utc < NOW < certificate.not_valid_after_utc


def test_a_key_in_the_subject_is_not_taken_for_the_certificates_key() -> None:
    """The id is that of the subject's key, although another node's key is encoded in the subject name before it."""
    victim = identity_from_seed(b"v" * 32)
    spki = bytes.fromhex("302a300506032b6570032100") + victim.public_key
    private = Ed25519PrivateKey.from_private_bytes(b"l" * 32)
    issuer_key, issuer = authority(KEY, "tests")
    certificate = (
        x509.CertificateBuilder()
        .subject_name(
            x509.Name(
                [
                    x509.NameAttribute(
                        NameOID.X500_UNIQUE_IDENTIFIER, spki, x509.name._ASN1Type.BitString, _validate=False
                    )
                ]
            )
        )
        .issuer_name(issuer.subject)
        .public_key(private.public_key())
        .serial_number(7)
        .not_valid_before(NOW)
        .not_valid_after(NOW + datetime.timedelta(days=1))
        .sign(issuer_key, None)
        .public_bytes(Encoding.DER)
    )

    assert spki in certificate
    assert id_of_certificate(certificate) == identity_from_seed(b"l" * 32).node_id


def test_a_certificate_of_no_node_has_no_id() -> None:
    """Another kind of key, truncated bytes and changed bytes raise `NotANodeCertificate` and no other error."""
    key = generate_private_key(SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    foreign = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW + datetime.timedelta(days=1))
        .sign(key, SHA256())
        .public_bytes(Encoding.DER)
    )
    with pytest.raises(NotANodeCertificate, match="Ed25519"):
        id_of_certificate(foreign)
    good = node_certificate(b"g" * 32, KEY, "tests", NOW)[1].public_bytes(Encoding.DER)
    for size in range(0, 200, 3):
        with pytest.raises(NotANodeCertificate):
            id_of_certificate(good[:size])
    rng = random.Random(12)
    print("seed 12")
    for _ in range(2000):
        junk = bytearray(good)
        junk[rng.randrange(len(junk))] ^= 1 << rng.randrange(8)
        try:
            assert len(id_of_certificate(bytes(junk))) == 20
        except NotANodeCertificate:
            pass


def credentials(seed: bytes, keys: KeyRing, run: str = "tests") -> Credentials:
    return Credentials.of(make_bundle(CertificateRequest(seed, run, [key.secret for key in keys], time.time())))


def handshake(client: Credentials, server: Credentials) -> tuple[bytes, bytes]:
    """Ids that both sides of a TLS connection see. Raises `ssl.SSLError` where one refuses the other."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.client.wrap_bio(to_client, to_server)
    two = server.server.wrap_bio(to_server, to_client, server_side=True)
    done: set[ssl.SSLObject] = set()
    for _ in range(10):
        for side in (one, two):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                pass
    assert done == {one, two}
    seen = []
    for side in (one, two):
        certificate = side.getpeercert(True)
        assert certificate is not None
        seen.append(id_of_certificate(certificate))
    assert (one.version(), two.version()) == ("TLSv1.3", "TLSv1.3")
    return seen[0], seen[1]


def test_members_accept_each_other() -> None:
    """Both ends read the other's id."""
    seen = handshake(credentials(b"a" * 32, KeyRing((KEY,))), credentials(b"b" * 32, KeyRing((KEY,))))

    assert seen == (identity_from_seed(b"b" * 32).node_id, identity_from_seed(b"a" * 32).node_id)


@pytest.mark.parametrize(
    "foreign_keys", [(KeyRing((NEXT_KEY,)), "tests"), (KeyRing((KEY,)), "other")], ids=["key", "run"]
)
def test_members_and_other_nodes_refuse_each_other(foreign_keys: tuple[KeyRing, str]) -> None:
    """A certificate under the authority of another key or run is refused at both ends."""
    member, foreign = credentials(b"a" * 32, KeyRing((KEY,))), credentials(b"b" * 32, *foreign_keys)
    for client, server in ((member, foreign), (foreign, member)):
        with pytest.raises(ssl.SSLError, match=r"(?i)certificate.verify.failed|unknown.ca"):
            handshake(client, server)


def test_members_accept_each_other_during_a_rotation() -> None:
    """Nodes accept each other's certificates while they are one step of a rotation apart."""
    steps = [KeyRing((KEY,)), KeyRing((KEY, NEXT_KEY)), KeyRing((NEXT_KEY, KEY)), KeyRing((NEXT_KEY,))]
    ends = [(credentials(b"a" * 32, ring), credentials(b"b" * 32, ring)) for ring in steps]
    for mine, theirs in ((0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3)):
        handshake(ends[mine][0], ends[theirs][1])
        handshake(ends[theirs][0], ends[mine][1])


KEYS = KeyRing((SwarmKey(b"k" * 32),))
IDENTITY = identity_from_seed(b"i" * 32)


def test_the_process_makes_certificates_that_tls_loads() -> None:
    """The bundle that comes back through the pipe makes TLS contexts."""
    bundle = make_certificates(IDENTITY, KEYS, "tests", 1_767_225_600.0)

    assert len(bundle.authorities) == 1
    assert Credentials.of(bundle).server.num_tickets == 0


@pytest.mark.parametrize(
    ("code", "message"),
    [("import sys; sys.exit('no such key')", "no such key"), ("import sys; sys.exit(3)", "it wrote no error")],
)
def test_a_process_that_fails(monkeypatch: pytest.MonkeyPatch, code: str, message: str) -> None:
    """The error contains the last line of the process's errors."""
    run = subprocess.run

    def other_program(_command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        return run([sys.executable, "-c", code], **options)

    monkeypatch.setattr(subprocess, "run", other_program)
    with pytest.raises(CertificateError, match=message):
        make_certificates(IDENTITY, KEYS, "tests", 0.0)


def test_a_process_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout is a `CertificateError`."""

    def never(command: list[str], *, timeout: float, **_options: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", never)
    with pytest.raises(CertificateError, match="TimeoutExpired"):
        make_certificates(IDENTITY, KEYS, "tests", 0.0)


def test_no_text_contains_a_secret() -> None:
    """`repr` of request and bundle contain neither seed nor key."""
    request = CertificateRequest(b"s" * 32, "tests", [b"k" * 32], 0.0)
    bundle = CertificateBundle(["authority"], b"chain")

    assert repr(request) == "CertificateRequest(run='tests')"
    assert repr(bundle) == "CertificateBundle()"
