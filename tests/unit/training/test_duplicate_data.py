"""Comparing first deltas with those of other nodes."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from overlay.transport import RequestRejected
from tests.harness.environment.simulated import ListLog
from tests.harness.stubs.answering_peers import PEERS, NewsSwarm, exchange_news
from training.duplicate_data import SAMPLED_VALUES, DuplicateData, FirstDelta, FirstDeltaAnswer, delta_digest

GENESIS = b"g" * 16
DELTA = np.arange(1, 9, dtype=np.float32)


def digest_of(delta: np.ndarray) -> bytes:
    found = delta_digest(delta.astype(np.float32))
    assert found is not None
    return found


def test_a_digest_differs_with_any_sampled_bit_and_proves_nothing_for_zeros() -> None:
    """A long delta is sampled over its whole length; a learning rate of zero makes all first deltas equal."""
    long = np.ones(5 * SAMPLED_VALUES, np.float32)
    changed = long.copy()
    changed[-5] = np.nextafter(np.float32(1), np.float32(2))

    assert digest_of(DELTA) == digest_of(DELTA.copy())
    assert digest_of(DELTA) != digest_of(-DELTA)
    assert digest_of(long) != digest_of(changed)
    assert delta_digest(np.zeros(8, np.float32)) is None


@pytest.mark.parametrize("mine_first", [True, False])
def test_both_nodes_learn_of_it_whichever_is_first(mine_first: bool) -> None:
    """A node compares what it is sent, what it was sent before its own first step, and what it is answered."""

    async def scenario(swarm: NewsSwarm, log: ListLog) -> None:
        swarm.answer = msgspec.msgpack.encode(FirstDeltaAnswer(None))
        found = DuplicateData(swarm, GENESIS, log, random.Random(1))
        theirs = msgspec.msgpack.encode(FirstDelta(GENESIS, digest_of(DELTA)))
        if not mine_first:
            answer = await swarm.receive("first_delta", theirs)
            assert msgspec.msgpack.decode(answer, type=FirstDeltaAnswer).digest is None
        found.after_step(DELTA)
        found.after_step(2 * DELTA)  # only the first one counts
        if mine_first:
            answer = await swarm.receive("first_delta", theirs)
            assert msgspec.msgpack.decode(answer, type=FirstDeltaAnswer).digest == digest_of(DELTA)
        await found.stop()

        assert found.nodes == [PEERS[0].node_id]
        assert [record.fields["node"] for record in log.of("same_data")] == [PEERS[0].node_id[:4].hex()]

    exchange_news(scenario)


def test_an_answer_is_compared_and_another_delta_is_no_finding() -> None:
    """Of the peers that are asked only those with the same digest are named, once each."""

    async def scenario(swarm: NewsSwarm, log: ListLog) -> None:
        swarm.answer = msgspec.msgpack.encode(FirstDeltaAnswer(digest_of(-DELTA)))
        other = DuplicateData(swarm, GENESIS, log, random.Random(1))
        other.after_step(DELTA)
        await swarm.asked_all()
        assert other.nodes == []

        swarm.answer = msgspec.msgpack.encode(FirstDeltaAnswer(digest_of(DELTA)))
        same = DuplicateData(swarm, GENESIS, log, random.Random(1))
        same.after_step(DELTA)
        await swarm.asked_all()
        assert sorted(same.nodes) == sorted(peer.node_id for peer in PEERS)

    exchange_news(scenario)


@pytest.mark.parametrize("payload", [b"\xff", msgspec.msgpack.encode(FirstDelta(b"another", bytes(16)))])
def test_a_malformed_message_and_another_swarm_are_rejected(payload: bytes) -> None:
    """Neither changes anything."""

    async def scenario(swarm: NewsSwarm, log: ListLog) -> None:
        found = DuplicateData(swarm, GENESIS, log, random.Random(1))
        with pytest.raises(RequestRejected):
            await swarm.receive("first_delta", payload)
        assert found.nodes == []

    exchange_news(scenario)
