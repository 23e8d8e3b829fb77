"""dashboard: what an open page of the dashboard costs the daemon: processor time and memory.

Four daemons whose trainers sleep for most of a step, so that the daemon does little else. A real Chromium shows the
page of one of them, in turns with no page; processor time is that of the daemon's process alone, as the system counts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.record import NotMeasured, Outcome, Series
from tests.browser.chromium import Tab, browser, missing
from tests.process.harness.swarm_world import ProcessNode, kill_all, until

#: Minutes with an open page; as many without.
MINUTES = 10.0
TURNS = 5
NODES = 4
STEP_S = 0.5
SETTINGS = {"swarm.allow_open": True, "swarm.run": "benchmark", "barrier.method": "pssp", "training.local_steps": 1}
AIM_PERCENT, AIM_MB = "≤ 2", "≤ 10"


class PageTurn(NamedTuple):
    """What the daemon used in a while: percent of a core, and its memory at the end."""

    percent: float
    megabytes: float


def measure(arguments: argparse.Namespace) -> Outcome:
    """Raises `NotMeasured` where there is no browser."""
    if lacks := missing():
        raise NotMeasured(lacks)
    minutes = arguments.minutes or MINUTES
    turns = arguments.repetitions or TURNS
    without, shown = _windows(60.0 * minutes / turns, turns)
    cost = [opened.percent - closed.percent for closed, opened in zip(without, shown, strict=True)]
    memory = [opened.megabytes - without[0].megabytes for opened in shown]
    return Outcome(
        "dashboard",
        f"{NODES} daemons on the loopback, steps of {STEP_S} s in which the trainers sleep; the page of one node in "
        f"Chromium, in {turns} turns of {60 * minutes / turns:.0f} s with a page and as long without; processor time "
        "of that daemon's process",
        [
            Series("processor time of an open page", "% of a core", cost, AIM_PERCENT),
            Series("memory of an open page", "MB", memory, AIM_MB),
            Series("processor time without a page", "% of a core", [one.percent for one in without]),
        ],
    )


def _windows(seconds: float, turns: int) -> tuple[list[PageTurn], list[PageTurn]]:
    """The turns without a page, and those with one."""
    without, shown = [], []
    script = (sys.executable, "-m", "tests.browser.learning_trainer", str(STEP_S))
    nodes: list[ProcessNode] = []
    with tempfile.TemporaryDirectory(prefix="p2pnode-bench-", ignore_cleanup_errors=True) as folder, browser() as found:
        try:
            for number in range(NODES):
                bootstrap = nodes[0].address if nodes else ""
                nodes.append(ProcessNode(Path(folder), f"n{number}", SETTINGS, bootstrap=bootstrap, script=script))
                until(lambda: nodes[-1].address != "", 60, "an address", nodes)
            until(lambda: all(node.trains and node.step > 5 for node in nodes), 120, "all train", nodes)
            client, daemon = nodes[0].client(), psutil.Process(nodes[0].pid())
            if client is None:
                raise NotMeasured("the daemon does not answer")
            # The files are read when the first browser asks, once.
            Tab(found).open(f"http://{client.address}/")
            found.contexts[0].close()
            for _ in range(turns):
                without.append(_window(daemon, seconds))
                tab = Tab(found)
                tab.open(f"http://{client.address}/")
                shown.append(_window(daemon, seconds, tab))
                tab.close()
        finally:
            kill_all(nodes)
    return without, shown


def _window(daemon: psutil.Process, seconds: float, tab: Tab | None = None) -> PageTurn:
    before, began = daemon.cpu_times(), time.monotonic()
    # playwright's own work is done only while it is called.
    if tab is not None:
        tab.page.wait_for_timeout(1000 * seconds)
        tab.wait_live()
    else:
        time.sleep(seconds)
    after, passed_s = daemon.cpu_times(), time.monotonic() - began
    used_s = after.user + after.system - before.user - before.system
    return PageTurn(100 * used_s / passed_s, daemon.memory_info().rss / 1e6)
