"""Peers kept on disk, as plain JSON, so that a restarted node finds its swarm without its bootstraps."""

from __future__ import annotations

import json
from collections.abc import Iterable

from overlay.bootstrap import split_host_port
from overlay.doors import Clock, Disk, Log
from overlay.peers import Peer
from overlay.transport import Address

PEERS_FILE = "peers.json"
MOST_PEERS = 64
#: A peer that was not met for this long is forgotten.
MEMORY_S = 14 * 24 * 3600.0
#: Written at most this often, and when the node stops.
WRITE_S = 30.0


class Remembered:
    """Addresses of peers met lately, most recently met first."""

    def __init__(self, disk: Disk, clock: Clock, log: Log) -> None:
        self._disk = disk
        self._clock = clock
        self._log = log
        self._met: dict[Address, float] = {}  # wall seconds
        self._written: list[Address] = []
        self._failed = False

    def load(self) -> None:
        """Read the file; what is unreadable is left out, and said."""
        try:
            data = self._disk.read(PEERS_FILE)
            if data is None:
                return
            for entry in json.loads(data)["peers"][:MOST_PEERS]:
                host, port = split_host_port(str(entry["address"]))
                self._met[Address.checked(host, port)] = float(entry["met"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self._log.warning("remembered_peers_unreadable", file=PEERS_FILE, error=str(error))

    def addresses(self) -> list[Address]:
        return list(self._met)

    def note(self, peers: Iterable[Peer]) -> None:
        """These are alive now."""
        now = self._clock.wall()
        for peer in peers:
            self._met[peer.address] = now
        recent = sorted(self._met.items(), key=lambda item: -item[1])
        self._met = {address: met for address, met in recent[:MOST_PEERS] if abs(now - met) <= MEMORY_S}

    def write(self) -> None:
        """Put them on disk if they are others than before. A failure is logged once; it costs comfort, not safety."""
        addresses = sorted(self._met)
        if not addresses or addresses == self._written:
            return
        entries = [{"address": str(address), "met": round(met)} for address, met in self._met.items()]
        try:
            self._disk.write(PEERS_FILE, json.dumps({"peers": entries}, indent=1).encode())
        except OSError as error:
            if not self._failed:
                self._log.warning("remembered_peers_not_written", file=PEERS_FILE, error=str(error))
            self._failed = True
            return
        self._failed = False
        self._written = addresses
