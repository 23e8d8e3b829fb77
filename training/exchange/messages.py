"""Messages of a step: push, pull, forward, the search for owners, and requests through a relay.

They are MessagePack through msgspec, which checks types and the lengths of lists and texts. Arrays travel as frames in
the body (`training.encoding.frames`). `docs/protocol.md` describes the same messages. Those that move a shard are in
`training.exchange.ownership_messages`.

The answer to a push may be a stream, because an owner may forward the delta to a backup over a slow line, and is not to
be silent meanwhile. It sends a head without results, then a body of small pieces. A piece is its length (4 bytes,
big-endian) and a MessagePack list of results; length 0 only says that the forward moves. If the answer breaks off, the
pieces that have arrived are valid. Pure.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from p2pnode.overlay.transport import Buffer, FailureKind
from p2pnode.training.encoding.frames import BadFrame, FrameReader, Part, blob_frames, read_blob
from p2pnode.training.encoding.table import WholeCodec
from p2pnode.training.exchange.terms import (
    MAX_SHARDS,
    ZERO_TERM,
    Fence,
    Host,
    Length,
    NodeId,
    Number,
    OwnerInfo,
    Port,
    Reason,
    Scale,
    ShardIndex,
    Term,
    Weight,
)

Shards = Annotated[list[ShardIndex], Meta(max_length=MAX_SHARDS)]
#: How many nodes train, as the sender counts or estimates them; 0: not said.
WorkerCount = Annotated[float, Meta(ge=0, le=1e9)]
#: Most deltas in one `repair` or `request_repair`, which have half a megabyte.
MAX_DELTAS = 8192
#: Most bytes of a message in a body: 65,536 rows of identities have 2.4 MB.
MAX_RECORD_BYTES = 16 * 1024 * 1024


class Push(msgspec.Struct, frozen=True, array_like=True):
    """A node's delta of one step, for the shards listed; one `DELTA` array each follows in the body, in that order.

    `weight` was computed with `workers`. `apart`: no owner was in reach when it was made; the delta may be of many
    steps, and is added as one from the other side of a split.
    """

    node: NodeId
    incarnation: Number
    step: Number
    base_step: Number
    weight: Weight
    shards: Shards
    fences: Annotated[list[Fence], Meta(max_length=MAX_SHARDS)] = []
    workers: WorkerCount = 0.0
    apart: bool = False


PushStatus = Literal["ok", "redirect", "retry", "refused"]
#: Why an owner refuses a delta permanently.
RefusalReason = Literal[
    "not_yours",
    "shape",
    "malformed",
    "not_finite",
    "late",
    "before_era",
    "out_of_range",
    "ahead",
]
#: Why a delta is to be sent again.
RetryReason = Literal[
    "owner_unknown",
    "no_backup_yet",
    "backup_silent",
    "moving",
    "leaving",
    "too_many_pending",
    "no_norms_yet",
]
#: The reason of an `ok` to a delta that was added before, as its identity shows.
KNOWN = "known"


class PushResult(msgspec.Struct, frozen=True, array_like=True):
    """What became of one shard of a push. With `redirect` comes the `owner_info`, with `refused` and `retry` a
    `reason`, of which a later version may have more: a receiver accepts any.

    `version`: that of the owner's state, which has the delta; 0: not said. Values of an earlier version lack the delta;
    if it was `KNOWN` they may have it.
    """

    shard: ShardIndex
    status: PushStatus
    reason: Reason = ""
    owner_info: OwnerInfo | None = None
    version: Number = 0

    @classmethod
    def refused(cls, shard: int, reason: RefusalReason) -> PushResult:
        return cls(shard, "refused", reason=reason)

    @classmethod
    def retry(cls, shard: int, reason: RetryReason) -> PushResult:
        return cls(shard, "retry", reason=reason)

    @property
    def denies_ownership(self) -> bool:
        """Whether the receiver of the push does not own the shard."""
        owner_unknown: RetryReason = "owner_unknown"
        return self.status == "redirect" or (self.status == "retry" and self.reason == owner_unknown)


class PushAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Without results here the body has them in pieces (`piece_of`)."""

    results: Annotated[list[PushResult], Meta(max_length=MAX_SHARDS)]
    workers: WorkerCount = 0.0


