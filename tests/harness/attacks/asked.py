"""Attacks by what a member asks for: values of steps to come, final values, lists, histories, chains, the end."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.harness.attacks.attacker import Attack, Attacker, contact_of, entry_of, for_ever
from training.exchange import messages as steps
from training.exchange import ownership_messages as moves
from training.goal_announcement import GoalReached

ATTACKS: dict[str, Attack] = {}
#: Attacks on what only this barrier does.
METHODS = {"pulls as of a step far ahead, under bsp": "bsp"}
attack = entry_of(ATTACKS)


def _wanted(a: Attacker) -> list[steps.Wanted]:
    return [steps.Wanted(shard, 0, b"", 0) for shard in range(a.shards)]


@attack("pulls as of a step far ahead, under bsp")
async def _future(a: Attacker) -> None:
    """There a pull makes the deltas of its step visible."""

    async def work() -> None:
        await a.tell_all("pull", steps.Pull(a.genesis, (1 << 48) - 1, "float32", _wanted(a)))

    await for_ever(work)


@attack("asks for final values of every shard, and says that it has them")
async def _final(a: Attacker) -> None:
    async def work() -> None:
        step = (1 << 48) - 1
        await a.tell_all("pull", steps.Pull(a.genesis, step, "float32", _wanted(a), is_final=True))
        await a.tell_all("final_buffers", moves.FinalBuffers(a.genesis))
        await a.tell_all("final_done", moves.FinalDone(a.genesis))

    await for_ever(work, 0.2)


@attack("says that the goal of the run is reached")
async def _goal(a: Attacker) -> None:
    """No goal is set in this swarm."""

    async def work() -> None:
        for until in ("", "accuracy>=0.1"):
            await a.tell_all("goal_reached", GoalReached(a.genesis, until, a.step()))

    await for_ever(work)


@attack("asks for all that others list, record and log, ten times a second")
async def _lists(a: Attacker) -> None:
    async def work() -> None:
        rows = [(contact_of(host).node_id, host.living.incarnation, [(0, 100)]) for host in a.honest]
        questions: list[tuple[str, Any]] = [
            ("list", moves.ListDeltas(a.genesis, [(n, *a.term(n), 1 << 20) for n in range(a.shards)])),
            ("past", moves.DeltaHistory(a.genesis, contact_of(a.honest[0]).node_id)),
            ("survey", moves.Survey(a.genesis, list(range(a.shards)))),
            ("fetch", moves.Fetch(a.genesis, list(range(a.shards)))),
            ("offer", moves.Offer(a.genesis, list(range(a.shards)), rows)),
            ("seek", moves.FindDeltas(a.genesis, 0, rows)),
            ("backing", moves.ConfirmBackup(a.genesis, list(range(a.shards)))),
        ]
        await asyncio.gather(*(a.tell_all(name, message) for name, message in questions))

    await for_ever(work, 0.1)


@attack("follows every chain from its last version, twenty times a second")
async def _follows(a: Attacker) -> None:
    """Who has the last change waits half as long for the next one."""

    async def work() -> None:
        wanted = []
        for shard in range(a.shards):
            chain, published = b"", 0
            if (owner := a.owner_of(shard)) is not None:
                publisher: Any = owner.living.exchange.pull_client._publisher
                if (found := publisher.published(shard)) is not None:
                    chain, published = found.chain, found.version
            wanted.append(steps.Wanted(shard, *a.term(shard), 1, chain, published))
        await a.tell_all("pull", steps.Pull(a.genesis, a.step(), "float32", wanted, follows=True))

    await for_ever(work, 0.05)


@attack("is sixty-four followers of chains that never were")
async def _strange_chains(a: Attacker) -> None:
    async def work() -> None:
        wanted = [steps.Wanted(n, *a.term(n), 1 << 40, a.chance.randbytes(8), 1 << 40) for n in range(a.shards)]
        await a.tell_all("pull", steps.Pull(a.genesis, a.step(), "bfloat16", wanted, follows=True))

    await for_ever(work, 0.05)
