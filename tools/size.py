"""`make size`: how large the repository is, as a table; `make size ARGS="main HEAD"` compares two revisions.

    python -m tools.size [REVISION [REVISION]]      default: the working tree, with what git does not ignore

Each tree is unpacked into a temporary folder, and only that folder is read and run, so any revision can be measured
with this program. A count that a revision does not allow is "-".

* lines, statements (docstrings are none), modules and classes per package; `source` is the three packages;
* what one training step passes: `tools.traced_step`;
* imports of `training/exchange`: pairs of modules, the imported one in it, the importing one inside or outside;
* settings: rows of docs/config.md; events: rows of docs/events.md; requests: names of the streams that a node answers;
* constructors: parameters of a written `__init__`, without `self`, and fields of a dataclass.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ("overlay", "training", "p2pnode")
EXCHANGE = "training/exchange"
PARTS = (*SOURCE, EXCHANGE, "tests", "benchmarks")
#: A constructor takes at most so many parameters (CONTRIBUTING.md).
MOST_PARAMETERS = 8
EVENT = re.compile(r"^\| `(\w+)`", re.MULTILINE)
#: Methods that take the name of a request and its handler.
REGISTER = frozenset({"register", "register_bare"})
TRACE_TIMEOUT_S = 600

#: A row of the table; None: the tree does not allow the count.
Counts = dict[str, int | None]
#: The syntax tree of each module, by its path below the root.
Modules = Mapping[str, ast.Module]


# -- counting, of parsed modules


def statements(module: ast.Module) -> int:
    """How many statements a module has, docstrings left out."""
    return sum(
        isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in ast.walk(module)
    )


def module_name(path: str) -> str:
    """Without the package that links to two of the folders: earlier revisions have no such links."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(name: str) -> str:
    """`module_name` of what an import statement names."""
    return re.sub(r"^p2pnode\.(?=(overlay|training)(\.|$))", "", name)


