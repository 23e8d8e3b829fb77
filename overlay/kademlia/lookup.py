"""Finding the k nodes closest to an id: the iterative lookup as plain rules.

A sliding window of `alpha` questions instead of rounds; who is slow gives up its place in the window but may still
answer; only nodes that answered are returned; it ends when the k closest seen have answered or failed
(reference/kademlia.md section 4 e). Once answers bring nobody closer than the closest known, what is left is to confirm
the k closest: they are asked at once (the paper's last round; Maymounkov and Mazières 2002, section 2.3).
Never sends; the service below it does. Pure.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from enum import IntEnum

from overlay.peers import Contact

#: A lookup that has asked this many is being led on by made-up contacts.
MAX_QUERIES = 400


class _State(IntEnum):
    NEW = 0
    ASKED = 1
    SLOW = 2
    ANSWERED = 3
    FAILED = 4


class Lookup:
    """One lookup. The own node takes part as one that has answered."""

    def __init__(self, target: bytes, own: Contact, k: int, alpha: int, seeds: Iterable[Contact]) -> None:
        self.target = target
        self.k = k
        self.alpha = alpha
        self.queries = 0
        #: Answers, one upon the other, that it took to learn of the farthest-fetched node among those asked.
        self.rounds = 0
        self._confirming = False
        self._rounds: dict[bytes, int] = {}
        self._own_id = own.node_id
        self._number = int.from_bytes(target, "big")
        self._contacts: dict[bytes, Contact] = {}
        self._states: dict[bytes, _State] = {}
        self._ranked: list[tuple[int, bytes]] = []  # all but the failed, closest first
        self._active = 0
        self._add(own)
        self._states[own.node_id] = _State.ANSWERED
        self.offer(seeds)

    def offer(self, contacts: Iterable[Contact], round_number: int = 1) -> None:
        """More candidates; known ones and failed ones are not taken again. `round_number`: in which they are asked."""
        for contact in contacts:
            if contact.node_id not in self._states:
                self._add(contact, round_number)

    def unknown(self, contacts: Iterable[Contact]) -> list[Contact]:
        """Those that `offer` would take: most of what an answer names has been named before."""
        states = self._states
        return [contact for contact in contacts if contact.node_id not in states]

    def _add(self, contact: Contact, round_number: int = 0) -> None:
        node_id = contact.node_id
        self._rounds[node_id] = round_number
        self._contacts[node_id] = contact
        self._states[node_id] = _State.NEW
        insort(self._ranked, (int.from_bytes(node_id, "big") ^ self._number, node_id))

    def next_queries(self) -> list[Contact]:
        """Whom to ask now; they count as asked."""
        chosen: list[Contact] = []
        if self.queries >= MAX_QUERIES:
            return chosen
        window = self.k if self._confirming else self.alpha
        in_reach = self.k
        for _, node_id in self._ranked:
            if self._active >= window or in_reach == 0:
                break
            state = self._states[node_id]
            if state is not _State.SLOW:  # likely dead: whoever would take its place is asked before that is certain
                in_reach -= 1
            if state is _State.NEW:
                self._states[node_id] = _State.ASKED
                self._active += 1
                self.queries += 1
                self.rounds = max(self.rounds, self._rounds[node_id])
                chosen.append(self._contacts[node_id])
        return chosen

    def on_slow(self, node_id: bytes) -> None:
        """It takes its time: its place in the window is free."""
        if self._states.get(node_id) is _State.ASKED:
            self._states[node_id] = _State.SLOW
            self._active -= 1

    def on_response(self, node_id: bytes, contacts: Iterable[Contact]) -> None:
        """It answered with these contacts."""
        self._settle(node_id, _State.ANSWERED)
        closest = self._closest_other()
        self.offer(contacts, self._rounds[node_id] + 1)
        self._confirming = self._closest_other() == closest

    def _closest_other(self) -> bytes | None:
        for _, node_id in self._ranked[:2]:
            if node_id != self._own_id:
                return node_id
        return None

    def on_failure(self, node_id: bytes) -> None:
        """It did not answer."""
        if self._states.get(node_id) in (_State.ASKED, _State.SLOW):
            self._settle(node_id, _State.FAILED)
            self._ranked.remove((int.from_bytes(node_id, "big") ^ self._number, node_id))

    def _settle(self, node_id: bytes, state: _State) -> None:
        if self._states.get(node_id) is _State.ASKED:
            self._active -= 1
        self._states[node_id] = state

    @property
    def done(self) -> bool:
        """The k closest seen have all answered, or nothing is left to wait for."""
        if self.queries >= MAX_QUERIES and self._active == 0:
            return True
        return all(self._states[node_id] is _State.ANSWERED for _, node_id in self._ranked[: self.k])

    def result(self) -> list[Contact]:
        """The k closest that answered, closest first, ourselves where we belong."""
        answered = (self._contacts[node_id] for _, node_id in self._ranked if self._states[node_id] is _State.ANSWERED)
        return [contact for contact, _ in zip(answered, range(self.k), strict=False)]
