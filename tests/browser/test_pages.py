"""The dashboard in a real browser, before a node that shows every state it can have, and some attacks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.browser.chromium import LAPTOP, PHONE, Tab, violations
from tests.browser.scenes import EVIL, SCENES, hostile, training
from tests.browser.staged_node import StagedNode

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

OpenTab = Callable[..., Tab]
Stage = Callable[..., StagedNode]


@pytest.mark.parametrize("path", ["/", "/swarm"])
def test_every_state_fits_a_phone_and_has_nothing_that_axe_finds(open_tab: OpenTab, stage: Stage, path: str) -> None:
    """In light and dark, narrow and wide: no sideways scrolling, no violation of any rule, no error in the console."""
    node = stage(training())
    tab = open_tab()
    tab.open(node.url + path)
    found: list[str] = []
    for number, (name, make) in enumerate(SCENES.items()):
        node.show(make())
        tab.page.wait_for_timeout(250)
        for width, colours in ((PHONE, "dark"), (LAPTOP, "light")):
            tab.page.set_viewport_size({"width": width, "height": 900})
            tab.page.emulate_media(color_scheme=colours, reduced_motion="reduce")
            tab.page.wait_for_timeout(150)
            if over := tab.overflow_px():
                found.append(f"{name}, {width} px: {over} px too wide")
            # axe needs a second: every scene in one of the two, and a fault in both.
            if name == "fault" or (number % 2 == 0) == (width == PHONE):
                found += [f"{name}, {width} px, {colours}: {one}" for one in violations(tab.page)]

    assert found == []
    assert tab.problems == []


def test_no_text_of_others_becomes_markup(open_tab: OpenTab, stage: Stage) -> None:
    """Names, reasons, addresses and events with HTML are shown as they are, on both pages, and nothing of them runs."""
    node = stage(hostile())
    for path in ("/", "/swarm"):
        tab = open_tab()
        tab.open(node.url + path)
        tab.page.wait_for_timeout(400)

        assert tab.page.evaluate("window.owned") is None
        assert tab.page.locator("main img, main script, main iframe, main a").count() == 0
        assert EVIL[1] in tab.text("#whoami"), "the text itself is shown"
        assert tab.problems == []
