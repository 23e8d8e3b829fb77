"""`make screenshots`: the pictures in `docs/pictures`, of the real pages and commands before a node whose figures are
made up (`tests.browser.scenes`), so that the same picture comes again.

Widths of a phone, a tablet and a laptop, light and dark, and a terminal of 80 columns. `--only NAME` makes some.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from PIL import Image
from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

from tests.browser.chromium import LAPTOP, PHONE, TABLET, Tab, browser, missing
from tests.browser.scenes import SCENES
from tests.browser.staged_node import StagedNode
from tests.harness.project.repository import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FOLDER = ROOT / "docs" / "pictures"
COLUMNS, ROWS = 80, 60
#: Colours of a picture: a page has few, and the file is a third as large.
COLOURS = 128


class Picture(NamedTuple):
    """A page of a node in some state, or the output of a command where `page` begins with none of "/"."""

    name: str
    scene: str
    page: str
    width: int = LAPTOP
    height: int = 1060
    dark: bool = False


PICTURES = (
    Picture("node-laptop-light", "training", "/"),
    Picture("node-laptop-dark", "training", "/", dark=True),
    Picture("node-tablet-light", "training", "/", TABLET, 1024),
    Picture("node-tablet-dark", "training", "/", TABLET, 1024, dark=True),
    Picture("node-phone-light", "training", "/", PHONE, 740),
    Picture("node-phone-dark", "training", "/", PHONE, 740, dark=True),
    Picture("fault-laptop-light", "fault", "/", LAPTOP, 760),
    Picture("swarm-laptop-light", "waiting", "/swarm", LAPTOP, 960),
    Picture("swarm-laptop-dark", "waiting", "/swarm", LAPTOP, 960, dark=True),
    Picture("swarm-phone-light", "waiting", "/swarm", PHONE, 1000),
    Picture("terminal-status", "fault", "status"),
    Picture("terminal-peers", "fault", "peers"),
)


def main(arguments: Sequence[str]) -> int:
    """Make them; 1 where a browser is missing."""
    line = argparse.ArgumentParser(
        prog="python -m tests.browser.screenshots", description=(__doc__ or "").split("\n")[0]
    )
    line.add_argument("--only", action="append", default=[], choices=[picture.name for picture in PICTURES])
    line.add_argument("--to", type=Path, default=FOLDER, help="the folder")
    options = line.parse_args(arguments)
    if lacks := missing():
        print(lacks, file=sys.stderr)
        return 1
    options.to.mkdir(parents=True, exist_ok=True)
    with browser() as found:
        for picture in PICTURES:
            if not options.only or picture.name in options.only:
                with StagedNode(SCENES[picture.scene]()) as node:
                    _save(_taken(found, picture, node.url), options.to / f"{picture.name}.png")
    return 0


def _taken(found: Browser, picture: Picture, url: str) -> bytes:
    if not picture.page.startswith("/"):
        return _terminal(found, picture.page, url.removeprefix("http://"))
    tab = Tab(found, width=picture.width, height=picture.height, dark=picture.dark)
    tab.open(url + picture.page)
    tab.page.wait_for_timeout(500)
    try:
        return tab.page.screenshot()
    finally:
        tab.close()


def _terminal(found: Browser, command: str, address: str) -> bytes:
    """The output of a command as a terminal of 80 columns shows it."""
    said = in_terminal([sys.executable, "-m", "p2pnode", command, "--address", address])
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(f"$ p2pnode {command}", style="bold"))
    console.print(Text.from_ansi(said), end="")
    shape = (
        '<body style="margin: 0"><pre style="display: inline-block; margin: 0; padding: 16px; '
        "font: 15px/1.35 monospace; "
        'color: {foreground}; background: {background}"><code>{code}</code></pre>'
    )
    tab = Tab(found)
    try:
        tab.page.set_content(console.export_html(theme=DIMMED_MONOKAI, inline_styles=True, code_format=shape))
        return tab.page.locator("pre").screenshot()
    finally:
        tab.close()


def in_terminal(command: Sequence[str]) -> str:
    """What a command writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    environment |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment):
        os.close(theirs)
        pieces = []
        # Linux ends a terminal whose other side is closed with an error.
        try:
            while piece := os.read(ours, 65536):
                pieces.append(piece)
        except OSError:
            pass
    os.close(ours)
    return b"".join(pieces).decode().replace("\r\n", "\n")


def _save(picture: bytes, path: Path) -> None:
    whole = Image.open(io.BytesIO(picture)).convert("RGB")
    whole.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
