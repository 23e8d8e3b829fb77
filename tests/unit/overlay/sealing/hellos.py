"""The first bytes of a TLS connection."""

from __future__ import annotations

import ssl

import pytest


def hello(name: str) -> bytes:
    """The first bytes that `ssl` sends to a server of this name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname=name).do_handshake()
    return outgoing.read()
