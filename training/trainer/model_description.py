"""Describes the whole model to the daemon, which writes the model's file itself (`training.model_file`).

So the daemon can write it when this process has ended, and `p2pnode export` from a checkpoint alone. Tensors that
training never changes are written once, to a file beside the checkpoints, by a thread of their own: a frozen base model
may have gigabytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from training.model_file import DTYPES, VECTOR_DTYPES, TensorInfo, file_pieces, fixed_name
from training.trainer.snapshot import CannotWrite, write_whole
from training.trainer.vector import ModelVector, bare_model, canonical_name, dtype_name, storage_key, tensors_digest
from training.trainer_link.interface import ModelDescription, TensorSource

#: Integer buffers of at most this size are sent with every description: counters, as BatchNorm's. Larger ones are
#: sent only if they have changed since the model was built; otherwise they are written once, as masks are.
SMALL_BUFFER_BYTES = 64 * 1024
#: A trainer that says nothing for ten seconds counts as hung.
ALIVE_INTERVAL_S = 1.0
MAX_LOCAL_BYTES = 32 * 1024 * 1024


class ModelDescriber:
    """Made when the model is built. `warn` is called with an event and a text."""

    def __init__(self, model: nn.Module, vector: ModelVector, warn: Callable[[str, str], None]) -> None:
        self._model = bare_model(model)
        self._vector = vector
        self._warn = warn
        self._layout_digest = vector.layout.digest()
        #: Large integer buffers as the model was built with them.
        self._built = {
            name: tensors_digest([(name, buffer)])
            for name, buffer in vector.local_buffers.items()
            if _size_bytes(buffer) > SMALL_BUFFER_BYTES
        }
        self._fixed_digest: dict[tuple[str, ...], str] = {tuple(sorted(vector.fixed)): vector.frozen_digest}
        self._writer: _FixedWriter | None = None
        self._has_warned = False

    def describe(self, folder: str, *, wait: bool, alive: Callable[[], None] = lambda: None) -> ModelDescription:
        """The model as it is now; the fixed tensors are written to `folder`, if it is named. `alive` is called now and
        then while they are waited for. Raises `CannotWrite`."""
        unchanged = {
            name: buffer
            for name, buffer in self._vector.local_buffers.items()
            if name in self._built and tensors_digest([(name, buffer)]) == self._built[name]
        }
        fixed = self._vector.fixed | unchanged
        local: dict[str, bytes] = {}
        sources = list(self._sources(fixed, local))
        # Only what a state_dict names: a frozen tensor may be under a name of the vector too.
        named = {source.source for source in sources if source.kind == "fixed"}
        fixed = {name: tensor for name, tensor in fixed.items() if name in named}
        if (total := sum(map(len, local.values()))) > MAX_LOCAL_BYTES:
            reason = f"its integer buffers that training changes have {total} bytes; at most {MAX_LOCAL_BYTES} are kept"
            raise CannotWrite(Path(folder), reason)
        digest = self._digest(fixed) if fixed else ""
        if folder and fixed:
            writer = self._write(Path(folder) / fixed_name(digest), fixed)
            if wait and writer is not None:
                writer.finish(alive)
        return ModelDescription(self._layout_digest, digest, tuple(sources), local)

    def _sources(self, fixed: dict[str, Tensor], local: dict[str, bytes]) -> Iterator[TensorSource]:
        """Where each entry of the `state_dict` is; fills `local`."""
        entries = {entry.name: entry for entry in self._vector.layout.entries}
        in_vector = {storage_key(tensor): name for name, tensor in self._vector.named_tensors()}
        in_fixed = {storage_key(tensor): name for name, tensor in fixed.items()}
        in_local = {storage_key(tensor): name for name, tensor in self._vector.local_buffers.items()}
        others: list[str] = []
        for full_name, value in self._model.state_dict().items():
            name = canonical_name(full_name)
            if not isinstance(value, Tensor):
                others.append(name)
                continue
            dtype, shape, key = dtype_name(value), tuple(value.shape), storage_key(value)
            if dtype not in DTYPES:
                others.append(name)
                continue
            entry = entries.get(name)
            by_name = entry is not None and entry.shape == shape
            if (key in in_vector or by_name) and dtype in VECTOR_DTYPES:
                # A state_dict hook may return a copy of a trained tensor, under its own name.
                yield TensorSource(name, dtype, shape, "vector", in_vector.get(key, name))
            elif key in in_fixed:
                yield TensorSource(name, dtype, shape, "fixed", in_fixed[key])
            else:
                source = in_local.get(key, name)
                local.setdefault(source, _raw(value))
                yield TensorSource(name, dtype, shape, "local", source)
        if others and not self._has_warned:
            self._has_warned = True
            self._warn(
                "not_in_the_model_file",
                f"{', '.join(others[:5])}: a model's file has plain tensors only; save them in the script",
            )

    def _digest(self, fixed: dict[str, Tensor]) -> str:
        names = tuple(sorted(fixed))
        if names not in self._fixed_digest:
            self._fixed_digest[names] = tensors_digest(sorted(fixed.items()))
        return self._fixed_digest[names]

    def _write(self, path: Path, fixed: dict[str, Tensor]) -> _FixedWriter | None:
        """The writer of that file, begun now or before; None if it is there already."""
        if self._writer is None or self._writer.path != path or self._writer.failed:
            if path.exists():
                return None
            self._writer = _FixedWriter(path, fixed)
        return self._writer


class _FixedWriter:
    """Writes one file in a thread."""

    def __init__(self, path: Path, tensors: dict[str, Tensor]) -> None:
        self.path = path
        self._tensors = tensors
        self._error: CannotWrite | None = None
        self._thread = threading.Thread(target=self._run, name="p2pnode-fixed-tensors", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def finish(self, alive: Callable[[], None]) -> None:
        """Wait until the file is complete, and call `alive` every second. Raises `CannotWrite`."""
        while self._thread.is_alive():
            self._thread.join(ALIVE_INTERVAL_S)
            alive()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        infos = [TensorInfo(name, dtype_name(value), tuple(value.shape)) for name, value in self._tensors.items()]

        def write(path: Path) -> None:
            with path.open("wb") as file:
                for piece in file_pieces(infos, lambda info: [_raw(self._tensors[info.name])]):
                    file.write(piece)

        try:
            write_whole(self.path, write)
        except CannotWrite as error:
            self._error = error


def _size_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _raw(tensor: Tensor) -> bytes:
    """A tensor's bytes, in the order of its values."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
