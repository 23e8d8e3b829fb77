"""Where a search through the histories of one shard begins, and which faults it may use: see `ownership_model`."""

from __future__ import annotations

from typing import Any

from tests.harness.ownership.rules import Rules
from tests.harness.ownership.states import NO_NODE, Backed, Message, Node, Owned, Scenario, State, Term


def start(nodes: list[Node], order: tuple[int, ...], *, messages: tuple[Message, ...] = (), **budget: int) -> State:
    """`order` renames the nodes: terms are compared by node too, so it matters which has the higher number."""
    name = {NO_NODE: NO_NODE, **dict(enumerate(order))}

    def renamed(value: Any) -> Any:
        if isinstance(value, Node):
            return value._replace(
                fence=renamed(value.fence),
                highest_seen=renamed(value.fence),
                own=renamed(value.own),
                back=renamed(value.back),
            )
        if isinstance(value, Owned):
            return value._replace(
                term=renamed(value.term),
                backup=name[value.backup],
                learner=name[value.learner],
                moving=renamed(value.moving),
            )
        if isinstance(value, Backed):
            return value._replace(owner=name[value.owner], term=renamed(value.term), promised=renamed(value.promised))
        if isinstance(value, Message):
            return value._replace(source=name[value.source], to=name[value.to], term=renamed(value.term))
        return None if value is None else (value[0], name[value[1]])

    placed = sorted(zip(order, nodes, strict=True), key=lambda pair: pair[0])
    return State(
        tuple(renamed(node) for _, node in placed),
        messages=frozenset(renamed(message) for message in messages),
        sides=(0,) * len(nodes),
        budget=tuple(budget.items()),
    )


def owner(term: Term, deltas: int = 1, **more: Any) -> Node:
    own = Owned(term, (0,) * deltas, **{"promised": term[0], "pushes": (None,) * deltas, **more})
    return Node(fence=term, own=own)


def backup(of: int, term: Term, deltas: int = 1, **more: Any) -> Node:
    return Node(fence=term, back=Backed(of, term, (0,) * deltas, **{"attempt": term[0], **more}))


def pair(size: int = 3, deltas: int = 1) -> list[Node]:
    """The first owns under (2, 0), the second is its active backup, the others are candidates."""
    term = (2, 0)
    others = [Node(fence=term)] * (size - 2)
    return [owner(term, deltas, backup=1), backup(0, term, deltas), *others]


def without_backup(size: int) -> list[Node]:
    """The first owns under (1, 0) without a backup."""
    return [owner((1, 0)), *[Node(fence=(1, 0))] * (size - 1)]


def switched() -> list[Node]:
    """The third has just become the backup in place of the second, and neither has been informed yet."""
    learner = backup(0, (2, 0), promised=(3, 0), attempt=3)
    return [owner((3, 0), backup=2), backup(0, (2, 0)), learner]


def moved() -> list[Node]:
    """The first handed over to the second, which has the third as its backup by now; the answer was lost."""
    return [owner((2, 0), backup=1, promised=3, moving=(3, 0)), owner((4, 1), backup=2), backup(1, (4, 1))]


def handing() -> list[Node]:
    """The first has just asked the second to take the shard."""
    return [owner((2, 0), backup=1, promised=3, moving=(3, 0)), backup(0, (2, 0)), Node(fence=(2, 0))]


def superseded_owner() -> list[Node]:
    """The first was wrongly suspected, is not informed of it, and adds the third as a learner, which backs up the new
    owner."""
    return [owner((2, 0), backup=1, promised=3), owner((4, 1), backup=2), backup(1, (4, 1))]


def after_split() -> State:
    """After a split: the pair of the first won, and the third still has an acknowledged delta that the pair lacks."""
    state = start(pair(), (0, 1, 2), crash=1, timeout=1)
    return Rules.put(state._replace(acknowledged=frozenset({0})), 2, superseded=frozenset({0}))


IN_ORDER, TURNED = (0, 1, 2), (2, 0, 1)
RELEASE = Message("release", 0, 1, (3, 0))
HAND_OVER = Message("hand_over", 0, 1, (3, 0))
LEARN = Message("learn", 0, 2, (2, 0), 3)

SCENARIOS = {
    one.name: one
    for one in (
        Scenario("pair", start(pair(), IN_ORDER, crash=1, suspicion=2, timeout=2), depth=12),
        Scenario("first backup", start(without_backup(2), (0, 1), add_learner=2, crash=1, timeout=1), depth=12),
        Scenario("new backup", start(pair(), IN_ORDER, add_learner=2, crash=1, timeout=1), depth=9),
        Scenario("switched", start(switched(), IN_ORDER, messages=(RELEASE,), crash=1), depth=10),
        Scenario("switched, turned", start(switched(), TURNED, messages=(RELEASE,), crash=1), depth=10),
        Scenario(
            "switched, suspected",
            start(switched(), TURNED, messages=(RELEASE,), crash=1, suspicion=1),
            depth=9,
            repairs=True,
        ),
        Scenario("hand-over", start(pair(), IN_ORDER, move=1, crash=1, timeout=1, suspicion=1), depth=10),
        Scenario("handing", start(handing(), IN_ORDER, messages=(HAND_OVER,), add_learner=1, suspicion=1), depth=10),
        Scenario("superseded", start(superseded_owner(), IN_ORDER, messages=(LEARN,), crash=1), depth=8),
        Scenario("moved", start(moved(), TURNED, crash=1, add_learner=1), depth=9),
        Scenario("suspicion", start(pair(), IN_ORDER, add_learner=1, suspicion=1, crash=1), depth=9),
        Scenario("suspected by both", start(pair(), IN_ORDER, add_learner=1, suspicion=2), depth=10, repairs=True),
        Scenario("restart", start(pair(), IN_ORDER, crash=1, restart=1, suspicion=1, add_learner=1), depth=8),
        Scenario(
            "remembered fence",
            start([pair()[0], Node(fence=(7, 2)), Node(fence=(2, 0))], IN_ORDER, add_learner=1),
            depth=8,
        ),
        Scenario("after a split", after_split(), depth=8, repairs=True),
        Scenario("split", start(pair(), IN_ORDER, split=1, claim=1, crash=1), depth=8, deltas=1, repairs=True),
        Scenario("two deltas", start(pair(3, 2), IN_ORDER, split=1, claim=1, crash=1), depth=8, deltas=2, repairs=True),
    )
}
