"""Rules on imports: which module may import which, and what a pure or simulated module must not use.

`make check` runs the contracts of import-linter. These tests show that each contract notices a breach, and import the
daemon's modules for real. They read from the syntax tree what a contract cannot express: import cycles, the imports of
pure modules, and calls that bypass `overlay.environment`.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.project.repository import PACKAGES, ROOT, sources, syntax_nodes, syntax_tree

TRAINERS_SIDE = ("training/trainer/", "training/tasks/", "p2pnode/integrations/")

#: The claim of a module docstring; in the docstring of a package it covers every module of the folder.
PURE = re.compile(r"(?<![\w`])Pure\.(?=\s|$)")
#: A docstring at the start of a module, without quotes or escapes in it.
DOCSTRING = re.compile(r'("""[^"\\]*""")\n')
#: Other forms of the claim, which the check would pass over.
ALMOST_PURE = re.compile(r"(?<![\w`])Pure(?:[:;,]| but | and )")
IMPURE_IMPORTS = {"aiohttp", "asyncio", "os", "socket", "subprocess", "threading", "time", "torch", "uuid", "secrets"}

#: The implementations of the environment, which read clocks and entropy, the trainer process with its supervisor, and
#: what runs in a script and in the workers of Dask.
REAL_ENVIRONMENT = (
    "overlay/system.py",
    "overlay/sockets/transport.py",
    "training/supervisor/launch.py",
    "training/supervisor/process_trainer.py",
    "training/supervisor/process.py",
    "training/engines/mapreduce/",
    # In the process of a script, which no simulation runs.
    "training/engines/link.py",
    "training/engines/values_link.py",
    "training/engines/peer/engine.py",
    "training/engines/server/script_host.py",
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

#: A module, an import that is forbidden in it, and the contract that forbids it.
BREACHES = [
    ("overlay/peers.py", "import training.layout", "Imports run one way"),
    ("overlay/peers.py", "import overlay.kademlia.messages", "Layers of the overlay"),
    ("overlay/sockets/udp.py", "import overlay.kademlia.messages", "Layers of the overlay"),
    ("overlay/kademlia/protocol.py", "import overlay.membership.members", "Layers of the overlay"),
    ("overlay/requests.py", "import overlay.membership.members", "Layers of the overlay"),
    ("overlay/nat/reachability.py", "def late():\n    import overlay.overlay", "Layers of the overlay"),
    ("training/layout.py", "import training.encoding.codecs", "Layers of training"),
    ("training/barriers/waiter.py", "import training.shards.state", "Layers of training"),
    ("training/exchange/exchange.py", "import training.step_loop", "Layers of training"),
    ("training/exchange/terms.py", "import training.exchange.messages", "Layers of the exchange"),
    ("training/exchange/store/records.py", "import training.exchange.rpc", "Layers of the exchange"),
    ("training/exchange/client/pull.py", "import training.exchange.backup.handler", "Layers of the exchange"),
    ("training/exchange/audit/answers.py", "import training.exchange.audit.resending", "Layers of the audit"),
    ("training/exchange/recovery/failover.py", "import training.exchange.exchange", "Layers of the exchange"),
    ("training/simulation/model/plan.py", "import training.simulation.run", "Layers of the simulator"),
    ("training/simulation/advice.py", "import training.simulation.figures.plots", "Layers of the simulator"),
    ("training/dispatch/chunks.py", "import training.dispatch.queue", "Layers of dispatch"),
    ("training/dispatch/conversion/lines.py", "import training.dispatch.conversion.formats", "Layers of conversion"),
    ("training/dispatch/recordio/layout.py", "import training.dispatch.recordio.chunk", "Layers of RecordIO"),
    ("training/dispatch/queue.py", "import training.dispatch.stored_queue", "Layers of dispatch"),
    ("training/engines/mapreduce/keys.py", "import training.engines.mapreduce.plan", "Layers of map-reduce"),
    ("training/engines/program.py", "import training.engines.values_link", "Layers of the engines"),
    ("training/engines/server/core.py", "import training.engines.server.fencing", "Layers of the parameter server"),
    ("training/engines/peer/loop.py", "import training.engines.peer.engine", "Layers of the peer-to-peer engine"),
    ("p2pnode/config/load.py", "import p2pnode.lifecycle.state", "Layers of the daemon"),
    ("p2pnode/terminal/lines.py", "import p2pnode.terminal.status_view", "Layers of the terminal"),
    ("p2pnode/doctor/check.py", "import p2pnode.doctor.visit", "Layers of the doctor"),
    ("p2pnode/lifecycle/node.py", "import p2pnode.keys.key_files", "Layers of the daemon"),
    ("overlay/overlay.py", "import overlay.sockets.transport", "Real sockets are chosen by the daemon alone"),
    ("training/layout.py", "import p2pnode.config.load", "Imports run one way"),
    ("training/layout.py", "from torch import nn", "The daemon never imports torch"),
    ("p2pnode/config/load.py", "def late():\n    import torch.cuda", "The daemon never imports torch"),
    (
        "p2pnode/config/load.py",
        "from training.tasks import digits",
        "The trainer is imported by itself alone",
    ),
    ("training/layout.py", "import training.trainer", "The trainer is imported by itself alone"),
    ("p2pnode/cli.py", "import p2pnode.integrations.readings", "Callbacks for other libraries"),
    ("overlay/peers.py", "import aiohttp", "Only the status server, UPnP and the client of etcd import aiohttp"),
]


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def docstring(path: str) -> str:
    """Of a module. In nearly all it is the first thing in the file and is read without parsing the rest, because tests
    are named after it: every process that collects them reads all."""
    found = DOCSTRING.match((ROOT / path).read_text(encoding="utf-8"))
    return ast.literal_eval(found[1]) if found else ast.get_docstring(syntax_tree(path)) or ""


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


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    program = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    command = [sys.executable, "-P", "-c", program, "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


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


def test_the_contracts_hold() -> None:
    """import-linter keeps every contract of pyproject.toml."""
    result = lint_imports(ROOT)

    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


def copied(folder: Path) -> None:
    """Copy the packages and their contracts."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "data"))
    shutil.copy(ROOT / "pyproject.toml", folder)


def broken_contracts(folder: Path) -> list[str]:
    """The contracts that the packages of a folder break."""
    result = lint_imports(folder)
    assert result.returncode == 1, result.stdout + result.stderr
    return [line for line in result.stdout.splitlines() if " BROKEN" in line]


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What import-linter reports under each contract for packages that have all the breaches at once."""
    folder = tmp_path_factory.mktemp("breaches")
    copied(folder)
    for path, breach, _ in BREACHES:
        with (folder / path).open("a", encoding="utf-8") as file:
            file.write(f"\n{breach}\n")
    details = lint_imports(folder).stdout.partition("\nBroken contracts\n")[2]
    # A heading is a line above a line of hyphens.
    parts = re.split(r"^(.+)\n-{3,}$", details, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize(("path", "breach", "contract"), BREACHES)
def test_a_breach_is_noticed(reported: dict[str, str], path: str, breach: str, contract: str) -> None:
    """One forbidden import anywhere breaks the contract that forbids it: no contract is vacuous."""
    found = re.search(r"from (\S+) import|import (\S+)", breach)
    assert found is not None
    imported = found[1] or found[2]
    sections = [text for name, text in reported.items() if name.startswith(contract)]

    # Of a package outside this repository the report names the top only.
    assert len(sections) == 1
    assert re.search(rf"^- +{module_name(path)} -> {imported.split('.')[0]}\b", sections[0], re.MULTILINE)
    assert f"{module_name(path)} -> {imported}" in sections[0] or imported.startswith(("torch", "aiohttp"))


def test_a_module_without_a_layer_is_a_breach(tmp_path: Path) -> None:
    """A new module of each layered package has to be given a layer."""
    copied(tmp_path)
    folders = [
        "overlay",
        "training",
        "training/dispatch",
        "training/dispatch/conversion",
        "training/dispatch/recordio",
        "training/engines",
        "training/engines/mapreduce",
        "training/engines/peer",
        "training/engines/server",
        "training/exchange",
        "training/exchange/audit",
        "training/simulation",
        "p2pnode",
    ]
    for folder in folders:
        (tmp_path / folder / "new_module.py").touch()

    assert sum(line.startswith("Layers of ") for line in broken_contracts(tmp_path)) == len(folders)


def test_every_contract_has_a_breach() -> None:
    """Each contract of pyproject.toml is broken by one of the breaches above."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    names = {contract["name"] for contract in project["tool"]["importlinter"]["contracts"]}

    assert {name for name in names if not name.startswith(tuple(contract for _, _, contract in BREACHES))} == set()


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


@pytest.mark.parametrize("path", pure_modules())
def test_a_module_that_claims_to_be_pure_is(path: str) -> None:
    """A module with the sentence "Pure." imports no event loop, socket, clock, operating system or torch."""
    assert imported_names(path) & IMPURE_IMPORTS == set()


def test_purity_is_claimed_in_one_form() -> None:
    """No docstring makes the claim in a form that is not checked, and some modules of each layer make it."""
    other_forms = [path for path in sources(*PACKAGES) if ALMOST_PURE.search(docstring(path))]

    assert other_forms == []
    assert {path.partition("/")[0] for path in pure_modules()} == set(PACKAGES)


@pytest.mark.parametrize(
    "path",
    [path for path in sources("overlay", "training") if not path.startswith(REAL_ENVIRONMENT)]
    + [path for path in sources("p2pnode") if path.startswith("p2pnode/lifecycle/")],
)
def test_nothing_bypasses_the_environment(path: str) -> None:
    """A module that runs under simulation reads no clock, draws from no global generator and starts no thread."""
    # `random.Random(seed)` is a generator of one's own; everything else in the module is the shared one.
    bypasses = [
        f"{path}:{line}: {name}"
        for line, name in calls(path)
        if name in BYPASSES
        or name.startswith("secrets.")
        or (name.startswith("random.") and not name.startswith("random.Random"))
    ]

    assert bypasses == []
