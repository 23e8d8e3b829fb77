"""Learning in a simulated swarm: an observer of the reference engine that computes deltas and applies them.

Rules for applying deltas:
* `additive`: a delta is added with weight 1 when it is pushed, as in the original algorithm.
* `delayed`: as in Ninox. The deltas of all nodes that pass a barrier at the same time are added then, and these nodes
  compute from that model. Every delta is one step late.
* `swarm`: as in the daemon, by `training.shards.state.ShardState`, with outer learning rate and delayed Nesterov
  momentum. The weight is 1/N̂, by the node's estimate. Under bsp a delta becomes visible after its barrier. `lag_power`
  p multiplies by (1 + lag)^−p, where lag counts rounds of the swarm between pull and push.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from training.settings import ExchangeSettings
from training.shards.applied import DeltaId
from training.shards.outer_rule import Rule
from training.shards.state import ShardState
from training.simulation.engines.reference import ReferenceEngine
from training.simulation.learning.problems import Problem, Vector
from training.simulation.model.outcome import Outcome
from training.simulation.model.plan import Plan

ServerRule = Literal["additive", "delayed", "swarm"]


@dataclass(frozen=True, slots=True)
class LearningRule:
    """How deltas become one model; the defaults are the daemon's."""

    kind: ServerRule = "additive"
    outer_lr: float = field(default_factory=lambda: ExchangeSettings().outer_lr)
    outer_momentum: float = field(default_factory=lambda: ExchangeSettings().outer_momentum)
    lag_power: float = 0.0


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
    """Observes one run. The model is scored every `every_s` virtual seconds, and at the end by `finish`.

    `belief` gives a node's estimate of the population size, which sets the weight of its deltas.
    """

    def __init__(
        self,
        problem: Problem,
        rule: LearningRule,
        belief: Callable[[int], float],
        *,
        synchronous: bool,
        every_s: float,
    ) -> None:
        self.problem = problem
        self._belief = belief
        self.rule = rule
        self.curve = Curve()
        self.updates = 0
        self._synchronous = synchronous
        self._every_s = every_s
        self._due_s = 0.0
        self._state = ShardState(problem.initial(), problem.size)
        self._outer = Rule(rule.outer_lr, rule.outer_momentum)
        self._bases: dict[int, Vector] = {}
        self._base_updates: dict[int, int] = {}
        self._pending: dict[int, Vector] = {}
        self._begun: list[int] = []
        self._moment_s = 0.0

    @property
    def model(self) -> Vector:
        """The shared vector."""
        return self._state.value

    def started(self, now: float, node: int, step: int) -> None:
        """The node pulls. Nodes that start at the same time start from the same model."""
        self._advance(now)
        if self.rule.kind == "delayed" and node in self._pending:
            self._add(self._pending.pop(node))
            self.updates += 1
        elif self.rule.kind == "swarm" and self._synchronous:
            self._state.fold(step, self._outer)
        self._begun.append(node)

    def completed(self, now: float, node: int, step: int) -> None:
        """The node pushes its delta."""
        self._advance(now, at_once=True)
        delta = self.problem.delta(self._bases.pop(node), node, step)
        if self.rule.kind == "delayed":
            self._pending[node] = delta
            return
        self.updates += 1
        if self.rule.kind == "additive":
            self._add(delta)
            return
        identity = DeltaId(node.to_bytes(20, "big"), 1, step)
        if self._synchronous:
            self._state.add_pending(identity, self._weight(node), delta)
        else:
            self._state.apply(identity, self._weight(node), delta, self._outer)

    def finish(self, now: float) -> Curve:
        """Score the final model, and return the curve."""
        self._advance(now, at_once=True)
        self.curve.note(now, self.updates, self.problem.score(self.model))
        return self.curve

    def _add(self, delta: Vector) -> None:
        model = self._state.value
        model += delta

    def _weight(self, node: int) -> float:
        workers = max(1.0, self._belief(node))
        lag = (self.updates - 1 - self._base_updates[node]) / workers
        return float((1.0 + lag) ** -self.rule.lag_power / workers)

    def _advance(self, now: float, *, at_once: bool = False) -> None:
        """Fix the base of nodes that started at an earlier time, and score the model when due."""
        if self._begun and (at_once or now > self._moment_s):
            base = self._state.value.copy()
            for node in self._begun:
                self._bases[node] = base
                self._base_updates[node] = self.updates
            self._begun.clear()
        self._moment_s = now
        while self._due_s < now:
            self.curve.note(self._due_s, self.updates, self.problem.score(self.model))
            self._due_s += self._every_s


def learn(plan: Plan, problem: Problem, rule: LearningRule, *, scores: int = 40) -> tuple[Outcome, Curve]:
    """Run a plan with a problem; the model is scored `scores` times. Diverging is a result, not an error."""
    synchronous = plan.made_barrier().synchronous
    engine = ReferenceEngine(plan)
    learner = Learner(problem, rule, engine.belief, synchronous=synchronous, every_s=plan.duration_s / scores)
    with np.errstate(over="ignore", invalid="ignore"):
        outcome = engine.run(learner)
        return outcome, learner.finish(plan.duration_s)
