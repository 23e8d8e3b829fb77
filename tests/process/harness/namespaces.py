"""Network namespaces of a test, and calls made inside them. Linux, root and `ip` are needed; `missing` names what is
not there."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
CLONE_NEWNET = 0x40000000


def command(*words: str, given: str | None = None) -> None:
    """Run it; what it complains of is the error."""
    done = subprocess.run(words, input=given, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")


def missing(*programs: str) -> str:
    """Why this machine cannot be used for it; empty where it can."""
    absent = [program for program in ("ip", *programs) if shutil.which(program) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"p2pt{os.getpid()}"
    try:
        command("ip", "netns", "add", name)
    except OSError as error:
        return f"no network namespaces here: {error}"
    command("ip", "netns", "delete", name)
    return ""


@contextlib.contextmanager
def namespaces(*names: str) -> Iterator[list[str]]:
    """Namespaces of this process's own, loopback up, gone afterwards."""
    made: list[str] = []
    try:
        for name in names:
            full = f"p2pt{os.getpid()}-{name}"
            command("ip", "netns", "add", full)
            made.append(full)
            command("ip", "-n", full, "link", "set", "lo", "up")
        yield made
    finally:
        for name in made:
            with contextlib.suppress(OSError):
                command("ip", "netns", "delete", name)


def inside(name: str, function: Callable[[], T]) -> T:
    """Call it in a thread of the namespace."""
    result: list[T] = []
    failure: list[BaseException] = []

    def work() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with (Path("/run/netns") / name).open() as file:
            if libc.setns(file.fileno(), CLONE_NEWNET):
                failure.append(OSError(ctypes.get_errno(), "setns"))
                return
        try:
            result.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]
