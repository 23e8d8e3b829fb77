"""Notes what an owner has acknowledged, for its audit, and to be sent again if it has not added it."""

from __future__ import annotations

from typing import Protocol

from overlay.peers import Contact
from training.encoding.codecs import CodecName
from training.exchange.audit_records.acknowledged import KEPT_BYTES, Acknowledged
from training.exchange.context import ExchangeContext
from training.exchange.messages import Push
from training.shards.applied import DeltaId

#: A shard of the trainer's memory of at most this size is copied. Of a larger one only the identity is kept.
COPIED_BYTES = 1 << 16


class AcknowledgedShard(Protocol):
    """One encoded shard of a delta. `is_borrowed`: it is the trainer's memory, and valid for this step only."""

    @property
    def shard(self) -> int: ...
    @property
    def encoded(self) -> bytes | bytearray | memoryview: ...
    @property
    def codec(self) -> CodecName: ...
    @property
    def values(self) -> int: ...
    @property
    def is_borrowed(self) -> bool: ...


def note_acknowledged(context: ExchangeContext, push: Push, by: Contact | None, item: AcknowledgedShard) -> None:
    """The owner of a shard has acknowledged a delta of this node. `by`: None where others have handed the answer on, so
    that it may be theirs: then it is asked about, and is no evidence by itself."""
    if by is None:
        known = context.store.ownership.known_owners.get(item.shard)
        owner = b"" if known is None else known.owner.node_id
    else:
        owner = by.node_id
    if not owner or owner == push.node:
        return
    encoded: bytes | bytearray | memoryview | None = item.encoded
    if item.is_borrowed:
        encoded = bytes(item.encoded) if len(item.encoded) <= COPIED_BYTES else None
    identity = DeltaId(push.node, push.incarnation, push.step)
    doubt = None if by is None else _doubtful_copy(context, item.shard, owner, identity)
    now_s = context.environment.clock.monotonic()
    delta = Acknowledged(push, owner, now_s, item.codec, item.values, encoded, doubt)
    if not context.swarm.is_eligible:
        # It owns and backs up nothing, so the room of its repair log is free; and its owner may have no backup.
        log = context.store.log
        context.acknowledged.limit_bytes = max(KEPT_BYTES, log.limit_bytes - log.size_bytes)
    context.acknowledged.note(item.shard, delta)


def _doubtful_copy(context: ExchangeContext, shard: int, owner: bytes, identity: DeltaId) -> object | None:
    """The token of this node's copy, as an active backup of that owner, which lacks what the owner acknowledges; None
    if it has it, or if there is no such copy."""
    backed = context.store.backed.get(shard)
    if backed is None or backed.state is None or not backed.is_active or backed.owner.node_id != owner:
        return None
    state = backed.state
    return None if state.knows(identity) or state.may_have_forgotten(identity) else backed.token
