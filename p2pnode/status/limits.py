"""Limits and schema of the status API, which server, report and OpenAPI description share."""

from __future__ import annotations

from typing import Final

#: The schema number of every answer.
SCHEMA: Final = 1
#: Most entries one request for steps or events gets.
MAX_LIMIT = 2000
#: Longest long-poll, in seconds; proxies and clients tend to give up at 60.
MAX_WAIT_S = 60.0
