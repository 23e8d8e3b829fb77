"""How fast members send, and what is said where that was not measured."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from p2pnode.doctor.line_speed import ENOUGH_BYTES, READ_BYTES, READ_S, LineRead, judged, read_from
from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Buffer, ReceivedResponse, TransportError
from p2pnode.training.exchange.messages import Pull, PullAnswer, decode, encode
from tests.harness.environment.virtual_loop import run

MEMBER = Contact(b"m" * 20, Address("10.0.0.2", 8468))
PIECE = 64 << 10


class Line:
    """A member whose model has `pieces`, one of which arrives every `pace_s`."""

    def __init__(self, pieces: int, pace_s: float, head: bytes = b"", fails: str = "") -> None:
        self.pieces, self.pace_s, self.head, self.fails = pieces, pace_s, head or encode(PullAnswer([])), fails
        self.sent = 0
        self.asked: list[Pull] = []

    @asynccontextmanager
    async def request(
        self, to: Contact, name: str, payload: bytes, *, timeout_s: float
    ) -> AsyncIterator[ReceivedResponse]:
        assert (to, name) == (MEMBER, "pull")
        self.asked.append(decode(payload.removeprefix(b"g" * 16), Pull))
        if self.fails:
            raise TransportError("rejected", to.address, self.fails)
        yield ReceivedResponse(self.head, self._body())

    async def _body(self) -> AsyncIterator[Buffer]:
        for _ in range(self.pieces):
            await asyncio.sleep(self.pace_s)
            self.sent += PIECE
            yield bytes(PIECE)


def read(line: Line) -> LineRead:
    async def story() -> LineRead:
        return await read_from(line, MEMBER, b"g" * 16, 8)

    return run(story())


def test_a_member_is_read_from_in_bounded_bytes_and_time() -> None:
    """A fast one is stopped when enough was read, a slow one when the time is over; the rate is that of the pieces."""
    fast = Line(10_000, 0.001)
    found = read(fast)
    assert found.bytes_per_s == pytest.approx(PIECE / 0.001)
    assert READ_BYTES <= found.received_bytes <= fast.sent <= READ_BYTES + 2 * PIECE
    assert [len(pull.shards) for pull in fast.asked] == [8]
    slow = read(Line(10_000, 0.5))
    assert slow.bytes_per_s == pytest.approx(PIECE / 0.5)
    assert slow.seconds <= READ_S


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (Line(10, 100.0), "sent nothing within 4 s"),
        (Line(10, 0.1, fails="this node does not serve 'pull'"), "this node does not serve 'pull'"),
        (Line(10, 0.1, head=b"no message"), "answers as no member does"),
    ],
)
def test_a_member_that_sends_nothing_has_a_reason(line: Line, reason: str) -> None:
    """Silence, a refusal, and what is no answer."""
    found = read(line)
    assert (found.address, found.reason, found.bytes_per_s) == ("10.0.0.2:8468", reason, None)


def test_the_finding_has_the_rates_or_says_how_they_are_measured() -> None:
    """A slow line is a warning; a small model, refusals and a swarm without members are for information."""
    first, second = LineRead("a:1", READ_BYTES, 0.5), LineRead("b:2", ENOUGH_BYTES, 1.0)
    found = judged([first, second])
    assert (found.level, found.what.split(";")[0]) == ("ok", "8.39 MB/s from a:1, 262 kB/s from b:2")
    slow = judged([second, LineRead("c:3", reason="was silent")])
    assert (slow.level, slow.what) == ("warning", "slow: 262 kB/s from b:2")
    for reads, text in (
        ([LineRead("a:1", 40_000, 0.01), LineRead("b:2", reason="was silent")], "no more than 40.0 kB of the model"),
        ([LineRead("b:2", reason="was silent")], "b:2 was silent"),
        ([], "no member is known"),
    ):
        check = judged(reads)
        assert check.level == "info"
        assert text in check.what
        assert "start the node" in check.do
    assert "slow-lines" in slow.do
