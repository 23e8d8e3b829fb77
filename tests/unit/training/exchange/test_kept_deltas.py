"""A node's own deltas on their way, as its backup role finds them."""

from __future__ import annotations

from typing import Any

from training.exchange.client.own_deltas import KeptDeltas, Outgoing
from training.shards.applied import DeltaId

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
