"""Pulling over lines that are slow, cut or damaged: what arrived stays, and every shard has its turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from overlay.peers import Contact
from overlay.transport import Address, Buffer
from tests.unit.test_checkpoint import Lines
from training.exchange.messages import ZERO_TERM, Pull, PullAnswer, PullResult, Term, decode, encode
from training.exchange.pulling import Pulling
from training.frames import BadFrame, FrameReader, Part, frames, read_encoded

SHARDS, SIZE = 6, 4
OWNER = Contact(b"o" * 20, Address("10.0.0.1", 1))
TERM = Term(3, OWNER.node_id)


class Line:
    """An owner of all shards behind a line that lets so many shards through and then stands still."""

    def __init__(self, through: int, *, damaged: int = -1) -> None:
        self.through = through
        self.damaged = damaged
        self.version = 1
        self.asked: list[Pull] = []

    @asynccontextmanager
    async def request(self, _kind: str, _to: Contact, pull: Pull) -> AsyncIterator[Any]:
        self.asked.append(pull)
        fresh = [one for one in pull.shards if (one.term_number, one.version) != (TERM.number, self.version)]
        results = [
            PullResult(one.shard, "value" if one in fresh else "same", *TERM, self.version) for one in pull.shards
        ]
        yield SimpleNamespace(head=encode(PullAnswer(results)), body=self._body([one.shard for one in fresh], pull))

    async def _body(self, shards: list[int], pull: Pull) -> AsyncIterator[Buffer]:
        for number, shard in enumerate(shards):
            if number == self.through:
                await asyncio.Event().wait()
            values = np.full(SIZE, 10 * self.version + shard, np.float32)
            for buffer in frames(shard, values, "float32", Part.VALUE, has_checksum=pull.has_checksums):
                damaged = shard == self.damaged and len(buffer) == 4 * SIZE
                if damaged:
                    self.damaged = -1  # once
                yield bytes([buffer[0] ^ 1]) + bytes(buffer[1:]) if damaged else buffer


class Store:
    """What pulling asks of a `ShardStore`."""

    bounds = tuple((shard * SIZE, (shard + 1) * SIZE) for shard in range(SHARDS))

    def __len__(self) -> int:
        return SHARDS

    def doubts(self, _shards: list[int]) -> list[Any]:
        return []

    def size(self, _shard: int) -> int:
        return SIZE

    def fence(self, _shard: int) -> Term:
        return ZERO_TERM

    def note_owner(self, *_: Any) -> bool:
        return True


def pulling_over(line: Line) -> tuple[Pulling, Any, Lines]:
    log = Lines()
    replica = np.zeros(SHARDS * SIZE, np.float32)
    core: Any = SimpleNamespace(
        passed_step=0,
        genesis=b"g" * 16,
        store=Store(),
        overlay=SimpleNamespace(node_id=b"m" * 20),
        settings=SimpleNamespace(pull_codec="float32"),
        marks=[(ZERO_TERM, 0)] * SHARDS,
        replica=replica,
        counters=SimpleNamespace(bytes_received=0),
        log=log,
        jitter=lambda: 0.01,
        request=line.request,
        decoded=lambda _source, head, kind: decode(head, kind),
    )

    async def refresh(_shards: list[int]) -> None:
        await asyncio.sleep(0)

    finding: Any = SimpleNamespace(
        by_owner=lambda shards: ([(OWNER, list(shards))] if shards else [], []),
        answered=lambda *_: None,
        failed=lambda *_: None,
        refresh=refresh,
    )
    return Pulling(core, finding), core, log


def test_on_a_slow_line_every_shard_has_its_turn() -> None:
    """Two of six shards fit into the time of a pull, and all change every step: after three pulls all six were had."""
    line = Line(through=2)
    pulling, core, _ = pulling_over(line)

    async def story() -> list[list[int]]:
        missing = []
        for step in range(1, 4):
            line.version = step
            missing.append((await pulling.pull(step, deadline_s=0.05)).missing)
        return missing

    missing = asyncio.run(story())

    assert missing == [[2, 3, 4, 5], [0, 1, 4, 5], [0, 1, 2, 3]]
    assert [version for _, version in core.marks] == [1, 1, 2, 2, 3, 3]
    assert core.replica[::SIZE].tolist() == [10, 11, 22, 23, 34, 35]


def test_a_pull_that_was_cut_off_goes_on_where_it_was() -> None:
    """What has arrived is asked for by its version, and not sent again."""
    line = Line(through=4)
    pulling, core, _ = pulling_over(line)

    async def story() -> list[Any]:
        first = await pulling.pull(1, deadline_s=0.05)
        second = await pulling.pull(2, deadline_s=0.05)
        return [first, second]

    first, second = asyncio.run(story())

    assert (first.changed, first.unchanged, first.missing) == (4, 0, [4, 5])
    assert (second.changed, second.unchanged, second.missing) == (2, 4, [])
    assert core.counters.bytes_received == 6 * 4 * SIZE


def test_a_joiner_asks_again_for_a_piece_that_was_damaged() -> None:
    """The damaged shard is never in the replica, those before it are not fetched again, and the damage is said."""
    line = Line(through=SHARDS, damaged=3)
    pulling, core, log = pulling_over(line)

    report = asyncio.run(asyncio.wait_for(pulling.pull(1, deadline_s=None), 5))

    assert (report.changed, report.missing) == (6, [])
    assert core.replica[::SIZE].tolist() == [10, 11, 12, 13, 14, 15]
    assert [one.shard for one in line.asked[1].shards] == [3, 4, 5]
    assert "damaged" in next(fields["reason"] for event, fields in log.lines if event == "bad_pull_answer")


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
def test_a_checksum_tells_a_changed_payload(codec: Any) -> None:
    """Any bit of any frame; an unchanged one passes."""
    values = np.arange(1000, dtype=np.float32)

    async def body(flip: int | None) -> AsyncIterator[Buffer]:
        for place, buffer in enumerate(frames(2, values, codec, Part.VALUE, has_checksum=True)):
            raw = bytearray(buffer)
            if place == 1 and flip is not None:
                raw[flip] ^= 0x10
            yield bytes(raw)

    async def read(flip: int | None) -> int:
        encoded, _ = await read_encoded(FrameReader(body(flip)), 2, Part.VALUE, 1000, has_checksum=True)
        return len(encoded)

    assert asyncio.run(read(None)) > 0
    for flip in (0, 77, 1999):
        with pytest.raises(BadFrame, match="damaged"):
            asyncio.run(read(flip))
