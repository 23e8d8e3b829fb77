"""Saves a trainer's own state without holding up its training: copied between two steps, written by a thread.

The copy takes as much memory as the state, twice the model with Adam; for that of a GPU it is the same memory each time
(`training.trainer.pinned`). If that is not free, the state is written as it is, and the next step waits for the disk. A
state with values that are not finite is not written: a trainer that is started again from it would have every delta
refused.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from p2pnode.training.trainer.connection import DaemonGone
from p2pnode.training.trainer.model.unshared_tensors import is_finite
from p2pnode.training.trainer.pinned import CopyPool
from p2pnode.training.trainer.state import snapshot
from p2pnode.training.trainer.state.snapshot import CannotWrite
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.shared_memory import available_memory_bytes

#: A copy may take this much of the free memory; the rest is for the next step.
MEMORY_SHARE = 0.5
#: The other ranks of a node write their files at the same time. One that writes nothing for so long has failed.
RANKS_S = 60.0
POLL_S = 0.02


class StateWriter:
    """`send` may be called from any thread, and raises `DaemonGone`."""

    def __init__(
        self,
        send: Callable[[messages.FromTrainer], None],
        available_bytes: Callable[[], int | None] = available_memory_bytes,
        pool: CopyPool | None = None,
    ) -> None:
        self._send = send
        self._available_bytes = available_bytes
        self._pool = CopyPool() if pool is None else pool

    def save(
        self, turn: int, path: Path, state: dict[str, Any], size_bytes: int = 0, others: Sequence[Path] = ()
    ) -> None:
        """Copy the state, answer `Copied`, and later `Written` or `NotWritten`. Raises `DaemonGone`.

        With several ranks `size_bytes` are those of all states. The file is written when the `others` are there.
        """
        content = snapshot.content_of(state)
        tensors = [tensor for _, tensor in tensors_of(content)]
        if self._pool.take(tensors):
            copied = copy_of(content, self._pool.copy)
            self._pool.finish(tensors)
            self._send(messages.Copied(turn))
            self._begin(turn, path, copied, others, self._pool.release)
            return
        available = self._available_bytes()
        if available is not None and max(size_bytes, tensor_bytes(content)) > MEMORY_SHARE * available:
            answer = _written(turn, path, content, others)
            self._send(messages.Copied(turn))
            self._send(answer)
            self._send(
                messages.Warned("step_waited_for_disk", "there was no memory for a copy of the trainer's own state")
            )
            return
        copied = copy_of(content)
        self._send(messages.Copied(turn))
        needed = self._pool.needed_bytes(tensors)
        device = next((tensor.device for tensor in tensors if self._pool.takes(tensor)), torch.device("cpu"))
        self._begin(turn, path, copied, others, lambda: self._pool.grow(needed, device))

    def _begin(
        self, turn: int, path: Path, content: dict[str, Any], others: Sequence[Path], then: Callable[[], None]
    ) -> None:
        def write() -> None:
            nonlocal content
            answer = _written(turn, path, content, others)
            content = {}  # before memory for the next copy is taken
            then()
            with contextlib.suppress(DaemonGone):
                self._send(answer)

        # Not a daemon thread: a process that ends waits for its file.
        threading.Thread(target=write, name="p2pnode-state").start()


def _written(
    turn: int, path: Path, content: dict[str, Any], others: Sequence[Path]
) -> messages.Written | messages.NotWritten:
    try:
        if (name := not_finite(content["optimizer"])) is not None:
            reason = f"the optimiser's state {name} has values that are not finite"
            return messages.NotWritten(turn, reason, "lower the learning rate, or clip the gradients")
        for other in others:
            _wait_for(other)
        snapshot.write(path, content)
    except CannotWrite as error:
        return messages.NotWritten(turn, error.reason, error.hint)
    except Exception as error:  # objects of the user's own that cannot be pickled
        return messages.NotWritten(turn, f"the trainer's own state cannot be saved: {error}", "see what it contains")
    return messages.Written(turn)


def _wait_for(path: Path) -> None:
    """Wait while another process writes a file. Raises `CannotWrite` if nothing of it is written for `RANKS_S`."""
    written, end_s = -1, 0.0
    while not path.exists():
        with contextlib.suppress(FileNotFoundError):  # it is complete
            found = sum(part.stat().st_size for part in path.parent.glob(f"{path.name}.*.tmp"))
            if found != written:
                written, end_s = found, time.monotonic() + RANKS_S
        if time.monotonic() > end_s:
            raise CannotWrite(path, f"another rank has written nothing of it for {RANKS_S:.0f} s")
        time.sleep(POLL_S)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """What `change` makes of each part of plain containers, and then of the containers."""
    if type(value) is dict:
        value = {key: mapped(item, change) for key, item in value.items()}
    elif type(value) in (list, tuple):
        value = type(value)(mapped(item, change) for item in value)
    return change(value)


def _on_the_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def copy_of(content: Any, copy_tensor: Callable[[Tensor], Tensor] = _on_the_cpu) -> Any:
    """An independent copy, its tensors on the CPU."""

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return copy_tensor(value)
        if type(value) in (dict, list, tuple):
            return value  # made by `mapped`
        try:
            return copy.deepcopy(value)
        except Exception:  # an object of the user's own that cannot be copied is saved as it will be
            return value

    return mapped(content, copied)


def tensors_of(value: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """The tensors in plain containers, by the path to them."""
    if isinstance(value, Tensor):
        return [(name, value)]
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    return [found for key, item in items for found in tensors_of(item, f"{name}.{key}" if name else str(key))]


def tensor_bytes(content: Any) -> int:
    """Memory of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors_of(content))


def not_finite(optimizer: Any) -> str | None:
    """The first tensor with a value that is NaN or infinite; None if there is none."""
    floating = ((name, tensor) for name, tensor in tensors_of(optimizer) if tensor.is_floating_point())
    return next((name for name, tensor in floating if not is_finite(tensor)), None)
