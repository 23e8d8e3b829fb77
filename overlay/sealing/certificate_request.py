"""Asks a process of its own for a node's certificates (`overlay.sealing.certificate_maker`)."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from p2pnode.overlay.errors import OverlayError
from p2pnode.overlay.identity import Identity
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
