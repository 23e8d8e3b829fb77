"""Learning in a simulated swarm: an observer of the reference engine that computes deltas and applies them.

The rule is that of Ninox (`docs/psp.md`): the deltas of all nodes that pass a barrier at the same time are added then,
and these nodes compute from that model. Every delta is one step late.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from p2pnode.training.simulation.engines.reference import ReferenceEngine
from p2pnode.training.simulation.learning.problems import Problem, Vector
from p2pnode.training.simulation.model.outcome import Outcome
from p2pnode.training.simulation.model.plan import Plan


@dataclass(slots=True)
class Curve:
    """Scores against time and against updates, at equal intervals of one of them."""

    now_s: list[float] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)
    score: list[float] = field(default_factory=list)

    def note(self, now_s: float, updates: int, score: float) -> None:
        self.now_s.append(now_s)
        self.updates.append(updates)
        self.score.append(score)


class Learner:
    """Observes one run. The model is scored every `every_s` virtual seconds, and at the end by `finish`."""

    def __init__(self, problem: Problem, every_s: float) -> None:
        self.problem = problem
        self.curve = Curve()
        self.updates = 0
        self._every_s = every_s
        self._due_s = 0.0
        self._model = problem.initial()
        self._bases: dict[int, Vector] = {}
        self._pending: dict[int, Vector] = {}
        self._begun: list[int] = []
        self._moment_s = 0.0

    def started(self, now: float, node: int, step: int) -> None:  # noqa: ARG002  (an observer)
        """The node pulls. Nodes that start at the same time start from the same model."""
        self._advance(now)
        if node in self._pending:
            self._model += self._pending.pop(node)
            self.updates += 1
        self._begun.append(node)

    def completed(self, now: float, node: int, step: int) -> None:
        """The node pushes its delta."""
        self._advance(now, at_once=True)
        self._pending[node] = self.problem.delta(self._bases.pop(node), node, step)

    def finish(self, now: float) -> Curve:
        """Score the final model, and return the curve."""
        self._advance(now, at_once=True)
        self.curve.note(now, self.updates, self.problem.score(self._model))
        return self.curve

    def _advance(self, now: float, *, at_once: bool = False) -> None:
        """Fix the base of nodes that started at an earlier time, and score the model when due."""
        if self._begun and (at_once or now > self._moment_s):
            base = self._model.copy()
            self._bases |= dict.fromkeys(self._begun, base)
            self._begun.clear()
        self._moment_s = now
        while self._due_s < now:
            self.curve.note(self._due_s, self.updates, self.problem.score(self._model))
            self._due_s += self._every_s


def learn(plan: Plan, problem: Problem, *, scores: int = 40) -> tuple[Outcome, Curve]:
    """Run a plan with a problem; the model is scored `scores` times. Diverging is a result, not an error."""
    learner = Learner(problem, plan.duration_s / scores)
    with np.errstate(over="ignore", invalid="ignore"):
        outcome = ReferenceEngine(plan).run(learner)
        return outcome, learner.finish(plan.duration_s)
