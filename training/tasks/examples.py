"""What the built-in tasks take of the named values of a record that `p2pnode records pack` wrote."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from training.tasks.task import TaskError


def image_and_label(example: dict[str, Any], shape: tuple[int, ...]) -> tuple[npt.NDArray[Any], int]:
    """The image, of this shape, and the label. Raises `TaskError` for other values."""
    try:
        return np.ascontiguousarray(example["images"]).reshape(shape), int(example["labels"])
    except (KeyError, TypeError, ValueError) as error:
        names = ", ".join(map(str, example)) if isinstance(example, dict) else type(example).__name__
        raise TaskError(
            f"a record must have images and labels, an image of {' x '.join(map(str, shape))}; this one has {names}",
            "pack images=FILE labels=FILE with `p2pnode records pack`",
        ) from error
