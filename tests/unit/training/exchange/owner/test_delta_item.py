"""One shard of a delta on its way into a store: its identity and weight there, and the same bytes on the wire."""

from __future__ import annotations

import numpy as np
import pytest

from p2pnode.training.cooperative import VALUES_PER_UPDATE, light
from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.frames import BadFrame, FrameReader
from p2pnode.training.encoding.table import CodecName
from p2pnode.training.exchange.delta import IncomingDelta, logged_item, read_item
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.value_batch import ValueBatch, encode_batch
from tests.harness.builders.value_updates import update
from tests.harness.environment.virtual_loop import run
from tests.harness.swarms.exchange_overlay import chunks

DELTA = np.array([3.0, 0.0, -4.0, 0.0], np.float32)
PUSH = DeltaId(b"n" * 20, 1, 7)
BATCH = ValueBatch(1, [update(1), update(2)], [], [])


def sent(item: IncomingDelta, step: int = 7) -> FrameReader:
    return FrameReader(chunks([bytes(one) for one in item.frames(step)]))


def test_a_delta_is_measured_where_it_is_decoded() -> None:
    """Its length is the Euclidean one; nothing is clipped yet."""
    item = IncomingDelta.received(2, DELTA.tobytes(), "float32", 4)

    assert item.delta.tolist() == DELTA.tolist()
    assert (item.shard, item.norm, item.scale, item.unusual) == (2, 5.0, 1.0, False)


def test_the_store_gets_the_weight_of_the_push_times_the_clipping() -> None:
    """A repair has its weight already, moves no momentum, and counts for no median."""
    item = IncomingDelta.received(2, DELTA.tobytes(), "float32", 4)
    item.scale = 0.25
    found = item.buffered(PUSH, 8.0, synchronous=True)
    assert (found.identity, found.weight, found.synchronous, found.momentum, found.norm) == (PUSH, 2.0, True, True, 5.0)

    item.repair = True
    found = item.buffered(PUSH, 8.0, synchronous=False)
    assert (found.weight, found.momentum, found.norm) == (2.0, False, 0.0)
    assert IncomingDelta(0, DELTA, b"", "float32").buffered(PUSH, 1.0, synchronous=False).norm == 0.0


def test_a_batch_has_a_number_of_its_own_and_a_delta_that_of_its_push() -> None:
    """The work of a batch is counted by its updates, and that of a delta as a light pass."""
    batch = IncomingDelta.of_batch(1, encode_batch(BATCH), BATCH, number=3)

    assert batch.identity(PUSH) == DeltaId(PUSH.node, PUSH.incarnation, 3)
    assert IncomingDelta.of_batch(1, b"", BATCH).identity(PUSH) == PUSH
    assert batch.work == 2 * VALUES_PER_UPDATE
    assert IncomingDelta(0, DELTA, b"", "float32").work == light(4)
    assert batch.buffered(PUSH, 1.0, synchronous=False).batch is BATCH


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
def test_a_delta_comes_back_from_the_wire(codec: CodecName) -> None:
    """With its codec and its bytes, and as many of them as announced."""

    async def scenario() -> None:
        raw = bytes(codecs.encode(DELTA, codec))
        item = IncomingDelta.received(2, raw, codec, 4)
        assert sum(len(bytes(one)) for one in item.frames(7)) == item.framed_bytes
        found = await read_item(sent(item), 2, 4, repair=True)
        assert found.delta.tolist() == DELTA.tolist()
        assert (found.shard, bytes(found.encoded), found.codec, found.repair) == (2, raw, codec, True)

    run(scenario())


def test_a_batch_comes_back_from_the_wire() -> None:
    """A shard without values has batches; its bytes are announced too."""

    async def scenario() -> None:
        item = IncomingDelta.of_batch(2, encode_batch(BATCH), BATCH)
        assert sum(len(bytes(one)) for one in item.frames(7)) == item.framed_bytes
        found = await read_item(sent(item), 2, 0)
        assert (found.batch, found.delta.size, found.repair) == (BATCH, 0, False)

    run(scenario())


def test_what_is_of_another_shard_or_no_batch_is_refused() -> None:
    """With the shard in the error."""

    async def scenario() -> None:
        item = IncomingDelta.received(2, DELTA.tobytes(), "float32", 4)
        with pytest.raises(BadFrame):
            await read_item(sent(item), 3, 4)
        with pytest.raises(BadFrame):
            await read_item(sent(item), 2, 5)
        with pytest.raises(BadFrame):
            await read_item(sent(item), 2, 0)
        with pytest.raises(BadFrame, match="shard 2: no batch of values"):
            await read_item(sent(IncomingDelta.of_batch(2, b"\xff", BATCH)), 2, 0)

    run(scenario())


def test_the_repair_log_gives_a_delta_or_a_batch() -> None:
    """As the size of the shard says."""
    delta = logged_item(1, DELTA.tobytes(), "float32", 4, repair=True)
    batch = logged_item(1, encode_batch(BATCH), "float32", 0, repair=True)

    assert (delta.delta.tolist(), delta.batch, delta.repair) == (DELTA.tolist(), None, True)
    assert (batch.delta.size, batch.batch, batch.repair) == (0, BATCH, True)
