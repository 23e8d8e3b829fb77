"""Who uses the two shared buffers while a step is trained and the delta of the step before is exchanged.

The trainer begins with `vector` and its own last `delta`, and later overwrites `delta`; the daemon encodes that delta
and then pulls into `vector`. Two facts order these accesses: the trainer has loaded both buffers, so that `vector` may
change; the daemon has its own copy of the delta, so that `delta` may be overwritten.
"""

from __future__ import annotations

import asyncio


class BufferHandshake:
    """One overlapping step: the trainer's side sets `loaded`, the exchange sets `delta_taken`.

    Both are set too when their side ends in another way, so that no one waits for it in vain.
    """

    def __init__(self) -> None:
        self.loaded = asyncio.Event()
        self.delta_taken = asyncio.Event()
