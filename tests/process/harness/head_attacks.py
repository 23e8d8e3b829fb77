"""Attacks that take processor time or the line, and so show with real daemons only: large heads, and many requests.

They send more than a member's quota as fast as the others answer. Each head is encoded before the attack begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec

from overlay.transport import TransportError
from tests.harness.attacks.attacker import Attack, Attacker, contact_of
from training.exchange import messages, ownership_messages
from training.exchange.messages import encode
from training.exchange.terms import Term

#: Rows of identities, with one span of steps each; a node id has 20 bytes. As many as fit a head.
STATE_ROWS, SEEK_ROWS = 61_000, 30_000
STATES = 2


def _rows(a: Attacker, count: int) -> list[tuple[bytes, int, list[tuple[int, int]]]]:
    return [(a.chance.randbytes(20), 1, [(1, 2)]) for _ in range(count)]


def _state(a: Attacker) -> msgspec.Struct:
    """Heads of states, nearly as large as a head may be."""
    term = Term(1 << 33, a.me.node_id)
    pending = [(a.chance.randbytes(20), 1, step, 1.0, False) for step in range(STATE_ROWS)]
    heads = [
        ownership_messages.StateHead(shard, *term, 5, 0.0, 0, 0, False, _rows(a, STATE_ROWS), pending)
        for shard in range(STATES)
    ]
    return ownership_messages.StateTransfer(a.genesis, heads)


def _seek(a: Attacker) -> msgspec.Struct:
    """A question about deltas: 1 MB."""
    return ownership_messages.FindDeltas(a.genesis, 0, _rows(a, SEEK_ROWS))


def _small(a: Attacker) -> msgspec.Struct:
    return messages.LocateOwners(a.genesis, [], [])


async def _send(a: Attacker, name: str, make: Callable[[Attacker], msgspec.Struct], at_once: int) -> None:
    """So many requests to each other node are under way at any moment."""
    head = await asyncio.to_thread(lambda: encode(make(a)))
    print(f"a head of {name}: {len(head) / 1e6:.2f} MB", flush=True)

    async def go_on(place: int) -> None:
        while True:
            to = a.honest[place % len(a.honest)]
            try:
                request = a.host.living.overlay.request(contact_of(to), name, head, [], timeout_s=20.0)
                async with request:
                    pass
            except TransportError:
                await asyncio.sleep(0.01)

    await asyncio.gather(*(go_on(place) for place in range(at_once * len(a.honest))))


HEAD_ATTACKS: dict[str, Attack] = {
    "sends heads of states of 8 MB, two at a time": partial(_send, name="state", make=_state, at_once=2),
    "sends questions about deltas of 1 MB, twenty at a time": partial(_send, name="seek", make=_seek, at_once=20),
    "sends small requests, a hundred at a time": partial(_send, name="where_is", make=_small, at_once=100),
}
