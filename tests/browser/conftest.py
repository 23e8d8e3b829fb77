"""One browser for all tests of a run, and tabs that must have had no problem when a test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from tests.browser import chromium
from tests.browser.chromium import Tab
from tests.browser.scenes import Scene
from tests.browser.staged_node import StagedNode

if TYPE_CHECKING:
    from playwright.sync_api import Browser

#: A staged node sends so often, in seconds: the tests need not wait for a second's end each time.
PERIOD_S = 0.1


@pytest.fixture(scope="session")
def running_browser() -> Iterator[Browser]:
    if lacks := chromium.missing():
        pytest.skip(lacks)
    with chromium.browser() as found:
        yield found


@pytest.fixture
def open_tab(running_browser: Browser) -> Iterator[Callable[..., Tab]]:
    """Makes tabs, which are closed at the end."""
    tabs: list[Tab] = []

    def make(*, width: int = chromium.LAPTOP, dark: bool = False) -> Tab:
        tabs.append(Tab(running_browser, width=width, dark=dark))
        return tabs[-1]

    yield make
    for tab in tabs:
        tab.close()


@pytest.fixture
def stage() -> Iterator[Callable[..., StagedNode]]:
    """Starts staged nodes, which send ten times a second."""
    nodes: list[StagedNode] = []

    def start(scene: Scene) -> StagedNode:
        nodes.append(StagedNode(scene))
        nodes[-1].start()
        return nodes[-1]

    with mock.patch("p2pnode.status.live.PERIOD_S", PERIOD_S):
        yield start
        for node in nodes:
            node.__exit__(None, None, None)
