"""SWIM's failure detector (Das et al. 2002) with Lifeguard's suspicion and local health (Dadgar et al. 2018).

Decides which members to probe, when a silent member is suspected, when a suspected one is dead, and what to gossip.
Takes events with the time and returns actions; it sends nothing.

A member that does not answer a ping is pinged through others, and if that fails too it is suspected. The suspicion is
gossiped. Gossip is a reason to probe and no evidence: a node removes a member only after the member left this node's
own probes unanswered, and any message of the member itself ends the suspicion. A member that hears that it is suspected
pings who said so. So nobody refutes anything, and gossip carries no counts. A node whose own event loop lags extends
every deadline by the lag, and all its time-outs.

By default a watched member that crashed is detected within 6 s. It is fresh for 0.5 s, the next round comes within 1 s,
and both pings take 0.5 s. The suspicion takes 3 s and its last probe 0.5 s. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush, nsmallest
from typing import Literal

from p2pnode.overlay.kademlia.calls import PROBE_TIMEOUT_S
from p2pnode.overlay.kademlia.messages import Gossip, MemberState
from p2pnode.overlay.membership.actions import (
    Broadcast,
    DetectorAction,
    SendNow,
    SendPing,
    SendPingRequest,
    StateChanged,
)
from p2pnode.overlay.settings import LivenessSettings

#: `MemberState(n)` as a table, because every datagram may carry four.
_STATES = tuple(MemberState)
#: A member that sent something within this share of the probe interval needs no probe.
FRESH_SHARE = 0.5
#: Peers asked to probe an unresponsive one before it is suspected (SWIM's k).
INDIRECT_PROBES = 3
#: A member that was probed this recently is not probed again on request.
PROBE_PAUSE_S = 0.2
#: Dead members are kept, and pinged occasionally, this long: partitions heal within it. Those that left, shorter.
DEAD_MEMORY_S = 3600.0
LEFT_MEMORY_S = 120.0
MAX_REMEMBERED = 1024
#: Deaths of unknown nodes that are remembered as passed on.
MAX_PASSED = 128
#: What is too old is looked for this often: when half of a swarm has died, hundreds are remembered for an hour.
PURGE_INTERVAL_S = 10.0
#: Suspects probed in a round. If more crash at once they take turns, so that probes stay few. With as many suspects
#: others are not asked to ping one more: that finds paths that fail one at a time, and costs a dozen datagrams.
MAX_SUSPECTS_PER_ROUND = 16
#: Probes in a row that a suspect leaves unanswered before it is dead. At 5 % loss one probe in a hundred is lost
#: together with its retry. If one were enough, a hundred nodes would confirm a false report to each other.
UNANSWERED_PROBES_TO_CONFIRM = 3
#: A suspicion without that many unanswered probes is extended in such steps.
EVIDENCE_STEP_S = 0.25

#: A member is not probed because of the same suspicion again for so long: it still travels.
GOSSIP_PAUSE_S = 10.0
#: A tick that is later than this shows that this node's loop lags.
LAG_S = 0.1
MAX_SCORE = 7


@dataclass(slots=True)
class Member:
    """What is known of one node. `heard`: when its last own message arrived. `since`: when it was suspected, or
    removed; of one that is alive 0."""

    incarnation: int
    heard: float
    state: MemberState = MemberState.ALIVE
    since: float = 0.0
    deadline: float = 0.0
    probed: float = float("-inf")
    #: Calls in a row that it left unanswered, each with its retry.
    missed: int = 0
    #: Others report that it is dead or has left: this node's own probes decide.
    reported_dead: bool = False
    #: When it was probed because others suspect it.
    doubted: float = float("-inf")


class LocalHealth:
    """Lifeguard's local health: a node that lags doubts itself before it suspects others.

    A score: 0 is healthy; each sign that this node is slow raises it, each punctual tick lowers it.
    """

    def __init__(self) -> None:
        self.score = 0

    @property
    def stretch(self) -> float:
        """The factor of this node's time-outs."""
        return 1.0 + self.score

    def on_tick(self, lag_s: float) -> bool:
        """A timer fired this late. True: the loop lagged."""
        if lag_s > LAG_S:
            self.worsen()
            return True
        self.score = max(0, self.score - 1)
        return False

    def worsen(self) -> None:
        """A sign that this node is slow: a late timer, or others that suspect it."""
        self.score = min(MAX_SCORE, self.score + 1)


