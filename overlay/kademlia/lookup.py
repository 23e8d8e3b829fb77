"""The iterative lookup: finds the k nodes closest to an id (Maymounkov and Mazières 2002, section 2.3).

Up to `alpha` requests are in flight, in a sliding window instead of rounds. A slow node leaves the window but may still
answer. Only nodes that answered are returned; the lookup ends when the k closest seen have answered or failed. When an
answer brings no closer node, the k closest are asked at once, which is the last round of the paper. A node whose very
id is looked up is asked once more when it has failed: any other may be missing from the k, and without this one the
lookup has found nothing.

Sends nothing: `overlay.discovery.lookup_service` does. Pure.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from enum import IntEnum
from operator import attrgetter

from p2pnode.overlay.peers import Contact

#: A lookup that has asked this many is being misled by invented contacts.
MAX_QUERIES = 400


class _State(IntEnum):
    NEW = 0
    ASKED = 1
    SLOW = 2
    ANSWERED = 3
    FAILED = 4


class _Candidate:
    """A contact that a lookup has seen. One object of 64 bytes: dozens of them are alive in each of many lookups."""

    __slots__ = ("contact", "gap", "round", "state")

    def __init__(self, contact: Contact, gap: int, round_number: int) -> None:
        self.contact = contact
        self.gap = gap
        #: In which round it is asked.
        self.round = round_number
        self.state = _State.NEW


_by_gap = attrgetter("gap")


class Lookup:
    """One lookup. The own node counts as one that has answered."""

    def __init__(self, target: bytes, own: Contact, k: int, alpha: int, seeds: Iterable[Contact]) -> None:
        self.target = target
        self.k = k
        self.alpha = alpha
        self.queries = 0
        #: The longest chain of answers that led to a node that was asked.
        self.rounds = 0
        self._confirming = False
        self._asks_target_again = True
        self._own_id = own.node_id
        self._number = int.from_bytes(target, "big")
        self._seen: dict[bytes, _Candidate] = {}
        self._ranked: list[_Candidate] = []  # all but the failed, closest first
        self._active = 0
        self._add(own)
        self._seen[own.node_id].state = _State.ANSWERED
        self.offer(seeds)

    def offer(self, contacts: Iterable[Contact], round_number: int = 1) -> None:
        """Add candidates, except known and failed ones. `round_number`: the round in which they are asked."""
        for contact in contacts:
            if contact.node_id not in self._seen:
                self._add(contact, round_number)

    def unknown(self, contacts: Iterable[Contact]) -> list[Contact]:
        """The contacts that `offer_repair` would add: most of what an answer names is known already."""
        seen = self._seen
        return [contact for contact in contacts if contact.node_id not in seen]

    def _add(self, contact: Contact, round_number: int = 0) -> None:
        node_id = contact.node_id
        candidate = _Candidate(contact, int.from_bytes(node_id, "big") ^ self._number, round_number)
        self._seen[node_id] = candidate
        insort(self._ranked, candidate, key=_by_gap)

    def next_queries(self) -> list[Contact]:
        """The contacts to ask now; they count as asked."""
        chosen: list[Contact] = []
        if self.queries >= MAX_QUERIES:
            return chosen
        window = self.k if self._confirming else self.alpha
        in_reach = self.k
        for candidate in self._ranked:
            if self._active >= window or in_reach == 0:
                break
            state = candidate.state
            if state is not _State.SLOW:  # likely dead: ask its replacement before that is certain
                in_reach -= 1
            if state is _State.NEW:
                candidate.state = _State.ASKED
                self._active += 1
                self.queries += 1
                self.rounds = max(self.rounds, candidate.round)
                chosen.append(candidate.contact)
        return chosen

    def on_slow(self, node_id: bytes) -> None:
        """It is slow: its place in the window is free."""
        candidate = self._seen.get(node_id)
        if candidate is not None and candidate.state is _State.ASKED:
            candidate.state = _State.SLOW
            self._active -= 1

    def on_response(self, node_id: bytes, contacts: Iterable[Contact]) -> None:
        """It answered with these contacts."""
        candidate = self._seen[node_id]
        self._settle(candidate, _State.ANSWERED)
        closest = self._closest_other()
        self.offer(contacts, candidate.round + 1)
        self._confirming = self._closest_other() is closest

    def _closest_other(self) -> _Candidate | None:
        for candidate in self._ranked[:2]:
            if candidate.contact.node_id != self._own_id:
                return candidate
        return None

    def on_failure(self, node_id: bytes) -> None:
        """It did not answer."""
        candidate = self._seen.get(node_id)
        if candidate is None or candidate.state not in (_State.ASKED, _State.SLOW):
            return
        if node_id == self.target and self._asks_target_again:
            self._asks_target_again = False
            self._settle(candidate, _State.NEW)
            return
        self._settle(candidate, _State.FAILED)
        self._ranked.remove(candidate)

    def _settle(self, candidate: _Candidate, state: _State) -> None:
        if candidate.state is _State.ASKED:
            self._active -= 1
        candidate.state = state

    @property
    def done(self) -> bool:
        """The k closest seen have all answered, or nothing is left to wait for."""
        if self.queries >= MAX_QUERIES and self._active == 0:
            return True
        return all(candidate.state is _State.ANSWERED for candidate in self._ranked[: self.k])

    def result(self) -> list[Contact]:
        """The k closest that answered, closest first, the own node in its place."""
        answered = (candidate.contact for candidate in self._ranked if candidate.state is _State.ANSWERED)
        return [contact for contact, _ in zip(answered, range(self.k), strict=False)]
