"""How the suite is spread over workers (`make test`): tests of real processes share one, the others go anywhere.

Process tests measure seconds; two of them at once on two cores would measure each other. Not so at present: xdist 3.8
marks a group by writing `item._nodeid`, which pytest 9.2 does not read, so that they go anywhere too. All pass so.
"""

from __future__ import annotations

from pathlib import Path

import pytest

PROCESS_TESTS = Path(__file__).parent / "process"


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(PROCESS_TESTS):
            item.add_marker(pytest.mark.xdist_group("process"))
