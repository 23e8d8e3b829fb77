"""Judges what `gather` has found on this machine: versions, limits, clock, disk, files of the node, torch. Pure."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from p2pnode.errors import ExitCode
from p2pnode.terminal.numbers import duration, size

Level = Literal["ok", "info", "warning", "error"]


class DoctorCheck(NamedTuple):
    """What was looked at, how it is, and the next step where one is needed."""

    name: str
    level: Level
    what: str
    do: str = ""

    @property
    def as_json(self) -> dict[str, str]:
        return self._asdict()


def ok(name: str, what: str) -> DoctorCheck:
    return DoctorCheck(name, "ok", what)


def info(name: str, what: str, do: str = "") -> DoctorCheck:
    return DoctorCheck(name, "info", what, do)


def warning(name: str, what: str, do: str) -> DoctorCheck:
    return DoctorCheck(name, "warning", what, do)


def error(name: str, what: str, do: str) -> DoctorCheck:
    return DoctorCheck(name, "error", what, do)


def exit_code(checks: Iterable[DoctorCheck]) -> ExitCode:
    """An error keeps a node from working; a warning does not."""
    return ExitCode.CANNOT_WORK if any(check.level == "error" for check in checks) else ExitCode.OK


#: A node of a swarm of hundreds has as many connections; each is a descriptor.
FEW_FILES = 1024
#: Less leaves no room for any checkpoint.
LEAST_FREE_BYTES = 64 << 20
#: A new checkpoint is written before the oldest goes.
CHECKPOINTS = 2
#: Round trips of a heartbeat in a local network; a machine that pauses longer is taken for a dead one now and then.
LATE_S, TOO_LATE_S = 0.1, 1.0


class SecretFile(NamedTuple):
    """A file that only its owner may read. `mode` None: it is not there."""

    path: str
    what: str
    mode: int | None


def version_check(version: str, python: str, arithmetic: str) -> DoctorCheck:
    what = f"p2pnode {version} on Python {python}, {arithmetic} arithmetic"
    if arithmetic == "compiled":
        return ok("version", what)
    return info("version", what, "install a C compiler and p2pnode again: the exchange is several times faster")


def files_check(limit: int) -> DoctorCheck:
    what = f"this process may open {limit} files"
    if limit > FEW_FILES:
        return ok("file limit", what)
    return warning(
        "file limit", f"{what}; each peer takes one or two", "raise it: ulimit -n 65536, or LimitNOFILE= in the unit"
    )


def delay_check(longest_s: float) -> DoctorCheck:
    what = f"a wait of 10 ms took up to {duration(longest_s)}"
    if longest_s < LATE_S:
        return ok("delay", what)
    do = "see what else runs here (top); set training.threads lower than the number of cores"
    if longest_s < TOO_LATE_S:
        return warning("delay", f"{what}: this machine is busy", do)
    return warning("delay", f"{what}: peers may take this node for a dead one", do)


def clock_check(is_set: bool | None) -> DoctorCheck:
    """`is_set`: whether the kernel says that a service keeps the clock right; None: it does not say."""
    if is_set:
        return ok("clock", "a time service keeps this clock right")
    what = "no time service is known to keep this clock right" if is_set is False else "it is not known who sets it"
    return info("clock", what, "turn on NTP (timedatectl set-ntp true, or chrony): a closed swarm compares clocks")


def disk_check(folder: str, free_bytes: int, checkpoint_bytes: int) -> DoctorCheck:
    what = f"{size(free_bytes)} free for {folder}"
    do = "free space on that disk, or name another folder with --state-dir"
    if free_bytes < LEAST_FREE_BYTES:
        return error("disk", what, do)
    if free_bytes < CHECKPOINTS * checkpoint_bytes:
        return warning("disk", f"{what}; a checkpoint takes {size(checkpoint_bytes)}", do)
    return ok("disk", what)


def folder_check(folder: str, exists: bool, is_writable: bool, runs: str) -> DoctorCheck:
    if exists and not is_writable:
        return error("state", f"{folder} cannot be written", "run it as its owner, or name another with --state-dir")
    if runs:
        return ok("state", f"{folder}; {runs}")
    return ok("state", folder if exists else f"{folder} is made by the first start")


def secret_check(file: SecretFile) -> DoctorCheck:
    """The mode of a file with a secret. The group may read keys of service accounts, and others nothing."""
    if file.mode is None:
        return ok("secrets", f"there is no {file.what} yet")
    if file.mode & stat.S_IRWXO or file.mode & (stat.S_IWGRP | stat.S_IXGRP):
        return error(
            "secrets", f"others may read or write {file.path} (mode {file.mode:04o})", f"chmod 600 {file.path}"
        )
    return ok("secrets", f"{file.what}: only its owner reads it (mode {file.mode:04o})")


def torch_check(found: Mapping[str, Any], device: str, has_nvidia: bool) -> list[DoctorCheck]:
    """`found`: what a Python that imports torch says, or why it could not; `device`: the setting."""
    if "missing" in found:
        return [warning("torch", "PyTorch is not installed", 'pip install "p2pnode[torch]" where the trainer runs')]
    if "error" in found:
        return [error("torch", f"PyTorch cannot be imported: {found['error']}", "install it again, or another build")]
    checks = [ok("torch", f"PyTorch {found['version']}, imported in {duration(found['seconds'])}")]
    devices = found.get("devices") or []
    wants = device.startswith("cuda")
    if devices:
        checks.append(ok("GPU", f"{len(devices)}: {', '.join(dict.fromkeys(devices))} (CUDA {found.get('cuda')})"))
    elif has_nvidia or wants:
        why = "it is built without CUDA" if not found.get("cuda") else found.get("why") or "the driver does not answer"
        what = f"PyTorch sees no GPU: {why}"
        do = "install a build of PyTorch for CUDA (https://pytorch.org); compare nvidia-smi with its CUDA version"
        checks.append(error("GPU", what, do) if wants else warning("GPU", what, do))
    else:
        checks.append(info("GPU", "no NVIDIA device here: it trains on the CPU"))
    return checks
