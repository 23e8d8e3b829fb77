"""Chooses the codec of pushes for `exchange.codec = "auto"`: the least lossy one that the line carries in its time.

The exchange of a step runs beside the next step's training, and may take `PART_BESIDE` of it. There only codecs that
send the largest values are chosen, on any line: with more values the swarm learns slower, because these wait for the
others' agreement (docs/decisions.md). A step of few bytes is sent whole. Under bsp training waits for the exchange,
which may take `PART_ALONE`, and any codec is chosen. Once the line is measured (`overlay.line.rate`), the bytes of a
step in closed form (`training.encoding.step_bytes`) over its rate decide. A less lossy codec must fit into four fifths
of that time, and every change must be decided twice in a row, so a rate near an edge changes nothing.

A line is measured only when it was busy for some time. Before that the first push has 64 KiB, or the fewest values:
what it leaves out follows in the next one, and a longer push would fill a slow line until all nodes have noticed. While
pushes take less than half of their time, the least lossy codec is tried that fits by what they took; one that takes
more than its time is given up for a while. A slow line is busy during a probe, and measured then; a fast one ends at
the most exact codec within a few steps. A measured rate may still be too small, because of slow peers: pushes that take
little of their time overrule it.

`CodecChoice` decides, purely; `CodecControl` gathers the measured line, the shares of this node and the times.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median_high

from p2pnode.overlay.environment import Log
from p2pnode.overlay.line.rate import MeasuredLine
from p2pnode.training.encoding.step_bytes import StepShape, step_bytes
from p2pnode.training.encoding.table import CHANGES, CHOICES, CODECS, LEAST_LOSSY, SPARSE_CHOICES, CodecName
from p2pnode.training.settings import ExchangeSettings

#: The part of a step's training that its exchange may take, beside it and, under bsp, after it (docs/decisions.md).
PART_BESIDE, PART_ALONE = 0.8, 0.1
#: A less lossy codec than the present one must fit into this part of the time allowed.
CLIMB = 0.8
#: Decisions in a row before the codec changes.
CONFIRMATIONS = 2
#: So few bytes are sent in the most exact codec over any line: their time is the round trip.
SMALL_BYTES = 64 * 1024
#: After a try that took too long, so many steps pass before the next.
TRY_AGAIN_STEPS = 10


@dataclass(frozen=True, slots=True)
class LineFacts:
    """What is known when a step is about to be pushed. None: not measured. `step_s`: training of one step; 0: unknown.

    `push_s`: how long the last push took until every owner had acknowledged it, infinite where it was given up before;
    None: there was none.
    """

    shape: StepShape
    upload_bytes_per_s: float | None
    download_bytes_per_s: float | None
    step_s: float
    push_s: float | None
    is_beside: bool

    @property
    def rates(self) -> tuple[float, float] | None:
        """Bytes per second up and down; None: neither is measured.

        A line receives no slower than it sends; what was received so far may be all that was sent to this node.
        """
        up = self.upload_bytes_per_s
        return None if up is None else (up, max(self.download_bytes_per_s or 0.0, up))

    @property
    def allowed_s(self) -> float:
        """Seconds that the exchange of a step may take."""
        return self.step_s * (PART_BESIDE if self.is_beside else PART_ALONE)

    @property
    def choices(self) -> tuple[CodecName, ...]:
        """What is chosen among where a step has more than a few bytes, most exact first."""
        return SPARSE_CHOICES if self.is_beside else CHOICES


class CodecChoice:
    """The codec in which this node pushes."""

    def __init__(self, settings: ExchangeSettings) -> None:
        self.is_automatic = settings.codec == "auto"
        #: The codec in use; before the first decision a careful one.
        self.codec: CodecName = CHANGES if settings.codec == "auto" else settings.codec
        #: Why, for the log and `/status`.
        self.reason = "" if self.is_automatic else "exchange.codec"
        self._settings = settings
        self._wanted: CodecName | None = None
        self._streak = 0
        self._pause_steps = 0

    def decide(self, facts: LineFacts) -> bool:
        """Choose the codec of the next push; returns whether it changed, and at first."""
        if not self.is_automatic:
            return False
        if not self.reason:
            self.codec, self.reason = self._first(facts)
            return True
        self._pause_steps = max(0, self._pause_steps - 1)
        if facts.upload_bytes_per_s is None:
            found, reason = self._by_trial(facts)
        else:
            found, reason = self._as_it_went(facts, *self._by_rate(facts))
        if found == self.codec:
            self.reason, self._wanted, self._streak = reason, None, 0
            return False
        self._streak = self._streak + 1 if found == self._wanted else 1
        self._wanted = found
        if self._streak < CONFIRMATIONS:
            return False
        if _is_lossier(found, self.codec):
            self._pause_steps = TRY_AGAIN_STEPS
        self.codec, self.reason, self._wanted, self._streak = found, reason, None, 0
        return True

    def needed_bytes(self, facts: LineFacts, codec: CodecName | None = None) -> float:
        """Bytes of a step over the upload in a codec, the present one by default."""
        return self._bytes(facts.shape, codec or self.codec)[0]

    def _bytes(self, shape: StepShape, codec: CodecName) -> tuple[float, float]:
        pulls = None if self._settings.pull_codec == "auto" else self._settings.pull_codec
        found = step_bytes(shape, codec, pulls)
        return found.up, found.down

    def _first(self, facts: LineFacts) -> tuple[CodecName, str]:
        if facts.upload_bytes_per_s is not None and facts.step_s:
            return self._by_rate(facts)
        # To the owners, or forwarded to the backups of this node's own shards: all of a delta goes over the line once.
        values = facts.shape.parameters if facts.shape.nodes > 1.0 else 0
        fitting = (one for one in (LEAST_LOSSY, *facts.choices) if CODECS[one].bytes_per_value * values <= SMALL_BYTES)
        return next(fitting, CHOICES[-1]), "the line is not measured yet"

    def _by_rate(self, facts: LineFacts) -> tuple[CodecName, str]:
        rates = facts.rates
        if not facts.step_s or rates is None:
            return self.codec, self.reason
        if self.needed_bytes(facts, LEAST_LOSSY) <= SMALL_BYTES:
            return LEAST_LOSSY, _SMALL
        for codec in facts.choices:
            up, down = self._bytes(facts.shape, codec)
            limit_s = facts.allowed_s * (CLIMB if _is_lossier(self.codec, codec) else 1.0)
            if max(up / rates[0], down / rates[1]) <= limit_s:
                return codec, _by_bytes(facts, rates[0], up)
        return CHOICES[-1], _by_bytes(facts, rates[0], self.needed_bytes(facts, CHOICES[-1]))

    def _as_it_went(self, facts: LineFacts, found: CodecName, reason: str) -> tuple[CodecName, str]:
        """What was measured may be more than there is for the exchange: a push that takes more than its time makes the
        codec lossier, and for a while no less so. It may also be less than the line carries: pushes that take less than
        half of their time make the codec no lossier, and the next one is tried where the last push shows that it fits.
        """
        if facts.push_s is None or not facts.step_s:
            return found, reason
        place, allowed_s = CHOICES.index(self.codec), facts.allowed_s
        took = f"a push took {facts.push_s:.3g} s of {allowed_s:.3g}"
        if facts.push_s > allowed_s:  # the line carries more than this exchange: copies of shards, other programs
            lossier = CHOICES[min(place + 1, len(CHOICES) - 1)]
            return (found, reason) if _is_lossier(found, lossier) else (lossier, took)
        if facts.push_s > allowed_s / 2:
            return (self.codec, took) if self._pause_steps and _is_lossier(self.codec, found) else (found, reason)
        if _is_lossier(self.codec, found) and not self._pause_steps:
            return found, reason
        return self.codec if self._pause_steps else self._fitting(facts, facts.push_s), took

    def _by_trial(self, facts: LineFacts) -> tuple[CodecName, str]:
        if self.needed_bytes(facts, LEAST_LOSSY) <= SMALL_BYTES:
            return LEAST_LOSSY, _SMALL
        if facts.push_s is None or not facts.step_s:
            return self.codec, self.reason
        place, allowed_s = CHOICES.index(self.codec), facts.allowed_s
        took = f"a push took {facts.push_s:.3g} s of {allowed_s:.3g}"
        if facts.push_s > allowed_s:
            return CHOICES[min(place + 1, len(CHOICES) - 1)], took
        had_few_bytes = self.codec not in facts.choices
        if had_few_bytes or (facts.push_s <= allowed_s / 2 and not self._pause_steps):
            return self._fitting(facts, facts.push_s), took
        return self.codec, self.reason

    def _fitting(self, facts: LineFacts, push_s: float) -> CodecName:
        """The least lossy codec in which the last push, which took so long in the present one, would fit."""
        for one in facts.choices:
            if one == self.codec:
                break
            # Of a sparse push a part is latency, which does not grow.
            part = 1.0 if CODECS[one].is_partial else CLIMB
            if push_s * _growth(facts.shape, self.codec, one) <= part * facts.allowed_s:
                return one
        return self.codec


_SMALL = "a step has few bytes"


def _growth(shape: StepShape, codec: CodecName, other: CodecName) -> float:
    """How many times longer a push takes in another codec: its own bytes and those that the owners forward, or all that
    goes over the line with it."""
    now, then = step_bytes(shape, codec), step_bytes(shape, other)
    deltas = (then.pushed + then.forwarded) / max(1.0, now.pushed + now.forwarded)
    return max(deltas, then.up / max(1.0, now.up))


def _by_bytes(facts: LineFacts, rate: float, needed_bytes: float) -> str:
    allowed_s = facts.allowed_s
    carried, needed = f"{rate * allowed_s / 1e6:.3g} MB in {allowed_s:.3g} s", f"{needed_bytes / 1e6:.3g} MB"
    return f"the line carries {carried}, {needed} are needed"


def _is_lossier(one: CodecName, other: CodecName) -> bool:
    return CHOICES.index(one) > CHOICES.index(other)


#: Training times of which the median counts. Waiting is in none of them: a slow exchange earns no time.
RECENT_STEPS = 7


class CodecControl:
    """Decides the codec of each push of one node. `shape`: what a step of it exchanges at present."""

    def __init__(
        self, choice: CodecChoice, line: MeasuredLine, log: Log, shape: Callable[[], StepShape], *, is_beside: bool
    ) -> None:
        self._choice = choice
        self._line = line
        self._log = log
        self._shape = shape
        self._is_beside = is_beside
        self._trained_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._push_s: float | None = None

    def before_push(self) -> None:
        """A delta is about to be encoded: choose its codec, and log a change."""
        choice = self._choice
        former = choice.codec if choice.reason else ""
        if choice.decide(self.facts()):
            self._log.info("codec_chosen", codec=choice.codec, former=former, reason=choice.reason)

    def trained(self, seconds: float) -> None:
        """A step was trained in so long, the exchange not counted."""
        self._trained_s.append(max(seconds, 1e-6))

    def pushed(self, seconds: float, *, is_complete: bool) -> None:
        """A push took so long; `is_complete`: every owner has acknowledged it."""
        self._push_s = seconds if is_complete else math.inf

    def facts(self) -> LineFacts:
        """What is known now."""
        return LineFacts(
            shape=self._shape(),
            upload_bytes_per_s=self._line.upload_bytes_per_s,
            download_bytes_per_s=self._line.download.bytes_per_s,
            step_s=median_high(self._trained_s) if self._trained_s else 0.0,
            push_s=self._push_s,
            is_beside=self._is_beside,
        )
