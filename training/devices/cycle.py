"""Decides for each iteration of each trainer of a host what it does: a local step, the distributed step, or the end.

A trainer asks before each optimiser step and waits for its own answer. A cycle gives `period` local answers for each
trainer in total, and then one *distributed* to each. A fast trainer takes more local steps than a slow one. But each
has one of its own as long as one is left, so with a period of 1 all take exactly one. An answer that is not due yet is
held, and comes with a later call. So every request has one answer, and there is no counter that processes share.

The method is that of LSGD's local and global server (Teng et al., NeurIPS 2019, arXiv 1905.10395). There the period is
`l_comm`. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from p2pnode.training.trainer_link.messages import StepAnswer


class GivenAnswer(NamedTuple):
    """An answer to the request `number` of a trainer, in a cycle (the first is 1)."""

    worker: int
    number: int
    answer: StepAnswer
    cycle: int


@dataclass(slots=True)
class _Worker:
    #: Local steps taken in this cycle.
    taken: int = 0
    has_joined: bool = False
    #: The last request that was answered, and how.
    last: GivenAnswer | None = None


class CycleServer:
    """The local server of one host. Workers are numbers; each numbers its requests 1, 2, 3, …

    Every method returns the answers that are due now, in the order in which their requests came. `period`: local steps
    per worker and cycle. With `is_leased` the number of local steps of a cycle comes from elsewhere, by `grant`.
    """

    def __init__(self, period: int, *, is_leased: bool = False) -> None:
        if period < 1:
            raise ValueError(f"period = {period}: a cycle has at least one local step per worker")
        self.cycle = 1
        #: Local answers of this cycle.
        self.given = 0
        self.is_stopped = False
        self._period = period
        self._is_leased = is_leased
        self._allowed, self._is_closed = 0, not is_leased
        self._workers: dict[int, _Worker] = {}
        #: They came while a cycle was under way, and take part from the next one on.
        self._newcomers: list[int] = []
        #: Unanswered requests, in the order in which they came.
        self._held: dict[int, int] = {}

    # -- the workers of the cycle --------------------------------------------------------------------------------

    @property
    def workers(self) -> list[int]:
        """Those that take part in the present cycle."""
        return list(self._workers)

    def join(self, worker: int) -> list[GivenAnswer]:
        """A worker takes part: from now on, if nobody has been answered in this cycle, otherwise from the next one."""
        if worker in self._workers or worker in self._newcomers:
            return []
        if self.given or any(state.has_joined for state in self._workers.values()):
            self._newcomers.append(worker)
        else:
            self._workers[worker] = _Worker()
        return self._serve()

    def lost(self, worker: int) -> list[GivenAnswer]:
        """A worker takes part no more: it has died, or makes no progress. What it has taken is gone."""
        self._workers.pop(worker, None)
        self._held.pop(worker, None)
        if worker in self._newcomers:
            self._newcomers.remove(worker)
        return self._serve()

    def sits_out(self, worker: int) -> list[GivenAnswer]:
        """A worker has ended its part of this cycle by itself, for lack of data: it waits for the next one."""
        if worker in self._workers:
            self._workers[worker].has_joined = True
            self._held.pop(worker, None)
        return self._serve()

    # -- requests ------------------------------------------------------------------------------------------------

    def request(self, worker: int, number: int) -> list[GivenAnswer]:
        """A worker asks what to do next. A repeated request has the answer that it had."""
        known = self._workers.get(worker)
        if known is None and worker not in self._newcomers:
            return [GivenAnswer(worker, number, StepAnswer.STOP, self.cycle)]  # it was given up, and has to begin again
        if known is not None and known.last is not None and number <= known.last.number:
            return [known.last] if number == known.last.number else []
        self._held[worker] = number
        return self._serve()

    def stop(self) -> list[GivenAnswer]:
        """From now on every request, also those that wait, is answered with `STOP`."""
        self.is_stopped = True
        return self._serve()

    def end_cycle(self) -> list[GivenAnswer]:
        """The distributed step of this cycle is made: the next cycle begins."""
        self._next_cycle()
        return self._serve()

    # -- leased local steps --------------------------------------------------------------------------------------

    @property
    def wants(self) -> int:
        """Local steps that are asked for and not allowed yet; always 0 unless leased."""
        if self._is_closed or self.is_stopped:
            return 0
        waiting = sum(not self._workers[worker].has_joined for worker in self._held if worker in self._workers)
        return max(0, waiting - (self._allowed - self.given))

    def grant(self, allowed: int, *, is_closed: bool) -> list[GivenAnswer]:
        """So many local steps of this cycle are allowed in all; `is_closed`: it will not be more."""
        if self._is_leased and not self._is_closed:
            self._allowed = max(self._allowed, allowed)
            self._is_closed = is_closed
        return self._serve()

    # -- what is due ---------------------------------------------------------------------------------------------

    def _next_cycle(self) -> None:
        self.cycle += 1
        self.given = 0
        self._allowed, self._is_closed = 0, not self._is_leased
        for state in self._workers.values():
            state.taken, state.has_joined = 0, False
        for worker in self._newcomers:
            self._workers[worker] = _Worker()
        self._newcomers.clear()

    def _left(self) -> int:
        allowed = self._allowed if self._is_leased else self._period * len(self._workers)
        return max(0, allowed - self.given)

    def _decide(self, worker: int) -> StepAnswer | None:
        """The answer that is due; None: it is held."""
        if self.is_stopped:
            return StepAnswer.STOP
        state = self._workers.get(worker)
        if state is None or state.has_joined:
            return None
        left = self._left()
        kept = sum(not other.taken and not other.has_joined for other in self._workers.values() if other is not state)
        if left > (kept if state.taken else 0):
            return StepAnswer.LOCAL
        return StepAnswer.DISTRIBUTED if not left and self._is_closed else None

    def _serve(self) -> list[GivenAnswer]:
        found: list[GivenAnswer] = []
        if self._newcomers and not self._workers:
            self._next_cycle()  # all others have died
        is_changed = True
        while is_changed:
            is_changed = False
            for worker, number in list(self._held.items()):
                answer = self._decide(worker)
                if answer is None:
                    continue
                del self._held[worker]
                given = GivenAnswer(worker, number, answer, self.cycle)
                found.append(given)
                is_changed = True
                state = self._workers.get(worker)
                if state is not None:
                    self._note(state, given)
        return found

    def _note(self, state: _Worker, given: GivenAnswer) -> None:
        state.last = given
        if given.answer is StepAnswer.LOCAL:
            state.taken += 1
            self.given += 1
        elif given.answer is StepAnswer.DISTRIBUTED:
            state.has_joined = True
