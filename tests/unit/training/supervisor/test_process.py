"""One process and its output: the bounded log, exit codes, signals."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2pnode.training.settings import TrainingSettings
from p2pnode.training.supervisor.launch import NodeStart
from p2pnode.training.supervisor.process import (
    LOG_END_S,
    POLITE_S,
    TAIL_LINE_CHARACTERS,
    TAIL_LINES,
    OutputLog,
    TrainerProcess,
)
from p2pnode.training.supervisor.process_trainer import ProcessTrainer
from p2pnode.training.supervisor.trainer_socket import TrainerSocket
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.interface import StepOrder, StepReport
from p2pnode.training.trainer_link.record_messages import RecordsTrained
from tests.harness.environment.simulated import ListLog, VirtualClock
from tests.harness.environment.virtual_loop import run as run_virtual
from tests.process.harness.trainer_world import is_running, wait_until


def test_the_last_lines_are_kept_without_empty_ones(tmp_path: Path) -> None:
    """Lines may arrive in pieces; the last one counts when the process has ended; a long one is cut."""
    log = OutputLog(tmp_path / "trainer.log")
    for number in range(20):
        log.write(f"line {number}\n\n".encode())
    log.write(b"in two ")
    log.write(b"pieces\n" + b"x" * 1000)
    asyncio.run(log.end())

    assert len(log.last_lines) == TAIL_LINES
    assert log.last_lines[-3:] == ["line 19", "in two pieces", "x" * TAIL_LINE_CHARACTERS]


def test_a_new_process_begins_with_no_lines(tmp_path: Path) -> None:
    """The file is continued, the lines for error messages are not."""
    log = OutputLog(tmp_path / "trainer.log")
    log.write(b"first\n")
    asyncio.run(log.end())

    log.begin()
    log.write(b"second\n")
    asyncio.run(log.end())

    assert log.last_lines == ["second"]
    assert (tmp_path / "trainer.log").read_bytes() == b"first\nsecond\n"


def test_output_passes_on_when_the_file_cannot_be_written(tmp_path: Path) -> None:
    """Without its folder the log loses the file, but neither the last lines nor `on_output`."""
    printed: list[bytes] = []
    log = OutputLog(tmp_path / "missing" / "trainer.log", printed.append)

    log.write(b"still here\n")
    asyncio.run(log.end())

    assert (printed, log.last_lines) == ([b"still here\n"], ["still here"])


def test_a_stuck_disk_holds_neither_the_loop_nor_the_last_lines(tmp_path: Path) -> None:
    """A trainer.log that nobody reads (a pipe) blocks its writer for ever: the lines are still taken, and the end of
    the process is waited for a second at most."""
    os.mkfifo(tmp_path / "trainer.log")
    log = OutputLog(tmp_path / "trainer.log")

    async def scenario() -> float:
        began = asyncio.get_running_loop().time()
        for number in range(100):
            log.write(b"x" * 4000 + b"\nline %d\n" % number)
        await log.end()
        return asyncio.get_running_loop().time() - began

    # Without a bound it would wait for ever: a loaded machine may be late.
    assert LOG_END_S <= 1.0
    assert asyncio.run(scenario()) < 60.0
    assert log.last_lines[-1] == "line 99"


def test_a_process_its_threads_and_children_are_nicer_than_the_daemon(tmp_path: Path) -> None:
    """By what the settings say, above the daemon's own; 19 at most, and without a difference as nice as the daemon."""
    code = (
        "import os, subprocess, sys, threading, time\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"  # the daemon makes it nicer just after its start
        "nice = lambda who: print(who, os.getpriority(os.PRIO_PROCESS, 0), flush=True)\n"
        "nice('process')\n"
        "thread = threading.Thread(target=nice, args=('thread',)); thread.start(); thread.join()\n"
        "ask = \"import os; print('child', os.getpriority(os.PRIO_PROCESS, 0))\"\n"
        "subprocess.run([sys.executable, '-S', '-c', ask])\n"
    )

    async def lines(nice: int) -> list[str]:
        log = OutputLog(tmp_path / f"{nice}.log")
        begins = tmp_path / f"{nice} begins"
        command = [sys.executable, "-S", "-c", code, str(begins)]
        process = await TrainerProcess.spawn(command, os.environ, log, nice=nice)
        begins.touch()
        await process.exited
        return log.last_lines

    mine = os.getpriority(os.PRIO_PROCESS, 0)
    for nice in (0, 5, 40):
        expected = min(19, mine + nice)
        assert asyncio.run(lines(nice)) == [f"{who} {expected}" for who in ("process", "thread", "child")]


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """`end` returns when the process is gone, its children included."""
    log = OutputLog(tmp_path / "trainer.log")
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    )

    async def scenario() -> str:
        process = await TrainerProcess.spawn([sys.executable, "-S", "-c", code], os.environ, log)
        while not log.last_lines:  # noqa: ASYNC110 - another process prints them
            await asyncio.sleep(0.01)
        await process.end(polite_s=0.01)
        return process.how_it_ended()

    assert asyncio.run(scenario()) == "signal SIGKILL"


