"""The routing table: the k-buckets of the `kademlia` package, with exact answers.

Kept from `kademlia.routing`: buckets, their splitting, replacement entries. Three things are replaced. The closest
contacts are the exact ones, the target itself included. A full bucket never starts a task, because the failure detector
probes every member on a schedule. The depth of a bucket follows from its range, not from its members.

Inserts nothing by itself: the member list adds a contact only after it answered this node. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from heapq import nsmallest
from itertools import chain
from typing import Any

from kademlia.node import Node
from kademlia.routing import KBucket, RoutingTable

from p2pnode.overlay.ids import ID_BITS, ID_SPACE
from p2pnode.overlay.peers import Contact

#: A bucket away from the own id splits until its depth is a multiple of this (Maymounkov and Mazières 2002, section
#: 4.2, with b = 2). With b = 5 a table at 1000 nodes would have 650 contacts, all to be kept fresh.
SPLIT_DEPTH = 2
#: Replacement entries of a bucket, as a share of its places: a bucket that lost half of its contacts is full again.
REPLACEMENT_SHARE = 0.5


class Entry:
    """A contact with the names that the package reads. A `Node` of the package takes three times the memory."""

    __slots__ = ("contact", "id", "long_id")

    def __init__(self, contact: Contact) -> None:
        self.contact = contact
        self.id = contact.node_id
        self.long_id = int.from_bytes(contact.node_id, "big")


class Bucket(KBucket):  # type: ignore[misc]
    """A k-bucket. Its depth follows from its range instead of its members."""

    def __init__(self, low: int, high: int, ksize: int) -> None:
        super().__init__(low, high, ksize, REPLACEMENT_SHARE)

    def depth(self) -> int:
        low, high = self.range
        return int(ID_BITS - (high - low).bit_length())

    def split(self) -> tuple[Bucket, Bucket]:
        """The two halves; replacement entries move up where they fit."""
        low, high = self.range
        middle = (low + high) // 2
        one, two = Bucket(low, middle, self.ksize), Bucket(middle + 1, high, self.ksize)
        for entry in chain(self.nodes.values(), self.replacement_nodes.values()):
            (one if entry.long_id <= middle else two).add_node(entry)
        return one, two


class ContactTable(RoutingTable):  # type: ignore[misc]
    """Buckets of contacts that answered this node. Suspected ones stay, and no response names them."""

    buckets: list[Bucket]

    def __init__(self, ksize: int, node: Node) -> None:
        self._unlisted: dict[bytes, None] = {}
        super().__init__(None, ksize, node)

    def flush(self) -> None:
        self.buckets = [Bucket(0, ID_SPACE - 1, self.ksize)]
        self._unlisted.clear()

    def __len__(self) -> int:
        return sum(map(len, self.buckets))

    def __iter__(self) -> Iterator[Contact]:
        return iter([entry.contact for bucket in self.buckets for entry in bucket.nodes.values()])

    def __contains__(self, node_id: bytes) -> bool:
        return node_id in self._bucket_of(node_id).nodes

    def get_bucket_for(self, node: Any) -> int:
        return bisect_left(self.buckets, node.long_id, key=lambda bucket: bucket.range[1])

    def _bucket_of(self, node_id: bytes) -> Bucket:
        return self.buckets[self.get_bucket_for(Node(node_id))]

    def _may_split(self, bucket: Bucket) -> bool:
        return bool(bucket.has_in_range(self.node)) or bucket.depth() % SPLIT_DEPTH != 0

    def would_insert(self, node_id: bytes) -> bool:
        """Whether a new contact with this id would find a place."""
        bucket = self._bucket_of(node_id)
        if node_id in bucket.nodes or node_id == self.node.id:
            return False
        return len(bucket) < self.ksize or self._may_split(bucket)

    def add(self, contact: Contact) -> bool:
        """Insert or refresh a contact; it moves to the tail of its bucket. False: it is a replacement entry."""
        if contact.node_id == self.node.id:
            return False
        entry = Entry(contact)
        while True:
            index = self.get_bucket_for(entry)
            bucket = self.buckets[index]
            if bucket.add_node(entry):
                self._unlisted.pop(contact.node_id, None)
                return True
            if not self._may_split(bucket):
                return False
            self.split_bucket(index)

    def remove(self, node_id: bytes) -> None:
        """Drop a contact or a replacement entry; the newest replacement entry takes its place."""
        self.remove_contact(Node(node_id))
        self._unlisted.pop(node_id, None)

    def list_to_others(self, node_id: bytes, listed: bool) -> None:
        """A contact that is not listed stays in its bucket, and no response names it."""
        if listed:
            self._unlisted.pop(node_id, None)
        elif node_id in self:
            self._unlisted[node_id] = None

    def closest(self, target: bytes, count: int, *, skip: bytes | None = None) -> list[Contact]:
        """The exact `count` closest listed contacts, closest first, the target itself included."""
        number = int.from_bytes(target, "big")
        by_gap = {
            entry.long_id ^ number: entry.contact
            for bucket in self.buckets
            for node_id, entry in bucket.nodes.items()
            if node_id != skip and node_id not in self._unlisted
        }
        return [by_gap[gap] for gap in nsmallest(count, by_gap)]