#: The random name of a publication, which is a published value and its changes; empty: none.
PublicationId = Annotated[bytes, Meta(max_length=8)]
#: Of a published value; empty: none.
Digest = Annotated[bytes, Meta(max_length=8)]
#: Most changes of one shard in one answer.
MAX_CHANGES = 1024


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """A shard to be pulled, and the term and version of the puller's copy. If the copy is a published value, also its
    publication and its version there (`published`)."""

    shard: ShardIndex
    term: Term
    version: Number
    publication: PublicationId = b""
    published: Number = 0


class Pull(msgspec.Struct, frozen=True, array_like=True):
    """Asks for the values of shards after the barrier of `step`.

    `takes_copies`: a receiver that does not own a shard sends its copy. `is_final`: training has ended, and the values
    must be the same bits for every node (`training.exchange.owner.final_values`). `follows`: the puller takes published
    values and their changes; an owner that has none sends values in `codec`.
    """

    step: Number
    codec: WholeCodec
    shards: Annotated[list[Wanted], Meta(max_length=MAX_SHARDS)]
    fences: Annotated[list[Fence], Meta(max_length=MAX_SHARDS)] = []
    takes_copies: bool = False
    is_final: bool = False
    follows: bool = False


class PullResult(msgspec.Struct, frozen=True, array_like=True):
    """The answer for one shard, by status. `value`: the owner's values follow in the body. `copy`: those of a node that
    does not own it. `same`: the puller's copy is up to date. `redirect`: `owner_info` owns it. `retry`: the receiver
    knows no owner. `later`: in a final pull, the owner's backup has other bits still.

    `rank` is the term by which the value ranks among copies of the shard. It differs from the owner's term after a
    take-over that has added nothing yet: such a value ranks as the copy it began with.

    To a puller that follows, `value` with a `publication` is the published value as a whole. With status `changes` as
    many as `changes` says follow, from the puller's published version to `published`, whose value has this `digest`.
    """

    shard: ShardIndex
    status: Literal["value", "copy", "same", "redirect", "retry", "later", "changes"]
    term: Term = ZERO_TERM
    version: Number = 0
    owner_info: OwnerInfo | None = None
    rank: Term | None = None
    publication: PublicationId = b""
    published: Number = 0
    digest: Digest = b""
    changes: Annotated[int, Meta(ge=0, le=MAX_CHANGES)] = 0

    @property
    def denies_ownership(self) -> bool:
        """Whether the receiver of the pull does not own the shard."""
        return self.status in ("redirect", "retry")

    @property
    def rank_term(self) -> Term:
        return self.rank or self.term


class PullAnswer(msgspec.Struct, frozen=True, array_like=True):
    results: Annotated[list[PullResult], Meta(max_length=MAX_SHARDS)]


class Forwarded(msgspec.Struct, frozen=True, array_like=True):
    """One shard of a forward. `scale` is the factor of the owner's clipping, `norm` the length before it. `has_it`: the
    receiver made this delta and keeps it until its push is answered, so it is not in the body. `number`: in place of
    the forward's `step` for a batch of named values, which has another number in each shard; 0: none."""

    shard: ShardIndex
    term: Term
    folded_step: Number
    scale: Scale = 1.0
    norm: Length = 0.0
    has_it: bool = False
    number: Number = 0


class Forward(msgspec.Struct, frozen=True, array_like=True):
    """A push, forwarded to a backup or learner; `weight`: with which the owner will add it."""

    node: NodeId
    incarnation: Number
    step: Number
    weight: Weight
    shards: Annotated[list[Forwarded], Meta(max_length=MAX_SHARDS)]
    #: False for a delta from the other side of a split: it changes the value only.
    momentum: bool = True


ForwardStatus = Literal["ok", "fenced", "unknown", "lacks"]


class ForwardResult(msgspec.Struct, frozen=True, array_like=True):
    """`fenced`: this backup has seen the higher term given here; `unknown`: it does not back up this shard;
    `lacks`: it keeps no copy of this delta of its own any more, and wants it in the body."""

    shard: ShardIndex
    status: ForwardStatus
    term: Term = ZERO_TERM


