"""Sets structlog up for the process: readable lines on a terminal, otherwise one JSON object per line.

Logs go to standard error, from a thread: a terminal that is stopped, or a pipe that nobody reads, never holds the node.
The timestamp is local time on a terminal and UTC in JSON.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from p2pnode.config.settings import LogSettings
from p2pnode.log_file import bounded
from p2pnode.overlay.background_output import BackgroundOutput, descriptor_writer
from p2pnode.overlay.environment import Log

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


#: Longest wait at the end for a terminal or pipe to take what was logged.
DRAIN_S = 1.0


class LogStream:
    """Lines for another stream, written from a thread; those that nobody takes are dropped and counted.

    A context: its end waits until the last line was written, but not for ever.
    """

    def __init__(self, stream: TextIO, folder: Path = Path()) -> None:
        """The stream may be the log of `folder`, which is bounded."""
        self._is_terminal = stream.isatty()
        self._output = BackgroundOutput(bounded(folder, descriptor_writer(stream.fileno())), note=_missing_lines)

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> None:
        """Queue one line. Never blocks."""
        self._output.put(text.encode("utf-8", "replace"))

    def flush(self) -> None:
        """Nothing to do: the thread writes every line at once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._output.drain(DRAIN_S)


def _missing_lines(lines: int, size_bytes: int) -> bytes:
    fields = {"lines": lines, "bytes": size_bytes, "event": "log_lines_dropped", "level": "warning"}
    return json.dumps(fields).encode() + b"\n"


def configure(settings: LogSettings, stream: LogStream | TextIO | None = None) -> Log:
    """Set structlog up and return a logger. Warnings of standard library loggers are written to it too.

    structlog is imported here, because commands that only ask a node start faster without it.
    """
    structlog = _structlog()
    stream = stream or sys.stderr
    console = settings.format == "console" or (settings.format == "auto" and stream.isatty())
    renderer: Any
    if console:
        renderer = structlog.dev.ConsoleRenderer(
            colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    else:
        renderer = structlog.processors.JSONRenderer(default=str)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[settings.level]),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=True,
    )
    logger: Log = structlog.get_logger()
    _adopt_standard_loggers(logger)
    return logger


class _Adopted(logging.Handler):
    """Passes warnings and errors of libraries (asyncio, aiohttp) to structlog and drops lower levels."""

    def __init__(self, writer: Log) -> None:
        super().__init__(logging.WARNING)
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {"logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            fields["exc_info"] = record.exc_info
        if record.levelno >= logging.ERROR:
            self._writer.error("library_error", **fields)
        else:
            self._writer.warning("library_warning", **fields)


def _adopt_standard_loggers(writer: Log) -> None:
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _Adopted)]:
        root.removeHandler(handler)
    root.addHandler(_Adopted(writer))


def _structlog() -> Any:
    """Import structlog without rich, which it would import for tracebacks: 5 MB that a daemon never uses."""
    absent = object()
    former = sys.modules.get("rich", absent)
    if former is absent and "structlog" not in sys.modules:
        sys.modules["rich"] = None  # type: ignore[assignment]  # "import rich" now fails, as if not installed
    try:
        import structlog
        import structlog.contextvars
        import structlog.dev
        import structlog.processors
    finally:
        if former is absent and sys.modules.get("rich", absent) is None:
            del sys.modules["rich"]
    return structlog
