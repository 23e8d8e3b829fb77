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

from overlay.addresses import Address
from overlay.ids import ID_BITS, ID_BYTES, ID_SPACE
from overlay.kademlia.messages import pack_contact, read_contact
from overlay.peers import Contact

#: A bucket away from the own id splits until its depth is a multiple of this (Maymounkov and Mazières 2002, section
#: 4.2, with b = 2). With b = 5 a table at 1000 nodes would have 650 contacts, all to be kept fresh.
SPLIT_DEPTH = 2
#: Replacement entries of a bucket, as a share of its places: a bucket that lost half of its contacts is full again.
REPLACEMENT_SHARE = 0.5


class Bucket(KBucket):  # type: ignore[misc]
    """A k-bucket of packed contacts by id, the latest last. Its depth follows from its range instead of its members."""

    def __init__(self, low: int, high: int, ksize: int) -> None:
        super().__init__(low, high, ksize)
        self.nodes: dict[bytes, bytes] = {}
        self.replacement_nodes: dict[bytes, bytes] = {}
        self.max_replacement_nodes = int(REPLACEMENT_SHARE * ksize)

    def touch_last_updated(self) -> None:
        """The package reads the wall clock here; `overlay.discovery.crawler` schedules refreshes."""

    def depth(self) -> int:
        low, high = self.range
        return int(ID_BITS - (high - low).bit_length())

    def put(self, node_id: bytes, packed: bytes) -> bool:
        """Insert or refresh; it moves to the tail. False: it is a replacement entry, and the oldest may be gone."""
        if node_id in self.nodes or len(self.nodes) < self.ksize:
            self.nodes.pop(node_id, None)
            self.nodes[node_id] = packed
            return True
        self.replacement_nodes.pop(node_id, None)
        self.replacement_nodes[node_id] = packed
        if len(self.replacement_nodes) > self.max_replacement_nodes:
            del self.replacement_nodes[next(iter(self.replacement_nodes))]
        return False

    def add_node(self, node: Any) -> bool:
        return self.put(node.id, pack_contact(Contact(node.id, Address(node.ip, node.port))))

    def drop(self, node_id: bytes) -> tuple[bytes, bytes] | None:
        """Remove a contact or a replacement entry; the newest replacement entry that takes its place, if one does."""
        self.replacement_nodes.pop(node_id, None)
        if self.nodes.pop(node_id, None) is None or not self.replacement_nodes:
            return None
        promoted, packed = self.replacement_nodes.popitem()
        self.nodes[promoted] = packed
        return promoted, packed

    def remove_node(self, node: Any) -> None:
        self.drop(node.id)

    def halves(self) -> tuple[Bucket, Bucket]:
        """The two buckets this one splits into; replacement entries move up where they fit."""
        low, high = self.range
        middle = (low + high) // 2
        one, two = Bucket(low, middle, self.ksize), Bucket(middle + 1, high, self.ksize)
        for entries in (self.nodes, self.replacement_nodes):
            for node_id, packed in entries.items():
                (one if int.from_bytes(node_id, "big") <= middle else two).put(node_id, packed)
        return one, two


