"""Which members one node does without, though the failure detector finds them alive. Nothing of it is on disk.

* *unreached*: direct requests to it have failed for `UNREACHED_S`, and it has answered none. It is no candidate for a
  shard. If others have answered since, so that it is not this node that is cut off, it is *silent*, and counts as gone.
* *ignored*: it has sent again and again what no healthy member sends, or it is of another swarm. For `IGNORED_S` it
  counts as gone, and no barrier waits for it. Its deltas and pulls are still served.

A firewall, a clock that is off or another network can separate two members that others reach. For each unreached
member there is a look every `LOOK_S` (`training.exchange.directory`): does it answer again, and does
another member reach it? Requests then take that *relay* (`training.exchange.rpc`), and it does not count as gone.
No node believes what another says of a third.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.environment import Clock, Log
from p2pnode.overlay.peers import Contact
from p2pnode.training.encoding.frames import BadFrame

#: With the first timeout, a replica query and the first answer of another owner within the detection bound of 10 s.
UNREACHED_S, UNANSWERED = 4.0, 3
#: The first look, and each later one. A member that was killed is found dead before its relay is looked for often.
FIRST_LOOK_S, LOOK_S = 1.0, 5.0
#: After a look no take-over is held up by another one.
LOOKED_S = 10.0
#: So much nonsense within so many seconds is enough; what comes within `APART_S` counts once.
NONSENSE, NONSENSE_S, APART_S = 5, 600.0, 0.5
IGNORED_S = 60.0
#: Members remembered; the one that was noted first is forgotten first.
MAX_MEMBERS = 1024

Reason = Literal["silent", "nonsense", "foreign"]
_NEVER = float("-inf")


class Nonsense(BadFrame):
    """What a member has sent fits its message, and no healthy member sends it."""


class Quarantine(NamedTuple):
    """A member that this node does without, why, and for how many seconds from now on; 0: until it answers."""

    node: bytes
    reason: Reason
    seconds: float


@dataclass(slots=True)
class Unreached:
    """A member that does not answer directly; times in monotonic seconds. `reason`: of the last failure. `relay`: the
    member that passes requests on; empty while none is known."""

    address: Address
    reason: str
    since_s: float
    look_s: float
    failed_s: float = _NEVER
    failures: int = 0
    relay: bytes = b""
    #: When a look ended last.
    looked_s: float = _NEVER
    is_told: bool = False


class PeerScore:
    """What one node has seen of the others."""

    def __init__(self, me: bytes, clock: Clock, log: Log) -> None:
        self._me = me
        self._now_s = clock.monotonic
        self._log = log
        self._unreached: dict[bytes, Unreached] = {}
        self._nonsense_s: dict[bytes, list[float]] = {}
        #: Until when each is ignored, and why.
        self._ignored: dict[bytes, tuple[float, Reason]] = {}
        #: The member that answered last, and another one, each with the time of its last answer.
        self._answered = self._answered_before = (b"", _NEVER)

    # -- what is seen -------------------------------------------------------------------------------------------

    def answered(self, node: bytes, *, by_relay: bool = False) -> None:
        """It answered a request."""
        if self._answered[0] != node:
            self._answered_before = self._answered
        self._answered = node, self._now_s()
        if not by_relay and (found := self._unreached.pop(node, None)) is not None and found.relay:
            self._log.info("route_direct", peer=node.hex()[:8])

    def failed(self, to: Contact, reason: str, relay: bytes = b"") -> None:
        """A request had no answer: a direct one, or one by way of `relay`."""
        node, now_s = to.node_id, self._now_s()
        found = self._unreached.get(node)
        if relay:
            if found is not None and found.relay == relay:
                found.relay, found.look_s = b"", now_s
            return
        if found is None:
            found = self._unreached[node] = Unreached(to.address, reason, now_s, now_s + FIRST_LOOK_S)
            _bound(self._unreached)
        found.address, found.reason, found.failed_s = to.address, reason, now_s
        found.failures += 1
        if not found.is_told and self.is_silent(node):
            found.is_told = True
            self._log.warning("member_quarantined", source=node.hex()[:8], reason="silent", seconds=0.0)

    def forget(self, node: bytes) -> None:
        """It has died, or was started: what it failed to answer does not count, and it relays nothing."""
        self._unreached.pop(node, None)
        for found in self._unreached.values():
            if found.relay == node:
                found.relay, found.look_s = b"", 0.0

    def nonsense(self, node: bytes, what: str) -> None:
        """It has sent what no healthy member sends."""
        if node == self._me:
            return  # handed on by this node itself
        self._log.debug("nonsense_received", source=node.hex()[:8], reason=what)
        now_s = self._now_s()
        seen_s = self._nonsense_s.setdefault(node, [])
        _bound(self._nonsense_s)
        if not seen_s or now_s - seen_s[-1] >= APART_S:
            seen_s[:] = [at_s for at_s in seen_s if now_s - at_s < NONSENSE_S] + [now_s]
        # Promise 7 (docs/faults.md): what it sends is bounded, too.
        if len(seen_s) >= NONSENSE:
            del self._nonsense_s[node]
            self._ignore(node, "nonsense")

    def foreign(self, node: bytes) -> None:
        """It sent a request of another swarm: no barrier waits for its steps."""
        if not self.is_quarantined(node):
            self._ignore(node, "foreign")

    def _ignore(self, node: bytes, reason: Reason) -> None:
        self._ignored[node] = self._now_s() + IGNORED_S, reason
        _bound(self._ignored)
        self._log.warning("member_quarantined", source=node.hex()[:8], reason=reason, seconds=IGNORED_S)

    # -- what follows -------------------------------------------------------------------------------------------

    def is_quarantined(self, node: bytes) -> bool:
        """Whether it counts as gone whatever it answers, and no barrier waits for it."""
        ignored = self._ignored.get(node) if self._ignored else None
        return ignored is not None and self._now_s() < ignored[0]

    def is_unreached(self, node: bytes) -> bool:
        """Whether direct requests to it have failed for so long, without an answer between, that it is no queue on a
        slow line: an owner whose candidates come and go sends whole shards to each."""
        found = self._unreached.get(node) if self._unreached else None
        return found is not None and (bool(found.relay) or self._now_s() - found.since_s >= UNREACHED_S)

    def is_silent(self, node: bytes) -> bool:
        """Whether it counts as gone although it lives."""
        # Promise 3: it may hang, and the failure detector's probes be answered.
        if not self.is_unreached(node):
            return False
        found = self._unreached[node]
        others_s = max(at_s for other, at_s in (self._answered, self._answered_before) if other != node)
        return not found.relay and found.failures >= UNANSWERED and others_s >= found.since_s

    def failed_within(self, node: bytes, seconds: float) -> bool:
        """Whether a request to it failed in the last `seconds`, and none was answered since."""
        found = self._unreached.get(node) if self._unreached else None
        return found is not None and not found.relay and self._now_s() - found.failed_s < seconds

    def quarantined(self) -> list[Quarantine]:
        """The members that this node does without now."""
        left = [Quarantine(node, reason, at_s - self._now_s()) for node, (at_s, reason) in self._ignored.items()]
        silent = [Quarantine(node, "silent", 0.0) for node in self._unreached if self.is_silent(node)]
        return [one for one in left if one.seconds > 0.0] + silent

    # -- ways to them -------------------------------------------------------------------------------------------

    def unreached(self) -> dict[bytes, Unreached]:
        """The members that do not answer directly."""
        return dict(self._unreached)

    def relay(self, node: bytes) -> bytes:
        """The member by way of which this one answers; empty: it is asked directly."""
        found = self._unreached.get(node) if self._unreached else None
        return b"" if found is None else found.relay

    def to_look_for(self) -> dict[bytes, Address]:
        """The members to look for now, with their last addresses."""
        now_s = self._now_s()
        return {node: found.address for node, found in self._unreached.items() if now_s >= found.look_s}

    def was_looked_for(self, node: bytes) -> bool:
        """Whether a look has ended a moment ago."""
        found = self._unreached.get(node)
        return found is not None and self._now_s() - found.looked_s < LOOKED_S

    def looked_for(self, node: bytes, relay: bytes) -> None:
        """A look has ended: it does not answer directly, and this member reaches it; empty: none does."""
        if (found := self._unreached.get(node)) is None:
            return
        found.looked_s = self._now_s()
        found.look_s = found.looked_s + LOOK_S
        if relay and relay != found.relay:
            self._log.info("route_found", peer=node.hex()[:8], relay=relay.hex()[:8], reason=found.reason)
        found.relay = relay


def _bound(members: dict[bytes, Any]) -> None:
    if len(members) > MAX_MEMBERS:
        del members[next(iter(members))]
