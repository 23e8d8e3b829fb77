"""Log records of a failed test are in its report, for less: they are caught at the root logger alone.

pytest looks through all loggers of the process, six times for each test, for those that pass their records on to
nobody. torch and dask make hundreds of loggers, so that it takes longer than most tests. Tests that ask for `caplog`
are left as pytest has them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from _pytest import logging as capture

FULL = capture.catching_logs


@contextmanager
def at_the_root(handler: logging.Handler, level: int | None = None) -> Iterator[logging.Handler]:
    """In the place of pytest's `catching_logs`."""
    root, before = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    if level is not None:
        handler.setLevel(level)
        root.setLevel(min(before, level))
    try:
        yield handler
    finally:
        if level is not None:
            root.setLevel(before)
        root.removeHandler(handler)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    asks = "caplog" in getattr(item, "fixturenames", ())
    capture.catching_logs = FULL if asks else at_the_root
    try:
        return (yield)
    finally:
        capture.catching_logs = FULL
