"""Whatever arrives: no exception leaves the protocol, no task is made, no table changes, and the node continues."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.kademlia import messages as wire
from p2pnode.overlay.peers import Heartbeat
from p2pnode.overlay.transport import RequestRejected
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.swarms.overlay_swarm import GENESIS, OverlayWorld, endpoint

STRANGER = Address("10.7.7.7", 4000)

values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=64)
    | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=20,
)
TAG = wire.swarm_tag("tests", GENESIS)
right_heartbeat = [b"heartbeat of a stranger!!", 1, 2, 4000, "", 2, 0, 0.0, 0, False]
bodies = values | st.builds(
    lambda name, rest: [name, *rest],
    st.sampled_from(
        ["ping", "find_node", "probe", "news", "unreached", "twin", "pong", "nodes", "probed", "store", "find_value"]
    ),
    st.lists(st.binary(max_size=80) | values, max_size=3),
)
messages = st.builds(
    lambda kind, message_id, content: bytes([kind]) + message_id + msgspec.msgpack.encode(content),
    st.integers(0, 3),
    st.binary(min_size=20, max_size=20),
    values
    | st.builds(
        lambda *parts: [*parts[:4], *parts[4]],
        st.just(TAG) | values,
        st.just(right_heartbeat) | values,
        bodies,
        st.just([]) | values,
        st.lists(st.booleans() | st.binary(max_size=100) | values, max_size=2),
    ),
)
datagrams = st.binary(max_size=1500) | messages
FIXED = settings(
    derandomize=True, database=None, max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@FIXED
@given(st.lists(datagrams, max_size=40))
def test_any_bytes_leave_table_and_node_unharmed(received: list[bytes]) -> None:
    """Arbitrary bytes and arbitrary well-framed messages, into the datagram handler, whose errors are raised."""

    async def story() -> None:
        world = OverlayWorld(seed=41)
        first = await world.found(0)
        second = await world.join(1)
        await world.until(lambda: len(first.peers) == 1, 2.0, "the two know each other")
        before = [peer.contact for peer in first.peers]
        tasks = len(asyncio.all_tasks())
        for datagram in received:
            first._protocol.datagram_received(datagram, STRANGER)
        assert len(asyncio.all_tasks()) == tasks
        assert [peer.contact for peer in first.peers] == before
        await asyncio.sleep(1)
        assert [peer.contact for peer in first.peers] == before
        assert (await second.lookup(first.node_id))[0].node_id == first.node_id
        assert first.report().counters.get("faults", 0) == 0
        await world.stop()

    VirtualLoop().run(story())


@FIXED
@given(bodies, values)
def test_any_answer_leaves_the_asker_unharmed(body: Any, news: Any) -> None:
    """A node that answers everything with nonsense: lookups end, nothing raises, and it enters no table."""

    async def story() -> None:
        world = OverlayWorld(seed=42)
        node = await world.found(0)
        liar = world.network.transport("10.0.0.99", 8468)
        lie = Heartbeat(b"the liar's node id!!", 1, 2, 8468)
        head = [TAG, lie, body, news]

        def answer(datagram: bytes, source: Address) -> None:
            if datagram[:1] == b"\x00":
                encoded = b"\x01" + datagram[1:21] + msgspec.msgpack.encode(head)
                if len(encoded) <= 1400:
                    liar.send(source, encoded)

        async def refuse(_: Any) -> Any:
            raise RequestRejected("I only lie in datagrams")

        await liar.open(answer, refuse)
        liar.send(endpoint(0), wire.encode(0, b"q" * 20, wire.encode_head(TAG, lie), wire.Ping()))
        await asyncio.sleep(3)
        for _ in range(3):
            found = await node.lookup(b"t" * 20)
            assert node.node_id in [contact.node_id for contact in found]
        await node.query_steps([lie.node_id])
        assert node.report().counters.get("faults", 0) == 0
        await liar.close()
        await world.stop()

    VirtualLoop().run(story())
