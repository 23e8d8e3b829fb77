"""Polls that wait at a server for their answers: what became of their reports, and whether there is news. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from training.engines.server.core import Name, Outcome, ServerCore, Work
from training.engines.server.host import Asked
from training.engines.server.messages import Computed, Poll
from training.engines.server.tasks import LeasedTask


@dataclass(slots=True)
class ParkedPoll:
    """A worker that waits for an answer, and what its reports had come to when it asked."""

    asked: Asked
    poll: Poll
    outcomes: list[tuple[int, int, Outcome]]
    since: float

    def has_news(self, core: ServerCore, worker: bytes) -> bool:
        """Whether it can be answered without a task."""
        return not self.poll.wants or any(
            outcome != "waits" or core.is_counted(worker, (task, attempt)) for task, attempt, outcome in self.outcomes
        )

    def names(self, lease: LeasedTask[Work]) -> bool:
        """Whether the worker says that it is at work on this task."""
        held = self.poll.holds
        return held is not None and (held.task, held.attempt) == (lease.task, lease.attempt)

    def fates(self, core: ServerCore, worker: bytes) -> tuple[list[tuple[int, int, Outcome]], list[Name]]:
        """What has become of its reports by now, and which of them need not be sent whole again."""
        outcomes: list[tuple[int, int, Outcome]] = []
        keeps: list[Name] = []
        for task, attempt, outcome in self.outcomes:
            is_counted = outcome == "waits" and core.is_counted(worker, (task, attempt))
            outcomes.append((task, attempt, "counted" if is_counted else outcome))
            if outcome == "waits" and core.keeps(worker, (task, attempt)):
                keeps.append((task, attempt))
        return outcomes, keeps


def whole_reports(poll: Poll) -> list[Computed]:
    """The reports that bring updates."""
    return [one for one in poll.reports if not (one.failure or one.is_short)]


def unknown_reports(core: ServerCore, worker: bytes, poll: Poll, *, is_settled: bool) -> list[Name]:
    """The reports without their updates that are not here: of another epoch, or of a worker that counted as gone."""
    is_other = poll.epoch != core.epoch or not is_settled
    short = [one.name for one in poll.reports if one.is_short]
    return [name for name in short if is_other or core.repeated(worker, name) == "unknown"]
