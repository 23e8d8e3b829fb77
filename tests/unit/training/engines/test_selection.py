"""`p2pnode.engine`."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import pytest

import p2pnode
from p2pnode.training.engines.selection import EngineUnavailable
from p2pnode.training.trainer_link.messages import ALONE_FILE, SOCKET_VARIABLE


def test_an_engine_is_given_by_its_name() -> None:
    """The map-reduce engine computes; an unknown name is an error that lists those there are."""
    with p2pnode.engine("mapreduce") as engine:
        assert engine.from_items([1, 2]).map(lambda x: x + 1).collect() == [2, 3]
    with pytest.raises(EngineUnavailable, match="no engine 'spark'; this version has: p2p, server, mapreduce"):
        p2pnode.engine("spark")


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            "server",
            {"barrier": "ssp"},
            "the engine 'server' has no options here, .* 'barrier': give it to `start`",
        ),
        ("mapreduce", {"workers": 2}, "the engine 'mapreduce' has the options processes, address, and not 'workers'"),
        ("p2p", {"processes": 2}, "the engine 'p2p' has the options barrier, staleness, sample, and not 'processes'"),
        ("p2p", {"staleness": -1}, "staleness must be 0 or more, not -1"),
        ("p2p", {"sample": -2}, "sample must be 0 or more, not -2"),
    ],
)
def test_an_option_that_cannot_be_met_is_refused_before_a_node_is_asked(
    kind: str, options: dict[str, Any], message: str
) -> None:
    """The error says which options there are; a node would end by what it cannot read."""
    with pytest.raises(ValueError, match=message):
        p2pnode.engine(kind, **options)  # type: ignore[call-overload]


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names it, and the extra that has it."""
    for name in [name for name in sys.modules if name.startswith("p2pnode.training.engines.mapreduce")]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def without_fsspec(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "fsspec":
            raise ModuleNotFoundError(f"No module named {name!r}", name="fsspec")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_fsspec)

    with pytest.raises(EngineUnavailable, match=r"needs the package fsspec: pip install 'p2pnode\[mapreduce\]'"):
        p2pnode.engine("mapreduce")


def test_a_map_reduce_script_tells_its_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under a node the mark beside its socket says that the script may end without a model; without one nothing is
    written, nor where the folder is gone."""
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    p2pnode.engine("mapreduce").close()
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "gone" / "link"))
    p2pnode.engine("mapreduce").close()
    assert list(tmp_path.iterdir()) == []

    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "link"))
    p2pnode.engine("mapreduce").close()

    assert [path.name for path in tmp_path.iterdir()] == [ALONE_FILE]
