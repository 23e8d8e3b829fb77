"""How many ids may share an address in an open swarm, so that one socket cannot fill a table or surround a key.

Addresses count in groups that cost their holder the same (`overlay.transport.group_of`); the loopback is none: many
nodes of one machine are the user's own (a demo, a test). libp2p allows 3 per group in a table and 2 in a bucket
(reference/overlay-practice.md section 2); ours is a setting, because training rooms stand behind one address. Pure.
"""

from __future__ import annotations

from collections import Counter

from overlay.addresses import group_of
from overlay.peers import Contact


class AddressLimit:
    """Admits the first few ids of each group, for one purpose (one lookup)."""

    def __init__(self, most: int) -> None:
        self.refused = 0
        self._most = most
        self._taken: Counter[str] = Counter()
        self._seen: dict[bytes, bool] = {}

    def admitted(self, contacts: list[Contact]) -> list[Contact]:
        """Those there is room for, in their order; the same id gets the same answer. A quota of 0 admits all."""
        return [contact for contact in contacts if self._admits(contact)] if self._most else contacts

    def _admits(self, contact: Contact) -> bool:
        seen = self._seen.get(contact.node_id)
        if seen is None:
            group = group_of(contact.address.host)
            seen = not group or self._taken[group] < self._most
            self._taken[group] += seen
            self.refused += not seen
            self._seen[contact.node_id] = seen
        return seen
