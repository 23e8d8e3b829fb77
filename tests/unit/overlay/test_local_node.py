"""The local node: what its heartbeat carries, and which changes are announced at once."""

from __future__ import annotations

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.kademlia.messages import swarm_tag
from p2pnode.overlay.local_node import LocalChange, LocalNode
from p2pnode.overlay.peers import Activity, Contact

OWN_ID = b"n" * 20
GENESIS = b"genesis of tests"


def local_node(host: str = "10.0.0.1") -> tuple[LocalNode, list[LocalChange]]:
    local = LocalNode(OWN_ID, 3, 7, "tests", Address(host, 8468))
    changes: list[LocalChange] = []
    local.on_change(changes.append)
    return local, changes


def test_a_step_waits_for_the_next_message_and_a_role_does_not() -> None:
    """Steps are `heartbeat` changes; activity and eligibility are `role` changes, but only when they differ."""
    local, changes = local_node()
    local.announce(step=1, step_seconds=2.0, samples=3)
    local.announce(activity=Activity.TRAINING)
    local.announce(activity=Activity.TRAINING, step=2)

    assert changes == ["heartbeat", "role", "heartbeat"]
    assert (local.heartbeat.step, local.heartbeat.samples, local.activity) == (2, 3, Activity.TRAINING)
    assert local.is_training


def test_a_node_is_eligible_when_it_is_reached_and_willing() -> None:
    """Either alone is not enough, and a node that leaves may not own."""
    local, changes = local_node()
    local.set_willing(False)
    local.set_reached(True)
    assert not local.may_own
    local.set_willing(True)
    assert local.may_own
    local.announce(activity=Activity.LEAVING)
    assert not local.may_own
    local.set_reached(False)

    assert not local.heartbeat.eligible
    assert changes == ["heartbeat", "heartbeat", "role", "role", "role"]


def test_a_node_is_not_eligible_while_its_line_is_on_trial() -> None:
    """Reached and willing, it waits for the trial to end, which changes its role."""
    local, changes = local_node()
    local.set_on_trial(True)
    local.set_reached(True)
    local.set_willing(True)
    assert not local.may_own
    local.set_on_trial(False)

    assert local.may_own
    assert changes == ["heartbeat", "heartbeat", "heartbeat", "role"]


def test_entering_a_swarm_sets_its_tag() -> None:
    """The tag follows from run and genesis; a genesis of another size is refused."""
    local, changes = local_node()
    with pytest.raises(ValueError, match="16 bytes"):
        local.enter(b"short")
    assert local.genesis is None
    local.enter(GENESIS)

    assert (local.genesis, local.tag) == (GENESIS, swarm_tag("tests", GENESIS))
    assert changes == ["swarm"]


def test_the_advertised_address_takes_precedence_over_the_bound_one() -> None:
    """A port of 0 is the bound port; without an advertised host, the heartbeat names none."""
    local, changes = local_node()
    local.listens_at(Address("10.0.0.1", 9), None)
    assert (local.contact, local.heartbeat.host, local.heartbeat.port) == (
        Contact(OWN_ID, Address("10.0.0.1", 9)),
        "",
        9,
    )
    local.listens_at(Address("10.0.0.1", 9), ("192.0.2.1", 0))

    assert local.address == Address("192.0.2.1", 9)
    assert (local.heartbeat.host, local.heartbeat.port) == ("192.0.2.1", 9)
    assert local.bound == Address("10.0.0.1", 9)
    assert changes == ["address", "address"]


def test_a_port_mapping_replaces_the_bound_address_until_it_is_lost() -> None:
    """The outside address is announced; without it the bound one is, and peers take the source address."""
    local, _ = local_node()
    local.mapped_to(Address("192.0.2.1", 4000))
    assert (local.address, local.heartbeat.host, local.heartbeat.port) == (
        Address("192.0.2.1", 4000),
        "192.0.2.1",
        4000,
    )
    local.mapped_to(None)

    assert (local.address, local.heartbeat.host, local.heartbeat.port) == (Address("10.0.0.1", 8468), "", 8468)


def test_only_a_node_bound_to_every_interface_learns_its_host_from_peers() -> None:
    """A node with a real address keeps it, and a host that is no usable address is ignored."""
    local, _ = local_node()
    local.seen_as("192.0.2.1")
    assert local.address.host == "10.0.0.1"
    local, _ = local_node("0.0.0.0")
    local.seen_as("example.org")
    assert local.address.host == "0.0.0.0"
    local.seen_as("192.0.2.1")

    assert local.address == Address("192.0.2.1", 8468)
