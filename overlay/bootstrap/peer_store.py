"""Stores the addresses of peers on disk, as plain JSON, so that a restarted node finds its swarm without bootstraps.

A swarm that was switched off waits for the stored peers before it continues. So the peers of a swarm that ran for
seconds must be stored too. Until the file is full, it is written soon after a new peer appeared.
"""

from __future__ import annotations

import hashlib
import json
import struct
import threading
from collections.abc import Iterable

from p2pnode.overlay.addresses import Address, split_address
from p2pnode.overlay.environment import Environment
from p2pnode.overlay.ids import ID_BYTES
from p2pnode.overlay.kademlia.messages import pack_contact, read_contact
from p2pnode.overlay.peers import Contact, Peer

PEERS_FILE = "peers.json"
MAX_STORED = 64
#: A peer that was not seen for this long is removed.
MAX_AGE_S = 14 * 24 * 3600.0
#: The file is written at most this often, and when the node stops; the second value holds once it is full.
WRITE_INTERVAL_S, FULL_WRITE_INTERVAL_S = 2.0, 30.0


#: A line for each peer. Not by the indent of `json.dumps`, which takes ten times as long.
_FILE = '{{"peers": [\n  {}\n]}}\n'
#: Before each packed contact.
_SEEN = struct.Struct("<dB")
#: In the place of the id of a peer that an older version stored without it.
NO_ID = bytes(ID_BYTES)


class PeerStore:
    """The last address of each recent peer, most recently seen first."""

    def __init__(self, environment: Environment) -> None:
        self._disk = environment.disk
        self._executor = environment.executor
        self._clock = environment.clock
        self._log = environment.log
        #: As `_joined` makes it, the latest first: as objects they take five times as much.
        self._peers = b""
        #: The hash of what was written last, without the times.
        self._written = b""
        self._failed = False
        # The write of a cancelled task goes on in its thread; the next one must not touch the file at the same time.
        self._one_write = threading.Lock()

    def load(self) -> None:
        """Read the file; an unreadable entry ends the reading, and is logged."""
        try:
            data = self._disk.read(PEERS_FILE)
            if data is None:
                return
            for entry in json.loads(data)["peers"][:MAX_STORED]:
                host, port = split_address(str(entry["address"]))
                node_id = bytes.fromhex(entry.get("id", "")) or NO_ID
                if len(node_id) != ID_BYTES:
                    raise ValueError(f"an id has {ID_BYTES} bytes, not {len(node_id)}")
                packed = pack_contact(Contact(node_id, Address.checked(host, port)))
                self._peers += _joined([(packed, float(entry["met"]))])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._log.warning("remembered_peers_unreadable", file=PEERS_FILE, error=str(error))

    def addresses(self) -> list[Address]:
        """The stored addresses, most recently seen first."""
        return [read_contact(packed).address for packed, _ in _entries(self._peers)]

    @property
    def write_interval_s(self) -> float:
        """The interval until the next check for changes."""
        return FULL_WRITE_INTERVAL_S if len(_entries(self._peers)) >= MAX_STORED else WRITE_INTERVAL_S

    def add_live(self, peers: Iterable[Peer]) -> None:
        """Store the addresses of these live peers, in place of their former ones."""
        now = self._clock.wall()
        alive: dict[Address, Contact] = {}
        for peer in peers:
            alive[peer.address] = peer.contact
            if len(alive) == MAX_STORED:
                break
        ids = {contact.node_id for contact in alive.values()}
        met = dict.fromkeys(map(pack_contact, alive.values()), now)
        for packed, met_at in _entries(self._peers):
            former = read_contact(packed)
            if former.node_id not in ids and former.address not in alive:
                met[packed] = met_at
        recent = sorted(met.items(), key=lambda item: -item[1])
        self._peers = _joined(entry for entry in recent[:MAX_STORED] if abs(now - entry[1]) <= MAX_AGE_S)

    async def write(self) -> None:
        """Write the peers to disk, off the loop, if they changed. The first failure is logged; the node can run without
        the file."""
        present = hashlib.sha256(b"".join(sorted(packed for packed, _ in _entries(self._peers)))).digest()
        if not self._peers or present == self._written:
            return
        try:
            await self._executor.run(self._write_file, self._peers)
        except OSError as error:
            if not self._failed:
                self._log.warning("remembered_peers_not_written", file=PEERS_FILE, error=str(error))
            self._failed = True
            return
        self._failed = False
        self._written = present

    def _write_file(self, peers: bytes) -> None:
        with self._one_write:
            self._disk.write(PEERS_FILE, _text(peers))


def _text(peers: bytes) -> bytes:
    """The contents of the file. Made by the thread that writes it: five times as long as what is stored."""
    entries: list[str] = []
    for packed, met_at in _entries(peers):
        contact = read_contact(packed)
        node_id = "" if contact.node_id == NO_ID else contact.node_id.hex()
        entries.append(json.dumps({"address": str(contact.address), "id": node_id, "met": round(met_at)}))
    return _FILE.format(",\n  ".join(entries)).encode()


def _joined(entries: Iterable[tuple[bytes, float]]) -> bytes:
    """Packed contacts, each after the wall-clock second when it was last seen and its length."""
    return b"".join(_SEEN.pack(met_at, len(packed)) + packed for packed, met_at in entries)


def _entries(joined: bytes) -> list[tuple[bytes, float]]:
    entries: list[tuple[bytes, float]] = []
    at = 0
    while at < len(joined):
        met_at, size_bytes = _SEEN.unpack_from(joined, at)
        at += _SEEN.size + size_bytes
        entries.append((joined[at - size_bytes : at], met_at))
    return entries
