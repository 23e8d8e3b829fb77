"""Bounds how many ids may share an address in an open swarm, so that one host cannot fill a table or surround a key.

Addresses are counted in groups that cost an attacker the same (`overlay.addresses.group_of`). The loopback is in no
group, because many nodes on one machine belong to one user. In libp2p a table may have 3 ids of a group and a bucket 2.
Here the limit is a setting, because many machines may share one address. Pure.
"""

from __future__ import annotations

from collections import Counter

from p2pnode.overlay.addresses import group_of
from p2pnode.overlay.peers import Contact


class AddressLimit:
    """Admits the first few ids of each group, for one lookup."""

    def __init__(self, most: int) -> None:
        self.refused = 0
        self._most = most
        self._taken: Counter[str] = Counter()
        self._seen: dict[bytes, bool] = {}

    def admitted(self, contacts: list[Contact]) -> list[Contact]:
        """The contacts within the limit, in their order; the same id gets the same answer. A limit of 0 admits all."""
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
