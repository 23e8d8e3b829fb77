"""Starts a node as a process of its own, and ends those that run on a state directory.

`p2pnode start --background` waits until the node answers. So a start that fails says why at the terminal, with the exit
code of the node. What the node prints goes to `node.log` (`p2pnode.log_file`). `p2pnode leave` asks the
nodes to leave and waits until their processes have ended.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from p2pnode.client import STATUS_FILE, NodeClient, RunningNode, find, running_on
from p2pnode.config.state_folders import LOCAL
from p2pnode.directory_lock import is_locked, taken
from p2pnode.errors import ExitCode, UserError, state_directory_unusable
from p2pnode.log_file import LOG_FILE, line_entry, open_log

POLL_INTERVAL_S = 0.1
#: Longest wait for the API of a node; a loaded machine imports slowly.
START_TIMEOUT_S = 120.0
#: A node that has not joined after this is reported as it is, and goes on.
JOIN_PATIENCE_S = 10.0
#: `stop --now`: a process that takes this long to end by its second signal is killed.
KILL_S = 3.0
#: Lines of a start that failed without saying why.
SHOWN_LINES = 20
#: Less free space than this is a full disk.
FULL_BYTES = 1 << 16
#: Most bytes of the log that are searched for the reason.
MAX_TAIL_BYTES = 1 << 18

Show = Callable[[float, float, str, str], None]


class Background(NamedTuple):
    """A node to be started: the arguments of `p2pnode`, what it reads from standard input, and how many `--local`
    starts; 0: a single one."""

    arguments: Sequence[str]
    folder: Path
    given: bytes = b""
    local: int = 0

    @property
    def log_folder(self) -> Path:
        """Nodes of `--local` share a log."""
        return self.folder / LOCAL if self.local else self.folder


def start(request: Background, show: Show) -> list[RunningNode]:
    """Start it and wait until every node answers; returns those nodes. Raises `UserError` with the reason if its
    process ends. `show(done, total, unit, what)` is told how far it is."""
    folder = request.folder
    before = {node.pid for node in running_on(folder).values()}
    try:
        for place in dict.fromkeys((folder, request.log_folder)):
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not os.access(place, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
        if not request.local:
            _refuse_second(folder)
        log = open_log(request.log_folder)
    except OSError as error:
        raise state_directory_unusable(folder, error) from error
    try:
        begin = os.fstat(log).st_size
        process = subprocess.Popen(
            [sys.executable, "-m", "p2pnode", *request.arguments],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # it outlives this terminal, and no Ctrl-C of it arrives
        )
    finally:
        os.close(log)
    try:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(request.given)
            process.stdin.close()
        return _until_up(request, process, before, begin, show)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise


def _refuse_second(folder: Path) -> None:
    """Raise `UserError` if a node has the directory."""
    if not is_locked(folder):
        return
    node = find(folder)
    whose = f": process {node.pid}, HTTP API at {node.address}" if node is not None and node.alive else ""
    raise taken(folder, whose)


def _until_up(
    request: Background, process: subprocess.Popen[bytes], before: set[int], begin: int, show: Show
) -> list[RunningNode]:
    deadline = time.monotonic() + START_TIMEOUT_S
    patience = None
    while True:
        new = [node for node in running_on(request.folder).values() if node.pid not in before]
        code = process.poll()
        if code is not None:
            raise _ended(request.log_folder, code if code >= 0 else 128 - code, begin)
        now = time.monotonic()
        if len(new) >= max(1, request.local):
            patience = patience or now + JOIN_PATIENCE_S
            states = [state_of(node) for node in new]
            if now > patience or all(state not in ("", "joining") for state in states):
                return new
            show(sum(state not in ("", "joining") for state in states), len(states), "nodes", "join the swarm")
        elif now > deadline:
            raise UserError(
                f"the node does not answer after {START_TIMEOUT_S:.0f} s; its process {process.pid} still runs",
                f"see {request.log_folder / LOG_FILE}; `p2pnode leave --now` ends it",
                ExitCode.NOT_REACHABLE,
            )
        else:
            show(len(new), max(1, request.local), "nodes", "start")
        time.sleep(POLL_INTERVAL_S)


def state_of(node: RunningNode) -> str:
    """Empty where it does not answer."""
    try:
        return str(NodeClient.of(node).status().get("state", ""))
    except UserError:
        return ""


def summary_of(node: RunningNode) -> str:
    """What the node says of itself in one sentence."""
    try:
        return str(NodeClient.of(node).status().get("summary", ""))
    except UserError as error:
        return error.message


def as_json(node: RunningNode) -> dict[str, object]:
    """A node that was started, for a program that reads it."""
    return {"id": node.node_id, "pid": node.pid, "address": node.address, "summary": summary_of(node)}


def _ended(folder: Path, code: int, begin: int) -> UserError:
    """Why a process that was just started has ended, as it has said itself."""
    path = folder / LOG_FILE
    lines = _written(path, begin)
    errors = [at for at, line in enumerate(lines) if line.startswith("error: ")]
    if errors:
        at = errors[-1]
        following = lines[at + 1 : at + 2]
        hint = next((line.removeprefix("hint: ") for line in following if line.startswith("hint: ")), "")
        message = lines[at].removeprefix("error: ")
    else:
        events = [line_entry(line) for line in lines]
        told = [entry for entry in events if entry.level in ("error", "warning") and entry.event]
        why = [f"{entry.event}: {entry.fields.get('reason') or dict(entry.fields)}" for entry in told[-1:]]
        said = why or [entry.fields["text"] for entry in events if not entry.event][-SHOWN_LINES:]
        message = "\n".join([f"the node has ended at once with exit code {code}", *map(str, said)])
        hint = f"all that it has logged is in {path}"
        if not said and _is_full(folder):
            message, code = f"{message}, and the disk of {folder} is full", ExitCode.STATE_DIRECTORY
            hint = "free space on it, or name another directory with --state-dir"
    if errors and begin == 0:
        with contextlib.suppress(OSError):  # the log has this start alone, and it was just shown
            path.unlink()
            folder.rmdir()
    return UserError(message, hint, code or ExitCode.UNEXPECTED)


def _is_full(folder: Path) -> bool:
    """Whether the log could not even be written."""
    try:
        return shutil.disk_usage(folder).free < FULL_BYTES
    except OSError:
        return False


def _written(path: Path, begin: int) -> list[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(begin if begin <= size else 0, size - MAX_TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


# -- the end -----------------------------------------------------------------------------------------------------------


class Ended(NamedTuple):
    """How a node ended. `is_clean`: it had left before; `left_behind`: what nobody took over in time."""

    node: RunningNode
    seconds: float
    is_clean: bool
    left_behind: Mapping[str, Any]

    @property
    def as_json(self) -> dict[str, object]:
        return {
            "id": self.node.node_id,
            "pid": self.node.pid,
            "seconds": round(self.seconds, 3),
            "clean": self.is_clean,
            "left_behind": dict(self.left_behind),
        }


def stop(folder: Path, timeout_s: float, show: Show, *, now: bool) -> list[Ended]:
    """End the nodes of a state directory and wait for it; `now`: without leaving. Raises `UserError`."""
    nodes = running_on(folder)
    if not nodes:
        found = find(folder)
        if is_locked(folder):
            raise UserError(
                f"a node is just starting on the state directory {folder}, or hangs: it has no HTTP API yet",
                "try again in a moment; then look for its process with: pgrep -af p2pnode",
                ExitCode.NOT_REACHABLE,
            )
        gone = f"; its process {found.pid} has ended without leaving" if found is not None else ""
        raise UserError(
            f"no node runs on the state directory {folder}{gone}",
            "name its run with --run, its directory with --state-dir, or its API with --address HOST:PORT",
            ExitCode.NOT_REACHABLE,
        )
    began = time.monotonic()
    behind: dict[Path, Mapping[str, Any]] = {}
    seen = dict.fromkeys(nodes, 0)
    for place, node in nodes.items():
        seen[place] = _last_event(node)
        _end_at_once(node) if now else _ask(node)
    ended: list[Ended] = []
    left = dict(nodes)
    while left:
        passed = time.monotonic() - began
        for place, node in list(left.items()):
            if not node.alive:
                file = find(place)
                is_clean = file is None or file.pid != node.pid
                if now and not is_clean:
                    (place / STATUS_FILE).unlink(missing_ok=True)
                ended.append(Ended(node, passed, is_clean, behind.get(place, {})))
                del left[place]
            elif not now:
                behind[place] = _left_behind(node, seen[place]) or behind.get(place, {})
            elif passed > KILL_S:
                _signal(node, signal.SIGKILL)
        if left and passed > timeout_s:
            raise UserError(
                f"{len(left)} of {len(nodes)} nodes have not left within {timeout_s:g} s: "
                + "; ".join(f"{node.node_id[:8]} {state_of(node) or 'does not answer'}" for node in left.values()),
                "wait longer with --timeout; or end them at once with --now: others then go on from backups",
                ExitCode.STILL_LEAVING,
            )
        show(len(ended), len(nodes), "nodes", "leave")
        time.sleep(POLL_INTERVAL_S if left else 0)
    return ended


def _ask(node: RunningNode) -> None:
    """Ask it to leave; by a signal if its API does not take it, such as without the token."""
    try:
        NodeClient.of(node).post("/leave")
    except UserError:
        _signal(node, signal.SIGTERM)


def _end_at_once(node: RunningNode) -> None:
    """The second signal ends the process at once (`p2pnode.daemon`)."""
    _signal(node, signal.SIGTERM)
    time.sleep(POLL_INTERVAL_S)
    _signal(node, signal.SIGTERM)


def _signal(node: RunningNode, number: signal.Signals) -> None:
    try:
        os.kill(node.pid, number)
    except ProcessLookupError:
        pass
    except PermissionError as error:
        raise UserError(
            f"the process {node.pid} belongs to another user, and its node does not take a request",
            "run the command as the user that runs the node, or name its token with --token-file: `p2pnode leave`",
            ExitCode.NOT_REACHABLE,
        ) from error


def _last_event(node: RunningNode) -> int:
    try:
        return int(NodeClient.of(node).events(limit=1)["last"])
    except (UserError, KeyError, TypeError, ValueError):
        return 0


def _left_behind(node: RunningNode, since: int) -> Mapping[str, Any]:
    """The fields of the event that says what nobody took over; empty while there is none."""
    try:
        events = NodeClient.of(node, timeout_s=1.0).events(since)["events"]
    except (UserError, KeyError, TypeError):
        return {}
    return next((event["fields"] for event in events if event["event"] == "left_behind"), {})