def imports_of(modules: Modules, package: str) -> tuple[int, int]:
    """The pairs of modules whose second one, in `package`, is imported by the first: inside it, and from outside."""
    names = {module_name(path) for path in modules}
    pairs = set()
    for path, module in modules.items():
        for node in ast.walk(module):
            found: list[str] = []
            if isinstance(node, ast.Import):
                found = [imported(alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                # A name is a module of the package or is defined in it.
                found = [imported(f"{node.module}.{alias.name}") for alias in node.names]
                found = [name if name in names else imported(node.module) for name in found]
            pairs |= {(module_name(path), name) for name in found if name in names and name != module_name(path)}
    inside = package.replace("/", ".")
    into = [importer for importer, name in pairs if f"{name}.".startswith(f"{inside}.")]
    within = sum(f"{importer}.".startswith(f"{inside}.") for importer in into)
    return within, len(into) - within


def requests(modules: Modules) -> set[str]:
    """The names under which handlers of requests are registered, as texts or as constants of any module."""
    constants = {module_name(path): _constants(module) for path, module in modules.items()}
    found = set()
    for path, module in modules.items():
        nodes = list(ast.walk(module))
        known = dict(constants[module_name(path)])
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    theirs = constants.get(imported(f"{node.module}"), {})
                    known |= {alias.asname or alias.name: theirs[alias.name]} if alias.name in theirs else {}
                    inner = constants.get(imported(f"{node.module}.{alias.name}"), {})
                    known |= {f"{alias.name}.{name}": value for name, value in inner.items()}
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in REGISTER:
                name = ast.unparse(node.args[0]) if node.args else ""
                found |= (
                    {known[name]} if name in known else {ast.literal_eval(name)} if name[:1] in {"'", '"'} else set()
                )
    return found


def _constants(module: ast.Module) -> dict[str, str]:
    """The texts that a module gives a name, also several in one line."""
    found = {}
    for node in module.body:
        if isinstance(node, ast.Assign):
            pairs = [(node.targets[0], node.value)]
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(node.targets[0].elts, node.value.elts, strict=True))
            for name, value in pairs:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    found[ast.unparse(name)] = value.value
    return found


def parameters(modules: Iterable[ast.Module]) -> tuple[list[int], list[int]]:
    """The number of parameters of each written constructor, and of fields of each dataclass."""
    classes = [node for module in modules for node in ast.walk(module) if isinstance(node, ast.ClassDef)]
    written = [
        len([*inner.args.posonlyargs, *inner.args.args, *inner.args.kwonlyargs]) - 1
        for node in classes
        for inner in node.body
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__"
    ]
    fields = [
        sum(isinstance(inner, ast.AnnAssign) for inner in node.body)
        for node in classes
        if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    return written, fields


# -- the table of one tree


def measured(tree: Path, *, traces: bool = True) -> Counts:
    """All counts of the tree at this folder."""
    counts: Counts = {}
    every = {
        path.relative_to(tree).as_posix(): path.read_text(encoding="utf-8")
        for part in (*SOURCE, "tests", "benchmarks")
        for path in sorted((tree / part).rglob("*.py"))
    }
    modules = {path: ast.parse(text) for path, text in every.items()}
    ours = {path: module for path, module in modules.items() if path.startswith(tuple(f"{part}/" for part in SOURCE))}
    groups = {"source": list(ours)} | {part: [path for path in every if path.startswith(f"{part}/")] for part in PARTS}
    for part, paths in groups.items():
        counts |= {
            f"{part}: lines": sum(len(every[path].splitlines()) for path in paths),
            f"{part}: statements": sum(statements(modules[path]) for path in paths),
            f"{part}: modules": len(paths),
            f"{part}: classes": sum(
                isinstance(node, ast.ClassDef) for path in paths for node in ast.walk(modules[path])
            ),
        }
    pages = [*tree.glob("*.md"), *(tree / "docs").rglob("*.md")]
    counts["documents: words"] = sum(len(page.read_text(encoding="utf-8").split()) for page in pages)
    step = traced(tree) if traces else {}
    counts |= {f"one step: {name}": step.get(name) for name in ("functions", "classes", "files")}
    within, into = imports_of(ours, EXCHANGE)
    counts |= {f"{EXCHANGE}: imports inside": within, f"{EXCHANGE}: imports from outside": into}
    counts["settings"] = settings(tree)
    counts["events"] = events(tree)
    counts["requests"] = len(requests(ours))
    for what, found in zip(("constructors: parameters", "dataclasses: fields"), parameters(ours.values()), strict=True):
        counts[f"{what}, most"] = max(found, default=0)
        counts[f"{what}, more than {MOST_PARAMETERS}"] = sum(number > MOST_PARAMETERS for number in found)
    return counts


def settings(tree: Path) -> int | None:
    """The rows of docs/config.md, which has every setting."""
    page = tree / "docs" / "config.md"
    return (
        sum(line.startswith("| `") for line in page.read_text(encoding="utf-8").splitlines()) if page.exists() else None
    )


def events(tree: Path) -> int | None:
    """The rows of docs/events.md, which has each event that the code logs."""
    page = tree / "docs" / "events.md"
    return len(set(EVENT.findall(page.read_text(encoding="utf-8")))) if page.exists() else None


def traced(tree: Path) -> dict[str, int]:
    """What `tools.traced_step` prints of this tree; nothing, and why on standard error, if it cannot run there."""
    program = Path(__file__).with_name("traced_step.py")
    # -P: the folder of the program, with other modules of this tree, is on no path.
    command = [sys.executable, "-P", str(program)]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TRACE_TIMEOUT_S, check=True
        )
        found: dict[str, int] = json.loads(done.stdout)
        return found
    except subprocess.CalledProcessError as error:
        print(f"The step could not be traced: {(error.stderr.strip() or '?').splitlines()[-1]}", file=sys.stderr)
    except (subprocess.TimeoutExpired, ValueError) as error:
        print(f"The step could not be traced: {error}", file=sys.stderr)
    return {}


def unpacked(revision: str, folder: Path) -> Path:
    """Write the tree of a revision into a folder; of the working tree if it is empty: what git does not ignore."""
    if revision:
        packed = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
    else:
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name in names:
                if name and (ROOT / name).exists():
                    archive.add(ROOT / name, name, recursive=False)
        packed = buffer.getvalue()
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def table(columns: Mapping[str, Counts]) -> list[str]:
    """The lines to print: a column for each tree."""
    names = list(dict.fromkeys(name for counts in columns.values() for name in counts))
    width = max(12, *(len(title) + 2 for title in columns))
    lines = [" " * 42 + "".join(f"{title:>{width}}" for title in columns)]
    for name in names:
        cells = ["-" if (count := counts.get(name)) is None else f"{count:,}" for counts in columns.values()]
        lines.append(f"{name:42}" + "".join(f"{cell:>{width}}" for cell in cells))
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.size", description="How large the repository is.")
    parser.add_argument("revisions", nargs="*", metavar="REVISION", help="default: the working tree")
    parser.add_argument("--no-trace", action="store_true", help="leave out the traced step, which takes half a minute")
    chosen = parser.parse_args(arguments)
    columns = {}
    for revision in chosen.revisions or [""]:
        with tempfile.TemporaryDirectory() as folder:
            tree = unpacked(revision, Path(folder).resolve())
            columns[revision or "working tree"] = measured(tree, traces=not chosen.no_trace)
    print("\n".join(table(columns)))


if __name__ == "__main__":
    main()
