"""Deltas of one node: as they are sent, received and weighed, kept to be sent again, and logged to be repaired."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from p2pnode.training.cooperative import VALUES_PER_UPDATE, light
from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.frames import BadFrame, FrameReader
from p2pnode.training.encoding.table import CodecName
from p2pnode.training.exchange.delta import (
    LARGEST_SHARE,
    AcknowledgedKey,
    Delivery,
    IncomingDelta,
    Outgoing,
    SentDeltas,
    logged_item,
    read_item,
)
from p2pnode.training.exchange.messages import Push
from p2pnode.training.exchange.store.records import RepairLog, SupersededCopy, compare
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.shards.applied import Applied, DeltaId
from p2pnode.training.shards.value_batch import ValueBatch, encode_batch
from tests.harness.builders.stores import BOUNDS, IDS, PARAMETERS, SUM, contact, delta, term, zeros
from tests.harness.builders.value_updates import update
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
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
    """What is added without momentum counts for no median, either."""
    item = IncomingDelta.received(2, DELTA.tobytes(), "float32", 4)
    item.scale = 0.25
    found = item.buffered(PUSH, 8.0)
    assert (found.identity, found.weight, found.momentum, found.norm) == (PUSH, 2.0, True, 5.0)

    item.momentum = False
    found = item.buffered(PUSH, 8.0)
    assert (found.weight, found.momentum, found.norm) == (2.0, False, 0.0)
    assert IncomingDelta(0, DELTA, b"", "float32").buffered(PUSH, 1.0).norm == 0.0


def test_a_batch_has_a_number_of_its_own_and_a_delta_that_of_its_push() -> None:
    """The work of a batch is counted by its updates, and that of a delta as a light pass."""
    batch = IncomingDelta.of_batch(1, encode_batch(BATCH), BATCH, number=3)

    assert batch.identity(PUSH) == DeltaId(PUSH.node, PUSH.incarnation, 3)
    assert IncomingDelta.of_batch(1, b"", BATCH).identity(PUSH) == PUSH
    assert batch.work == 2 * VALUES_PER_UPDATE
    assert IncomingDelta(0, DELTA, b"", "float32").work == light(4)
    assert batch.buffered(PUSH, 1.0).batch is BATCH


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
@run_by(run)
async def test_a_delta_comes_back_from_the_wire(codec: CodecName) -> None:
    """With its codec and its bytes, and as many of them as announced."""
    raw = bytes(codecs.encode(DELTA, codec))
    item = IncomingDelta.received(2, raw, codec, 4)
    assert sum(len(bytes(one)) for one in item.frames(7)) == item.framed_bytes
    found = await read_item(sent(item), 2, 4, repair=True)
    assert found.delta.tolist() == DELTA.tolist()
    assert (found.shard, bytes(found.encoded), found.codec, found.repair) == (2, raw, codec, True)


@run_by(run)
async def test_a_batch_comes_back_from_the_wire() -> None:
    """A shard without values has batches; its bytes are announced too."""
    item = IncomingDelta.of_batch(2, encode_batch(BATCH), BATCH)
    assert sum(len(bytes(one)) for one in item.frames(7)) == item.framed_bytes
    found = await read_item(sent(item), 2, 0)
    assert (found.batch, found.delta.size, found.repair) == (BATCH, 0, False)


@run_by(run)
async def test_what_is_of_another_shard_or_no_batch_is_refused() -> None:
    """With the shard in the error."""
    item = IncomingDelta.received(2, DELTA.tobytes(), "float32", 4)
    with pytest.raises(BadFrame):
        await read_item(sent(item), 3, 4)
    with pytest.raises(BadFrame):
        await read_item(sent(item), 2, 5)
    with pytest.raises(BadFrame):
        await read_item(sent(item), 2, 0)
    with pytest.raises(BadFrame, match="shard 2: no batch of values"):
        await read_item(sent(IncomingDelta.of_batch(2, b"\xff", BATCH)), 2, 0)


def test_the_repair_log_gives_a_delta_or_a_batch() -> None:
    """As the size of the shard says."""
    delta = logged_item(1, DELTA.tobytes(), "float32", 4, repair=True)
    batch = logged_item(1, encode_batch(BATCH), "float32", 0, repair=True)

    assert (delta.delta.tolist(), delta.batch, delta.repair) == (DELTA.tolist(), None, True)
    assert (batch.delta.size, batch.batch, batch.repair) == (0, BATCH, True)


VALUES = np.arange(4, dtype=np.float32)


def borrowed() -> tuple[bytearray, Outgoing]:
    """The trainer's memory, and shard 3 of a delta in it."""
    memory = bytearray(VALUES.tobytes())
    return memory, Outgoing(3, memoryview(memory), "float32", 4, is_borrowed=True, is_started=True)


