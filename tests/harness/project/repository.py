"""The repository and the modules of its packages, for tests that read files or start processes."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("p2pnode", "training", "overlay")


def sources(*packages: str) -> list[str]:
    """The modules of some packages, as sorted paths below the root."""
    return sorted(path.relative_to(ROOT).as_posix() for package in packages for path in (ROOT / package).rglob("*.py"))


def module_name(path: str) -> str:
    """The name under which the module at a path below the root is imported."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"p2pnode.{name}" if name.partition(".")[0] in ("overlay", "training") else name


@cache
def syntax_tree(path: str) -> ast.Module:
    """The parsed module at a path below the root."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


@cache
def syntax_nodes(path: str) -> tuple[ast.AST, ...]:
    """All nodes of the parsed module, as `ast.walk` gives them: the tests look through them some dozen times."""
    return tuple(ast.walk(syntax_tree(path)))
