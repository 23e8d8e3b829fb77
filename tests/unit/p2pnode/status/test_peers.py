"""The peers of a node as the status lists them: their order, shards, samples, and the age of their progress."""

from __future__ import annotations

import asyncio

from p2pnode import __version__
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
