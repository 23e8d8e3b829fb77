"""Which applied identities a shard may forget, so that its set stays bounded however often nodes start. Pure.

A row is one start of one node. It is *silent* when nothing was added to it for `silent_s`, which is longer than any
retry lives and than a repair of a split reaches back. Two kinds of rows are forgotten:

* an earlier start of a node, when it is silent and a later start has been listed for as long: its process is gone;
* a node that is not alive, when all its rows are silent and `MOST_GONE` others have come further: but only if the swarm
  is far beyond its last step, because the steps up to it are then refused of every node that is not listed.

What was forgotten is refused, never applied (`training.shards.applied.Applied.may_have_forgotten`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from training.shards.applied import Applied

#: Nodes that are not alive and are listed all the same.
MOST_GONE = 256

Key = tuple[bytes, int]


@dataclass(frozen=True, slots=True)
class Present:
    """What is known of the swarm now. `incarnation_of` is that of a node which is alive, else None.
    `settled_step`: nodes that are not alive and have not come so far may be forgotten; None where steps are no
    measure."""

    now_s: float
    silent_s: float
    incarnation_of: Callable[[bytes], int | None]
    settled_step: int | None = None
    most_gone: int = MOST_GONE


@dataclass(slots=True)
class SilenceWatch:
    """How long each row of one set has been silent. A set that is read or received anew begins with a new watch."""

    #: The number of identities of a row when it was last looked at, since when it has had that, and since when it is
    #: listed.
    _rows: dict[Key, tuple[int, float, float]] = field(default_factory=dict)

    def forget(self, applied: Applied, present: Present) -> int:
        """Look at all rows, and forget those that may be; returns how many."""
        now = present.now_s
        seen: dict[Key, tuple[int, float, float]] = {}
        starts: dict[bytes, list[tuple[int, int]]] = {}
        for node, incarnation, ranges in applied.iterate():
            length, key = sum(high - low + 1 for low, high in ranges), (node, incarnation)
            former = self._rows.get(key)
            if former is None:
                seen[key] = (length, now, now)
            else:
                seen[key] = former if former[0] == length else (length, now, former[2])
            starts.setdefault(node, []).append((incarnation, ranges[-1][1]))
        self._rows = seen
        silent = {key for key, (_, since_s, _) in seen.items() if now - since_s >= present.silent_s}
        count = sum(self._forget_earlier(applied, node, rows, silent, present) for node, rows in starts.items())
        return count + self._forget_gone(applied, starts, silent, present)

    def _forget_earlier(
        self, applied: Applied, node: bytes, rows: list[tuple[int, int]], silent: set[Key], present: Present
    ) -> int:
        """Forget the earlier starts of one node."""
        if len(rows) == 1:
            return 0
        since = {incarnation: self._rows[node, incarnation][2] for incarnation, _ in rows}
        later = max((one for one, listed_s in since.items() if present.now_s - listed_s >= present.silent_s), default=0)
        current = present.incarnation_of(node)
        if current is not None:
            later = min(later, current)
        earlier = [incarnation for incarnation in since if incarnation < later and (node, incarnation) in silent]
        for incarnation in earlier:
            applied.forget(node, incarnation)
            del self._rows[node, incarnation]
        return len(earlier)

    def _forget_gone(
        self, applied: Applied, starts: dict[bytes, list[tuple[int, int]]], silent: set[Key], present: Present
    ) -> int:
        """Forget nodes that are not alive, of those that came least far first."""
        settled = present.settled_step
        if settled is None or len(starts) <= present.most_gone:
            return 0
        gone = sorted(
            (max(last for _, last in rows), node)
            for node, rows in starts.items()
            if present.incarnation_of(node) is None
        )
        forgotten: dict[bytes, None] = {}
        for last, node in gone[: max(0, len(gone) - present.most_gone)]:
            listed = [(node, incarnation) for incarnation, _ in starts[node] if (node, incarnation) in self._rows]
            if max(last, applied.forgotten.last_of(node)) < settled and all(key in silent for key in listed):
                forgotten[node] = None
        before = len(self._rows)
        if forgotten:
            applied.forget_nodes(forgotten)
            self._rows = {key: row for key, row in self._rows.items() if key[0] not in forgotten}
        return before - len(self._rows)
