"""Messages with which one of several trainers of a host asks what its next iteration is, and is answered.

A trainer that is ordered to (`StepOrder.asks`) asks before each optimiser step, and waits for its own answer. The
daemon's socket is the queue of requests that its trainers share, each trainer's own socket the queue of its answers.
`training.devices.cycle` decides. Pure.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec


class StepAnswer(IntEnum):
    """What a trainer does next. The numbers are those of LSGD's answers."""

    LOCAL = 0
    DISTRIBUTED = 1
    STOP = 2


class StepWanted(msgspec.Struct, frozen=True, tag="step_wanted"):
    """Asks what the next iteration of this turn is; `number` counts the requests of the turn from 1."""

    turn: int
    number: int


class StepAnswered(msgspec.Struct, frozen=True, tag="step_answered"):
    """The answer to the `StepWanted` of the same turn and number. With `DISTRIBUTED` the trainer reports the turn."""

    turn: int
    number: int
    answer: StepAnswer
