"""overlay_large: one story of a thousand overlay nodes with loss, stalls and churn all the time.

Simulated network, real overlay code, virtual time. All nodes join at one moment, look each other up, and train for some
minutes while nodes die, leave, return and are replaced. Then a few die at one moment, and last half of all that are
left. From the first to the last moment datagrams are lost and the loops of nodes stall. Signatures are keyed hashes
(tests/harness/environment/quick_identity.py): none of the figures is a time of this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.record import Outcome, Series
from p2pnode.overlay.overlay import Overlay
from p2pnode.overlay.peers import PeerChange
from tests.harness.environment.quick_identity import quick_identities
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.swarms.overlay_churn import Churn, Churned
from tests.harness.swarms.overlay_liveness import BOUND_S, STALL_EVERY_S, STALL_S, holds
from tests.harness.swarms.overlay_scale import Found, Joined, join, pairs_of, recall, resolve
from tests.harness.swarms.overlay_swarm import OverlayWorld

NODES = 1000
REPETITIONS = 5
LOSS = 0.02
PAIRS = 500
SETTLE_S = 30.0
CHURN_MINUTES = 1
MEDIAN_LIFE_S = 600.0
#: So many die at one moment; the time until no other node lists them is measured.
KILLED = 5
#: Half of the nodes are dead for so long when the others are asked how many there are.
HALVED_S = 60.0
#: A node that runs for so long without a break and is declared dead is a false death.
LIVED_S = 30.0


@dataclass
class Story:
    """What became of one swarm."""

    joined: Joined
    churned: Churned = field(default_factory=Churned)
    peers: float = 0.0
    settled_error: float = 0.0
    stalls: int = 0
    false_deaths: list[str] = field(default_factory=list)
    gone_s: float = 0.0
    resolved: Found = field(default_factory=lambda: Found(0.0, ()))
    recall: float = 0.0
    dead_returned: int = 0
    halved_error: float = 0.0


class _World(OverlayWorld):
    """A world that notes false deaths, and whose nodes stall."""

    def __init__(self, seed: int, loss: float) -> None:
        super().__init__(seed, loss=loss, recording=False)
        self.false_deaths: list[str] = []
        self.stalls = 0
        self._lives: dict[bytes, tuple[int, float]] = {}
        self._rng = random.Random(f"{seed}/stalls")

    def make(self, number: int, **options: Any) -> Overlay:
        overlay = super().make(number, **options)
        self._lives[overlay.node_id] = number, self.clock.monotonic()
        overlay.on_change(self._changed)
        return overlay

    def _changed(self, change: PeerChange) -> None:
        if change.kind == "dead":
            number, began = self._lives[change.node_id]
            node, now = self.nodes.get(number), self.clock.monotonic()
            if node is not None and node.node_id == change.node_id and now - began > LIVED_S:
                self.false_deaths.append(f"{now:.1f}: {change.reason}")

    async def keep_stalling(self) -> None:
        """Stall the loop of one node after the other, each once in `STALL_EVERY_S` on average."""
        while True:
            await asyncio.sleep(self._rng.expovariate(max(1, len(self.nodes)) / STALL_EVERY_S))
            if self.nodes:
                self.stall(self._rng.choice(list(self.nodes)), STALL_S)
                self.stalls += 1


def estimate_error(nodes: Sequence[Overlay], running: int) -> float:
    """The median over the nodes of the relative error of their estimates."""
    return statistics.median(abs(node.population().estimate / running - 1) for node in nodes)


async def _gone_s(world: _World, rng: random.Random) -> float:
    """Some nodes die at one moment: virtual seconds until no other node lists any of them."""
    victims = rng.sample(list(world.nodes), KILLED)
    ids = [world.nodes[number].node_id for number in victims]
    await asyncio.gather(*(world.kill(number) for number in victims))
    listing = [(node, node_id) for node in world.nodes.values() for node_id in ids]
    died = world.clock.monotonic()
    while listing := [(node, node_id) for node, node_id in listing if holds(node, node_id)]:
        assert world.clock.monotonic() - died < 300, f"{len(listing)} still list a dead node"
        await asyncio.sleep(0.25)
    return world.clock.monotonic() - died


async def _churn(world: _World, nodes: int, minutes: int, median_life_s: float, rng: random.Random) -> Churned:
    churn = Churn(world, nodes, median_life_s, rng)
    churn.joined_at = dict.fromkeys(world.nodes, world.clock.monotonic() - SETTLE_S)
    for number in list(world.nodes):
        churn.begin(number)
    for _ in range(minutes):
        await churn.minute()
    lives = list(churn.lives)
    for task in lives:
        task.cancel()
    await asyncio.gather(*lives, return_exceptions=True)
    for number in [number for number in world.nodes if number not in churn.joined_at]:
        await world.kill(number)  # it was on its way in or out
    churn.judge()
    return churn.found


def run(
    seed: int,
    nodes: int,
    *,
    pairs: int = PAIRS,
    minutes: int = CHURN_MINUTES,
    median_life_s: float = MEDIAN_LIFE_S,
    loss: float = LOSS,
) -> Story:
    """The whole story of one seed."""

    async def story() -> Story:
        world, rng = _World(seed, loss), random.Random(f"{seed}/large")
        stalling = asyncio.get_running_loop().create_task(world.keep_stalling())
        found = Story(await join(world, nodes, pairs, rng))
        await asyncio.sleep(SETTLE_S)
        swarm = list(world.nodes.values())
        found.peers = statistics.median(len(node.peers) for node in swarm)
        found.settled_error = estimate_error(swarm, len(swarm))
        found.churned = await _churn(world, nodes, minutes, median_life_s, rng)
        found.gone_s = await _gone_s(world, rng)
        victims = rng.sample(list(world.nodes), len(world.nodes) // 2)
        await asyncio.gather(*(world.kill(number) for number in victims))
        died = world.clock.monotonic()
        living = list(world.nodes.values())
        found.resolved = await resolve(pairs_of(living, pairs, rng))
        found.recall, found.dead_returned = await recall(living, max(20, pairs // 10), rng)
        await asyncio.sleep(max(0.0, died + HALVED_S - world.clock.monotonic()))
        found.halved_error = estimate_error(living, len(living))
        stalling.cancel()
        await asyncio.gather(stalling, return_exceptions=True)
        found.stalls, found.false_deaths = world.stalls, world.false_deaths
        await world.stop()
        return found

    with quick_identities():
        return VirtualLoop().run(story(), limit_s=3600.0)


def measure(arguments: argparse.Namespace) -> Outcome:
    nodes, minutes = arguments.nodes or NODES, round(arguments.minutes or CHURN_MINUTES)
    seeds = range(arguments.repetitions or REPETITIONS)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        return outcome(list(pool.map(partial(run, nodes=nodes, minutes=minutes), seeds)), nodes, minutes)


def outcome(found: Sequence[Story], nodes: int, minutes: int) -> Outcome:
    """The figures of these stories, one per repetition."""
    churned = [each.churned for each in found]
    conditions = (
        f"simulated network, real overlay code: {nodes} nodes, 1 to 10 ms one way, {LOSS:.0%} of datagrams lost, each "
        f"node's loop stalls {1000 * STALL_S:.0f} ms every {STALL_EVERY_S:g} s on average; all join at one moment; "
        f"{PAIRS} pairs look each other up; {SETTLE_S:g} s later {minutes} min in which nodes end with a median "
        f"life of {MEDIAN_LIFE_S / 60:g} minutes, three quarters killed, a third of them back on their disk; {KILLED} "
        f"killed at one moment; then half of all; one seed per repetition; seconds are virtual"
    )
    at = f"{nodes} nodes, loss, stalls and churn"
    return Outcome(
        "overlay_large",
        conditions,
        [
            Series(f"{at}: start to the last joined", "virtual s", [one.joined.joined_s for one in found], "≤ 60"),
            Series(
                f"{at}: pairs that find each other", "%", [100 * one.joined.resolved.right for one in found], "≥ 99.9"
            ),
            Series(
                f"{at}: rounds of a lookup, median",
                "",
                [statistics.median(each.rounds for each in one.joined.resolved.took) for one in found],
                "≤ 4",
            ),
            Series(
                f"{at}: datagrams that a node sends until all have joined", "", [one.joined.datagrams for one in found]
            ),
            Series(
                f"{at}: bytes that a node sends in datagrams until all have joined",
                "KiB",
                [one.joined.datagram_bytes / 1024 for one in found],
            ),
            Series(f"{at}: proofs that a node makes until all have joined", "", [one.joined.proofs for one in found]),
            Series(f"{at}: peers of a node, median", "", [one.peers for one in found]),
            Series(
                f"{at}: error of the estimate, median of the nodes",
                "%",
                [100 * one.settled_error for one in found],
                "≤ 10",
            ),
            Series(f"{at}: nodes that ended meanwhile", "", [each.deaths + each.leaves for each in churned]),
            Series(f"{at}: lookups right", "%", [100 * each.right / each.lookups for each in churned], "≥ 99"),
            Series(f"{at}: nodes isolated at the end", "", [each.isolated + each.unreached for each in churned], "≤ 0"),
            Series(f"{at}: dead in routing tables", "%", [100 * each.dead_entries for each in churned], "≤ 2"),
            Series(f"{at}: dead in lists of peers", "%", [100 * each.dead_peers for each in churned], "≤ 2"),
            Series(f"{at}: living nodes declared dead", "", [len(one.false_deaths) for one in found], "≤ 0"),
            Series(
                f"{at}: {KILLED} killed to gone everywhere",
                "virtual s",
                [one.gone_s for one in found],
                f"≤ {BOUND_S:g}",
            ),
            Series(
                f"{at}: half dead, lookups that succeed", "%", [100 * one.resolved.right for one in found], "≥ 99.5"
            ),
            Series(f"{at}: half dead, recall of the 20 closest", "%", [100 * one.recall for one in found]),
            Series(f"{at}: half dead, dead among results", "", [one.dead_returned for one in found], "≤ 0"),
            Series(
                f"{at}: half dead, error of the estimate after {HALVED_S:g} s, median of the nodes",
                "%",
                [100 * one.halved_error for one in found],
                "≤ 15",
            ),
        ],
    )
