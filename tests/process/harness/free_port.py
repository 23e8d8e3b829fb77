"""Ports for processes that a test starts, chosen where no connection of another process takes them meanwhile."""

from __future__ import annotations

import contextlib
import random
import socket

#: Below the ports that Linux gives to outgoing connections (32,768 to 60,999) and above what services use.
FIRST, LAST = 20_000, 32_000
#: Of the system: the workers of one run are forks, and would all draw the same ports.
_draw = random.SystemRandom()


def free_port(count: int = 1) -> int:
    """The first of `count` neighbouring ports that are free for TCP and UDP on the loopback.

    A port that the kernel chooses for us may become the near end of any connection until the process binds it.
    """
    while True:
        first = _draw.randrange(FIRST, LAST - count)
        with contextlib.ExitStack() as bound, contextlib.suppress(OSError):
            for port in range(first, first + count):
                for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                    bound.enter_context(socket.socket(type=kind)).bind(("127.0.0.1", port))
            return first
