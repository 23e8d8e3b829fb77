"""Looks at the node once a second: adds a row to the run so far, and gives every reader of `/stream` the same bytes.

The cost of a look does not depend on the number of readers: status and peers are encoded once. With no reader nothing
is encoded. The rows are what `/status` says at one moment, in one ring that is thinned as it grows. Counters are kept
as they are, and a rate is the difference of two rows over the time between them. So every second row can go, and all
rates that are left are right. Times are monotonic seconds and only rise.
"""

from __future__ import annotations

import asyncio
import logging
import math
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from p2pnode.overlay.environment import Clock
from p2pnode.status import SCHEMA
from p2pnode.status.schema import HistoryAnswer, PeerStatus, Status, Update
from p2pnode.training.progress import StepRow

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


#: When there are so many rows, every second one goes, and every second look makes none: a row a second for 16 minutes,
#: one in two seconds for the next 16, and 85 minutes apart after a month.
ROWS = 960
#: The first metrics that a script evaluates are kept, so many: a chart shows no more, and memory stays fixed.
METRICS = 4
#: The phases of a step. `…_seconds` count what they have taken since the first look.
PHASES = ("train", "push", "wait", "pull")

Row = dict[str, float | None]


class History:
    """Rows of the same columns at rising times, at most `rows`; a value that is missing or not finite is NaN."""

    def __init__(self, rows: int = ROWS) -> None:
        self.times = array("d")
        self.series: dict[str, array[float]] = {}
        self._rows = rows
        self._every = 1
        self._looks = 0
        self._step: int | None = None
        self._spent_s = dict.fromkeys(PHASES, 0.0)
        #: The newest row, whether it is kept or not.
        self._newest: tuple[float, Row] | None = None

    def look(self, now: float, status: Status, steps: Sequence[StepRow]) -> Row:
        """The row of this moment, of which the history keeps each that is due. `steps`: the last ones."""
        self._spend(status.step, steps)
        row = self._row(status)
        if self.times and now <= self.times[-1]:
            return row
        self._newest = now, row
        if self._looks % self._every == 0:
            self._keep(now, row)
        self._looks += 1
        return row

    def kept(self) -> tuple[list[float], dict[str, list[float]]]:
        """Times and series of all rows, and of the newest: what follows a page adds to a row of a second ago."""
        times, series = self.times.tolist(), {name: values.tolist() for name, values in self.series.items()}
        if self._newest is not None and self._newest[0] > times[-1]:
            times.append(self._newest[0])
            for name, values in series.items():
                values.append(_number(self._newest[1].get(name)))
        return times, series

    def _spend(self, step: int, steps: Sequence[StepRow]) -> None:
        """Count the time of the steps that have ended since the last look."""
        for row in steps:
            if self._step is not None and row["step"] > self._step:
                self._spent_s["train"] += row.get("train_seconds", 0.0)
                self._spent_s["push"] += row.get("push_seconds", 0.0)
                self._spent_s["wait"] += row.get("wait_seconds", 0.0)
                self._spent_s["pull"] += row.get("pull_seconds", 0.0)
        self._step = step

    def _row(self, status: Status) -> Row:
        exchange, training, line, population = status.exchange, status.training, status.line, status.population
        metrics = {f"metric:{name}": value for name, value in training.metrics.items() if name != "loss"}
        known = [name for name in self.series if name.startswith("metric:")]
        kept = [*known, *(name for name in metrics if name not in known)][:METRICS]
        return {
            "step": status.step,
            "loss": training.loss,
            "samples": training.samples,
            "step_seconds": training.step_seconds or None,
            **{f"{phase}_seconds": spent_s for phase, spent_s in self._spent_s.items()},
            "bytes_sent": exchange.bytes_sent,
            "bytes_received": exchange.bytes_received,
            "upload_bytes_per_second": None if line is None else line.upload_bytes_per_s,
            "download_bytes_per_second": None if line is None else line.download_bytes_per_s,
            "population": population.estimate,
            # A swarm that is counted has no interval, and no second method.
            "population_low": None if population.exact else population.low,
            "population_high": None if population.exact else population.high,
            "population_zone": None if population.exact else population.zone_estimate,
            "workers": population.workers,
            "training_share": training.training_share,
            **{name: metrics[name] for name in kept if name in metrics},
        }

    def _keep(self, now: float, row: Row) -> None:
        for name in row.keys() - self.series.keys():
            self.series[name] = array("d", [math.nan]) * len(self.times)
        self.times.append(now)
        for name, values in self.series.items():
            values.append(_number(row.get(name)))
        if len(self.times) >= self._rows:
            self._every *= 2
            self.times = self.times[::2]
            self.series = {name: values[::2] for name, values in self.series.items()}


def _number(value: float | None) -> float:
    return math.nan if value is None or not math.isfinite(value) else value
