"""Requests of the exchange: what is rejected, malformed answers, and timeouts that follow the measurements."""

from __future__ import annotations

import asyncio

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import FailureKind, RequestRejected, Response, TransportError
from p2pnode.training.encoding.frames import BadFrame
from p2pnode.training.exchange.messages import (
    Indirect,
    IndirectAnswer,
    LocateOwners,
    LocateOwnersAnswer,
    decode,
    encode,
)
from p2pnode.training.exchange.ownership_messages import (
    TransferResult,
)
from p2pnode.training.exchange.peer_score import IGNORED_S, PeerScore
from p2pnode.training.exchange.rpc import ExchangeRpc
from p2pnode.training.exchange.terms import OwnerInfo
from p2pnode.training.exchange.timeouts import REQUEST
from tests.harness.builders.stores import contact, term
from tests.harness.environment.simulated import ListLog, VirtualClock
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import GENESIS, ScriptedSwarm
from tests.harness.swarms.exchange_overlay import chunks

ME, PEER, RELAY = contact("a"), contact("b"), contact("c")


def rpc_of(swarm: ScriptedSwarm) -> ExchangeRpc:
    clock = VirtualClock()
    score = PeerScore(ME.node_id, clock, ListLog([]))
    return ExchangeRpc(swarm=swarm, genesis=GENESIS, clock=clock, score=score)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (GENESIS + b"\xc1", "malformed LocateOwners"),
        (b"other" * 3 + encode(LocateOwners([], [])), "another swarm"),
        (GENESIS + encode(LocateOwners([0], [])), "bad body: short"),
    ],
)
def test_a_handler_rejects_what_it_cannot_serve(payload: bytes, reason: str) -> None:
    """Malformed messages, those of another swarm, and bad bodies end as a rejection with the reason."""

    async def scenario() -> None:
        swarm = ScriptedSwarm(ME)

        async def handle(_sender: object, _message: LocateOwners, _stream: object) -> Response:
            raise BadFrame("short")

        rpc_of(swarm).register("where_is", LocateOwners, handle)
        with pytest.raises(RequestRejected, match=reason):
            await swarm.handlers["where_is"](PEER, payload, chunks([]))

    run(scenario())


def test_a_node_of_another_swarm_is_ignored_for_a_while() -> None:
    """It is asked nothing, and its requests are still answered: nobody else can have it left out. One whose messages
    are malformed, or whose body is bad, stays."""

    async def scenario() -> None:
        swarm = ScriptedSwarm(ME)

        async def handle(_sender: object, _message: LocateOwners, _stream: object) -> Response:
            raise BadFrame("short")

        rpc = rpc_of(swarm)
        score = rpc.score
        rpc.register("where_is", LocateOwners, handle)
        message = encode(LocateOwners([0], []))
        for payload in (GENESIS + b"\xc1", GENESIS + message, b"other" * 3 + message):
            assert not score.is_quarantined(PEER.node_id)
            with pytest.raises(RequestRejected):
                await swarm.handlers["where_is"](PEER, payload, chunks([]))
        assert score.is_quarantined(PEER.node_id)

        await asyncio.sleep(IGNORED_S)
        assert not score.is_quarantined(PEER.node_id)

    run(scenario(), limit_s=2 * IGNORED_S)


def test_a_malformed_answer_is_a_failure_of_the_peer() -> None:
    """It is a `TransportError` of kind `foreign`, like an answer of another protocol."""

    async def scenario() -> None:
        swarm = ScriptedSwarm(ME, [PEER])
        swarm.answers["where_is"] = lambda *_: TransferResult([1], [])
        with pytest.raises(TransportError) as caught:
            await rpc_of(swarm).ask(PEER, "where_is", LocateOwners([], []), LocateOwnersAnswer, 1.0)
        assert caught.value.kind == "foreign"

    run(scenario())


