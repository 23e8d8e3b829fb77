"""Encodes and decodes datagrams; no other module does.

Kademlia's framing is kept. Byte 0 is 0 for a request and 1 for a response; bytes 1-20 are the message id. One
MessagePack array follows: `[swarm tag, heartbeat, body, gossip]`. A request whose response must prove the id has a
fifth element, true; the fifth element of that response is the proof (`overlay.kademlia.protocol`). Bodies are
tagged arrays, so the typed decoder is the table of remote procedures. A body that is not listed here does not decode,
and the types bound nesting and sizes.

Contacts are packed: id, 4 or 16 bytes of address, 2 bytes of port; 20 of them need 520 bytes. `socket` only converts
addresses here.
"""

from __future__ import annotations

import hashlib
import math
import socket
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import islice
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pnode.overlay.addresses import Address, usable_host
from p2pnode.overlay.errors import OverlayError
from p2pnode.overlay.ids import ID_BYTES
from p2pnode.overlay.peers import Contact, Counter, Heartbeat, Id
from p2pnode.overlay.transport import MAX_DATAGRAM_BYTES

PROTOCOL_VERSION = 7
REQUEST, RESPONSE = 0, 1
MESSAGE_ID_BYTES = 20
HEADER_BYTES = 1 + MESSAGE_ID_BYTES
TAG_BYTES = 8
GENESIS_BYTES = 16
#: An Ed25519 public key and a signature.
PROOF_BYTES = 32 + 64
PACKED_V4_BYTES = ID_BYTES + 4 + 2
PACKED_V6_BYTES = ID_BYTES + 16 + 2
#: Contacts read from one response.
MAX_CONTACTS = 64
#: Contacts whose packed and unpacked forms are kept: responses name the same ones again and again.
CACHED_CONTACTS = 1024
#: Updates in one datagram: with the largest heartbeat and contacts it still fits.
MAX_GOSSIP = 8
#: Packed contacts in one response: a datagram less the header, the largest heartbeat, `MAX_GOSSIP` and a proof.
MAX_CONTACT_BYTES = MAX_DATAGRAM_BYTES - HEADER_BYTES - 150 - MAX_GOSSIP * 42 - PROOF_BYTES - 2

_KINDS = (b"\x00", b"\x01")
_ENCODER = msgspec.msgpack.Encoder()
_NO_NEWS = b"\x90"
_ARRAY_OF_FOUR, _ARRAY_OF_FIVE = b"\x94", b"\x95"


