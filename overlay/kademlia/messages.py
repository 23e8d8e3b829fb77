"""Datagrams: the one place where their bytes are made and read.

Kademlia's framing is kept: byte 0 is 0 for a request and 1 for a response, bytes 1-20 are the message id, then one
MessagePack array `[swarm tag, heartbeat, body, news]` with a fifth element where a node is to prove its id: true in
such a request, the proof in its response (`overlay.kademlia.identity_proofs`). Bodies are tagged arrays, so the typed
decoder *is* the explicit table of remote procedures: what is not listed here does not decode, and nesting and sizes are
bounded by the types. `encode` and `decode` are where sealing will stand.

Contacts travel packed: id, 4 or 16 bytes of address, 2 bytes of port; 20 of them need 520 bytes.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Annotated

import msgspec
from msgspec import Meta

from overlay.addresses import Address, usable_host
from overlay.errors import OverlayError
from overlay.ids import ID_BYTES
from overlay.peers import Contact, Counter, Heartbeat, Id
from overlay.transport import MAX_DATAGRAM_BYTES

PROTOCOL_VERSION = 3
REQUEST, RESPONSE = 0, 1
MESSAGE_ID_BYTES = 20
HEADER_BYTES = 1 + MESSAGE_ID_BYTES
TAG_BYTES = 8
GENESIS_BYTES = 16
#: An Ed25519 public key and a signature.
PROOF_BYTES = 32 + 64
PACKED_V4_BYTES = ID_BYTES + 4 + 2
PACKED_V6_BYTES = ID_BYTES + 16 + 2
#: Most contacts read from one answer (reference/kademlia.md section 4 f).
MAX_CONTACTS = 64
#: Most news in one datagram: with the largest heartbeat and contacts it still fits.
MAX_GOSSIP = 8
#: Packed contacts in one answer: what is left of a datagram after the header, the largest heartbeat, `MAX_GOSSIP`, a
#: proof.
MAX_CONTACT_BYTES = MAX_DATAGRAM_BYTES - HEADER_BYTES - 150 - MAX_GOSSIP * 42 - PROOF_BYTES - 2

_KINDS = (b"\x00", b"\x01")
_ENCODER = msgspec.msgpack.Encoder()
_NO_NEWS = b"\x90"
_ARRAY_OF_FOUR, _ARRAY_OF_FIVE = b"\x94", b"\x95"


class MemberState(IntEnum):
    """What is said about a node; at equal incarnation and refutation the larger one wins (SWIM)."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3


class Gossip(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One piece of gossip. `refutation` counts how often this incarnation had to say that it lives."""

    kind: Annotated[int, Meta(ge=0, le=3)]
    node_id: Id
    incarnation: Counter
    refutation: Counter


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of what a datagram may ask or answer."""


class Ping(_Body, frozen=True, tag="ping"):
    """Are you there? Answered by `Pong`."""


class FindNode(_Body, frozen=True, tag="find_node"):
    """Your contacts closest to `target`. Answered by `Nodes`."""

    target: Id


class PingRequest(_Body, frozen=True, tag="probe"):
    """Ping this node for me (SWIM's indirect probe). Answered by `PingResult` when its answer or the time-out is in."""

    contact: Annotated[bytes, Meta(min_length=PACKED_V4_BYTES, max_length=PACKED_V6_BYTES)]


class GossipOnly(_Body, frozen=True, tag="news"):
    """Nothing but the news every datagram carries. Not answered."""


class StreamsFailing(_Body, frozen=True, tag="unreached"):
    """You answer datagrams, but my streams to you fail: check whether you can be reached. Not answered."""


class DuplicateIdentity(_Body, frozen=True, tag="twin"):
    """Another process speaks with your identity, at this address, under this boot id: ask it. Not answered."""

    boot_id: Annotated[int, Meta(ge=0)]
    contact: Annotated[bytes, Meta(min_length=PACKED_V4_BYTES, max_length=PACKED_V6_BYTES)]


class Pong(_Body, frozen=True, tag="pong"):
    """I am here."""


class Nodes(_Body, frozen=True, tag="nodes"):
    """Packed contacts by address family."""

    v4: Annotated[bytes, Meta(max_length=MAX_CONTACTS * PACKED_V4_BYTES)]
    v6: Annotated[bytes, Meta(max_length=MAX_CONTACTS * PACKED_V6_BYTES)]


class PingResult(_Body, frozen=True, tag="probed"):
    """Whether the node answered me."""

    answered: bool


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
    """Bytes that are no datagram of ours; its text is a short constant, fit for a counter's name."""


def swarm_tag(run: str, genesis: bytes) -> bytes:
    """Eight bytes that tell swarms apart: the start of SHA-256(run, genesis)."""
    return hashlib.sha256(b"p2pnode swarm\0" + run.encode() + b"\0" + genesis).digest()[:TAG_BYTES]


def encode_head(tag: bytes, heartbeat: Heartbeat) -> bytes:
    """The part of every datagram that changes only with the own heartbeat; encoded once, used for many."""
    return _ENCODER.encode(tag) + _ENCODER.encode(heartbeat)


def encode(
    kind: int,
    message_id: bytes,
    head: bytes,
    body: Call | Result,
    news: Sequence[Gossip] = (),
    extra: bool | bytes = b"",
) -> bytes:
    """A datagram of at most `MAX_DATAGRAM_BYTES`, given at most `MAX_GOSSIP` news and `MAX_CONTACT_BYTES` of contacts.

    `extra`: True in a request whose answer should prove who answers, and that proof.
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


@lru_cache(maxsize=16384)
def pack_contact(contact: Contact) -> bytes:
    """26 bytes for IPv4, 38 for IPv6."""
    host, port = contact.address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return contact.node_id + socket.inet_pton(family, host) + port.to_bytes(2, "big")


@lru_cache(maxsize=16384)
def unpack_contact(packed: bytes) -> Contact | None:
    """The contact, or None when its address could never be sent to."""
    family = socket.AF_INET if len(packed) == PACKED_V4_BYTES else socket.AF_INET6
    if len(packed) not in (PACKED_V4_BYTES, PACKED_V6_BYTES):
        return None
    host = usable_host(socket.inet_ntop(family, packed[ID_BYTES:-2]))
    port = int.from_bytes(packed[-2:], "big")
    if host is None or port == 0:
        return None
    return Contact(packed[:ID_BYTES], Address(host, port))


def pack_nodes(packed_contacts: Iterable[bytes]) -> Nodes:
    """As many packed contacts, in the order given, as fit one datagram."""
    entries = list(packed_contacts)
    packed = b"".join(entries)
    if len(packed) == PACKED_V4_BYTES * len(entries) <= MAX_CONTACT_BYTES:  # nearly always: all IPv4, and there is room
        return Nodes(packed, b"")
    v4: list[bytes] = []
    v6: list[bytes] = []
    left = MAX_CONTACT_BYTES
    for entry in entries:
        left -= len(entry)
        if left < 0:
            break
        (v4 if len(entry) == PACKED_V4_BYTES else v6).append(entry)
    return Nodes(b"".join(v4), b"".join(v6))


def unpack_nodes(nodes: Nodes, own_id: bytes, *, ipv6: bool = True) -> tuple[list[Contact], int]:
    """The usable contacts of an answer, and how many of its entries were malformed.

    The only way by which an address heard from others enters this program: never ourselves, always a literal unicast
    address of a family we can send to, with a port.
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
