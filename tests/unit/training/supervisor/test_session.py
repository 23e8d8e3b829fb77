"""The session with a trainer process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2pnode.training.supervisor.process import OutputLog
from p2pnode.training.supervisor.session import TrainerSession, allocate, checked_total
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.interface import TrainerFailed
from tests.harness.environment.simulated import ListLog
from tests.harness.runner.stories import run_by


class Process:
    """A trainer process that ends when it is told to."""

    returncode = None

    def __init__(self) -> None:
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def end(self, *, polite_s: float = 0.0) -> bool:
        if not self.exited.done():
            self.exited.set_result(0)
        return False


def opened(
    tmp_path: Path, process: Process, log: ListLog, on_message: Callable[..., None], lost: list[TrainerFailed]
) -> tuple[TrainerSession, socket.socket]:
    """A session, and the trainer's end of its socket."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    launch = SimpleNamespace(is_script=True, is_proven=True)
    session = TrainerSession(
        cast(Any, process), ours, cast(Any, launch), OutputLog(tmp_path / "trainer.log"), log, on_message,
        lambda _, failure: lost.append(failure),
    )  # fmt: skip
    return session, theirs


@run_by(asyncio.run)
async def test_a_message_that_cannot_be_handled_ends_the_trainer_with_a_reason(tmp_path: Path) -> None:
    """Nobody would read its socket any more: the order under way fails, the process ends, and may be started again."""

    def unforeseen(*_: object) -> None:
        raise KeyError("a bug")

    log, process, lost = ListLog([]), Process(), list[TrainerFailed]()
    session, theirs = opened(tmp_path, process, log, unforeseen, lost)
    answer = session.ask(messages.Evaluate(1, 1))
    theirs.send(messages.encode(messages.SignOfLife()))
    async with asyncio.timeout(60.0):
        with pytest.raises(TrainerFailed, match="could not handle a message: KeyError") as caught:
            await answer
        await process.exited

    assert not caught.value.fatal
    assert lost == [caught.value]
    assert [record.fields["service"] for record in log.of("service_failed")] == ["trainer-link"]
    await session.close(polite_s=0.0)
    theirs.close()


@run_by(asyncio.run)
async def test_a_file_that_is_written_is_forgotten(tmp_path: Path) -> None:
    """A run of weeks saves thousands; those that are not written yet are waited for at the end."""
    session, theirs = opened(tmp_path, Process(), ListLog([]), lambda *_: None, [])
    async with asyncio.timeout(60.0):
        for turn in (1, 2, 3):
            order = session.ask(messages.Save(turn, "state"))
            theirs.send(messages.encode(messages.Copied(turn)))
            await order
            if turn != 2:
                theirs.send(messages.encode(messages.Written(turn)))
                await session.file(turn)
        session.ask(messages.Save(4, "state"))

    assert list(session._files) == [2, 4]
    await session.close(polite_s=0.0)
    theirs.close()


@pytest.mark.parametrize("total", [0, -1])
def test_a_model_without_values_is_refused(total: int) -> None:
    """Before memory is allocated; a start would fail in the same way again."""
    with pytest.raises(TrainerFailed, match="no trainable parameter") as failed:
        checked_total(total)
    assert failed.value.fatal
    with pytest.raises(TrainerFailed, match="no trainable parameter"):
        asyncio.run(allocate(total))
    checked_total(1)
