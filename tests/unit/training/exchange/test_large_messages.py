"""The large messages of each member have a share of the processor time, and are decoded one after another."""

from __future__ import annotations

import asyncio

import pytest

from overlay.rate_limits import RateLimit
from tests.harness.environment.simulated import VirtualClock
from tests.harness.environment.virtual_loop import run
from training.exchange import large_messages
from training.exchange.cooperative import LoopTurns
from training.exchange.large_messages import (
    BYTES_PER_SHARD,
    REFUSED_AFTER_S,
    REQUEST_RATE,
    SECONDS_PER_BYTE,
    LargeMessages,
    UnwantedMessage,
)
from training.exchange.messages import encode
from training.exchange.ownership_messages import FindDeltas

ONE, OTHER = b"a" * 20, b"b" * 20


def question(rows: int) -> bytes:
    return encode(FindDeltas(b"", 0, [(number.to_bytes(20, "big"), 1, [(1, 2)]) for number in range(rows)]))


def test_a_member_has_its_share_of_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it a request is refused after a delay; those of another member, and answers, are served. After a rest it
    has its share again."""
    payload = question(5_000)
    work_s = SECONDS_PER_BYTE * len(payload)
    monkeypatch.setattr(large_messages, "REQUEST_RATE", RateLimit(0.01 * work_s, 2.5 * work_s))

    async def scenario() -> None:
        clock = VirtualClock()
        large = LargeMessages(LoopTurns(), clock)
        for _ in range(2):
            assert len((await large.request(ONE, payload, FindDeltas)).identities) == 5_000
        began_s = clock.monotonic()
        with pytest.raises(UnwantedMessage, match="more processor time than a member has"):
            await large.request(ONE, payload, FindDeltas)
        assert clock.monotonic() - began_s == pytest.approx(REFUSED_AFTER_S)
        await large.request(OTHER, payload, FindDeltas)
        await large.answer(ONE, payload, FindDeltas)
        await asyncio.sleep(60.0)
        await large.request(ONE, payload, FindDeltas)

    run(scenario(), limit_s=120.0)


def test_what_the_shards_explain_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull names every shard, at every step: a run of many shards has large messages all the time."""
    monkeypatch.setattr(large_messages, "REQUEST_RATE", RateLimit(1e-9, 1e-9))

    async def scenario() -> None:
        payload = question(2_000)
        many = LargeMessages(LoopTurns(), VirtualClock(), 1 + len(payload) // BYTES_PER_SHARD)
        for _ in range(50):
            await many.request(ONE, payload, FindDeltas)
        few = LargeMessages(LoopTurns(), VirtualClock(), len(payload) // BYTES_PER_SHARD - 2)
        await few.request(ONE, payload, FindDeltas)
        with pytest.raises(UnwantedMessage):
            await few.request(ONE, payload, FindDeltas)

    run(scenario())


def test_the_states_of_an_honest_owner_have_room() -> None:
    """So many as an owner sends together, four times, right after another."""
    assert REQUEST_RATE.burst >= 4 * 65_536 * 36 * SECONDS_PER_BYTE


def test_messages_of_one_member_are_decoded_one_after_another() -> None:
    """Two members that send at once share the turns; of one with ten messages the second begins when the first has
    ended."""

    async def scenario() -> None:
        large, order = LargeMessages(LoopTurns(), VirtualClock()), list[str]()

        async def send(name: str, node: bytes, rows: int) -> None:
            await large.request(node, question(rows), FindDeltas)
            order.append(name)

        await asyncio.gather(
            send("long", ONE, 20_000), *(send(f"short {n}", ONE, 2_000) for n in range(3)), send("other", OTHER, 2_000)
        )
        assert order == ["other", "long", "short 0", "short 1", "short 2"]
        assert not large._locks

    run(scenario())


def test_what_is_not_expected_is_not_decoded() -> None:
    """The reason reaches the sender, after the delay; the message may be of any content then."""

    async def scenario() -> None:
        clock = VirtualClock()
        large = LargeMessages(LoopTurns(), clock)
        with pytest.raises(UnwantedMessage, match="not from you"):
            await large.request(ONE, b"\xc1" * 100_000, FindDeltas, lambda *_: "not from you")
        assert clock.monotonic() >= REFUSED_AFTER_S
        assert (await large.request(ONE, question(3_000), FindDeltas, lambda *_: "")).shard == 0

    run(scenario())