def test_what_the_owner_in_this_node_is_given_is_a_copy_of_the_trainers_memory() -> None:
    memory, item = borrowed()
    made = item.item()
    memory[:] = bytes(len(memory))
    np.testing.assert_array_equal(np.frombuffer(bytes(made.delta), np.float32), VALUES)


def delivery(step: int, *items: Outgoing) -> Delivery:
    push = Push(IDS["a"], 1, step, 0, 1.0, [])
    return Delivery(push, {item.shard: item for item in items}, asyncio.Event())


def test_a_shard_is_found_while_it_is_on_its_way() -> None:
    """By identity and shard, until it was answered. It is a copy of memory that the trainer will write to."""
    memory, item = borrowed()
    sent, one = SentDeltas(), delivery(3, item, Outgoing(1, b"efgh", "bfloat16", 2))
    sent.deliveries[3] = one
    found: Any = sent.find(one.identity, 3)
    memory[:] = bytes(len(memory))
    assert (found.encoded, found.codec, found.is_started) == (VALUES.tobytes(), "float32", True)
    assert sent.find(one.identity, 1) is one.unacknowledged[1]
    assert sent.find(one.identity, 2) is None
    assert sent.find(one.identity._replace(step=4), 1) is None
    assert sent.find(one.identity._replace(incarnation=2), 1) is None
    del one.unacknowledged[1]
    assert sent.find(one.identity, 1) is None


def key(step: int, shard: int = 0) -> AcknowledgedKey:
    return AcknowledgedKey(shard, DeltaId(IDS["a"], 1, step))


