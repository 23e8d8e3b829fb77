"""Stores the addresses of peers on disk, as plain JSON, so that a restarted node finds its swarm without bootstraps.

A swarm that was switched off waits for the stored peers before it continues. So the peers of a swarm that ran for
seconds must be stored too. Until the file is full, it is written soon after a new peer appeared.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable

from p2pnode.overlay.addresses import Address, split_address
from p2pnode.overlay.environment import Environment
from p2pnode.overlay.ids import ID_BYTES
from p2pnode.overlay.peers import Contact, Peer

PEERS_FILE = "peers.json"
MAX_STORED = 64
#: A peer that was not seen for this long is removed.
MAX_AGE_S = 14 * 24 * 3600.0
#: The file is written at most this often, and when the node stops; the second value holds once it is full.
WRITE_INTERVAL_S, FULL_WRITE_INTERVAL_S = 2.0, 30.0


class PeerStore:
    """The last address of each recent peer, most recently seen first."""

    def __init__(self, environment: Environment) -> None:
        self._disk = environment.disk
        self._executor = environment.executor
        self._clock = environment.clock
        self._log = environment.log
        #: The wall-clock second when each was seen, the latest first.
        self._met: dict[Contact, float] = {}
        self._written: frozenset[Contact] = frozenset()
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
                address = Address.checked(*split_address(str(entry["address"])))
                node_id = bytes.fromhex(entry["id"])
                if len(node_id) != ID_BYTES:
                    raise ValueError(f"an id has {ID_BYTES} bytes, not {len(node_id)}")
                self._met[Contact(node_id, address)] = float(entry["met"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self._log.warning("remembered_peers_unreadable", file=PEERS_FILE, error=str(error))

    def addresses(self) -> list[Address]:
        """The stored addresses, most recently seen first."""
        return [contact.address for contact in self._met]

    @property
    def write_interval_s(self) -> float:
        """The interval until the next check for changes."""
        return FULL_WRITE_INTERVAL_S if len(self._met) >= MAX_STORED else WRITE_INTERVAL_S

    def add_live(self, peers: Iterable[Peer]) -> None:
        """Store the addresses of these live peers, in place of their former ones."""
        now = self._clock.wall()
        alive: dict[Address, Contact] = {}
        for peer in peers:
            alive[peer.address] = peer.contact
            if len(alive) == MAX_STORED:
                break
        ids = {contact.node_id for contact in alive.values()}
        met = dict.fromkeys(alive.values(), now)
        for former, met_at in self._met.items():
            if former.node_id not in ids and former.address not in alive:
                met[former] = met_at
        recent = sorted(met.items(), key=lambda item: -item[1])
        self._met = {each: met_at for each, met_at in recent[:MAX_STORED] if abs(now - met_at) <= MAX_AGE_S}

    async def write(self) -> None:
        """Write the peers to disk, off the loop, if they changed. The first failure is logged; the node can run without
        the file."""
        present = frozenset(self._met)
        if not present or present == self._written:
            return
        try:
            await self._executor.run(self._write_file, dict(self._met))
        except OSError as error:
            if not self._failed:
                self._log.warning("remembered_peers_not_written", file=PEERS_FILE, error=str(error))
            self._failed = True
            return
        self._failed = False
        self._written = present

    def _write_file(self, met: dict[Contact, float]) -> None:
        entries = [
            {"address": str(contact.address), "id": contact.node_id.hex(), "met": round(met_at)}
            for contact, met_at in met.items()
        ]
        with self._one_write:
            self._disk.write(PEERS_FILE, json.dumps({"peers": entries}, indent=1).encode())
