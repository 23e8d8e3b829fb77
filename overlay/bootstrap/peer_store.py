"""Stores the addresses of peers on disk, as plain JSON, so that a restarted node finds its swarm without bootstraps.

A swarm that was switched off waits for the stored peers before it continues. So the peers of a swarm that ran for
seconds must be stored too. Until the file is full, it is written soon after a new peer appeared.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable

from overlay.addresses import Address, split_address
from overlay.environment import Environment
from overlay.ids import ID_BYTES
from overlay.kademlia.messages import pack_contact, read_contact
from overlay.peers import Contact, Peer

PEERS_FILE = "peers.json"
MAX_STORED = 64
#: A peer that was not seen for this long is removed.
MAX_AGE_S = 14 * 24 * 3600.0
#: The file is written at most this often, and when the node stops; the second value holds once it is full.
WRITE_INTERVAL_S, FULL_WRITE_INTERVAL_S = 2.0, 30.0


#: In the place of the id of a peer that an older version stored without it.
NO_ID = bytes(ID_BYTES)


class PeerStore:
    """The last address of each recent peer, most recently seen first."""

    def __init__(self, environment: Environment) -> None:
        self._disk = environment.disk
        self._executor = environment.executor
        self._clock = environment.clock
        self._log = environment.log
        #: When each was last seen, in wall-clock seconds, by its packed id and address.
        self._peers: dict[bytes, float] = {}
        self._written: list[bytes] = []
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
                self._peers[pack_contact(Contact(node_id, Address.checked(host, port)))] = float(entry["met"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._log.warning("remembered_peers_unreadable", file=PEERS_FILE, error=str(error))

    def addresses(self) -> list[Address]:
        """The stored addresses, most recently seen first."""
        return [read_contact(packed).address for packed in self._peers]

    @property
    def write_interval_s(self) -> float:
        """The interval until the next check for changes."""
        return FULL_WRITE_INTERVAL_S if len(self._peers) >= MAX_STORED else WRITE_INTERVAL_S

    def add_live(self, peers: Iterable[Peer]) -> None:
        """Store the addresses of these live peers, in place of their former ones."""
        now = self._clock.wall()
        alive = {peer.address: peer.contact for peer in peers}
        ids = {contact.node_id for contact in alive.values()}
        met = dict.fromkeys(map(pack_contact, alive.values()), now)
        for packed, met_at in self._peers.items():
            former = read_contact(packed)
            if former.node_id not in ids and former.address not in alive:
                met[packed] = met_at
        recent = sorted(met.items(), key=lambda item: -item[1])
        self._peers = {packed: met_at for packed, met_at in recent[:MAX_STORED] if abs(now - met_at) <= MAX_AGE_S}

    async def write(self) -> None:
        """Write the peers to disk, off the loop, if they changed. The first failure is logged; the node can run without
        the file."""
        present = sorted(self._peers)
        if not present or present == self._written:
            return
        entries: list[dict[str, object]] = []
        for packed, met_at in self._peers.items():
            contact = read_contact(packed)
            node_id = "" if contact.node_id == NO_ID else contact.node_id.hex()
            entries.append({"address": str(contact.address), "id": node_id, "met": round(met_at)})
        try:
            await self._executor.run(self._write_file, json.dumps({"peers": entries}, indent=1).encode())
        except OSError as error:
            if not self._failed:
                self._log.warning("remembered_peers_not_written", file=PEERS_FILE, error=str(error))
            self._failed = True
            return
        self._failed = False
        self._written = present

    def _write_file(self, data: bytes) -> None:
        with self._one_write:
            self._disk.write(PEERS_FILE, data)
