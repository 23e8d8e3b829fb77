"""The order of the tasks in one pass: a seeded permutation, computed element by element.

A Feistel network with modular addition on the rectangle a × b, a = b = ⌈√n⌉, is a bijection of a·b ≥ n numbers; whoever
lands at n or above is sent through again (cycle walking, Black and Rogaway 2002), which keeps it a bijection of n. So
the start of a pass costs nothing, whatever its number of tasks, and nothing of it needs to be stored but the seed.
The mixing function is the finaliser of splitmix64. It shuffles; it hides nothing. Pure.
"""

from __future__ import annotations

import hashlib
import math

_ROUNDS = 6
_MASK = (1 << 64) - 1


class PassOrder:
    """The permutation of `range(tasks)` of one pass. `shuffle=False` is the order of the files."""

    def __init__(self, tasks: int, seed: int, pass_number: int, *, shuffle: bool) -> None:
        self._tasks = tasks
        self._shuffle = shuffle and tasks > 1
        self._side = max(math.isqrt(max(tasks, 1) - 1) + 1, 2)
        key = hashlib.blake2b(f"{seed}/{pass_number}".encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = tuple(int.from_bytes(key[at : at + 8], "little") for at in range(0, len(key), 8))

    def __call__(self, position: int) -> int:
        """The task at a position of the pass, `0 ≤ position < tasks`; raises `IndexError` outside of it."""
        if not 0 <= position < self._tasks:
            raise IndexError(f"a pass of {self._tasks} tasks has no position {position}")
        if not self._shuffle:
            return position
        side = self._side
        while True:
            left, right = divmod(position, side)
            for number, key in enumerate(self._keys):
                if number & 1:
                    right = (right + _mixed(left, key)) % side
                else:
                    left = (left + _mixed(right, key)) % side
            position = left * side + right
            if position < self._tasks:
                return position


def _mixed(value: int, key: int) -> int:
    value = (value * 0x9E3779B97F4A7C15 + key) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
