"""A checksum of a tensor's bits, computed on the tensor's own device: two passes over its memory, and a short copy.

It tells whether a tensor has changed, or whether two processes hold the same one, by accident never wrongly. What
travels between nodes has a SHA-256 instead (`training.trainer.vector.tensors_digest`).
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

#: Words of a row. Sums of rows and of columns change when words are exchanged, as those of the whole would not.
ROW = 1024
WORD_BYTES = 8


def checksum(tensor: Tensor) -> int:
    """The same for equal bits of a dense tensor, whatever its shape."""
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
