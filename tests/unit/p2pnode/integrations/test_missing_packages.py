"""Without the library of a callback, its import says what to install."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize("package", ["transformers", "lightning"])
def test_a_missing_package_names_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ImportError with the command, and the library's own error behind it."""
    module = f"p2pnode.integrations.{package}"
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]  # as if it were not installed
    monkeypatch.delitem(sys.modules, module, raising=False)

    with pytest.raises(ImportError, match=rf'pip install "p2pnode\[{package}\]"') as failure:
        importlib.import_module(module)
    assert isinstance(failure.value.__cause__, ImportError)
