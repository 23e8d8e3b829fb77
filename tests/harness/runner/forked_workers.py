"""`pytest --workers N`: the process that has collected the tests forks N workers, and they run the units of the tests.

A pool of processes that start by themselves would import and collect everything once per worker, and `make test` would
spend a tenth of its processor time on that. Here the collection is done once, and a worker begins with all of it.
`tests.harness.runner.work_units` decides what a worker takes at once. It asks for the next unit when its last test is
about to be torn down, so that no unit waits behind a long one.

A worker that dies is replaced. The test that it ran has failed, the others of its unit run elsewhere. So has one that
goes on long after its time limit: what the limit raises may wait for ever where it is handled. Workers die with the
process that has collected. Without fork that is safe, which is Linux, the tests run in one process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
from _pytest._io import TerminalWriter

from tests.harness.runner.work_units import WorkQueue, units_of

#: Names the tests that share a worker.
GROUP = "worker_group"
#: Messages of a worker beside those of finished tests; the first means that no message will come.
ENDED, NEXT = "ended", "next"
#: How long a worker that is told to stop may end its fixtures.
STOP_S = 30.0
#: How often the controller looks for tests that do not end.
LOOK_S = 5.0
#: `prctl`: the signal that a process gets when the one that forked it has died (linux/prctl.h).
PR_SET_PDEATHSIG = 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("workers").addoption(
        "--workers", type=int, default=0, help="how many forks of this process run the tests; 0: it runs them itself"
    )
    parser.getgroup("workers").addoption(
        "--worker-grace",
        type=float,
        default=60.0,
        help="seconds after its time limit at which a test's worker is killed",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not sys.platform.startswith("linux"):
        config.option.workers = 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    option = session.config.option
    if not option.workers or option.collectonly or option.usepdb or session.testsfailed:
        return None  # as pytest does without us
    Controller(session).run()
    return True


def group_of(item: pytest.Item) -> str | None:
    mark = item.get_closest_marker(GROUP)
    return None if mark is None else str(mark.args[0])


class Controller:
    """The process that has collected: gives units, and reports as if it had run the tests itself."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._config = session.config
        self._queue = WorkQueue(units_of((item.nodeid, group_of(item)) for item in session.items))
        self._workers: dict[Connection, tuple[int, int]] = {}
        #: When each worker has sent something last.
        self._heard: dict[Connection, float] = {}
        self._started = 0
        self._base = self._config._tmp_path_factory.getbasetemp()

    def run(self) -> None:
        # Tests of several modules run at once: a line per module would change with every test.
        self._config.pluginmanager.getplugin("terminalreporter").showfspath = False
        try:
            for _ in range(min(self._config.option.workers, len(self._queue))):
                self._start()
            while self._workers and not (self._session.shouldfail or self._session.shouldstop):
                for connection in wait(list(self._workers), LOOK_S):
                    assert isinstance(connection, Connection)
                    self._heard[connection] = time.monotonic()
                    self._receive(connection)
                self._kill_stuck()
        finally:
            self._stop()
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _start(self) -> None:
        number = self._started
        self._started += 1
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        controller = os.getpid()
        pid = os.fork()
        if pid == 0:
            _die_with(controller)
            for other in (ours, *self._workers):
                other.close()
            Worker(self._session, theirs, self._base / f"worker{number}").live()
        theirs.close()
        self._workers[ours] = number, pid
        self._heard[ours] = time.monotonic()

    def _kill_stuck(self) -> None:
        """Workers whose test has gone on too long. They are replaced as those that died."""
        for connection, (number, pid) in self._workers.items():
            place = self._queue.running(number)
            # Without a test it ends: what it waits for then is of no test.
            limit_s = STOP_S if place is None else self._limit_s(self._session.items[place])
            if limit_s and time.monotonic() - self._heard[connection] > limit_s + self._config.option.worker_grace:
                os.kill(pid, signal.SIGKILL)

    def _limit_s(self, item: pytest.Item) -> float:
        """The time limit of a test, as pytest-timeout has it; 0: none."""
        mark = item.get_closest_marker("timeout")
        with contextlib.suppress(ValueError):  # an ini key of a plugin that is not there
            return float((mark.args[0] if mark is not None else self._config.getini("timeout")) or 0)
        return 0.0

    def _receive(self, connection: Connection) -> None:
        number, pid = self._workers[connection]
        message: Any = ENDED
        with contextlib.suppress(EOFError, ConnectionResetError):
            message = connection.recv()
        if message == ENDED:
            del self._workers[connection], self._heard[connection]
            self._ended(number, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        elif message == NEXT:
            connection.send(self._queue.give(number))
        else:
            self._count(number, *message)

    def _count(self, number: int, place: int, reports: list[Any], warnings: list[dict[str, Any]]) -> None:
        hook = self._config.hook
        for warning in warnings:
            hook.pytest_warning_recorded.call_historic(kwargs=warning)
        for data in reports:
            report = hook.pytest_report_from_serializable(config=self._config, data=data)
            hook.pytest_runtest_logreport(report=report)
        self._queue.finish(number, place)

    def _ended(self, number: int, code: int) -> None:
        place = self._queue.lose(number)
        if place is None:
            return
        item = self._session.items[place]
        what = f"worker {number} ended with {signal.Signals(-code).name if code < 0 else code} while it ran this test"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", what, "call")
        self._config.hook.pytest_runtest_logreport(report=report)
        if len(self._queue):
            self._start()

    def _stop(self) -> None:
        """What still runs, after an interrupt or an error of ours."""
        for _, pid in self._workers.values():
            os.kill(pid, signal.SIGINT)
        for connection, (_, pid) in self._workers.items():
            with contextlib.suppress(EOFError, OSError):
                while connection.poll(STOP_S):
                    connection.recv()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._workers.clear()


def _die_with(parent: int) -> None:
    """This process, forked by `parent`, is killed when that ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


class Worker:
    """A fork: runs units until none is left."""

    def __init__(self, session: pytest.Session, connection: Connection, base: Any) -> None:
        self._session = session
        self._config = session.config
        self._connection = connection
        self._base = base
        self._next: list[int] | None = None
        self._reports: list[Any] = []
        self._warnings: list[dict[str, Any]] = []

    def live(self) -> None:
        """Never returns."""
        code = 1
        try:
            self._become()
            self._run()
            code = 0
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal and the controller both send it
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            with contextlib.suppress(BaseException):
                self._session._setupstate.teardown_exact(None)
            with contextlib.suppress(BaseException):
                for child in multiprocessing.active_children():
                    child.kill()  # it may have the other end of what an exit function waits for
                threading._shutdown()
                atexit._run_exitfuncs()
            os._exit(code)

    def _become(self) -> None:
        atexit._clear()  # those of the controller are its own
        plugins = self._config.pluginmanager
        plugins.unregister(name="terminalreporter")
        plugins.register(Silent(), "terminalreporter")
        plugins.register(self, "worker")
        self._warnings.clear()  # those that the controller has recorded, which pytest repeats to a new plugin
        capture = plugins.getplugin("capturemanager")
        # The files that have the output are the controller's.
        capture.stop_global_capturing()
        capture.start_global_capturing()
        self._base.mkdir(mode=0o700)
        self._config._tmp_path_factory._basetemp = self._base

    def _run(self) -> None:
        items, session = self._session.items, self._session
        while unit := self.next_unit():
            self._next = None
            for place, following in zip(unit, [*unit[1:], None], strict=True):
                next_item = Following(self) if following is None else items[following]
                self._config.hook.pytest_runtest_protocol(item=items[place], nextitem=next_item)
                self._connection.send((place, self._reports, self._warnings))
                self._reports, self._warnings = [], []
                if session.shouldfail or session.shouldstop:
                    return

    def next_unit(self) -> list[int]:
        """The unit that comes after the present one; empty: none."""
        if self._next is None:
            self._connection.send(NEXT)
            self._next = self._connection.recv()
        return self._next

    def next_item(self) -> pytest.Item | None:
        unit = self.next_unit()
        return self._session.items[unit[0]] if unit else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        self._warnings.append(
            {"warning_message": warning_message, "when": when, "nodeid": nodeid, "location": location}
        )


class Following:
    """The first test of the next unit, to whoever asks for its place in the tree: it is chosen only then."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __bool__(self) -> bool:
        return self._worker.next_item() is not None

    def listchain(self) -> list[Any]:
        item = self._worker.next_item()
        assert item is not None
        return item.listchain()


class Silent:
    """In the place of the terminal's reporter, which other plugins ask where to write."""

    def __init__(self) -> None:
        self._tw = TerminalWriter(sys.__stderr__)
