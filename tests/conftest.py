"""Assigns tests to the workers of `make test`: tests with several daemons share one worker, the others run on any.

Tests with several daemons measure seconds; two of them at once would measure each other. Grouping needs pytest before
9.2: xdist 3.8 marks a group by writing `item._nodeid`, which later versions do not read.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before NumPy is loaded: two threads of OpenBLAS on small matrices wait for each other, ten times as long as one works.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

#: Numba compiles the engines once per process that finds no cache: their tests share a worker.
SIMULATION_TESTS = Path(__file__).parent / "unit" / "training" / "simulation"

PROCESS_TESTS = Path(__file__).parent / "process"
SWARMS = frozenset(
    {
        "test_advise_process",
        "test_demo",
        "test_duplicate_identity_process",
        "test_examples",
        "test_hostile_process",
        "test_member_limits",
        "test_nat_namespaces",
        "test_partition",
        "test_process_faults",
        "test_resume_process",
        "test_sealed_process",
        "test_swarm_process",
        "test_wan",
        "test_wan_world",
    }
)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == PROCESS_TESTS and item.path.stem in SWARMS:
            item.add_marker(pytest.mark.xdist_group("swarms"))
        if item.path.is_relative_to(SIMULATION_TESTS):
            item.add_marker(pytest.mark.xdist_group("simulation"))
        if item.path.stem == "test_lazy_dynamo":  # its fixture imports torch's compiler: once, not once per worker
            item.add_marker(pytest.mark.xdist_group("compiler"))