def test_a_silent_peer_is_given_longer_next_time() -> None:
    """Only a timeout counts as silence; a refused connection does not measure the response time."""

    async def scenario() -> None:
        swarm = ScriptedSwarm(ME, [PEER])
        rpc = rpc_of(swarm)
        question = LocateOwners([], [])
        seen = []
        for kind in ("refused", "timeout", "timeout"):
            error = TransportError(kind, PEER.address, "test")  # type: ignore[arg-type]
            swarm.answers["push"] = lambda *_, error=error: error
            seen.append(rpc.timeouts.timeout_s("push", PEER.node_id))
            with pytest.raises(TransportError):
                async with rpc.request("push", PEER, question):
                    pass
        assert seen[0] == seen[1] == REQUEST.first_s
        assert seen[2] > seen[1]

    run(scenario())


def test_a_question_waits_longer_for_a_peer_behind_a_full_line() -> None:
    """After a silence it has half as long again, until answers come that a shorter timeout would have got. A longer
    timeout of the caller holds."""

    async def scenario() -> None:
        swarm = ScriptedSwarm(ME, [PEER])
        rpc = rpc_of(swarm)

        async def ask(timeout_s: float = 1.0) -> None:
            await rpc.ask(PEER, "where_is", LocateOwners([], []), TransferResult, timeout_s)

        swarm.answers["where_is"] = lambda *_: TransportError("timeout", PEER.address, "test")
        for _ in range(2):
            with pytest.raises(TransportError):
                await ask()
        swarm.answers["where_is"] = lambda *_: TransferResult([], [])
        swarm.waited_s = 2.8
        for _ in range(4):
            await ask()
        await ask(30.0)
        assert swarm.timeouts_s == [1.0, 1.5, 2.25, 2.25 * 4.5, 1.5 * 4.5, 4.5, 30.0]

    run(scenario())


def test_the_transfer_of_a_body_is_no_response_time() -> None:
    """A large body takes seconds on a slow line: the next timeout follows what the peer took after it."""

    async def scenario() -> None:
        swarm = ScriptedSwarm(ME, [PEER])
        rpc = rpc_of(swarm)
        swarm.request_s, swarm.waited_s = 30.0, 0.1
        swarm.answers["push"] = lambda *_: TransferResult([], [])
        for _ in range(8):
            async with rpc.request("push", PEER, LocateOwners([], [])):
                pass
        assert rpc.timeouts.timeout_s("push", PEER.node_id) == REQUEST.floor_s

    run(scenario())


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_suspected_peer_is_given_no_more_than_the_bound(is_dead: bool) -> None:
    """It was silent twice and may be replaced soon, or is dead: requests to it must not wait for longer than before."""

    async def scenario() -> None:
        swarm = ScriptedSwarm(ME, [PEER])
        swarm.answers["push"] = lambda *_: TransportError("timeout", PEER.address, "was silent")
        rpc = rpc_of(swarm)
        for suspects in ([], [], [PEER.node_id]):
            swarm.gone, swarm.suspects = (suspects, []) if is_dead else ([], suspects)
            with pytest.raises(TransportError):
                async with rpc.request("push", PEER, LocateOwners([], [])):
                    pass
        assert swarm.timeouts_s == [REQUEST.first_s, 1.5 * REQUEST.first_s, REQUEST.ceiling_s]
        swarm.gone = swarm.suspects = []
        with pytest.raises(TransportError):
            async with rpc.request("push", PEER, LocateOwners([], [])):
                pass
        assert swarm.timeouts_s[-1] > REQUEST.ceiling_s

    run(scenario())


