"""Which owners put a node off for longer than others explain."""

from __future__ import annotations

import pytest

from tests.harness.builders.stores import IDS, contact, store_of
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of
from training.exchange.put_off import FACTOR, GAP_S, LEAST_S, MAX_OWNERS, STEPS, PutOff

B, C = IDS["b"], IDS["c"]


class Node:
    """A node that asks owners; its clock is set by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.found = PutOff()

    def ask(self, owner: bytes, took_s: float, *, gives: bool, shard: int = 0) -> None:
        """A request that ends after so long, with a result or without."""
        awaited = {shard}
        with self.found.asking("push", owner, [shard], awaited, lambda: self.now_s):
            self.now_s += took_s
            if gives:
                awaited.clear()

    def due(self, step_s: float = 0.1) -> list[bytes]:
        return self.found.due(self.now_s, step_s)

    def is_put_off(self, attempts: int, every_s: float = 1.0, **other: float) -> list[bytes]:
        """`B` says to so many attempts that it is to be asked again, while `C` gives results."""
        for _ in range(attempts):
            self.ask(B, 0.1, gives=False)
            self.ask(C, other.get("other_s", 0.1), gives=True, shard=1)
            self.now_s += every_s - 0.1
        return self.due()


def test_an_owner_that_has_everything_come_again_holds_a_node_up() -> None:
    """After `LEAST_S`, and it is named once for that wait."""
    node = Node()
    assert node.is_put_off(int(LEAST_S) - 2) == []
    assert node.is_put_off(4) == [B]
    assert node.due() == []


def test_a_request_that_never_ends_counts_as_long_as_it_is_under_way() -> None:
    """One byte a second, or signs of life: others give results meanwhile."""
    node = Node()
    with node.found.asking("pull", B, [0], {0}, lambda: node.now_s):
        for _ in range(int(LEAST_S)):
            assert node.due() == []
            with node.found.asking("pull", C, [1], set(), lambda: node.now_s):
                node.now_s += 0.1
            node.now_s += 0.9
        assert node.due() == [B]


def test_where_nobody_else_gives_a_result_the_line_of_the_node_may_be_slow() -> None:
    """A result of before the wait says nothing of it."""
    node = Node()
    node.ask(C, 0.1, gives=True, shard=1)
    for _ in range(3 * int(LEAST_S)):
        node.ask(B, 1.0, gives=False)
    assert node.due() == []
    node.ask(C, 0.1, gives=True, shard=1)
    assert node.due() == [B]


def test_an_owner_may_take_much_longer_than_others_and_several_steps() -> None:
    """`FACTOR` times what others take, as their median, and `STEPS` median steps."""
    node = Node()
    slow_s = 2 * LEAST_S / FACTOR
    assert node.is_put_off(int(LEAST_S / (1.0 + slow_s)) + 4, other_s=slow_s) == []
    node = Node()
    node.is_put_off(int(LEAST_S) - 2)
    for _ in range(4):
        node.ask(B, 1.0, gives=False)
        node.ask(C, 0.1, gives=True, shard=1)
    assert node.due(step_s=2 * LEAST_S / STEPS) == []
    assert node.due() == [B]


def test_time_between_the_steps_of_a_node_does_not_count() -> None:
    """Nor a wait that has its result, or whose owner is another one since."""
    node = Node()
    for _ in range(5):
        node.ask(B, 0.5, gives=False)
        node.now_s += 60.0
        node.ask(C, 0.1, gives=True, shard=1)
    assert node.due() == []
    for last in (True, False):
        node = Node()
        node.is_put_off(int(LEAST_S) - 2)
        node.ask(B if last else C, 0.1, gives=last)
        node.ask(C, 0.1, gives=True, shard=1)
        node.ask(B, 1.0, gives=False)
        assert node.due() == []
    assert GAP_S < 60.0


def test_what_is_remembered_of_owners_has_a_bound() -> None:
    """The one that gave a result longest ago is forgotten first."""
    node = Node()
    for number in range(MAX_OWNERS + 5):
        node.ask(number.to_bytes(20, "big"), 0.1, gives=True)
    assert len(node.found._took) == MAX_OWNERS
    assert ("push", bytes(20)) not in node.found._took


@pytest.mark.parametrize("trouble", ["", "suspect", "gone"])
def test_an_owner_that_lives_and_puts_off_is_left_out_for_a_minute(trouble: str) -> None:
    """One that is suspected, or gone, is found by other means."""

    async def scenario() -> None:
        swarm = ScriptedSwarm(contact("a"), [contact("b"), contact("c")])
        context = context_of(swarm, store_of("a"))
        if trouble == "suspect":
            swarm.suspects.append(B)
        elif trouble == "gone":
            swarm.gone.append(B)
        context.held_up_by(B)
        news = context.view.reliability.take_news()
        assert (B in context.view.trust) is bool(trouble)
        assert news == ([] if trouble else [(B, "puts_off", 60.0)])

    run(scenario())
