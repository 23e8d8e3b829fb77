"""Forwards in bundles: each has its own answer, whatever becomes of others; an earlier version gets one at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from overlay.peers import Contact
from overlay.transport import TransportError
from tests.harness.builders.stores import IDS, contact, store_of
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import GENESIS, ScriptedSwarm, context_of
from training.exchange.messages import (
    Forward,
    ForwardAnswer,
    Forwarded,
    ForwardResult,
    Forwards,
    ForwardsAnswer,
    decode,
)
from training.exchange.owner.forward_bundles import MAX_BYTES, ForwardBundles
from training.settings import ExchangeSettings

ME, BACKUP = contact("a"), contact("b")


def bundles(workers: float = 100.0) -> tuple[ForwardBundles, ScriptedSwarm]:
    swarm = ScriptedSwarm(ME, [BACKUP])
    swarm.worker_count, swarm.request_s = workers, 0.05
    swarm.answers["forward"] = lambda _to, payload: answer_to(decode(payload, Forward))
    swarm.answers["forwards"] = lambda _to, payload: ForwardsAnswer(
        [answer_to(one) for one in decode(payload, Forwards).forwards]
    )
    context = context_of(swarm, store_of("a"), settings=ExchangeSettings(relay_above=10))
    return ForwardBundles(context), swarm


def answer_to(message: Forward) -> ForwardAnswer:
    """With the step as the term, to tell the answers apart."""
    return ForwardAnswer([ForwardResult(one.shard, "fenced", message.step, IDS["b"]) for one in message.shards])


def forward(step: int) -> Forward:
    return Forward(GENESIS, IDS["c"], 1, step, 1.0, False, [Forwarded(step % 2, 1, IDS["a"], 0)])


async def send(found: ForwardBundles, step: int, size: int = 4) -> int:
    """The step that its answer is about."""
    answer = await found.send(BACKUP, forward(step), iter([bytes(size)]), size)
    (result,) = answer.results
    assert result.shard == step % 2
    return result.term_number


def test_what_comes_at_once_goes_together_and_each_has_its_answer() -> None:
    """Twenty deltas at once are one request, and what comes while it is under way is the next; bodies come in order."""

    async def scenario() -> None:
        found, swarm = bundles()
        assert await asyncio.gather(*(send(found, step) for step in range(20))) == list(range(20))
        sent = swarm.sent("forwards", Forwards)
        assert [[one.step for one in message.forwards] for message in sent] == [list(range(20))]
        assert swarm.sent("forward", Forward) == []

    run(scenario())


def test_in_a_small_swarm_each_goes_alone() -> None:
    """As ever, also where the setting is on."""

    async def scenario() -> None:
        found, swarm = bundles(workers=10.0)
        assert await asyncio.gather(*(send(found, step) for step in range(5))) == list(range(5))
        assert [message.step for message in swarm.sent("forward", Forward)] == list(range(5))

    run(scenario())


def test_a_bundle_has_a_bound() -> None:
    """The bytes above it go with another request."""

    async def scenario() -> None:
        found, swarm = bundles()
        await asyncio.gather(*(send(found, step, MAX_BYTES // 3) for step in range(4)))
        sent = [len(message.forwards) for message in swarm.sent("forwards", Forwards)]
        assert sent + [1] * len(swarm.sent("forward", Forward)) == [3, 1]

    run(scenario())


def test_who_gives_up_takes_no_other_along() -> None:
    """One that waits is cancelled: the others have their answers."""

    async def scenario() -> None:
        found, _ = bundles()
        waiting = [asyncio.create_task(send(found, step)) for step in range(4)]
        await asyncio.sleep(0.02)
        waiting[0].cancel()
        assert await asyncio.gather(*waiting[1:]) == [1, 2, 3]

    run(scenario())


def failing(error: TransportError) -> Any:
    def answer(_to: Contact, _payload: bytes) -> TransportError:
        return error

    return answer


def test_all_of_a_request_that_fails_have_failed() -> None:
    """Each origin hears of it. What comes later is sent."""

    async def scenario() -> None:
        found, swarm = bundles()
        answers = swarm.answers["forwards"]
        swarm.answers["forwards"] = failing(TransportError("reset", BACKUP.address, "broke"))
        ended = await asyncio.gather(*(send(found, step) for step in range(3)), return_exceptions=True)
        assert [type(one) for one in ended] == [TransportError] * 3
        swarm.answers["forwards"] = answers
        assert await asyncio.gather(send(found, 7), send(found, 8)) == [7, 8]

    run(scenario())


def test_a_backup_of_an_earlier_version_gets_one_at_a_time() -> None:
    """It says that it does not serve the request: that is believed for good."""

    async def scenario() -> None:
        found, swarm = bundles()
        swarm.answers["forwards"] = failing(
            TransportError("rejected", BACKUP.address, "this node does not serve forwards")
        )
        with pytest.raises(TransportError):
            await asyncio.gather(send(found, 1), send(found, 2))
        await asyncio.sleep(1.0)
        assert await asyncio.gather(send(found, 3), send(found, 4)) == [3, 4]
        assert len(swarm.sent("forwards", Forwards)) == 1

    run(scenario())


def test_answers_that_are_too_few_are_no_answers() -> None:
    """A backup that answers some of a bundle has answered none of it."""

    async def scenario() -> None:
        found, swarm = bundles()
        swarm.answers["forwards"] = lambda *_: ForwardsAnswer([])
        with pytest.raises(TransportError, match="0 answers to 2"):
            await asyncio.gather(send(found, 1), send(found, 2))

    run(scenario())


def test_nothing_is_sent_after_the_end() -> None:
    """Who waits then hears that it was not sent."""

    async def scenario() -> None:
        found, swarm = bundles()
        waiting = asyncio.gather(send(found, 1), send(found, 2), return_exceptions=True)
        await asyncio.sleep(0.02)
        await found.halt()
        assert [type(one) for one in await waiting] == [TransportError] * 2
        assert len(swarm.requests) <= 1

    run(scenario())
