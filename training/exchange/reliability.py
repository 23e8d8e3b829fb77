"""Members that this node does not rely on for a while: they live, and do not do what they are asked. Pure.

The failure detector finds who is gone. It does not find a member that answers its probes and no request, nor a backup
that refuses what it has agreed to take. Nobody need have lied (`training.exchange.trust`): such a member may be behind
a line that loses streams, or overloaded. So it is left out for a minute, then tried again; each time longer, up to
`LONGEST_S`.

* *silent*: for `SILENT_S` after a first request that it did not answer it has answered none, of `UNANSWERED` at least,
  while others have answered: otherwise it would be this node that is cut off. It counts as gone until it answers one
  of the questions that it is asked every `ASK_S`.
* *failed*: as a backup it has refused deltas in `FAILURES` seconds within `WINDOW_S`. It is no candidate for a shard.
* *restarts*: it was started again, or came back after it was declared dead, `RETURNS` times within `WINDOW_S`. It is no
  candidate for a shard: with each crash its shards would stand still until somebody has missed it.
* *misbehaved*: it contradicted itself `MISBEHAVIOURS` times within `MISBEHAVIOUR_WINDOW_S`. It denied to own what it
  had claimed (`training.exchange.claims`), or gave answers that do not fit their questions. An honest member may do so
  once, when it is started again or steps down. It counts as gone, and what it says of owners is not heard, until its
  time is over (`MemberTrust.suspend`).
* *foreign*: its requests are of another swarm. It counts as gone in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from training.exchange.member_routes import MemberRoutes

#: With the first timeout, a survey and the first answer of another owner within the detection bound of 10 s.
SILENT_S, UNANSWERED = 4.0, 3
ASK_S = 2.0
FAILURES, WINDOW_S = 4, 60.0
RETURNS = 2
#: Honest members do not contradict themselves, but by a chance that nobody has met yet.
MISBEHAVIOURS, MISBEHAVIOUR_WINDOW_S = 3, 600.0
#: Failures of one moment count once.
APART_S = 0.5
FIRST_S, LONGEST_S = 60.0, 600.0
#: Members remembered; the one that was noted longest ago is forgotten first.
MAX_MEMBERS = 1024


@dataclass(slots=True)
class _Record:
    """Of one member; times in monotonic seconds."""

    #: When it first did not answer, since its last answer, and how often it has not.
    unanswered_s: float = 0.0
    unanswered: int = 0
    failed_s: list[float] = field(default_factory=list)
    misbehaved_s: list[float] = field(default_factory=list)
    returned_s: list[float] = field(default_factory=list)
    #: Until when it counts as silent, and is no candidate.
    silent_until_s: float = 0.0
    asked_s: float = 0.0
    left_out_until_s: float = 0.0
    #: How long it is left out next time.
    next_s: float = FIRST_S


class Reliability:
    """What one node has seen of the others."""

    def __init__(self) -> None:
        self._records: dict[bytes, _Record] = {}
        #: When any member answered last, and which.
        self._answered: dict[bytes, float] = {}
        self._news: list[tuple[bytes, str, float]] = []
        #: How those are reached that do not answer directly.
        self.routes = MemberRoutes()

    def answered(self, node: bytes, now_s: float) -> None:
        """It answered a request."""
        self._answered.pop(node, None)
        self._answered[node] = now_s
        if len(self._answered) > MAX_MEMBERS:
            del self._answered[next(iter(self._answered))]
        if (record := self._records.get(node)) is not None:
            record.unanswered = 0
            record.silent_until_s = 0.0

    def unanswered(self, node: bytes, now_s: float) -> None:
        """It did not answer a request in time."""
        record = self._record(node)
        if not record.unanswered:
            record.unanswered_s = now_s
        record.unanswered += 1
        is_silent = record.unanswered >= UNANSWERED and now_s - record.unanswered_s >= SILENT_S
        if is_silent and record.silent_until_s <= now_s and self._others_answered(node, record.unanswered_s):
            record.silent_until_s = self._leave_out(node, record, now_s, "silent")
            record.unanswered = 0

    def _others_answered(self, node: bytes, since_s: float) -> bool:
        return any(at_s >= since_s for other, at_s in self._answered.items() if other != node)

    def failed(self, node: bytes, now_s: float) -> None:
        """As a backup, or about to become one, it refused what it had agreed to take."""
        record = self._record(node)
        if _is_enough(record.failed_s, now_s, FAILURES) and record.left_out_until_s <= now_s:
            self._leave_out(node, record, now_s, "failed")
            record.failed_s.clear()

    def misbehaved(self, node: bytes, now_s: float) -> float | None:
        """It did what honest members do once in a while at most. Returns until when it is left out, if that begins."""
        record = self._record(node)
        if not _is_enough(record.misbehaved_s, now_s, MISBEHAVIOURS, MISBEHAVIOUR_WINDOW_S):
            return None
        record.misbehaved_s.clear()
        return self._leave_out(node, record, now_s, "misbehaved")

    def foreign(self, node: bytes, now_s: float) -> float:
        """It sent a request of another swarm, or of this one with other shards. Returns until when it is left out."""
        record = self._record(node)
        if record.left_out_until_s > now_s:
            return record.left_out_until_s
        return self._leave_out(node, record, now_s, "foreign")

    def returned(self, node: bytes, now_s: float) -> None:
        """It was started again, or is back."""
        record = self._record(node)
        if _is_enough(record.returned_s, now_s, RETURNS) and record.left_out_until_s <= now_s:
            self._leave_out(node, record, now_s, "restarts")
            record.returned_s.clear()

    def _leave_out(self, node: bytes, record: _Record, now_s: float, reason: str) -> float:
        until_s = now_s + record.next_s
        self._news.append((node, reason, record.next_s))
        record.left_out_until_s = until_s
        record.next_s = min(2 * record.next_s, LONGEST_S)
        return until_s

    def _record(self, node: bytes) -> _Record:
        record = self._records.pop(node, None) or _Record()
        self._records[node] = record
        if len(self._records) > MAX_MEMBERS:
            del self._records[next(iter(self._records))]
        return record

    def is_silent(self, node: bytes, now_s: float) -> bool:
        """Whether it counts as gone although it lives."""
        record = self._records.get(node)
        return record is not None and now_s < record.silent_until_s

    def to_ask(self, now_s: float) -> list[bytes]:
        """The silent members whose turn it is to be asked whether they answer again."""
        found = [
            node
            for node, record in self._records.items()
            if now_s < record.silent_until_s and now_s - record.asked_s >= ASK_S
        ]
        for node in found:
            self._records[node].asked_s = now_s
        return found

    def is_candidate(self, node: bytes, now_s: float) -> bool:
        """Whether it may be given a shard."""
        record = self._records.get(node)
        return record is None or now_s >= record.left_out_until_s

    def take_news(self) -> list[tuple[bytes, str, float]]:
        """The members left out since the last call, why, and for how many seconds."""
        news, self._news = self._news, []
        return news


def _is_enough(seen_s: list[float], now_s: float, enough: int, window_s: float = WINDOW_S) -> bool:
    """Count one more; whether there are enough within the window. Those of one moment are one."""
    if not seen_s or now_s - seen_s[-1] >= APART_S:
        seen_s[:] = [at_s for at_s in seen_s if now_s - at_s < window_s] + [now_s]
    return len(seen_s) >= enough
