"""The daemon: configuration, composition, life cycle, command line, status over HTTP.

A training script needs only `p2pnode.attach`. It is imported on first use, because it imports torch. Other algorithms
ask `p2pnode.engine` for an engine; `Program` and `Context`, or `ServerProgram` and `ServerContext`, are for those
with named values, and `ModelValues` has those of a model.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.engines.model_values import ModelValues
    from training.engines.program import Context, Program
    from training.engines.selection import engine
    from training.engines.server.program import ServerContext, ServerProgram

__version__ = "0.1.0"
#: Names for scripts, with the module of each.
_SCRIPT_NAMES = {
    "Context": "training.engines.program",
    "ModelValues": "training.engines.model_values",
    "Program": "training.engines.program",
    "ServerContext": "training.engines.server.program",
    "ServerProgram": "training.engines.server.program",
    "attach": "training.trainer.attach",
    "engine": "training.engines.selection",
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
    _refuse_hidden_packages()
    return getattr(importlib.import_module(_SCRIPT_NAMES[name]), name)


def _refuse_hidden_packages() -> None:
    """Raise `ImportError` if a folder or file beside the user's script hides a package of p2pnode."""
    import importlib.util

    root = Path(__file__).resolve().parent.parent
    for package in ("training", "overlay"):
        found = importlib.util.find_spec(package)
        places = [Path(place).resolve() for place in (found.submodule_search_locations or [])] if found else []
        if places and root / package not in places and (root / package).is_dir():
            raise ImportError(
                f"the folder {places[0]} hides p2pnode's package {package}: rename the folder, "
                "or start the script from another folder"
            )
        if found and not places:
            raise ImportError(f"the file {found.origin} hides p2pnode's package {package}: rename the file")
