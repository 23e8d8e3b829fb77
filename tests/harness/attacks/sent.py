"""Attacks by what a member announces and sends: steps, deltas, repairs, claims, orders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from overlay.peers import Activity
from tests.harness.attacks.attacker import ATTACK_S, Attack, Attacker, contact_of, entry_of, for_ever
from training.exchange import messages as steps
from training.exchange import ownership_messages as moves
from training.exchange.terms import GENERATION, Fence, OwnerInfo, Term

ATTACKS: dict[str, Attack] = {}
attack = entry_of(ATTACKS)


# -- what it announces -----------------------------------------------------------------------------------------------


@attack("announces that it trains, and never moves")
async def _never_moves(a: Attacker) -> None:
    assert a.host.trainer is not None
    a.host.trainer.hang()
    a.announces(activity=Activity.TRAINING, step_seconds=1e9, step=a.host.living.progress.step)
    await asyncio.sleep(ATTACK_S)


@attack("announces step 10⁹")
async def _far_step(a: Attacker) -> None:
    a.announces(activity=Activity.TRAINING, step=10**9)
    await asyncio.sleep(ATTACK_S)


@attack("announces the last step that a message takes")
async def _last_step(a: Attacker) -> None:
    a.announces(activity=Activity.TRAINING, step=(1 << 48) - 1)
    await asyncio.sleep(ATTACK_S)


@attack("announces a new activity all the time")
async def _flickers(a: Attacker) -> None:
    async def change() -> None:
        a.host.living.overlay.announce(activity=a.chance.choice(list(Activity)))

    await for_ever(change, 0.1)


@attack("announces 2⁴⁷ samples a step")
async def _many_samples(a: Attacker) -> None:
    a.announces(samples=1 << 47)
    await asyncio.sleep(ATTACK_S)


@attack("changes whether it may own all the time")
async def _willing(a: Attacker) -> None:
    async def change() -> None:
        a.host.living.overlay.set_willing(a.chance.random() < 0.5)

    await for_ever(change, 0.3)


# -- deltas ----------------------------------------------------------------------------------------------------------


def _pushes(name: str, values: Callable[[Attacker], np.ndarray[Any, Any]], **changes: Any) -> None:
    async def run(a: Attacker) -> None:
        await for_ever(lambda: a.push(values(a), **changes))

    ATTACKS[name] = run


_pushes("pushes NaN", lambda a: a.filled(np.nan))
_pushes("pushes infinity", lambda a: a.filled(np.inf))
_pushes("pushes ±3·10³⁸", lambda a: a.filled(a.chance.choice([3e38, -3e38])))
_pushes("pushes 10¹⁴", lambda a: a.filled(1e14))
_pushes("pushes with the weight 10⁶", lambda a: a.filled(0.01), weight=1e6)
_pushes("pushes with the weight 10⁻¹²", lambda a: a.filled(0.01), weight=1e-12)
_pushes("pushes too few values", lambda _: np.ones(3, np.float32))
_pushes("pushes under the last step", lambda a: a.filled(0.001), step=(1 << 48) - 1)
_pushes("pushes under the last start", lambda a: a.filled(0.001), incarnation=(1 << 48) - 1)
_pushes("pushes with a base of long ago", lambda a: a.filled(0.001), base_step=0)


@attack("pushes in another's name")
async def _in_another_name(a: Attacker) -> None:
    await for_ever(lambda: a.push(a.filled(0.01), node=contact_of(a.honest[0]).node_id))


@attack("replays one delta")
async def _replays(a: Attacker) -> None:
    step = a.step() + 5
    await for_ever(lambda: a.push(a.filled(0.001), step=step), 0.1)


# -- repairs ---------------------------------------------------------------------------------------------------------


def _mends(name: str, values: Callable[[Attacker], np.ndarray[Any, Any]], **changes: Any) -> None:
    async def run(a: Attacker) -> None:
        await for_ever(lambda: a.mend(values(a), **changes))

    ATTACKS[name] = run


_mends("repairs with NaN", lambda a: a.filled(np.nan))
_mends("repairs with ±3·10³⁸", lambda a: a.filled(a.chance.choice([3e38, -3e38])))
_mends("repairs with weight 10⁶ of 10⁹ workers", lambda a: a.filled(0.001), weight=1e6, workers=1e9)


@attack("repairs under the next steps of the others")
async def _mends_the_future(a: Attacker) -> None:
    async def work() -> None:
        for host in a.honest:
            step = host.living.progress.step + a.chance.randrange(1, 40)
            await a.mend(a.filled(0.0), node=contact_of(host).node_id, incarnation=host.living.incarnation, step=step)

    await for_ever(work)


@attack("repairs under the step that each other trains, ten times a second")
async def _mends_the_present(a: Attacker) -> None:
    async def work() -> None:
        for host in a.honest:
            identity = {"node": contact_of(host).node_id, "incarnation": host.living.incarnation}
            await a.mend(a.filled(0.0), **identity, step=host.living.progress.step + 1)

    await for_ever(work, 0.1)


@attack("repairs under identities of nobody")
async def _mends_of_nobody(a: Attacker) -> None:
    await for_ever(lambda: a.mend(a.filled(0.0), node=a.chance.randbytes(20)), 0.1)


# -- claims ----------------------------------------------------------------------------------------------------------


@attack("claims every shard under a term of 2⁶²")
async def _claims_highest(a: Attacker) -> None:
    async def work() -> None:
        for shard in range(a.shards):
            await a.claim(shard, Term((1 << 62) - 1, a.me.node_id), a.me)

    await for_ever(work)


@attack("claims every shard under the next term, twice a second")
async def _claims(a: Attacker) -> None:
    async def work() -> None:
        for shard in range(a.shards):
            await a.claim(shard, Term(a.term(shard).number + 1, a.me.node_id), a.me)

    await for_ever(work)


@attack("claims every shard for another node, twice a second")
async def _claims_for_another(a: Attacker) -> None:
    async def work() -> None:
        for shard in range(a.shards):
            await a.claim(shard, Term(a.term(shard).number + 1, a.me.node_id), contact_of(a.chance.choice(a.honest)))

    await for_ever(work)


def _fences(name: str, number: Callable[[int], int]) -> None:
    async def run(a: Attacker) -> None:
        async def work() -> None:
            found = [Fence(shard, number(a.term(shard).number), a.me.node_id) for shard in range(a.shards)]
            await a.tell_all("where_is", steps.LocateOwners(a.genesis, [], [], found))

        await for_ever(work)

    ATTACKS[name] = run


_fences("has seen terms of 2⁶²", lambda _: (1 << 62) - 1)
_fences("has seen terms of 1,000 restarts", lambda number: number + 1000 * GENERATION)
_fences("has seen the next term, twice a second", lambda number: number + 1)


@attack("finds no owner of any shard")
async def _appeals(a: Attacker) -> None:
    await for_ever(lambda: a.tell_all("appeal", moves.TakeoverRequest(a.genesis, list(range(a.shards)))))


def _orders(name: str, request: str, kind: Callable[..., msgspec.Struct]) -> None:
    async def run(a: Attacker) -> None:
        async def work() -> None:
            infos = [OwnerInfo.of(n, Term(a.term(n).number + 1, a.me.node_id), a.me) for n in range(a.shards)]
            extra = () if kind is moves.Release else ([a.chance.randrange(1, 1 << 40)] * a.shards,)
            await a.tell_all(request, kind(a.genesis, infos, *extra))

        await for_ever(work)

    ATTACKS[name] = run


_orders("makes all learn every shard", "learn", moves.Learn)
_orders("hands every shard over to all", "hand_over", moves.HandOver)
_orders("releases every backup", "release", moves.Release)


@attack("offers what it has recorded: a billion deltas of each node")
async def _records(a: Attacker) -> None:
    async def work() -> None:
        rows = [(contact_of(host).node_id, host.living.incarnation, [(0, 10**9)]) for host in a.honest]
        await a.tell_all("offer", moves.Offer(a.genesis, list(range(a.shards)), rows))

    await for_ever(work)
