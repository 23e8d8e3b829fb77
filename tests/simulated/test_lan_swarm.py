"""Nodes that find each other in the local network, without a bootstrap: one swarm comes of it, and stays one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from p2pnode.overlay.bootstrap.lan import Announcement
from p2pnode.overlay.kademlia.messages import PROTOCOL_VERSION
from tests.harness.runner.stories import played_by
from tests.harness.swarms import simulated_swarm
from tests.harness.swarms.swarm import Swarm
from tests.harness.trainers.stub_trainer import StubTrainer

OnAnnouncement = Callable[[str, Mapping[str, str], Iterable[str], int], None]


class Ether:
    """The local network: every node receives all announcements, earlier ones too."""

    def __init__(self) -> None:
        self.said: dict[str, tuple[dict[str, str], str, int]] = {}
        self.members: dict[str, OnAnnouncement] = {}

    def say(self, name: str, properties: dict[str, str], host: str, port: int) -> None:
        self.said[name] = (properties, host, port)
        for on_announcement in list(self.members.values()):
            on_announcement(name, properties, [host], port)


class FakeLan:
    def __init__(self, ether: Ether, host: str) -> None:
        self.ether = ether
        self.host = host

    async def start(self, own: Announcement, host: str, on_announcement: OnAnnouncement) -> None:
        self.ether.members[self.host] = on_announcement
        for name, (properties, other, port) in list(self.ether.said.items()):
            on_announcement(name, properties, [other], port)
        await self.announce(own)

    async def announce(self, own: Announcement) -> None:
        self.ether.say(self.host, own.properties(), self.host, own.port)

    async def stop(self) -> None:
        self.ether.members.pop(self.host, None)
        self.ether.said.pop(self.host, None)


class NoMulticast(FakeLan):
    async def start(self, own: Announcement, host: str, on_announcement: OnAnnouncement) -> None:
        raise OSError("no such device")


def play(story: Callable[[Swarm, Ether], Any], seed: int) -> None:
    ether = Ether()

    def make() -> Swarm:
        swarm = Swarm(seed=seed, make_trainer=lambda name: StubTrainer(name, step_s=0.5))
        swarm.make_lan = lambda address: FakeLan(ether, address)
        return swarm

    simulated_swarm.play(lambda swarm: story(swarm, ether), make)


def geneses(swarm: Swarm) -> set[bytes | None]:
    return {host.living.overlay.genesis for host in swarm.running()}


def together(swarm: Swarm, count: int) -> bool:
    return all(len(host.living.overlay.peers) == count - 1 for host in swarm.running())


@played_by(play, 91)
async def test_nodes_that_start_together_make_one_swarm(swarm: Swarm, ether: Ether) -> None:
    """Five at one moment, without a bootstrap: one founds, all train together, and a sixth joins later. Their
    announcements show that they have joined."""
    for number in range(5):
        swarm.start(f"n{number}")
    await swarm.until(lambda: together(swarm, 5), within_s=30, what="the five know each other")
    assert len(geneses(swarm)) == 1
    assert sum(host.living.entry.founder for host in swarm.running()) == 1
    lowest = min(host.living.identity.node_id for host in swarm.running())
    assert [h.living.identity.node_id for h in swarm.running() if h.living.entry.founder] == [lowest]
    swarm.start("late")
    await swarm.until(lambda: together(swarm, 6), within_s=10, what="the sixth is in")
    assert {said["in"] for said, _, _ in ether.said.values()} == {"1"}
    await swarm.until(
        lambda: all(host.living.progress.step > 5 for host in swarm.running()), within_s=60, what="all train"
    )


@played_by(play, 92)
async def test_another_run_and_junk_are_ignored(swarm: Swarm, ether: Ether) -> None:
    """Two runs in one network stay two; malformed announcements and an unused address prevent no founding or
    joining."""
    good = {"v": str(PROTOCOL_VERSION), "run": "default", "id": "01" * 20, "in": "0"}
    ether.say("dead", good, "10.0.9.9", 8468)  # a lower id than any, that never founds
    ether.say("junk", {"run": "default"}, "10.0.9.8", 8468)
    ether.say("elsewhere", good | {"id": "02" * 20, "in": "1"}, "8.8.8.8", 53)
    for name, run in (("a0", "default"), ("a1", "default"), ("b0", "other"), ("b1", "other")):
        swarm.start(name, swarm__run=run)
    await swarm.until(lambda: together(swarm, 2), within_s=60, what="two and two")
    assert len(geneses(swarm)) == 2
    a0, a1 = (swarm.hosts[name].living.overlay.genesis for name in ("a0", "a1"))
    assert a0 == a1


@played_by(play, 93)
async def test_without_multicast_nodes_still_join(swarm: Swarm, ether: Ether) -> None:
    """An event, and the bootstraps as ever."""
    swarm.make_lan = lambda address: NoMulticast(ether, address)
    swarm.start("n0")
    swarm.start("n1", bootstrap="n0")
    await swarm.until(lambda: together(swarm, 2), within_s=20, what="they know each other")
    assert len(swarm.of("lan_discovery_failed")) == 2


@played_by(play, 94)
async def test_a_founder_that_returns_finds_its_swarm_at_another_address(swarm: Swarm, ether: Ether) -> None:
    """Its remembered peers have moved meanwhile; the local network knows where."""
    swarm.start("n0")
    swarm.start("n1")
    await swarm.until(lambda: together(swarm, 2), within_s=30, what="they know each other")
    genesis = swarm.hosts["n0"].living.overlay.genesis
    await swarm.kill("n0")
    swarm.start("n2")
    await swarm.until(lambda: len(swarm.hosts["n2"].living.overlay.peers) == 1, within_s=30, what="a third is in")
    await swarm.kill("n1")
    swarm.start("n0")
    await swarm.until(lambda: together(swarm, 2), within_s=60, what="it met the third, which it never knew")
    assert geneses(swarm) == {genesis}
