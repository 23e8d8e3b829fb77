"""Comparing first deltas with those of other nodes."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from p2pnode.overlay.transport import RequestRejected
from p2pnode.training.findings.duplicate_data import (
    MAX_DISTANCE,
    MIN_VALUES,
    STEPS,
    VALUES,
    DuplicateData,
    FirstDeltas,
    FirstDeltasAnswer,
    distance,
    sampled,
)
from tests.harness.environment.simulated import ListLog
from tests.harness.runner.stories import played_by
from tests.harness.stubs.answering_peers import PEERS, NewsSwarm, exchange_news

GENESIS = b"g" * 16
SIZE = 2 * VALUES
Deltas = np.ndarray


def deltas(seed: int, noise: float = 1.0, *, drift: float = 1.0, size: int = SIZE) -> Deltas:
    """What a node makes of its batches: a drift that all nodes share and that turns slowly, and noise of its own."""
    common, turn = np.random.default_rng(1).normal(size=(2, size))
    steps = np.arange(STEPS)[:, None]
    own = np.random.default_rng(seed).normal(size=(STEPS, size))
    return drift * (common * np.cos(0.1 * steps) + turn * np.sin(0.1 * steps)) + noise * own


def rounded(made: Deltas, share: float = 0.01) -> Deltas:
    """As another machine, or from rounded weights."""
    return made + share * made.std() * np.random.default_rng(9).normal(size=made.shape)


@pytest.mark.parametrize("drift", [0.0, 1.0, 10.0])
@pytest.mark.parametrize("noise", [0.3, 1.0])
def test_the_same_batches_are_told_from_large_ones(drift: float, noise: float) -> None:
    """However parallel all deltas are: with batches of its own each node has its own noise, also in a tenth of the
    length of a delta."""
    mine = deltas(2, noise, drift=drift)
    assert distance(mine, rounded(mine)) < MAX_DISTANCE / 2
    assert distance(mine, deltas(3, noise, drift=drift)) > 2 * MAX_DISTANCE


def test_the_distance_is_the_same_from_both_sides_and_at_any_scale() -> None:
    """Both nodes come to one conclusion; a node may train with another rate."""
    mine, theirs = deltas(2), deltas(3)
    assert distance(mine, theirs) == pytest.approx(distance(theirs, mine))
    assert distance(mine, 1e-6 * theirs) == pytest.approx(distance(mine, theirs))


@pytest.mark.parametrize("size", [4, 49, MIN_VALUES - 1])
def test_few_values_prove_nothing(size: int) -> None:
    """Nor do zeros, what is not a number, and deltas that are all parallel."""
    mine = deltas(2, size=size)
    assert distance(mine, mine.copy()) == np.inf
    mine = deltas(2)
    sparse = np.where(np.arange(SIZE) < size, mine, 0.0)
    assert distance(sparse, sparse.copy()) == np.inf
    parallel = np.outer(np.arange(1, STEPS + 1), mine[0])
    assert distance(parallel, parallel.copy()) > 2 * MAX_DISTANCE
    assert distance(mine, 0 * mine) == np.inf
    assert distance(mine, np.inf * mine) == np.inf


def test_values_are_sampled_over_the_whole_length() -> None:
    """Each at most once, of models of any size, and from all columns of a matrix."""
    assert sampled(np.arange(VALUES, dtype=np.float32)).tolist() == list(range(VALUES))
    for size in (VALUES + 1, 1_000_000, 1 << 24):
        places = sampled(np.arange(size, dtype=np.float32))
        assert len(set(places.tolist())) == VALUES
        assert np.histogram(places, 32, (0, size))[0].min() > VALUES // 64
        assert len(set((places % 64).tolist())) == 64


def message_of(made: Deltas) -> bytes:
    return np.array([sampled(one.astype(np.float32)) for one in made], "<f4").tobytes()


def trained(found: DuplicateData, made: Deltas) -> None:
    for one in made:
        found.after_training(one.astype(np.float32))


@played_by(exchange_news)
async def test_both_nodes_learn_of_it_from_one_request(swarm: NewsSwarm, log: ListLog) -> None:
    """The node that is asked compares what it is sent, and the other one what it is answered; before it has its own
    deltas a node answers that it has none. A delta of zeros does not count: a learning rate may begin at zero."""
    swarm.answer = msgspec.msgpack.encode(FirstDeltasAnswer(None))
    found = DuplicateData(swarm, GENESIS, log, random.Random(1))
    mine = deltas(2)
    theirs = msgspec.msgpack.encode(FirstDeltas(GENESIS, message_of(rounded(mine))))
    found.after_training(np.zeros(SIZE, np.float32))
    trained(found, mine[:-1])
    answer = await swarm.receive("first_deltas", theirs)
    assert msgspec.msgpack.decode(answer, type=FirstDeltasAnswer).sample is None
    assert found.nodes == []

    found.after_training(mine[-1].astype(np.float32))
    trained(found, deltas(7))  # only the first ones count
    for _ in range(2):
        answer = await swarm.receive("first_deltas", theirs)
        assert msgspec.msgpack.decode(answer, type=FirstDeltasAnswer).sample == message_of(mine)
    await found.stop()

    assert found.nodes == [PEERS[0].node_id]
    assert [record.fields["node"] for record in log.of("same_data")] == [PEERS[0].node_id[:4].hex()]


@played_by(exchange_news)
async def test_an_answer_is_compared_and_other_deltas_are_no_finding(swarm: NewsSwarm, log: ListLog) -> None:
    """Of the peers that are asked only those with the same data are named, once each."""
    for theirs, same in [(deltas(3), []), (rounded(deltas(2)), PEERS), (deltas(2)[:, : VALUES // 2], [])]:
        swarm.answer = msgspec.msgpack.encode(FirstDeltasAnswer(message_of(theirs)))
        found = DuplicateData(swarm, GENESIS, log, random.Random(1))
        trained(found, deltas(2))
        await swarm.asked_all()
        assert sorted(found.nodes) == sorted(peer.node_id for peer in same)


@pytest.mark.parametrize("payload", [b"\xff", msgspec.msgpack.encode(FirstDeltas(b"another", bytes(16)))])
@played_by(exchange_news)
async def test_a_malformed_message_and_another_swarm_are_rejected(
    swarm: NewsSwarm, log: ListLog, *, payload: bytes
) -> None:
    """Neither changes anything."""
    found = DuplicateData(swarm, GENESIS, log, random.Random(1))
    with pytest.raises(RequestRejected):
        await swarm.receive("first_deltas", payload)
    assert found.nodes == []
