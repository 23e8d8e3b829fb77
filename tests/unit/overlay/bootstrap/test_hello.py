"""The first exchange: what a response to `hello` proves, and the reason of each rejection."""

from __future__ import annotations

import msgspec
import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.bootstrap.hello import (
    DuplicateIdentityFound,
    HelloAnswer,
    HelloContext,
    HelloRejected,
    HelloRequest,
    HelloResult,
    answer_hello,
    check_answer,
)
from p2pnode.overlay.identity import Identity, identity_from_seed
from p2pnode.overlay.kademlia.messages import PROTOCOL_VERSION
from p2pnode.overlay.local_node import LocalNode
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Request, RequestRejected
from tests.harness.environment.simulated import SeededEntropy

US, THEM = identity_from_seed(b"u" * 32), identity_from_seed(b"t" * 32)
HOME = Address("10.0.0.2", 8468)
GENESIS = b"genesis of tests"
NONCE = b"n" * 16
NEIGHBOUR = Contact(b"m" * 20, Address("10.0.0.3", 8468))


def context(boot_id: int = 1) -> HelloContext:
    return HelloContext(US, boot_id, "tests", SeededEntropy(1))


def response(identity: Identity = THEM, *, run: str = "tests", genesis: bytes = GENESIS, boot_id: int = 2) -> bytes:
    """What a node answers to a `hello` with `NONCE`."""
    local = LocalNode(identity.node_id, 1, boot_id, run, HOME)
    if genesis:
        local.enter(genesis)
    head = msgspec.msgpack.encode(HelloRequest(PROTOCOL_VERSION, "tests", US.node_id, NONCE))
    request = Request("hello", Address("10.0.0.1", 40_000), head, body=iter(()))  # type: ignore[arg-type]
    return answer_hello(request, identity=identity, local=local, closest=lambda _target: [NEIGHBOUR]).head


def check(head: bytes, *, genesis: bytes | None = GENESIS) -> HelloResult:
    return check_answer(head, HOME, NONCE, context=context(), genesis=genesis)


def test_a_node_of_our_swarm_gives_its_contacts() -> None:
    """The result has its contact, genesis, the host it saw, and the contacts it knows."""
    result = check(response(), genesis=None)

    assert result == HelloResult(Contact(THEM.node_id, HOME), GENESIS, "10.0.0.1", [NEIGHBOUR])


def test_contacts_are_only_for_nodes_of_the_same_run() -> None:
    """A node of another run learns no addresses."""
    answer = msgspec.msgpack.decode(response(run="other"), type=HelloAnswer)

    assert (answer.run, answer.nodes.v4) == ("other", b"")


@pytest.mark.parametrize(
    ("head", "reason", "final"),
    [
        (b"HTTP/1.1", "not as a p2pnode", True),
        (response(run="other"), "belongs to run 'other', this node to 'tests'", True),
        (response(genesis=b"another genesis!"), "belongs to another swarm", True),
        (response(genesis=b""), "has not joined a swarm yet", False),
        (response(US, boot_id=1), "is this node itself", True),
    ],
)
def test_each_wrong_address_has_its_own_reason(head: bytes, reason: str, final: bool) -> None:
    """Only a node that may still join is worth another try."""
    with pytest.raises(HelloRejected, match=reason) as caught:
        check(head)

    assert caught.value.final is final


def test_a_newer_protocol_is_named() -> None:
    """The version is checked before the signature, whose rules may differ."""
    answer = msgspec.msgpack.decode(response(), type=HelloAnswer)
    head = msgspec.msgpack.encode(msgspec.structs.replace(answer, version=PROTOCOL_VERSION + 1))

    with pytest.raises(HelloRejected, match=f"uses protocol version {PROTOCOL_VERSION + 1}"):
        check(head)


@pytest.mark.parametrize("changes", [{"node_id": b"x" * 20}, {"boot_id": 9}, {"genesis": b"another genesis!"}])
def test_a_changed_response_proves_nothing(changes: dict[str, object]) -> None:
    """The signature covers every field, and the id follows from the key."""
    answer = msgspec.msgpack.decode(response(), type=HelloAnswer)
    head = msgspec.msgpack.encode(msgspec.structs.replace(answer, **changes))

    with pytest.raises(HelloRejected, match="without proof"):
        check(head)


def test_a_response_to_another_nonce_proves_nothing() -> None:
    """A recorded response cannot be replayed."""
    with pytest.raises(HelloRejected, match="without proof"):
        check_answer(response(), HOME, b"another nonce", context=context(), genesis=None)


def test_our_own_key_in_another_process_is_found() -> None:
    """Same id and a valid signature, but another boot id."""
    with pytest.raises(DuplicateIdentityFound) as caught:
        check(response(US, boot_id=7))

    assert (caught.value.address, caught.value.boot_id) == (HOME, 7)


def test_junk_in_place_of_a_hello_is_rejected() -> None:
    """It gets a reason, and no signature."""
    request = Request("hello", HOME, b"junk", body=iter(()))  # type: ignore[arg-type]
    local = LocalNode(THEM.node_id, 1, 1, "tests", HOME)

    with pytest.raises(RequestRejected, match="not a hello"):
        answer_hello(request, identity=THEM, local=local, closest=lambda _target: [])
