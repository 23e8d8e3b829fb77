"""Which addresses an invitation may name: those that another machine can dial.

A node that listens on every interface and has met nobody knows only `0.0.0.0` of itself. The address from which this
machine reaches others stands in for it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import NamedTuple

from p2pnode.overlay.addresses import Address, is_literal, is_loopback, split_address, usable_host

#: Of the blocks for documentation (RFC 5737, RFC 3849): routed like any other address, and nothing is sent to it.
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


class Dialable(NamedTuple):
    """Addresses that others can dial, and those that were replaced, as (before, after)."""

    addresses: tuple[str, ...]
    replaced: tuple[tuple[str, str], ...]


def dialable(addresses: Sequence[str], own: str) -> Dialable:
    """Those of `addresses` that others can dial, each once; `own` (empty: unknown) stands in for `0.0.0.0` and `::`.

    Loopback addresses are left out: on another machine they would mean that machine. Names are taken as they are.
    """
    found: dict[str, None] = {}
    replaced = []
    for text in addresses:
        host, port = split_address(text)
        if is_loopback(host):
            continue
        if not is_literal(host) or usable_host(host) is not None:
            found[text] = None
        elif own:
            after = str(Address(own, port))
            replaced.append((text, after))
            found[after] = None
    return Dialable(tuple(found), tuple(replaced))


def own_host() -> str:
    """The address from which this machine reaches others; empty without a network. Sends nothing."""
    for family, target in _ELSEWHERE:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                host = str(probe.getsockname()[0])
        except OSError:
            continue
        if usable_host(host) is not None and not is_loopback(host):
            return host
    return ""
