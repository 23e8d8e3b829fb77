"""Terms, fences and known owners: which claims a node accepts, what challenges its own, and what its disk keeps."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.environment import Environment
from p2pnode.overlay.peers import Contact
from p2pnode.training.exchange.run_state import RebalanceRequests
from p2pnode.training.exchange.terms import (
    FENCES_FILE,
    GENERATION,
    MAX_GENERATIONS_AHEAD,
    TERM_LIMIT,
    ZERO_TERM,
    Fence,
    FenceFile,
    Ownership,
    Term,
)
from tests.harness.builders.stores import IDS, contact, owner_of, store_of, term
from tests.harness.environment.simulated import InlineExecutor, ListLog, MemoryDisk, Record, VirtualClock
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.swarms.exchange_swarm import GENESIS, StartEntropy


def test_a_fence_only_rises() -> None:
    """A lower or equal term changes nothing."""
    ownership = Ownership(4)
    ownership.raise_fence(0, term(5, "b"))
    for lower in (term(5, "b"), term(5, "a"), term(4, "d"), ZERO_TERM):
        ownership.raise_fence(0, lower)

    assert ownership.fence(0) == term(5, "b")


def test_the_highest_claim_wins() -> None:
    """A claim is accepted when its term is above the known one, whichever order the two arrive in."""
    ownership = Ownership(4)

    assert ownership.accept(0, term(3, "b"), contact("b"))
    assert not ownership.accept(0, term(2, "c"), contact("c"))
    assert ownership.known_owners[0].owner == contact("b")
    assert ownership.accept(0, term(4, "c"), contact("c"))
    assert ownership.known_owners[0].owner == contact("c")
    assert ownership.fence(0) == term(4, "c")


def test_a_claim_below_the_fence_is_refused() -> None:
    """A fence refuses claims even when no owner is known, as after a restart."""
    ownership = Ownership(4)
    ownership.raise_fence(0, term(5, "b"))

    assert not ownership.accept(0, term(4, "c"), contact("c"))
    assert ownership.known_owners == {}


def test_a_term_has_one_owner_whose_address_may_change() -> None:
    """Under a known term a second node is refused; a new address of the same node is accepted once."""
    ownership = Ownership(4)
    ownership.accept(0, term(3, "b"), contact("b"))
    moved = Contact(IDS["b"], Address("10.0.0.9", 9))

    assert not ownership.accept(0, term(3, "b"), contact("c"))
    assert ownership.accept(0, term(3, "b"), moved)
    assert not ownership.accept(0, term(3, "b"), moved)
    assert ownership.known_owners[0].owner == moved


def test_stale_fences_name_the_shards_whose_known_owner_is_too_low() -> None:
    """A shard without a known owner counts too; one whose owner has the highest term does not."""
    ownership = Ownership(4)
    ownership.accept(0, term(2, "b"), contact("b"))
    ownership.accept(1, term(2, "b"), contact("b"))
    ownership.raise_fence(1, term(7, "c"))
    ownership.raise_fence(2, term(3, "c"))

    stale = ownership.stale_fences(range(4))

    assert [(fence.shard, fence.term) for fence in stale] == [(1, term(7, "c")), (2, term(3, "c"))]


def test_a_restarted_node_keeps_no_claim_but_its_fence() -> None:
    """Its claims are forgotten, the terms it had are not: a later owner must be above them."""
    ownership = Ownership(4)
    ownership.accept(0, term(2, "b"), contact("b"))
    ownership.accept(1, term(2, "c"), contact("c"))

    ownership.forget_node(IDS["b"])

    assert list(ownership.known_owners) == [1]
    assert ownership.fence(0) == term(2, "b")


def test_a_term_that_no_history_explains_is_ignored() -> None:
    """Near the highest number that fits a message, or thousands of generations ahead: no claim, no fence, no catch-up.
    What an owner of this swarm may reach is accepted, also after many restarts."""
    store = owner_of("a")
    before = store.owned[0].term
    for number in ((1 << 62) - 1, TERM_LIMIT, TERM_LIMIT - 1, 2 * MAX_GENERATIONS_AHEAD * GENERATION):
        high = Term(number, IDS["x"])
        assert not store.note_owner(0, high, contact("x"))
        assert not store.begin_catch_up(1, high, contact("x"), 1)
        requests = RebalanceRequests(store)
        requests.challenge([Fence(0, high)])
        assert not store.outranked()
    assert (store.owned[0].term, store.ownership.fence(0), store.ownership.fence(1)) == (before, before, ZERO_TERM)

    later = Term(MAX_GENERATIONS_AHEAD * GENERATION, IDS["x"])
    assert store.note_owner(1, later, contact("x"))
    assert store.next_term(1).number < TERM_LIMIT


def test_a_node_that_knows_no_term_believes_all_that_leave_room() -> None:
    """It joins a swarm of any age; above the limit there is no term."""
    store = store_of("a")
    assert not store.note_owner(0, Term(TERM_LIMIT, IDS["x"]), contact("x"))
    assert store.note_owner(0, Term(TERM_LIMIT - 1, IDS["x"]), contact("x"))
    assert store.next_term(0, begins_generation=True).number < 1 << 62


@run_by(run)
async def test_a_wake_ends_the_wait_and_counts_once() -> None:
    """Without one the wait lasts its whole time; a wake before the wait counts too."""
    requests, clock = RebalanceRequests(owner_of("a")), asyncio.get_running_loop().time
    began = clock()
    requests.wake()
    await requests.wait(5.0)
    assert clock() == began

    await requests.wait(5.0)
    assert clock() - began == 5.0


@run_by(run)
async def test_only_a_higher_term_challenges_an_owner() -> None:
    """Of several fences the highest counts; a shard that is not owned here cannot be challenged. While the shard moves,
    that is resolved first."""
    store = owner_of("a", 3)
    requests, clock = RebalanceRequests(store), asyncio.get_running_loop().time
    requests.challenge([Fence(0, term(3, "a")), Fence(0, term(2, "x")), Fence(1, term(9, "x"))])
    assert store.outranked() == {}

    requests.challenge([Fence(0, term(5, "x")), Fence(0, term(4, "x"))])
    assert store.outranked() == {0: term(5, "x")}
    began = clock()
    await requests.wait(5.0)
    requests.challenge([Fence(0, term(5, "x"))])  # no news
    await requests.wait(5.0)
    assert clock() - began == 5.0
    store.owned[0].moving = True
    assert store.outranked() == {}


def test_an_owner_is_challenged_by_a_claim_of_its_own() -> None:
    """Somebody has claimed a term for it that it never had. Nobody need tell it so."""
    store = owner_of("a", 3)
    store.note_owner(0, term(5, "x"), contact("a"))
    assert store.outranked() == {0: term(5, "x")}


@run_by(run)
async def test_orphans_are_collected_once_and_in_order() -> None:
    """A shard that is reported twice is collected once."""
    requests = RebalanceRequests(owner_of("a"))
    for shard in (2, 0, 2):
        requests.take_over(shard)

    assert requests.collect_orphans() == [2, 0]
    assert requests.collect_orphans() == []


class Node:
    """A node on a disk with these files."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.ownership, self.records, clock = Ownership(4), list[Record](), VirtualClock()
        self.disk = MemoryDisk()
        self.disk.files = files
        environment = Environment(
            clock=clock,
            entropy=StartEntropy("fences"),
            disk=self.disk,
            executor=InlineExecutor(),
            log=ListLog(self.records, "", clock),
        )
        self.file = FenceFile(self.ownership, GENESIS, environment)

    def events(self, name: str) -> int:
        return [one.event for one in self.records].count(name)


