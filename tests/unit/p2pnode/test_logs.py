"""Log lines: JSON or readable, and what importing structlog loads."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import threading
import time

import pytest

from p2pnode.config.settings import LogSettings
from p2pnode.logs import DRAIN_S, LogStream, configure

#: More than the queue holds, at about 600 bytes a line.
LINES = 12_000


def test_the_daemon_s_log_does_not_load_rich() -> None:
    """structlog is loaded without rich, and rich can still be imported afterwards."""
    code = (
        "import sys\n"
        "from p2pnode.config.settings import LogSettings\nfrom p2pnode.logs import configure\n"
        "configure(LogSettings(format='console')).info('event')\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'rich']\n"
        "import rich.table"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_logs_are_json_lines_where_there_is_no_terminal() -> None:
    """Each event is one JSON object with its level, and what is below the level is not written."""
    stream = io.StringIO()
    writer = configure(LogSettings(level="info"), stream)

    writer.debug("hidden")
    writer.info("shown", step=3)

    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["event"], line["level"], line["step"]) for line in lines] == [("shown", "info", 3)]


def test_console_logs_are_readable_lines_without_colour_codes_in_a_file() -> None:
    """A console log that goes to a file has the event and its fields, and no escape codes."""
    stream = io.StringIO()

    configure(LogSettings(format="console"), stream).warning("port_unreachable", port=8468)

    assert "port_unreachable" in stream.getvalue()
    assert "port=8468" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_warnings_of_libraries_are_logged_and_lower_levels_are_not() -> None:
    """A warning of a standard library logger becomes one structured line."""
    stream = io.StringIO()
    configure(LogSettings(format="json"), stream)

    logging.getLogger("library").info("chatter")
    logging.getLogger("library").warning("odd %s", "thing")

    (line,) = stream.getvalue().splitlines()
    assert (json.loads(line)["event"], json.loads(line)["message"]) == ("library_warning", "odd thing")


def test_a_pipe_that_nobody_reads_does_not_hold_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are queued while the pipe is full; once it is read again, a line has the number of those dropped."""
    monkeypatch.setattr("p2pnode.logs.DRAIN_S", 60.0)  # the reader of a busy machine may need more than a second
    reading, writing = os.pipe()
    seen: list[bytes] = []

    def read() -> None:
        with os.fdopen(reading, "rb") as reader:
            seen.extend(reader.read().splitlines())

    reader = threading.Thread(target=read)
    with os.fdopen(writing, "w") as pipe, LogStream(pipe) as stream:
        log = configure(LogSettings(format="json"), stream)
        for number in range(LINES):
            log.info("event", number=number, filling="x" * 500)
        reader.start()
    reader.join(60.0)
    lines = [json.loads(line) for line in seen]
    numbers = [line["number"] for line in lines if line["event"] == "event"]
    (dropped,) = [line["lines"] for line in lines if line["event"] == "log_lines_dropped"]

    assert numbers == list(range(len(numbers)))
    assert len(numbers) + dropped == LINES


def test_the_end_waits_for_a_stopped_terminal_for_a_moment_only() -> None:
    """A reader that never comes back costs the end of the process a second, not more."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe:
        began = time.monotonic()
        with LogStream(pipe) as stream:
            for _ in range(10):
                stream.write("x" * 20_000)
        # Without a bound it would wait for ever: a loaded machine may be late.
        assert DRAIN_S <= time.monotonic() - began < 60.0
        os.close(reading)
    assert DRAIN_S <= 1.0
