"""Who is to blame for audits that failed: outcomes in, the members to be left out returned. Pure.

* *Own evidence*: what an owner has told or sent to this node itself contradicts something else that it has told or sent
  to this node. No third member is involved. `OWN` such contradictions within `WINDOW_S` are enough; those of one moment
  are one.
* *Complaints*: a member says that an owner has acknowledged a delta, and that this node, the owner's backup, lacks it.
  The member may lie. So `ACCUSERS` different ones are needed.
* *Pairs*: an owner says that it has a delta and names its backup, and the backup says that it lacks it. One of the two
  lies. A member that fails with two different ones, neither of which fails with anybody else, is the liar: where one
  member lies, every failed audit has that member in it.
* *Verdicts*: a member says that it has left another one out for audits. One such member together with one accuser of
  this node's own audits is enough, or with a contradiction before this node itself, or `ACCUSERS` such members. Who
  leaves out a member by the verdict of others says that too (it *follows*). Such words count only where `MANY` members,
  or all others of a small swarm, have left the member out: the error of one node and a lie of another do not spread.
"""

from __future__ import annotations

WINDOW_S = 600.0
OWN, APART_S = 3, 0.5
ACCUSERS = 2
COUNTERPARTS = 2
MANY = 3
#: An owner of which another member finds that it is gone is audited at each push for so long.
WATCHED_S = 60.0
#: Members, and pairs, that are remembered; what was noted longest ago is forgotten first.
MAX_NOTED = 1024


class AuditOutcomes:
    """The failed audits that one node knows of; times in monotonic seconds."""

    def __init__(self) -> None:
        self._own: dict[bytes, list[float]] = {}
        #: When each member said that an owner is gone, by owner and member.
        self._watched: dict[tuple[bytes, bytes], float] = {}
        #: When each member complained last, by owner and member.
        self._complaints: dict[tuple[bytes, bytes], float] = {}
        #: When each pair of an owner and its backup failed last.
        self._pairs: dict[tuple[bytes, bytes], float] = {}
        #: When each member said that it has left another one out, by itself or following others; by the other and it.
        self._verdicts: dict[tuple[bytes, bytes], float] = {}
        self._following: dict[tuple[bytes, bytes], float] = {}
        #: Members that this node has left out, and whether by itself, which the others are to be told.
        self.verdicts_due: list[tuple[bytes, bool]] = []

    def watch(self, owner: bytes, member: bytes, now_s: float) -> None:
        """A member says that an owner is gone, which this node does not find: it may have left it out."""
        _note(self._watched, (owner, member), now_s)

    def watchers(self, owner: bytes, now_s: float) -> int:
        """How many members have said so of late: an owner with any is audited at each push."""
        return sum(pair[0] == owner and now_s - at_s < WATCHED_S for pair, at_s in self._watched.items())

    def own(self, owner: bytes, now_s: float) -> bool:
        """An owner has contradicted itself before this node; whether it is to be left out."""
        seen = [at_s for at_s in self._own.pop(owner, []) if now_s - at_s < WINDOW_S]
        if not seen or now_s - seen[-1] >= APART_S:
            seen.append(now_s)
        self._own[owner] = seen
        if len(self._own) > MAX_NOTED:
            del self._own[next(iter(self._own))]
        if len(seen) < OWN:
            return False
        del self._own[owner]
        return True

    def complaint(self, owner: bytes, accuser: bytes, now_s: float) -> bool:
        """A member says that an owner has not forwarded what it acknowledged; whether the owner is to be left out."""
        _note(self._complaints, (owner, accuser), now_s)
        accusers = self._recent(self._complaints, owner, now_s)
        if len(accusers) < ACCUSERS:
            return False
        for accuser in accusers:
            del self._complaints[owner, accuser]
        return True

    def pair(self, owner: bytes, backup: bytes, now_s: float) -> bytes | None:
        """An owner and its backup contradict each other; returns the one of the two that lies, if that is known."""
        _note(self._pairs, (owner, backup), now_s)
        recent = [pair for pair, at_s in self._pairs.items() if now_s - at_s < WINDOW_S]
        for one in (owner, backup):
            others = _counterparts(one, recent)
            if len(others) >= COUNTERPARTS and all(_counterparts(other, recent) == {one} for other in others):
                return one
        return None

    def verdict(self, node: bytes, member: bytes, now_s: float, *, follows: bool = False) -> None:
        """A member says that it has left a node out for audits; `follows`: because others had."""
        _note(self._following if follows else self._verdicts, (node, member), now_s)

    def is_condemned(self, node: bytes, now_s: float, others: int) -> bool:
        """Whether the verdicts of other members, with what this node has seen itself, have a node left out. `others`:
        the members without this node and that one."""
        members = self._recent(self._verdicts, node, now_s)
        if not members:
            return False
        if len(members | self._recent(self._following, node, now_s)) >= max(ACCUSERS, min(MANY, others)):
            return True
        recent_pairs = [pair for pair, at_s in self._pairs.items() if now_s - at_s < WINDOW_S]
        # A member that says both counts once: it may be the one that lies.
        accusers = members | self._recent(self._complaints, node, now_s) | _counterparts(node, recent_pairs)
        return len(accusers) >= ACCUSERS or any(now_s - at_s < WINDOW_S for at_s in self._own.get(node, []))

    @staticmethod
    def _recent(noted: dict[tuple[bytes, bytes], float], node: bytes, now_s: float) -> set[bytes]:
        return {other for (one, other), at_s in noted.items() if one == node and now_s - at_s < WINDOW_S}

    def settle(self, node: bytes) -> None:
        """A member is left out, or trusted again: what it had to do with is over."""
        self._own.pop(node, None)
        for noted in (self._complaints, self._pairs, self._watched, self._verdicts, self._following):
            for pair in [pair for pair in noted if node in pair]:
                del noted[pair]


def _note(noted: dict[tuple[bytes, bytes], float], pair: tuple[bytes, bytes], now_s: float) -> None:
    noted.pop(pair, None)
    noted[pair] = now_s
    if len(noted) > MAX_NOTED:
        del noted[next(iter(noted))]


def _counterparts(node: bytes, pairs: list[tuple[bytes, bytes]]) -> set[bytes]:
    return {two if one == node else one for one, two in pairs if node in (one, two)}
