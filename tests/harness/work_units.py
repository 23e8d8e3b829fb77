"""How the workers of `make test` share the tests: by group, the quick tests of `tests/unit` by module, others alone.

xdist sends each unit in a message, counts all that a worker was ever given after each test, and begins with the groups
of the most tests. Here a module of quick tests is one message and a finished unit is forgotten, which takes a fifth
off what distributing 7,000 tests costs. Units begin in the order in which `tests/conftest.py` puts the tests.
"""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController

QUICK = "tests/unit/"


class WorkUnits(LoadGroupScheduling):
    """The scheduler of a session with `--dist loadgroup`."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        scope = super()._split_scope(nodeid)
        return nodeid.partition("::")[0] if scope == nodeid and nodeid.startswith(QUICK) else scope

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        nodeid = self.registered_collections[node][item_index]
        units = self.assigned_work[node]
        scope = self._split_scope(nodeid)
        units[scope][nodeid] = True
        if all(units[scope].values()):
            del units[scope]
        self._reschedule(node)

    def _reschedule(self, node: WorkerController) -> None:
        # A worker that replaces one that crashed has not collected yet.
        if node in self.registered_collections:
            super()._reschedule(node)
