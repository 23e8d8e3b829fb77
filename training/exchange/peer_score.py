"""What one node has seen of the other members, and whom it does without for a while. Nothing of it is on disk. Pure.

A member may be faulty. The failure detector finds who is gone; this finds who lives and does not do its part:

* *silent*: for `SILENT_S` after a first request that it did not answer it has answered none, of `UNANSWERED` at least,
  while others have answered: otherwise it would be this node that is cut off. It counts as gone until it answers one of
  the questions that it is asked every `ASK_S`.
* *refuses*: as a backup it has refused what it had agreed to take.
* *restarts*: it was started again, or came back after it was declared dead. With each crash its shards would stand
  still until somebody has missed it.
* *nonsense*: it has sent what no healthy member sends, as values that no training gives.
* *foreign*: its requests are of another swarm.

Such a member is *quarantined* for a minute, then tried again; each time twice as long, up to `LONGEST_S`. It is no
candidate for a shard. One that sends nonsense or is foreign is *ignored* as well: it counts as gone, and no barrier
waits for it. Its deltas and pulls are still served. No node believes what another says of a third.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from overlay.environment import Clock
from training.encoding.frames import BadFrame
from training.exchange.indirect import MemberRoutes

Reason = Literal["silent", "refuses", "restarts", "nonsense", "foreign"]

#: With the first timeout, a survey and the first answer of another owner within the detection bound of 10 s.
SILENT_S, UNANSWERED = 4.0, 3
ASK_S = 2.0
#: So many of a kind within so many seconds are enough. Those of one moment count once.
LIMITS: dict[Reason, tuple[int, float]] = {"refuses": (4, 60.0), "restarts": (2, 60.0), "nonsense": (5, 600.0)}
APART_S = 0.5
FIRST_S, LONGEST_S = 60.0, 600.0
#: Members remembered; the one that was noted longest ago is forgotten first.
MAX_MEMBERS = 1024


class Nonsense(BadFrame):
    """What a member has sent fits its message, and no healthy member sends it."""


class Quarantine(NamedTuple):
    """A member that is quarantined, why, and for how many seconds from now on."""

    node: bytes
    reason: Reason
    seconds: float


@dataclass(slots=True)
class _Record:
    """Of one member; times in monotonic seconds."""

    #: When it first did not answer, since its last answer, and how often it has not.
    unanswered_s: float = 0.0
    unanswered: int = 0
    asked_s: float = 0.0
    #: When it did what `LIMITS` bounds.
    seen_s: dict[Reason, list[float]] = field(default_factory=dict)
    #: Until when it counts as silent, is ignored, and is quarantined; why last, and for how long next time.
    silent_until_s: float = 0.0
    ignored_until_s: float = 0.0
    quarantined_until_s: float = 0.0
    reason: Reason = "silent"
    next_s: float = FIRST_S


class PeerScore:
    """What one node has seen of the others."""

    def __init__(self, clock: Clock) -> None:
        self._now_s = clock.monotonic
        self._records: dict[bytes, _Record] = {}
        #: When any member answered last, and which.
        self._answered: dict[bytes, float] = {}
        self._news: list[Quarantine] = []
        #: How those are reached that do not answer directly.
        self.routes = MemberRoutes()

    # -- what is seen -------------------------------------------------------------------------------------------

    def answered(self, node: bytes) -> None:
        """It answered a request."""
        self._answered.pop(node, None)
        self._answered[node] = self._now_s()
        if len(self._answered) > MAX_MEMBERS:
            del self._answered[next(iter(self._answered))]
        if (record := self._records.get(node)) is not None:
            record.unanswered = 0
            record.silent_until_s = 0.0

    def unanswered(self, node: bytes) -> None:
        """It did not answer a request in time."""
        record, now_s = self._record(node), self._now_s()
        if not record.unanswered:
            record.unanswered_s = now_s
        record.unanswered += 1
        # Promise 3: it may hang, and the failure detector's probes be answered.
        is_silent = record.unanswered >= UNANSWERED and now_s - record.unanswered_s >= SILENT_S
        if is_silent and record.silent_until_s <= now_s and self._others_answered(node, record.unanswered_s):
            record.silent_until_s = self._quarantine(node, record, "silent")
            record.unanswered = 0

    def _others_answered(self, node: bytes, since_s: float) -> bool:
        return any(at_s >= since_s for other, at_s in self._answered.items() if other != node)

    def refused(self, node: bytes) -> None:
        """As a backup, or about to become one, it refused what it had agreed to take."""
        self._note(node, "refuses")

    def returned(self, node: bytes) -> None:
        """It was started again, or is back."""
        self._note(node, "restarts")

    def nonsense(self, node: bytes) -> None:
        """It has sent what no healthy member sends."""
        # Promise 7.
        self._note(node, "nonsense")

    def foreign(self, node: bytes) -> None:
        """It sent a request of another swarm."""
        # Promise 8.
        if not self.is_ignored(node):
            self._quarantine(node, self._record(node), "foreign")

    def _note(self, node: bytes, reason: Reason) -> None:
        record, now_s = self._record(node), self._now_s()
        enough, window_s = LIMITS[reason]
        seen_s = record.seen_s.setdefault(reason, [])
        if not seen_s or now_s - seen_s[-1] >= APART_S:
            seen_s[:] = [at_s for at_s in seen_s if now_s - at_s < window_s] + [now_s]
        # One that is quarantined already may have to be ignored.
        until_s = record.ignored_until_s if reason == "nonsense" else record.quarantined_until_s
        if len(seen_s) >= enough and until_s <= now_s:
            seen_s.clear()
            self._quarantine(node, record, reason)

    def _quarantine(self, node: bytes, record: _Record, reason: Reason) -> float:
        now_s = self._now_s()
        if now_s - record.quarantined_until_s > LONGEST_S:
            record.next_s = FIRST_S
        until_s = record.quarantined_until_s = now_s + record.next_s
        if reason in ("nonsense", "foreign"):
            record.ignored_until_s = until_s
        record.reason = reason
        self._news.append(Quarantine(node, reason, record.next_s))
        record.next_s = min(2 * record.next_s, LONGEST_S)
        return until_s

    def _record(self, node: bytes) -> _Record:
        record = self._records.pop(node, None) or _Record()
        self._records[node] = record
        if len(self._records) > MAX_MEMBERS:
            del self._records[next(iter(self._records))]
        return record

    # -- what follows -------------------------------------------------------------------------------------------

    def is_ignored(self, node: bytes) -> bool:
        """Whether it counts as gone whatever it answers, and no barrier waits for it."""
        record = self._records.get(node)
        return record is not None and self._now_s() < record.ignored_until_s

    def is_silent(self, node: bytes) -> bool:
        """Whether it counts as gone although it lives."""
        record = self._records.get(node)
        return record is not None and self._now_s() < record.silent_until_s

    def is_candidate(self, node: bytes) -> bool:
        """Whether it may be given a shard."""
        record = self._records.get(node)
        return record is None or self._now_s() >= record.quarantined_until_s

    def to_ask(self) -> list[bytes]:
        """The silent members whose turn it is to be asked whether they answer again."""
        now_s = self._now_s()
        found = [
            node
            for node, record in self._records.items()
            if now_s < record.silent_until_s and now_s - record.asked_s >= ASK_S
        ]
        for node in found:
            self._records[node].asked_s = now_s
        return found

    def quarantined(self) -> list[Quarantine]:
        """The members that are quarantined now."""
        now_s = self._now_s()
        left = ((node, one.reason, one.quarantined_until_s - now_s) for node, one in self._records.items())
        return [Quarantine(*one) for one in left if one[2] > 0.0]

    def take_news(self) -> list[Quarantine]:
        """The members quarantined since the last call."""
        news, self._news = self._news, []
        return news
