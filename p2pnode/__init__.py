"""The daemon: configuration, composition, life cycle, command line, status over HTTP.

A training script needs only `p2pnode.attach`. It is imported on first use, because it imports torch. Other algorithms
ask `p2pnode.engine` for an engine; `Program` and `Context`, or `ServerProgram` and `ServerContext`, are for those
with named values, and `ModelValues` has those of a model.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2pnode.training.engines.model_values import ModelValues
    from p2pnode.training.engines.program import Context, Program
    from p2pnode.training.engines.selection import engine
    from p2pnode.training.engines.server.program import ServerContext, ServerProgram

__version__ = "0.1.0"
#: Names for scripts, with the module of each.
_SCRIPT_NAMES = {
    "Context": "p2pnode.training.engines.program",
    "ModelValues": "p2pnode.training.engines.model_values",
    "Program": "p2pnode.training.engines.program",
    "ServerContext": "p2pnode.training.engines.server.program",
    "ServerProgram": "p2pnode.training.engines.server.program",
    "attach": "p2pnode.training.trainer.attach",
    "engine": "p2pnode.training.engines.selection",
}
__all__ = [
    "Context",
    "ModelValues",
    "Program",
    "ServerContext",
    "ServerProgram",
    "__version__",
    "attach",
    "engine",
]


def __getattr__(name: str) -> Any:
    if name not in _SCRIPT_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_SCRIPT_NAMES[name]), name)
