"""Certificates from a process of its own, and what happens if that process fails."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from p2pnode.overlay.identity import identity_from_seed
from p2pnode.overlay.sealing.swarm_key import KeyRing, SwarmKey
from p2pnode.overlay.sealing.tls import (
    CertificateBundle,
    CertificateError,
    CertificateRequest,
    Credentials,
    make_certificates,
)

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
