"""Python processes without their imports: forks of a server that has imported torch, or the daemon, once.

A start of the daemon imports for half a second, one of a trainer for two, and the tests start some hundred of each.
`Forked` is to tests what `subprocess.Popen` is, for commands of this Python. `trainers_are_forks` replaces
`asyncio.create_subprocess_exec`, with which a daemon starts its trainer, and `local_nodes_are_forks` what starts the
nodes of `--local`. Process id, session, signals, output, folder, environment and exit code are those of a real process.
Not real are the parent, which is the server, and what happens before the program's first line: the start of the
interpreter, the imports, and variables that are read there (`OMP_NUM_THREADS`, `MALLOC_…`). Therefore some tests of
each kind start real processes.

`python -m tests.process.harness.forked_python SOCKET[:SOCKET] ARGUMENTS…` is `p2pnode ARGUMENTS…` whose trainers are
forks of the server at the first socket, and whose local nodes, if there is a second socket, of the server at that one.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

from tests.harness.project.repository import ROOT

#: A loaded machine imports torch slowly.
START_S = 180.0
#: What a trainer imports before its first step: `python -m training.trainer`, and a script with `p2pnode.attach`.
TRAINER = (
    "p2pnode.training.trainer.attach",
    "p2pnode.training.trainer.task_loop",
    "p2pnode",
)
#: What `p2pnode start` imports and makes before its first step.
DAEMON = (
    "p2pnode.cli:commands",
    "p2pnode.daemon",
    "p2pnode.lifecycle.node",
    "p2pnode.status.server",
    "asyncio",
    "uvloop",
)

#: The process ids of this process's servers.
RUNNING: dict[int, None] = {}

#: How long a server may take to end by itself.
END_S = 5.0

#: A file or a descriptor.
Stream = IO[Any] | int

_create = asyncio.create_subprocess_exec


class ForkServer:
    """A server process that has imported some modules; ends with this process."""

    def __init__(self, *modules: str, search: Sequence[str] = ()) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="p2pnode-forks-"))
        self.path = str(self._folder / "socket")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(self.path)
        listener.listen(64)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("P2PNODE_")}
        environment |= {
            "PYTHONPATH": os.pathsep.join([str(ROOT), *search]),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        program = Path(__file__).with_name("fork_server.py")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-u", str(program), str(listener.fileno()), *modules],
            env=environment,
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
        )
        listener.close()
        RUNNING[self._process.pid] = None
        atexit.register(self.close)

    def close(self) -> None:
        """End the server. Its forks go on."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:  # a fork of this process has its end of the pipe, too
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


@functools.cache
def with_torch() -> ForkServer:
    """The server for trainers."""
    return ForkServer("torch", "numpy", "msgspec", "asyncio", *TRAINER)


@functools.cache
def with_distributed() -> ForkServer:
    """The server for trainers of several ranks: DistributedDataParallel and fully_shard import for seconds."""
    modules = ("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel")
    return ForkServer(*modules, "numpy", "msgspec", "asyncio", *TRAINER)


@functools.cache
def with_daemon() -> ForkServer:
    """The server for `python -m p2pnode`."""
    return ForkServer(*DAEMON, search=[str(ROOT)])


def fork(
    path: str, command: Sequence[str], environment: Mapping[str, str], folder: Path | None, descriptors: list[int]
) -> tuple[int, socket.socket]:
    """Run `python COMMAND…` with these descriptors as input, output and error. Returns the process id, and a connection
    that will bring the exit code."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(START_S)
    connection.connect(path)
    request = {
        "command": [str(part) for part in command],
        "environment": dict(environment),
        "folder": str(folder or Path.cwd()),
    }
    socket.send_fds(connection, [json.dumps(request).encode()], descriptors)
    return int(connection.recv(64)), connection


class Forked:
    """`subprocess.Popen` of `[sys.executable, *command]` in a session of its own: a fork of a server, which is given by
    itself or by its socket. It makes no pipes; `local_nodes_are_forks` does, and keeps their other ends here."""

    stdin: IO[bytes] | None = None
    stdout: IO[bytes] | None = None
    stderr: IO[bytes] | None = None

    def __init__(
        self,
        server: ForkServer | str,
        command: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = subprocess.DEVNULL,
        stderr: Stream = subprocess.DEVNULL,
    ) -> None:
        self.returncode: int | None = None
        with Path(os.devnull).open("r+b") as nothing:
            streams = [nothing if stream == subprocess.DEVNULL else stream for stream in (stdin, stdout, stderr)]
            descriptors = [stream if isinstance(stream, int) else stream.fileno() for stream in streams]
            path = server if isinstance(server, str) else server.path
            self.pid, self._connection = fork(path, command, env or os.environ, cwd, descriptors)

    def _receive(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            self._connection.settimeout(timeout_s)
            with contextlib.suppress(TimeoutError, BlockingIOError):
                self.returncode = int(self._connection.recv(64))
                self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        return self._receive(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._receive(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("fork", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_p2pnode(
    arguments: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    given: str = "",
    timeout: float,
    have_torch: bool = True,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of `python -m p2pnode ARGUMENTS…` with text as input, its output captured as text."""
    with contextlib.ExitStack() as stack:
        source, out, error = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)]
        source.write(given)
        source.seek(0)
        process = start_p2pnode(
            arguments, cwd=cwd, env=env, stdin=source, stdout=out, stderr=error, have_torch=have_torch
        )
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        out.seek(0)
        error.seek(0)
        return subprocess.CompletedProcess(list(arguments), code, out.read(), error.read())


