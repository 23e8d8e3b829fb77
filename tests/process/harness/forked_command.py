"""`python -m tests.process.harness.forked_command SOCKET COMMAND…` is `python COMMAND…`, as a fork of the server there.

For programs that start a command of their own, such as the demo.
"""

from __future__ import annotations

import os
import sys

from tests.process.harness.forked_python import fork


def main(path: str, *command: str) -> int:
    """The exit code of the command, which has this process's input, output, folder and environment."""
    _, connection = fork(path, command, os.environ, None, [0, 1, 2])
    connection.settimeout(None)
    return int(connection.recv(64))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
