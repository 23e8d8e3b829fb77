"""The tasks that one node holds, and how far each is trained, reported, and counted. Pure.

Three positions, each a number of records from the front of a task: what its trainer has reported, step by step; what
of that is counted, because the step was pushed; and what the master was told. A task is finished when all its records
are counted. If a step was trained and its delta dropped, its tasks are given back with what was counted before, and
the next node trains the rest again.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from p2pnode.training.dispatch.answers import Held
from p2pnode.training.trainer_link.record_messages import RecordTask, TaskTrained

#: (task, attempt)
Key = tuple[int, int]


class HeldTask(msgspec.Struct, array_like=True):
    """Also what the state directory has of it. `reports`: step → records reported with it, for steps that are not
    counted yet."""

    task: RecordTask
    lease_s: float
    counted: int
    is_drawn: bool = False
    reports: dict[int, int] = {}

    @property
    def key(self) -> Key:
        return self.task.task, self.task.attempt

    @property
    def state(self) -> Held:
        return Held(*self.key, self.counted)

    @property
    def reported(self) -> int:
        return max([self.counted, *self.reports.values()])


class HeldTasks:
    """In the order of their grants. A task leaves when it is complete, lost or given back."""

    def __init__(self) -> None:
        self._tasks: dict[Key, HeldTask] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, key: Key) -> bool:
        return key in self._tasks

    def add(self, task: RecordTask, lease_s: float, trained: int = 0) -> None:
        """The master has granted it. One that is held already, under the same attempt, stays as it is."""
        found = HeldTask(task, lease_s, max(task.skip, trained))
        self._tasks.setdefault(found.key, found)

    def remove(self, key: Key) -> Held | None:
        """It is no longer this node's; returns what it was, if it was."""
        held = self._tasks.pop(key, None)
        return None if held is None else held.state

    # -- the trainer ---------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Tasks that the trainer has not been given yet."""
        return sum(not held.is_drawn for held in self._tasks.values())

    def draw(self) -> RecordTask | None:
        """The next task for the trainer, from where reported training stands."""
        for held in self._tasks.values():
            if not held.is_drawn:
                held.is_drawn = True
                return msgspec.structs.replace(held.task, skip=held.reported)
        return None

    def reopen(self) -> None:
        """A new trainer draws all tasks again."""
        for held in self._tasks.values():
            held.is_drawn = False

    def report(self, step: int, trained: Iterable[TaskTrained]) -> None:
        """The turn that trains `step` has trained so much; of tasks that are held no longer nothing is noted."""
        for one in trained:
            held = self._tasks.get((one.task, one.attempt))
            if held is not None:
                held.reports[step] = min(one.trained, held.task.records)

    def abandon(self, step: int) -> None:
        """The trainer of `step` crashed before the turn's end: what it reported with it is in no delta."""
        for held in self._tasks.values():
            held.reports = {known: trained for known, trained in held.reports.items() if known < step}

    # -- steps ---------------------------------------------------------------------------------------------------

    def count(self, step: int) -> list[Held]:
        """The steps up to this one are counted; returns the tasks that are finished by that, which leave."""
        found = []
        for held in list(self._tasks.values()):
            done = [trained for known, trained in held.reports.items() if known <= step]
            held.reports = {known: trained for known, trained in held.reports.items() if known > step}
            held.counted = max([held.counted, *done])
            if held.counted >= held.task.records:
                found.append(held.state)
                del self._tasks[held.key]
        return found

    def drop(self, step: int) -> list[Held]:
        """The delta of this step is pushed by nobody; returns the tasks to be given back for it, which leave."""
        return self._leave([held for held in self._tasks.values() if step in held.reports])

    def give_back(self) -> list[Held]:
        """All tasks leave, because the node does."""
        return self._leave(list(self._tasks.values()))

    def _leave(self, tasks: list[HeldTask]) -> list[Held]:
        for held in tasks:
            del self._tasks[held.key]
        return [held.state for held in tasks]

    # -- the master and the disk ---------------------------------------------------------------------------------

    def held(self) -> list[Held]:
        """What the master is told of them."""
        return [held.state for held in self._tasks.values()]

    @property
    def shortest_lease_s(self) -> float | None:
        return min((held.lease_s for held in self._tasks.values()), default=None)

    def tasks(self) -> list[HeldTask]:
        """For the state directory."""
        return list(self._tasks.values())
