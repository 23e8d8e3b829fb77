"""The order of samples in an epoch, or of records in a task: a pseudo-random permutation, computed place by place.

A Feistel network over a power of four with cycle walking (Black and Rogaway 2002): no node has to hold or shuffle a
list of all samples, and all nodes have the same order. The quality is that of a shuffle, not of a cipher. Pure.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.uint64]

ROUNDS = 6
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class EpochOrder:
    """The samples 0 … `size` − 1 in the order of one epoch; `shuffle=False` keeps theirs."""

    def __init__(self, size: int, seed: int, epoch: int, *, shuffle: bool = True) -> None:
        self._size = size
        self._shuffle = shuffle and size > 1
        self._half_bits = max(1, -(-(size - 1).bit_length() // 2))
        keys = hashlib.blake2b(f"{seed}/{epoch}/order".encode(), digest_size=8 * ROUNDS).digest()
        self._keys = np.frombuffer(keys, dtype="<u8").astype(np.uint64)

    def samples(self, start: int, stop: int) -> list[int]:
        """The samples at the places `start` … `stop` − 1."""
        if not self._shuffle:
            return list(range(start, stop))
        values = self._mixed(np.arange(start, stop, dtype=np.uint64))
        while (outside := values >= self._size).any():
            values[outside] = self._mixed(values[outside])
        return [int(value) for value in values]

    def _mixed(self, values: Indices) -> Indices:
        bits = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left, right = values >> bits, values & mask
        for key in self._keys:
            left, right = right, left ^ (_scrambled(right ^ key) & mask)
        return (left << bits) | right


def _scrambled(values: Indices) -> Indices:
    """The first half of SplitMix64's finalizer, and its upper bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIER
    return values >> np.uint64(29)
