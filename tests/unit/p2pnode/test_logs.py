"""Log lines: JSON or readable, and what importing structlog loads."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys

from p2pnode.config.settings import LogSettings
from p2pnode.logs import configure


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
