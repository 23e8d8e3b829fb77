"""Runs `pip install` with these arguments, and shows on a terminal how far it is and the time to go.

pip says nothing with `-qq`, and a page of lines without; its own bar shows no more than the present file. So pip writes
into a pipe here: its lines name what it looks for, downloads and installs, and the bytes of a download and the packages
that are installed are counted where they arrive. pip's errors and its exit code are kept. Without a terminal it is
plain `pip install -qq`. Needs nothing that is installed: this project's own bar uses the standard library alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, NamedTuple, TextIO

from p2pnode.screen import is_redrawable, progress_bar

PIP = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check")
#: Between two looks at what has arrived.
LOOK_S = 0.2
#: What an interrupted command ends with, as shells have it.
INTERRUPTED = 130

_UNITS = {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
_DOWNLOAD = re.compile(r"Downloading (?P<place>\S+) \((?P<amount>[\d.]+) (?P<unit>bytes|kB|MB|GB)\)")
_FOUND = re.compile(r"(Collecting|Processing|Obtaining) ")
_BUILD = re.compile(
    r"(?P<what>Installing build dependencies|Building (wheel|editable) for \S+|Preparing .*metadata).*: started"
)
_INSTALL = "Installing collected packages: "


class View(NamedTuple):
    """What a bar shows: `done` of `total` of this unit; without a total so many so far."""

    what: str
    done: float
    total: float
    unit: str


class Progress:
    """What pip's lines say. Pure."""

    def __init__(self) -> None:
        self.found = 0
        self.downloads = 0
        #: The name of the file that is downloaded now and its bytes; nothing in between.
        self.file = ""
        self.file_bytes = 0.0
        self.installs = 0
        self._build = ""

    def read(self, line: str) -> None:
        """Take the next line."""
        text = line.strip()
        download = _DOWNLOAD.match(text)
        if download is None or not download["place"].endswith(".metadata"):
            self.file, self._build = "", ""
        if download is not None and not download["place"].endswith(".metadata"):
            self.downloads += 1
            self.file = download["place"].rpartition("/")[2].partition("#")[0]
            self.file_bytes = float(download["amount"]) * _UNITS[download["unit"]]
        elif _FOUND.match(text):
            self.found += 1
        elif build := _BUILD.match(text):
            self._build = build["what"].lower()
        elif text.startswith(_INSTALL):
            self.installs = len(text.removeprefix(_INSTALL).split(","))

    def view(self, arrived_bytes: float, installed: int) -> View:
        """`arrived_bytes`: of the present download. `installed`: packages since pip began."""
        if self.installs:
            return View("install", min(installed, self.installs), self.installs, "packages")
        if self.file:
            name = "-".join(self.file.split("-")[:2])
            return View(f"download {name}", min(arrived_bytes, self.file_bytes), self.file_bytes, "bytes")
        if self._build:
            return View(self._build, 0, 0, "")
        return View("look for packages", self.found, 0, "found")


def installed_packages(folder: Path) -> int:
    return sum(1 for _ in folder.glob("*.dist-info"))


def arrived_bytes(folder: Path, file: str) -> int:
    """Bytes of a file that pip downloads into a folder of its own in `folder`."""
    for place in folder.glob(f"*/{file}"):
        try:
            return place.stat().st_size
        except FileNotFoundError:  # it has just been taken
            continue
    return 0


def install(arguments: Sequence[str], stream: TextIO, pip: Sequence[str] = PIP, packages: Path | None = None) -> int:
    """pip's exit code. `packages`: where it installs."""
    if not is_redrawable(stream):
        return subprocess.call([*pip, "-qq", *arguments])
    packages = packages or Path(sysconfig.get_path("purelib"))
    progress, errors = Progress(), list[str]()
    with tempfile.TemporaryDirectory(prefix="pip-") as folder:
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "TMPDIR": folder, "PIP_PROGRESS_BAR": "off"}
        # A person's settings could silence the lines that are read here.
        environment.pop("PIP_QUIET", None)
        running = subprocess.Popen(
            [*pip, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
        )
        readers = [_reading(running.stdout, progress.read), _reading(running.stderr, errors.append)]
        try:
            _show(running, progress, stream, Path(folder), packages)
        except KeyboardInterrupt:
            running.wait()  # it was interrupted too
            return INTERRUPTED
        except BaseException:
            running.kill()
            raise
        finally:
            for reader in readers:
                reader.join()
    # As with -qq: what went wrong. Warnings, too, where they may explain it.
    stream.write("".join(errors if running.returncode else errors_in(errors)))
    return running.returncode


def errors_in(lines: Iterable[str]) -> list[str]:
    return [line for line in lines if line.startswith("ERROR")]


def _show(running: subprocess.Popen[str], progress: Progress, stream: TextIO, folder: Path, packages: Path) -> None:
    before = installed_packages(packages)
    with progress_bar("look for packages", stream) as bar:
        while True:
            file = progress.file
            arrived = arrived_bytes(folder, file) if file else 0
            view = progress.view(arrived, installed_packages(packages) - before)
            bar.show(view.done, view.total, view.unit, view.what)
            try:
                running.wait(LOOK_S)
                return
            except subprocess.TimeoutExpired:
                continue


def _reading(pipe: IO[str] | None, take: Callable[[str], None]) -> threading.Thread:
    assert pipe is not None

    def read() -> None:
        with pipe:
            for line in pipe:
                take(line)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


if __name__ == "__main__":
    sys.exit(install(sys.argv[1:], sys.stderr))
