"""The limit of ids per address."""

from __future__ import annotations

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.discovery.lookup_service import AddressLimit
from p2pnode.overlay.peers import Contact
from tests.harness.builders.peers import contact, ids


def test_the_first_few_ids_of_an_address_are_admitted() -> None:
    """Two of five; the same id gets the same answer again, and the refused ones are counted once."""
    limit = AddressLimit(2)
    contacts = [contact(node_id) for node_id in ids(5)]

    assert limit.admitted(contacts) == contacts[:2]
    assert limit.admitted(contacts[::-1]) == contacts[1::-1]
    assert limit.refused == 3


def test_other_addresses_and_the_loopback_are_not_affected() -> None:
    """Each address has its own limit; on the loopback there is none."""
    limit = AddressLimit(1)
    one, other, third, fourth = ids(4)
    full = limit.admitted([contact(one)])
    elsewhere = [Contact(other, Address("10.9.0.1", 1))]
    loopback = [Contact(third, Address("127.0.0.1", 1)), Contact(fourth, Address("127.0.0.1", 2))]

    assert full == [contact(one)]
    assert limit.admitted(elsewhere) == elsewhere
    assert limit.admitted(loopback) == loopback


def test_zero_is_no_limit() -> None:
    """All are admitted, and nothing is counted."""
    limit = AddressLimit(0)
    contacts = [contact(node_id) for node_id in ids(9)]

    assert limit.admitted(contacts) == contacts
    assert limit.refused == 0
