"""A store of named values in the memory of this process, for engines without a swarm."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from p2pnode.training.values.encoding import MAX_VALUE_BYTES, Key, decode_key, decode_value, encode_key, encode_value
from p2pnode.training.values.reducers import BUILT_IN, reduced
from p2pnode.training.values.store import NewValue, PullFailed, ScriptGone, Stamped, UpdateFailed, ValueUpdate

#: The user's `pull`. Raises `PullFailed`, or `ScriptGone`.
Pull = Callable[[Sequence[ValueUpdate], Mapping[Key, Stamped]], Awaitable[Sequence[NewValue]]]


class MemoryValues:
    """Named values. They pass through their encoding, so that what cannot be sent is refused here too."""

    def __init__(self, pull: Pull | None = None, *, node: str = "memory", limit_bytes: int = MAX_VALUE_BYTES) -> None:
        self.pull = pull
        self._node = node
        self._limit_bytes = limit_bytes
        self._values: dict[bytes, tuple[bytes, int]] = {}

    async def get(self, key: Key) -> Stamped | None:
        found = self._values.get(encode_key(key))
        return None if found is None else Stamped(decode_value(found[0]), found[1])

    async def get_many(self, keys: Sequence[Key]) -> dict[Key, Stamped]:
        return {key: found for key in keys if (found := await self.get(key)) is not None}

    async def set(self, key: Key, value: object, timestamp: int = 0) -> None:
        self._values[encode_key(key)] = encode_value(key, value, self._limit_bytes), timestamp

    async def update(self, updates: Sequence[ValueUpdate]) -> None:
        for one in updates:
            encode_key(one.key)
            encode_value(one.key, one.value, self._limit_bytes)
        failed: list[UpdateFailed] = []
        for one in updates:
            if one.reducer in BUILT_IN:
                try:
                    former = await self.get(one.key)
                    value = reduced(one.reducer, None if former is None else former.value, one.value)
                    stamp = one.timestamp if former is None else max(former.timestamp, one.timestamp)
                    await self.set(one.key, value, one.timestamp if one.reducer == "replace" else stamp)
                except (TypeError, ValueError) as error:
                    failed.append(UpdateFailed(one.key, self._node, str(error)))
        pulled = [one for one in updates if one.reducer not in BUILT_IN]
        if pulled:
            failed += await self._pull(pulled)
        if failed:
            raise failed[0]

    async def _pull(self, updates: list[ValueUpdate]) -> list[UpdateFailed]:
        failed: list[UpdateFailed] = []
        while updates:
            try:
                if self.pull is None:
                    raise ScriptGone("no script with a pull function is attached")
                for result in await self.pull(updates, await self.get_many([one.key for one in updates])):
                    await self.set(*result)
                break
            except (PullFailed, ScriptGone) as error:
                wrong = getattr(error, "key", None)
                out = [one for one in updates if one.key == wrong] or updates
                if len(out) == 1 or isinstance(error, ScriptGone):
                    failed += [UpdateFailed(one.key, self._node, str(error)) for one in out]
                else:
                    for one in out:
                        failed += await self._pull([one])
                updates = [one for one in updates if one not in out]
        return failed

    async def keys(self) -> list[Key]:
        return [decode_key(encoded) for encoded in sorted(self._values, key=lambda key: (key[:1] == b"b", key))]
