"""Attacks of a member that owns or backs up shards and does less than it says, and of one that accuses the others."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgspec
import numpy as np

from overlay.peers import Contact
from overlay.transport import Response
from tests.harness.attacks.answered import own_shards
from tests.harness.attacks.attacker import ATTACK_S, Attack, Attacker, delta, entry_of, for_ever
from training.exchange import messages as steps
from training.exchange import ownership_messages as moves
from training.exchange.audit_messages import Audit, AuditAnswer, AuditedDelta, AuditVerdict
from training.exchange.messages import decode, encode
from training.exchange.store.records import BufferedDelta
from training.shards.state import ShardState

ATTACKS: dict[str, Attack] = {}
attack = entry_of(ATTACKS)


@attack("owns a shard, and adds a tenth of every delta")
async def _adds_a_tenth(a: Attacker) -> None:
    """It forwards them whole."""
    await own_shards(a)
    store: Any = a.host.living.exchange.store
    honest = store.add

    def add(shard: int, item: BufferedDelta, state: ShardState | None = None) -> int:
        return int(honest(shard, item if state else dataclasses.replace(item, weight=0.1 * item.weight), state))

    store.add = add
    await asyncio.sleep(ATTACK_S)


async def _acknowledges(a: Attacker, is_swallowed: Any) -> None:
    """It acknowledges pushes without adding them, those of which `is_swallowed`, called with the push, says so."""
    await own_shards(a)
    handlers, store = a.host.living.overlay._requests._handlers, a.host.living.exchange.store
    honest = handlers["push"]

    async def lie(sender: Contact, payload: bytes, stream: Any) -> Response:
        push = decode(payload, steps.Push)
        if not all(shard in store.owned for shard in push.shards) or not is_swallowed(push):
            return await honest(sender, payload, stream)
        results = [steps.PushResult(shard, "ok", store.owned[shard].state.version) for shard in push.shards]
        return Response(encode(steps.PushAnswer(results)))

    async def swallow(_sender: Contact, payload: bytes, _stream: Any) -> Response:
        return Response(encode(moves.OfferedDeltasAnswer(len(decode(payload, moves.OfferedDeltas).deltas))))

    handlers["push"], handlers["mend"] = lie, swallow
    await asyncio.sleep(ATTACK_S)


@attack("owns a shard, and adds one delta in ten")
async def _adds_one_in_ten(a: Attacker) -> None:
    await _acknowledges(a, lambda _push: a.chance.random() < 0.9)


@attack("owns a shard, and adds the deltas of its backups alone")
async def _adds_those_of_backups(a: Attacker) -> None:
    """No backup misses a delta of its own."""
    store = a.host.living.exchange.store

    def is_swallowed(push: steps.Push) -> bool:
        return all(push.node not in store.owned[shard].target_ids() for shard in push.shards)

    await _acknowledges(a, is_swallowed)


@attack("owns a shard, and adds and forwards zeros in place of the deltas")
async def _forwards_zeros(a: Attacker) -> None:
    await own_shards(a)
    handlers = a.host.living.overlay._requests._handlers
    honest = handlers["push"]

    async def lie(sender: Contact, payload: bytes, stream: Any) -> Response:
        async for _ in stream:
            pass
        push = decode(payload, steps.Push)

        async def zeros() -> Any:
            for shard in push.shards:
                for buffer in delta(shard, a.filled(0.0)):
                    yield buffer

        return await honest(sender, payload, zeros())

    handlers["push"] = lie
    await asyncio.sleep(ATTACK_S)


@attack("owns a shard, and says that nobody backs it up")
async def _has_no_backup(a: Attacker) -> None:
    """So it drops its backup, takes none, and acknowledges."""
    await own_shards(a)
    store: Any = a.host.living.exchange.store
    me = a.me
    rebalancer: Any = a.host.living.exchange.rebalancer

    async def plan_nothing() -> None:
        pass

    rebalancer._plan_moves = plan_nothing

    async def work() -> None:
        for shard, owned in list(store.owned.items()):
            if owned.has_targets:
                store.drop_backup(shard, me)

    dropping = asyncio.create_task(for_ever(work, 0.2))
    try:
        await _acknowledges(a, lambda _push: True)
    finally:
        dropping.cancel()


@attack("says as a backup that it lacks every delta that it is asked about")
async def _frames_owners(a: Attacker) -> None:
    def change(message: Any, body: list[bytes]) -> tuple[Any, list[bytes]]:
        results = [one if one.is_owner else msgspec.structs.replace(one, known="lacks") for one in message.results]
        return AuditAnswer(results), body

    a.answers("audit", change)
    await asyncio.sleep(ATTACK_S)


@attack("complains of every owner to every member, twice a second")
async def _complains(a: Attacker) -> None:
    """About deltas that it has never sent."""

    async def work() -> None:
        step = a.step() + a.chance.randrange(1, 1000)
        deltas = [AuditedDelta(shard, step, bytes(8)) for shard in range(a.shards)]
        for host in a.honest:
            owner = host.living.overlay.node_id
            await a.tell_all("audit", Audit(a.genesis, a.host.living.incarnation, deltas, owner, True))

    await for_ever(work)


@attack("says of every member that it has left it out for audits, and that others have, twice a second")
async def _condemns(a: Attacker) -> None:
    async def work() -> None:
        for host in a.honest:
            for follows in (False, True):
                await a.tell_all("audit_verdict", AuditVerdict(a.genesis, host.living.overlay.node_id, follows))

    await for_ever(work)


@attack("says as a backup and as an owner anything about the deltas that it is asked about")
async def _answers_anything(a: Attacker) -> None:
    typed = a.typed()
    a.answers("audit", lambda message, body: (typed.changed(message), body))
    a.answers("backing", lambda message, body: (typed.changed(message), body))
    await asyncio.sleep(ATTACK_S)


@attack("owns a shard, and publishes values without the deltas of one member")
async def _without_one(a: Attacker) -> None:
    """It forwards all of them."""
    await own_shards(a)
    store: Any = a.host.living.exchange.store
    honest, victim = store.add, a.honest[0].living.overlay.node_id

    def add(shard: int, item: BufferedDelta, state: ShardState | None = None) -> int:
        if state is None and item.identity.node == victim:
            item = dataclasses.replace(item, delta=np.zeros_like(item.delta))
        return int(honest(shard, item, state))

    store.add = add
    await asyncio.sleep(ATTACK_S)
