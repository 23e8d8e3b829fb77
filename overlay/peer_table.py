"""The verified peers of one node: merges heartbeats into one row per peer.

Steps only increase within an incarnation, so an old heartbeat never undoes a newer one. A peer is a row, and each of
its numbers is in a column (`array`): 100 bytes a peer, where an object with its numbers takes 700. The dictionary from
ids to rows is one with that of the failure detector (`overlay.row_index`). A `Peer` is made when one is asked for, and
reads its row. Of a peer that is removed it must not be read any more; `remove` returns a
copy. Pure. `now` (monotonic seconds) is passed in.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from sys import intern
from typing import Any

from p2pnode.overlay.addresses import Address, group_of
from p2pnode.overlay.peers import Activity, ChangeKind, Contact, Heartbeat, Peer, PeerChange, shown_version
from p2pnode.overlay.row_index import RowIndex
from p2pnode.overlay.waits import smoothed

#: `Activity(n)` as a table, because every datagram needs it.
_ACTIVITIES = tuple(Activity)
#: The largest counter in four bytes.
NARROW = (1 << 32) - 1
#: Versions that the peers of one table may say at one time: a byte each.
MOST_VERSIONS = 256
#: In the column of round trips: none measured.
_NO_ROUND_TRIP = -1.0


class PeerTable:
    """The verified peers by id. The failure detector decides which are dead, the member list which are inserted."""

    def __init__(self, index: RowIndex | None = None) -> None:
        """`index`: that of another table of the same nodes; None: one of its own."""
        self._index = index or RowIndex()
        self._rows = self._index.rows  # a row whose port is 0 is of the other table alone
        self._peers = 0
        self._sharing: Counter[str] = Counter()
        self.hosts: list[str] = []
        self.ports = array("H")  # 0: a row without a peer
        self.incarnations = array("I")  # wider once one needs it (`_widen`), as the steps and samples
        self.boot_ids = array("Q")
        self.steps = array("I")
        self.samples = array("I")
        self.step_seconds = array("d")
        self.last_heard = array("d")
        self.last_progress = array("d")
        self.round_trips_s = array("f")
        self.deviations_s = array("f")
        self.activities = bytearray()
        self.eligible = bytearray()
        self.capacities = bytearray()
        self.versions = bytearray()  # their numbers among these texts; 0: none is known
        self._version_texts = [""]

    def __len__(self) -> int:
        return self._peers

    def __iter__(self) -> Iterator[Peer]:
        return iter([_Row(self, self._rows[node_id], node_id) for node_id in self.ids()])

    def __contains__(self, node_id: bytes) -> bool:
        return self._row(node_id) is not None

    def get(self, node_id: bytes) -> Peer | None:
        row = self._row(node_id)
        return None if row is None else _Row(self, row, node_id)

    def ids(self) -> list[bytes]:
        """The ids of all known peers, in the order in which they were inserted."""
        if self._peers == len(self._rows):
            return list(self._rows)
        return [node_id for node_id in self._rows if self._row(node_id) is not None]

    def _row(self, node_id: bytes) -> int | None:
        row = self._rows.get(node_id)
        return row if row is not None and row < len(self.ports) and self.ports[row] else None

    def at(self, address: Address) -> bytes | None:
        """The id known at an address."""
        if group_of(address.host) not in self._sharing:
            return None  # no peer is at this host, as for nearly every new one: all may listen on the same port
        row = -1
        while True:
            try:
                row = self.ports.index(address.port, row + 1)
            except ValueError:
                return None
            if self.hosts[row] == address.host:
                return next(node_id for node_id, its_row in self._rows.items() if its_row == row)

    def sharing(self, group: str) -> int:
        """The number of peers in a group of addresses (`overlay.addresses.group_of`)."""
        return self._sharing[group]

    def _count(self, host: str, change: int) -> None:
        group = group_of(host)
        self._sharing[group] += change
        if not self._sharing[group]:
            del self._sharing[group]

    def note_capacity(self, node_id: bytes, capacity: int) -> None:
        """A known peer announced its capacity class. A restarted peer keeps its class until it announces another."""
        row = self._row(node_id)
        if row is not None:
            self.capacities[row] = capacity

    def note_version(self, node_id: bytes, version: str) -> None:
        """A known peer said which version it runs: any text."""
        row = self._row(node_id)
        if row is not None and self._version_texts[self.versions[row]] != version:
            self.versions[row] = self._number_of(shown_version(version))

    def _number_of(self, version: str) -> int:
        """The number of a text: most peers run the same version. 0 where they say too many different ones."""
        if version in self._version_texts:
            return self._version_texts.index(version)
        if len(self._version_texts) == MOST_VERSIONS:
            self._forget_versions()
        if len(self._version_texts) == MOST_VERSIONS:
            return 0
        self._version_texts.append(version)
        return len(self._version_texts) - 1

    def _forget_versions(self) -> None:
        """Keep the versions that some peer has."""
        said = sorted({0, *self.versions})
        numbers = {number: place for place, number in enumerate(said)}
        self.versions = bytearray(numbers[number] for number in self.versions)
        self._version_texts = [self._version_texts[number] for number in said]

    def version_of(self, row: int) -> str:
        """What the peer of this row has said."""
        return self._version_texts[self.versions[row]]

    def remove(self, node_id: bytes) -> Peer | None:
        """Remove a peer and return a copy of what was known, if it was."""
        row = self._row(node_id)
        if row is None:
            return None
        last = _copied(_Row(self, row, node_id))
        self._count(self.hosts[row], -1)
        self.ports[row] = 0
        self._peers -= 1
        self._index.release(node_id)
        return last

    def observe_again(self, heartbeat: Heartbeat, address: Address, now: float, rtt: float | None = None) -> bool:
        """Merge a heartbeat of a known peer, at its known address and since the same start, that changes no more than
        the columns. False: it is another, and nothing was done. As `observe`, in a third of its time."""
        row = self._row(heartbeat.node_id)
        if (
            row is None
            or self.incarnations[row] != heartbeat.incarnation
            or self.boot_ids[row] != heartbeat.boot_id
            or self.ports[row] != address.port
            or self.hosts[row] != address.host
            or self.eligible[row] != heartbeat.eligible
            or heartbeat.activity == Activity.LEAVING
        ):
            return False
        self._fold_same_start(row, heartbeat, now)
        if rtt is not None:
            self._fold_round_trip(row, rtt)
        return True

    def observe(
        self,
        heartbeat: Heartbeat,
        source_host: str,
        now: float,
        rtt: float | None = None,
        *,
        address: Address | None = None,
    ) -> PeerChange | None:
        """Merge a heartbeat that came from its own node; returns what changed, if anything did.

        `address` overrides the claimed one (`heartbeat.host` or `source_host`, with `heartbeat.port`). The member list
        passes the known address until another one is verified.
        """
        host, port = address or (heartbeat.host or source_host, heartbeat.port)
        row = self._row(heartbeat.node_id)
        if row is None:
            row = self._insert(heartbeat, host, port, now)
            if rtt is not None:
                self._fold_round_trip(row, rtt)
            return PeerChange(heartbeat.node_id, "up")
        incarnation = self.incarnations[row]
        if heartbeat.incarnation < incarnation:
            return None
        kind: ChangeKind | None = "restarted"
        if heartbeat.incarnation == incarnation:
            if heartbeat.boot_id != self.boot_ids[row]:
                return PeerChange(heartbeat.node_id, "clone", f"incarnation {heartbeat.incarnation} was started twice")
            kind = self._fold_same_start(row, heartbeat, now)
        else:
            self._fold_restart(row, heartbeat, now)
        if rtt is not None:
            self._fold_round_trip(row, rtt)
        if port != self.ports[row] or host != self.hosts[row]:
            self._count(self.hosts[row], -1)
            self._count(host, 1)
            self.hosts[row], self.ports[row] = intern(host), port
            kind = kind if kind == "restarted" else "moved"
        return None if kind is None else PeerChange(heartbeat.node_id, kind)

    def _insert(self, heartbeat: Heartbeat, host: str, port: int, now: float) -> int:
        row = self._index.take(heartbeat.node_id)
        while row >= len(self.ports):
            self._append_row()
        self._peers += 1
        self._count(host, 1)
        # Each datagram brings its own copy of the text, 60 bytes that many rows may share.
        self.hosts[row], self.ports[row] = intern(host), port
        self._fold_restart(row, heartbeat, now)
        self.round_trips_s[row], self.deviations_s[row] = _NO_ROUND_TRIP, 0.0
        self.capacities[row] = 0
        return row

    def _append_row(self) -> None:
        for numbers in (self.ports, self.incarnations, self.boot_ids, self.steps, self.samples):
            numbers.append(0)
        for times in (self.step_seconds, self.last_heard, self.last_progress):
            times.append(0.0)
        for times in (self.round_trips_s, self.deviations_s):
            times.append(0.0)
        for small in (self.activities, self.eligible, self.capacities, self.versions):
            small.append(0)
        self.hosts.append("")

    def _widen(self) -> None:
        """A counter does not fit four bytes: eight from now on, for all."""
        self.incarnations, self.steps, self.samples = (
            array("Q", counters) for counters in (self.incarnations, self.steps, self.samples)
        )

    def _fold_restart(self, row: int, heartbeat: Heartbeat, now: float) -> None:
        if max(heartbeat.incarnation, heartbeat.step, heartbeat.samples) > NARROW and self.steps.itemsize < 8:
            self._widen()
        self.incarnations[row], self.boot_ids[row] = heartbeat.incarnation, heartbeat.boot_id
        self.activities[row] = heartbeat.activity
        self.steps[row], self.samples[row] = heartbeat.step, heartbeat.samples
        self.step_seconds[row] = heartbeat.step_seconds
        self.eligible[row] = heartbeat.eligible
        self.versions[row] = 0  # a restart is how a node is upgraded
        self.last_heard[row] = self.last_progress[row] = now

    def _fold_same_start(self, row: int, heartbeat: Heartbeat, now: float) -> ChangeKind | None:
        self.last_heard[row] = now
        step, activity = self.steps[row], self.activities[row]
        if heartbeat.step < step or activity == Activity.LEAVING:
            return None  # overtaken by a newer one; and only a new incarnation ends LEAVING
        if (heartbeat.step > NARROW or heartbeat.samples > NARROW) and self.steps.itemsize < 8:
            self._widen()
        if heartbeat.step > step:
            self.steps[row] = heartbeat.step
            self.last_progress[row] = now
        if heartbeat.activity != activity:
            if heartbeat.activity in (Activity.READY, Activity.TRAINING):
                self.last_progress[row] = now
            self.activities[row] = heartbeat.activity
        self.step_seconds[row], self.samples[row] = heartbeat.step_seconds, heartbeat.samples
        if heartbeat.eligible != self.eligible[row]:
            self.eligible[row] = heartbeat.eligible
            return "eligible"
        return None

    def _fold_round_trip(self, row: int, rtt_s: float) -> None:
        mean_s, deviation_s = _measured(self.round_trips_s[row]), self.deviations_s[row]
        self.round_trips_s[row], self.deviations_s[row] = smoothed(mean_s, deviation_s, rtt_s)


class _Row(Peer):
    """A peer as its row is now."""

    __slots__ = ("node_id", "row", "table")

    def __init__(self, table: PeerTable, row: int, node_id: bytes) -> None:
        self.table = table
        self.row = row
        self.node_id = node_id  # type: ignore[misc]  # a property there

    @property
    def address(self) -> Address:
        table, row = self.table, self.row
        return Address(table.hosts[row], table.ports[row])

    def is_at(self, address: Address) -> bool:
        table, row = self.table, self.row
        return bool(table.ports[row] == address.port and table.hosts[row] == address.host)

    contact: Any = property(lambda peer: Contact(peer.node_id, peer.address))
    activity: Any = property(lambda peer: _ACTIVITIES[peer.table.activities[peer.row]])
    eligible: Any = property(lambda peer: bool(peer.table.eligible[peer.row]))
    round_trip_s: Any = property(lambda peer: _measured(peer.table.round_trips_s[peer.row]))
    round_trip_deviation_s: Any = property(lambda peer: peer.table.deviations_s[peer.row])
    incarnation: Any = property(lambda peer: peer.table.incarnations[peer.row])
    boot_id: Any = property(lambda peer: peer.table.boot_ids[peer.row])
    step: Any = property(lambda peer: peer.table.steps[peer.row])
    step_seconds: Any = property(lambda peer: peer.table.step_seconds[peer.row])
    samples: Any = property(lambda peer: peer.table.samples[peer.row])
    last_heard: Any = property(lambda peer: peer.table.last_heard[peer.row])
    last_progress: Any = property(lambda peer: peer.table.last_progress[peer.row])
    capacity: Any = property(lambda peer: peer.table.capacities[peer.row])
    version: Any = property(lambda peer: peer.table.version_of(peer.row))


def _measured(round_trip_s: float) -> float | None:
    return None if round_trip_s == _NO_ROUND_TRIP else round_trip_s


def _copied(peer: Peer) -> Peer:
    return Peer(**{field.name: getattr(peer, field.name) for field in fields(Peer)})
