"""docs/python-api.md: signatures and docstrings of what scripts import, read from the syntax tree. Pure.

Nothing is imported: torch, Lightning and Dask would cost seconds, and may be missing. A class shows its own public
methods and those of the bases that are named with it.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
Function = ast.FunctionDef | ast.AsyncFunctionDef

_HEAD = """\
# Python API

Generated from the docstrings by `python -m documentation`; a test keeps it equal. Do not edit it by hand.

Scripts import these names. Everything else in the packages `p2pnode`, `training` and `overlay` may change at any time.

"""


class Entry(NamedTuple):
    """One documented name: how a script writes it, where it is defined, and further bases whose methods it has."""

    shown: str
    module: str
    name: str
    bases: tuple[tuple[str, str], ...] = ()
    constructed: bool = False


#: A longer signature has a line for each argument.
WIDTH = 88
#: Methods for the packages themselves, on classes that scripts get.
INTERNAL = {
    "assigned",
    "allowed",
    "computed",
    "open",
    "passes",
    "pulled",
    "pushed",
    "scheduled",
    "stops",
    "use",
}
SECTIONS: tuple[tuple[str, str, tuple[Entry, ...]], ...] = (
    (
        "Train a model in your own loop",
        "See [your own model](own-model.md) and [your own training script](scripts.md).",
        (
            Entry("p2pnode.attach", "p2pnode.training.trainer.attach", "attach"),
            Entry(
                "AttachedSwarm",
                "p2pnode.training.trainer.attached_swarm",
                "AttachedSwarm",
                (
                    ("p2pnode.training.trainer.swarm_data", "SwarmData"),
                    ("p2pnode.training.trainer.script_settings", "NodeKnowledge"),
                    ("p2pnode.training.trainer.signs_of_life", "SignsOfLife"),
                ),
            ),
            Entry(
                "p2pnode.training.trainer.attach.ModelChanged",
                "p2pnode.training.trainer.attached_swarm",
                "ModelChanged",
            ),
            Entry("p2pnode.training.trainer.attach.NotAttached", "p2pnode.training.trainer.attach", "NotAttached"),
            Entry("p2pnode.training.trainer.attach.SwarmLost", "p2pnode.training.trainer.attached_swarm", "SwarmLost"),
        ),
    ),
    (
        "Callbacks for other libraries",
        "See [your framework](frameworks.md).",
        (
            Entry(
                "p2pnode.integrations.transformers.SwarmCallback",
                "p2pnode.integrations.transformers",
                "SwarmCallback",
                constructed=True,
            ),
            Entry(
                "p2pnode.integrations.lightning.SwarmCallback",
                "p2pnode.integrations.lightning",
                "SwarmCallback",
                constructed=True,
            ),
        ),
    ),
    (
        "A task class",
        "",
        (
            Entry("p2pnode.training.tasks.task", "p2pnode.training.tasks.task", ""),
            Entry("p2pnode.training.tasks.task.Task", "p2pnode.training.tasks.task", "Task"),
            Entry("p2pnode.training.tasks.task.TrainSpec", "p2pnode.training.tasks.task", "TrainSpec"),
            Entry(
                "p2pnode.training.tasks.task.TaskError", "p2pnode.training.tasks.task", "TaskError", constructed=True
            ),
            Entry("p2pnode.training.tasks.task.read_options", "p2pnode.training.tasks.task", "read_options"),
        ),
    ),
    (
        "Barriers of your own",
        "`barrier.custom` names a function with the signature of these two. See [choosing a barrier](psp.md).",
        (
            Entry("p2pnode.training.barriers.predicates.bsp", "p2pnode.training.barriers.predicates", "bsp"),
            Entry("p2pnode.training.barriers.predicates.ssp", "p2pnode.training.barriers.predicates", "ssp"),
        ),
    ),
    (
        "Engines",
        "See [engines](engines.md).",
        (
            Entry("p2pnode.engine", "p2pnode.training.engines.selection", "engine"),
            Entry("p2pnode.Program", "p2pnode.training.engines.program", "Program"),
            Entry("p2pnode.Context", "p2pnode.training.engines.program", "Context"),
            Entry(
                "PeerToPeer",
                "p2pnode.training.engines.peer.engine",
                "PeerToPeer",
                (("p2pnode.training.engines.program", "Verbs"),),
            ),
            Entry("p2pnode.ServerProgram", "p2pnode.training.engines.server.program", "ServerProgram"),
            Entry("p2pnode.ServerContext", "p2pnode.training.engines.server.program", "ServerContext"),
            Entry("ParameterServer", "p2pnode.training.engines.server.engine", "ParameterServer"),
            Entry("p2pnode.ModelValues", "p2pnode.training.engines.model_values", "ModelValues", constructed=True),
            Entry("MapReduce", "p2pnode.training.engines.mapreduce.engine", "MapReduce"),
            Entry("Dataset", "p2pnode.training.engines.mapreduce.dataset", "Dataset"),
            Entry("p2pnode.training.engines.program.NoSuchValue", "p2pnode.training.engines.program", "NoSuchValue"),
            Entry("p2pnode.training.engines.program.VerbFailed", "p2pnode.training.engines.program", "VerbFailed"),
            Entry(
                "p2pnode.training.engines.server.losses.UpdatesLost",
                "p2pnode.training.engines.server.losses",
                "UpdatesLost",
            ),
        ),
    ),
    (
        "Files of records",
        "See [data dispatch](dispatch.md).",
        (
            Entry(
                "p2pnode.training.dispatch.recordio.create_records",
                "p2pnode.training.dispatch.recordio.files",
                "create_records",
            ),
            Entry(
                "p2pnode.training.dispatch.recordio.RecordFile",
                "p2pnode.training.dispatch.recordio.reader",
                "RecordFile",
                constructed=True,
            ),
            Entry(
                "p2pnode.training.dispatch.recordio.RecordWriter",
                "p2pnode.training.dispatch.recordio.writer",
                "RecordWriter",
                constructed=True,
            ),
            Entry(
                "p2pnode.training.dispatch.recordio.encode_example",
                "p2pnode.training.dispatch.recordio.examples",
                "encode_example",
            ),
            Entry(
                "p2pnode.training.dispatch.recordio.decode_example",
                "p2pnode.training.dispatch.recordio.examples",
                "decode_example",
            ),
            Entry(
                "p2pnode.training.dispatch.recordio.stack_examples",
                "p2pnode.training.dispatch.recordio.examples",
                "stack_examples",
            ),
        ),
    ),
)


def python_page(root: Path = ROOT) -> str:
    """The whole page. Raises `LookupError` for a name that its module does not define."""
    lines = []
    for title, text, entries in SECTIONS:
        lines += [f"## {title}", "", *([text, ""] if text else [])]
        for entry in entries:
            lines += _entry(root, entry)
    return _HEAD + "\n".join(lines).rstrip() + "\n"


def public_members(root: Path, entry: Entry) -> set[str]:
    """The attributes that this page documents of a class: methods, properties and annotated fields."""
    found = set()
    for module, name in ((entry.module, entry.name), *entry.bases):
        node = _definition(root, module, name)
        assert isinstance(node, ast.ClassDef)
        for member in ast.walk(node):
            if isinstance(member, Function):
                found.add(member.name)
            elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                found.add(member.target.id)
            elif isinstance(member, ast.Attribute) and isinstance(member.ctx, ast.Store):
                found.add(member.attr)
    return {name for name in found if not name.startswith("_")}


def _entry(root: Path, entry: Entry) -> list[str]:
    if not entry.name:
        return [_text(_tree(root, entry.module)), ""]
    node = _definition(root, entry.module, entry.name)
    if isinstance(node, Function):
        decorators = [ast.unparse(one) for one in node.decorator_list]
        return [f"### {entry.shown}", "", *_signature(entry.name, node, decorators), _text(node), ""]
    lines = [f"### {entry.shown}", ""]
    if entry.constructed:
        makes = next(one for one in node.body if isinstance(one, Function) and one.name == "__init__")
        lines += [line.replace(" -> None", "") for line in _signature(entry.name, makes)]
    lines += [_text(node), ""]
    fields = [ast.unparse(one) for one in node.body if isinstance(one, ast.AnnAssign) and _shown(one)]
    if fields:
        lines += ["```python", *fields, "```", ""]
    for module, name in ((entry.module, entry.name), *entry.bases):
        owner = _definition(root, module, name)
        assert isinstance(owner, ast.ClassDef)
        for member in owner.body:
            if isinstance(member, Function) and _is_documented(member):
                lines += _member(entry, member)
    return lines


def _is_documented(member: Function) -> bool:
    return not member.name.startswith("_") and member.name not in INTERNAL and bool(ast.get_docstring(member))


def _shown(field: ast.AnnAssign) -> bool:
    return isinstance(field.target, ast.Name) and not field.target.id.startswith("_")


def _member(entry: Entry, member: Function) -> list[str]:
    decorators = [ast.unparse(one) for one in member.decorator_list]
    title = f"#### {entry.name}.{member.name}"
    if "property" in decorators or "cached_property" in decorators:
        kind = "" if member.returns is None else f": {ast.unparse(member.returns)}"
        return [title, "", "```python", f"{member.name}{kind}", "```", "", _text(member), ""]
    return [title, "", *_signature(member.name, member, decorators), _text(member), ""]


def _signature(name: str, node: Function, decorators: list[str] | None = None) -> list[str]:
    parts = _arguments(node.args)
    result = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    first, last = f"{name}(", f"){result}"
    if decorators and any(one.endswith("contextmanager") for one in decorators):
        first, last = f"with {name}(", "):"
    line = f"{first}{', '.join(parts)}{last}"
    lines = [line] if len(line) <= WIDTH else [first, *(f"    {part}," for part in parts), last]
    return ["```python", *lines, "```", ""]


def _arguments(arguments: ast.arguments) -> list[str]:
    """Each argument as it is written, without `self`, with the marks of those by position or by name only."""
    placed = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(placed) - len(arguments.defaults))
    defaults += arguments.defaults
    found = [_argument(one, default) for one, default in zip(placed, defaults, strict=True)]
    if arguments.posonlyargs:
        found.insert(len(arguments.posonlyargs), "/")
    if placed and placed[0].arg in ("self", "cls"):
        found.pop(0)
    if arguments.vararg is not None:
        found.append(f"*{_argument(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        found.append("*")
    found += [_argument(one, default) for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return found if arguments.kwarg is None else [*found, f"**{_argument(arguments.kwarg, None)}"]


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    kind = "" if argument.annotation is None else f": {ast.unparse(argument.annotation)}"
    value = "" if default is None else f"{' = ' if kind else '='}{ast.unparse(default)}"
    return f"{argument.arg}{kind}{value}"


def _text(node: ast.Module | ast.ClassDef | Function) -> str:
    """The docstring as Markdown: its indented blocks are code, its `module` references are left as they are."""
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    text = re.sub(r"\(docs/([\w-]+\.md)\)", r"([\1](\1))", text)
    parts, code = [], False
    for line in text.splitlines():
        indented = line.startswith("    ")
        if indented and not code:
            parts.append("```python")
        if code and not indented and line:
            parts += ["```", ""]
        if line or not code:
            code = indented
        parts.append(line[4:] if indented else line)
    return "\n".join([*parts, *(["```"] if code else [])]).replace("\n\n```\n", "\n```\n")


def _tree(root: Path, module: str) -> ast.Module:
    path = root.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _definition(root: Path, module: str, name: str) -> ast.ClassDef | Function:
    """The class or function, the last one of that name: earlier ones are overloads."""
    found = [
        node
        for node in _tree(root, module).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    ]
    if not found:
        raise LookupError(f"{module} does not define {name}")
    return found[-1]
