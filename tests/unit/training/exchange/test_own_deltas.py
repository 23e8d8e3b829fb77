"""A shard of a delta on its way: its parts, and what others are handed of it, are no memory of the trainer.

A node's own deltas on their way, as its backup role finds them.

Acknowledged deltas are kept for a while, within a bound of bytes.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np

from tests.harness.builders.stores import IDS
from training.exchange.messages import Push
from training.exchange.own_deltas import (
    KEPT_S,
    LARGEST_SHARE,
    MAX_KEPT,
    Acknowledged,
    AcknowledgedDeltas,
    AcknowledgedKey,
    Delivery,
    KeptDeltas,
    Outgoing,
)
from training.shards.applied import DeltaId

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


def test_a_delivery_is_known_by_its_push_and_as_large_as_what_is_not_acknowledged() -> None:
    """Its identity is node, incarnation and step."""
    _, item = borrowed()
    delivery = Delivery(Push(IDS["a"], 2, 7, 6, 1.0, []), {3: item}, asyncio.Event())
    assert tuple(delivery.identity) == (IDS["a"], 2, 7)
    assert delivery.size_bytes == 16
    delivery.unacknowledged.clear()
    assert delivery.size_bytes == 0


IDENTITY = DeltaId(b"a" * 20, 1, 3)


def test_a_kept_shard_is_found_while_it_is_on_its_way() -> None:
    """By identity and shard; a shard that was answered is gone at once, for the mapping is the sender's own."""
    kept, shards = KeptDeltas(), {0: Outgoing(0, b"abcd", "bfloat16", 2), 1: Outgoing(1, b"efgh", "bfloat16", 2)}
    kept.keep(IDENTITY, shards)
    assert kept.find(IDENTITY, 1) == (b"efgh", "bfloat16")
    assert kept.find(IDENTITY, 2) is None
    assert kept.find(IDENTITY._replace(step=4), 1) is None
    del shards[1]
    assert kept.find(IDENTITY, 1) is None
    kept.drop(IDENTITY)
    kept.drop(IDENTITY)
    assert kept.find(IDENTITY, 0) is None


def test_borrowed_memory_is_copied() -> None:
    """The trainer will write to it, and the backup keeps what it finds."""
    memory = bytearray(b"abcd")
    kept = KeptDeltas()
    kept.keep(IDENTITY, {0: Outgoing(0, memoryview(memory), "float32", 1, is_borrowed=True)})
    found: Any = kept.find(IDENTITY, 0)
    memory[:] = b"xxxx"
    assert found == (b"abcd", "float32")


def test_those_on_their_way_are_listed() -> None:
    kept = KeptDeltas()
    for step in (5, 6, 8):
        kept.keep(IDENTITY._replace(step=step), {})
    kept.drop(IDENTITY._replace(step=6))
    assert kept.identities().rows() == [(IDENTITY.node, IDENTITY.incarnation, [(5, 5), (8, 8)])]


def delta(step: int, size: int = 10, at_s: float = 0.0) -> Acknowledged:
    push = Push(IDS["a"], 1, step, 0, 1.0, [])
    return Acknowledged(push, IDS["b"], at_s, "float32", size // 4, bytes(size))


def key(step: int, shard: int = 0) -> AcknowledgedKey:
    return AcknowledgedKey(shard, DeltaId(IDS["a"], 1, step))


def test_the_oldest_are_dropped_above_the_limit() -> None:
    kept = AcknowledgedDeltas(limit_bytes=100)
    for step in range(20):
        kept.note(0, delta(step))
    assert [one.identity.step for one, _ in kept] == list(range(10, 20))
    assert kept.size_bytes == 100
    kept.drop(key(10))
    assert (kept.size_bytes, kept.find(key(10))) == (90, None)


def test_a_large_delta_is_not_kept() -> None:
    """It would drive out too many others."""
    kept = AcknowledgedDeltas(limit_bytes=800)
    kept.note(0, delta(1, 1 + int(LARGEST_SHARE * 800)))
    assert (kept.find(key(1)), kept.size_bytes) == (None, 0)


def test_their_number_is_bounded() -> None:
    kept = AcknowledgedDeltas()
    for step in range(MAX_KEPT + 5):
        kept.note(0, delta(step, 0))
    assert len(kept) == MAX_KEPT


def test_what_was_acknowledged_long_ago_is_dropped() -> None:
    kept = AcknowledgedDeltas()
    for step in range(10):
        kept.note(0, delta(step, at_s=float(step)))
    kept.drop_old(KEPT_S + 4.5, lambda _owner: False)
    assert [one.identity.step for one, _ in kept] == [5, 6, 7, 8, 9]


def test_what_a_node_has_acknowledged_that_is_gone_stays() -> None:
    """It may start again from its disk, which lacks it."""
    kept = AcknowledgedDeltas()
    for step in range(4):
        kept.note(0, delta(step))
    kept.drop_old(2 * KEPT_S, lambda owner: owner == IDS["b"])
    assert [one.identity.step for one, _ in kept] == [0, 1, 2, 3]


def test_an_owner_that_was_started_again_is_doubted() -> None:
    """Whatever it has acknowledged counts as acknowledged by nobody, until an owner has it."""
    kept = AcknowledgedDeltas()
    kept.note(0, delta(1))
    kept.note(1, dataclasses.replace(delta(1), owner=IDS["c"]))
    kept.doubt(IDS["b"])
    assert {shard: list(owners) for shard, owners in kept.owners()} == {0: [b""], 1: [IDS["c"]]}
    kept.moved(key(1), IDS["b"])
    assert {shard: list(owners) for shard, owners in kept.owners()} == {0: [IDS["b"]], 1: [IDS["c"]]}


def test_a_delta_that_is_acknowledged_again_counts_once() -> None:
    """By the owner to which it was sent again."""
    kept = AcknowledgedDeltas()
    kept.note(0, delta(1))
    kept.note(0, delta(1))
    kept.note(1, delta(1))
    assert (len(kept), kept.size_bytes) == (2, 20)


def owners_of(kept: AcknowledgedDeltas) -> dict[int, list[bytes]]:
    return {shard: list(owners) for shard, owners in kept.owners()}


def test_the_owners_of_each_shard_are_those_that_acknowledged_what_is_kept() -> None:
    """They follow what is noted, noted again, moved, and dropped in either way; nothing that is not kept counts."""
    kept = AcknowledgedDeltas(limit_bytes=80)
    for step in range(4):
        kept.note(step % 2, delta(step))
    assert owners_of(kept) == {0: [IDS["b"]], 1: [IDS["b"]]}

    kept.moved(key(0), IDS["c"])
    kept.moved(key(9), IDS["d"])
    assert owners_of(kept) == {0: [IDS["b"], IDS["c"]], 1: [IDS["b"]]}
    found = kept.find(key(0))
    assert found is not None
    assert found.owner == IDS["c"]

    kept.note(0, delta(0))
    kept.drop(key(1, 1))
    kept.drop(key(1, 1))
    assert owners_of(kept) == {0: [IDS["b"]], 1: [IDS["b"]]}
    for step in range(4, 12):  # the limit drops the others
        kept.note(0, delta(step))
    assert owners_of(kept) == {0: [IDS["b"]]}
    kept.drop_old(KEPT_S + 1, lambda _owner: False)
    assert owners_of(kept) == {}
