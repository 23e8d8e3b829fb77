"""`p2pnode export` to a `.pt` file without its process: the conversion runs here, where torch is imported already."""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

CONVERT = [sys.executable, "-m", "p2pnode.training.trainer.convert"]


def _run(command: list[str], environment: dict[str, str], tick: Callable[[], None]) -> subprocess.CompletedProcess[str]:
    """`watched` of the conversion: the same exit code, the last line of the same traceback, and one tick."""
    from p2pnode.training.trainer.convert import convert

    assert command[:3] == CONVERT, command
    assert environment["PYTHONPATH"], "the process would not find this package"
    tick()
    try:
        convert(*command[3:])
    except Exception:
        return subprocess.CompletedProcess(command, 1, "", traceback.format_exc())
    return subprocess.CompletedProcess(command, 0, "", "")


def conversion_here() -> Any:
    """A context in which no process converts a model. Some test of each caller starts the real one."""
    return mock.patch("p2pnode.lifecycle.model_export.watched", _run)
