"""torch's compiler is imported by the first who compiles, not by the first optimizer: half of a trainer's start.

torch 2.13 imports `torch._dynamo`, and with it 800 modules and sympy, as soon as an `Optimizer` is made, because its
methods are to be left out of compilation (`torch._compile._disable_dynamo`) and its `step` breaks a graph. Where nobody
compiles both do nothing. `import_later` puts a stand-in where the import statement looks: it does that nothing, and
gives way to the real module at anything else that is asked of it (`torch.compile`, `torch._dynamo.config`, an import
of something below it).

For the trainer's own process only, before the task is imported. What imported the real module earlier keeps it.
(Known upstream: pytorch/pytorch pull request 162595, "Don't unconditionally import torch._dynamo, it's slow".)
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"


class _Later(ModuleType):
    """Stands for `torch._dynamo` until somebody needs it."""

    def graph_break(self, msg: str = "") -> None:
        """Nothing is being traced, so there is no graph to break."""

    def disable(self, fn: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """A function that leaves itself out of compilation once there is any. Without a function: as torch does."""
        if fn is None:
            return _real().disable(fn, *args, **kwargs)
        function, disabled = fn, None

        def uncompiled(*its_args: Any, **its_kwargs: Any) -> Any:
            nonlocal disabled
            if disabled is None:
                if sys.modules.get(_NAME) is self:
                    return function(*its_args, **its_kwargs)
                disabled = _real().disable(function, *args, **kwargs)
            return disabled(*its_args, **its_kwargs)

        return uncompiled

    def __getattr__(self, name: str) -> Any:
        # Asked by tools that look through all modules (inspect, doctest): no reason to import anything.
        if name in {"__file__", "__wrapped__", "__warningregistry__"}:
            raise AttributeError(name)
        return getattr(_real(), name)


def import_later() -> None:
    """Put the stand-in in the place of `torch._dynamo`, unless that is imported already."""
    if _NAME not in sys.modules:
        later = _Later(_NAME)
        sys.modules[_NAME] = later
        vars(torch)["_dynamo"] = later


def _real() -> ModuleType:
    """The module itself, imported now if it is not yet."""
    if isinstance(sys.modules.get(_NAME), _Later):
        del sys.modules[_NAME], vars(torch)["_dynamo"]
    return importlib.import_module(_NAME)
