"""Hostile and failing peers: floods, invented senders, cancelled calls, transports that close. Virtual time."""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Any

import msgspec
import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.ids import random_id
from p2pnode.overlay.kademlia import messages
from p2pnode.overlay.kademlia.calls import MAX_OUTSTANDING
from p2pnode.overlay.membership.members import MAX_PEERS
from p2pnode.overlay.membership.service import MAX_PAUSED
from p2pnode.overlay.peers import Activity, Contact, Heartbeat
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.swarms.overlay_swarm import GENESIS, PORT, OverlayWorld, endpoint

TAG = messages.swarm_tag("tests", GENESIS)
STRANGER = Address("10.7.7.7", 4000)
#: Objects of 60 bytes on average. To count them costs nothing; to trace their memory, five times the flood itself.
MOST_BLOCKS = 100_000


def asked(
    heartbeat: Heartbeat, body: messages.Call, message_id: bytes, *, prove: bool = False, news: Any = ()
) -> bytes:
    return messages.encode(messages.REQUEST, message_id, messages.encode_head(TAG, heartbeat), body, news, prove)


@pytest.mark.parametrize("body", ["ping", "find_node", "probe", "news", "unreached", "twin"])
@run_by(run)
async def test_a_flood_of_made_up_senders_costs_a_bounded_amount(body: str) -> None:
    """Four thousand well-formed requests arrive within a second, each from another id and address. None is inserted,
    every table of the node stays within its limit, and memory grows by less than 6 MB. The other node is served
    meanwhile."""
    world = OverlayWorld(seed=61)
    nodes = await world.raise_swarm(2)
    await world.until(lambda: all(len(n.peers) == 1 for n in nodes), 5.0, "they know each other")
    node, other = nodes
    rng = random.Random(61)
    made = {
        "ping": lambda: messages.Ping(),
        "find_node": lambda: messages.FindNode(rng.randbytes(20)),
        "probe": lambda: messages.PingRequest(rng.randbytes(20) + b"\x0a\x09" + rng.randbytes(4)),
        "news": lambda: messages.GossipOnly(),
        "unreached": lambda: messages.StreamsFailing(),
        "twin": lambda: messages.DuplicateIdentity(rng.getrandbits(32), node.node_id + b"\x0a\x09" + rng.randbytes(4)),
    }[body]
    requests = []
    for _ in range(4000):
        heartbeat = Heartbeat(rng.randbytes(20), 1, 1, 1 + rng.randrange(65535))
        source = Address(f"10.8.{rng.randrange(256)}.{rng.randrange(1, 255)}", heartbeat.port)
        news = [messages.Gossip(2, rng.randbytes(20), 1)]
        requests.append((asked(heartbeat, made(), rng.randbytes(20), prove=True, news=news), source))
    before = sys.getallocatedblocks()
    for burst in range(20):
        for datagram, source in requests[burst * 200 : burst * 200 + 200]:
            node._protocol.datagram_received(datagram, source)
        report = node.report()
        assert report.calls_waiting <= 2 * MAX_PAUSED + 4
        await asyncio.sleep(0.05)
        if burst % 5 == 0:
            contact = other.contact(node.node_id)
            assert contact is not None
            assert await other.ping(contact) is not None
    members = node._members
    assert len(node.peers) == len(node._protocol.router) == 1
    assert len(node._membership._verify_again) <= MAX_PAUSED
    assert len(members.conflicts) == len(members.dead_contacts) == 0
    assert len(members.negative) <= 4096
    assert len(node._protocol.queue) <= 512
    assert len(node._reachability._unreachable_reports) == 0, "a report by an unknown peer does not count"
    await asyncio.sleep(3)
    more = sys.getallocatedblocks() - before
    print(f"{more} blocks more")
    assert more < MOST_BLOCKS
    assert node.report().calls_waiting <= 1
    await world.stop()


@run_by(run)
async def test_calls_that_are_cancelled_or_time_out_leave_nothing_behind() -> None:
    """Pings, step queries, lookups and candidates are cancelled at any moment or time out. After the longest wait there
    is no call, no timer beyond those of the services, no task and no inquiry left."""
    world = OverlayWorld(seed=62)
    nodes = await world.raise_swarm(4)
    await world.until(lambda: all(len(n.peers) == 3 for n in nodes), 5.0, "they know each other")
    node = nodes[0]
    rng = random.Random(62)
    loop: Any = asyncio.get_running_loop()
    await asyncio.sleep(2)
    tasks = len(asyncio.all_tasks())
    timers = len([handle for handle in loop._scheduled if not handle.cancelled()])
    silent = [Contact(random_id(rng), Address("10.0.0.99", PORT)) for _ in range(20)]
    for _ in range(100):
        what = rng.choice(
            [
                lambda: node.ping(rng.choice(silent)),
                lambda: node.query_steps([n.node_id for n in nodes]),
                lambda: node.lookup(random_id(rng)),
                lambda: node._lookups.find(random_id(rng), silent),
                lambda: node._lookups.ask(rng.choice(silent), random_id(rng)),
                lambda: node.candidates(b"k" * 20),
            ]
        )()
        try:
            await asyncio.wait_for(what, rng.choice([0.0001, 0.003, 0.05, 0.3]))
        except TimeoutError:
            pass
    for contact in silent:
        assert await node.ping(contact) is None
    await asyncio.sleep(3)
    assert node.report().calls_waiting <= 1
    assert node._membership._inquiries == {}
    assert node._candidates._under_way == {}
    assert len(asyncio.all_tasks()) == tasks
    # Services and the network have a few of their own; a hundred calls have none.
    assert len([handle for handle in loop._scheduled if not handle.cancelled()]) <= timers + 20
    await world.stop()