class ContactTable(RoutingTable):  # type: ignore[misc]
    """Buckets of contacts that answered this node. Suspected ones stay, and no response names them."""

    buckets: list[Bucket]

    def __init__(self, ksize: int, node: Node) -> None:
        self._packed: dict[bytes, bytes] = {}
        self._unlisted: set[bytes] = set()
        self._sorted: list[bytes] = []  # the listed ids; of equal length, so in the order of their numbers
        super().__init__(None, ksize, node)

    def flush(self) -> None:
        self.buckets = [Bucket(0, ID_SPACE - 1, self.ksize)]
        self._packed.clear()
        self._unlisted.clear()
        self._sorted.clear()

    def __len__(self) -> int:
        return len(self._packed)

    def __iter__(self) -> Iterator[Contact]:
        return iter([read_contact(packed) for packed in self._packed.values()])

    def __contains__(self, node_id: bytes) -> bool:
        return node_id in self._packed

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
        if node_id in self._packed or node_id == self.node.id:
            return False
        bucket = self.buckets[self._bucket_index(int.from_bytes(node_id, "big"))]
        return len(bucket) < self.ksize or self._may_split(bucket)

    def add(self, contact: Contact) -> bool:
        """Insert or refresh a contact; it moves to the tail of its bucket. False: it is a replacement entry."""
        node_id = contact.node_id
        if node_id == self.node.id:
            return False
        packed = pack_contact(contact)
        while True:
            index = self._bucket_index(int.from_bytes(node_id, "big"))
            bucket = self.buckets[index]
            if bucket.put(node_id, packed):
                self._index(node_id, packed)
                self.list_to_others(node_id, True)
                return True
            if not self._may_split(bucket):
                return False
            self.buckets[index : index + 1] = bucket.halves()
            for half in self.buckets[index : index + 2]:
                for moved, its_packed in half.nodes.items():
                    self._index(moved, its_packed)

    def add_contact(self, node: Any) -> None:
        self.add(Contact(node.id, Address(node.ip, node.port)))

    def _index(self, node_id: bytes, packed: bytes) -> None:
        if node_id not in self._packed:
            insort(self._sorted, node_id)
        self._packed[node_id] = packed

    def remove(self, node_id: bytes) -> None:
        """Drop a contact or a replacement entry; the newest replacement entry takes its place."""
        promoted = self.buckets[self._bucket_index(int.from_bytes(node_id, "big"))].drop(node_id)
        if node_id in self._packed:
            self.list_to_others(node_id, False)
            del self._packed[node_id]
            self._unlisted.discard(node_id)
        if promoted is not None:
            self._index(*promoted)

    def remove_contact(self, node: Any) -> None:
        self.remove(node.id)

    def list_to_others(self, node_id: bytes, listed: bool) -> None:
        """A contact that is not listed stays in its bucket, and no response names it."""
        if node_id not in self._packed or listed is (node_id not in self._unlisted):
            return
        if listed:
            self._unlisted.discard(node_id)
            insort(self._sorted, node_id)
        else:
            self._unlisted.add(node_id)
            del self._sorted[bisect_left(self._sorted, node_id)]

    def closest_packed(self, target: bytes, count: int, *, skip: bytes | None = None) -> list[bytes]:
        """The exact `count` closest listed contacts, packed, closest first, the target itself included.

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
            first = bisect_left(ids, low.to_bytes(ID_BYTES, "big"))
            end = low + (1 << width)
            last = len(ids) if end == ID_SPACE else bisect_left(ids, end.to_bytes(ID_BYTES, "big"), first)
            if last - first >= wanted:
                ids = ids[first:last]
                break
            bits -= 1
        # Plain integers sort several times faster than pairs.
        nearest = sorted([int.from_bytes(other, "big") ^ number for other in ids])[:wanted]
        skipped = -1 if skip is None else int.from_bytes(skip, "big") ^ number
        packed = self._packed
        return [packed[(gap ^ number).to_bytes(ID_BYTES, "big")] for gap in nearest if gap != skipped][:count]

    def closest(self, target: bytes, count: int, *, skip: bytes | None = None) -> list[Contact]:
        """The exact `count` closest listed contacts, closest first, the target itself included."""
        return [read_contact(packed) for packed in self.closest_packed(target, count, skip=skip)]

    def find_neighbors(self, node: Any, k: int | None = None, exclude: Any = None) -> list[Node]:
        found = self.closest(node.id, k or self.ksize, skip=exclude.id if exclude is not None else None)
        return [Node(contact.node_id, *contact.address) for contact in found]

    def ranges(self, wanted: Callable[[Bucket], bool]) -> list[tuple[int, int]]:
        """The id ranges of the buckets that `wanted` picks."""
        return [bucket.range for bucket in self.buckets if wanted(bucket)]
