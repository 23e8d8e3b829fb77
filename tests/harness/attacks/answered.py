"""Attacks by what a member answers as an owner or a backup, by values of any kind, and by its absence."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from overlay.peers import Contact
from overlay.transport import Response
from tests.harness.attacks.attacker import ATTACK_S, LIAR, Attack, Attacker, entry_of, for_ever
from tests.harness.attacks.lies import KINDS
from training.exchange import messages as steps
from training.exchange import ownership_messages as moves
from training.exchange.messages import decode, encode
from training.exchange.terms import OwnerInfo, Term

ATTACKS: dict[str, Attack] = {}
attack = entry_of(ATTACKS)


# -- as an owner and a backup ----------------------------------------------------------------------------------------


def _spoils(name: str, requests: Iterable[str]) -> None:
    async def run(a: Attacker) -> None:
        for request in requests:
            a.answers(
                request,
                lambda message, body: (message, [one if len(one) == 32 else b"\xff" * len(one) for one in body]),
            )
        await asyncio.sleep(ATTACK_S)

    ATTACKS[name] = run


_spoils("serves NaN to all that pull", ["pull"])
_spoils("serves NaN to all that take over", ["fetch", "pull"])


@attack("says of every shard that nothing is new")
async def _stale(a: Attacker) -> None:
    def change(message: Any, _body: list[bytes]) -> tuple[Any, list[bytes]]:
        results = [steps.PullResult(one.shard, "same", *one.term, one.version) for one in message.results]
        return steps.PullAnswer(results), []

    a.answers("pull", change)
    await asyncio.sleep(ATTACK_S)


@attack("redirects every delta and every pull to itself")
async def _redirects(a: Attacker) -> None:
    def of(message: Any, kind: Any) -> Any:
        infos = [(one.shard, OwnerInfo.of(one.shard, a.term(one.shard), a.me)) for one in message.results]
        return [kind(shard, "redirect", owner_info=info) for shard, info in infos]

    a.answers("push", lambda message, body: (steps.PushAnswer(of(message, steps.PushResult)), []))
    a.answers("pull", lambda message, body: (steps.PullAnswer(of(message, steps.PullResult)), []))
    await asyncio.sleep(ATTACK_S)


@attack("acknowledges as a backup nothing, but answers")
async def _bad_backup(a: Attacker) -> None:
    def change(message: Any, body: list[bytes]) -> tuple[Any, list[bytes]]:
        return steps.ForwardAnswer([steps.ForwardResult(one.shard, "unknown") for one in message.results]), body

    a.answers("forward", change)
    await asyncio.sleep(ATTACK_S)


@attack("fences every forward with a higher term")
async def _fencing_backup(a: Attacker) -> None:
    def change(message: Any, body: list[bytes]) -> tuple[Any, list[bytes]]:
        fenced = [
            steps.ForwardResult(one.shard, "fenced", a.term(one.shard).number + 1, a.me.node_id)
            for one in message.results
        ]
        return steps.ForwardAnswer(fenced), body

    a.answers("forward", change)
    await asyncio.sleep(ATTACK_S)


@attack("has the best copy of every shard, in a survey")
async def _best_copies(a: Attacker) -> None:
    def change(message: Any, body: list[bytes]) -> tuple[Any, list[bytes]]:
        best = [
            msgspec.structs.replace(one, role="backup", term_number=one.term_number + 5, version=1 << 40)
            for one in message.statuses
        ]
        return msgspec.structs.replace(message, statuses=best), body

    a.answers("survey", change)
    await for_ever(lambda: a.tell_all("appeal", moves.TakeoverRequest(a.genesis, list(range(a.shards)))), 2.0)


async def own_shards(a: Attacker) -> list[int]:
    """The shards that it owns by right; where it has none, it takes one over as an owner does."""
    store, owner = a.host.living.exchange.store, a.owner_of(0)
    if not store.owned and owner is not None:
        term = Term(a.term(0).number + 1, a.me.node_id)
        state = owner.living.exchange.store.owned[0].state.copy()
        store.own(0, state, term, a.me, a.swarm.clock.monotonic(), by_handover=False)
        await a.claim(0, term, a.me)
        await asyncio.sleep(5.0)
    return list(store.owned)


@attack("owns a shard, and changes its values by a hundredth twice a second")
async def _wrong_values(a: Attacker) -> None:
    await own_shards(a)

    async def work() -> None:
        for owned in a.host.living.exchange.store.owned.values():
            signs = [a.chance.choice((-0.01, 0.01)) for _ in range(owned.state.value.size)]
            owned.state.value += np.array(signs, np.float32)

    await for_ever(work)


@attack("owns a shard, and acknowledges every delta without adding it")
async def _adds_nothing(a: Attacker) -> None:
    await own_shards(a)
    handlers, store = a.host.living.overlay._requests._handlers, a.host.living.exchange.store
    honest = handlers["push"]

    async def lie(sender: Contact, payload: bytes, stream: Any) -> Response:
        push = decode(payload, steps.Push)
        if not all(shard in store.owned for shard in push.shards):
            return await honest(sender, payload, stream)
        results = [steps.PushResult(shard, "ok", store.owned[shard].state.version) for shard in push.shards]
        return Response(encode(steps.PushAnswer(results)))

    handlers["push"] = lie
    await asyncio.sleep(ATTACK_S)


@attack("owns a shard, and answers with versions of any time")
async def _any_versions(a: Attacker) -> None:
    await own_shards(a)

    def change(message: Any, body: list[bytes]) -> tuple[Any, list[bytes]]:
        found = [msgspec.structs.replace(one, version=a.chance.choice((0, 1, 1 << 40))) for one in message.results]
        return steps.PullAnswer(found), body

    a.answers("pull", change)
    await asyncio.sleep(ATTACK_S)


@attack("owns a shard, and serves the chain of its first answer for ever")
async def _first_chain(a: Attacker) -> None:
    await own_shards(a)
    first: dict[tuple[int, ...], tuple[Any, list[bytes]]] = {}

    def change(message: Any, body: list[bytes]) -> tuple[Any, list[bytes]]:
        return first.setdefault(tuple(one.shard for one in message.results), (message, body))

    a.answers("pull", change)
    await asyncio.sleep(ATTACK_S)


@attack("takes every request and answers none")
async def _silent(a: Attacker) -> None:
    handlers = a.host.living.overlay._requests._handlers

    async def silent(_sender: Contact, _payload: bytes, _stream: Any) -> Response:
        await asyncio.sleep(3600.0)
        raise AssertionError

    for name in list(handlers):
        handlers[name] = silent
    await asyncio.sleep(ATTACK_S)


# -- anything --------------------------------------------------------------------------------------------------------


@attack("sends requests of every kind with any values")
async def _anything(a: Attacker) -> None:
    typed = a.typed()

    async def work() -> None:
        name = a.chance.choice(list(KINDS))
        message = msgspec.structs.replace(typed.value(KINDS[name][0]), genesis=a.genesis)
        await a.ask(a.chance.choice(a.honest), name, message)

    await for_ever(work, 0.05)


@attack("answers every request with any values")
async def _any_answer(a: Attacker) -> None:
    typed = a.typed()
    for name in KINDS:
        a.answers(name, lambda message, body: (typed.changed(message), body))
    await asyncio.sleep(ATTACK_S)


@attack("crashes and returns every ten seconds")
async def _flaps(a: Attacker) -> None:
    async def work() -> None:
        await a.swarm.kill(LIAR)
        await asyncio.sleep(5.0)
        a.swarm.start(LIAR, bootstrap="n0")

    await for_ever(work, 10.0)


@attack("is gone")
async def _gone(a: Attacker) -> None:
    await a.swarm.kill(LIAR)
    await asyncio.sleep(ATTACK_S)