class FailureDetector:
    """The members of one node's view, the dead it remembers, and its own health."""

    def __init__(
        self, own_id: bytes, incarnation: int, settings: LivenessSettings, rng: random.Random, now: float
    ) -> None:
        self.own_id = own_id
        self.incarnation = incarnation
        self.settings = settings
        self.health = LocalHealth()
        self.leaving = False
        self._rng = rng
        self._members: dict[bytes, Member] = {}
        self._removed: dict[bytes, Member] = {}
        self._suspects: dict[bytes, None] = {}
        #: Deaths of nodes that this one does not know, and has passed on: their incarnations.
        self._passed: dict[bytes, int] = {}
        self._accused = float("-inf")
        self._deadlines: list[tuple[float, bytes]] = []  # a heap; those of suspicions that have ended stay until then
        self._order = ProbeOrder(own_id, rng)
        self._watched: dict[bytes, None] = {}
        self._next_round = now + settings.probe_interval_s * rng.random()
        self._planned = self._next_round
        self._next_purge = now

    # -- what is known -------------------------------------------------------------------------------------------

    @property
    def stretch(self) -> float:
        """The factor of this node's time-outs."""
        return self.health.stretch

    @property
    def suspects(self) -> int:
        return len(self._suspects)

    def is_alive(self, node_id: bytes) -> bool:
        return node_id in self._members

    def is_gone(self, node_id: bytes) -> bool:
        """Whether it is remembered as dead or as having left."""
        return node_id in self._removed

    def is_suspect(self, node_id: bytes) -> bool:
        return node_id in self._suspects

    def dead(self) -> list[bytes]:
        """The remembered dead, longest dead first, without those that left."""
        return [node_id for node_id, member in self._removed.items() if member.state is MemberState.DEAD]

    def next_deadline(self) -> float:
        """When `tick` is due."""
        while self._deadlines and not self._is_deadline(*self._deadlines[0]):
            heappop(self._deadlines)
        self._planned = min(self._next_round, self._deadlines[0][0]) if self._deadlines else self._next_round
        return self._planned

    def _is_deadline(self, deadline: float, node_id: bytes) -> bool:
        """Whether it is one still: suspicions end, and are extended."""
        return node_id in self._suspects and self._members[node_id].deadline == deadline

    # -- events --------------------------------------------------------------------------------------------------

    def watch(self, node_ids: Iterable[bytes]) -> None:
        """Probe these in every round; replaces the former ones."""
        self._watched = dict.fromkeys(sorted(node_ids))

    def on_response(self, node_id: bytes, incarnation: int, now: float) -> list[DetectorAction]:
        """It answered this node: a member from now on, whatever its state was."""
        if node_id in self._members:
            return self.on_heartbeat(node_id, incarnation, now)
        gone = self._removed.pop(node_id, None)
        self._members[node_id] = Member(incarnation, now)
        self._order.insert(node_id)
        if gone is None or gone.state is not MemberState.DEAD:
            return []
        # The sides of a healed partition: of those that removed it few would call it soon.
        return [Broadcast(Gossip(MemberState.ALIVE, node_id, incarnation), at_once=True)]

    def on_heartbeat(self, node_id: bytes, incarnation: int, now: float) -> list[DetectorAction]:
        """A message of a known member itself has arrived."""
        member = self._members.get(node_id)
        if member is None:
            return []
        member.heard, member.missed, member.reported_dead = now, 0, False
        member.incarnation = max(member.incarnation, incarnation)
        if member.state is not MemberState.SUSPECT:
            return []
        member.state = MemberState.ALIVE
        self._suspects.pop(node_id, None)
        return [StateChanged(node_id, "refuted", "it sent a message")]

    def on_movement(self, node_id: bytes, now: float) -> list[DetectorAction]:
        """Bytes of streams with it move: as good as a message of the start that is known."""
        member = self._members.get(node_id)
        return [] if member is None else self.on_heartbeat(node_id, member.incarnation, now)

    def on_timeout(self, node_id: bytes, now: float, *, others: Iterable[bytes]) -> list[DetectorAction]:
        """It answered neither a call nor its retry. `others` may be asked to ping it."""
        member = self._members.get(node_id)
        if member is None:
            return []
        member.missed += 1
        if member.reported_dead and member.state is not MemberState.SUSPECT:
            missed, suspected = member.missed, self._suspect(node_id, member, now, "others report it dead")
            member.missed = missed
            return [*suspected, *self._confirm_report(node_id, member, now)]
        if member.state is MemberState.SUSPECT:
            return self._confirm_report(node_id, member, now)
        if len(self._suspects) >= MAX_SUSPECTS_PER_ROUND:
            return self.on_unreachable(node_id, now, "it does not answer, as many others do not")
        helpers = [other for other in others if other != node_id and not self.is_suspect(other)]
        count = min(INDIRECT_PROBES, len(helpers))
        if count == 0:
            return self.on_unreachable(node_id, now, "it does not answer")
        return [SendPingRequest(node_id, tuple(self._rng.sample(helpers, count)))]

    def on_unreachable(self, node_id: bytes, now: float, reason: str) -> list[DetectorAction]:
        """Neither direct nor indirect pings reached it: suspect it, and send that to it and to others."""
        member = self._members.get(node_id)
        if member is None or member.state is MemberState.SUSPECT:
            return []
        news = Gossip(MemberState.SUSPECT, node_id, member.incarnation)
        return [*self._suspect(node_id, member, now, reason), SendNow(node_id, news), Broadcast(news)]

    def request_probe(self, node_id: bytes, now: float) -> list[DetectorAction]:
        """Probe it now: a caller has reason to doubt it."""
        member = self._members.get(node_id)
        if member is None or now - member.probed < PROBE_PAUSE_S:
            return []
        member.probed = now
        return [SendPing(node_id)]

    def declare_dead(self, node_id: bytes, now: float, reason: str) -> list[DetectorAction]:
        """It is certain that it is gone: another node answers at its address."""
        member = self._members.get(node_id)
        if member is None:
            return []
        news = Gossip(MemberState.DEAD, node_id, member.incarnation)
        return [*self._remove(node_id, now, MemberState.DEAD, reason), Broadcast(news)]

    def forget(self, node_id: bytes) -> None:
        """Drop a member that is of no use any more, whatever its state."""
        if self._members.pop(node_id, None) is not None:
            self._suspects.pop(node_id, None)

    def on_leave(self, node_id: bytes, now: float) -> list[DetectorAction]:
        """Its own message announces that it leaves."""
        member = self._members.get(node_id)
        if member is None:
            return []
        news = Gossip(MemberState.LEFT, node_id, member.incarnation)
        return [*self._remove(node_id, now, MemberState.LEFT, "it left"), Broadcast(news)]

    def leave_notice(self) -> Gossip:
        """The gossip that announces the leave of this node."""
        self.leaving = True
        return Gossip(MemberState.LEFT, self.own_id, self.incarnation)

    # -- time ----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[DetectorAction]:
        """Expire suspicions and begin a probe round when one is due."""
        lag_s = max(0.0, now - self._planned)
        if self.health.on_tick(lag_s):
            self._deadlines.clear()
            for node_id in self._suspects:  # this node lagged: no deadline may pass meanwhile
                self._set_deadline(node_id, self._members[node_id].deadline + lag_s)
        actions: list[DetectorAction] = []
        for node_id in self._suspects_due(now):
            member = self._members[node_id]
            if member.missed < UNANSWERED_PROBES_TO_CONFIRM:
                self._set_deadline(node_id, now + EVIDENCE_STEP_S)  # the rounds continue to probe it
                actions += self._probe_out_of_turn(node_id, member, now)
            else:
                reason = f"suspected for {now - member.since:.1f} s and silent"
                news = Gossip(MemberState.DEAD, node_id, member.incarnation)
                actions += self._remove(node_id, now, MemberState.DEAD, reason)
                actions += [SendNow(node_id, news), Broadcast(news, at_once=True)]
        if now >= self._next_round:
            self._next_round = now + self.settings.probe_interval_s
            actions += self._begin_round(now)
            if now >= self._next_purge or len(self._removed) > MAX_REMEMBERED:
                self._next_purge = now + PURGE_INTERVAL_S
                self._purge(now)
        return actions

    def _suspects_due(self, now: float) -> list[bytes]:
        """Suspects whose deadline has passed, longest suspected first. When half of a swarm dies there are hundreds of
        suspects at many ticks: only those that are due are looked at."""
        due: dict[bytes, None] = {}
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, node_id = heappop(self._deadlines)
            if self._is_deadline(deadline, node_id):
                due[node_id] = None
        return list(due) if len(due) < 2 else [node_id for node_id in self._suspects if node_id in due]

    def _set_deadline(self, node_id: bytes, deadline: float) -> None:
        self._members[node_id].deadline = deadline
        heappush(self._deadlines, (deadline, node_id))

    def _probe_out_of_turn(self, node_id: bytes, member: Member, now: float) -> list[DetectorAction]:
        """After twice its time: of hundreds of suspects each waits long for its turn, and some of them may be alive."""
        pause_s = PROBE_TIMEOUT_S * self.stretch
        if now < member.since + 2 * self.settings.suspicion_s or now - member.probed < pause_s:
            return []
        member.probed = now
        return [SendPing(node_id)]

    def _begin_round(self, now: float) -> list[DetectorAction]:
        stale = now - FRESH_SHARE * self.settings.probe_interval_s
        due = dict.fromkeys(node_id for node_id in self._watched if self._is_due(node_id, stale))
        due |= dict.fromkeys(self._suspects_in_turn(stale))
        due |= dict.fromkeys(self._order.next_due(self._members, lambda node_id: self._is_due(node_id, stale)))
        for node_id in due:
            self._members[node_id].probed = now
        return [SendPing(node_id) for node_id in due]

    def _suspects_in_turn(self, stale: float) -> list[bytes]:
        """Suspects that were not probed just now, longest first."""
        waiting = [node_id for node_id in self._suspects if self._members[node_id].probed <= stale]
        return sorted(waiting, key=lambda node_id: self._members[node_id].probed)[:MAX_SUSPECTS_PER_ROUND]

    def _is_due(self, node_id: bytes, stale: float) -> bool:
        member = self._members.get(node_id)
        return member is not None and member.heard <= stale

    def _purge(self, now: float) -> None:
        for node_id, member in list(self._removed.items()):
            memory = DEAD_MEMORY_S if member.state is MemberState.DEAD else LEFT_MEMORY_S
            if now - member.since > memory or len(self._removed) > MAX_REMEMBERED:
                del self._removed[node_id]

    # -- gossip --------------------------------------------------------------------------------------------------

    def on_gossip(self, news: Gossip, sender: bytes, now: float) -> list[DetectorAction]:
        """One update that a datagram of `sender` carried."""
        if news.node_id == self.own_id:
            return self._on_accusation(news, sender, now)
        kind = _STATES[news.kind]
        member = self._members.get(news.node_id)
        if member is None:
            return self._on_gossip_of_others(news, kind, now)
        if news.incarnation < member.incarnation or kind is MemberState.ALIVE:
            return []
        if kind is MemberState.LEFT and sender == news.node_id:
            return self.on_leave(news.node_id, now)
        if now - member.heard < self.settings.probe_interval_s:
            return []
        return self._doubt(news, kind, member, now)

    def _on_accusation(self, news: Gossip, sender: bytes, now: float) -> list[DetectorAction]:
        """Others doubt this node: ping who said so, for any message of its own ends a suspicion there. One that has
        removed this node already verifies it."""
        if self.leaving or news.incarnation != self.incarnation or news.kind == MemberState.ALIVE:
            return []
        if now - self._accused >= self.settings.probe_interval_s:
            self._accused = now
            self.health.worsen()
        return self.request_probe(sender, now)

    def _on_gossip_of_others(self, news: Gossip, kind: MemberState, now: float) -> list[DetectorAction]:
        """About a node that is no member: a dead one that answered others is called, once in a while."""
        gone = self._removed.get(news.node_id)
        if gone is None:
            return self._pass_on(news) if kind is MemberState.DEAD else []
        if kind is not MemberState.ALIVE or now - gone.doubted < GOSSIP_PAUSE_S or gone.state is MemberState.LEFT:
            return []
        gone.doubted = now
        return [SendPing(news.node_id), Broadcast(news)]

    def _pass_on(self, news: Gossip) -> list[DetectorAction]:
        """The death of a node that this one does not know. Those that do may be few, as of one that has just joined,
        and would not reach each other. Each death once."""
        if news.incarnation <= self._passed.get(news.node_id, -1):
            return []
        self._passed.pop(news.node_id, None)
        self._passed[news.node_id] = news.incarnation
        if len(self._passed) > MAX_PASSED:
            del self._passed[next(iter(self._passed))]
        return [Broadcast(news)]

    def _doubt(self, news: Gossip, kind: MemberState, member: Member, now: float) -> list[DetectorAction]:
        """Others suspect it, or report that it is dead or has left: ask it. Only a suspicion is passed on unasked."""
        if kind is MemberState.SUSPECT:
            if member.state is MemberState.SUSPECT or now - member.doubted < GOSSIP_PAUSE_S:
                return []
            member.doubted = now
            return [*self.request_probe(news.node_id, now), Broadcast(news)]
        if member.reported_dead:
            return []
        member.reported_dead = True
        if member.state is MemberState.SUSPECT:
            return self._confirm_report(news.node_id, member, now)
        return self.request_probe(news.node_id, now)

    def _confirm_report(self, node_id: bytes, member: Member, now: float) -> list[DetectorAction]:
        """A suspect that others report dead is probed without a pause, and dead once it has left enough unanswered."""
        if not member.reported_dead:
            return []
        if member.missed < UNANSWERED_PROBES_TO_CONFIRM:
            member.probed = now
            return [SendPing(node_id)]
        news = Gossip(MemberState.DEAD, node_id, member.incarnation)
        reason = "others report it dead, and it does not answer this node"
        return [*self._remove(node_id, now, MemberState.DEAD, reason), Broadcast(news)]

    # -- transitions ---------------------------------------------------------------------------------------------

    def _suspect(self, node_id: bytes, member: Member, now: float, reason: str) -> list[DetectorAction]:
        if member.state is MemberState.SUSPECT:
            return []
        member.state = MemberState.SUSPECT
        member.since = now
        member.missed = 0
        self._suspects[node_id] = None
        self._set_deadline(node_id, now + self.settings.suspicion_s)
        return [StateChanged(node_id, "suspect", reason)]

    def _remove(self, node_id: bytes, now: float, state: MemberState, reason: str) -> list[DetectorAction]:
        last = self._members.pop(node_id)
        self._suspects.pop(node_id, None)
        last.state, last.since = state, now
        self._removed[node_id] = last
        kind: Literal["dead", "left"] = "left" if state is MemberState.LEFT else "dead"
        return [StateChanged(node_id, kind, reason)]


