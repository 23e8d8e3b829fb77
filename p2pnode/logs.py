"""Sets structlog up for the process: readable lines on a terminal, otherwise one JSON object per line.

Logs go to standard error. The timestamp is local time on a terminal and UTC in JSON.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

from p2pnode.config.settings import LogSettings
from p2pnode.status.events import Writer

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(settings: LogSettings, stream: TextIO | None = None) -> Writer:
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
    logger: Writer = structlog.get_logger()
    _adopt_standard_loggers(logger)
    return logger


class _Adopted(logging.Handler):
    """Passes warnings and errors of libraries (asyncio, aiohttp) to structlog and drops lower levels."""

    def __init__(self, writer: Writer) -> None:
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


def _adopt_standard_loggers(writer: Writer) -> None:
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
