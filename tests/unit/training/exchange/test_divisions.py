"""What a node knows of divisions: the genesis of each, which it follows, and what it tells others."""

from __future__ import annotations

import asyncio

import pytest

from training.exchange.divisions import DIVIDED, DIVIDING, MOST_NAMED, ONE_MEMBER, Divisions, exchange_genesis

RUN = bytes(range(16))
A, B = b"a" * 20, b"b" * 20


def divisions(parts: int = 1) -> Divisions:
    """Of a node that can divide its shards into anything."""
    found = Divisions(RUN, parts)
    found.can_divide = lambda _parts: True
    return found


def test_each_division_has_a_genesis_of_its_own() -> None:
    """A run that was never divided has its own, as ever; the golden value is protocol."""
    assert exchange_genesis(RUN, 1) == RUN
    assert len({exchange_genesis(RUN, parts) for parts in range(1, 65)}) == 64
    assert len({exchange_genesis(bytes([first, *RUN[1:]]), 2) for first in range(256)}) == 256
    assert exchange_genesis(RUN, 2).hex() == "8dc0228bf869fa854056169e886284c3"


def test_a_message_of_a_finer_division_makes_the_node_divide() -> None:
    """It is refused until the node has; the finest that was met counts."""

    async def scenario() -> None:
        mine = divisions()
        waiting = asyncio.create_task(mine.wait())
        assert mine.refusal(exchange_genesis(RUN, 4), A) == DIVIDING
        assert mine.refusal(exchange_genesis(RUN, 2), A) == DIVIDING
        assert mine.wanted == 4
        await waiting
        mine.reached(4)
        assert mine.genesis == exchange_genesis(RUN, 4)
        waiting = asyncio.create_task(mine.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()

    asyncio.run(scenario())


def test_a_message_of_a_coarser_division_is_told_of_this_one() -> None:
    """And the other node, which is told, divides."""
    mine, other = divisions(8), divisions(2)
    reason = mine.refusal(exchange_genesis(RUN, 2), A)

    assert reason == f"{DIVIDED}8"
    assert mine.wanted == 8
    other.told(reason, A)
    assert other.wanted == 8


@pytest.mark.parametrize("parts", [3, 6, 5])
def test_what_no_division_leads_to_is_another_swarm(parts: int) -> None:
    """Shards in three parts and shards in four have no common parts: the sender is foreign."""
    mine = divisions(4)

    assert mine.refusal(exchange_genesis(RUN, parts), A) == ""
    assert mine.refusal(b"another swarm...", A) == ""
    assert mine.wanted == 4


def test_a_run_that_was_divided_by_three_is_divided_further() -> None:
    """Thirds can become sixths, and are no quarters."""
    mine = divisions(3)

    assert mine.refusal(exchange_genesis(RUN, 4), A) == ""
    assert mine.refusal(exchange_genesis(RUN, 6), A) == DIVIDING
    assert mine.wanted == 6


@pytest.mark.parametrize(
    "reason", ["", "another swarm", DIVIDED, f"{DIVIDED}two", f"{DIVIDED}-4", f"{DIVIDED}3", f"{DIVIDED}99999999"]
)
def test_no_other_refusal_makes_a_node_divide(reason: str) -> None:
    """Nor one with a number that is no division of this node's shards."""
    mine = divisions(2)
    mine.told(reason, A)

    assert mine.wanted == 2


def test_a_node_whose_shards_cannot_be_divided_stays() -> None:
    """The sender of a finer message is foreign to it."""
    mine = Divisions(RUN, 1)

    assert mine.refusal(exchange_genesis(RUN, 2), A) == ""
    assert not mine.want(2)


def test_one_member_alone_is_not_followed_beyond_what_the_swarm_explains() -> None:
    """However often it says so, it is refused. When a second member has said so, or of more, both are believed."""
    mine = divisions()
    mine.is_expected = lambda parts: parts <= 4
    for _ in range(3):
        assert mine.refusal(exchange_genesis(RUN, 64), A) == ONE_MEMBER
        mine.told(f"{DIVIDED}64", A)
    assert mine.wanted == 1
    assert mine.disbelieves(A)
    assert not mine.disbelieves(B)

    mine.told(f"{DIVIDED}16", B)
    assert mine.wanted == 16
    assert mine.disbelieves(A)
    assert mine.take_believed() == [B]
    assert mine.refusal(exchange_genesis(RUN, 64), A) == ONE_MEMBER
    assert mine.wanted == 16
    assert mine.refusal(exchange_genesis(RUN, 64), B) == DIVIDING
    assert mine.wanted == 64
    assert mine.take_believed() == [A, B]
    assert mine.take_believed() == []


def test_only_so_many_members_are_remembered() -> None:
    """Those that were heard last."""
    mine = divisions()
    mine.is_expected = lambda _parts: False
    for number in range(MOST_NAMED + 1):
        mine.told(f"{DIVIDED}{2 if number else 8}", bytes([number]) * 20)
    assert mine.wanted == 2

    mine.told(f"{DIVIDED}8", A)
    assert mine.wanted == 2  # the first that has named 8 is forgotten
    mine.told(f"{DIVIDED}8", B)
    assert mine.wanted == 8
