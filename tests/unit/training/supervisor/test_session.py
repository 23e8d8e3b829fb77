"""Reasons why a trainer process ended."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.harness.environment.simulated import ListLog
from training.supervisor.process import OutputLog
from training.supervisor.session import TrainerSession, hidden_package
from training.trainer_link import messages
from training.trainer_link.interface import TrainerFailed


def test_a_folder_on_the_path_that_hides_ours_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an installed program, where the user's PYTHONPATH comes first and Python finds his folder only."""
    (tmp_path / "training").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    output = OutputLog(tmp_path / "trainer.log")
    output.write(b"python: Error while finding module specification for 'training.trainer' ")
    output.write(b"(ModuleNotFoundError: No module named 'training.trainer')\n")
    asyncio.run(output.end())

    failure = hidden_package(output)

    assert failure is not None
    assert f"the folder {tmp_path / 'training'} hides p2pnode's own package" in failure[0]
    assert "rename" in failure[1]


class Process:
    """A trainer process that ends when it is told to."""

    returncode = None

    def __init__(self) -> None:
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def end(self, *, polite_s: float = 0.0) -> bool:
        if not self.exited.done():
            self.exited.set_result(0)
        return False


def test_a_message_that_cannot_be_handled_ends_the_trainer_with_a_reason(tmp_path: Path) -> None:
    """Nobody would read its socket any more: the order under way fails, the process ends, and may be started again."""

    def unforeseen(*_: object) -> None:
        raise KeyError("a bug")

    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        log, process, lost = ListLog([]), Process(), list[TrainerFailed]()
        launch = SimpleNamespace(is_script=True, is_proven=True)
        session = TrainerSession(
            cast(Any, process), ours, cast(Any, launch), OutputLog(tmp_path / "trainer.log"), log, unforeseen,
            lambda _, failure: lost.append(failure),
        )  # fmt: skip
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

    asyncio.run(scenario())