class MemberState(IntEnum):
    """The state of a node (SWIM)."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3


class Gossip(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One update about a node: it is suspected, dead, has left, or answers again."""

    kind: Annotated[int, Meta(ge=0, le=3)]
    node_id: Id
    incarnation: Counter


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of the bodies of datagrams."""


class Ping(_Body, frozen=True, tag="ping"):
    """Asks whether the receiver is alive. Answered by `Pong`."""


class FindNode(_Body, frozen=True, tag="find_node"):
    """Asks for the contacts closest to `target`. Answered by `Nodes`."""

    target: Id


class PingRequest(_Body, frozen=True, tag="probe"):
    """Asks the receiver to ping a node (SWIM's ping-req). Answered by `PingResult`: at once if the receiver has just
    heard that node, otherwise once the ping has ended."""

    contact: Annotated[bytes, Meta(min_length=PACKED_V4_BYTES, max_length=PACKED_V6_BYTES)]


class GossipOnly(_Body, frozen=True, tag="news"):
    """Carries gossip and nothing else. Not answered."""


class StreamsFailing(_Body, frozen=True, tag="unreached"):
    """Reports that the receiver answers datagrams, but streams to it fail. Not answered."""


class DuplicateIdentity(_Body, frozen=True, tag="twin"):
    """Reports that another process uses the receiver's identity, at this address, with this `boot_id`. Not answered."""

    boot_id: Annotated[int, Meta(ge=0)]
    contact: Annotated[bytes, Meta(min_length=PACKED_V4_BYTES, max_length=PACKED_V6_BYTES)]


class Pong(_Body, frozen=True, tag="pong"):
    """The responder is alive."""


class Nodes(_Body, frozen=True, tag="nodes"):
    """Packed contacts by address family."""

    v4: Annotated[bytes, Meta(max_length=MAX_CONTACTS * PACKED_V4_BYTES)]
    v6: Annotated[bytes, Meta(max_length=MAX_CONTACTS * PACKED_V6_BYTES)]


class PingResult(_Body, frozen=True, tag="probed"):
    """Whether the node answered the ping, and its heartbeat as the responder has it then."""

    answered: bool
    heartbeat: Heartbeat | None = None


Call = Ping | FindNode | PingRequest | GossipOnly | StreamsFailing | DuplicateIdentity
Result = Pong | Nodes | PingResult
Tag = Annotated[bytes, Meta(min_length=TAG_BYTES, max_length=TAG_BYTES)]
GossipList = Annotated[list[Gossip], Meta(max_length=MAX_GOSSIP)]


class RequestDatagram(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    tag: Tag
    heartbeat: Heartbeat
    body: Call
    news: GossipList
    prove: bool = False


class ResponseDatagram(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    tag: Tag
    heartbeat: Heartbeat
    body: Result
    news: GossipList
    proof: Annotated[bytes, Meta(max_length=PROOF_BYTES)] = b""


_DECODERS = (msgspec.msgpack.Decoder(RequestDatagram), msgspec.msgpack.Decoder(ResponseDatagram))


class Malformed(OverlayError):
    """These bytes are no datagram of this protocol; the text is a short constant, used in a counter's name."""


def swarm_tag(run: str, genesis: bytes) -> bytes:
    """Eight bytes that distinguish swarms: the start of SHA-256(run, genesis)."""
    return hashlib.sha256(b"p2pnode swarm\0" + run.encode() + b"\0" + genesis).digest()[:TAG_BYTES]


def encode_head(tag: bytes, heartbeat: Heartbeat) -> bytes:
    """The part that all datagrams share until this node's heartbeat changes: encoded once, used for many."""
    return _ENCODER.encode(tag) + _ENCODER.encode(heartbeat)


def encode(
    kind: int,
    message_id: bytes,
    head: bytes,
    body: Call | Result,
    news: Sequence[Gossip] = (),
    extra: bool | bytes = b"",
) -> bytes:
    """At most `MAX_DATAGRAM_BYTES`, given at most `MAX_GOSSIP` updates and `MAX_CONTACT_BYTES` of contacts.

    `extra`: True in a request whose response must prove the id; in that response, the proof.
    """
    tail = _ENCODER.encode(news) if news else _NO_NEWS
    if extra:
        return _KINDS[kind] + message_id + _ARRAY_OF_FIVE + head + _ENCODER.encode(body) + tail + _ENCODER.encode(extra)
    return _KINDS[kind] + message_id + _ARRAY_OF_FOUR + head + _ENCODER.encode(body) + tail


def decode(datagram: bytes) -> tuple[bytes, RequestDatagram | ResponseDatagram]:
    """Message id and message. Raises `Malformed`, and nothing else, for any bytes."""
    size = len(datagram)
    if size <= HEADER_BYTES:
        raise Malformed("short")
    if size > MAX_DATAGRAM_BYTES:
        raise Malformed("long")
    kind = datagram[0]
    if kind > RESPONSE:
        raise Malformed("kind")
    try:
        message: RequestDatagram | ResponseDatagram = _DECODERS[kind].decode(datagram[HEADER_BYTES:])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise Malformed("content") from None
    if message.heartbeat.host and usable_host(message.heartbeat.host) is None:
        raise Malformed("host")
    return datagram[1:HEADER_BYTES], message


@lru_cache(maxsize=CACHED_CONTACTS)
def pack_contact(contact: Contact) -> bytes:
    """26 bytes for IPv4, 38 for IPv6."""
    host, port = contact.address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return contact.node_id + socket.inet_pton(family, host) + port.to_bytes(2, "big")


@lru_cache(maxsize=CACHED_CONTACTS)
def unpack_contact(packed: bytes) -> Contact | None:
    """The contact, or None when its address cannot be sent to."""
    if len(packed) not in (PACKED_V4_BYTES, PACKED_V6_BYTES):
        return None
    family = socket.AF_INET if len(packed) == PACKED_V4_BYTES else socket.AF_INET6
    host = usable_host(socket.inet_ntop(family, packed[ID_BYTES:-2]))
    port = int.from_bytes(packed[-2:], "big")
    if host is None or port == 0:
        return None
    return Contact(packed[:ID_BYTES], Address(host, port))


def pack_nodes(contacts: Iterable[Contact]) -> Nodes:
    """As many contacts, in the order given, as fit one datagram."""
    v4: list[bytes] = []
    v6: list[bytes] = []
    left = MAX_CONTACT_BYTES
    for packed in map(pack_contact, contacts):
        left -= len(packed)
        if left < 0:
            break
        (v4 if len(packed) == PACKED_V4_BYTES else v6).append(packed)
    return Nodes(b"".join(v4), b"".join(v6))


def unpack_nodes(nodes: Nodes, own_id: bytes, *, ipv6: bool = True) -> tuple[list[Contact], int]:
    """The usable contacts of an answer, and how many of its entries were malformed.

    No other function accepts addresses that others report. Usable are literal unicast addresses with a port, of a
    family that this node can send to, except its own.
    """
    contacts: list[Contact] = []
    malformed = 0
    for blob, width in ((nodes.v4, PACKED_V4_BYTES), (nodes.v6, PACKED_V6_BYTES)):
        if not blob:
            continue
        count, rest = divmod(len(blob), width)
        ends = width * min(count, MAX_CONTACTS)
        entries = [unpack_contact(blob[at : at + width]) for at in range(0, ends, width)]
        usable = [contact for contact in entries if contact is not None]
        malformed += (rest != 0) + len(entries) - len(usable)
        if own_id in blob:
            usable = [contact for contact in usable if contact.node_id != own_id]
        if not ipv6 and width == PACKED_V6_BYTES:  # a mapped address is IPv4 by now
            usable = [contact for contact in usable if ":" not in contact.address.host]
        contacts += usable
    return contacts, malformed


RETRANSMIT = 4
#: Updates per datagram; four cost about 120 bytes.
GOSSIP_PER_DATAGRAM = 4
#: Beyond this the oldest is dropped: in a mass failure probes find the dead without gossip.
MAX_QUEUED = 512


class BroadcastQueue:
    """The updates that this node still has to send."""

    def __init__(self) -> None:
        self._left: dict[bytes, tuple[int, Gossip]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def put(self, news: Gossip, members: int) -> None:
        """Queue an update; it replaces what was queued about the same node."""
        times = RETRANSMIT * max(1, math.ceil(math.log10(members + 1)))
        self._left.pop(news.node_id, None)
        self._left[news.node_id] = (times, news)
        if len(self._left) > MAX_QUEUED:
            del self._left[next(iter(self._left))]

    def take(self) -> list[Gossip]:
        """The updates for the next datagram; each moves to the end of the queue, or out of it."""
        if not self._left:
            return []
        taken: list[Gossip] = []
        for node_id in list(islice(self._left, GOSSIP_PER_DATAGRAM)):
            times, news = self._left.pop(node_id)
            taken.append(news)
            if times > 1:
                self._left[node_id] = (times - 1, news)
        return taken
