"""The named values of a swarm with keys and values as Python has them.

A script's process encodes and decodes them (`training.engines.values_link`); its daemon does neither.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2pnode.training.values.client import SwarmValues
from p2pnode.training.values.encoding import Key, decode_key, decode_value, encode_key, encode_value
from p2pnode.training.values.store import EncodedUpdate, Stamped, ValueUpdate


class DecodedValues:
    """`encoded` is the store of the node."""

    def __init__(self, encoded: SwarmValues) -> None:
        self.encoded = encoded

    async def get(self, key: Key) -> Stamped | None:
        return (await self.get_many([key])).get(key)

    async def get_many(self, keys: Sequence[Key]) -> dict[Key, Stamped]:
        found = await self.encoded.get_encoded([encode_key(key) for key in keys])
        return {
            key: Stamped(decode_value(value[0]), value[1])
            for key, value in zip(keys, found, strict=True)
            if value is not None
        }

    async def set(self, key: Key, value: object, timestamp: int = 0) -> None:
        await self.update([ValueUpdate(key, value, timestamp, "replace")])

    async def update(self, updates: Sequence[ValueUpdate]) -> None:
        encoded = [
            EncodedUpdate(encode_key(one.key), encode_value(one.key, one.value), one.timestamp, one.reducer)
            for one in updates
        ]
        await self.encoded.update_encoded(encoded)

    async def keys(self) -> list[Key]:
        return [decode_key(key) for key in await self.encoded.list_keys()]
