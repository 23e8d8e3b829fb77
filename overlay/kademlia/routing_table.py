"""The routing table: the k-buckets of the `kademlia` package, with exact answers.

Kept from `kademlia.routing`: buckets, their split rule, replacement entries. Three things are replaced.
`find_neighbors` returns the exact k closest and includes the target itself. A full bucket never starts a task, because
the failure detector probes every member on a schedule. The depth of a bucket follows from its range.

Inserts nothing by itself: the member list adds a contact only after it answered this node. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Any

from kademlia.node import Node
from kademlia.routing import KBucket, RoutingTable

from overlay.addresses import Address
from overlay.ids import ID_BITS, ID_SPACE
from overlay.kademlia.messages import pack_contact
from overlay.peers import Contact

#: A bucket away from the own id splits until its depth is a multiple of this (Maymounkov and Mazières 2002, section
#: 4.2, with b = 2). With b = 5 a table at 1000 nodes would have 650 contacts, all to be kept fresh.
SPLIT_DEPTH = 2


class RoutingEntry(Node):  # type: ignore[misc]
    """A contact in a bucket, with its packed form. `listed` is False while it is suspected: no response names it."""

    def __init__(self, contact: Contact) -> None:
        super().__init__(contact.node_id, contact.address.host, contact.address.port)
        self.contact = contact
        self.packed = pack_contact(contact)
        self.listed = True


class Bucket(KBucket):  # type: ignore[misc]
    """A k-bucket whose depth follows from its range instead of its members."""

    def touch_last_updated(self) -> None:
        """The package reads the wall clock here; `overlay.discovery.crawler` schedules refreshes."""

    def depth(self) -> int:
        low, high = self.range
        return int(ID_BITS - (high - low).bit_length())

    def halves(self) -> tuple[Bucket, Bucket]:
        """The two buckets this one splits into; replacement entries move up where they fit."""
        low, high = self.range
        middle = (low + high) // 2
        one, two = Bucket(low, middle, self.ksize), Bucket(middle + 1, high, self.ksize)
        for node in (*self.nodes.values(), *self.replacement_nodes.values()):
            (one if node.long_id <= middle else two).add_node(node)
        return one, two


class ContactTable(RoutingTable):  # type: ignore[misc]
    """Buckets of contacts that answered this node."""

    buckets: list[Bucket]

    def __init__(self, ksize: int, node: Node) -> None:
        self._entries: dict[bytes, RoutingEntry] = {}
        self._listed: dict[int, RoutingEntry] = {}
        self._sorted: list[int] = []  # the keys of `_listed`
        super().__init__(None, ksize, node)

    def flush(self) -> None:
        self.buckets = [Bucket(0, ID_SPACE - 1, self.ksize)]
        self._entries.clear()
        self._listed.clear()
        self._sorted.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Contact]:
        return iter([entry.contact for entry in self._entries.values()])

    def __contains__(self, node_id: bytes) -> bool:
        return node_id in self._entries

    def get_bucket_for(self, node: Any) -> int:
        return self._bucket_index(node.long_id)

    def _bucket_index(self, number: int) -> int:
        low, high = 0, len(self.buckets) - 1
        while low < high:
            middle = (low + high) // 2
            if number <= self.buckets[middle].range[1]:
                high = middle
            else:
                low = middle + 1
        return low

    def _may_split(self, bucket: Bucket) -> bool:
        return bool(bucket.has_in_range(self.node)) or bucket.depth() % SPLIT_DEPTH != 0

    def would_insert(self, node_id: bytes) -> bool:
        """Whether a new contact with this id would find a place."""
        if node_id in self._entries or node_id == self.node.id:
            return False
        bucket = self.buckets[self._bucket_index(int.from_bytes(node_id, "big"))]
        return len(bucket) < self.ksize or self._may_split(bucket)

    def add(self, contact: Contact) -> bool:
        """Insert or refresh a contact; it moves to the tail of its bucket. False: it is a replacement entry."""
        if contact.node_id == self.node.id:
            return False
        known = self._entries.get(contact.node_id)
        entry = known if known is not None and known.contact == contact else RoutingEntry(contact)
        entry.listed = True
        return self._place(entry)

    def add_contact(self, node: Any) -> None:
        self.add(Contact(node.id, Address(node.ip, node.port)))

    def _place(self, entry: RoutingEntry) -> bool:
        while True:
            index = self._bucket_index(entry.long_id)
            bucket = self.buckets[index]
            if bucket.add_node(entry):
                self._index(entry)
                return True
            if not self._may_split(bucket):
                return False
            self.buckets[index : index + 1] = bucket.halves()
            for half in self.buckets[index : index + 2]:
                for moved in half.nodes.values():
                    self._index(moved)

    def _index(self, entry: RoutingEntry) -> None:
        self._entries[entry.id] = entry
        if not entry.listed:
            self._unlist(entry.long_id)
            return
        if entry.long_id not in self._listed:
            insort(self._sorted, entry.long_id)
        self._listed[entry.long_id] = entry

    def _unlist(self, number: int) -> None:
        if self._listed.pop(number, None) is not None:
            del self._sorted[bisect_left(self._sorted, number)]

    def remove(self, node_id: bytes) -> None:
        """Drop a contact or a replacement entry; the newest replacement entry takes its place."""
        bucket = self.buckets[self._bucket_index(int.from_bytes(node_id, "big"))]
        bucket.replacement_nodes.pop(node_id, None)
        entry = self._entries.pop(node_id, None)
        if entry is not None:
            self._unlist(entry.long_id)
            bucket.remove_node(entry)
            for moved in bucket.nodes.values():
                self._index(moved)

    def remove_contact(self, node: Any) -> None:
        self.remove(node.id)

    def list_to_others(self, node_id: bytes, listed: bool) -> None:
        """A contact that is not listed stays in its bucket, and no response names it."""
        entry = self._entries.get(node_id)
        if entry is not None:
            entry.listed = listed
            self._index(entry)

    def closest(self, target: bytes, count: int, *, skip: bytes | None = None) -> list[RoutingEntry]:
        """The exact `count` closest listed entries, closest first, the target itself included.

        An id that shares a longer prefix with the target is closer, and in sorted order the ids of one prefix are
        adjacent. So only the smallest such range that holds enough ids is ranked. Every `find_node` calls this.
        """
        number = int.from_bytes(target, "big")
        ids = self._sorted
        wanted = count + 1  # `skip` may be among them
        bits = max(0, (len(ids) // wanted).bit_length() - 1)
        while bits:
            width = ID_BITS - bits
            low = number >> width << width
            first, last = bisect_left(ids, low), bisect_left(ids, low + (1 << width))
            if last - first >= wanted:
                ids = ids[first:last]
                break
            bits -= 1
        # Plain integers sort several times faster than pairs.
        nearest = sorted([other ^ number for other in ids])[:wanted]
        listed = self._listed
        skipped = -1 if skip is None else int.from_bytes(skip, "big") ^ number
        return [listed[gap ^ number] for gap in nearest if gap != skipped][:count]

    def find_neighbors(self, node: Any, k: int | None = None, exclude: Any = None) -> list[RoutingEntry]:
        return self.closest(node.id, k or self.ksize, skip=exclude.id if exclude is not None else None)

    def ranges(self, wanted: Callable[[Bucket], bool]) -> list[tuple[int, int]]:
        """The id ranges of the buckets that `wanted` picks."""
        return [bucket.range for bucket in self.buckets if wanted(bucket)]
