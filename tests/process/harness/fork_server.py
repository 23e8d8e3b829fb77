"""The server of `tests.process.harness.forked_python`: imports modules, then forks itself once per request.

`module:function` is called once it is imported: what it keeps, the forks have.

Run by its path, so that it has imported only what it was asked to. One connection is one process: it brings a request
(JSON) with three descriptors, and gets the process id, then the exit status when the process has ended. The server
ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.machinery
import json
import os
import runpy
import select
import socket
import sys
from pathlib import Path
from typing import Any

REQUEST_BYTES = 1 << 17
#: Descriptors above these are the server's own.
MOST_DESCRIPTORS = 1024


class Server:
    """Accepts connections, forks, and reaps."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._poll = select.poll()
        self._poll.register(0)
        self._poll.register(listener, select.POLLIN)
        self._asking: dict[int, socket.socket] = {}
        self._running: dict[int, tuple[int, socket.socket]] = {}

    def serve(self) -> dict[str, Any]:
        """Returns in the forks only, with the request."""
        while True:
            for ready, _ in self._poll.poll():
                if ready == 0:
                    os._exit(0)
                elif ready == self._listener.fileno():
                    connection = self._listener.accept()[0]
                    self._asking[connection.fileno()] = connection
                    self._poll.register(connection, select.POLLIN)
                elif ready in self._running:
                    self._reap(ready)
                elif (request := self._start(ready)) is not None:
                    return request

    def _start(self, ready: int) -> dict[str, Any] | None:
        connection = self._asking.pop(ready)
        self._poll.unregister(ready)
        request, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 3)
        if not request:
            connection.close()
            return None
        begun, begins = os.pipe()
        pid = os.fork()
        if pid == 0:
            # Whoever gets the process id may signal the session at once: it has to be there.
            os.setsid()
            os.close(begins)
            self._forget_sockets(connection)
            return _become(json.loads(request), descriptors)
        os.close(begins)
        os.read(begun, 1)
        os.close(begun)
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(OSError):  # who has asked does not wait any more
            connection.send(str(pid).encode())
        watched = os.pidfd_open(pid)
        self._running[watched] = pid, connection
        self._poll.register(watched, select.POLLIN)
        return None

    def _forget_sockets(self, *others: socket.socket) -> None:
        """In a fork: its objects must not close descriptors whose numbers the program has given to its own files."""
        for one in (self._listener, *others, *self._asking.values(), *(kept for _, kept in self._running.values())):
            one.detach()

    def _reap(self, watched: int) -> None:
        pid, connection = self._running.pop(watched)
        self._poll.unregister(watched)
        os.close(watched)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        try:
            connection.send(str(status).encode())
        except OSError:  # nobody waits for it any more
            pass
        connection.close()


def _become(request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
    """Take the request's descriptors, folder and environment."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(3, MOST_DESCRIPTORS)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    return request


def run(command: list[str], base: list[str]) -> None:
    """As `python COMMAND…` does, for `[-P] [-m] program arguments…`."""
    is_safe = command[0] == "-P"
    command = command[1:] if is_safe else command
    is_module = command[0] == "-m"
    sys.argv = command[1:] if is_module else command
    first = "" if is_module else str(Path(command[0]).resolve().parent)
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = ([] if is_safe else [first]) + given + base
    if is_module:
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(command[0], run_name="__main__")


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    base = list(sys.path)
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    for name in sys.argv[2:]:
        module, _, function = name.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()
    gc.collect()
    gc.freeze()
    request = Server(listener).serve()
    run(request["command"], [path for path in base if path not in given])


if __name__ == "__main__":
    main()
