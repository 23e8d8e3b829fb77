"""Background jobs of the rebalancer: at most one of a kind and target at a time, cancelled together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import StrEnum

from overlay.transport import TransportError
from training.encoding.frames import BadFrame
from training.exchange.context import ExchangeContext

#: Called when the job starts, so that a job cancelled earlier leaves nothing behind.
Work = Callable[[], Awaitable[None]]


class JobKind(StrEnum):
    """What a job does. The values appear in the log."""

    ADD_LEARNER = "teach"
    HAND_OVER = "hand_over"
    TAKE_OVER = "take_over"
    ANSWER_FENCES = "challenge"
    RECONCILE = "mend"
    ASK_SILENT = "ask"
    CONFIRM_BACKUP = "confirm"
    RELEASE_BACKUP = "release"
    FORGET = "forget"
    RESEND = "resend"
    FIND_ROUTES = "route"


class Jobs:
    """The running jobs of one node."""

    def __init__(self, context: ExchangeContext) -> None:
        self._rebalance = context.rebalance
        self._clock = context.environment.clock
        self._log = context.environment.log
        self._tasks: dict[tuple[JobKind, bytes], asyncio.Task[None]] = {}

    def start(self, kind: JobKind, target: bytes, work: Work) -> None:
        """Start a job, unless one of its kind, or any with the same non-empty target, is running."""
        if (kind, target) in self._tasks or (target and any(node == target for _, node in self._tasks)):
            return
        task = asyncio.create_task(self._guarded(kind, work), name=f"{kind}-{target.hex()[:8]}")
        self._tasks[kind, target] = task

    def is_running(self, kind: JobKind) -> bool:
        """Whether a job of this kind is running, whatever its target."""
        return any(running is kind for running, _ in self._tasks)

    def forget_done(self) -> None:
        """Allow the jobs that have ended to be started again."""
        self._tasks = {key: task for key, task in self._tasks.items() if not task.done()}

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _guarded(self, kind: JobKind, work: Work) -> None:
        began = self._clock.monotonic()
        try:
            await work()
        except (TransportError, BadFrame, ValueError) as error:
            self._log.warning("shard_move_failed", kind=kind.value, reason=str(error))
        except Exception as error:
            self._log.error("exchange_service_failed", service=kind.value, error=repr(error))
        finally:
            # A job that took no time asked no node: another tick at once would start the same job, without end.
            if self._clock.monotonic() > began:
                self._rebalance.wake()
