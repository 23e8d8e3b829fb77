"""Announcements in the local network: which count, which are malformed, and which node founds."""

from __future__ import annotations

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.bootstrap.local_network import (
    MAX_ADDRESSES,
    MAX_DISCOVERED,
    Announcement,
    DiscoveredNode,
    LocalNetwork,
    read,
)
from p2pnode.overlay.ids import ID_BYTES

OWN = Announcement("run", b"\x50" * ID_BYTES, 8468, joined=False)
OTHER = Announcement("run", b"\x60" * ID_BYTES, 8468, joined=True)


def test_an_announcement_of_our_run_is_read() -> None:
    """The result has its id, whether it has joined, and at most a few of its local addresses."""
    hosts = ["192.168.1.5", "fe80::5", *(f"10.0.0.{n}" for n in range(1, 9))]

    sighting = read(OTHER.properties(), hosts, 9000, OWN)

    assert sighting is not None
    assert (sighting.node_id, sighting.joined, len(sighting.addresses)) == (OTHER.node_id, True, MAX_ADDRESSES)
    assert sighting.addresses[:2] == (Address("192.168.1.5", 9000), Address("fe80::5", 9000))


def test_what_is_announced_names_run_id_and_state_and_nothing_else() -> None:
    """It contains no key, and no address but that of the service."""
    assert OTHER.properties() == {"v": OTHER.properties()["v"], "run": "run", "id": "60" * ID_BYTES, "in": "1"}


GOOD = OTHER.properties()


@pytest.mark.parametrize(
    ("properties", "hosts", "port"),
    [
        ({}, ["10.0.0.1"], 8468),
        (GOOD | {"run": "another"}, ["10.0.0.1"], 8468),
        (GOOD | {"v": "999"}, ["10.0.0.1"], 8468),
        (GOOD | {"id": "zz"}, ["10.0.0.1"], 8468),
        (GOOD | {"id": "60"}, ["10.0.0.1"], 8468),
        (GOOD | {"id": "6" * 100000}, ["10.0.0.1"], 8468),
        (GOOD | {"id": OWN.node_id.hex()}, ["10.0.0.1"], 8468),
        (GOOD, [], 8468),
        (GOOD, ["no address"], 8468),
        (GOOD, ["10.0.0.1"], 0),
        (GOOD, ["10.0.0.1"], 70000),
        (GOOD, ["8.8.8.8"], 8468),
        (GOOD, ["0.0.0.0", "::", "224.0.0.251", "ff02::fb"], 8468),
    ],
)
def test_junk_is_ignored(properties: dict[str, str], hosts: list[str], port: int) -> None:
    """Other runs and versions, the own announcement, invalid ids and addresses, and addresses of other networks."""
    place = LocalNetwork(OWN)
    place.on_announcement("x", properties, hosts, port)

    assert place.addresses() == []
    assert place.should_found()


def test_the_lowest_of_those_that_start_together_founds() -> None:
    """Unless one is in a swarm already; a node that should found but does not answer is dropped."""
    place = LocalNetwork(OWN)
    assert place.should_found()
    place.on_announcement("higher", OTHER._replace(joined=False).properties(), ["10.0.0.1"], 1)
    assert place.should_found()
    place.on_announcement(
        "lower", OTHER._replace(node_id=b"\x01" * ID_BYTES, joined=False).properties(), ["10.0.0.2"], 1
    )
    assert not place.should_found()
    place.drop_lowest()
    assert place.should_found()
    place.on_announcement("higher", OTHER.properties(), ["10.0.0.1"], 1)
    assert not place.should_found()
    place.drop_lowest()
    assert place.addresses() == [Address("10.0.0.1", 1)]


def test_a_flood_of_announcements_is_bounded() -> None:
    """Beyond the limit new names are counted and ignored, and known ones may still change."""
    place = LocalNetwork(OWN)
    for number in range(1000):
        place.on_announcement(str(number), OTHER.properties(), [f"10.0.{number // 250}.{number % 250 + 1}"], 1)
    assert len(place.addresses()) == MAX_DISCOVERED
    assert place.ignored == 1000 - MAX_DISCOVERED
    place.on_announcement("0", OTHER.properties(), ["10.9.9.9"], 2)
    assert place.addresses()[0] == Address("10.9.9.9", 2)
    assert DiscoveredNode(b"", False, ()) == (b"", False, ())
