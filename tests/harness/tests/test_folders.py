"""The folders of the harness: what each may import of the others."""

from __future__ import annotations

import ast
from pathlib import Path

HARNESS = Path(__file__).parents[1]
#: From the lowest to the highest: a folder imports those before it alone.
LAYERS = ("environment", "network", "trainers", "swarms", "histories", "attacks", "stubs")
#: These import no other folder of the harness.
SEPARATE = ("ownership", "builders", "runner", "project")
MAX_LINES = 420


def folders_imported(folder: str) -> set[str]:
    """The folders of the harness that the modules of one import, its own left out."""
    found = set()
    for path in (HARNESS / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests.harness."):
                found.add(str(node.module).split(".")[2])
    return found - {folder}


def test_every_folder_is_in_a_layer_and_imports_lower_ones_alone() -> None:
    """So whoever changes a folder knows who else may be concerned."""
    folders = {path.parent.relative_to(HARNESS).as_posix() for path in HARNESS.rglob("__init__.py")} - {"."}
    assert folders == {*LAYERS, *SEPARATE}
    for place, folder in enumerate(LAYERS):
        assert folders_imported(folder) <= set(LAYERS[:place]), folder
    for folder in SEPARATE:
        assert folders_imported(folder) == set(), folder


def test_each_folder_says_what_belongs_there_and_no_module_is_long() -> None:
    """In five lines at most."""
    for folder in (*LAYERS, *SEPARATE):
        said = ast.get_docstring(ast.parse((HARNESS / folder / "__init__.py").read_text(encoding="utf-8")))
        assert said, folder
        assert len(said.splitlines()) <= 5
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in HARNESS.glob("*/*.py")}
    assert {
        path.name: count for path, count in lines.items() if count > MAX_LINES and path.parent.name != "tests"
    } == {}
