"""The dashboard of three real daemons in a real browser: numbers move, a pause works, a killed peer turns red."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2pnode import __version__
from p2pnode.keys import api_token
from tests.browser.chromium import PHONE, Tab
from tests.process.harness.swarm_world import ProcessNode, kill_all, until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

#: The documented detection bound, and the second until the next message of the stream.
RED_S = 10.0 + 2.0
SCRIPT = (sys.executable, "-m", "tests.browser.learning_trainer", "0.1")
SETTINGS = {"swarm.allow_open": True, "swarm.run": "browser", "barrier.method": "asp", "training.local_steps": 1}


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[list[ProcessNode]]:
    nodes: list[ProcessNode] = []
    try:
        for number in range(3):
            bootstrap = nodes[0].address if nodes else ""
            nodes.append(ProcessNode(tmp_path, f"n{number}", SETTINGS, bootstrap=bootstrap, script=SCRIPT, forks=True))
            until(lambda: nodes[-1].address != "", 60, "an address", nodes)
        until(lambda: all(node.trains and node.step > 2 for node in nodes), 60, "three train", nodes)
        yield nodes
    finally:
        kill_all(nodes)


def test_a_real_swarm_is_shown_as_it_is(swarm: list[ProcessNode], open_tab: Callable[..., Tab]) -> None:
    """On both pages the numbers move without an error; Pause pauses and Resume resumes; a killed peer is red within the
    bound, on the table and in the graph, and leaves the others' colour alone."""
    first, victim = swarm[0], swarm[2]
    client = first.client()
    assert client is not None
    url = f"http://{client.address}"
    token = api_token.read(first.state_dir / "status.token")
    tab, phone = open_tab(), open_tab(width=PHONE, dark=True)
    page = tab.open(f"{url}/#token={token}")
    swarm_page = phone.open(f"{url}/swarm")
    page.locator("#peers tbody tr").nth(1).wait_for()

    step = page.locator("#vitals dd").first
    before, loss = step.inner_text(), page.locator("#chart-learning .legend b").first.inner_text()
    until(lambda: step.inner_text() != before, 10, "the step moves")
    until(lambda: page.locator("#chart-learning .legend b").first.inner_text() != loss, 10, "the loss moves")
    assert "Connected to 2 peers" in tab.text("#answers")
    assert page.locator("#events tbody tr").count() > 0
    page.locator("#peers tbody tr", has_text=__version__).nth(1).wait_for()
    assert swarm_page.locator("#nodes tbody tr", has_text=__version__).count() == 3
    assert tab.overflow_px() == phone.overflow_px() == 0

    page.locator("#pause").click()
    page.locator("#confirm-yes").click()
    page.locator("#state", has_text="paused").wait_for()
    assert first.state == "paused"
    page.get_by_role("button", name="Resume").click()
    page.locator("#confirm-yes").click()
    page.locator("#state", has_text="training").wait_for()
    until(lambda: first.trains, 10, "it trains again", swarm)

    name = victim.status()["node"]["id"][:8]
    badge = page.locator("#peers tbody tr", has_text=name).locator(".badge")
    colour = badge.evaluate("(place) => getComputedStyle(place).color")
    victim.kill()
    began = time.monotonic()
    dead = page.locator("#lost tbody tr", has_text=name).locator(".badge")
    dead.wait_for(timeout=1000 * RED_S)
    took_s = time.monotonic() - began
    print(f"red after {took_s:.1f} s")
    assert dead.inner_text() == "dead"
    assert dead.evaluate("(place) => getComputedStyle(place).color") != colour
    assert page.locator("#peers tbody tr", has_text=name).count() == 0
    swarm_page.locator("#graph .node.bad", has_text=name).wait_for(timeout=3000)
    assert swarm_page.locator("#nodes tbody tr", has_text=name).locator(".badge.bad").count() == 1
    assert swarm_page.locator("#graph .node.bad").count() == 1
    assert "Lost 1 peer" in tab.text("#answers")

    assert tab.problems == []
    assert phone.problems == []
