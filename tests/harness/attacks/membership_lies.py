"""Attacks on what members know of each other: lives, starts, addresses, lines, versions, and who can be reached."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from overlay.addresses import Address
from overlay.kademlia.messages import (
    FindNode,
    Gossip,
    MemberState,
    PingRequest,
    PingResult,
    StreamsFailing,
    pack_contact,
    pack_nodes,
)
from overlay.nat.reachability import DialBackAnswer
from overlay.peers import Activity, Contact
from overlay.transport import Response
from tests.harness.attacks.attacker import ATTACK_S, Attack, Attacker, contact_of, entry_of, for_ever
from training.exchange import ownership_messages as moves

ATTACKS: dict[str, Attack] = {}
attack = entry_of(ATTACKS)


def _protocol(a: Attacker) -> Any:
    return a.host.living.overlay._protocol


def _gossips(name: str, kind: MemberState, incarnation: int | None) -> None:
    async def run(a: Attacker) -> None:
        async def work() -> None:
            for about in a.honest:
                start = about.living.incarnation if incarnation is None else incarnation
                news = [Gossip(int(kind), contact_of(about).node_id, start, (1 << 30) - 1)]
                for host in a.honest:
                    if host is not about:
                        _protocol(a).send_gossip(contact_of(host), news)

        await for_ever(work, 0.2)

    ATTACKS[name] = run


_gossips("says of every other member that it is dead", MemberState.DEAD, None)
_gossips("says of every other member that it has left", MemberState.LEFT, None)
_gossips("says of every other member that a later start of it is dead", MemberState.DEAD, (1 << 48) - 1)
_gossips("says of every other member that a later start of it lives", MemberState.ALIVE, (1 << 48) - 1)


@attack("is started again once a second, as it announces")
async def _starts(a: Attacker) -> None:
    local: Any = a.host.living.overlay.local

    async def work() -> None:
        now = local.heartbeat
        local._change({"incarnation": now.incarnation + 1, "boot_id": a.chance.randrange(1 << 32)})
        a.host.living.overlay._membership.send_to_some([])

    await for_ever(work, 1.0)


@attack("announces another address once a second")
async def _moves(a: Attacker) -> None:
    local: Any = a.host.living.overlay.local

    async def work() -> None:
        local._change({"host": f"10.0.0.{a.chance.randrange(100, 200)}", "port": a.chance.randrange(1, 65535)})
        a.host.living.overlay._membership.send_to_some([])

    await for_ever(work, 1.0)


@attack("announces that it leaves, and stays")
async def _leaves(a: Attacker) -> None:
    a.announces(activity=Activity.LEAVING)
    await asyncio.sleep(ATTACK_S)


@attack("announces that it has finished, or pauses, by turns")
async def _finishes(a: Attacker) -> None:
    async def work() -> None:
        for activity in (Activity.FINISHED, Activity.PAUSED, Activity.READY, Activity.JOINING):
            a.announces(activity=activity)
            await asyncio.sleep(2.0)

    await for_ever(work, 0.0)


@attack("announces the fastest line and the slowest by turns, with any version")
async def _capacities(a: Attacker) -> None:
    local: Any = a.host.living.overlay.local

    async def work() -> None:
        for capacity in (14, 1, 0, 30, 255):
            local.line._capacity.announced = capacity
            local.version = "".join(chr(a.chance.randrange(32, 0x3000)) for _ in range(64))
            await a.tell_all("backing", moves.ConfirmBackup(a.genesis, []))
            await asyncio.sleep(2.0)

    await for_ever(work, 0.0)


@attack("reaches nobody: reports failing streams, and denies every dial-back")
async def _unreachable(a: Attacker) -> None:
    async def deny(_sender: Contact, _payload: bytes, _stream: Any) -> Response:
        return Response(msgspec.msgpack.encode(DialBackAnswer(False, "no route")))

    a.host.living.overlay._requests._handlers["dialback"] = deny

    async def work() -> None:
        for host in a.honest:
            _protocol(a).send_gossip(contact_of(host), [], StreamsFailing())

    await for_ever(work)


@attack("answers lookups with nodes that do not exist, and pings for others with lies")
async def _poisons(a: Attacker) -> None:
    responder: Any = a.host.living.overlay._responder

    def find_node(_body: Any, _heartbeat: Any, _source: Any, _message_id: bytes) -> Any:
        made_up = [
            Contact(a.chance.randbytes(20), Address(f"10.9.{a.chance.randrange(256)}.{a.chance.randrange(1, 255)}", 1))
            for _ in range(20)
        ]
        return pack_nodes([pack_contact(one) for one in made_up])

    def ping_for_another(_body: Any, _heartbeat: Any, source: Any, message_id: bytes) -> None:
        responder._protocol.respond(message_id, source, PingResult(a.chance.random() < 0.5))

    protocol = _protocol(a)
    protocol._procedures[FindNode] = find_node
    protocol._procedures[PingRequest] = ping_for_another
    await asyncio.sleep(ATTACK_S)


@attack("says of every node's past that its last step and start were used")
async def _past(a: Attacker) -> None:
    """One of the others is started again meanwhile, and asks."""
    last = (1 << 48) - 1
    a.answers("past", lambda _message, _body: (moves.DeltaHistoryAnswer(last, last), []))
    await asyncio.sleep(5.0)
    await a.swarm.kill("n3")
    a.swarm.start("n3", bootstrap="n0", training__checkpoint_s=5.0)
    await asyncio.sleep(ATTACK_S)
