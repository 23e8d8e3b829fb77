"""The envelope around the payload of a request or response, and what a peer announced in its last one.

The envelope carries the swarm's tag, the sender's heartbeat and the id of the node that should answer. Most requests of
a peer announce the same as the one before. `HeardPeer` keeps that, so that it is compared and not processed again.
"""

from __future__ import annotations

from typing import Annotated
from weakref import ReferenceType

import msgspec
from msgspec import Meta

from p2pnode.overlay.addresses import Address, id_behind, usable_host
from p2pnode.overlay.ids import ID_BYTES
from p2pnode.overlay.kademlia.messages import TAG_BYTES
from p2pnode.overlay.local_node import LocalNode
from p2pnode.overlay.peers import Contact, Heartbeat
from p2pnode.overlay.transport import RequestStream

#: A longer version is no envelope; a later version of p2pnode may have one longer than those shown today.
MAX_VERSION_CHARACTERS = 64


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """Head of every request and response but `hello`. `to` is the expected node id; empty in responses.

    `capacity` is the sender's capacity class (`overlay.capacity`), 0 where it is not known. `version` is what the
    sender says that it runs: untrusted text that peers show (`overlay.peers.shown_version`). Elements at the end that
    say nothing are not sent. They are not part of the heartbeat, because earlier versions refuse a longer heartbeat and
    ignore a longer envelope.
    """

    tag: Annotated[bytes, Meta(min_length=TAG_BYTES, max_length=TAG_BYTES)]
    heartbeat: Heartbeat
    to: Annotated[bytes, Meta(max_length=ID_BYTES)]
    payload: bytes
    capacity: Annotated[int, Meta(ge=0, le=255)] = 0
    version: Annotated[str, Meta(max_length=MAX_VERSION_CHARACTERS)] = ""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Envelope)


#: A peer that announces the same again within this time, from the same address, is not processed again.
REPEATED_S = 0.05
#: Peers whose last announcement is remembered. Beyond that the oldest announcement is forgotten.
MAX_REMEMBERED = 1024


class HeardPeer:
    """What a peer announced last over a stream, and what was derived from it. The payload, maybe large, is not kept."""

    __slots__ = ("capacity", "changes", "contact", "heard_s", "heartbeat", "source", "stream", "version")

    def __init__(self, envelope: Envelope, source: Address) -> None:
        self.source = source
        self.capacity, self.version = envelope.capacity, envelope.version
        self.heartbeat = heartbeat = envelope.heartbeat
        self.contact = Contact(heartbeat.node_id, Address(usable_host(heartbeat.host) or source.host, heartbeat.port))
        self.heard_s = -REPEATED_S
        self.changes = -1
        #: The stream that it used then. What keeps a stream alive keeps its connection, closed or not: 3 KB a peer.
        self.stream: ReferenceType[RequestStream] | None = None

    def uses(self, stream: RequestStream) -> bool:
        """Whether it used this stream already."""
        return self.stream is not None and self.stream() is stream

    def is_same(self, envelope: Envelope, source: Address) -> bool:
        """Whether the envelope announces the same again, from the same address."""
        return (
            envelope.heartbeat == self.heartbeat
            and (
                source is self.source
                or (source.host == self.source.host and id_behind(source) == id_behind(self.source))
            )
            and envelope.capacity == self.capacity
            and envelope.version == self.version
        )


def encoded_envelope(local: LocalNode, to: bytes, payload: bytes) -> bytes:
    """The envelope of a payload, encoded; elements at its end that have their default are left out."""
    capacity = local.line.capacity
    if local.version:
        return _ENCODER.encode((local.tag, local.heartbeat, to, payload, capacity, local.version))
    if capacity:
        return _ENCODER.encode((local.tag, local.heartbeat, to, payload, capacity))
    return _ENCODER.encode((local.tag, local.heartbeat, to, payload))


def remember(known: dict[bytes, HeardPeer], heard: HeardPeer) -> HeardPeer:
    """Put an announcement into a table of at most `MAX_REMEMBERED` peers, as its newest; returns it."""
    known.pop(heard.contact.node_id, None)
    known[heard.contact.node_id] = heard
    if len(known) > MAX_REMEMBERED:
        del known[next(iter(known))]
    return heard


def decoded_envelope(head: bytes) -> Envelope | None:
    """The envelope in the head of a request or response; None for bytes that are none."""
    try:
        return _DECODER.decode(head)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
