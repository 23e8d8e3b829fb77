"""The answer to a bundle: results as they come, signs of life between them, and an end in whatever way."""

from __future__ import annotations

import asyncio

import pytest

from tests.harness.builders.stores import IDS
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import GENESIS
from training.exchange.aggregation.bundles import Carried, piece_of
from training.exchange.aggregation.consignments import Note
from training.exchange.aggregation.results_stream import KEEP_ALIVE_INTERVAL_S, ResultsStream
from training.exchange.messages import Push, PushResult

PUSH = Push(GENESIS, IDS["a"], 1, 1, 0, 1.0, [0])


async def after(push: Push, _items: list[Carried], note: Note, hops: int) -> None:
    """Answers after as many signs of life as hops."""
    note([])
    await asyncio.sleep((hops + 0.5) * KEEP_ALIVE_INTERVAL_S)
    note([PushResult(shard, "ok", hops) for shard in push.shards])


def test_results_come_as_they_are_there_with_signs_of_life_between() -> None:
    """A quick push, then a slow one; at the end the stream says that it has ended."""

    async def scenario() -> None:
        ended: list[ResultsStream] = []
        stream = ResultsStream(after, ended.append)
        stream.begin(0, PUSH, [], 0)
        stream.begin(1, PUSH, [], 2)
        pieces = [piece async for piece in stream]
        first, slow = piece_of([(0, [PushResult(0, "ok", 0)])]), piece_of([(1, [PushResult(0, "ok", 2)])])
        assert [piece for piece in pieces if piece != piece_of([])] == [first, slow]
        assert pieces.count(piece_of([])) == 2
        assert ended == [stream]

    run(scenario())


def test_closing_it_ends_what_is_under_way() -> None:
    """The receiver has gone: nothing is delivered for it any more, and its bytes are held no more."""

    async def scenario() -> None:
        ended: list[ResultsStream] = []
        cancelled: list[bool] = []

        async def never(_push: Push, _items: list[Carried], _note: Note, _hops: int) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(True)
                raise

        stream = ResultsStream(never, ended.append)
        stream.begin(0, PUSH, [], 0)
        assert await anext(stream) == piece_of([])
        await stream.aclose()
        assert (cancelled, ended) == ([True], [stream])
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(scenario())


def test_a_fault_of_this_node_is_not_hidden() -> None:
    """The stream breaks with it, after what came before."""

    async def scenario() -> None:
        async def broken(_push: Push, _items: list[Carried], note: Note, _hops: int) -> None:
            note([PushResult(0, "ok")])
            raise RuntimeError("a fault")

        stream = ResultsStream(broken, lambda _stream: None)
        stream.begin(0, PUSH, [], 0)
        assert await anext(stream) == piece_of([(0, [PushResult(0, "ok")])])
        with pytest.raises(RuntimeError, match="a fault"):
            await anext(stream)

    run(scenario())
