"""Who is alive: SWIM's failure detector as plain rules, with Lifeguard's local health.

Decides whom to probe, when a silent member is suspected, when a suspected one is dead, and what to tell others;
never sends, never reads a clock. Rules: reference/overlay-practice.md section 1 and DESIGN section 4.

A member is probed directly, then through others, then suspected; it is told so and may refute with a higher
refutation count. Whoever suspects it, by hearsay too, goes on probing it and telling it: whatever it says to us itself,
later than the accusation, clears it as well, and nobody is buried whom we did not find silent ourselves meanwhile.
At equal incarnation and refutation: left and dead > suspect > alive. A node whose own loop lags blames itself first:
every deadline moves by the lag, and time-outs stretch.

The detection bound for watched members with default settings (seconds): 0.5 still fresh + 1 until the next round +
0.5 direct + 0.5 indirect + 3 suspicion + 0.5 until its last probe has failed = 6.

Pure.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from overlay.kademlia.messages import Gossip, MemberState
from overlay.membership.actions import (
    Broadcast,
    DetectorAction,
    SendNow,
    SendPing,
    SendPingRequest,
    StateChanged,
)
from overlay.settings import LivenessSettings

#: Heard from within this share of the probe interval: no probe is due.
FRESH_SHARE = 0.5
#: A hint about a member that was probed this recently adds nothing.
PROBE_PAUSE_S = 0.2
#: The dead are remembered, and dialled now and then, this long: partitions heal within it. Those who left, shorter.
DEAD_MEMORY_S = 3600.0
LEFT_MEMORY_S = 120.0
MAX_REMEMBERED = 1024
#: Most suspects probed in a round. Where more die at once they take turns, so that probes stay few.
MAX_SUSPECTS_PER_ROUND = 16
#: Questions of ours that a suspect leaves unanswered, one after another, before it is dead. One is lost with its retry
#: about once in a hundred at 5 % loss: a hundred nodes that believed a false death after one would keep it alive.
UNANSWERED_PROBES_TO_CONFIRM = 3
#: A suspicion that ends before that goes on in such steps, until it lasted twice as long.
EVIDENCE_STEP_S = 0.25
#: A tick later than this means that our own loop lags.
LAG_S = 0.1
#: Lifeguard's awareness: 0 is healthy; time-outs stretch by (1 + score).
MAX_HEALTH = 7


@dataclass(slots=True)
class _Member:
    """What we hold about one node. `heard` is when it last spoke to us itself; `since` when its state changed."""

    state: MemberState
    incarnation: int
    refutation: int
    heard: float
    since: float
    deadline: float = 0.0
    probed: float = float("-inf")
    #: Questions of ours in a row that it left unanswered, retries included.
    missed: int = 0
    #: Suspected, and others even say that it is dead: our next question decides.
    reported_dead: bool = False
    #: Newest leave or refutation that others told of: incarnation, refutation, kind.
    unconfirmed_update: tuple[int, int, int] = (-1, -1, -1)

    def rank(self) -> tuple[int, int, int]:
        return (self.incarnation, self.refutation, min(self.state, MemberState.DEAD))


class FailureDetector:
    """The members of one node's view, the dead it remembers, and its own health."""

    def __init__(
        self, own_id: bytes, incarnation: int, settings: LivenessSettings, rng: random.Random, now: float
    ) -> None:
        self.own_id = own_id
        self.incarnation = incarnation
        self.refutation = 0
        self.settings = settings
        self.health = 0
        self.leaving = False
        self._rng = rng
        self._members: dict[bytes, _Member] = {}
        self._removed: dict[bytes, _Member] = {}
        self._suspects: dict[bytes, None] = {}
        self._order: list[bytes] = []
        self._turn = 0
        self._watched: dict[bytes, None] = {}
        self._next_round = now + settings.probe_interval_s * rng.random()
        self._planned = self._next_round

    # -- what is known -------------------------------------------------------------------------------------------

    @property
    def stretch(self) -> float:
        """By how much our own time-outs stretch."""
        return 1.0 + self.health

    @property
    def suspects(self) -> int:
        return len(self._suspects)

    def is_alive(self, node_id: bytes) -> bool:
        return node_id in self._members

    def is_gone(self, node_id: bytes) -> bool:
        """Remembered as dead or as having left."""
        return node_id in self._removed

    def is_suspect(self, node_id: bytes) -> bool:
        return node_id in self._suspects

    def dead(self) -> list[bytes]:
        """The remembered dead, longest dead first; those who left are not among them."""
        return [node_id for node_id, member in self._removed.items() if member.state is MemberState.DEAD]

    def next_deadline(self) -> float:
        """When `tick` is due."""
        due = self._next_round
        for node_id in self._suspects:
            due = min(due, self._members[node_id].deadline)
        self._planned = due
        return due

    # -- what happens --------------------------------------------------------------------------------------------

    def watch(self, node_ids: Iterable[bytes]) -> None:
        """Partners, probed in every round; replaces the former ones."""
        self._watched = dict.fromkeys(sorted(node_ids))

    def on_response(self, node_id: bytes, incarnation: int, now: float) -> list[DetectorAction]:
        """It answered us: a member from now on, whatever was thought of it."""
        if node_id in self._members:
            return self.on_heartbeat(node_id, incarnation, now)
        gone = self._removed.pop(node_id, None)
        member = _Member(MemberState.ALIVE, incarnation, 0, now, now)
        actions: list[DetectorAction] = []
        if gone is not None and gone.incarnation == incarnation:
            member.refutation = gone.refutation
            if gone.state is MemberState.DEAD:
                # Old news of its death is still on its way; only a refutation of its own outranks that.
                accusation = Gossip(MemberState.DEAD, node_id, incarnation, gone.refutation)
                actions.append(SendNow(node_id, accusation))
        self._members[node_id] = member
        # SWIM: a newcomer enters at a random place, so that the time to its first probe is bounded and varied.
        self._order.insert(self._rng.randint(self._turn, len(self._order)), node_id)
        return actions

    def on_heartbeat(self, node_id: bytes, incarnation: int, now: float) -> list[DetectorAction]:
        """A known member spoke to us itself."""
        member = self._members.get(node_id)
        if member is None:
            return []
        member.heard, member.missed = now, 0
        if incarnation > member.incarnation:
            member.incarnation, member.refutation = incarnation, 0
        if (
            member.unconfirmed_update[:2] > (member.incarnation, member.refutation)
            and member.unconfirmed_update[0] == incarnation
        ):
            # It was said to have refuted, and here it is: what it refuted is old news.
            member.refutation = member.unconfirmed_update[1]
        if member.state is MemberState.SUSPECT:
            return self._end_suspicion(node_id, member, now, "it spoke to us", by_itself=True)
        return []

    def on_timeout(self, node_id: bytes, now: float, *, others: Iterable[bytes]) -> list[DetectorAction]:
        """A direct probe with its retry found nothing. `others` may be asked to try."""
        member = self._members.get(node_id)
        if member is None:
            return []
        member.missed += 1
        if member.state is MemberState.SUSPECT:
            return self._confirm_report(node_id, member, now) if member.reported_dead else []
        helpers = [other for other in others if other != node_id and not self.is_suspect(other)]
        count = min(self.settings.indirect_probes, len(helpers))
        if count == 0:
            return self.on_unreachable(node_id, now, "it does not answer")
        return [SendPingRequest(node_id, tuple(self._rng.sample(helpers, count)))]

    def on_unreachable(self, node_id: bytes, now: float, reason: str) -> list[DetectorAction]:
        """Nobody reached it: suspect it, and say so to it and to others."""
        member = self._members.get(node_id)
        if member is None or member.state is MemberState.SUSPECT:
            return []
        news = Gossip(MemberState.SUSPECT, node_id, member.incarnation, member.refutation)
        return [*self._suspect(node_id, member, now, reason), SendNow(node_id, news), Broadcast(news)]

    def request_probe(self, node_id: bytes, now: float) -> list[DetectorAction]:
        """Somebody has reason to doubt it: probe now."""
        member = self._members.get(node_id)
        if member is None or now - member.probed < PROBE_PAUSE_S:
            return []
        member.probed = now
        return [SendPing(node_id)]

    def declare_dead(self, node_id: bytes, now: float, reason: str) -> list[DetectorAction]:
        """Certain knowledge: another node lives at its address."""
        member = self._members.get(node_id)
        if member is None:
            return []
        news = Gossip(MemberState.DEAD, node_id, member.incarnation, member.refutation)
        return [*self._remove(node_id, member, now, MemberState.DEAD, reason), Broadcast(news)]

    def forget(self, node_id: bytes) -> None:
        """Drop a member without judging it: it is of no use to us any more."""
        if self._members.pop(node_id, None) is not None:
            self._suspects.pop(node_id, None)

    def forget_dead(self, node_id: bytes) -> None:
        self._removed.pop(node_id, None)

    def on_leave(self, node_id: bytes, now: float) -> list[DetectorAction]:
        """It says itself that it leaves."""
        member = self._members.get(node_id)
        if member is None:
            return []
        news = Gossip(MemberState.LEFT, node_id, member.incarnation, member.refutation)
        return [*self._remove(node_id, member, now, MemberState.LEFT, "it left"), Broadcast(news)]

    def leave_notice(self) -> Gossip:
        """What this node tells when it leaves."""
        self.leaving = True
        return Gossip(MemberState.LEFT, self.own_id, self.incarnation, self.refutation)

    # -- time ----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[DetectorAction]:
        """Expire suspicions and begin a probe round when one is due."""
        self._update_local_health(max(0.0, now - self._planned))
        actions: list[DetectorAction] = []
        for node_id in list(self._suspects):
            member = self._members[node_id]
            if now >= member.deadline and not self._is_proven_silent(member, now):
                member.deadline = now + EVIDENCE_STEP_S  # the rounds go on asking it
            elif now >= member.deadline:
                reason = f"suspected for {now - member.since:.1f} s and silent"
                news = Gossip(MemberState.DEAD, node_id, member.incarnation, member.refutation)
                actions += self._remove(node_id, member, now, MemberState.DEAD, reason)
                actions += [SendNow(node_id, news), Broadcast(news, at_once=True)]
        if now >= self._next_round:
            self._next_round = now + self.settings.probe_interval_s
            actions += self._begin_round(now)
            self._purge(now)
        return actions

    def _is_proven_silent(self, member: _Member, now: float) -> bool:
        """We asked it since it is suspected, and it did not answer; or there are too many suspects to ask them all."""
        return member.missed >= UNANSWERED_PROBES_TO_CONFIRM or now >= member.since + 2 * self.settings.suspicion_s

    def _update_local_health(self, lag_s: float) -> None:
        """Lifeguard: a lag is our own fault, so nobody's deadline may pass during it."""
        if lag_s > LAG_S:
            self.health = min(MAX_HEALTH, self.health + 1)
            for node_id in self._suspects:
                self._members[node_id].deadline += lag_s
        elif self.health:
            self.health -= 1

    def _begin_round(self, now: float) -> list[DetectorAction]:
        stale = now - FRESH_SHARE * self.settings.probe_interval_s
        suspects = self._suspects_in_turn(stale)
        due = dict.fromkeys(node_id for node_id in self._watched if self._is_due(node_id, stale))
        due |= dict.fromkeys(suspects)
        chosen = self._next_in_turn(stale)
        if chosen is not None:
            due[chosen] = None
        for node_id in due:
            self._members[node_id].probed = now
        # memberlist: a suspect is told with every probe, because its refutation is what the others wait for.
        return [*(SendPing(node_id) for node_id in due), *(SendNow(each, self._accusation(each)) for each in suspects)]

    def _accusation(self, node_id: bytes) -> Gossip:
        member = self._members[node_id]
        return Gossip(MemberState.SUSPECT, node_id, member.incarnation, member.refutation)

    def _suspects_in_turn(self, stale: float) -> list[bytes]:
        """Those not asked just now, longest unasked first: an answer ends the suspicion whatever became of the news."""
        waiting = [node_id for node_id in self._suspects if self._members[node_id].probed <= stale]
        return sorted(waiting, key=lambda node_id: self._members[node_id].probed)[:MAX_SUSPECTS_PER_ROUND]

    def _is_due(self, node_id: bytes, stale: float) -> bool:
        member = self._members.get(node_id)
        return member is not None and member.heard <= stale

    def _next_in_turn(self, stale: float) -> bytes | None:
        """Round-robin over a shuffled list, so that everybody's turn comes within one pass."""
        for _ in range(len(self._order)):
            if self._turn >= len(self._order):
                self._order = list(self._members)
                self._rng.shuffle(self._order)
                self._turn = 0
                if not self._order:
                    return None
            node_id = self._order[self._turn]
            self._turn += 1
            if self._is_due(node_id, stale):
                return node_id
        return None

    def _purge(self, now: float) -> None:
        for node_id, member in list(self._removed.items()):
            memory = DEAD_MEMORY_S if member.state is MemberState.DEAD else LEFT_MEMORY_S
            if now - member.since > memory or len(self._removed) > MAX_REMEMBERED:
                del self._removed[node_id]

    # -- what others say -----------------------------------------------------------------------------------------

    def on_gossip(self, news: Gossip, sender: bytes, now: float) -> list[DetectorAction]:
        """One piece of news from `sender`."""
        if news.node_id == self.own_id:
            return self._refute(news, sender)
        kind = MemberState(news.kind)
        member = self._members.get(news.node_id)
        if member is None:
            return self._on_gossip_of_removed(news, kind)
        if (news.incarnation, news.refutation, min(kind, MemberState.DEAD)) <= member.rank():
            return []
        match kind:
            case MemberState.ALIVE | MemberState.LEFT if sender != news.node_id:
                return self._note_unconfirmed(news, kind, member, now)
            case MemberState.ALIVE:
                return self._accept_refutation(news, member, now)
            case MemberState.LEFT:
                actions = self._remove(news.node_id, member, now, kind, "it left")
                return [*actions, Broadcast(news)]
            case MemberState.SUSPECT | MemberState.DEAD:
                return self._accept_accusation(news, kind, member, now)

    def _refute(self, news: Gossip, sender: bytes) -> list[DetectorAction]:
        """SWIM: refute with a higher count. News about an older start of ours refute themselves by the heartbeat."""
        ill = news.kind in (MemberState.SUSPECT, MemberState.DEAD, MemberState.LEFT)
        if not ill or self.leaving or news.incarnation != self.incarnation or news.refutation < self.refutation:
            return []
        self.refutation = news.refutation + 1
        self.health = min(MAX_HEALTH, self.health + 1)
        alive = Gossip(MemberState.ALIVE, self.own_id, self.incarnation, self.refutation)
        # At once: the one who accuses us may not know where we live now, and its deadline runs.
        return [SendNow(sender, alive), Broadcast(alive, at_once=True)]

    def _on_gossip_of_removed(self, news: Gossip, kind: MemberState) -> list[DetectorAction]:
        """The dead do not rise on hearsay: they are asked, and answer or not."""
        gone = self._removed.get(news.node_id)
        if gone is None or kind is not MemberState.ALIVE:
            return []
        if (news.incarnation, news.refutation) <= (gone.incarnation, gone.refutation):
            return []
        gone.incarnation, gone.refutation = news.incarnation, news.refutation
        return [SendPing(news.node_id), Broadcast(news)]

    def _note_unconfirmed(self, news: Gossip, kind: MemberState, member: _Member, now: float) -> list[DetectorAction]:
        """Leaves and refutations are believed from their node alone; from others they are a reason to ask it."""
        if (news.incarnation, news.refutation, kind) <= member.unconfirmed_update:
            return []
        member.unconfirmed_update = (news.incarnation, news.refutation, kind)
        ask = kind is MemberState.LEFT or member.state is MemberState.SUSPECT
        return [*(self.request_probe(news.node_id, now) if ask else []), Broadcast(news)]

    def _accept_refutation(self, news: Gossip, member: _Member, now: float) -> list[DetectorAction]:
        member.incarnation, member.refutation = news.incarnation, news.refutation
        actions: list[DetectorAction] = [Broadcast(news)]
        if member.state is MemberState.SUSPECT:
            actions += self._end_suspicion(news.node_id, member, now, "it refuted", by_itself=False)
        return actions

    def _accept_accusation(self, news: Gossip, kind: MemberState, member: _Member, now: float) -> list[DetectorAction]:
        if now - member.heard < self.settings.probe_interval_s:
            return [SendNow(news.node_id, news)]  # we know better; it should know too, and refute
        if member.unconfirmed_update[2] == MemberState.ALIVE and member.unconfirmed_update[:2] > (
            news.incarnation,
            news.refutation,
        ):
            return self.request_probe(news.node_id, now)  # it is said to have refuted this: we look ourselves
        member.incarnation, member.refutation = news.incarnation, news.refutation
        if kind is MemberState.DEAD:
            return self._suspect_reported(news, member, now)
        suspected = self._suspect(news.node_id, member, now, "others suspect it")
        probe: list[DetectorAction] = [SendPing(news.node_id)] if news.node_id in self._watched else []
        return [*suspected, *probe, Broadcast(news)]

    def _suspect_reported(self, news: Gossip, member: _Member, now: float) -> list[DetectorAction]:
        """A death on hearsay is not believed before we asked ourselves, and not passed on: a lost refutation must not
        kill a living node in the eyes of all (at 10 % loss two wrong findings of 60 nodes made ten)."""
        if member.reported_dead:
            return []
        actions = self._suspect(news.node_id, member, now, "others say it is dead")
        member.reported_dead = True
        return [*actions, *self._confirm_report(news.node_id, member, now)]

    def _confirm_report(self, node_id: bytes, member: _Member, now: float) -> list[DetectorAction]:
        if member.missed < UNANSWERED_PROBES_TO_CONFIRM:
            member.probed = now
            return [SendPing(node_id)]
        news = Gossip(MemberState.DEAD, node_id, member.incarnation, member.refutation)
        reason = "others say it is dead, and it does not answer us"
        return [*self._remove(node_id, member, now, MemberState.DEAD, reason), Broadcast(news)]

    # -- transitions ---------------------------------------------------------------------------------------------

    def _suspect(self, node_id: bytes, member: _Member, now: float, reason: str) -> list[DetectorAction]:
        if member.state is MemberState.SUSPECT:
            return []
        member.state = MemberState.SUSPECT
        member.since = now
        member.missed = 0
        member.deadline = now + self.settings.suspicion_s
        self._suspects[node_id] = None
        return [StateChanged(node_id, "suspect", reason)]

    def _end_suspicion(
        self, node_id: bytes, member: _Member, now: float, reason: str, *, by_itself: bool
    ) -> list[DetectorAction]:
        """`by_itself`: it sent us a message of its own; others may still suspect it, and it has to refute."""
        accusation = Gossip(MemberState.SUSPECT, node_id, member.incarnation, member.refutation)
        member.state = MemberState.ALIVE
        member.reported_dead = False
        member.since = now
        self._suspects.pop(node_id, None)
        actions: list[DetectorAction] = [StateChanged(node_id, "refuted", reason)]
        if by_itself:
            actions.append(SendNow(node_id, accusation))
        return actions

    def _remove(
        self, node_id: bytes, member: _Member, now: float, state: MemberState, reason: str
    ) -> list[DetectorAction]:
        del self._members[node_id]
        self._suspects.pop(node_id, None)
        member.state, member.since = state, now
        self._removed[node_id] = member
        kind: Literal["dead", "left"] = "left" if state is MemberState.LEFT else "dead"
        return [StateChanged(node_id, kind, reason)]
