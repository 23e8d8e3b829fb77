"""The goal of a run, `training.until`, as it is parsed and evaluated."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from p2pnode.overlay.transport import RequestRejected
from p2pnode.training.goal import Best, BestMetrics, Goal
from p2pnode.training.goal_announcement import GoalAnnouncement, GoalReached
from tests.harness.environment.simulated import ListLog
from tests.harness.runner.stories import played_by
from tests.harness.stubs.answering_peers import PEERS, NewsSwarm, exchange_news


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("accuracy>=0.95", Goal("accuracy", True, 0.95)),
        ("loss<=1e-3", Goal("loss", False, 0.001)),
        ("  val.loss  <=  -2.5E+1 ", Goal("val.loss", False, -25.0)),
        ("_f1>=+.5", Goal("_f1", True, 0.5)),
        ("", None),
        ("   ", None),
    ],
)
def test_a_goal_is_a_metric_a_comparison_and_a_number(text: str, goal: Goal | None) -> None:
    """Blanks are ignored, exponents and signs belong to the number, an empty text is no goal."""
    assert Goal.parse(text) == goal


@pytest.mark.parametrize(
    "text",
    [
        "accuracy",
        "accuracy>0.95",
        "accuracy=>0.95",
        "accuracy==1",
        ">=0.5",
        "accuracy>=",
        "accuracy>=high",
        "accuracy>=nan",
        "accuracy>=0.9 or loss<=1",
        "0.95<=accuracy",
        "2nd>=1",
        "accuracy>=1.2.3",
        "accuracy>=.",
    ],
)
def test_a_text_that_is_no_goal_is_an_error_with_an_example(text: str) -> None:
    """Any other text is an error that quotes it and shows an example."""
    with pytest.raises(ValueError) as caught:
        Goal.parse(text)

    assert repr(text) in str(caught.value)
    assert "accuracy>=0.95" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "metrics", "holds"),
    [
        ("accuracy>=0.95", {"accuracy": 0.95}, True),
        ("accuracy>=0.95", {"accuracy": 0.9499}, False),
        ("loss<=0.1", {"loss": 0.1}, True),
        ("loss<=0.1", {"loss": 0.2}, False),
        ("loss<=0.1", {"accuracy": 0.0}, False),
        ("loss<=0.1", {}, False),
        ("loss<=0.1", {"loss": float("nan")}, False),
        ("accuracy>=0.1", {"accuracy": float("nan")}, False),
        ("loss<=0.1", {"loss": float("-inf")}, True),
    ],
)
def test_a_goal_holds_by_its_own_metric_only(text: str, metrics: dict[str, float], holds: bool) -> None:
    """It holds at the value itself; never for a missing metric or NaN."""
    goal = Goal.parse(text)

    assert goal is not None
    assert goal.holds(metrics) is holds


def test_the_best_value_is_that_of_the_goals_metric_in_its_direction() -> None:
    """Whatever its name says; without a goal, names decide the direction and the first metric counts."""
    aimed, free = BestMetrics(Goal("my_loss", True, 1.0)), BestMetrics(None)
    for step, (loss, accuracy) in enumerate([(0.5, 0.8), (0.9, 0.7), (0.4, math.nan)], start=1):
        for best in (aimed, free):
            best.note(step, {"accuracy": accuracy, "my_loss": loss})

    assert aimed.best() == Best("my_loss", 0.9, 2)
    assert free.best() == Best("accuracy", 0.8, 1)
    assert BestMetrics(None).best() is None


@pytest.mark.parametrize(("name", "lower"), [("loss", True), ("val.loss", True), ("Perplexity", True), ("bleu", False)])
def test_a_names_words_decide_whether_lower_is_better(name: str, lower: bool) -> None:
    """Part of a word does not: "glossary" has a loss in it."""
    best = BestMetrics(None)
    best.note(1, {name: 2.0})
    best.note(2, {name: 1.0})
    other = BestMetrics(None)
    other.note(1, {"glossary": 1.0})
    other.note(2, {"glossary": 2.0})

    assert best.best() == Best(name, 1.0 if lower else 2.0, 2 if lower else 1)
    assert other.best() == Best("glossary", 2.0, 2)


# -- the news that `training.until` holds


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
