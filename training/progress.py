"""Progress of this node's training: step, samples, losses, and the last steps for `/steps`. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Required, TypedDict, cast

from p2pnode.overlay.peers import Activity

STEPS_KEPT = 1000
#: `training_share` is that of the last steps.
SHARE_STEPS = 20
#: What a row says of the training.
TRAINED = ("loss", "samples", "train_seconds", "idle_seconds", "wait_seconds")
#: Of the last steps it is known what was refused.
REFUSALS_KEPT = 10
#: The phases of a step, as `StepRow` names them before `_seconds`.
PHASES = ("train", "idle", "push", "wait", "pull")


class StepRow(TypedDict, total=False):
    """One step in `/steps`: its phases in seconds, and what became of its delta. Without an exchange, only training.

    `acknowledged`, `refused` (by reason) and `outstanding` count shards of the delta, of which those outstanding may be
    refused later. `merged`: whose deltas this node added meanwhile, each node's id with its latest step.
    `idle_seconds`: how long the trainer stood still between the step before and this one, `wait_seconds` of that for
    its barrier; under bsp the barrier is waited for after the push. Training and idle time add up to the time that
    passes, without pauses. A step without a delta, because the last one was still exchanged, has the first five only.
    """

    step: Required[int]
    loss: float | None
    samples: int
    train_seconds: float
    idle_seconds: float
    push_seconds: float
    wait_seconds: float
    pull_seconds: float
    weight: float
    acknowledged: int
    refused: dict[str, int]
    outstanding: int
    bytes_sent: int
    pulled: int
    pull_missing: int
    merged: dict[str, int]


@dataclass(frozen=True, slots=True)
class Finishing:
    """The script finishes by itself: why, since when, and until when it may (monotonic seconds)."""

    what: str
    since: float
    deadline: float


@dataclass(slots=True)
class Progress:
    """The fields of training in `/status` and `/steps`; the step loop writes them."""

    step: int = 0
    loss: float | None = None
    #: As reported during training, and as evaluated on the shared vector; the latter decide about the goal.
    training_metrics: dict[str, float] = field(default_factory=dict)
    evaluated_metrics: dict[str, float] = field(default_factory=dict)
    evaluated_step: int | None = None
    evaluated_samples: int = 0
    optimizer_steps: int = 0
    samples: int = 0
    step_seconds: float = 0.0
    merged_last_step: int = 0
    paused: bool = False
    #: Whether the trainer trains now; the exchange of the last delta goes on meanwhile.
    is_training: bool = False
    stalled: bool = False
    goal_streak: int = 0
    trainer_failures: int = 0
    #: Why the trainer failed last, and what to do; None when it has completed a turn since.
    trainer_failure: tuple[str, str] | None = None
    finishing: Finishing | None = None
    steps: deque[StepRow] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    #: What was refused of the deltas of the last steps, in shards by reason; the last one is the newest.
    refusals: deque[Mapping[str, int]] = field(default_factory=lambda: deque(maxlen=REFUSALS_KEPT))
    #: Seconds of all steps since the start, by phase: those of `StepRow`.
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    #: Of the last steps: seconds in which the trainer trained, and all seconds from the end of the step before.
    _turns: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=SHARE_STEPS))

    @property
    def activity(self) -> Activity:
        """What this node announces while it trains."""
        if self.stalled:
            return Activity.STALLED
        return Activity.PAUSED if self.paused else Activity.TRAINING

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics by name; an evaluated metric replaces one of the same name from training."""
        return {**self.training_metrics, **self.evaluated_metrics}

    def add(self, row: StepRow) -> None:
        """A step was completed. The row of a step that is there already has only what became of its delta."""
        if self.steps and self.steps[-1]["step"] == row["step"]:
            known = self.steps.pop()
            row = {**row, **{name: known[name] for name in TRAINED if name in known}}  # type: ignore[typeddict-item,literal-required]
        self.steps.append(row)
        self.refusals.append(row.get("refused", {}))
        for phase in PHASES:
            self.phase_seconds[phase] += cast("Mapping[str, float]", row).get(f"{phase}_seconds", 0.0)

    def note_turn(self, trained_s: float, passed_s: float) -> None:
        """The trainer trained `trained_s` of the `passed_s` seconds since the end of the step before."""
        self._turns.append((min(trained_s, passed_s), passed_s))

    @property
    def turn_seconds(self) -> float | None:
        """Mean time from the end of one of the last steps to that of the next; None before the first step."""
        return sum(passed_s for _, passed_s in self._turns) / len(self._turns) if self._turns else None

    @property
    def training_share(self) -> float | None:
        """Share of the time of the last steps in which the trainer trained, from 0 to 1; None before the first step."""
        passed_s = sum(passed_s for _, passed_s in self._turns)
        return sum(trained_s for trained_s, _ in self._turns) / passed_s if passed_s > 0.0 else None
