"""The reducers that every node has: how an update changes a value. Pure."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

#: `pull` is the function of the user's script at the owner's node; the others run in the daemon.
Reducer = Literal["replace", "add", "pull"]
BUILT_IN: tuple[Reducer, ...] = ("replace", "add")


def reduced(reducer: Reducer, value: Any, update: Any) -> Any:
    """The value after an update; `value` is None for a key that has none yet.

    `add` takes numbers and arrays of one shape, or a scalar beside an array. Raises `TypeError` and `ValueError`.
    """
    if reducer == "replace":
        return update
    if reducer != "add":
        raise ValueError(f"no built-in reducer {reducer!r}")
    for one in (value, update):
        if one is not None and (isinstance(one, bool) or not isinstance(one, int | float | np.ndarray | np.generic)):
            raise TypeError(f"numbers and arrays can be added, not {type(one).__name__}")
    if value is None:
        return update
    if np.ndim(value) and np.ndim(update) and np.shape(value) != np.shape(update):
        raise ValueError(f"shapes {np.shape(value)} and {np.shape(update)} differ")
    return value + update
