"""Writes and reads the trainer's own state atomically: optimiser, schedule, scaler, generators, data position.

The vector is not included: the daemon keeps it. A snapshot holds tensors and plain values only, so that reading it
executes no code. If a user's own state contains other objects, they are unpickled, as from any file of the user's own.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from p2pnode.training.errors import TrainingError
from p2pnode.training.trainer_link.interface import TrainerFailed

#: 2: lists of optimisers and schedules.
FORMAT = 2


class CannotWrite(TrainingError):
    """The file could not be written; no partial file is left."""

    def __init__(self, path: Path, error: OSError | str) -> None:
        self.reason = f"{path} could not be written: {error.strerror or error if isinstance(error, OSError) else error}"
        self.hint = "see that the folder exists, is writable and has free space"
        super().__init__(self.reason)


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, sync it, and rename it. Raises `CannotWrite`."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise CannotWrite(path, error) from error
    except RuntimeError as error:  # torch's own writer raises this, not OSError.
        raise CannotWrite(path, str(error).splitlines()[0]) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def content_of(state: dict[str, Any]) -> dict[str, Any]:
    """The content of a snapshot: `state`, the generators' states, and the version of the format."""
    return {"format": FORMAT, "random": random_state(), **state}


def write(path: Path, content: dict[str, Any]) -> None:
    """Write what `content_of` returned. Raises `CannotWrite`."""
    write_whole(path, lambda temporary: torch.save(content, temporary))


def load(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """Read what `save` wrote, tensors on the CPU; `mapped`: in memory that processes share until they write. Raises
    `TrainerFailed`."""
    try:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except pickle.UnpicklingError:
            # Objects of the user's own; this node wrote the file into its own state directory.
            content = torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:
        raise TrainerFailed(
            f"the trainer's saved state {path} cannot be read: {error}",
            "remove the file to continue with a fresh optimiser",
            fatal=True,
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise TrainerFailed(
            f"the trainer's saved state {path} is of another version",
            "remove the file to continue with a fresh optimiser",
            fatal=True,
        )
    return content


def random_state() -> dict[str, Any]:
    """The states of all generators, as plain values and tensors."""
    state: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, gauss = state
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (str(kind), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
        "python": random.getstate(),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the generators to the states that `random_state` returned."""
    torch.set_rng_state(state["torch"])
    # With another number of GPUs than before each has that of its own number, as far as there is one.
    for number, generator in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(generator, number)
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    random.setstate(state["python"])


def seed_all(seed: int) -> None:
    """Seed every generator that a model, its dropout or a data pipeline may use."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
