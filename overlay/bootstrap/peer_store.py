"""Stores the addresses of peers on disk, as plain JSON, so that a restarted node finds its swarm without bootstraps.

A swarm that was switched off waits for the stored peers before it continues. So the peers of a swarm that ran for
seconds must be stored too. Until the file is full, it is written soon after a new peer appeared.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from typing import NamedTuple

from overlay.addresses import Address, split_address
from overlay.environment import Environment
from overlay.peers import Peer

PEERS_FILE = "peers.json"
MAX_STORED = 64
#: A peer that was not seen for this long is removed.
MAX_AGE_S = 14 * 24 * 3600.0
#: The file is written at most this often, and when the node stops; the second value holds once it is full.
WRITE_INTERVAL_S, FULL_WRITE_INTERVAL_S = 2.0, 30.0


class StoredPeer(NamedTuple):
    """The node last seen at an address and when, in wall-clock seconds. Older versions stored no id."""

    node_id: bytes
    met_at: float


class PeerStore:
    """The last address of each recent peer, most recently seen first."""

    def __init__(self, environment: Environment) -> None:
        self._disk = environment.disk
        self._executor = environment.executor
        self._clock = environment.clock
        self._log = environment.log
        self._peers: dict[Address, StoredPeer] = {}
        self._written: list[Address] = []
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
                met = StoredPeer(bytes.fromhex(entry.get("id", "")), float(entry["met"]))
                self._peers[Address.checked(host, port)] = met
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._log.warning("remembered_peers_unreadable", file=PEERS_FILE, error=str(error))

    def addresses(self) -> list[Address]:
        """The stored addresses, most recently seen first."""
        return list(self._peers)

    @property
    def write_interval_s(self) -> float:
        """The interval until the next check for changes."""
        return FULL_WRITE_INTERVAL_S if len(self._peers) >= MAX_STORED else WRITE_INTERVAL_S

    def add_live(self, peers: Iterable[Peer]) -> None:
        """Store the addresses of these live peers, in place of their former ones."""
        now = self._clock.wall()
        alive = {peer.address: StoredPeer(peer.node_id, now) for peer in peers}
        ids = {met.node_id for met in alive.values()}
        kept = {address: met for address, met in self._peers.items() if address in alive or met.node_id not in ids}
        recent = sorted({**kept, **alive}.items(), key=lambda item: -item[1].met_at)
        self._peers = {address: met for address, met in recent[:MAX_STORED] if abs(now - met.met_at) <= MAX_AGE_S}

    async def write(self) -> None:
        """Write the peers to disk, off the loop, if they changed. The first failure is logged; the node can run without
        the file."""
        addresses = sorted(self._peers)
        if not addresses or addresses == self._written:
            return
        entries = [
            {"address": str(address), "id": met.node_id.hex(), "met": round(met.met_at)}
            for address, met in self._peers.items()
        ]
        try:
            await self._executor.run(self._write_file, json.dumps({"peers": entries}, indent=1).encode())
        except OSError as error:
            if not self._failed:
                self._log.warning("remembered_peers_not_written", file=PEERS_FILE, error=str(error))
            self._failed = True
            return
        self._failed = False
        self._written = addresses

    def _write_file(self, data: bytes) -> None:
        with self._one_write:
            self._disk.write(PEERS_FILE, data)
