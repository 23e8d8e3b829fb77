"""Which addresses an invitation may name."""

from __future__ import annotations

import pytest

from p2pnode.keys.dialable import dialable, own_host
from p2pnode.overlay.addresses import is_loopback, usable_host


@pytest.mark.parametrize(
    ("addresses", "own", "expected"),
    [
        (["10.0.0.5:8468", "node.example:1"], "10.0.0.9", ["10.0.0.5:8468", "node.example:1"]),
        (["0.0.0.0:8468"], "10.0.0.9", ["10.0.0.9:8468"]),
        (["[::]:8468"], "2001:db8::9", ["[2001:db8::9]:8468"]),
        (["0.0.0.0:8468"], "", []),
        (["127.0.0.1:8468", "[::1]:8468", "localhost:8468"], "10.0.0.9", []),
        (["127.0.0.1:8468", "10.0.0.5:1"], "10.0.0.9", ["10.0.0.5:1"]),
        (["10.0.0.9:8468", "0.0.0.0:8468", "10.0.0.9:8468"], "10.0.0.9", ["10.0.0.9:8468"]),
    ],
    ids=["usable", "every interface", "IPv6", "no network", "loopback", "mixed", "once"],
)
def test_only_addresses_that_others_can_dial(addresses: list[str], own: str, expected: list[str]) -> None:
    """Every interface is replaced by this machine's address, the loopback left out, each address named once."""
    assert list(dialable(addresses, own).addresses) == expected


def test_replaced_addresses_are_told() -> None:
    """The caller can say what stands for what."""
    assert dialable(["0.0.0.0:8468", "10.0.0.5:1"], "10.0.0.9").replaced == (("0.0.0.0:8468", "10.0.0.9:8468"),)


def test_this_machine_s_own_address_is_usable_or_unknown() -> None:
    """Never every interface or the loopback; empty without a network."""
    host = own_host()

    assert host == "" or (usable_host(host) == host and not is_loopback(host))
