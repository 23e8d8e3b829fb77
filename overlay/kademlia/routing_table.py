"""The routing table: the k-buckets of the `kademlia` package, with exact answers.

Kept from `kademlia.routing`: buckets, their split rule, replacement entries. Four things are replaced.
`find_neighbors` returns the exact k closest and includes the target itself. A full bucket never starts a task, because
the failure detector probes every member on a schedule. The depth of a bucket follows from its range. A contact is its
packed form, 26 bytes for IPv4: a `Node` of the package with its dictionary takes four hundred.

Inserts nothing by itself: the member list adds a contact only after it answered this node. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Any

from kademlia.node import Node
from kademlia.routing import KBucket, RoutingTable

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.ids import ID_BITS, ID_BYTES, ID_SPACE
from p2pnode.overlay.kademlia.messages import kept_contact, read_contact
from p2pnode.overlay.peers import Contact

#: A bucket away from the own id splits until its depth is a multiple of this (Maymounkov and Mazières 2002, section
#: 4.2, with b = 2). With b = 5 a table at 1000 nodes would have 650 contacts, all to be kept fresh.
SPLIT_DEPTH = 2
#: So many more contacts than are wanted are ranked: to halve their range once more costs as much.
SPARE_RANKED = 8
#: Replacement entries of a bucket, as a share of its places: a bucket that lost half of its contacts is full again.
REPLACEMENT_SHARE = 0.5


def _place(entries: list[bytes], node_id: bytes) -> int:
    """Where the contact with this id is among packed ones; -1: nowhere."""
    for place, packed in enumerate(entries):
        if packed.startswith(node_id):
            return place
    return -1


class Bucket(KBucket):  # type: ignore[misc]
    """A k-bucket of packed contacts, the latest last. Its depth follows from its range instead of its members."""

    def __init__(self, low: int, high: int, ksize: int) -> None:
        super().__init__(low, high, ksize)
        self.nodes: list[bytes] = []
        self.replacement_nodes: list[bytes] = []
        self.max_replacement_nodes = int(REPLACEMENT_SHARE * ksize)

    def touch_last_updated(self) -> None:
        """The package reads the wall clock here; `overlay.discovery.crawler` schedules refreshes."""

    def depth(self) -> int:
        low, high = self.range
        return int(ID_BITS - (high - low).bit_length())

    def put(self, packed: bytes) -> bool:
        """Insert or refresh; it moves to the tail. False: it is a replacement entry, and the oldest may be gone."""
        node_id = packed[:ID_BYTES]
        if (place := _place(self.nodes, node_id)) >= 0:
            del self.nodes[place]
        if len(self.nodes) < self.ksize:
            self.nodes.append(packed)
            return True
        if (place := _place(self.replacement_nodes, node_id)) >= 0:
            del self.replacement_nodes[place]
        self.replacement_nodes.append(packed)
        if len(self.replacement_nodes) > self.max_replacement_nodes:
            del self.replacement_nodes[0]
        return False

    def add_node(self, node: Any) -> bool:
        return self.put(kept_contact(Contact(node.id, Address(node.ip, node.port)))[1])

    def drop(self, node_id: bytes) -> bytes | None:
        """Remove a contact or a replacement entry; the newest replacement entry that takes its place, if one does."""
        if (place := _place(self.replacement_nodes, node_id)) >= 0:
            del self.replacement_nodes[place]
        if (place := _place(self.nodes, node_id)) < 0:
            return None
        del self.nodes[place]
        if not self.replacement_nodes:
            return None
        self.nodes.append(self.replacement_nodes.pop())
        return self.nodes[-1]

    def remove_node(self, node: Any) -> None:
        self.drop(node.id)

    def is_new_node(self, node: Any) -> bool:
        return _place(self.nodes, node.id) < 0

    def halves(self) -> tuple[Bucket, Bucket]:
        """The two buckets this one splits into; replacement entries move up where they fit."""
        low, high = self.range
        middle = (low + high) // 2
        one, two = Bucket(low, middle, self.ksize), Bucket(middle + 1, high, self.ksize)
        for packed in (*self.nodes, *self.replacement_nodes):
            (one if int.from_bytes(packed[:ID_BYTES], "big") <= middle else two).put(packed)
        return one, two


class ContactTable(RoutingTable):  # type: ignore[misc]
    """Buckets of contacts that answered this node. Suspected ones stay, and no response names them."""

    buckets: list[Bucket]

    def __init__(self, ksize: int, node: Node) -> None:
        #: The listed contacts, packed: they begin with their ids, so they are in the order of the ids' numbers.
        self._sorted: list[bytes] = []
        self._unlisted: dict[bytes, bytes] = {}
        super().__init__(None, ksize, node)

    def flush(self) -> None:
        self.buckets = [Bucket(0, ID_SPACE - 1, self.ksize)]
        self._unlisted.clear()
        self._sorted.clear()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._unlisted)

    def __iter__(self) -> Iterator[Contact]:
        return iter([read_contact(packed) for packed in (*self._sorted, *self._unlisted.values())])

    def __contains__(self, node_id: bytes) -> bool:
        return self._listed(node_id) >= 0 or node_id in self._unlisted

    def _listed(self, node_id: bytes) -> int:
        """The place of this id among the listed contacts; -1: it is none of them."""
        place = bisect_left(self._sorted, node_id)
        return place if place < len(self._sorted) and self._sorted[place].startswith(node_id) else -1

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
        if node_id in self or node_id == self.node.id:
            return False
        bucket = self.buckets[self._bucket_index(int.from_bytes(node_id, "big"))]
        return len(bucket) < self.ksize or self._may_split(bucket)

    def add(self, contact: Contact) -> bool:
        """Insert or refresh a contact; it moves to the tail of its bucket. False: it is a replacement entry."""
        node_id = contact.node_id
        if node_id == self.node.id:
            return False
        _, packed = kept_contact(contact)
        while True:
            index = self._bucket_index(int.from_bytes(node_id, "big"))
            bucket = self.buckets[index]
            if bucket.put(packed):
                self._unlisted.pop(node_id, None)
                self._list(packed)
                return True
            if not self._may_split(bucket):
                return False
            self.buckets[index : index + 1] = bucket.halves()
            for half in self.buckets[index : index + 2]:
                for moved in half.nodes:
                    if moved[:ID_BYTES] not in self:  # a replacement entry that has a place now
                        self._list(moved)

    def add_contact(self, node: Any) -> None:
        self.add(Contact(node.id, Address(node.ip, node.port)))

    def _list(self, packed: bytes) -> None:
        """Name this contact to others, at this address."""
        if (place := self._listed(packed[:ID_BYTES])) >= 0:
            self._sorted[place] = packed
        else:
            insort(self._sorted, packed)

    def remove(self, node_id: bytes) -> None:
        """Drop a contact or a replacement entry; the newest replacement entry takes its place."""
        promoted = self.buckets[self._bucket_index(int.from_bytes(node_id, "big"))].drop(node_id)
        self._unlisted.pop(node_id, None)
        if (place := self._listed(node_id)) >= 0:
            del self._sorted[place]
        if promoted is not None:
            self._list(promoted)

    def remove_contact(self, node: Any) -> None:
        self.remove(node.id)

    def list_to_others(self, node_id: bytes, listed: bool) -> None:
        """A contact that is not listed stays in its bucket, and no response names it."""
        if listed and (packed := self._unlisted.pop(node_id, None)) is not None:
            self._list(packed)
        elif not listed and (place := self._listed(node_id)) >= 0:
            self._unlisted[node_id] = self._sorted.pop(place)

    def closest_packed(self, target: bytes, count: int, *, skip: bytes | None = None) -> list[bytes]:
        """The exact `count` closest listed contacts, packed, closest first, the target itself included.

        An id that shares a longer prefix with the target is closer, and in sorted order the ids of one prefix are
        adjacent. So ranges are halved until hardly more are left than are wanted, and only these are ranked. Every
        `find_node` calls this: it was a fifth of what a node of 500 computes.
        """
        number = int.from_bytes(target, "big")
        entries, chosen = self._sorted, list[bytes]()
        left = wanted = count + 1  # `skip` may be among them
        low, width, first, last = 0, ID_BITS, 0, len(entries)
        while last - first > left + SPARE_RANKED:
            width -= 1
            upper = low + (1 << width)
            middle = bisect_left(entries, upper.to_bytes(ID_BYTES, "big"), first, last)
            in_upper = number >> width & 1
            nearer = last - middle if in_upper else middle - first
            if nearer < left:  # all of the nearer half, and the rest from the other one
                chosen += entries[middle:last] if in_upper else entries[first:middle]
                left -= nearer
                in_upper = not in_upper
            if in_upper:
                first, low = middle, upper
            else:
                last = middle
        chosen += entries[first:last]
        # Plain integers sort several times faster than pairs.
        by_gap = {int.from_bytes(packed[:ID_BYTES], "big") ^ number: packed for packed in chosen}
        nearest = sorted(by_gap)[:wanted]
        skipped = -1 if skip is None else int.from_bytes(skip, "big") ^ number
        return [by_gap[gap] for gap in nearest if gap != skipped][:count]

    def closest(self, target: bytes, count: int, *, skip: bytes | None = None) -> list[Contact]:
        """The exact `count` closest listed contacts, closest first, the target itself included."""
        return [read_contact(packed) for packed in self.closest_packed(target, count, skip=skip)]

    def find_neighbors(self, node: Any, k: int | None = None, exclude: Any = None) -> list[Node]:
        found = self.closest(node.id, k or self.ksize, skip=exclude.id if exclude is not None else None)
        return [Node(contact.node_id, *contact.address) for contact in found]

    def ranges(self, wanted: Callable[[Bucket], bool]) -> list[tuple[int, int]]:
        """The id ranges of the buckets that `wanted` picks."""
        return [bucket.range for bucket in self.buckets if wanted(bucket)]