@run_by(run)
async def test_a_transport_that_closes_answers_waiting_callers() -> None:
    """Calls under way when the node stops end with None at once: no call waits on, no peer is suspected."""
    world = OverlayWorld(seed=63)
    node = await world.found(0)
    silent = Contact(b"s" * 20, Address("10.0.0.99", PORT))
    waiting = [asyncio.create_task(node.ping(silent), name=f"ping {number}") for number in range(5)]
    waiting.append(asyncio.create_task(node.lookup(b"t" * 20), name="lookup"))
    waiting.append(asyncio.create_task(node._lookups.find(b"t" * 20, [silent]), name="find"))
    await asyncio.sleep(0.01)
    assert node.report().calls_waiting >= 5
    await node.stop()
    async with asyncio.timeout(0.01):
        answers = await asyncio.gather(*waiting)
    assert answers[:5] == [None] * 5
    assert [contact.node_id for contact in answers[6]] == [node.node_id]
    assert node.report().calls_waiting == 0
    assert await node.ping(silent) is None
    await world.stop()


@run_by(run)
async def test_more_calls_than_the_limit_are_not_made() -> None:
    """Ten thousand calls at once: those beyond the limit are answered None at once and counted."""
    world = OverlayWorld(seed=64)
    node = await world.found(0)
    rng = random.Random(64)
    results: list[Any] = []
    for _ in range(MAX_OUTSTANDING + 100):
        node._protocol.call(Contact(random_id(rng), STRANGER), messages.Ping(), results.append)
    assert len(results) >= 100
    assert node.report().counters["calls_not_made"] == len(results)
    assert node.report().calls_waiting == MAX_OUTSTANDING
    await asyncio.sleep(3)
    assert len(results) == MAX_OUTSTANDING + 100
    assert set(results) == {None}
    assert node.report().calls_waiting <= 1
    await world.stop()


@run_by(run)
async def test_a_table_is_never_a_list_of_everybody() -> None:
    """Beyond the limit no further node is inserted, with or without proof; known ones are still served."""
    world = OverlayWorld(seed=65)
    node = await world.found(0)
    rng = random.Random(65)
    for number in range(MAX_PEERS + 50):
        address = Address(f"10.{16 + number // 250}.0.{number % 250 + 1}", PORT)
        heartbeat = Heartbeat(random_id(rng), 1, 1, PORT)
        node._members.on_response(heartbeat, address, 0.01, Contact(heartbeat.node_id, address), proven=True)
    assert len(node.peers) == MAX_PEERS
    assert node.report().counters["peers_refused_full"] == 50
    known = next(iter(node.peers))
    later = Heartbeat(known.node_id, 1, 1, PORT, step=7)
    node._members.on_response(later, known.address, 0.01, known.contact)
    assert known.step == 7
    await world.stop()


@run_by(run)
async def test_each_reason_to_drop_is_counted_where_people_look() -> None:
    """One datagram for each reason, and its counter in the report that `/status` shows."""
    world = OverlayWorld(seed=66)
    node = await world.found(0)
    heartbeat = Heartbeat(b"a stranger's node id", 1, 1, 4000)
    ping = asked(heartbeat, messages.Ping(), b"m" * 20)
    own = asked(node.heartbeat, messages.Ping(), b"m" * 20)
    twin = asked(msgspec.structs.replace(node.heartbeat, boot_id=1), messages.Ping(), b"m" * 20)
    other = messages.encode(0, b"m" * 20, messages.encode_head(b"no swarm", heartbeat), messages.Ping())
    pong = messages.encode(1, b"m" * 20, messages.encode_head(TAG, heartbeat), messages.Pong())
    named = messages.encode(
        0, b"m" * 20, messages.encode_head(TAG, Heartbeat(heartbeat.node_id, 1, 1, 1, "a.name")), messages.Ping()
    )
    for datagram, reason in [
        (b"", "short"),
        (ping + bytes(1400), "long"),
        (b"\x02" + ping[1:], "kind"),
        (ping[:-1], "content"),
        (named, "host"),
        (other, "other_swarm"),
        (own, "own_echo"),
        (twin, "own_id"),
        (pong, "unasked"),
    ]:
        before = node.report().counters.get(f"dropped_{reason}", 0)
        node._protocol.datagram_received(datagram, STRANGER)
        assert node.report().counters[f"dropped_{reason}"] == before + 1
    stranger = world.make(1)
    await stranger.start()
    stranger._protocol.datagram_received(ping, STRANGER)
    assert stranger.report().counters["dropped_no_swarm"] == 1
    assert len(node.peers) == 0
    await world.stop()


@run_by(run)
async def test_a_farewell_in_anothers_name_from_elsewhere_is_not_believed() -> None:
    """LEAVING under a peer's id from an unknown address, or under another start, changes nothing."""
    world = OverlayWorld(seed=67)
    nodes = await world.raise_swarm(3)
    await world.until(lambda: all(len(n.peers) == 2 for n in nodes), 5.0, "they know each other")
    leaving = msgspec.structs.replace(nodes[2].heartbeat, activity=int(Activity.LEAVING))
    for heartbeat, source in [
        (leaving, STRANGER),
        (msgspec.structs.replace(leaving, incarnation=9), endpoint(2)),
        (msgspec.structs.replace(leaving, boot_id=9), endpoint(2)),
    ]:
        nodes[0]._protocol.datagram_received(asked(heartbeat, messages.GossipOnly(), b"m" * 20), source)
        await asyncio.sleep(1)
        assert nodes[0].is_alive(nodes[2].node_id)
    await world.stop()
