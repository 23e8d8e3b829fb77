"""`hello`, the first exchange with a node: a request without an envelope that unauthenticated peers may send.

The response has protocol version, run, genesis and id of the responder, the source address it received from, and up to
20 contacts. So each kind of wrong address gets its own error message. The responder signs the nonce of the request,
which proves its id. If it proves this node's own id under another start, another process uses the same key
(`DuplicateIdentityFound`). A `hello` also serves as dial-back (`overlay.nat.reachability`): a node that answers it can
be reached at that address.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.environment import Entropy
from p2pnode.overlay.errors import OverlayError
from p2pnode.overlay.identity import Identity
from p2pnode.overlay.ids import node_id_of, short
from p2pnode.overlay.kademlia.messages import GENESIS_BYTES, PROTOCOL_VERSION, Nodes, pack_nodes, unpack_nodes
from p2pnode.overlay.local_node import LocalNode
from p2pnode.overlay.peers import Contact, Id
from p2pnode.overlay.transport import Request, RequestRejected, Response, Transport, TransportError

HELLO = "hello"
CONTEXT = b"p2pnode hello\0"
NONCE_BYTES = 16


class HelloRequest(msgspec.Struct, frozen=True, array_like=True):
    """The dialling node, and the nonce that the response must sign. Later versions may append fields."""

    version: int
    run: Annotated[str, Meta(max_length=64)]
    node_id: Id
    nonce: Annotated[bytes, Meta(max_length=64)] = b""


class HelloAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The responding node. `genesis` is empty before it has joined a swarm; `nodes` is empty for other runs.

    `signature`, by `public_key`, covers `CONTEXT`, the nonce, the id of the dialling node and this struct with an empty
    signature.
    """

    version: int
    run: Annotated[str, Meta(max_length=64)]
    genesis: Annotated[bytes, Meta(max_length=GENESIS_BYTES)]
    node_id: Id
    observed_host: Annotated[str, Meta(max_length=64)]
    nodes: Nodes
    incarnation: Annotated[int, Meta(ge=0)] = 0
    boot_id: Annotated[int, Meta(ge=0)] = 0
    public_key: Annotated[bytes, Meta(max_length=32)] = b""
    signature: Annotated[bytes, Meta(max_length=64)] = b""


@dataclass(frozen=True)
class HelloResult:
    """A node of this swarm that answered, and the contacts it gave."""

    contact: Contact
    genesis: bytes
    observed_host: str
    contacts: Sequence[Contact]


class HelloRejected(OverlayError):
    """This node cannot join through that address. `final`: waiting does not change that."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.final = final


class DuplicateIdentityFound(HelloRejected):
    """Another process answered and proved that it holds this node's key."""

    def __init__(self, address: Address, incarnation: int, boot_id: int) -> None:
        super().__init__("runs with this node's own identity", final=True)
        self.address = address
        self.incarnation = incarnation
        self.boot_id = boot_id


class OwnAddress(HelloRejected):
    """This very node answered: the address is its own."""

    def __init__(self) -> None:
        super().__init__("is this node itself", final=True)


_ENCODER = msgspec.msgpack.Encoder()
_ANSWER = msgspec.msgpack.Decoder(HelloAnswer)
_REQUEST = msgspec.msgpack.Decoder(HelloRequest)


@dataclass(frozen=True)
class HelloContext:
    """What every `hello` of this node uses: its identity, start and run; `entropy` gives the nonces."""

    identity: Identity
    boot_id: int
    run: str
    entropy: Entropy


def answer_hello(
    incoming: Request,
    *,
    identity: Identity,
    local: LocalNode,
    closest: Callable[[bytes], list[Contact]],
) -> Response:
    """The response to a `hello`; contacts (`closest`) only for nodes of the same run. Raises
    `RequestRejected`."""
    try:
        request = _REQUEST.decode(incoming.head)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise RequestRejected("this is not a hello; does the sender run another version of p2pnode?") from None
    answer = HelloAnswer(
        PROTOCOL_VERSION,
        local.run,
        local.genesis or b"",
        identity.node_id,
        incoming.source.host,
        pack_nodes(closest(request.node_id) if request.run == local.run else []),
        local.heartbeat.incarnation,
        local.heartbeat.boot_id,
        identity.public_key,
    )
    local.has_admitted = local.has_admitted or (local.genesis is not None and request.run == local.run)
    signature = identity.sign(_statement(request.nonce, request.node_id, answer))
    return Response(_ENCODER.encode(msgspec.structs.replace(answer, signature=signature)))


def _statement(nonce: bytes, asking_id: bytes, unsigned: HelloAnswer) -> bytes:
    return CONTEXT + len(nonce).to_bytes(1, "big") + nonce + asking_id + _ENCODER.encode(unsigned)


def check_answer(
    head: bytes, address: Address, nonce: bytes, *, context: HelloContext, genesis: bytes | None
) -> HelloResult:
    """Check a response to this node's `hello`; `genesis` is None before it has entered a swarm. Raises
    `HelloRejected`."""
    try:
        answer = _ANSWER.decode(head)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise HelloRejected("answers, but not as a p2pnode", final=True) from None
    if answer.version != PROTOCOL_VERSION:
        raise HelloRejected(f"uses protocol version {answer.version}, this node uses {PROTOCOL_VERSION}", final=True)
    own_id, run = context.identity.node_id, context.run
    if answer.node_id == own_id and answer.boot_id == context.boot_id:
        raise OwnAddress
    unsigned = msgspec.structs.replace(answer, signature=b"")
    if node_id_of(answer.public_key) != answer.node_id or not context.identity.verifies(
        answer.public_key, _statement(nonce, own_id, unsigned), answer.signature
    ):
        raise HelloRejected(f"claims to be {short(answer.node_id)} without proof", final=True)
    if answer.node_id == own_id:
        raise DuplicateIdentityFound(address, answer.incarnation, answer.boot_id)
    if answer.run != run:
        raise HelloRejected(f"belongs to run {answer.run!r}, this node to {run!r}", final=True)
    if len(answer.genesis) != GENESIS_BYTES:
        raise HelloRejected(f"is {short(answer.node_id)}, which has not joined a swarm yet", final=False)
    if genesis is not None and answer.genesis != genesis:
        raise HelloRejected(
            f"belongs to another swarm named {run!r} (genesis {answer.genesis.hex()[:8]}, here {genesis.hex()[:8]})",
            final=True,
        )
    contacts, _ = unpack_nodes(answer.nodes, own_id)
    return HelloResult(Contact(answer.node_id, address), answer.genesis, answer.observed_host, contacts)


async def say_hello(
    transport: Transport, address: Address, *, context: HelloContext, genesis: bytes | None, timeout_s: float
) -> HelloResult:
    """Send a `hello` to one address. Raises `HelloRejected` with the reason for every kind of failure."""
    nonce = context.entropy.token(NONCE_BYTES)
    head = _ENCODER.encode(HelloRequest(PROTOCOL_VERSION, context.run, context.identity.node_id, nonce))
    try:
        # A thousand nodes may join through one: it does not keep a stream to each of them.
        async with transport.request(address, HELLO, head, timeout_s=timeout_s, keep=False) as answer:
            received, proven = answer.head, answer.node_id
    except TransportError as error:
        raise HelloRejected(error.detail, final=error.kind == "foreign") from error
    result = check_answer(received, address, nonce, context=context, genesis=genesis)
    if proven and proven != result.contact.node_id:
        raise HelloRejected(f"is {short(proven)}, but answers as {short(result.contact.node_id)}", final=False)
    return result
