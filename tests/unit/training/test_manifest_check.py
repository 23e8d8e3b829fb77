"""Comparing manifests between a joiner and a peer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.requests import Handler
from p2pnode.overlay.transport import MAX_HEAD_BYTES, Body, Buffer, ReceivedResponse, Response, TransportError
from p2pnode.training.layout import Layout, LayoutEntry
from p2pnode.training.manifest import (
    PROTOCOL,
    Manifest,
    ManifestRefused,
    Mismatch,
    answer_joiners,
    compare_with,
    explain,
)
from p2pnode.training.shards.outer_rule import Rule
from tests.harness.trainers.stub_trainer import plain_layout

PEER = Contact(b"p" * 20, Address("10.0.0.1", 8468))
SWARMS = Manifest(
    protocol=PROTOCOL,
    run="run",
    genesis="ab" * 16,
    task="stub",
    task_version="1",
    layout=plain_layout(8),
    frozen_digest="",
    shards=4,
    rule=Rule(0.7, 0.5, ""),
    weight="population",
    replicas=1,
    local_steps=10,
    barrier_family="relaxed",
    max_steps=0,
    until="",
)
OTHER = msgspec.structs.replace(SWARMS, local_steps=20)


async def body_of(message: bytes) -> AsyncIterator[Buffer]:
    yield message


class OnePeer:
    """A swarm of one peer, whose handler answers every request."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}

    def register(self, name: str, handler: Handler, *, waits: bool = False) -> None:
        self.handlers[name] = handler

    @asynccontextmanager
    async def request(
        self, to: Contact, name: str, payload: bytes, body: Body = (), *, timeout_s: float
    ) -> AsyncIterator[ReceivedResponse]:
        response = await self.handlers[name](to, payload, body_of(b""))
        yield ReceivedResponse(response.head, body_of(b"".join(cast(Any, response.body))))


def swarm_with(answer: bytes | None = None) -> Any:
    """A peer that answers with these bytes, or by the code of this version."""
    swarm = OnePeer()
    if answer is None:
        answer_joiners(cast(Any, swarm), SWARMS)
    else:

        async def handler(_sender: Contact, _payload: bytes, _stream: AsyncIterator[Buffer]) -> Response:
            return Response(b"", [answer])

        swarm.register("manifest", handler)
    return swarm


def test_equal_manifests_agree() -> None:
    """The joiner goes on with the manifest that both have."""
    assert asyncio.run(compare_with(swarm_with(), PEER, SWARMS)) == SWARMS


def test_a_model_of_many_tensors_is_compared_too() -> None:
    """Its names and shapes are longer than a head."""
    names = [f"model.layers.{number // 500}.experts.{number % 500}.down_proj.weight" for number in range(20_000)]
    layout = Layout(
        tuple(LayoutEntry(name, (4, 4), "float32", "parameter", 16 * place, 16) for place, name in enumerate(names))
    )
    large, swarm = msgspec.structs.replace(SWARMS, layout=layout), OnePeer()
    answer_joiners(cast(Any, swarm), large)
    assert len(msgspec.msgpack.encode(large)) > MAX_HEAD_BYTES
    assert asyncio.run(compare_with(cast(Any, swarm), PEER, large)) == large


def test_a_mismatch_is_refused_with_both_values() -> None:
    """The text names the field, the joiner's value as "mine" and the swarm's as "theirs"."""
    with pytest.raises(ManifestRefused, match="local_steps: mine 20, theirs 10"):
        asyncio.run(compare_with(swarm_with(), PEER, OTHER))


@pytest.mark.parametrize("head", [b"", b"\x80", b"\xc1", msgspec.msgpack.encode({"protocol": "three"})])
def test_a_malformed_answer_is_a_failure_of_the_peer(head: bytes) -> None:
    """It raises `TransportError` of kind `foreign`, never a refusal."""
    with pytest.raises(TransportError) as caught:
        asyncio.run(compare_with(swarm_with(head), PEER, SWARMS))
    assert caught.value.kind == "foreign"


def test_a_joiner_without_a_number_of_shards_has_that_of_the_swarm() -> None:
    """Its proposal has the number that its model asks for; the manifest that both agree on has the swarm's."""
    proposal = msgspec.structs.replace(SWARMS, shards=64)

    assert asyncio.run(compare_with(swarm_with(), PEER, proposal, adopts_shards=True)) == SWARMS


def test_a_given_number_of_shards_must_be_that_of_the_swarm() -> None:
    """The refusal names the field, so that the hint can say how the swarm's is taken over."""
    with pytest.raises(ManifestRefused, match="shards: mine 64, theirs 4") as caught:
        asyncio.run(compare_with(swarm_with(), PEER, msgspec.structs.replace(SWARMS, shards=64)))

    assert caught.value.fields == ["shards"]


def test_taking_over_the_shards_excuses_no_other_difference() -> None:
    """What else differs is refused and named."""
    other = msgspec.structs.replace(OTHER, shards=64)

    with pytest.raises(ManifestRefused, match="local_steps") as caught:
        asyncio.run(compare_with(swarm_with(), PEER, other, adopts_shards=True))
    assert caught.value.fields == ["local_steps"]


@pytest.mark.parametrize("shards", [-1, 0, 4097, 10**12])
def test_no_node_takes_over_an_impossible_number_of_shards(shards: int) -> None:
    """It is a failure of the peer, not of the swarm."""
    impossible = msgspec.structs.replace(SWARMS, shards=shards)

    swarm = swarm_with(msgspec.msgpack.encode(impossible))

    with pytest.raises(TransportError, match=f"{shards} shards") as caught:
        asyncio.run(compare_with(swarm, PEER, SWARMS, adopts_shards=True))
    assert caught.value.kind == "foreign"


def test_the_mismatches_of_a_peer_are_cut_and_printable() -> None:
    """A peer's text cannot fill the log or reach the terminal as control characters."""
    text = explain([Mismatch("colour\x1b[31m", "a" * 10_000, "b")] * 100, peer="12345678")

    assert len(text) < 15_000
    assert text.isprintable()
    assert "colour?[31m: mine aaa" in text
