"""Addresses: normal forms, the groups that limits count, and the text "host:port"."""

from __future__ import annotations

import pytest

from p2pnode.overlay.addresses import (
    Address,
    NodeAddress,
    group_of,
    id_behind,
    is_literal,
    is_loopback,
    split_address,
    usable_host,
)


@pytest.mark.parametrize(
    ("host", "normal"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:DB8:0:0::1", "2001:db8::1"),
        ("0.0.0.0", "0.0.0.0"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("::ffff:10.0.0.1%eth0", "10.0.0.1"),
    ],
)
def test_a_checked_address_has_one_normal_form(host: str, normal: str) -> None:
    """IPv6 is compressed, and IPv4-mapped IPv6 becomes IPv4."""
    assert Address.checked(host, 8468) == Address(normal, 8468)


@pytest.mark.parametrize(
    ("host", "port"), [("example.org", 1), ("10.0.0.1", 0), ("10.0.0.1", 65536), ("10.0.0.1", True), (1, 1), ("", 1)]
)
def test_an_address_from_bad_parts_is_an_error(host: object, port: object) -> None:
    """Names, ports out of range, and parts of another type."""
    with pytest.raises(ValueError):
        Address.checked(host, port)


@pytest.mark.parametrize(
    ("host", "usable"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:DB8::1", "2001:db8::1"),
        ("127.0.0.1", "127.0.0.1"),
        ("example.org", None),
        ("", None),
        ("fe80::1%eth0", None),
        ("::ffff:10.0.0.1%eth0", None),
        ("10.0.0.1%eth0", None),
        ("0.0.0.0", None),
        ("::", None),
        ("::ffff:0.0.0.0", None),
        ("224.0.0.1", None),
        ("ff02::1", None),
        ("255.255.255.255", None),
    ],
)
def test_only_unicast_addresses_without_scope_are_usable(host: str, usable: str | None) -> None:
    """What a peer announces must be an address that other machines can send to."""
    assert usable_host(host) == usable


@pytest.mark.parametrize(
    ("host", "group"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2::3", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::/64"),
        ("127.0.0.1", ""),
        ("::1", ""),
    ],
)
def test_limits_count_ipv4_addresses_and_ipv6_networks(host: str, group: str) -> None:
    """A holder of an IPv6 /64 has all of its addresses; the loopback is not limited."""
    assert group_of(host) == group


def test_a_node_address_equals_the_plain_one() -> None:
    """It only adds the id of the node there."""
    plain = Address("10.0.0.1", 1)
    proven = NodeAddress.of(plain, b"n" * 20)

    assert proven == plain
    assert hash(proven) == hash(plain)
    assert (id_behind(proven), id_behind(plain)) == (b"n" * 20, b"")


@pytest.mark.parametrize(
    ("text", "parts"), [("10.0.0.1:80", ("10.0.0.1", 80)), ("[::1]:80", ("::1", 80)), ("a.example:1", ("a.example", 1))]
)
def test_host_and_port_are_split_and_joined(text: str, parts: tuple[str, int]) -> None:
    """IPv6 addresses stand in brackets."""
    assert split_address(text) == parts
    assert str(Address(*parts)) == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("host", "has no port"),
        ("::1:80", "needs brackets"),
        ("[::1]80", "is not of the form"),
        (":80", "has no usable host"),
        ("a b:80", "has no usable host"),
        ("a:0", "not a number from 1"),
        ("a:٣", "not a number from 1"),
    ],
)
def test_what_is_no_address_has_one_sentence_that_says_why(text: str, complaint: str) -> None:
    """Typing errors in node.toml end in these messages."""
    with pytest.raises(ValueError, match=complaint):
        split_address(text)


def test_the_loopback_is_recognised_by_name_and_number() -> None:
    """Other names may resolve to anything."""
    assert [is_loopback(host) for host in ("localhost", "127.8.0.1", "::1", "10.0.0.1", "a.example")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert is_literal("::1")
    assert not is_literal("localhost")
