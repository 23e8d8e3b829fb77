"""Calls that wait for their answers: one retry, time-outs, answers after the time-out, and contacts that had none.

Each try has a message id of its own, so an answer always shows the round trip of the datagram it answers (Karn's rule).
A timer that fires late shows that this node's loop was busy. The answer may still be in the socket's buffer, so the
wait is extended once. A call that was given up is kept for a while. Its late answer shows that the waits are shorter
than the round trip; answers in time alone would never lengthen them.

One timer serves all calls. Nearly all are answered before they are due; a timer of its own would cost each of them more
than its datagram.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextvars import Context, copy_context
from heapq import heappop, heappush

import msgspec

from p2pnode.overlay.environment import Clock, Entropy
from p2pnode.overlay.kademlia.messages import MESSAGE_ID_BYTES, Call, Result
from p2pnode.overlay.peers import Contact, Peer
from p2pnode.overlay.waits import DEVIATIONS, RoundTrips

#: A timer that fires this late shows that this node's loop was busy: the wait is extended once.
EXCUSABLE_LAG_S = 0.05
#: Longest wait for the answer to a direct probe; the measured round trip shortens it.
PROBE_TIMEOUT_S = 0.5
#: Tries that wait for answers at one time; a thousand peers asked at once are far below it, a flood is not.
MAX_OUTSTANDING = 8192
#: Tries of calls given up whose answer may still come.
MAX_LATE_CALLS = 256
#: An answer later than this after its try was given up shows nothing about round trips of now.
LATE_S = 30.0

#: Calls that are due so soon are given up with those that are due: a loop may round its timers to this.
TIMER_S = 0.001

#: Of a try: below this a busy loop, not the network, causes time-outs; and before anything has been measured.
FLOOR_S, UNMEASURED_S = 0.1, 0.25

OnResult = Callable[[Result | None], None]


async def answer(call: Callable[[OnResult], None]) -> Result | None:
    """Make a call, and wait until it is answered or timed out. The caller may be cancelled."""
    waiting: asyncio.Future[Result | None] = asyncio.get_running_loop().create_future()

    def on_result(result: Result | None) -> None:
        if not waiting.done():
            waiting.set_result(result)

    call(on_result)
    return await waiting


class CallTimes(RoundTrips):
    """The round trips of calls to all peers; a peer with round trips of its own gets its own waits. One retry follows a
    wait, and the whole call never exceeds the ceiling."""

    def __init__(self, ceiling_s: float) -> None:
        super().__init__()
        self._ceiling_s = ceiling_s

    def waits(self, peer: Peer | None, stretch: float = 1.0) -> tuple[float, float]:
        """Seconds until the retry, and from the retry until the time-out."""
        wait_s = self.timeout_s(UNMEASURED_S)
        if peer is not None and peer.round_trip_s is not None:
            wait_s = peer.round_trip_s + DEVIATIONS * peer.round_trip_deviation_s
        first_s = min(max(wait_s, FLOOR_S), self._ceiling_s / 2)
        second_s = max(first_s, min(wait_s, self._ceiling_s - first_s))
        return first_s * stretch, second_s * stretch


def _nobody_waits(_: Result | None) -> None:
    """The call was given up."""


class PendingCall(msgspec.Struct, eq=False):
    """A call that waits for its answer. Times in seconds; `second_s` is the wait after the retry, 0 once it is out."""

    contact: Contact
    body: Call
    on_result: OnResult
    on_slow: Callable[[], None] | None
    second_s: float
    counts_as_failure: bool
    require_proof: bool
    #: Whether the wait for it measures the round trip: not where the callee asks others before it answers.
    timed: bool
    #: The message id of each try, and when it went out; the retry's are empty before.
    message_id: bytes = b""
    sent_s: float = 0.0
    retry_id: bytes = b""
    retried_s: float = 0.0
    due: float = 0.0
    excused: bool = False

    @property
    def is_retried(self) -> bool:
        return bool(self.retry_id)

    def tries(self) -> list[tuple[bytes, float]]:
        """Message id and time of each try."""
        first = [(self.message_id, self.sent_s)] if self.message_id else []
        return [*first, (self.retry_id, self.retried_s)] if self.retry_id else first

    def sent_at(self, message_id: bytes) -> float:
        """When the try with this message id went out."""
        return self.retried_s if message_id == self.retry_id else self.sent_s


class CallTable:
    """The pending calls of one node by message id. A retry has an id of its own, so a call may be in it twice."""

    def __init__(
        self,
        clock: Clock,
        entropy: Entropy,
        counters: Counter[str],
        *,
        send: Callable[[bytes, PendingCall], None],
        give_up: Callable[[PendingCall], None],
    ) -> None:
        """`send` sends one try under its message id; `give_up` is called when all waits are over."""
        self._clock = clock
        self._entropy = entropy
        self._counters = counters
        self._send = send
        self._give_up = give_up
        self._outstanding: dict[bytes, PendingCall] = {}
        self._late: dict[bytes, tuple[PendingCall, float]] = {}
        self._proving: dict[Contact, None] = {}
        #: When each try is due, the order of the tries, and the message id. Those that were answered stay until then.
        self._due: list[tuple[float, int, bytes]] = []
        self._tries = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._context: Context | None = None

    def __len__(self) -> int:
        """Tries that wait for an answer."""
        return len(self._outstanding)

    @property
    def late(self) -> int:
        """Tries of calls given up whose answer may still come."""
        return len(self._late)

    @property
    def is_full(self) -> bool:
        return len(self._outstanding) >= MAX_OUTSTANDING

    @property
    def waiting(self) -> int:
        """Calls that wait for an answer, retries not counted."""
        return len({id(pending) for pending in self._outstanding.values()})

    def awaits_proof(self, contact: Contact) -> bool:
        """Whether a call waits in which this contact has to prove its id."""
        return contact in self._proving

    def start(self, pending: PendingCall, wait_s: float, now: float) -> None:
        """Send one try and wait for its answer."""
        message_id = self._entropy.token(MESSAGE_ID_BYTES)
        if pending.message_id:
            pending.retry_id, pending.retried_s = message_id, now
        else:
            pending.message_id, pending.sent_s = message_id, now
        self._outstanding[message_id] = pending
        if pending.require_proof:
            self._proving[pending.contact] = None
        self._wait(message_id, pending, wait_s, now)
        self._send(message_id, pending)

    def get(self, message_id: bytes) -> PendingCall | None:
        return self._outstanding.get(message_id)

    def settle(self, pending: PendingCall) -> None:
        """It is answered or given up: all its tries leave the table."""
        self._outstanding.pop(pending.message_id, None)
        if pending.retry_id:
            self._outstanding.pop(pending.retry_id, None)
        if self._proving:
            self._proving.pop(pending.contact, None)

    def take_late(self, message_id: bytes) -> tuple[PendingCall | None, float]:
        """The call given up that this answer belongs to, and when that try was sent."""
        return self._late.pop(message_id, (None, 0.0))

    def close(self) -> list[PendingCall]:
        """Drop all; the calls that still waited are returned."""
        waiting = {id(pending): pending for pending in self._outstanding.values()}
        self._outstanding.clear()
        self._proving.clear()
        self._late.clear()
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return list(waiting.values())

    def _wait(self, message_id: bytes, pending: PendingCall, wait_s: float, now: float) -> None:
        due = pending.due = now + wait_s
        self._tries += 1
        heappush(self._due, (due, self._tries, message_id))
        if self._is_later(due):
            self._set_timer(due, wait_s)

    def _is_later(self, due: float) -> bool:
        """Whether the timer would come too late for this."""
        return self._timer is None or due < self._timer_due

    def _set_timer(self, due: float, wait_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._context is None:
            self._context = copy_context()  # not that of whoever happens to call first next time
        self._timer_due = due
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(wait_s, self._on_timer, context=self._context)

    def _on_timer(self) -> None:
        """Time out what is due, and come back for the next that still waits."""
        self._timer = None
        waiting, latest = self._due, self._clock.monotonic() + TIMER_S
        if self._late:
            self._forget_late(latest)
        try:
            while waiting and (waiting[0][0] <= latest or waiting[0][2] not in self._outstanding):
                self._timeout(heappop(waiting)[2])
        finally:
            if waiting and self._is_later(waiting[0][0]):
                self._set_timer(waiting[0][0], max(0.0, waiting[0][0] - self._clock.monotonic()))

    def _timeout(self, message_id: bytes) -> None:
        pending = self._outstanding.get(message_id)
        if pending is None:
            return
        now = self._clock.monotonic()
        if now - pending.due > EXCUSABLE_LAG_S and not pending.excused:
            pending.excused = True
            self._wait(message_id, pending, EXCUSABLE_LAG_S, now)
            return
        if pending.second_s > 0:
            second_s, pending.second_s = pending.second_s, 0.0
            self._counters["retries"] += 1
            self.start(pending, second_s, now)
            return
        self.settle(pending)
        if pending.timed:
            self._late.update((each, (pending, sent_s)) for each, sent_s in pending.tries())
            self._forget_late(now)
        self._counters["timeouts"] += 1
        self._give_up(pending)
        # It is kept for its late answer, and what waited for it, often a whole lookup, must not be kept with it.
        pending.on_result, pending.on_slow = _nobody_waits, None

    def _forget_late(self, now: float) -> None:
        """Drop the oldest of too many, and those whose answers would show nothing any more."""
        while self._late:
            oldest = next(iter(self._late))
            if len(self._late) <= MAX_LATE_CALLS and now - self._late[oldest][0].due <= LATE_S:
                return
            del self._late[oldest]


#: The pause of an address after its first time-out; it doubles with each further one, up to the maximum.
FIRST_PAUSE_S = 5.0
MAX_PAUSE_S = 60.0
#: Addresses that are remembered.
MAX_SILENT = 4096


class NegativeCache:
    """Contacts that timed out, by id and address: a node that moved can be tried at once."""

    def __init__(self) -> None:
        self._until: dict[Contact, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._until)

    def add(self, contact: Contact, now: float) -> None:
        """It answered neither a call nor its retry."""
        _, last = self._until.pop(contact, (0.0, FIRST_PAUSE_S / 2))
        pause = min(2 * last, MAX_PAUSE_S)
        self._until[contact] = (now + pause, pause)
        if len(self._until) > MAX_SILENT:
            del self._until[next(iter(self._until))]

    def discard(self, contact: Contact) -> None:
        """It answered."""
        if self._until:
            self._until.pop(contact, None)

    def expire(self, now: float) -> None:
        """Forget those whose pause has been over for as long as the longest."""
        self._until = {contact: entry for contact, entry in self._until.items() if now - entry[0] <= MAX_PAUSE_S}

    def is_silent(self, contact: Contact, now: float) -> bool:
        entry = self._until.get(contact)
        return entry is not None and now < entry[0]
