"""What a daemon gives the process that makes its certificates, and what comes back
(`overlay.sealing.certificate_maker`)."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from overlay.errors import OverlayError
from overlay.identity import Identity
from overlay.sealing.swarm_key import KeyRing

#: Importing `cryptography.x509` and signing twice takes about 0.2 s; a loaded machine may need long.
MAKING_S = 30.0


class CertificateRequest(msgspec.Struct, frozen=True, array_like=True):
    """Secrets: it passes through a pipe and nowhere else."""

    identity_seed: bytes
    run: str
    secrets: list[bytes]
    wall_s: float

    def __repr__(self) -> str:
        return f"Order(run={self.run!r})"


class CertificateBundle(msgspec.Struct, frozen=True, array_like=True):
    """PEM texts: the authorities' certificates, and the node's private key with its certificate."""

    authorities: list[str]
    chain: bytes

    def __repr__(self) -> str:
        return "Delivery()"


class CertificateError(OverlayError):
    """The certificates could not be made; the text says what the process said."""


def make_certificates(identity: Identity, keys: KeyRing, run: str, wall_s: float) -> CertificateBundle:
    """Have them made by a process of its own, for a node that starts at `wall_s` (seconds since 1970).

    Takes a fraction of a second, so keep it off the loop. Raises `CertificateError`.
    """
    order = msgspec.msgpack.encode(CertificateRequest(identity.seed, run, [key.secret for key in keys], wall_s))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "overlay.sealing.certificate_maker"],
            input=order,
            capture_output=True,
            check=False,
            timeout=MAKING_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CertificateError(f"the certificates could not be made: {type(error).__name__}") from None
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise CertificateError(f"the certificates could not be made: {last[0]}")
    return msgspec.msgpack.decode(done.stdout, type=CertificateBundle)
