"""Assigns tests to the workers of `make test`: tests with several daemons share one worker, the others run on any.

Tests with several daemons measure seconds; two of them at once would measure each other. Tests whose processes are
forks share a worker because they share the server that forks. Groups begin first (`tests.harness.work_units`). Grouping
needs pytest before 9.2: xdist 3.8 marks a group by writing `item._nodeid`, which later versions do not read.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# An example that waits for a core, or imports something, is late and not wrong.
hypothesis.settings.register_profile("p2pnode", deadline=None)
hypothesis.settings.load_profile("p2pnode")

# Before NumPy is loaded: two threads of OpenBLAS on small matrices wait for each other, ten times as long as one works.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

#: Numba compiles the engines once per process that finds no cache: their tests share a worker.
SIMULATION_TESTS = Path(__file__).parent / "unit" / "training" / "simulation"
COMPILES = frozenset({"test_simulate", "test_simulate_options"})

#: They parse all modules, once per process.
PARSE = frozenset({"test_event_glossary", "test_import_rules", "test_one_path", "test_structure"})

#: It takes four minutes of the long run: it begins before everything else.
LONGEST = frozenset({"test_swarm_scale"})
#: The longest groups first.
FIRST = ("swarms", "forks", "trainers", "simulation", "sources")

SIMULATED_TESTS = Path(__file__).parent / "simulated"
PROCESS_TESTS = Path(__file__).parent / "process"
SWARMS = frozenset(
    {
        "test_hostile_process",
        "test_member_limits",
        "test_nat_namespaces",
        "test_partition",
        "test_process_faults",
        "test_resume_process",
        "test_swarm_process",
        "test_wan",
        "test_wan_world",
    }
)
#: Those with `tests.process.harness.forked_python`, and with daemons whose seconds nobody measures.
FORKS = frozenset(
    {
        "test_advise_process",
        "test_background_process",
        "test_bad_input",
        "test_demo",
        "test_dispatch_process",
        "test_documented_programs",
        "test_duplicate_identity_process",
        "test_examples",
        "test_full_disk",
        "test_local_nodes",
        "test_run_command",
        "test_sealed_process",
        "test_state_directory_process",
        "test_unread_output",
    }
)
#: Those that fork trainers alone: together with the daemons they would take longer than everything else.
TRAINERS = frozenset(
    {
        "test_forked_python",
        "test_lazy_dynamo",
        "test_shared_data_process",
        "test_trainer_attach",
        "test_trainer_process",
    }
)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is collected is no garbage: looking through it again and again takes an eighth of the time."""
    gc.disable()
    try:
        _import_shares(session.config)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _import_shares(config: pytest.Config) -> None:
    """In a fresh clone the workers would compile the same modules at the same time. Each begins at another place, and
    finds compiled what the others have begun with."""
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    paths = sorted(Path(__file__).parent.rglob("test_*.py"))
    begin = len(paths) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for path in paths[begin:] + paths[:begin]:
        # A module that cannot be imported is reported by the collection.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(config.rootpath).with_suffix("").parts))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    if config.getvalue("dist") != "loadgroup":
        return None
    from tests.harness.work_units import WorkUnits

    return WorkUnits(config, log)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first: dict[str, list[pytest.Item]] = {name: [] for name in FIRST}
    for item in items:
        group = group_of(item.path)
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))
        if group in first:
            first[group].append(item)
    # The longest first, so that none is still running when the other workers have nothing left to do.
    begin = [item for item in items if item.path.stem in LONGEST]
    begin += [item for group in first.values() for item in group]
    chosen = set(map(id, begin))
    items[:] = begin + [item for item in items if id(item) not in chosen]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Nodes of a simulated network verify each other's signatures in one process: those that it has made are known."""
    if item.path.parent != SIMULATED_TESTS:
        return (yield)
    from tests.harness.quick_identity import known_signatures

    with known_signatures():
        return (yield)


def group_of(path: Path) -> str | None:
    """The group whose tests share a worker; None where any will do."""
    name = path.stem
    if name in TRAINERS:
        return "trainers"
    if path.parent == PROCESS_TESTS:
        if name == "test_status_schemathesis":  # a second of imports
            return name
        return "swarms" if name in SWARMS else "forks" if name in FORKS else None
    if path.is_relative_to(SIMULATION_TESTS) or name in COMPILES:
        return "simulation"
    if name in PARSE:
        return "sources"
    return name if name == "test_kernels" else None  # its fixture compiles the kernels
