"""Certificates: the authority derived from the swarm key, a node's certificate, and the bundle of both."""

from __future__ import annotations

import datetime

from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import load_pem_x509_certificates

from p2pnode.overlay.identity import identity_from_seed
from p2pnode.overlay.sealing.certificate_maker import authority, make_bundle, node_certificate
from p2pnode.overlay.sealing.swarm_key import SwarmKey
from p2pnode.overlay.sealing.tls import CertificateRequest, id_of_certificate

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
