"""Writes output from a thread of its own, so that a full pipe or a stopped terminal never holds the event loop.

The queue is bounded. Data that does not fit is dropped and counted, and a note in the output marks each gap. After the
receiver has closed its end of the pipe, everything is discarded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable

#: Bytes that wait for a slow receiver: tens of thousands of lines.
QUEUE_BYTES = 4 << 20


class BackgroundOutput:
    """A queue of bytes and the thread that writes them. All methods but the thread's may be called from the loop."""

    def __init__(
        self,
        write: Callable[[bytes], object],
        *,
        note: Callable[[int, int], bytes] | None = None,
        on_drop: Callable[[], None] | None = None,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        """`write` may block; if it raises `OSError`, that data is lost. `note(pieces, bytes)` makes the text for
        a gap of so many dropped pieces and bytes. `on_drop` is called at the first piece of each gap, in the thread
        that called `put`."""
        self._write = write
        self._note = note
        self._on_drop = on_drop
        self._queue_bytes = queue_bytes
        self._queue: deque[bytes | Callable[[], object]] = deque()
        self._queued_bytes = 0
        self._missing_pieces = self._missing_bytes = 0
        self._changed = threading.Condition()
        self._busy = False
        self._thread: threading.Thread | None = None
        #: Pieces dropped since the start.
        self.dropped = 0

    def put(self, data: bytes) -> None:
        """Queue data, or drop it if the queue is full. Never blocks."""
        with self._changed:
            # A gap lasts until half the queue is free: otherwise the first short piece that fits would end it.
            limit = self._queue_bytes // 2 if self._missing_pieces else self._queue_bytes
            if self._queued_bytes + len(data) > limit and self._queue:
                starts_gap = not self._missing_pieces
                self._missing_pieces += 1
                self._missing_bytes += len(data)
                self.dropped += 1
            else:
                starts_gap = False
                self._end_gap()
                self._append(data)
        if starts_gap and self._on_drop is not None:
            self._on_drop()

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the thread after everything queued so far was written."""
        with self._changed:
            self._end_gap()
            self._append(function)

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued so far was written; False after `timeout_s` seconds."""
        loop = asyncio.get_running_loop()
        written = asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(written.set)

        self.call(tell)
        try:
            async with asyncio.timeout(timeout_s):
                await written.wait()
        except TimeoutError:
            return False
        return True

    def drain(self, timeout_s: float) -> bool:
        """As `flush`, for callers without an event loop: it blocks."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._queue or self._busy), timeout_s)

    def _end_gap(self) -> None:
        if self._missing_pieces:
            if self._note is not None:
                self._append(self._note(self._missing_pieces, self._missing_bytes))
            self._missing_pieces = self._missing_bytes = 0

    def _append(self, item: bytes | Callable[[], object]) -> None:
        self._queue.append(item)
        self._queued_bytes += len(item) if isinstance(item, bytes) else 0
        if self._thread is None:
            # A daemon thread: one that is stuck in a write must not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name="p2pnode-output", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                if not self._queue:
                    self._end_gap()
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._queue))
                item = self._queue.popleft()
                self._queued_bytes -= len(item) if isinstance(item, bytes) else 0
                self._busy = True
            with contextlib.suppress(OSError):
                if isinstance(item, bytes):
                    self._write(item)
                else:
                    item()


def descriptor_writer(descriptor: int) -> Callable[[bytes], None]:
    """A `write` for a file descriptor: whole, also where the descriptor does not block; nothing once it is broken."""
    is_broken = False

    def write(data: bytes) -> None:
        nonlocal is_broken
        left = memoryview(data)
        while left and not is_broken:
            try:
                left = left[os.write(descriptor, left) :]
            except BlockingIOError:  # another process has set the terminal we share to non-blocking
                select.select([], [descriptor], [])
            except OSError:
                is_broken = True

    return write
