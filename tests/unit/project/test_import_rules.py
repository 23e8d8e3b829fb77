"""Rules on imports: which module may import which, and what a pure or simulated module must not use.

`make check` runs the contracts of import-linter. These tests import the daemon's modules for real, and read from the
syntax tree what a contract cannot express: import cycles, the imports of pure modules, and calls that bypass
`overlay.environment`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.harness.project.repository import PACKAGES, ROOT, module_name, sources, syntax_nodes, syntax_tree

TRAINERS_SIDE = ("training/trainer/", "training/tasks/", "p2pnode/integrations/")

#: The claim of a module docstring; in the docstring of a package it covers every module of the folder.
PURE = re.compile(r"(?<![\w`])Pure\.(?=\s|$)")
IMPURE_IMPORTS = {"aiohttp", "asyncio", "os", "socket", "subprocess", "threading", "time", "torch", "uuid", "secrets"}

#: The implementations of the environment, which read clocks and entropy, the trainer process with its supervisor, and
#: what runs in a script and in the workers of Dask.
REAL_ENVIRONMENT = (
    "overlay/system.py",
    "overlay/sockets/transport.py",
    "training/supervisor/launch.py",
    "training/supervisor/process_trainer.py",
    "training/supervisor/process.py",
    # Starts nothing without a GPU, and no simulated trainer has one.
    "training/supervisor/gpu_monitor.py",
    "training/engines/mapreduce/",
    # In the process of a script, which no simulation runs.
    "training/engines/link.py",
    "training/engines/values_link.py",
    "training/engines/peer.py",
    "training/engines/server/host.py",
    *TRAINERS_SIDE,
)
#: Calls that bypass the environment: under simulation they would make two runs of one seed differ.
BYPASSES = {
    "asyncio.to_thread",
    "datetime.datetime.now",
    "datetime.datetime.utcnow",
    "os.getpid",
    "os.urandom",
    "time.monotonic",
    "time.perf_counter",
    "time.sleep",
    "time.time",
    "uuid.uuid1",
    "uuid.uuid4",
}


def docstring(path: str) -> str:
    return ast.get_docstring(syntax_tree(path)) or ""


def pure_modules() -> list[str]:
    """The modules that claim to be pure, by themselves or by their package."""
    claimed = {path for path in sources(*PACKAGES) if PURE.search(docstring(path))}
    folders = tuple(path.removesuffix("__init__.py") for path in claimed if path.endswith("/__init__.py"))
    return [path for path in sources(*PACKAGES) if path in claimed or path.startswith(folders)]


def imported_names(path: str) -> set[str]:
    """The top-level names of everything a module imports, also inside functions."""
    names = set()
    for node in syntax_nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def import_graph() -> dict[str, set[str]]:
    """Which modules of this repository each of them imports, also inside functions and under TYPE_CHECKING."""
    modules = {module_name(path): path for path in sources(*PACKAGES)}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for module, path in modules.items():
        for node in syntax_nodes(path):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                # A name is a module of the package or is defined in it.
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in modules else f"{node.module}" for name in names]
            else:
                continue
            graph[module] |= {name for name in names if name in modules and name != module}
    return graph


def in_cycles(graph: dict[str, set[str]]) -> set[str]:
    """The modules on an import cycle or between two cycles."""
    left = set(graph)
    while True:
        imported = {target for module in left for target in graph[module]}
        kept = {module for module in left if graph[module] & left and module in imported}
        if kept == left:
            return left
        left = kept


def calls(path: str) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of each call of something imported, whatever name it was imported under."""
    meaning: dict[str, str] = {}
    for node in syntax_nodes(path):
        if isinstance(node, ast.Import):
            meaning |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            meaning |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in syntax_nodes(path):
        if isinstance(node, ast.Call):
            first, *rest = ast.unparse(node.func).split(".")
            if first in meaning:
                yield node.lineno, ".".join([meaning[first], *rest])


def test_a_daemon_does_not_load_torch() -> None:
    """Importing every module but the trainer's side loads neither torch nor what belongs to it alone."""
    modules = [
        module_name(path)
        for path in sources(*PACKAGES)
        if not path.startswith(TRAINERS_SIDE) and not path.endswith("/__main__.py")
    ]
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('torch', 'matplotlib', 'pytest')))"
    )

    result = subprocess.run(
        [sys.executable, "-c", program, *modules], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_no_module_imports_itself_through_others() -> None:
    """There is no cycle of imports between modules, not even one that a late import would hide."""
    assert in_cycles(import_graph()) == set()


@pytest.mark.parametrize(
    ("graph", "cycle"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, set()),
        ({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}, {"b", "c"}),
    ],
)
def test_a_cycle_is_found(graph: dict[str, set[str]], cycle: set[str]) -> None:
    """The search names the modules of a cycle, and neither those that import it nor those that it imports."""
    assert in_cycles(graph) == cycle


def test_modules_that_claim_to_be_pure_are() -> None:
    """A module with the sentence "Pure." imports no event loop, socket, clock, operating system or torch."""
    assert {path: found for path in pure_modules() if (found := imported_names(path) & IMPURE_IMPORTS)} == {}


def test_nothing_bypasses_the_environment() -> None:
    """A module that runs under simulation reads no clock, draws from no global generator and starts no thread."""
    simulated = [path for path in sources("overlay", "training") if not path.startswith(REAL_ENVIRONMENT)]
    simulated += [path for path in sources("p2pnode") if path.startswith("p2pnode/lifecycle/")]
    # `random.Random(seed)` is a generator of one's own; everything else in the module is the shared one.
    bypasses = [
        f"{path}:{line}: {name}"
        for path in simulated
        for line, name in calls(path)
        if name in BYPASSES
        or name.startswith("secrets.")
        or (name.startswith("random.") and not name.startswith("random.Random"))
    ]

    assert bypasses == []
