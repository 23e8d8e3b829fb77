"""Names and addresses of bootstraps, and of `node.advertise`."""

from __future__ import annotations

import asyncio

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.bootstrap.dialer import advertised_address, resolve


def test_an_address_needs_no_resolver() -> None:
    """Both families, in their normal form."""
    assert asyncio.run(resolve("10.0.0.1:80")) == [Address("10.0.0.1", 80)]
    assert asyncio.run(resolve("[2001:DB8::1]:80")) == [Address("2001:db8::1", 80)]


def test_a_name_gives_each_of_its_addresses_once() -> None:
    """`localhost` is in every hosts file."""
    found = asyncio.run(resolve("localhost:80"))

    assert found
    assert len(set(found)) == len(found)
    assert {address.host for address in found} <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize("text", ["10.0.0.1", "10.0.0.1:0", "::1:80"])
def test_text_without_a_usable_port_is_an_error(text: str) -> None:
    """The setting is wrong, and no resolver is asked."""
    with pytest.raises(ValueError, match=text):
        asyncio.run(resolve(text))


@pytest.mark.parametrize(
    ("text", "advertised"),
    [
        ("", None),
        ("192.0.2.1", ("192.0.2.1", 0)),
        ("192.0.2.1:9000", ("192.0.2.1", 9000)),
        ("2001:db8::1", ("2001:db8::1", 0)),
        ("[2001:db8::1]:9000", ("2001:db8::1", 9000)),
    ],
)
def test_the_port_of_an_advertised_address_may_be_left_out(text: str, advertised: tuple[str, int] | None) -> None:
    """Then the bound port is meant, which 0 stands for."""
    assert asyncio.run(advertised_address(text)) == advertised
