"""Decides what a silent trainer is: at work, stalled, or hung for good. Pure.

A trainer speaks at each optimiser step, at `swarm.alive()`, and around `swarm.busy()`. A long validation pass is
silent as a deadlock is; only the processor time that its processes take distinguishes the two. So silence alone
makes a trainer *stalled*: barriers skip the node, and nothing else happens. It is killed when it was also idle for
long, or when the silence lasts longer than any pass. A trainer that has said that it is busy is never stalled.

The first turn of a process compiles kernels or fills caches, and barriers wait for it: silence alone does not make it
stalled, but silence without work does, after the same time. So nodes that began together tell a compiling node from one
that hangs, and go on without that one. A trainer that writes a file may wait for its disk, idle.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from enum import Enum

from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.interface import BusyWith

#: A trainer that sends nothing for this long, and for four of its steps, is stalled.
HANG_S = 10.0
#: In multiples of that: 5 min and 1 h (docs/scripts.md).
IDLE_FACTOR = 30.0
WORKING_FACTOR = 360.0
#: In the first turn, and in an order that writes a file, only idle time counts: for so long it is killed. One that
#: writes a file is stalled later, too.
FIRST_IDLE_FACTOR = 60.0
FILE_STALLED_FACTOR = 10.0
#: On a busy machine a process that works may get no processor for some tenths of a second.
STARVED_S = 1.0

#: A trainer with a known pace is stalled after so many of its own steps, and killed after this multiple of that.
STALLED_STEPS = 4.0
KILL_FACTOR = 10.0

#: Processes that use less than this share of one core are idle. A deadlocked one has threads that wake now and then.
IDLE_SHARE = 0.02

#: Not more often than this, even with `hang_s = 0`.
SHORTEST_CHECK_S = 0.05


class SilenceVerdict(Enum):
    """What the supervisor does with the trainer: nothing, announce it as stalled, or kill it."""

    WELL = 1
    STALLED = 2
    IDLE_TOO_LONG = 3
    SILENT_TOO_LONG = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds: of silence until stalled, idle until killed, silent until killed. `only_idle`: only idle time stalls."""

    stalled_s: float
    idle_s: float
    silent_s: float
    only_idle: bool

    @classmethod
    def of(cls, hang_s: float, pace_s: float | None, *, writes_file: bool = False) -> Limits:
        """`pace_s`: the median duration of the trainer's turns or evaluations; None in the first turn of a process, and
        where an order writes a file."""
        if pace_s is None:
            stalled_s = max(STARVED_S, hang_s * (FILE_STALLED_FACTOR if writes_file else 1.0))
            return cls(stalled_s, FIRST_IDLE_FACTOR * hang_s, WORKING_FACTOR * hang_s, only_idle=True)
        stalled_s = max(hang_s, STALLED_STEPS * pace_s)
        idle_s = max(IDLE_FACTOR * hang_s, KILL_FACTOR * stalled_s)
        return cls(stalled_s, idle_s, max(WORKING_FACTOR * hang_s, KILL_FACTOR * idle_s), only_idle=False)


class TrainerSilence:
    """The trainer's last sign of life and the processor time seen since. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        #: What the script has said that it does: until it says that it is idle, no silence means anything.
        self.busy: BusyWith | None = None
        self._heard_at = now
        #: When its processes were last seen to use the processor, or were heard.
        self._worked_at = now
        self._sampled_at = now
        self._used_s: float | None = None

    def heard(self, now: float) -> None:
        """The trainer has spoken."""
        self._heard_at = self._worked_at = now
        self._used_s = None

    def silent_s(self, now: float) -> float:
        return now - self._heard_at

    def note_processor_time(self, now: float, used_s: float | None) -> None:
        """Its processes have worked for `used_s` since they began; None where that cannot be known.

        The total falls when one of several processes has ended; that is work too.
        """
        before_s, since = self._used_s, self._sampled_at
        self._used_s, self._sampled_at = used_s, now
        if used_s is None or (before_s is not None and abs(used_s - before_s) >= IDLE_SHARE * (now - since)):
            self._worked_at = now

    def verdict(self, now: float, limits: Limits) -> SilenceVerdict:
        """What the silence up to now means."""
        if self.busy is not None:
            return SilenceVerdict.WELL
        silent_s, idle_s = now - self._heard_at, now - self._worked_at
        if silent_s >= limits.silent_s:
            return SilenceVerdict.SILENT_TOO_LONG
        if idle_s >= limits.idle_s:
            return SilenceVerdict.IDLE_TOO_LONG
        if (idle_s if limits.only_idle else silent_s) >= limits.stalled_s:
            return SilenceVerdict.STALLED
        return SilenceVerdict.WELL

    def wants_sample(self, now: float, limits: Limits) -> bool:
        """Whether it has been silent long enough for its processor time to matter."""
        return self.busy is None and now - self._heard_at >= limits.stalled_s / 2

    def next_check_s(self, now: float, limits: Limits) -> float:
        """Seconds until the verdict may change, or the next sample is due: every half of the limit for stalled."""
        half_s = max(limits.stalled_s / 2, SHORTEST_CHECK_S)
        return half_s - self.silent_s(now) % half_s


#: Durations kept for the median.
PACE_STEPS = 21


class OrderPace:
    """Of one trainer, over all its processes. `hang_s`: tests give a shorter `HANG_S`."""

    def __init__(self, hang_s: float) -> None:
        self._hang_s = hang_s
        #: Turns, merges and evaluations have a duration: the other orders write a file.
        self._durations_s: dict[type[messages.Order], deque[float]] = {
            messages.Train: deque(maxlen=PACE_STEPS),
            messages.Merge: deque(maxlen=PACE_STEPS),
            messages.Evaluate: deque(maxlen=PACE_STEPS),
        }
        #: What the present process has done before: the first of each kind may take long.
        self._done_before: set[type[messages.Order]] = set()

    def new_process(self) -> None:
        """The trainer is started again."""
        self._done_before.clear()

    def limits(self, order: messages.Order | None) -> Limits:
        """How long the trainer may be silent in this order; None: until values have entered, as in a turn."""
        kind = messages.Train if order is None else type(order)
        medians = [statistics.median(known) for known in self._durations_s.values() if known]
        pace_s = max(medians, default=0.0) if kind in self._done_before else None
        return Limits.of(self._hang_s, pace_s, writes_file=kind not in self._durations_s)

    def note(self, order: messages.Order, seconds: float) -> None:
        """The order was answered after so long."""
        if type(order) in self._durations_s:
            self._durations_s[type(order)].append(seconds)
            self._done_before.add(type(order))