#: So many of the closest have turns of their own; with up to twice as many members nobody waits long for one.
NEIGHBOURS = 20


class _Turns:
    """A shuffled list of members, and the position in it."""

    __slots__ = ("_order", "_rng", "_turn")

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._order: list[bytes] = []
        self._turn = 0

    def insert(self, node_id: bytes) -> None:
        self._order.insert(self._rng.randint(self._turn, len(self._order)), node_id)

    def next_due(self, again: Callable[[], list[bytes]], is_due: Callable[[bytes], bool]) -> list[bytes]:
        """The next member that is due, if any is; after a pass the turns begin `again` with these."""
        for _ in range(len(self._order) or 1):
            if self._turn >= len(self._order):
                self._order = again()
                self._rng.shuffle(self._order)
                self._turn = 0
                if not self._order:
                    return []
            node_id = self._order[self._turn]
            self._turn += 1
            if is_due(node_id):
                return [node_id]
        return []


class ProbeOrder:
    """The turns of all members, and those of the closest."""

    def __init__(self, own_id: bytes, rng: random.Random) -> None:
        self._own = int.from_bytes(own_id, "big")
        self._all = _Turns(rng)
        self._near = _Turns(rng)
        self._radius = 0  # of the closest when their turns began: a new member within it is one of them

    def _distance(self, node_id: bytes) -> int:
        return int.from_bytes(node_id, "big") ^ self._own

    def insert(self, node_id: bytes) -> None:
        """A new member gets a random place in the rest of this pass: its first probe is not late, nor foreseeable."""
        self._all.insert(node_id)
        if self._distance(node_id) < self._radius:
            self._near.insert(node_id)

    def next_due(self, members: Collection[bytes], is_due: Callable[[bytes], bool]) -> list[bytes]:
        """The next member that is due, and the next of the closest; after a pass all `members` are reshuffled. Removed
        ones are never due."""

        def closest() -> list[bytes]:
            nearest = nsmallest(NEIGHBOURS, members, key=self._distance)
            self._radius = self._distance(nearest[-1])
            return nearest

        chosen = self._all.next_due(lambda: list(members), is_due)
        return chosen + self._near.next_due(closest, is_due) if len(members) > 2 * NEIGHBOURS else chosen
