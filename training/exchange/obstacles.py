"""Why shards do not come, or their deltas are not taken: who was asked last, and the reason. For `/status`. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from overlay.peers import Contact


class Obstacle(NamedTuple):
    """Since when requests for a shard were in vain, in monotonic seconds; the owner that was asked last, None where
    none is known; and why."""

    since_s: float
    owner: Contact | None
    reason: str


class Obstacles:
    """Of the shards for which one node asks."""

    def __init__(self) -> None:
        self._found: dict[int, Obstacle] = {}

    def note(self, shards: Iterable[int], owner: Contact | None, reason: str, asked_s: float) -> None:
        """A request for these shards, made at this moment, was in vain."""
        for shard in shards:
            former = self._found.get(shard)
            self._found[shard] = Obstacle(asked_s if former is None else former.since_s, owner, reason)

    def clear(self, shard: int) -> None:
        """It has come, or was taken."""
        self._found.pop(shard, None)

    def __contains__(self, shard: int) -> bool:
        return shard in self._found

    def since(self, before_s: float) -> dict[Obstacle, int]:
        """What has been in the way since then or longer, by owner and reason, with the number of shards; the longest
        first. `since_s` is that of the shard that has waited longest."""
        found: dict[tuple[bytes, str], tuple[Obstacle, int]] = {}
        for one in sorted(self._found.values(), key=lambda one: one.since_s):
            if one.since_s <= before_s:
                key = b"" if one.owner is None else one.owner.node_id, one.reason
                longest, count = found.get(key, (one, 0))
                found[key] = longest, count + 1
        return dict(found.values())
