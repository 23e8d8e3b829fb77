"""A daemon that also watches its own event loop: `python -m benchmarks.probed OUT.json start --config FILE`.

It is `p2pnode` itself with one task more, which sleeps two milliseconds and notes how much later it woke. At the end
every wake-up is written to OUT.json as [monotonic seconds, milliseconds late]: the harness picks its window afterwards
and disturbs nothing while it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

#: As in reference building-blocks section 4, whose figures these can be laid beside.
PERIOD_S = 0.002

Wakes = list[tuple[float, float]]


async def probe(wakes: Wakes) -> None:
    """Note each wake-up until cancelled. Not the loop's own clock: uvloop's stands still within a turn."""
    while True:
        slept_s = time.monotonic()
        await asyncio.sleep(PERIOD_S)
        now_s = time.monotonic()
        wakes.append((now_s, 1000 * (now_s - slept_s - PERIOD_S)))


def window(wakes: Iterable[tuple[float, float]], start_s: float, stop_s: float) -> list[float]:
    """Milliseconds late of the wake-ups between two moments. Pure."""
    return [late_ms for now_s, late_ms in wakes if start_s <= now_s <= stop_s]


def main() -> int:
    """Run the rest of the command line as `p2pnode` would, with the probe; gives its exit code."""
    from p2pnode import cli, daemon  # the harness, which only checks wake-ups, needs neither

    wakes: Wakes = []
    out = Path(sys.argv[1])
    lives = daemon._main

    async def watched(*arguments: Any) -> int:
        watch = asyncio.create_task(probe(wakes), name="loop-probe")
        try:
            return await lives(*arguments)
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    daemon._main = watched
    try:
        return cli.main(sys.argv[2:])
    finally:
        out.write_text(json.dumps(wakes), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
