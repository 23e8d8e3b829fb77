"""What a node has sent: no memory of the trainer is handed out, and acknowledged deltas are kept within bounds."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from p2pnode.training.exchange.delta import LARGEST_SHARE, AcknowledgedKey, Delivery, Outgoing, SentDeltas
from p2pnode.training.exchange.messages import Push
from p2pnode.training.shards.applied import DeltaId
from tests.harness.builders.stores import IDS

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
