"""What nodes tell one another about the data they share: statements, and the request that exchanges them. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from p2pnode.overlay.peers import Counter, Id
from p2pnode.training.trainer_link.data_messages import DataShape, Number, SectionMask

#: Members named in one message; larger swarms share data among the members that a node knows.
MAX_MEMBERS = 4096
#: Sections (of 1024 partitions) named in one message.
MAX_SECTIONS = 256
#: Partitions that one node has begun and not finished.
MAX_BEGUN = 1 << 16

Sections = Annotated[list[SectionMask], Meta(max_length=MAX_SECTIONS)]


class Statement(msgspec.Struct, frozen=True, array_like=True):
    """What one node trains, as of its `number`-th statement. Others may pass it on.

    `view`: the members, as (node id, incarnation), to which this node leaves what is theirs. `joining`: it has begun
    nothing, and begins nothing before all members it knows of have answered. `left`: it begins nothing any more.
    `partitions`, `first`, `trained` and `offsets` are what it knows to be trained, by whomever (`DataState`). `begun`:
    what it has begun and not finished; `released`: what it leaves to the next in rank. `front`: the last epoch of which
    it has begun a partition, or -1.
    """

    node: Id
    incarnation: Counter
    number: Counter
    shape: DataShape
    joining: bool
    left: bool
    view: Annotated[list[tuple[Id, Counter]], Meta(max_length=MAX_MEMBERS)]
    partitions: Annotated[int, Meta(ge=-1)]
    first: tuple[Number, Number]
    trained: Sections
    offsets: Annotated[list[tuple[Number, Number, Number]], Meta(max_length=MAX_BEGUN)]
    begun: Annotated[list[tuple[Number, Number]], Meta(max_length=MAX_BEGUN)]
    released: Sections
    front: Annotated[int, Meta(ge=-1)]

    def includes(self, node: bytes, incarnation: int) -> bool:
        """Whether the sender leaves to this member what is its own."""
        return (node, incarnation) in self.view


class ShareData(msgspec.Struct, frozen=True, array_like=True):
    """Request and answer alike: the sender's own statement, and others that the receiver lacks.

    `known`: (node id, incarnation, number) of the statements that the sender of a request has; `wanted`: the nodes of
    which it waits for a newer one. Both are empty in an answer.
    `statements` is empty if the sender shares no data.
    """

    statements: Annotated[list[Statement], Meta(max_length=MAX_MEMBERS)]
    known: Annotated[list[tuple[Id, Counter, Counter]], Meta(max_length=MAX_MEMBERS)] = []
    wanted: Annotated[list[Id], Meta(max_length=MAX_MEMBERS)] = []
