"""What has been evaluated of the shared model on this node, and whether the goal of the run holds. Pure."""

from __future__ import annotations

from p2pnode.overlay.environment import Log
from p2pnode.training.goal import BestMetrics, Goal
from p2pnode.training.progress import Progress
from p2pnode.training.settings import TrainingSettings
from p2pnode.training.trainer_link.interface import Evaluation

#: `until` must hold in this many consecutive evaluations.
CONFIRMATIONS = 2
#: A goal without any evaluation in so many steps is probably a mistake.
UNEVALUATED_STEPS = 50


class Evaluations:
    """The evaluations of one run; writes their fields of `progress`."""

    def __init__(self, settings: TrainingSettings, progress: Progress, log: Log) -> None:
        self._settings = settings
        self._progress = progress
        self._log = log
        self._goal = Goal.parse(settings.until)
        self._goal_step: int | None = None
        self._is_reached_elsewhere = False
        self.best = BestMetrics(self._goal)

    @property
    def has_goal(self) -> bool:
        return self._goal is not None

    @property
    def is_goal_reached(self) -> bool:
        """Whether `until` holds here, or has been seen to hold on another node."""
        confirmed = self._progress.goal_streak >= CONFIRMATIONS
        return self._goal is not None and (self._is_reached_elsewhere or confirmed)

    def end_by_goal(self) -> None:
        """Another node has seen `until` hold in its evaluations of the shared model."""
        self._is_reached_elsewhere = True

    def missing(self, steps: int) -> str:
        """Why `until` cannot hold, if the `steps` since the start are enough to say so: nothing, or not its metric, is
        evaluated."""
        if self._goal is None or self._goal_step is not None:
            return ""
        goal = f"training.until = {self._settings.until}"
        reported = sorted(self._progress.evaluated_metrics)
        if reported:
            return f"{goal}, but evaluations report {', '.join(reported)} only"
        patience = max(UNEVALUATED_STEPS, 3 * self._settings.eval_steps)
        return f"{goal}, but nothing was evaluated in {steps} steps" if steps >= patience else ""

    def note(self, evaluation: Evaluation) -> None:
        """The trainer or the user's own script has evaluated the shared model."""
        progress = self._progress
        progress.evaluated_metrics |= evaluation.metrics
        progress.evaluated_step = evaluation.step
        progress.evaluated_samples = evaluation.samples
        self.best.note(evaluation.step, evaluation.metrics)
        # A script may report several metrics of one model one by one: each model counts once, by the goal's metric.
        if self._goal is not None and self._goal.metric in evaluation.metrics and evaluation.step != self._goal_step:
            self._goal_step = evaluation.step
            progress.goal_streak = progress.goal_streak + 1 if self._goal.holds(evaluation.metrics) else 0
        self._log.info("evaluated", step=evaluation.step, samples=evaluation.samples, **evaluation.metrics)
