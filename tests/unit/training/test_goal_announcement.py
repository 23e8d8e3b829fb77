"""The news that `training.until` holds."""

from __future__ import annotations

import random

import msgspec
import pytest

from p2pnode.overlay.transport import RequestRejected
from p2pnode.training.goal_announcement import GoalAnnouncement, GoalReached
from tests.harness.environment.simulated import ListLog
from tests.harness.runner.stories import played_by
from tests.harness.stubs.answering_peers import PEERS, NewsSwarm, exchange_news

GENESIS, UNTIL = b"g" * 16, "accuracy>=0.9"


@played_by(exchange_news)
async def test_every_known_node_is_told_although_one_does_not_answer(swarm: NewsSwarm, log: ListLog) -> None:
    """The message names the goal and the step."""
    swarm.silent = {PEERS[0].node_id}
    news = GoalAnnouncement(swarm, GENESIS, UNTIL, log, random.Random(1), list)

    await news.announce(40)

    assert sorted(to for to, _, _ in swarm.asked) == sorted(peer.node_id for peer in PEERS)
    assert {payload for _, _, payload in swarm.asked} == {msgspec.msgpack.encode(GoalReached(GENESIS, UNTIL, 40))}


@played_by(exchange_news)
async def test_the_news_ends_the_run_and_is_logged_once(swarm: NewsSwarm, log: ListLog) -> None:
    """Several nodes send it."""
    reached: list[int] = []
    GoalAnnouncement(swarm, GENESIS, UNTIL, log, random.Random(1), lambda: reached.append(1))

    for _ in range(2):
        await swarm.receive("goal_reached", msgspec.msgpack.encode(GoalReached(GENESIS, UNTIL, 40)))

    assert reached
    (record,) = log.of("goal_reached_elsewhere")
    assert record.fields["step"] == 40


@pytest.mark.parametrize(
    "payload",
    [
        b"\xff",
        msgspec.msgpack.encode(GoalReached(b"another", UNTIL, 4)),
        msgspec.msgpack.encode(GoalReached(GENESIS, "accuracy>=0.1", 4)),
    ],
)
@played_by(exchange_news)
async def test_another_goal_or_swarm_ends_nothing(swarm: NewsSwarm, log: ListLog, *, payload: bytes) -> None:
    """A member with another `until` was refused by the manifest; its message is refused too."""
    reached: list[int] = []
    GoalAnnouncement(swarm, GENESIS, UNTIL, log, random.Random(1), lambda: reached.append(1))

    with pytest.raises(RequestRejected):
        await swarm.receive("goal_reached", payload)
    assert reached == []