def test_a_request_goes_to_the_present_address_of_a_node() -> None:
    """A contact from a claim may have the address of an earlier start; one of an unknown node is used as it is."""

    async def scenario() -> None:
        swarm = ScriptedSwarm(ME, [PEER])
        swarm.answers["where_is"] = swarm.answers["pull"] = lambda *_: LocateOwnersAnswer([])
        rpc, former = rpc_of(swarm), Contact(PEER.node_id, Address("10.0.0.1", 1))
        await rpc.ask(former, "where_is", LocateOwners([], []), LocateOwnersAnswer, 1.0)
        async with rpc.request("pull", former, LocateOwners([], [])):
            pass
        await rpc.ask(contact("c"), "where_is", LocateOwners([], []), LocateOwnersAnswer, 1.0)

        assert [to for _, to, _ in swarm.requests] == [PEER, PEER, contact("c")]

    run(scenario())


def test_requests_in_flight_end_when_their_node_is_found_dead() -> None:
    """A question and a request to it fail at once; a request to another node, and a later one to this, go on."""

    async def scenario() -> None:
        other = contact("c")
        swarm = ScriptedSwarm(ME, [PEER, other])
        rpc, clock = rpc_of(swarm), VirtualClock()
        swarm.request_s = 3.0
        swarm.answers["where_is"] = swarm.answers["pull"] = lambda *_: LocateOwnersAnswer([])
        ended: list[tuple[str, float]] = []

        async def request(name: str, to: Contact) -> None:
            began_s = clock.monotonic()
            try:
                if name == "pull":
                    async with rpc.request("pull", to, LocateOwners([], [])):
                        pass
                else:
                    await rpc.ask(to, name, LocateOwners([], []), LocateOwnersAnswer, 1.0)
                how = "answered"
            except TransportError as error:
                how = error.kind
            ended.append((how, clock.monotonic() - began_s))

        found = asyncio.get_running_loop().call_later(0.5, rpc.found_dead, PEER.node_id)
        await asyncio.gather(request("pull", PEER), request("where_is", PEER), request("pull", other))
        await request("pull", PEER)

        assert not found.cancelled()
        assert ended == [("reset", 0.5), ("reset", 0.5), ("answered", 3.0), ("answered", 3.0)]
        assert rpc.under_way == {}

    run(scenario())


def test_an_answer_ends_when_its_node_is_found_dead() -> None:
    """The transfer of a body stands still then; the timeout of silence is not waited for. A timeout of the caller's own
    stays its own."""

    async def scenario() -> None:
        swarm = ScriptedSwarm(ME, [PEER])
        rpc = rpc_of(swarm)
        swarm.answers["pull"] = lambda *_: LocateOwnersAnswer([])

        async def read() -> None:
            async with rpc.request("pull", PEER, LocateOwners([], [])):
                await asyncio.sleep(60.0)

        asyncio.get_running_loop().call_later(0.5, rpc.found_dead, PEER.node_id)
        with pytest.raises(TransportError) as caught:
            await read()
        assert caught.value.kind == "reset"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(read(), 1.0)

    run(scenario())


def test_a_request_that_ends_its_own_node_cancels_nothing_later() -> None:
    """What finds the node dead may run inside the task of a request to it. If that request has ended by the time the
    task waits, nothing is cancelled; if it waits on, it ends there."""

    async def scenario() -> None:
        swarm = ScriptedSwarm(ME, [PEER])
        rpc = rpc_of(swarm)
        swarm.answers["pull"] = lambda *_: LocateOwnersAnswer([])
        async with rpc.request("pull", PEER, LocateOwners([], [])):
            rpc.found_dead(PEER.node_id)
        await asyncio.sleep(0.1)

        async def waits() -> None:
            async with rpc.request("pull", PEER, LocateOwners([], [])):
                rpc.found_dead(PEER.node_id)
                await asyncio.sleep(60.0)

        with pytest.raises(TransportError) as caught:
            await waits()
        assert caught.value.kind == "reset"
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]

    run(scenario())


# -- by way of another member -----------------------------------------------------------------------------------------


