"""The demo's processes: their output, their evaluations, and their end."""

from __future__ import annotations

import sys
from pathlib import Path

from p2pnode.demo.nodes import LAST_LINES, DemoNode, DemoProcess, wait_for_exit


def never() -> bool:
    return False


def test_the_end_of_the_output_is_kept(tmp_path: Path) -> None:
    """The last lines are shown, indented; both output streams are in them."""
    code = f"import sys\nfor number in range({LAST_LINES + 5}): print(number)\nsys.stdout.flush(); sys.exit('broken')"
    process = DemoProcess("one", [sys.executable, "-c", code], tmp_path / "log.txt")

    assert wait_for_exit([process], 30, never)

    lines = process.last_lines().splitlines()
    assert process.exit_code == 1
    assert (len(lines), lines[-1]) == (LAST_LINES, "    broken")


def test_a_gap_in_the_events_starts_the_evaluations_again(tmp_path: Path) -> None:
    """Evaluations before dropped events do not count as "in a row" with those after them."""
    node = DemoNode("node-0", [sys.executable, "-c", ""], tmp_path / "log.txt", tmp_path)
    assert wait_for_exit([node], 30, never)
    first = {"event": "evaluated", "fields": {"accuracy": 0.5}}

    node._read_events({"dropped": 0, "events": [first, {"event": "step", "fields": {}}], "last": 2})
    assert node.accuracies == [0.5]
    node._read_events({"dropped": 3, "events": [{"event": "evaluated", "fields": {"accuracy": 0.9}}], "last": 6})

    assert node.accuracies == [0.9]
