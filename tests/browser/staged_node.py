"""A node that shows what a test wants: the real status server, with a status, peers and events that are made up.

It runs in a thread, because playwright has the main one. The figures of a node that trains rise with the clock.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any

from p2pnode.config.settings import Config, StatusSettings
from p2pnode.overlay.system import SystemClock
from p2pnode.status.schema import PeerStatus, Status
from p2pnode.status.server import StatusServer
from p2pnode.training.progress import StepRow
from tests.browser.scenes import Scene, moved
from tests.process.harness.fake_node import FakeSource

#: How far back the charts reach at the start.
PAST_S = 300


class _Clock(SystemClock):
    """The machine's clock, put back for a while."""

    def __init__(self) -> None:
        self.back_s = float(PAST_S)

    def monotonic(self) -> float:
        return super().monotonic() - self.back_s

    def wall(self) -> float:
        return super().wall() - self.back_s


class _Source(FakeSource):
    """What the server asks; see `p2pnode.status.report.StatusReport`."""

    def __init__(self, scene: Scene, clock: _Clock) -> None:
        super().__init__(Config())
        self.scene = scene
        self._clock = clock
        self._began = clock.monotonic()

    def now_s(self) -> float:
        return self._clock.monotonic() - self._began

    def status(self) -> Status:
        return moved(self.scene, self.now_s())[0]

    def peers(self) -> list[PeerStatus]:
        return moved(self.scene, self.now_s())[1]

    def steps(self, limit: int) -> list[StepRow]:
        step = self.status().step
        rows: list[StepRow] = [
            {
                "step": number,
                "train_seconds": 1.1,
                "push_seconds": 0.12,
                "wait_seconds": 0.1 + 0.05 * (number % 5),
                "pull_seconds": 0.08,
            }
            for number in range(max(1, step - 5), step + 1)
        ]
        return rows[-limit:]


class StagedNode:
    """Serves a scene; a context manager."""

    def __init__(self, scene: Scene) -> None:
        self._clock = _Clock()
        self._source = _Source(scene, self._clock)
        self._port = 0
        self._server: StatusServer | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="staged-node", daemon=True)
        self._thread.start()
        self._tell(scene)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def show(self, scene: Scene) -> None:
        """Show another scene from now on."""

        def change() -> None:
            self._source.scene = scene
            self._tell(scene)

        self._do(change)

    def start(self) -> None:
        """Listen."""

        async def begin() -> None:
            self._server = StatusServer(self._source, StatusSettings(port=0), "k" * 43, self._clock)
            while self._clock.back_s > 0.0:
                self._server._feed._look()
                self._clock.back_s -= 1.0
            self._port = (await self._server.start()).port

        self._run(begin())

    def stop(self) -> None:
        """End, and say so to who reads."""
        server, self._server = self._server, None
        if server is not None:
            self._run(server.stop())

    def __enter__(self) -> StagedNode:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _tell(self, scene: Scene) -> None:
        now = time.time()
        for age_s, level, name, fields in scene.events:
            self._source.events.add(level, name, fields, wall=now - age_s)

    def _do(self, function: Callable[[], Any]) -> None:
        async def call() -> None:
            function()

        self._run(call())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=20)
