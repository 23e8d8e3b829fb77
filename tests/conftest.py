"""Assigns tests to the workers of `make test`: tests with several daemons share one worker, the others run on any.

Tests with several daemons measure seconds; two of them at once would measure each other. They begin first, then the
other tests with processes, which wait the longest; some workers begin at the end, with simulated swarms, which compute.
`tests.harness.runner.forked_workers` makes the workers; they share the servers that fork
(`tests.process.harness.forked_python`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

pytest_plugins = ["tests.harness.runner.forked_workers", "tests.harness.runner.quick_log_capture"]

# The same examples in each run. One that waits for a core, or imports something, is late and not wrong.
hypothesis.settings.register_profile("p2pnode", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("p2pnode")

# Before NumPy and torch are loaded: two threads on small matrices wait for each other, ten times as long as one works.
for library in ("OPENBLAS", "OMP"):
    os.environ[f"{library}_NUM_THREADS"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """The tests are of processors, and mean the same on every machine: those of a GPU are asked for with -m cuda."""
    if "cuda" not in str(config.getoption("markexpr")):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


#: Numba compiles the engines once per process that finds no cache: their tests share a worker.
SIMULATION_TESTS = Path(__file__).parent / "unit" / "training" / "simulation"
COMPILES = frozenset({"test_simulate"})

#: They parse all modules, once per process.
PARSE = frozenset({"test_import_rules"})

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
#: Their tests share what takes long to make.
SHARE = frozenset({"test_documented_programs", "test_rank_states_process", "test_status_schemathesis"})

#: The longest groups first, and what mostly waits before what computes.
FIRST = ("swarms", *sorted(SHARE), "process", "simulation", "sources")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is collected is no garbage: looking through it again and again takes an eighth of the time."""
    gc.disable()
    compiler = compile_the_other_half(session.config)
    if is_whole(session.config):
        # They import torch while this process collects, which keeps one core busy.
        importlib.import_module("tests.process.harness.forked_python")
        share_fork_servers(session.config)
    try:
        return (yield)
    finally:
        if "torch" in sys.modules:
            # As trainers have it: the first optimizer of a worker would import 800 modules.
            importlib.import_module("p2pnode.training.trainer.lazy_dynamo").import_later()
        share_fork_servers(session.config)
        gc.freeze()
        gc.enable()
        if compiler:
            os.waitpid(compiler, 0)


def share_fork_servers(config: pytest.Config) -> None:
    """Start, where a test that was collected uses them, the servers that fork: the workers share them.

    Each worker has its own where processor time is counted by test, because that of a server is the test's.
    """
    forks = sys.modules.get("tests.process.harness.forked_python")
    counted = config.pluginmanager.has_plugin("tests.harness.runner.processor_time")
    if forks is not None and config.option.workers and not config.option.collectonly and not counted:
        forks.with_torch()
        forks.with_daemon()


def is_whole(config: pytest.Config) -> bool:
    """Whether all tests are collected, for workers."""
    return bool(config.option.workers) and config.args_source is pytest.Config.ArgsSource.TESTPATHS


def compile_the_other_half(config: pytest.Config) -> int:
    """In a fresh clone Python compiles all modules: another process begins with the last ones. Returns its id."""
    paths = sorted(Path(__file__).parent.rglob("test_*.py"))
    compiled = (paths[-1].parent / "__pycache__").glob(f"{paths[-1].stem}.*-pytest-*.pyc")
    if not is_whole(config) or sys.dont_write_bytecode or any(compiled):
        return 0
    if pid := os.fork():
        return pid
    try:
        for path in reversed(paths):
            # A module that cannot be imported is reported by the collection.
            with contextlib.suppress(Exception, pytest.skip.Exception):
                importlib.import_module(".".join(path.relative_to(config.rootpath).with_suffix("").parts))
    finally:
        os._exit(0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first: dict[str, list[pytest.Item]] = {name: [] for name in FIRST}
    for item in items:
        group = group_of(item.path)
        if group is not None:
            item.add_marker(pytest.mark.worker_group(group))
        elif item.path.is_relative_to(PROCESS_TESTS):
            group = "process"
        if group in first:
            first[group].append(item)
    # The longest at both ends, so that none is still running when the other workers have nothing left to do.
    begin = [item for group in first.values() for item in group]
    chosen = set(map(id, begin))
    rest = [item for item in items if id(item) not in chosen]
    items[:] = begin + sorted(rest, key=lambda item: item.path.is_relative_to(SIMULATED_TESTS))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Nodes of a simulated network verify each other's signatures in one process: those that it has made are known."""
    if item.path.parent != SIMULATED_TESTS:
        return (yield)
    from tests.harness.environment.quick_identity import known_signatures

    with known_signatures():
        return (yield)


def group_of(path: Path) -> str | None:
    """The group whose tests share a worker; None where any will do."""
    name = path.stem
    if path.parent == PROCESS_TESTS:
        return name if name in SHARE else "swarms" if name in SWARMS else None
    if path.is_relative_to(SIMULATION_TESTS) or name in COMPILES:
        return "simulation"
    if name in PARSE:
        return "sources"
    return name if name == "test_kernels" else None  # its fixture compiles the kernels
