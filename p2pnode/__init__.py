"""The daemon: configuration, composition, life cycle, command line, status over HTTP.

A training script needs only `p2pnode.attach`. It is imported on first use, because it imports torch. Other algorithms
ask `p2pnode.engine` for an engine; `Program` and `Context` are for those with named values.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.engines.program import Context, Program
    from training.engines.selection import engine

__version__ = "0.1.0"
__all__ = ["Context", "Program", "__version__", "attach", "engine"]


def __getattr__(name: str) -> Any:
    if name not in ("attach", "engine", "Program", "Context"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _refuse_hidden_packages()
    if name == "engine":
        from training.engines.selection import engine

        return engine
    if name != "attach":
        from training.engines import program

        return getattr(program, name)
    from training.trainer.attach import attach

    return attach


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
