"""Attacks of a member that says nothing wrong: it takes as long as it may, or promises for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from overlay.peers import Contact
from overlay.transport import Buffer, Response, TransportError
from tests.harness.attacks.answered import own_shards
from tests.harness.attacks.attacker import ATTACK_S, Attack, Attacker, contact_of, delta, entry_of
from training.exchange import messages as steps
from training.exchange.messages import decode, encode
from training.exchange.push_results import SIGN_OF_LIFE

ATTACKS: dict[str, Attack] = {}
attack = entry_of(ATTACKS)


def _handle(a: Attacker, name: str, handler: Any) -> Any:
    handlers = a.host.living.overlay._requests._handlers
    honest, handlers[name] = handlers[name], handler
    return honest


@attack("owns a shard, and says for ever that it is at work on each delta")
async def _at_work(a: Attacker) -> None:
    """An owner that waits for its backup answers like this, for a moment."""
    await own_shards(a)

    async def work() -> AsyncIterator[Buffer]:
        while True:
            await asyncio.sleep(0.25)
            yield SIGN_OF_LIFE

    async def promise(_sender: Contact, _payload: bytes, _stream: Any) -> Response:
        return Response(encode(steps.PushAnswer([], streams=True)), work())

    _handle(a, "push", promise)
    await asyncio.sleep(ATTACK_S)


async def _put_off(a: Attacker, name: str, kind: Any, answer: Any) -> None:
    await own_shards(a)
    store: Any = a.host.living.exchange.store

    def change(message: Any, body: list[bytes]) -> tuple[Any, list[bytes]]:
        results = [answer(one.shard) if one.shard in store.owned else one for one in message.results]
        kept = [] if any(one.shard in store.owned for one in message.results) else body
        return kind(results), kept

    a.answers(name, change)


@attack("owns a shard, and has each pull come again later")
async def _later(a: Attacker) -> None:
    await _put_off(a, "pull", steps.PullAnswer, lambda shard: steps.PullResult(shard, "later"))
    await asyncio.sleep(ATTACK_S)


@attack("owns a shard, and has each delta come again")
async def _retry(a: Attacker) -> None:
    await _put_off(a, "push", steps.PushAnswer, lambda shard: steps.PushResult.retry(shard, "moving"))
    await asyncio.sleep(ATTACK_S)


@attack("owns a shard, and refuses each delta as late")
async def _refuses(a: Attacker) -> None:
    await own_shards(a)
    store: Any = a.host.living.exchange.store

    async def refuse(sender: Contact, payload: bytes, stream: Any) -> Response:
        push = decode(payload, steps.Push)
        if not all(shard in store.owned for shard in push.shards):
            response: Response = await honest(sender, payload, stream)
            return response
        return Response(encode(steps.PushAnswer([steps.PushResult.refused(shard, "late") for shard in push.shards])))

    honest = _handle(a, "push", refuse)
    await asyncio.sleep(ATTACK_S)


async def _slowly(buffers: Any) -> AsyncIterator[Buffer]:
    """A byte a second."""
    if hasattr(buffers, "__aiter__"):
        async for one in buffers:
            for at in range(len(one)):
                await asyncio.sleep(1.0)
                yield bytes(one[at : at + 1])
        return
    for one in buffers:
        for at in range(len(one)):
            await asyncio.sleep(1.0)
            yield bytes(one[at : at + 1])


def _reads_slowly(a: Attacker, names: Iterable[str]) -> None:
    def slow(honest: Any) -> Any:
        async def handler(sender: Contact, payload: bytes, stream: Any) -> Response:
            response: Response = await honest(sender, payload, _slowly(stream))
            return response

        return handler

    handlers = a.host.living.overlay._requests._handlers
    for name in names:
        handlers[name] = slow(handlers[name])


@attack("owns a shard, and sends each value a byte a second")
async def _sends_slowly(a: Attacker) -> None:
    await own_shards(a)
    handlers = a.host.living.overlay._requests._handlers
    honest = handlers["pull"]

    async def handler(sender: Contact, payload: bytes, stream: Any) -> Response:
        response: Response = await honest(sender, payload, stream)
        return Response(response.head, _slowly(response.body))

    handlers["pull"] = handler
    await asyncio.sleep(ATTACK_S)


@attack("owns a shard, and takes each delta a byte a second")
async def _takes_slowly(a: Attacker) -> None:
    await own_shards(a)
    _reads_slowly(a, ["push"])
    await asyncio.sleep(ATTACK_S)


@attack("backs a shard up, and takes each delta a byte a second")
async def _backs_up_slowly(a: Attacker) -> None:
    _reads_slowly(a, ["forward", "forwards"])
    await asyncio.sleep(ATTACK_S)


@attack("answers every request as late as it may")
async def _just_in_time(a: Attacker) -> None:
    """A forward within 1.6 s, everything else within 3."""
    handlers = a.host.living.overlay._requests._handlers

    def late(honest: Any, delay_s: float) -> Any:
        async def handler(sender: Contact, payload: bytes, stream: Any) -> Response:
            await asyncio.sleep(delay_s)
            response: Response = await honest(sender, payload, stream)
            return response

        return handler

    for name, honest in list(handlers.items()):
        handlers[name] = late(honest, 1.6 if name.startswith("forward") else 3.0)
    await asyncio.sleep(ATTACK_S)


@attack("sends deltas byte by byte, a hundred at a time")
async def _drips(a: Attacker) -> None:
    async def send(number: int) -> None:
        shard = number % a.shards

        async def body() -> AsyncIterator[Buffer]:
            whole = b"".join(bytes(one) for one in delta(shard, a.filled(0.001)))
            for at in range(len(whole)):
                yield whole[at : at + 1]
                await asyncio.sleep(1.0)

        while True:
            owner = a.owner_of(shard)
            step = a.step() + number
            if owner is None:
                await asyncio.sleep(1.0)
                continue
            push = steps.Push(a.genesis, a.me.node_id, a.host.living.incarnation, step, step, 0.2, [shard])
            try:
                sent = a.host.living.overlay.request(contact_of(owner), "push", encode(push), body(), timeout_s=10.0)
                async with sent as answer:
                    assert answer is not None
            except TransportError:
                await asyncio.sleep(1.0)

    await asyncio.gather(*(send(number) for number in range(100)))


@attack("pulls every shard a hundred times at once, and takes a piece a second")
async def _slow_reader(a: Attacker) -> None:
    async def read(number: int) -> None:
        host = a.honest[number % len(a.honest)]
        wanted = [steps.Wanted(shard, 0, b"", 0) for shard in range(a.shards)]
        message = steps.Pull(a.genesis, a.step(), "float32", wanted, takes_copies=True)
        while True:
            try:
                sent = a.host.living.overlay.request(contact_of(host), "pull", encode(message), [], timeout_s=10.0)
                async with sent as answer:
                    async for _ in answer.body:
                        await asyncio.sleep(1.0)
            except TransportError:
                await asyncio.sleep(1.0)

    await asyncio.gather(*(read(number) for number in range(100)))


@attack("agrees to learn every shard, and takes each state a byte a second")
async def _slow_learner(a: Attacker) -> None:
    _reads_slowly(a, ["state"])
    a.host.living.exchange.store.backed.clear()  # so that it has to learn them anew
    await asyncio.sleep(ATTACK_S)
