"""The peers of a node as the status lists them, and those that it lost."""

from __future__ import annotations

import asyncio
from typing import Literal

from p2pnode import __version__
from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Activity, Contact, Peer, PeerChange
from p2pnode.status.peers import KEPT_S, MAX_KEPT, LostPeers
from tests.harness.swarms.status_swarm import report, simulate
from tests.harness.swarms.swarm import Swarm


def test_peers_are_listed_furthest_ahead_first() -> None:
    """Each peer has its lag behind this node; those ahead come first."""

    async def scenario(swarm: Swarm) -> None:
        hosts = swarm.start_many(3)
        await swarm.until(lambda: all(host.living.progress.step >= 3 for host in hosts), within_s=90, what="all train")
        own = report(swarm, hosts[0])
        peers = own.peers()

        assert len(peers) == 2
        assert [peer.step for peer in peers] == sorted((peer.step for peer in peers), reverse=True)
        assert all(peer.lag == own.status().step - peer.step for peer in peers)
        assert [peer.version for peer in peers] == [__version__] * 2

    simulate(scenario, barrier__method="asp")


def test_peers_have_their_shards_their_samples_and_the_age_of_their_progress() -> None:
    """All shards together are the swarm's; a peer whose trainer hangs makes no progress, and its age rises."""

    async def scenario(swarm: Swarm) -> None:
        hosts = swarm.start_many(3)
        await swarm.until(lambda: all(host.living.progress.step >= 3 for host in hosts), within_s=90, what="all train")
        own = report(swarm, hosts[0])

        def owned() -> int:
            return own.status().exchange.shards_owned + sum(peer.shards or 0 for peer in own.peers())

        await swarm.until(lambda: owned() == own.status().exchange.shards, within_s=60, what="every owner is known")
        assert all(peer.samples > 0 for peer in own.peers())
        hung = hosts[1]
        assert hung.trainer is not None
        hung.trainer.hang()
        await asyncio.sleep(20.0)
        ages = {peer.id: peer.progress_seconds for peer in own.peers()}
        assert ages.pop(hung.living.identity.node_id.hex()) > 15.0
        assert all(age < 10.0 for age in ages.values())

    simulate(scenario, barrier__method="asp")


def peer(number: int) -> Peer:
    node_id = number.to_bytes(20, "big")
    contact = Contact(node_id, Address("10.0.0.1", 8000 + number))
    return Peer(contact, 1, 1, Activity.TRAINING, 10 * number, 0.1, 0, True, 0.0, 0.0, 0.0)


def change(number: int, kind: Literal["dead", "left", "up", "returned", "restarted"]) -> PeerChange:
    gone = kind in ("dead", "left")
    return PeerChange(peer(number).node_id, kind, "no answer", peer(number) if gone else None)


def test_the_newest_loss_comes_first_and_says_when_how_and_at_which_step() -> None:
    """With the address that the peer had, and the reason."""
    now = [100.0]
    lost = LostPeers(lambda: now[0])
    lost.note(change(1, "dead"))
    now[0] = 107.5
    lost.note(change(2, "left"))
    now[0] = 110.0
    rows = lost.rows()
    assert [(row.id[-2:], row.how, row.seconds_ago, row.step) for row in rows] == [
        ("02", "left", 2.5, 20),
        ("01", "dead", 10.0, 10),
    ]
    assert (rows[1].address, rows[1].reason) == ("10.0.0.1:8001", "no answer")


def test_a_peer_that_is_back_is_not_missing() -> None:
    """Neither one that returns nor one that starts again; what was never known is not missed either."""
    lost = LostPeers(lambda: 0.0)
    for number, kind in ((1, "returned"), (2, "up"), (3, "restarted")):
        lost.note(change(number, "dead"))
        lost.note(change(number, kind))  # type: ignore[arg-type]
    lost.note(PeerChange(peer(4).node_id, "dead", "never answered"))
    assert lost.rows() == []


def test_old_losses_go_and_the_newest_are_kept() -> None:
    """An hour later it is no news; of many losses the newest stay, and one that dies twice is there once."""
    now = [0.0]
    lost = LostPeers(lambda: now[0])
    for number in range(1, MAX_KEPT + 6):
        lost.note(change(number, "dead"))
    lost.note(change(10, "dead"))
    numbers = [int(row.id, 16) for row in lost.rows()]
    assert len(numbers) == len(set(numbers)) == MAX_KEPT
    assert numbers[:2] == [10, MAX_KEPT + 5]
    assert min(numbers) == 6
    now[0] = KEPT_S + 1
    assert lost.rows() == []
