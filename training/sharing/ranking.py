"""Whose a partition is: rendezvous ranking of the members (Thaler and Ravishankar 1998), for 1024 partitions at once.

A function of the run's seed, the epoch, the number of the partition and the members alone. A member that joins or goes
moves only what is its own, and every epoch is ranked anew. 64-bit mixing replaces a cryptographic hash: a thousand
partitions among 256 members take some milliseconds. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from p2pnode.training.sharing.ledger import LAP, Section

Weights = npt.NDArray[np.uint64]

_M1, _M2, _GOLDEN = (np.uint64(number) for number in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15))
#: Above all weights of members that have released a partition.
_KEEPS = np.uint64(1 << 63)


def mixed(values: Weights) -> Weights:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014), element by element."""
    with np.errstate(over="ignore"):
        values = (values + _GOLDEN).astype(np.uint64)
        values = (values ^ (values >> np.uint64(30))) * _M1
        values = (values ^ (values >> np.uint64(27))) * _M2
        return values ^ (values >> np.uint64(31))


def number_of(node_id: bytes) -> int:
    """64 bits of a node's id."""
    return int.from_bytes(hashlib.blake2b(node_id, digest_size=8).digest(), "big")


def weights(seed: int, section: Section, members: Sequence[bytes], count: int) -> Weights:
    """uint64[count, members]: the weight of each member for the first partitions of a section, below 2⁶³."""
    epoch, lap = section
    key = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8).digest()
    places = mixed(np.arange(lap * LAP, lap * LAP + count, dtype=np.uint64) ^ np.uint64(int.from_bytes(key, "big")))
    nodes = np.array([number_of(node_id) for node_id in members], dtype=np.uint64)
    return mixed(places[:, None] ^ nodes[None, :]) >> np.uint64(1)


def first_in_rank(table: Weights, released: Sequence[int]) -> npt.NDArray[np.intp]:
    """intp[count]: the column of the owner of each partition.

    `released[column]` is the mask of what that member leaves to the next in rank. If all have released a partition, it
    is the first one's again. Ties go to the lower column, so columns have to be in the order of node ids.
    """
    keeps = np.full(table.shape, _KEEPS)
    for column, mask in enumerate(released):
        if mask:
            keeps[_set_bits(mask)[: len(table)], column] = 0
    owners: npt.NDArray[np.intp] = np.argmax(table | keeps, axis=1)
    return owners


def mask_of(chosen: npt.NDArray[np.bool_]) -> int:
    """The mask of a section in which these partitions are set."""
    return int.from_bytes(np.packbits(chosen, bitorder="little").tobytes(), "little")


def _set_bits(mask: int) -> npt.NDArray[np.bool_]:
    raw = np.frombuffer(mask.to_bytes(LAP // 8, "little"), dtype=np.uint8)
    return np.unpackbits(raw, bitorder="little").astype(np.bool_)