def relayed() -> tuple[ExchangeRpc, ScriptedSwarm, PeerScore]:
    """This node reaches its peer by way of a relay alone, which answers for it."""
    swarm = ScriptedSwarm(ME, [PEER, RELAY])
    rpc = rpc_of(swarm)
    rpc.score.failed(PEER, "refused the connection")
    rpc.score.looked_for(PEER.node_id, RELAY.node_id)
    known = OwnerInfo.of(3, term(5, "b"), PEER)
    swarm.answers["indirect"] = lambda *_: IndirectAnswer(encode(LocateOwnersAnswer([known])))
    return rpc, swarm, rpc.score


async def asked(rpc: ExchangeRpc) -> list[int]:
    answer = await rpc.ask(PEER, "where_is", LocateOwners([3], []), LocateOwnersAnswer, 1.0)
    return [info.shard for info in answer.known]


def test_requests_to_a_member_behind_a_hole_go_by_way_of_its_relay() -> None:
    """And no other: where the relay is gone it is asked directly again. The answer counts as the member's own."""

    async def scenario() -> None:
        rpc, swarm, found = relayed()
        assert await asked(rpc) == [3]
        ((name, to, payload),) = swarm.requests
        inner = decode(payload, Indirect)
        assert (name, to, inner.target, inner.name, inner.origin) == ("indirect", RELAY, PEER.node_id, "where_is", b"")
        assert decode(inner.payload.removeprefix(GENESIS), LocateOwners).shards == [3]
        assert found.relay(PEER.node_id) == RELAY.node_id  # it has answered, not directly

        swarm.gone.append(RELAY.node_id)
        swarm.answers["where_is"] = lambda *_: LocateOwnersAnswer([])
        assert await asked(rpc) == []
        assert swarm.requests[-1][:2] == ("where_is", PEER)
        assert not found.unreached()

    run(scenario())


@pytest.mark.parametrize(("failure", "is_kept"), [("refused", False), ("timeout", False), ("rejected", True)])
def test_a_relay_that_does_not_get_through_is_used_no_more(failure: FailureKind, is_kept: bool) -> None:
    """A rejection is an answer of the member."""

    async def scenario() -> None:
        rpc, swarm, found = relayed()
        swarm.answers["indirect"] = lambda *_: IndirectAnswer(failure=failure, detail="the reason")
        with pytest.raises(TransportError, match="the reason") as caught:
            await asked(rpc)
        assert (caught.value.kind, caught.value.address) == (failure, PEER.address)
        assert bool(found.relay(PEER.node_id)) is is_kept

    run(scenario())


def test_a_request_ends_with_its_relay() -> None:
    """As soon as the failure detector has found the relay dead."""

    async def scenario() -> None:
        rpc, swarm, _ = relayed()
        swarm.request_s = 60.0
        waiting = asyncio.ensure_future(asked(rpc))
        await asyncio.sleep(1.0)
        rpc.found_dead(RELAY.node_id)
        with pytest.raises(TransportError, match="was found dead"):
            await waiting

    run(scenario())


def test_what_a_relay_passes_on_is_handled_as_its_senders_own() -> None:
    """With the checks of the inner request."""

    async def scenario() -> None:
        swarm, senders = ScriptedSwarm(ME), list[Contact]()

        async def handle(sender: Contact, _message: LocateOwners, _stream: object) -> Response:
            senders.append(sender)
            return Response(encode(LocateOwnersAnswer([])))

        rpc = rpc_of(swarm)
        rpc.register("where_is", LocateOwners, handle)
        rpc.serve_indirect()

        async def pass_on(name: str, genesis: bytes = GENESIS) -> None:
            payload = genesis + encode(LocateOwners([], []))
            inner = Indirect(ME.node_id, *ME.address, name, 1000, payload, PEER.node_id, *PEER.address)
            await swarm.handlers["indirect"](RELAY, encode(inner), chunks([]))

        await pass_on("where_is")
        assert senders == [PEER]
        with pytest.raises(RequestRejected, match="another swarm"):
            await pass_on("where_is", b"other" * 3)
        with pytest.raises(RequestRejected, match="does not serve 'pull'"):
            await pass_on("pull")

    run(scenario())