def start_p2pnode(
    arguments: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    stdin: Stream = subprocess.DEVNULL,
    stdout: Stream = subprocess.DEVNULL,
    stderr: Stream = subprocess.DEVNULL,
    have_torch: bool = True,
) -> Forked | subprocess.Popen[Any]:
    """`python -m p2pnode ARGUMENTS…` in a session of its own, its trainers and its local nodes, as forks. With
    `--invite` it is a real process: it executes itself again, to hide the line. Without `have_torch` the trainers are
    forks of the server for daemons: there is no other, and a trainer without torch needs none."""
    if "--invite" in arguments or not sys.platform.startswith("linux"):
        command = [sys.executable, "-m", "p2pnode", *arguments]
        return subprocess.Popen(
            command, cwd=cwd, env=env, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
        )
    trainers = with_torch() if have_torch else with_daemon()
    sockets = os.pathsep.join((trainers.path, with_daemon().path))
    command = ["-m", "tests.process.harness.forked_python", sockets, *arguments]
    return Forked(with_daemon(), command, cwd=cwd, env=env, stdin=stdin, stdout=stdout, stderr=stderr)


class ForkedProcess:
    """What `asyncio.subprocess.Process` is to `training.supervisor.process`."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._connection = connection
        connection.setblocking(False)
        asyncio.get_running_loop().add_reader(connection, self._on_end)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._connection)
        self.returncode = int(self._connection.recv(64))
        self._connection.close()
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode


@contextlib.contextmanager
def trainers_are_forks(path: str = "", server: Callable[[], ForkServer] = with_torch) -> Iterator[None]:
    """Commands of this Python that asyncio starts are forks of the server at `path`, or of this process's `server`."""
    if not sys.platform.startswith("linux"):
        yield
        return
    path = path or server().path

    async def create(program: str, *arguments: str, **options: Any) -> Any:
        if program != sys.executable or arguments[0] == "-c":
            return await _create(program, *arguments, **options)
        assert options["stdout"] == options["stderr"], "one descriptor has all of the output"
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            descriptors = [nothing, options["stdout"], options["stderr"]]
            return ForkedProcess(*fork(path, arguments, options["env"], None, descriptors))
        finally:
            os.close(nothing)

    with mock.patch.object(asyncio, "create_subprocess_exec", create):
        yield


@contextlib.contextmanager
def local_nodes_are_forks(sockets: Sequence[str]) -> Iterator[None]:
    """The nodes that `p2pnode.local_run` starts are forks of the server at the last socket."""
    from p2pnode import local_run

    def start(command: Sequence[str], **options: Any) -> Forked:
        assert command[:3] == [sys.executable, "-m", "p2pnode"]
        env = options.pop("env")
        assert options == {"start_new_session": True, **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)}
        (given, stdin), (stdout, output), (stderr, errors) = [os.pipe() for _ in range(3)]
        module = ["-m", "tests.process.harness.forked_python", os.pathsep.join(sockets)]
        node = Forked(sockets[-1], [*module, *command[3:]], env=env, stdin=given, stdout=output, stderr=errors)
        for theirs in (given, output, errors):
            os.close(theirs)
        node.stdin, node.stdout, node.stderr = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"), os.fdopen(stderr, "rb")
        return node

    with mock.patch.object(local_run, "subprocess", SimpleNamespace(Popen=start, PIPE=subprocess.PIPE)):
        yield


if __name__ == "__main__":
    paths = sys.argv.pop(1).split(os.pathsep)
    with contextlib.ExitStack() as replaced:
        replaced.enter_context(trainers_are_forks(paths[0]))
        if len(paths) > 1 and "--local" in sys.argv:
            replaced.enter_context(local_nodes_are_forks(paths))
        runpy.run_module("p2pnode", run_name="__main__", alter_sys=True)