def acknowledge(
    sent: SentDeltas, step: int, shard: int = 0, *, owner: str = "b", size: int = 100, limit: int = 1 << 20
) -> None:
    push = Push(IDS["a"], 1, step, 0, 1.0, [])
    sent.acknowledge(push, IDS[owner], Outgoing(shard, bytes(size), "float32", size // 4), limit)


def test_the_oldest_are_dropped_above_the_limit() -> None:
    """Each counts with the memory that it takes beside its values. One that is large is not kept at all."""
    sent = SentDeltas()
    for step in range(20):
        acknowledge(sent, step, limit=4000)
    assert [one.identity.step for one in sent.acknowledged] == list(range(10, 20))
    assert sent.size_bytes == 4000
    sent.drop(key(10))
    assert (sent.size_bytes, key(10) in sent.acknowledged) == (3600, False)
    acknowledge(sent, 20, size=1 + int(LARGEST_SHARE * 4000), limit=4000)
    assert key(20) not in sent.acknowledged


def owners_of(sent: SentDeltas) -> dict[int, list[bytes]]:
    return {shard: [owner for at, owner in sent.owners() if at == shard] for shard, _ in sent.owners()}


def test_what_a_restarted_owner_acknowledged_is_unconfirmed() -> None:
    """Whatever it has acknowledged counts as acknowledged by nobody, until an owner has it."""
    sent = SentDeltas()
    acknowledge(sent, 1)
    acknowledge(sent, 1, 1, owner="c")
    sent.unconfirm(IDS["b"])
    assert owners_of(sent) == {0: [b""], 1: [IDS["c"]]}
    sent.moved(key(1), IDS["b"])
    assert owners_of(sent) == {0: [IDS["b"]], 1: [IDS["c"]]}


def test_the_owners_of_each_shard_are_those_that_acknowledged_what_is_kept() -> None:
    """They follow what is noted, noted again, moved, and dropped in either way; nothing that is not kept counts."""
    sent = SentDeltas()
    for step in range(4):
        acknowledge(sent, step, step % 2)
    assert owners_of(sent) == {0: [IDS["b"]], 1: [IDS["b"]]}

    sent.moved(key(0), IDS["c"])
    sent.moved(key(9), IDS["d"])
    assert {shard: sorted(owners) for shard, owners in owners_of(sent).items()} == {
        0: sorted([IDS["b"], IDS["c"]]),
        1: [IDS["b"]],
    }
    assert sent.acknowledged[key(0)].owner == IDS["c"]

    acknowledge(sent, 0)
    sent.drop(key(1, 1))
    sent.drop(key(1, 1))
    assert (owners_of(sent), len(sent.acknowledged)) == ({0: [IDS["b"]], 1: [IDS["b"]]}, 3)
    for step in range(4, 14):  # the limit drops the others
        acknowledge(sent, step, limit=4000)
    assert owners_of(sent) == {0: [IDS["b"]]}


def logged(name: str, *, limit_bytes: int = 1 << 20, seconds: float = 60.0) -> ShardStore:
    """An owner of shard 0 under (1, name) with a log."""
    store = ShardStore(IDS[name], BOUNDS, PARAMETERS, SUM, RepairLog(limit_bytes, seconds))
    store.own(0, zeros(store), term(1, name), contact(name), 0.0, by_handover=False)
    return store


def identities(store: ShardStore) -> list[int]:
    return [entry.identity.step for entry in store.log.entries(0)]


def test_the_log_has_each_added_delta_once() -> None:
    """By identity, with its weight."""
    store = logged("a")
    for step in (1, 2, 2):
        store.add(0, delta(step))

    assert identities(store) == [1, 2]
    assert store.log.size_bytes == 2 * 16
    assert [entry.weight for entry in store.log.entries(0)] == [1.0, 1.0]


def test_old_entries_are_dropped_unless_they_are_being_offered() -> None:
    """After `seconds` an entry goes, unless its shard has a superseded copy to settle."""
    store = logged("a", seconds=10.0)
    store.log.tick(100.0, 4.0, {})
    store.add(0, delta(1))
    store.log.tick(105.0, 5.0, {})
    store.add(0, delta(2))

    store.log.tick(112.0, 5.0, {0: None})
    assert identities(store) == [1, 2]
    assert [entry.workers for entry in store.log.entries(0)] == [4.0, 5.0]
    store.log.tick(112.0, 5.0, {})
    assert identities(store) == [2]
    assert store.log.reach_s == 10.0
    store.log.tick(200.0, 5.0, {})
    assert (len(store.log), store.log.size_bytes) == (0, 0)


def test_the_reach_is_shorter_when_bytes_run_out() -> None:
    """The oldest entry goes, and the reach is the time since it was added."""
    store = logged("a", limit_bytes=3 * 16)
    for number in range(1, 6):
        store.log.tick(100.0 + number, 1.0, {})
        store.add(0, delta(number))

    assert identities(store) == [3, 4, 5]
    assert store.log.reach_s == pytest.approx(3.0)  # the delta of 102 s has gone, and it is 105 s


def test_a_log_of_no_seconds_keeps_nothing() -> None:
    """`log_seconds = 0` uses no memory and repairs nothing."""
    store = logged("a", seconds=0.0)
    store.add(0, delta(1))

    assert len(store.log) == 0
    assert store.log.reach_s == 0.0


def test_a_comparison_separates_logged_deltas_from_lost_ones() -> None:
    """Of five deltas the owner has two and the log two more: the fifth is lost."""
    store = logged("a", limit_bytes=2 * 16)
    for step in (1, 2, 3, 4, 5):
        store.add(0, delta(step))
    winner = Applied()
    for step in (2, 3):
        winner.add(DeltaId(IDS["x"], 1, step))

    found = compare(SupersededCopy(term(1, "a"), store.owned[0].state), winner, store.log.entries(0))

    assert [entry.identity.step for entry in found.wanted] == [4, 5]
    assert found.lost.rows() == [(IDS["x"], 1, [(1, 1)])]


def test_the_entries_that_another_node_lists_are_found() -> None:
    """By rows of any order, also two of one start; those of other nodes and starts are passed over."""
    store = logged("a")
    for step in (1, 2, 3, 7):
        store.add(0, delta(step))
    entries = store.log.entries(0)
    node, start = entries[0].identity[:2]

    rows = [(IDS["c"], 1, [(1, 9)]), (node, start, [(7, 7)]), (node, start + 1, [(3, 3)]), (node, start, [(0, 2)])]
    assert [entry.identity.step for entry in store.log.those_of(entries, rows)] == [1, 2, 7]
    assert store.log.those_of(entries, rows[::2]) == []
