"""What a model has beside the vector: counters, which are each node's own, and fixed tensors, which are the same on all
nodes: frozen parameters, masks, and persistent buffers of which no average could be made, because their values are
exact (integers, booleans, codes of quantised weights).

An exact buffer of one value counts as a counter, as BatchNorm's. All others are compared when a node joins
(`training.manifest`). Training is not to change a fixed tensor. One that changes all the same is each node's own from
then on, and the user is told (`training.trainer.model.model_description`).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from p2pnode.training.files.model_file import ROW, WORD_BYTES, fingerprint
from p2pnode.training.trainer.model.local_part import is_distributed, local_of, whole_of
from p2pnode.training.trainer_link.interface import TrainerFailed

#: Buffers of these types are averaged.
AVERAGED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class UnsharedTensors:
    """Belongs to one model; all ranks have to make it. Both mappings are by canonical name; the owner may put other
    tensors into them.

    `fingerprints` name the fixed tensors that two nodes hold differently: type, shape and a checksum.
    """

    def __init__(self, counters: Mapping[str, Tensor], fixed: Mapping[str, Tensor]) -> None:
        self._counters = counters
        self._fixed = fixed
        self.fingerprints = {name: _fingerprint(whole_of(tensor)) for name, tensor in sorted(fixed.items())}
        #: Of what this rank holds of those that are spread over ranks.
        self._parts = {name: _fingerprint(local_of(tensor)) for name, tensor in fixed.items() if is_distributed(tensor)}

    def changed(self) -> dict[str, Tensor]:
        """The fixed tensors that differ, in what this rank holds of them, from those that the model was built with."""
        began = self.fingerprints | self._parts
        return {name: tensor for name, tensor in self._fixed.items() if _fingerprint(local_of(tensor)) != began[name]}

    def own(self) -> dict[str, Tensor]:
        """What this rank has for itself: counters, and fixed tensors that have changed."""
        return {**self._counters, **self.changed()}

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Give them the values that `own` returned once. Raises `KeyError` for a counter that was not saved, and
        `RuntimeError` for a tensor of another shape."""
        for name, counter in self._counters.items():
            local_of(counter).copy_(local_of(saved[name]))
        for name, tensor in self._fixed.items():
            if name in saved:
                local_of(tensor).copy_(local_of(saved[name]))


def is_averaged(name: str, buffer: Tensor) -> bool:
    """Whether nodes may average a buffer. Raises `TrainerFailed` for one that can be neither averaged nor compared."""
    if buffer.layout != torch.strided:
        raise TrainerFailed(
            f"the buffer {name} is {buffer.layout}: only dense tensors can be compared between nodes and exported",
            "register it with persistent=False, or keep its indices and values as dense buffers",
            fatal=True,
        )
    return buffer.dtype in AVERAGED


def _fingerprint(tensor: Tensor) -> str:
    return fingerprint(str(tensor.dtype).removeprefix("torch."), tensor.shape, checksum(tensor))


def is_finite(tensor: Tensor) -> bool:
    """Whether every value is."""
    tensor = tensor.float() if tensor.element_size() == 1 else tensor  # float8 has no sum
    # A finite sum proves it, and takes a tenth of the time; another one may be an overflow.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def checksum(tensor: Tensor) -> int:
    """The same for equal bits of a dense tensor, whatever its shape: that of its bytes in a file (`model_file`)."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % WORD_BYTES:
        raw = raw.clone()
    count = raw.numel() // WORD_BYTES
    words = raw[: count * WORD_BYTES].view(torch.int64)
    rows = words[: count - count % ROW].view(-1, ROW)
    found = 0
    for part in (rows.sum(0), rows.sum(1), words[rows.numel() :], raw[count * WORD_BYTES :]):
        found = zlib.crc32(part.cpu().numpy().tobytes(), found)
    return found
