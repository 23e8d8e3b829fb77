"""The handshake of one overlapping turn, between the step loop's events and messages."""

from __future__ import annotations

import asyncio

from tests.harness.environment.virtual_loop import run
from training.supervisor.handshake_link import HandshakeLink
from training.trainer_link import messages
from training.trainer_link.handshake import BufferHandshake
from training.trainer_link.interface import StepOrder

ORDER = StepOrder(3, 10, 1.0, is_first=True, carry=1.0)


def test_the_trainer_is_told_once_when_the_delta_is_taken_and_says_when_it_has_loaded() -> None:
    """Both with the number of the turn; what another turn says counts for nothing."""

    async def scenario() -> None:
        sent: list[messages.DeltaTaken] = []
        handshake = BufferHandshake()
        link = HandshakeLink(handshake, sent.append)
        assert link.order(7, ORDER) == messages.Train(7, ORDER)
        await asyncio.sleep(1.0)
        assert sent == []

        handshake.delta_taken.set()
        await asyncio.sleep(1.0)
        assert sent == [messages.DeltaTaken(7)]

        link.on_loaded(6)
        assert not handshake.loaded.is_set()
        link.on_loaded(7)
        assert handshake.loaded.is_set()
        link.end()

    run(scenario())


def test_a_delta_that_is_taken_already_is_told_after_the_order() -> None:
    """The trainer would take an earlier message for one of the turn before."""

    async def scenario() -> None:
        sent: list[object] = []
        handshake = BufferHandshake()
        handshake.delta_taken.set()
        link = HandshakeLink(handshake, sent.append)
        sent.append(link.order(1, ORDER))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert sent == [messages.Train(1, ORDER), messages.DeltaTaken(1)]
        link.end()

    run(scenario())


def test_a_turn_that_ends_in_another_way_holds_nobody_up() -> None:
    """A trainer that crashed reads no buffer any more, and is told nothing."""

    async def scenario() -> None:
        sent: list[object] = []
        handshake = BufferHandshake()
        link = HandshakeLink(handshake, sent.append)
        link.order(1, ORDER)
        link.end()
        assert handshake.loaded.is_set()
        handshake.delta_taken.set()
        await asyncio.sleep(1.0)
        assert sent == []

        without = HandshakeLink(None, sent.append)
        without.order(2, ORDER)
        without.on_loaded(2)
        without.end()
        assert sent == []

    run(scenario())
