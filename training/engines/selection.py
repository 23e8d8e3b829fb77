"""Gives a script the engine that it asks for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from p2pnode.training.errors import TrainingError
from p2pnode.training.trainer_link.messages import ALONE_FILE, SOCKET_VARIABLE

if TYPE_CHECKING:
    from p2pnode.training.engines.mapreduce.engine import MapReduce
    from p2pnode.training.engines.peer import PeerToPeer
    from p2pnode.training.engines.server.engine import ParameterServer

#: The engines of this version.
ENGINES = ("p2p", "server", "mapreduce")

#: What `engine` takes for each of them.
_OPTIONS: dict[str, tuple[str, ...]] = {
    "p2p": ("barrier", "staleness", "sample"),
    "server": (),
    "mapreduce": ("processes", "address"),
}

BarrierName = Literal["asp", "bsp", "ssp", "pbsp", "pssp"]


class EngineUnavailable(TrainingError, ValueError):
    """There is no such engine, or a package that it needs is missing."""


@overload
def engine(kind: Literal["mapreduce"], *, processes: int = 0, address: str | None = None) -> MapReduce: ...


@overload
def engine(
    kind: Literal["p2p"], *, barrier: BarrierName | None = None, staleness: int = 4, sample: int = 0
) -> PeerToPeer: ...


@overload
def engine(kind: Literal["server"]) -> ParameterServer: ...


def engine(kind: str, **options: Any) -> MapReduce | PeerToPeer | ParameterServer:
    """An engine for an algorithm that is no training loop; close it, or use it in a `with` block (docs/engines.md).

    `mapreduce`: lazy data sets, computed in this process, in `processes` of this machine, or on the Dask cluster whose
    scheduler has this `address`. It needs no node.

    `p2p`: named values at their owners in the swarm, and the verbs schedule, push, pull, barrier and stop at every
    node. It needs a node: `p2pnode run -- python script.py`. `barrier` with `staleness` and `sample` (0: by the
    population) replaces that of the node's settings; it must be the same at all nodes.

    `server`: named values at the nodes with `node.role = "server"`, which give tasks to all others; its `start` takes
    the barrier.

    Raises `EngineUnavailable` for another kind and for a missing package, `NoNode` where a node is needed, `ValueError`
    for options that cannot be met.
    """
    if kind in _OPTIONS:
        _check_options(kind, options)
    if kind == "p2p":
        from p2pnode.training.engines.peer import PeerToPeer

        return PeerToPeer.open(**options)
    if kind == "server":
        from p2pnode.training.engines.server.engine import ParameterServer

        return ParameterServer.open(**options)
    if kind != "mapreduce":
        raise EngineUnavailable(f"there is no engine {kind!r}; this version has: {', '.join(ENGINES)}")
    try:
        from p2pnode.training.engines.mapreduce.engine import MapReduce
    except ModuleNotFoundError as error:
        raise EngineUnavailable(
            f"the engine {kind!r} needs the package {error.name}: pip install 'p2pnode[mapreduce]'"
        ) from error
    _tell_node()
    return MapReduce(**options)


def _check_options(kind: str, options: Mapping[str, Any]) -> None:
    """Raises `ValueError` for an option of another engine, and says where it belongs."""
    known = _OPTIONS[kind]
    for name in options:
        if name not in known:
            has = f"has the options {', '.join(known)}" if known else "has no options here"
            where = ": give it to `start`" if kind == "server" else ""
            raise ValueError(f"the engine {kind!r} {has}, and not {name!r}{where}")


def _tell_node() -> None:
    """Tell the node that has started this script, if one has, that the script may end without a model."""
    if path := os.environ.get(SOCKET_VARIABLE):
        with contextlib.suppress(OSError):  # a model is attached already, and its folder is gone
            Path(path).with_name(ALONE_FILE).touch()