def trainer_of(folder: Path) -> Any:
    clock = VirtualClock()
    return ProcessTrainer(
        TrainingSettings(),
        command=None,
        node=NodeStart(b"n" * 20, 1),
        state_dir=folder,
        log=ListLog([], "", clock),
        clock=clock,
    )


def test_a_request_for_a_step_of_a_cancelled_order_is_late(tmp_path: Path) -> None:
    """Its answer would be taken for that of the present order."""
    wanted: list[int] = []

    async def main() -> None:
        trainer = trainer_of(tmp_path)
        trainer.on_step(wanted.append)
        for _ in range(2):
            trainer._orders.begin(lambda turn: messages.Evaluate(turn, 1))
        trainer._on_message(messages.StepWanted(1, 7))
        trainer._on_message(messages.StepWanted(2, 1))

    run_virtual(main())
    assert wanted == [1]


def test_what_a_cancelled_turn_has_trained_counts_for_nothing(tmp_path: Path) -> None:
    """It does not reach the model. That of an order under way is told, before its answer."""
    told: list[Any] = []

    async def main() -> None:
        trainer = trainer_of(tmp_path)
        trainer._process, trainer._socket = SimpleNamespace(), SimpleNamespace(send=lambda _: None)
        trainer.on_data(told.append)
        for turn in (1, 2):
            training = asyncio.create_task(trainer.train(StepOrder(turn, 1, 1.0, True)))
            await asyncio.sleep(0.1)
            if turn == 2:
                training.cancel()
                await asyncio.gather(training, return_exceptions=True)
            trainer._on_message(RecordsTrained(turn, turn, []))
            trainer._on_message(messages.Trained(turn, StepReport(turn, 1.0, 8, 1, 1.0, {})))
            await asyncio.gather(training, return_exceptions=True)

    run_virtual(main())
    assert told == [RecordsTrained(1, 1, [])]


@pytest.mark.parametrize(("state", "polite_s"), [("running", POLITE_S), ("hung", 0.0)])
def test_a_stop_waits_for_no_trainer_that_is_hung(tmp_path: Path, state: str, polite_s: float) -> None:
    """Its process hears nothing: it is not asked to end by itself."""
    waited: list[float] = []

    async def end(*, polite_s: float) -> None:
        waited.append(polite_s)

    async def main() -> None:
        trainer = trainer_of(tmp_path)
        trainer._state = state
        trainer._process = SimpleNamespace(returncode=None, end=end)
        trainer._socket = TrainerSocket(socket.socket())
        trainer._reader = asyncio.get_running_loop().create_future()
        await trainer.stop(600.0)
        assert trainer.state == "stopped"

    run_virtual(main())
    assert waited == [polite_s]


#: A launcher whose rank has a session of its own, as torchrun's have.
LAUNCHER = """
import subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
print(rank.pid, flush=True)
rank.wait()
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
@pytest.mark.parametrize("polite_s", [0.0, 0.01])
def test_a_killed_trainer_takes_its_ranks_along(tmp_path: Path, polite_s: float) -> None:
    """Also a rank in a session of its own, which no signal to the launcher's group reaches."""

    async def main() -> int:
        log = OutputLog(tmp_path / "trainer.log")
        process = await TrainerProcess.spawn([sys.executable, "-c", LAUNCHER], os.environ, log)
        async with asyncio.timeout(60):
            while not log.last_lines:  # noqa: ASYNC110 - what is waited for happens in another process
                await asyncio.sleep(0.01)
        assert not await process.end(polite_s=polite_s)
        return int(log.last_lines[0])

    rank = asyncio.run(main())

    assert wait_until(lambda: not is_running(rank), 60)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_ranks_end_with_a_launcher_that_was_killed(tmp_path: Path) -> None:
    """A rank in a session of its own ends although its launcher had no time to end it."""
    rank = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    launcher = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], start_new_session=True)"

    async def scenario() -> int:
        printed: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        log = OutputLog(tmp_path / "trainer.log", lambda data: None if printed.done() else printed.set_result(data))
        process = await TrainerProcess.spawn([sys.executable, "-c", launcher, rank], os.environ, log)
        pid = int(await asyncio.wait_for(printed, 60))
        os.kill(process.pid, 9)
        await asyncio.wait_for(process.exited, 60)
        return pid

    pid = asyncio.run(scenario())

    assert wait_until(lambda: not is_running(pid), 60)
