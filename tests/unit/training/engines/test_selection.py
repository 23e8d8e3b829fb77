"""`p2pnode.engine`."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import pytest

import p2pnode
from training.engines.selection import EngineUnavailable


def test_an_engine_is_given_by_its_name() -> None:
    """The map-reduce engine computes; an unknown name is an error that lists those there are."""
    with p2pnode.engine("mapreduce") as engine:
        assert engine.from_items([1, 2]).map(lambda x: x + 1).collect() == [2, 3]
    with pytest.raises(EngineUnavailable, match="no engine 'spark'; this version has: mapreduce"):
        p2pnode.engine("spark")


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Dask the error names it, and the extra that has it."""
    for name in [name for name in sys.modules if name.startswith("training.engines.mapreduce")]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def without_dask(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "dask":
            raise ModuleNotFoundError(f"No module named {name!r}", name="dask")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_dask)

    with pytest.raises(EngineUnavailable, match=r"needs the package dask: pip install 'p2pnode\[mapreduce\]'"):
        p2pnode.engine("mapreduce")