class ForwardAnswer(msgspec.Struct, frozen=True, array_like=True):
    results: Annotated[list[ForwardResult], Meta(max_length=MAX_SHARDS)]


class LocateOwners(msgspec.Struct, frozen=True, array_like=True):
    """Asks for the owners of these shards; an empty list asks for all. `known` are the owners that the sender knows."""

    shards: Shards
    known: Annotated[list[OwnerInfo], Meta(max_length=MAX_SHARDS)]
    fences: Annotated[list[Fence], Meta(max_length=MAX_SHARDS)] = []


class LocateOwnersAnswer(msgspec.Struct, frozen=True, array_like=True):
    known: Annotated[list[OwnerInfo], Meta(max_length=MAX_SHARDS)]


class Indirect(msgspec.Struct, frozen=True, array_like=True):
    """A request that a relay is to pass on to `target` at this address: its `name`, and its message as `payload`; its
    body follows. The relay gives up after a silence of `timeout_ms`, and adds the sender as `origin`. Without a name
    the target only answers, with the payload."""

    target: NodeId
    host: Host
    port: Port
    name: Annotated[str, Meta(max_length=32)]
    timeout_ms: Annotated[int, Meta(ge=0, lt=1 << 32)]
    payload: bytes
    origin: Annotated[bytes, Meta(max_length=20)] = b""
    origin_host: Host = ""
    origin_port: Annotated[int, Meta(ge=0, le=65535)] = 0


class IndirectAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer of the target, whose body follows; or how the relay failed to get one."""

    payload: bytes = b""
    failure: FailureKind | None = None
    detail: Reason = ""


S = TypeVar("S")


def decode(payload: Buffer, kind: type[S]) -> S:
    """Decode and check a message. Raises `msgspec.DecodeError`, of which `ValidationError` is a subclass."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (UnicodeDecodeError, RecursionError) as error:  # unknown elements at the end may nest without end
        raise msgspec.DecodeError(f"{error}") from error


#: The bytes of a message. Not a function of this module: one more call for each request and answer.
encode: Callable[[msgspec.Struct], bytes] = msgspec.msgpack.encode


def record_frames(shard: int, record: msgspec.Struct) -> Iterator[Buffer]:
    """A message about a shard as a part of a body: with rows of identities it may not fit the head."""
    return blob_frames(shard, encode(record), Part.RECORD)


async def read_record(reader: FrameReader, shard: int, kind: type[S]) -> S:
    """Read what `record_frames` has made. Raises `BadFrame`."""
    raw, _ = await read_blob(reader, shard, Part.RECORD, MAX_RECORD_BYTES)
    try:
        return decode(raw, kind)
    except msgspec.DecodeError as error:
        raise BadFrame(f"malformed {kind.__name__}: {error}") from error


#: Of the length in front of a piece.
_LENGTH_BYTES = 4
#: Longest piece: results of all shards, each with an owner and a reason.
MAX_PIECE_BYTES = 4 * 1024 * 1024
#: The piece of length 0.
SIGN_OF_LIFE = bytes(_LENGTH_BYTES)

_RESULTS = msgspec.msgpack.Decoder(list[PushResult])


def piece_of(results: Sequence[PushResult]) -> bytes:
    """Some results as one piece of the stream."""
    data = msgspec.msgpack.encode(list(results))
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


async def read_results(body: AsyncIterator[Buffer]) -> AsyncIterator[list[PushResult]]:
    """The results of each piece that has some. Raises `BadFrame` for a malformed piece, and what the body raises."""
    reader, length = FrameReader(body), bytearray(_LENGTH_BYTES)
    while await reader.fill(memoryview(length), at_end_ok=True):
        size = int.from_bytes(length, "big")
        if size > MAX_PIECE_BYTES:
            raise BadFrame(f"a piece of {size} bytes in the answer to a push")
        if not size:
            continue
        data = bytearray(size)
        await reader.fill(memoryview(data))
        try:
            yield _RESULTS.decode(data)
        except (ValueError, RecursionError) as error:
            raise BadFrame(f"a malformed piece in the answer to a push: {error}") from error
