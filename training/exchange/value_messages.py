"""Messages of a run without a model: updates and reads of named values, and lists of keys. Pure.

The encoding is that of `training.exchange.messages`. Updates travel in the body, as bytes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from training.exchange.messages import PushResult
from training.exchange.terms import MAX_SHARDS, Fence, Genesis, Number, OwnerInfo, ShardIndex, Term, TermNode
from training.shards.value_batch import KeyUpdate
from training.values.encoding import MAX_KEY_BYTES

EncodedKey = Annotated[bytes, Meta(min_length=2, max_length=MAX_KEY_BYTES + 1)]
#: Updates, or keys to be read, or shards whose keys are asked for, of one request: a millisecond or two of work.
MAX_ITEMS = 1024
#: Keys of one answer.
MAX_KEYS = 65536


class UpdateValues(msgspec.Struct, frozen=True, array_like=True):
    """Updates of the sender, `UPDATES` in the body: a list of `ShardUpdate`. Answered by one `PushResult` for each, in
    the same order; `retry` with the reason `later` while one is being applied."""

    genesis: Genesis
    fences: Annotated[list[Fence], Meta(max_length=MAX_SHARDS)] = []


class ShardUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An update, and the shard of its key."""

    shard: ShardIndex
    update: KeyUpdate


_UPDATES: msgspec.msgpack.Decoder[list[ShardUpdate]] = msgspec.msgpack.Decoder(
    Annotated[list[ShardUpdate], Meta(max_length=MAX_ITEMS)]
)


def decode_updates(raw: Any) -> list[ShardUpdate]:
    """The updates in a body. Raises `msgspec.DecodeError`."""
    return _UPDATES.decode(raw)


class UpdateValuesAnswer(msgspec.Struct, frozen=True, array_like=True):
    results: Annotated[list[PushResult], Meta(max_length=MAX_ITEMS)]


class ReadValues(msgspec.Struct, frozen=True, array_like=True):
    """Asks for the values of keys, each with its shard."""

    genesis: Genesis
    keys: Annotated[list[tuple[ShardIndex, EncodedKey]], Meta(max_length=MAX_ITEMS)]
    #: An owner below these terms raises its own, or yields: the reader takes no value of a lower one.
    fences: Annotated[list[Fence], Meta(max_length=MAX_SHARDS)] = []


class ReadResult(msgspec.Struct, frozen=True, array_like=True):
    """A value and its timestamp; `none`: the key was never set; `retry`: the shard moves, or the answer is full."""

    shard: ShardIndex
    status: Literal["value", "none", "redirect", "retry"]
    term_number: Number = 0
    term_node: TermNode = b""
    value: bytes = b""
    timestamp: int = 0
    owner_info: OwnerInfo | None = None
    #: The receiver does not own the shard, and knows nobody who does.
    is_unknown: bool = False

    @property
    def term(self) -> Term:
        return Term(self.term_number, self.term_node)

    @property
    def denies_ownership(self) -> bool:
        """Whether the receiver of the request does not own the shard."""
        return self.status == "redirect" or self.is_unknown


class ReadValuesAnswer(msgspec.Struct, frozen=True, array_like=True):
    """A `RECORD` in the body: a value may be as large as a head."""

    results: Annotated[list[ReadResult], Meta(max_length=MAX_ITEMS)]


class ListKeys(msgspec.Struct, frozen=True, array_like=True):
    """Asks for the keys of shards, in the order of their encoding, each from after a key."""

    genesis: Genesis
    shards: Annotated[
        list[tuple[ShardIndex, Annotated[bytes, Meta(max_length=MAX_KEY_BYTES + 1)]]], Meta(max_length=MAX_ITEMS)
    ]
    #: As of `ReadValues`.
    fences: Annotated[list[Fence], Meta(max_length=MAX_SHARDS)] = []


class KeysResult(msgspec.Struct, frozen=True, array_like=True):
    """Keys of one shard; `is_whole`: there are no more of them."""

    shard: ShardIndex
    status: Literal["keys", "redirect", "retry"]
    term_number: Number = 0
    term_node: TermNode = b""
    keys: Annotated[list[EncodedKey], Meta(max_length=MAX_KEYS)] = []
    is_whole: bool = True
    owner_info: OwnerInfo | None = None
    #: As of `ReadResult`.
    is_unknown: bool = False

    @property
    def term(self) -> Term:
        return Term(self.term_number, self.term_node)

    @property
    def denies_ownership(self) -> bool:
        """Whether the receiver of the request does not own the shard."""
        return self.status == "redirect" or self.is_unknown


class ListKeysAnswer(msgspec.Struct, frozen=True, array_like=True):
    results: Annotated[list[KeysResult], Meta(max_length=MAX_ITEMS)]
