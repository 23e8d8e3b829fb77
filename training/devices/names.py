"""Reads `training.device`: which devices of this host get a trainer each. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

#: Each GPU of this machine.
ALL = "all"
#: More trainers than any host has devices are a slip.
MAX_DEVICES = 64

_ENTRY = re.compile(r"(?P<name>[a-z]+(:\d+)?)(\s*\*\s*(?P<count>\d+))?")


def named_devices(setting: str | Sequence[str]) -> list[str]:
    """The devices in a setting as ["cuda:0", "cuda:1"], "cuda:0,cuda:1" or "cpu*4"; ["all"] for "all". Raises
    `ValueError` with what is wrong."""
    entries = setting.split(",") if isinstance(setting, str) else list(setting)
    found: list[str] = []
    for entry in entries:
        match = _ENTRY.fullmatch(entry.strip())
        if match is None:
            raise ValueError(f'"{entry}" names no device')
        found += [match["name"]] * int(match["count"] or 1)
    if not found:
        raise ValueError("the list is empty, and without a device nothing is trained")
    if ALL in found and len(found) > 1:
        raise ValueError('"all" means each GPU of this machine, and stands alone')
    if len(found) > MAX_DEVICES:
        raise ValueError(f"{len(found)} devices; a node has at most {MAX_DEVICES} trainers")
    return found


def resolved_devices(setting: str | Sequence[str], count_gpus: Callable[[], int]) -> list[str]:
    """The device of each trainer: one, "auto", where "all" finds no GPU. Raises `ValueError`."""
    found = named_devices(setting)
    if found == [ALL]:
        found = [f"cuda:{number}" for number in range(min(count_gpus(), MAX_DEVICES))]
    return found or ["auto"]


def threads_each(threads: int, trainers: int, cores: int) -> int:
    """Threads of each of several trainers that share `threads`, or the cores of the machine where that is 0."""
    if trainers == 1:
        return threads
    return max(1, (threads or cores) // trainers)
