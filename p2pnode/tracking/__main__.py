"""The process that writes: `python -m p2pnode.tracking KIND PATH RUN NAME`, records on standard input, one per line.

After each group of records it prints how many it has written so far. It ends at the end of its input, also when the
daemon was killed; an error is its last line on standard error, and its exit code is then 1.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from p2pnode.config.tracker import Kind
from p2pnode.tracking.feed import Record
from p2pnode.tracking.writers import TrackerWriter, open_writer


def copy(lines: BinaryIO, writer: TrackerWriter, confirmed: TextIO) -> None:
    """Write every record, and confirm whenever no more input has arrived yet."""
    written = 0
    reader = lines.read1 if hasattr(lines, "read1") else lines.read
    rest = b""
    while piece := reader(1 << 16):
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            writer.write(Record.parse(line))
        written += len(whole)
        writer.flush()
        confirmed.write(f"{written}\n")
        confirmed.flush()
    writer.close()


def main(arguments: list[str]) -> int:
    # Ctrl-C and a service's stop reach every process; this one ends when the daemon has said its last.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    kind, path, run, name = arguments
    confirmed, sys.stdout = sys.stdout, sys.stderr  # a library's own output is no confirmation
    try:
        copy(sys.stdin.buffer, open_writer(cast("Kind", kind), Path(path), run, name), confirmed)
    except Exception as error:
        text = " ".join(f"{error}".split()) or "no reason given"
        sys.stderr.write(
            f"\n{text if isinstance(error, ValueError | OSError) else f'{type(error).__name__}: {text}'}\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
