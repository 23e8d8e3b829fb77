"""SWIM's failure detector (Das et al. 2002) with Lifeguard's suspicion and local health (Dadgar et al. 2018).

Decides which members to probe, when a silent member is suspected, when a suspected one is dead, and what to gossip.
Takes events with the time, and sends through the `Network` that it is given.

A member that does not answer a ping is pinged through others, and if that fails too it is suspected. The suspicion is
gossiped. Gossip is a reason to probe and no evidence: a node removes a member only after the member left this node's
own probes unanswered, and any message of the member itself ends the suspicion. A member that hears that it is suspected
pings who said so. So nobody refutes anything, and gossip carries no counts. A node whose own event loop lags extends
every deadline by the lag, and all its time-outs.

A watched member that crashed is detected within 6 s. It is fresh for 0.5 s, the next round comes within 1 s,
and both pings take 0.5 s. The suspicion takes 3 s and its last probe 0.5 s. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

from p2pnode.overlay.kademlia.calls import PROBE_TIMEOUT_S
from p2pnode.overlay.kademlia.messages import Gossip, MemberState
from p2pnode.overlay.membership.network import Network
from p2pnode.overlay.membership.probe_order import ProbeOrder
from p2pnode.overlay.waits import LocalHealth

#: `MemberState(n)` as a table, because every datagram may carry four.
_STATES = tuple(MemberState)
#: Seconds between two rounds of probes; a watched member gets one in every round. Longer than `PROBE_TIMEOUT_S`, so
#: that a probe ends before the next one begins.
PROBE_INTERVAL_S = 1.0
#: Seconds a suspected member has to answer before it counts as dead.
SUSPICION_S = 3.0
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
#: What the detector finds of a member.
StateChange = Literal["suspect", "refuted", "dead", "left"]


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


class FailureDetector:
    """The members of one node's view, the dead it remembers, and its own health."""

    def __init__(
        self,
        own_id: bytes,
        incarnation: int,
        rng: random.Random,
        now: float,
        network: Network,
        on_change: Callable[[bytes, StateChange, str], None],
    ) -> None:
        """`on_change` gets each change of a member, and its reason."""
        self.own_id = own_id
        self.incarnation = incarnation
        self.health = LocalHealth()
        self.leaving = False
        self._rng = rng
        self._network = network
        self._on_change = on_change
        self._members: dict[bytes, Member] = {}
        self._removed: dict[bytes, Member] = {}
        self._suspects: dict[bytes, None] = {}
        #: Deaths of nodes that this one does not know, and has passed on: their incarnations.
        self._passed: dict[bytes, int] = {}
        self._accused = float("-inf")
        self._deadlines: list[tuple[float, bytes]] = []  # a heap; those of suspicions that have ended stay until then
        self._order = ProbeOrder(own_id, rng)
        self._watched: dict[bytes, None] = {}
        self._next_round = now + PROBE_INTERVAL_S * rng.random()
        self._planned = self._next_round
        self._next_purge = now

    # -- what is known -------------------------------------------------------------------------------------------

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

    def on_response(self, node_id: bytes, incarnation: int, now: float) -> None:
        """It answered this node: a member from now on, whatever its state was."""
        if node_id in self._members:
            self.on_heartbeat(node_id, incarnation, now)
            return
        gone = self._removed.pop(node_id, None)
        self._members[node_id] = Member(incarnation, now)
        self._order.insert(node_id)
        if gone is not None and gone.state is MemberState.DEAD:
            # The sides of a healed partition: of those that removed it few would call it soon.
            self._network.broadcast(Gossip(MemberState.ALIVE, node_id, incarnation), at_once=True)

    def on_heartbeat(self, node_id: bytes, incarnation: int, now: float) -> None:
        """A message of a known member itself has arrived."""
        member = self._members.get(node_id)
        if member is None:
            return
        member.heard, member.missed, member.reported_dead = now, 0, False
        member.incarnation = max(member.incarnation, incarnation)
        if member.state is MemberState.SUSPECT:
            member.state = MemberState.ALIVE
            self._suspects.pop(node_id, None)
            self._on_change(node_id, "refuted", "it sent a message")

    def on_movement(self, node_id: bytes, now: float) -> None:
        """Bytes of streams with it move: as good as a message of the start that is known."""
        if (member := self._members.get(node_id)) is not None:
            self.on_heartbeat(node_id, member.incarnation, now)

    def on_timeout(self, node_id: bytes, now: float, *, others: Iterable[bytes]) -> None:
        """It answered neither a call nor its retry. `others` may be asked to ping it."""
        member = self._members.get(node_id)
        if member is None:
            return
        member.missed += 1
        if member.state is MemberState.SUSPECT or member.reported_dead:
            self._suspect(node_id, member, now, "others report it dead")
            self._confirm_report(node_id, member, now)
            return
        if len(self._suspects) >= MAX_SUSPECTS_PER_ROUND:
            self.on_unreachable(node_id, now, "it does not answer, as many others do not")
            return
        helpers = [other for other in others if other != node_id and not self.is_suspect(other)]
        count = min(INDIRECT_PROBES, len(helpers))
        if count == 0:
            self.on_unreachable(node_id, now, "it does not answer")
        else:
            self._network.probe_through(node_id, self._rng.sample(helpers, count))

    def on_unreachable(self, node_id: bytes, now: float, reason: str) -> None:
        """Neither direct nor indirect pings reached it: suspect it, and send that to it and to others."""
        member = self._members.get(node_id)
        if member is None or member.state is MemberState.SUSPECT:
            return
        member.missed = 0
        self._suspect(node_id, member, now, reason)
        news = Gossip(MemberState.SUSPECT, node_id, member.incarnation)
        self._network.tell(node_id, news)
        self._network.broadcast(news)

    def request_probe(self, node_id: bytes, now: float) -> bool:
        """Probe it now, for a caller has reason to doubt it. False: that was just done, or it is no member."""
        member = self._members.get(node_id)
        if member is None or now - member.probed < PROBE_PAUSE_S:
            return False
        member.probed = now
        self._network.probe(node_id)
        return True

    def declare_dead(self, node_id: bytes, now: float, reason: str) -> None:
        """It is certain that it is gone: another node answers at its address."""
        self._remove(node_id, now, MemberState.DEAD, reason)

    def forget(self, node_id: bytes) -> None:
        """Drop a member that is of no use any more, whatever its state."""
        if self._members.pop(node_id, None) is not None:
            self._suspects.pop(node_id, None)

    def on_leave(self, node_id: bytes, now: float) -> None:
        """Its own message announces that it leaves."""
        self._remove(node_id, now, MemberState.LEFT, "it left")

    def leave_notice(self) -> Gossip:
        """The gossip that announces the leave of this node."""
        self.leaving = True
        return Gossip(MemberState.LEFT, self.own_id, self.incarnation)

    # -- time ----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Expire suspicions and begin a probe round when one is due."""
        lag_s = max(0.0, now - self._planned)
        if self.health.on_tick(lag_s):
            self._deadlines.clear()
            for node_id in self._suspects:  # this node lagged: no deadline may pass meanwhile
                self._set_deadline(node_id, self._members[node_id].deadline + lag_s)
        silent: list[tuple[bytes, float]] = []
        probes: list[bytes] = []
        for node_id in self._suspects_due(now):
            member = self._members[node_id]
            if member.missed >= UNANSWERED_PROBES_TO_CONFIRM:
                silent.append((node_id, now - member.since))
                continue
            self._set_deadline(node_id, now + EVIDENCE_STEP_S)  # the rounds continue to probe it
            if self._is_overdue(member, now):
                member.probed = now
                probes.append(node_id)
        for node_id, silent_s in silent:
            self._remove(node_id, now, MemberState.DEAD, f"suspected for {silent_s:.1f} s and silent", at_once=True)
        if now >= self._next_round:
            self._next_round = now + PROBE_INTERVAL_S
            probes += self._begin_round(now)
            if now >= self._next_purge or len(self._removed) > MAX_REMEMBERED:
                self._next_purge = now + PURGE_INTERVAL_S
                self._purge(now)
        for node_id in probes:
            self._network.probe(node_id)

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

    def _is_overdue(self, member: Member, now: float) -> bool:
        """Whether twice its time has passed, and its last probe too: of hundreds of suspects each waits long for its
        turn, and some of them may be alive."""
        pause_s = PROBE_TIMEOUT_S * self.health.stretch
        return now >= member.since + 2 * SUSPICION_S and now - member.probed >= pause_s

    def _begin_round(self, now: float) -> list[bytes]:
        """Whom to probe now."""
        stale = now - FRESH_SHARE * PROBE_INTERVAL_S
        due = dict.fromkeys(node_id for node_id in self._watched if self._is_due(node_id, stale))
        due |= dict.fromkeys(self._suspects_in_turn(stale))
        due |= dict.fromkeys(self._order.next_due(self._members, lambda node_id: self._is_due(node_id, stale)))
        for node_id in due:
            self._members[node_id].probed = now
        return list(due)

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

    def on_gossip(self, news: Gossip, sender: bytes, now: float) -> None:
        """One update that a datagram of `sender` carried."""
        if news.node_id == self.own_id:
            self._on_accusation(news, sender, now)
            return
        kind = _STATES[news.kind]
        member = self._members.get(news.node_id)
        if member is None:
            self._on_gossip_of_others(news, kind, now)
        elif news.incarnation < member.incarnation or kind is MemberState.ALIVE:
            return
        elif kind is MemberState.LEFT and sender == news.node_id:
            self.on_leave(news.node_id, now)
        elif now - member.heard >= PROBE_INTERVAL_S:
            self._doubt(news, kind, member, now)

    def _on_accusation(self, news: Gossip, sender: bytes, now: float) -> None:
        """Others doubt this node: ping who said so, for any message of its own ends a suspicion there. One that has
        removed this node already verifies it."""
        if self.leaving or news.incarnation != self.incarnation or news.kind == MemberState.ALIVE:
            return
        if now - self._accused >= PROBE_INTERVAL_S:
            self._accused = now
            self.health.worsen()
        self.request_probe(sender, now)

    def _on_gossip_of_others(self, news: Gossip, kind: MemberState, now: float) -> None:
        """About a node that is no member: a dead one that answered others is called, once in a while."""
        gone = self._removed.get(news.node_id)
        if gone is None:
            if kind is MemberState.DEAD:
                self._pass_on(news)
        elif kind is MemberState.ALIVE and now - gone.doubted >= GOSSIP_PAUSE_S and gone.state is MemberState.DEAD:
            gone.doubted = now
            self._network.probe(news.node_id)
            self._network.broadcast(news)

    def _pass_on(self, news: Gossip) -> None:
        """The death of a node that this one does not know. Those that do may be few, as of one that has just joined,
        and would not reach each other. Each death once."""
        if news.incarnation <= self._passed.get(news.node_id, -1):
            return
        self._passed.pop(news.node_id, None)
        self._passed[news.node_id] = news.incarnation
        if len(self._passed) > MAX_PASSED:
            del self._passed[next(iter(self._passed))]
        self._network.broadcast(news)

    def _doubt(self, news: Gossip, kind: MemberState, member: Member, now: float) -> None:
        """Others suspect it, or report that it is dead or has left: ask it. Only a suspicion is passed on unasked."""
        if kind is MemberState.SUSPECT:
            if member.state is not MemberState.SUSPECT and now - member.doubted >= GOSSIP_PAUSE_S:
                member.doubted = now
                self.request_probe(news.node_id, now)
                self._network.broadcast(news)
        elif not member.reported_dead:
            member.reported_dead = True
            if member.state is MemberState.SUSPECT:
                self._confirm_report(news.node_id, member, now)
            else:
                self.request_probe(news.node_id, now)

    def _confirm_report(self, node_id: bytes, member: Member, now: float) -> None:
        """A suspect that others report dead is probed without a pause, and dead once it has left enough unanswered."""
        if not member.reported_dead:
            return
        if member.missed < UNANSWERED_PROBES_TO_CONFIRM:
            member.probed = now
            self._network.probe(node_id)
        else:
            reason = "others report it dead, and it does not answer this node"
            self._remove(node_id, now, MemberState.DEAD, reason)

    # -- transitions ---------------------------------------------------------------------------------------------

    def _suspect(self, node_id: bytes, member: Member, now: float, reason: str) -> None:
        if member.state is MemberState.SUSPECT:
            return
        member.state = MemberState.SUSPECT
        member.since = now
        self._suspects[node_id] = None
        self._set_deadline(node_id, now + SUSPICION_S)
        self._on_change(node_id, "suspect", reason)

    def _remove(self, node_id: bytes, now: float, state: MemberState, reason: str, *, at_once: bool = False) -> None:
        """A member is dead or has left; `at_once`: tell it and others now."""
        last = self._members.pop(node_id, None)
        if last is None:
            return
        self._suspects.pop(node_id, None)
        last.state, last.since = state, now
        self._removed[node_id] = last
        self._on_change(node_id, "left" if state is MemberState.LEFT else "dead", reason)
        news = Gossip(state, node_id, last.incarnation)
        if at_once:
            self._network.tell(node_id, news)
        self._network.broadcast(news, at_once=at_once)
