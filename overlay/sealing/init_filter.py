"""Decides which handshake inits are answered: each one once, fresh, at a bounded rate, and with a valid signature.

An init is fresh if its sender's clock differs from the local one by at most `CLOCK_BOUND_S` and it was made after this
node's start. The newest time of each sender is remembered, so a recorded init is refused, also after a restart
(WireGuard's rule, Donenfeld 2017, section 5.1). The cheap checks come first: only a fresh init costs a signature check.
Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from p2pnode.overlay.errors import Refused
from p2pnode.overlay.rate_limits import RateLimit, TokenBucket
from p2pnode.overlay.sealing.handshake import Epoch, HandshakeInit

#: Clocks of two members may differ by this much. Beyond it inits get no answer, and a warning is logged here.
CLOCK_BOUND_S = 60.0
#: Senders remembered, and clock warnings given: bounds, so that no flood of inits grows memory.
MAX_SENDERS = 16384
MAX_CLOCK_REPORTS = 64
#: An init costs its receiver about 250 µs: above this rate they get no answer.
INITS = RateLimit(400.0, 2000.0)


class InitFilter:
    """State of the checks since the start; `check` raises `Refused` for every init that must not be answered."""

    def __init__(self, now: float, wall: float, clock_differs: Callable[[bytes, float], None]) -> None:
        """`clock_differs(node, seconds)`: a member's clock is ahead by more than the bound (behind, where negative)."""
        #: Newest init by (node, boot), the least recently seen first.
        self._newest: OrderedDict[tuple[bytes, bytes], int] = OrderedDict()
        #: Inits up to this time are refused: they are older than this start, or than a sender that was forgotten.
        self._too_old_us = microseconds(wall)
        self._clock_differs = clock_differs
        self._clocks_reported: dict[bytes, bool] = {}
        self._bucket = TokenBucket(INITS, now)

    def check(self, init: HandshakeInit, epoch: Epoch, now: float, wall: float) -> None:
        """Accept an init once and remember it. Raises `Refused`."""
        sender = (init.node_id, init.boot_nonce)
        if init.sent_us <= self._newest.get(sender, 0):
            raise Refused("replayed")
        ahead_s = (init.sent_us - microseconds(wall)) / 1e6
        if abs(ahead_s) > CLOCK_BOUND_S:
            self._report_clock(init, epoch, ahead_s)
            raise Refused("clock")
        if init.sent_us <= self._too_old_us:
            raise Refused("before_start")
        if self._bucket.take(now):
            raise Refused("busy")
        if not init.is_signed(epoch):
            raise Refused("unsigned")
        self._newest[sender] = init.sent_us
        self._newest.move_to_end(sender)
        if len(self._newest) > MAX_SENDERS:
            self._too_old_us = max(self._too_old_us, self._newest.popitem(last=False)[1])

    def _report_clock(self, init: HandshakeInit, epoch: Epoch, ahead_s: float) -> None:
        """Once per node. Either clock may be wrong, or the init is an old recording."""
        if init.node_id in self._clocks_reported or len(self._clocks_reported) >= MAX_CLOCK_REPORTS:
            return
        if init.is_signed(epoch):
            self._clocks_reported[init.node_id] = True
            self._clock_differs(init.node_id, ahead_s)


def microseconds(wall: float) -> int:
    """The time of a handshake message, as it is on the wire."""
    return int(wall * 1e6)
