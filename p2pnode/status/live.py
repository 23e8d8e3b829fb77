"""Looks at the node once a second: adds a row to the history, and gives every reader of `/stream` the same bytes.

The cost of a look does not depend on the number of readers: status and peers are encoded once. With no reader nothing
is encoded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from p2pnode.overlay.environment import Clock
from p2pnode.status.history import History, Row
from p2pnode.status.limits import SCHEMA
from p2pnode.status.schema import HistoryAnswer, PeerStatus, Status, Update

if TYPE_CHECKING:
    from p2pnode.status.report import StatusReport

#: Seconds between two looks, and so between two messages of a stream.
PERIOD_S = 1.0
#: Steps that one look can have missed.
STEPS_PER_LOOK = 200
#: Most peers in a message of the stream. Of more, the slowest and evenly spread ones: the distribution stays the same.
PEERS_SHOWN = 200


class LiveFeed:
    """The node's history, and its present for every reader of `/stream`."""

    def __init__(self, source: StatusReport, clock: Clock) -> None:
        self._source = source
        self._clock = clock
        self._history = History()
        self._readers: list[asyncio.Future[bytes | None]] = []
        self._task: asyncio.Task[None] | None = None
        self._ended = False

    def start(self) -> None:
        """Look now, and once a second until `stop`."""
        self._task = asyncio.create_task(self._run(), name="live-feed")

    async def stop(self) -> None:
        """End the looks, and every reader; idempotent."""
        self._ended = True
        self._give(None)
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def next(self) -> bytes | None:
        """The encoded `Update` of the next look; None when the node ends."""
        if self._ended:
            return None
        reader: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self._readers.append(reader)
        try:
            return await reader
        finally:
            if reader in self._readers:
                self._readers.remove(reader)

    def history(self) -> HistoryAnswer:
        """Every row that is kept, under wall time."""
        offset_s = self._clock.wall() - self._clock.monotonic()
        times, series = self._history.kept()
        return HistoryAnswer(schema=SCHEMA, times=[round(time + offset_s, 2) for time in times], series=series)

    def now(self) -> bytes:
        """The node as it is now, encoded as `Update`, for a reader that has just come."""
        return self._encoded(self._source.status(), {})

    async def _run(self) -> None:
        fault = ""
        while True:
            try:
                self._look()
                fault = ""
            except Exception as error:
                # The dashboard misses a second; training goes on, and `/status` shows the same fault.
                if repr(error) != fault:
                    logging.getLogger(__name__).exception("the node's figures cannot be read")
                fault = repr(error)
            await asyncio.sleep(PERIOD_S)

    def _look(self) -> None:
        now = self._clock.monotonic()
        status = self._source.status()
        row = self._history.look(now, status, self._source.steps(STEPS_PER_LOOK))
        if self._readers:
            self._give(self._encoded(status, row))

    def _encoded(self, status: Status, row: Row) -> bytes:
        peers = self._source.peers()
        slowest = status.waiting.slowest if status.waiting is not None else ""
        update = Update(
            schema=SCHEMA,
            time=round(self._clock.wall(), 2),
            status=status,
            peers=shown(peers, PEERS_SHOWN, slowest),
            peers_known=len(peers),
            sample=row,
        )
        return msgspec.json.encode(update, enc_hook=str)

    def _give(self, message: bytes | None) -> None:
        readers, self._readers = self._readers, []
        for reader in readers:
            if not reader.done():
                reader.set_result(message)


def shown(peers: Sequence[PeerStatus], limit: int, waited_for: str) -> list[PeerStatus]:
    """At most `limit` of the peers, in their order: evenly spread, with both ends and the one that is waited for."""
    if len(peers) <= limit:
        return list(peers)
    last = len(peers) - 1
    places = {round(number * last / (limit - 1)) for number in range(limit)}
    if not any(peers[place].id == waited_for for place in places):
        found = next((place for place, peer in enumerate(peers) if peer.id == waited_for), None)
        if found is not None:
            # In the place of its neighbour, so that there are not more.
            nearest = min(places - {0, last}, key=lambda place: abs(place - found))
            places = places - {nearest} | {found}
    return [peers[place] for place in sorted(places)]