async def written(file: FenceFile, seconds: float) -> None:
    task = asyncio.create_task(file.run())
    await asyncio.sleep(seconds)
    task.cancel()


@run_by(run)
async def test_fences_are_there_after_a_restart() -> None:
    """The highest of each shard; one that the disk has is not lowered by what comes later."""
    node = Node({})
    node.ownership.raise_fence(0, term(3, "a"))
    node.ownership.raise_fence(0, term(2, "b"))
    node.ownership.raise_fence(2, term(7, "b"))
    await written(node.file, 1.5)

    again = Node(dict(node.disk.files))
    fences = [again.ownership.fence(shard) for shard in range(4)]
    assert fences == [term(3, "a"), ZERO_TERM, term(7, "b"), ZERO_TERM]
    again.ownership.raise_fence(2, term(6, "a"))
    assert again.ownership.fence(2) == term(7, "b")


@run_by(run)
async def test_the_file_is_written_when_something_changed_and_once_a_second_at_most() -> None:
    """A node that hears nothing new writes nothing."""
    node = Node({})
    await written(node.file, 5.5)
    assert node.disk.writes == 0
    task = asyncio.create_task(node.file.run())
    for number in range(1, 31):
        node.ownership.raise_fence(0, term(number, "a"))
        await asyncio.sleep(0.1)
    await asyncio.sleep(5.0)
    task.cancel()
    assert 3 <= node.disk.writes <= 4
    assert Node(dict(node.disk.files)).ownership.fence(0) == term(30, "a")


@run_by(run)
async def test_a_disk_that_is_full_is_tried_again() -> None:
    """One error in the log however long it lasts, another one when it happens again, and nothing is lost."""
    node = Node({})
    task = asyncio.create_task(node.file.run())
    for number in (1, 2):
        node.disk.full = True
        node.ownership.raise_fence(1, term(number, "a"))
        await asyncio.sleep(4.5)
        assert node.events("fences_not_written") == number
        node.disk.full = False
        await asyncio.sleep(2.0)
        assert Node(dict(node.disk.files)).ownership.fence(1) == term(number, "a")
    task.cancel()


@pytest.mark.parametrize(
    ("raw", "events"),
    [
        (b"", ["fences_unreadable"]),
        (b"\xff" * 40, ["fences_unreadable"]),
        (msgspec.msgpack.encode((GENESIS, {0: (1 << 62, IDS["a"])})), ["fences_unreadable"]),
        (msgspec.msgpack.encode((b"x" * 16, {0: (5, IDS["a"])})), []),
        (msgspec.msgpack.encode((GENESIS, {})), []),
        (msgspec.msgpack.encode((GENESIS, {0: (TERM_LIMIT, IDS["a"])})), ["fence_passed_over"]),
    ],
    ids=["empty", "garbage", "no term", "another run", "none", "no room for later ones"],
)
@run_by(run)
async def test_a_file_that_is_of_no_use_raises_no_fence(raw: bytes, events: list[str]) -> None:
    """The node starts; what was wrong with its file is in the log. A file of another run is not wrong."""
    node = Node({FENCES_FILE: raw})
    assert node.ownership.fences == {}
    assert [one.event for one in node.records] == events


@run_by(run)
async def test_a_fence_that_leaves_no_room_does_not_take_the_others_with_it() -> None:
    """Only that one is passed over."""
    rows = {0: (TERM_LIMIT, IDS["a"]), 1: (TERM_LIMIT - 1, IDS["a"]), 2: (5, IDS["b"])}
    node = Node({FENCES_FILE: msgspec.msgpack.encode((GENESIS, rows))})
    assert node.ownership.fences == {1: term(TERM_LIMIT - 1, "a"), 2: term(5, "b")}
