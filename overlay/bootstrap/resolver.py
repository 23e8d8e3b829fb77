"""Resolves the names in bootstrap and advertised addresses, off the event loop."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence

from p2pnode.overlay.addresses import Address, split_address, usable_host

#: Longest wait for a resolver.
RESOLVE_TIMEOUT_S = 5.0
UNRESOLVED = "cannot be resolved"
#: All addresses of `host:port`. Raises `OSError`, `ValueError`.
Resolver = Callable[[str], Awaitable[Sequence[Address]]]


async def resolve(text: str) -> list[Address]:
    """All addresses of `host:port`. Raises `OSError`, `ValueError`."""
    host, port = split_address(text)
    try:
        return [Address.checked(str(ipaddress.ip_address(host)), port)]
    except ValueError:
        pass
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(Address.checked(str(entry[4][0]), port) for entry in found))


async def advertised_address(text: str) -> tuple[str, int] | None:
    """The setting `node.advertise`, a name or an address, as (IP address, port or 0); None when it is empty."""
    if not text:
        return None
    if usable_host(text) is not None:
        return str(usable_host(text)), 0
    has_port = text.rpartition(":")[2].isdigit()
    address = (await resolve(text if has_port else f"{text}:1"))[0]
    return address.host, address.port if has_port else 0
