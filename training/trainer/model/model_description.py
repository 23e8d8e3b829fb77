"""Describes the whole model to the daemon, which writes the model's file itself (`training.files.model_file`).

So the daemon can write it when this process has ended, and `p2pnode export` from a checkpoint alone. Tensors that
training never changes are written once, to a file beside the checkpoints, by a thread of their own: a frozen base model
may have gigabytes. Where ranks hold parts of them all ranks describe it together, and rank 0 writes a tensor at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from p2pnode.training.files.model_file import (
    DTYPES,
    VECTOR_DTYPES,
    Piece,
    TensorInfo,
    file_pieces,
    fixed_name,
    tensors_digest,
)
from p2pnode.training.trainer.connection import Warn
from p2pnode.training.trainer.model.local_part import is_distributed, whole_of
from p2pnode.training.trainer.model.vector import (
    ModelVector,
    bare_model,
    canonical_name,
    dtype_name,
    storage_key,
)
from p2pnode.training.trainer.ranks import Ranks
from p2pnode.training.trainer.state.snapshot import write_whole
from p2pnode.training.trainer_link.interface import ModelDescription, TensorSource

#: A trainer that says nothing for ten seconds counts as hung.
ALIVE_INTERVAL_S = 1.0
#: Of tensors that are sent with each description: counters, fixed tensors that have changed, and what a module adds to
#: its state_dict. What exceeds it, the largest first, is left out of the model's file.
MAX_LOCAL_BYTES = 32 * 1024 * 1024
#: Names in a warning.
MAX_NAMES = 5

CHANGED = "training changes these tensors, which are not exchanged: the model's file has those of one node"
INCLUDE = (
    "leave them as they are, or exchange them: p2pnode.attach or SwarmCallback with include_frozen=True on all nodes"
)
TOO_LARGE = (
    f"of this node's own tensors the model's file has at most {MAX_LOCAL_BYTES >> 20} MiB; save them in the script"
)
NO_TENSOR = "a model's file has plain tensors only; save them in the script"


class ModelDescriber:
    """Made when the model is built."""

    def __init__(self, model: nn.Module, vector: ModelVector, warn: Warn, ranks: Ranks) -> None:
        self._model = bare_model(model)
        self._vector = vector
        self._warn = warn
        self._ranks = ranks
        #: Whether all ranks have to call `describe`: hooks of a `state_dict` may gather parameters, too.
        self.is_collective = any(map(is_distributed, chain(model.parameters(), model.buffers())))
        self._layout_digest = vector.layout.digest()
        #: The file of fixed tensors that was begun last.
        self._file: tuple[Path, Future[None]] | None = None
        self._warned: set[tuple[str, str]] = set()

    def describe(self, folder: str, *, wait: bool, alive: Callable[[], None] = lambda: None) -> ModelDescription:
        """The model as it is now; the fixed tensors are written to `folder`, if it is named. `alive` is called now and
        then while they are waited for. Raises `CannotWrite`."""
        changed = self._changed()
        self._warn_once("fixed_tensor_changed", changed, CHANGED, INCLUDE)
        fixed = {name: tensor for name, tensor in self._vector.fixed.items() if name not in changed}
        local: dict[str, Tensor] = {}
        sources = list(self._sources(fixed, changed, local))
        # Only what a state_dict names: a frozen tensor may be under a name of the vector too.
        named = {source.source for source in sources if source.kind == "fixed"}
        fixed = {name: tensor for name, tensor in fixed.items() if name in named}
        left_out = _too_large(local)
        self._warn_once("not_in_the_model_file", left_out, TOO_LARGE)
        sources = [source for source in sources if source.kind != "local" or source.source not in left_out]
        raw = {name: _raw(tensor) for name, tensor in local.items() if name not in left_out}
        digest = tensors_digest({name: self._vector.frozen[name] for name in fixed}) if fixed else ""
        if self.is_collective:
            self._write_together(folder, digest, fixed)
        elif folder and fixed:
            file = self._begun(Path(folder) / fixed_name(digest), fixed)
            if wait:
                while not file.done():
                    futures.wait([file], ALIVE_INTERVAL_S)
                    alive()
                file.result()
        return ModelDescription(self._layout_digest, digest, tuple(sources), raw)

    def _changed(self) -> dict[str, Tensor]:
        """Fixed tensors that training has changed, in a part of any rank."""
        names = set(self._vector.unshared.changed())
        if self.is_collective:
            names = names.union(*self._ranks.gather(names))
        return {name: tensor for name, tensor in self._vector.fixed.items() if name in names}

    def _sources(
        self, fixed: dict[str, Tensor], changed: dict[str, Tensor], local: dict[str, Tensor]
    ) -> Iterator[TensorSource]:
        """Where each entry of the `state_dict` is; fills `local`."""
        entries = {entry.name: entry for entry in self._vector.layout.entries}
        in_vector = {storage_key(tensor): name for name, tensor in self._vector.named_tensors()}
        in_fixed = {storage_key(tensor): name for name, tensor in fixed.items()}
        own = self._vector.local_buffers | changed
        in_local = {storage_key(tensor): name for name, tensor in own.items()}
        others: list[str] = []
        for full_name, value in self._model.state_dict().items():
            name = canonical_name(full_name)
            if not isinstance(value, Tensor) or dtype_name(value) not in DTYPES:
                others.append(name)
                continue
            dtype, shape, key = dtype_name(value), tuple(value.shape), storage_key(value)
            entry = entries.get(name)
            by_name = entry is not None and entry.shape == shape
            if (key in in_vector or by_name) and dtype in VECTOR_DTYPES:
                # A state_dict hook may return a copy of a tensor, under its own name.
                yield TensorSource(name, dtype, shape, "vector", in_vector.get(key, name))
            elif key in in_fixed or _is_like(value, fixed.get(name)):
                yield TensorSource(name, dtype, shape, "fixed", in_fixed.get(key, name))
            else:
                source = in_local.get(key, name)
                local.setdefault(source, value)
                yield TensorSource(name, dtype, shape, "local", source)
        self._warn_once("not_in_the_model_file", others, NO_TENSOR)

    def _warn_once(self, event: str, names: Iterable[str], text: str, do: str = "") -> None:
        """Warn of names that this event has not named before."""
        new = [name for name in names if (event, name) not in self._warned]
        self._warned.update((event, name) for name in new)
        if new:
            more = f" and {len(new) - MAX_NAMES} more" if len(new) > MAX_NAMES else ""
            self._warn(event, f"{', '.join(new[:MAX_NAMES])}{more}: {text}", do)

    def _write_together(self, folder: str, digest: str, fixed: dict[str, Tensor]) -> None:
        """On all ranks: gather the tensors one by one, and write them on rank 0."""
        path = Path(folder) / fixed_name(digest)
        if not self._ranks.share(bool(folder and fixed and not path.exists())):
            return
        pieces = _pieces(fixed)
        try:
            if self._ranks.is_first:
                write_whole(path, lambda temporary: _write_file(temporary, pieces))
        finally:
            for _ in pieces:  # the other ranks' share in it; on rank 0 what is left after an error
                pass

    def _begun(self, path: Path, fixed: dict[str, Tensor]) -> Future[None]:
        """The file, which a thread writes, begun now or before; another time where that has failed."""
        if self._file is not None and self._file[0] == path:
            file = self._file[1]
            if not file.done() or file.exception() is None:
                return file
        file = Future()
        self._file = path, file
        if path.exists():
            file.set_result(None)
            return file

        def write() -> None:
            try:
                write_whole(path, lambda temporary: _write_file(temporary, _pieces(fixed)))
                file.set_result(None)
            except Exception as error:
                file.set_exception(error)

        threading.Thread(target=write, name="p2pnode-fixed-tensors", daemon=True).start()
        return file


def _pieces(tensors: dict[str, Tensor]) -> Iterator[Piece]:
    infos = [TensorInfo(name, dtype_name(value), tuple(value.shape)) for name, value in tensors.items()]
    return file_pieces(infos, lambda info: [_raw(tensors[info.name])])


def _write_file(path: Path, pieces: Iterator[Piece]) -> None:
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)


def _is_like(value: Tensor, other: Tensor | None) -> bool:
    return other is not None and (value.dtype, value.shape) == (other.dtype, other.shape)


def _too_large(local: Mapping[str, Tensor]) -> list[str]:
    """The largest of them, without which the others have at most `MAX_LOCAL_BYTES`."""
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in local.items()}
    total, found = sum(sizes.values()), []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if total <= MAX_LOCAL_BYTES:
            break
        total -= sizes[name]
        found.append(name)
    return found


def _raw(tensor: Tensor) -> bytes:
    """A tensor's bytes, in the order of its values."""
    flat = whole_of(tensor.detach()).cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
