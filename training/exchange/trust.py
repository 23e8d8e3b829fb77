"""Which members this node leaves out because they have lied to it repeatedly. Pure.

What the definition of a message allows can still be untrue: a state with values that no training gives, or a delta of a
step that nobody reaches. Each such message is refused where it arrives. A member that sends `LIES` of them, in as many
seconds, within `WINDOW_S`, is left out by this node alone: its requests are refused, what it owns counts as without an
owner, and it is no candidate for a shard. No node believes another one's opinion of a third: a liar could otherwise
have the honest ones left out. So only what this node has seen itself counts, and only what no honest member sends
(`Untrue`), also one with a slow line, an old version or a wrong view of who is alive.

It lasts until somebody undoes it (`forgive`), also when this node starts again (`training.exchange.trust_file`).

A member that only contradicts itself (`training.exchange.reliability`) is *suspended*: for a time it is left out in the
same way, but its deltas and questions are taken.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from training.encoding.frames import BadFrame

#: Lies after which a member is left out, and the seconds they are remembered.
LIES = 5
WINDOW_S = 600.0
#: One mistake may show in many messages of one moment: they count once.
APART_S = 1.0
#: Members whose lies are remembered; the one whose last lie is longest ago is forgotten first.
MAX_MEMBERS = 1024


class Untrue(BadFrame):
    """What a member has sent fits its message, and no honest member sends it."""


@dataclass(slots=True)
class _Seen:
    """The lies of one member: when they were counted, and which they were."""

    at_s: list[float] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Distrusted:
    """A member that is left out: since when, in seconds of the clock, and what it did most."""

    node: bytes
    since_s: float
    reason: str
    lies: int


class MemberTrust:
    """The opinion of one node."""

    def __init__(self) -> None:
        self._seen: dict[bytes, _Seen] = {}
        self._distrusted: dict[bytes, Distrusted] = {}
        #: Until when, in monotonic seconds.
        self._suspended: dict[bytes, float] = {}
        #: Whether `distrusted` has changed since `take_unsaved`.
        self._is_unsaved = False

    def __contains__(self, node: bytes) -> bool:
        """Whether this member is trusted, for now."""
        return node not in self._distrusted and node not in self._suspended

    def is_served(self, node: bytes) -> bool:
        """Whether its requests are answered."""
        return node not in self._distrusted

    def suspend(self, node: bytes, until_s: float) -> None:
        """Leave a member out for a time."""
        self._suspended[node] = until_s

    def end_suspensions(self, now_s: float) -> bool:
        """Whether the time of a member is over, which is trusted from now on."""
        over = [node for node, until_s in self._suspended.items() if until_s <= now_s]
        for node in over:
            del self._suspended[node]
        return bool(over)

    def note(self, node: bytes, reason: str, now_s: float) -> Distrusted | None:
        """A member has lied; returns it when it is left out from now on."""
        if node in self._distrusted:
            return None
        seen = self._seen.pop(node, None) or _Seen()
        self._seen[node] = seen
        if len(self._seen) > MAX_MEMBERS:
            del self._seen[next(iter(self._seen))]
        seen.reasons[reason] += 1
        if seen.at_s and now_s - seen.at_s[-1] < APART_S:
            return None
        seen.at_s = [at for at in seen.at_s if now_s - at < WINDOW_S] + [now_s]
        if len(seen.at_s) < LIES:
            return None
        most, _ = seen.reasons.most_common(1)[0]
        found = self._distrusted[node] = Distrusted(node, now_s, most, seen.reasons.total())
        del self._seen[node]
        self._is_unsaved = True
        return found

    def forgive(self, node: bytes) -> bool:
        """Trust a member again; False if it was trusted."""
        self._seen.pop(node, None)
        was_suspended = self._suspended.pop(node, None) is not None
        is_new = self._distrusted.pop(node, None) is not None
        self._is_unsaved = self._is_unsaved or is_new
        return is_new or was_suspended

    def distrusted(self) -> list[Distrusted]:
        """The members that are left out, in the order in which that was decided."""
        return list(self._distrusted.values())

    def restore(self, found: Distrusted) -> None:
        """A member that was left out before this node started again."""
        self._distrusted[found.node] = found

    def take_unsaved(self) -> list[Distrusted] | None:
        """All members that are left out, if that has changed since the last call."""
        is_unsaved, self._is_unsaved = self._is_unsaved, False
        return self.distrusted() if is_unsaved else None

    def keep_unsaved(self) -> None:
        """What `take_unsaved` returned could not be written."""
        self._is_unsaved = True
