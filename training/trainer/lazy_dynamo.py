"""Defers the import of torch's compiler until something is compiled, which halves the start of a trainer.

torch 2.13 imports `torch._dynamo`, with 800 modules and sympy, when the first `Optimizer` is constructed, to exclude
its methods from compilation (`torch._compile._disable_dynamo`) and to break graphs at its `step`. Without compilation
both have no effect. `import_later` puts a stand-in into `sys.modules`, which does nothing for these two. Any other use
(`torch.compile`, `torch._dynamo.config`, the import of a submodule) replaces it by the real module.

For the trainer's own process only, before the task is imported. If the real module is loaded already, it stays.
(Upstream: pytorch/pytorch pull request 162595, "Don't unconditionally import torch._dynamo, it's slow".)
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
    """Stand-in for `torch._dynamo` until the module is used."""

    def graph_break(self, msg: str = "") -> None:
        """Nothing is being traced, so there is no graph to break."""

    def disable(self, fn: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Wrap a function so that the compiler skips it, once that is loaded. Without a function: as torch does."""
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
        # Tools that inspect all modules (inspect, doctest) ask for these; that must not import anything.
        if name in {"__file__", "__wrapped__", "__warningregistry__"}:
            raise AttributeError(name)
        return getattr(_real(), name)


def import_later() -> None:
    """Install the stand-in, unless `torch._dynamo` is imported already."""
    if _NAME not in sys.modules:
        later = _Later(_NAME)
        sys.modules[_NAME] = later
        vars(torch)["_dynamo"] = later


def _real() -> ModuleType:
    """The real module, imported now if it is not yet."""
    if isinstance(sys.modules.get(_NAME), _Later):
        del sys.modules[_NAME], vars(torch)["_dynamo"]
    return importlib.import_module(_NAME)
