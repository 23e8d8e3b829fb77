"""A shard of a delta on its way: its parts, and what others are handed of it, are no memory of the trainer."""

from __future__ import annotations

import asyncio

import numpy as np

from tests.harness.builders.stores import IDS
from tests.harness.stubs.exchange_context import GENESIS
from training.exchange.client.own_deltas import Delivery, Outgoing
from training.exchange.messages import Push

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
    delivery = Delivery(Push(GENESIS, IDS["a"], 2, 7, 6, 1.0, []), {3: item}, asyncio.Event())
    assert tuple(delivery.identity) == (IDS["a"], 2, 7)
    assert delivery.size_bytes == 16
    delivery.unacknowledged.clear()
    assert delivery.size_bytes == 0
