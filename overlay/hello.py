"""The first contact: `hello`, a request without an envelope that anybody may send.

It tells both sides who the other is (protocol version, run, genesis, id), what address the answerer saw, and up to 20
contacts, so that every way of dialling the wrong place has its own clear sentence. Also the other half of the
eligibility check: opening a `hello` to an address proves that its node can be reached there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from overlay.ids import short
from overlay.peers import Contact, Id
from overlay.transport import Address, Incoming, Rejection, Reply, Transport, TransportError
from overlay.wire import GENESIS_BYTES, PROTOCOL_VERSION, Nodes, pack_nodes, unpack_nodes

HELLO = "hello"


class HelloRequest(msgspec.Struct, frozen=True, array_like=True):
    """Who dials. Later versions may append fields."""

    version: int
    run: Annotated[str, Meta(max_length=64)]
    node_id: Id


class HelloAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Who answers. `genesis` is empty while it has not joined a swarm itself; `nodes` only for its own run."""

    version: int
    run: Annotated[str, Meta(max_length=64)]
    genesis: Annotated[bytes, Meta(max_length=GENESIS_BYTES)]
    node_id: Id
    observed_host: Annotated[str, Meta(max_length=64)]
    nodes: Nodes


@dataclass(frozen=True)
class Greeted:
    """A node of our swarm that answered, and whom it knows."""

    contact: Contact
    genesis: bytes
    observed_host: str
    contacts: Sequence[Contact]


class Unsuitable(Exception):
    """It answered or not, and cannot be joined through. `final`: it will not change by waiting."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.final = final


_ENCODER = msgspec.msgpack.Encoder()
_ANSWER = msgspec.msgpack.Decoder(HelloAnswer)
_REQUEST = msgspec.msgpack.Decoder(HelloRequest)


def encode_request(run: str, node_id: bytes) -> bytes:
    return _ENCODER.encode(HelloRequest(PROTOCOL_VERSION, run, node_id))


def answer_hello(
    incoming: Incoming,
    *,
    run: str,
    genesis: bytes | None,
    own_id: bytes,
    closest: Callable[[bytes], list[bytes]],
) -> Reply:
    """Who we are, for anybody; whom we know (`closest`, packed), for nodes of our run. Raises `Rejection`."""
    try:
        request = _REQUEST.decode(incoming.head)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise Rejection("this is no hello; is it another version of p2pnode?") from None
    known = closest(request.node_id) if request.run == run else []
    nodes = pack_nodes(known)
    answer = HelloAnswer(PROTOCOL_VERSION, run, genesis or b"", own_id, incoming.source.host, nodes)
    return Reply(_ENCODER.encode(answer))


def judge_answer(head: bytes, address: Address, *, run: str, own_id: bytes, genesis: bytes | None) -> Greeted:
    """What an answer means for a node of `run` (and of `genesis`, where it knows). Raises `Unsuitable`."""
    try:
        answer = _ANSWER.decode(head)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise Unsuitable("answers, but not as a p2pnode", final=True) from None
    if answer.version != PROTOCOL_VERSION:
        raise Unsuitable(f"speaks protocol {answer.version}, this node speaks {PROTOCOL_VERSION}", final=True)
    if answer.node_id == own_id:
        raise Unsuitable("is this node itself", final=True)
    if answer.run != run:
        raise Unsuitable(f"belongs to run {answer.run!r}, this node to {run!r}", final=True)
    if len(answer.genesis) != GENESIS_BYTES:
        raise Unsuitable(f"is {short(answer.node_id)}, which has not joined a swarm yet itself", final=False)
    if genesis is not None and answer.genesis != genesis:
        raise Unsuitable(
            f"belongs to another swarm named {run!r} (genesis {answer.genesis.hex()[:8]}, ours {genesis.hex()[:8]})",
            final=True,
        )
    contacts, _ = unpack_nodes(answer.nodes, own_id)
    return Greeted(Contact(answer.node_id, address), answer.genesis, answer.observed_host, contacts)


async def say_hello(
    transport: Transport, address: Address, *, run: str, own_id: bytes, genesis: bytes | None, timeout_s: float
) -> Greeted:
    """Dial one address. Raises `Unsuitable` with the reason, whatever happens on the way."""
    head = encode_request(run, own_id)
    try:
        async with transport.request(address, HELLO, head, timeout_s=timeout_s) as answer:
            received, proven = answer.head, answer.node_id
    except TransportError as error:
        raise Unsuitable(error.detail, final=error.kind == "foreign") from error
    greeted = judge_answer(received, address, run=run, own_id=own_id, genesis=genesis)
    if proven and proven != greeted.contact.node_id:
        raise Unsuitable(f"is {short(proven)} and speaks as {short(greeted.contact.node_id)}", final=False)
    return greeted
