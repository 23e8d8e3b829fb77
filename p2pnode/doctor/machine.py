"""Reads the facts of this machine and of a state directory, and judges them; writes nothing. `…_check` is pure."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from p2pnode.config.settings import Config
from p2pnode.errors import ExitCode
from p2pnode.keys.api_token import token_path
from p2pnode.overlay.sockets.listener import bind_pair
from p2pnode.overlay.transport import PortInUse
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


def torch_check(found: Mapping[str, Any], device: str | list[str], has_nvidia: bool) -> list[DoctorCheck]:
    """`found`: what a Python that imports torch says, or why it could not; `device`: the setting."""
    if "missing" in found:
        return [warning("torch", "PyTorch is not installed", 'pip install "p2pnode[torch]" where the trainer runs')]
    if "error" in found:
        return [error("torch", f"PyTorch cannot be imported: {found['error']}", "install it again, or another build")]
    checks = [ok("torch", f"PyTorch {found['version']}, imported in {duration(found['seconds'])}")]
    devices = found.get("devices") or []
    wants = "cuda" in "".join(device)
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


#: Importing torch on a loaded machine.
TORCH_TIMEOUT_S = 120.0
#: Waits of the loop that are measured.
WAITS, WAIT_S = 20, 0.01
#: The kernel's answer and flag where no service sets the clock (adjtimex(2)).
TIME_ERROR, STA_UNSYNC, STATUS_AT = 5, 0x0040, 40

_TORCH = """
import importlib.util, json, time
began = time.monotonic()
if importlib.util.find_spec("torch") is None:
    print(json.dumps({"missing": True})); raise SystemExit
try:
    import torch
    found = {"version": str(torch.__version__), "cuda": torch.version.cuda}
    try:
        found["devices"] = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
        if found["devices"]:
            torch.zeros(1, device="cuda").item()
    except Exception as error:
        found |= {"devices": [], "why": str(error).splitlines()[0]}
except Exception as error:
    found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
print(json.dumps(found | {"seconds": time.monotonic() - began}))
"""


def torch_facts() -> Mapping[str, Any]:
    """What a process of its own says that imports torch: this one stays small, and a crash there is a finding."""
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=TORCH_TIMEOUT_S, check=False
        )
        found = json.loads(answer.stdout.splitlines()[-1]) if answer.stdout.strip() else None
    except subprocess.TimeoutExpired:
        return {"error": f"it took more than {TORCH_TIMEOUT_S:g} s"}
    except (OSError, ValueError) as failure:
        return {"error": str(failure)}
    if isinstance(found, dict):
        return found
    ended = f"its process ended with {answer.returncode}"
    return {"error": (answer.stderr.strip().splitlines() or [ended])[-1]}


def file_limit() -> int:
    """How many files a daemon may open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def longest_delay_s() -> float:
    """By how much the longest of some short waits was longer than asked for."""
    longest = 0.0
    for _ in range(WAITS):
        began = time.monotonic()
        time.sleep(WAIT_S)
        longest = max(longest, time.monotonic() - began - WAIT_S)
    return longest


def clock_is_set() -> bool | None:
    """Whether the kernel knows a service that sets the clock; None where it does not say (not Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        buffer = ctypes.create_string_buffer(512)  # struct timex, with modes = 0: nothing is changed
        answer = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
        if answer >= 0:
            (status,) = struct.unpack_from("=i", buffer.raw, STATUS_AT)
            return answer != TIME_ERROR and not status & STA_UNSYNC
    return None


def free_bytes(folder: Path) -> int:
    """Free space where a folder is or will be. Raises `OSError`."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def checkpoint_bytes(folder: Path) -> int:
    """Bytes of the newest checkpoint; 0 without one."""
    with contextlib.suppress(OSError):
        newest = max((folder / "checkpoints").iterdir(), key=lambda entry: entry.name)
        return sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    return 0


def is_writable(folder: Path) -> bool:
    return os.access(folder, os.R_OK | os.W_OK | os.X_OK)


def secret_files(config: Config) -> list[SecretFile]:
    """The files with secrets that this node uses."""
    folder, source = config.state_folder, config.swarm.key_file
    files = [(folder / "identity.key", "identity"), (token_path(folder, config.status.token_file), "token of the API")]
    if source and source != "-" and not source.startswith("$"):
        files.append((Path(source).expanduser(), "swarm key"))
    return [SecretFile(str(path), what, _mode(path)) for path, what in files]


def _mode(path: Path) -> int | None:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return None


def port_checks(config: Config) -> list[DoctorCheck]:
    """Whether the node's two ports are free; bound for a moment."""
    host, port = config.node.host, config.node.port
    free = "another one: --port, or node.port; 0 takes a free one"
    try:
        *sockets, bound = bind_pair(host, port)
        for one in sockets:
            one.close()
        found = [ok("port", f"UDP and TCP {bound} are free")]
    except PortInUse as failure:
        found = [error("port", str(failure), f"end that process (ss -lntup sport = :{port}), or take {free}")]
    except (OSError, ValueError) as failure:
        what = f"{host}:{port} cannot be bound: {getattr(failure, 'strerror', None) or failure}"
        found = [error("port", what, "node.host must be an address of this machine; ports below 1024 need rights")]
    place = f"{config.status.host}:{config.status.port}"
    try:
        family = socket.AF_INET6 if ":" in config.status.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as api:
            api.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            api.bind((config.status.host, config.status.port))
    except OSError as failure:
        do = "end that process, or take another port: --status-port, or status.port; 0 takes a free one"
        found.append(error("port", f"the HTTP API cannot listen at {place}: {failure.strerror or failure}", do))
    return found


def loopback_check(config: Config) -> DoctorCheck | None:
    """A warning for a node that listens on the loopback only and names no swarm."""
    if config.node.host.startswith("127.") and not config.swarm.bootstrap:
        return warning(
            "address",
            f"node.host = {config.node.host}: only nodes on this machine can join this one",
            "for other machines set node.host = 0.0.0.0, and make a key: p2pnode key new",
        )
    return None
