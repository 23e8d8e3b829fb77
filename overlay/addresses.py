"""IP addresses and ports: parsing, normal forms, and the groups of addresses that limits count. Pure."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import NamedTuple


class Address(NamedTuple):
    """A literal IP address and a port: never a host name, so that sending can never block on a resolver."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def checked(cls, host: object, port: object) -> Address:
        """An address from untrusted parts, IPv4-mapped IPv6 normalised to IPv4; `ValueError` says what is wrong."""
        if not isinstance(host, str) or not isinstance(port, int) or isinstance(port, bool):
            raise ValueError(f"an address needs a text and a number, not {host!r} and {port!r}")
        if not 0 < port < 65536:
            raise ValueError(f"port {port} is outside 1…65535")
        return cls(_normal(host), port)


@lru_cache(maxsize=4096)  # called for the source of every datagram
def _normal(host: str) -> str:
    """The normal form of an IP address; IPv4-mapped IPv6 becomes IPv4. Raises `ValueError`."""
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    return str(address)


#: A provider assigns at least this prefix to an IPv6 customer, who may use every address in it.
IPV6_GROUP_BITS = 64


@lru_cache(maxsize=16384)
def group_of(host: str) -> str:
    """The unit that limits count: an IPv4 address, an IPv6 /64; empty for the loopback, which is not limited."""
    address = ipaddress.ip_address(host)
    if address.is_loopback:
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return host
    return str(ipaddress.IPv6Network((int(address), IPV6_GROUP_BITS), strict=False))


#: Most sites have no more than one of these prefixes, and reach every address in it without passing a router's NAT.
SITE_BITS_4, SITE_BITS_6 = 16, 48


@lru_cache(maxsize=16384)
def site_of(host: str) -> str:
    """The prefix that an address shares with those next to it: an IPv4 /16, an IPv6 /48."""
    address = ipaddress.ip_address(host)
    bits = SITE_BITS_4 if address.version == 4 else SITE_BITS_6
    return str(ipaddress.ip_network((int(address), bits), strict=False))


class NodeAddress(Address):
    """An address together with the id of the node there. Equal to the plain address.

    As the source of sealed traffic the id is proven; as a target it is expected.
    """

    node_id: bytes

    @classmethod
    def of(cls, address: Address, node_id: bytes) -> NodeAddress:
        made = tuple.__new__(cls, address)  # for every datagram: the constructor of a named tuple takes twice as long
        made.node_id = node_id
        return made


def id_behind(address: Address) -> bytes:
    """The node id that comes with an address; empty for a plain one."""
    return address.node_id if isinstance(address, NodeAddress) else b""


@lru_cache(maxsize=4096)
def usable_host(host: str) -> str | None:
    """The normal form of a unicast address that other machines can use, or None. One with a scope (`%eth0`) is not."""
    if "%" in host:
        return None
    try:
        address = ipaddress.ip_address(_normal(host))
    except ValueError:
        return None
    if address.is_multicast or address.is_unspecified or address == ipaddress.IPv4Address(0xFFFFFFFF):
        return None
    return str(address)


def split_address(text: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[IPv6]:port`. Raises `ValueError` with one sentence that says what is wrong."""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or not rest.startswith(":"):
            raise ValueError(f'"{text}" is not of the form "[IPv6 address]:port"')
        port = rest[1:]
    else:
        host, colon, port = text.rpartition(":")
        if not colon:
            raise ValueError(f'"{text}" has no port')
        if ":" in host:
            raise ValueError(f'"{text}" is not of the form "host:port" (an IPv6 address needs brackets)')
    if not host or re.search(r"[\s/@\[\]]", host):
        raise ValueError(f'"{text}" has no usable host')
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f'the port of "{text}" is not a number from 1 to 65535')
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address; names other than localhost count as not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_literal(host: str) -> bool:
    """Whether a text is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
