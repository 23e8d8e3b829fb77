"""A client of a node's HTTP API, and `status.json`, the file through which a node on this machine is found.

A running node writes the address of its API and its process id to `status.json` in its state directory. The client
blocks and uses only the standard library, so `p2pnode status` starts at once. It uses `http.client` instead of
`urllib`, because a proxy from the environment must not handle requests to the loopback.

The token is sent only if a request needs it. Its receiver is the node whose state directory contains it, or the address
that the user names for it. A mistyped address must not receive it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from p2pnode.config.state_folders import local_folders
from p2pnode.errors import ExitCode, UserError
from p2pnode.keys import api_token
from p2pnode.overlay.addresses import is_loopback, split_address
from p2pnode.status import CHANGE_HEADER, SCHEMA_HEADER

#: Name of the file in the state directory; the daemon writes it when its API listens and removes it on exit.
STATUS_FILE = "status.json"
#: Longest wait for an answer that is made from memory, in seconds.
TIMEOUT_S = 5.0
#: Most bytes of an answer that are read.
MAX_ANSWER_BYTES = 16 * 1024 * 1024
UNAUTHORIZED = 401


class RunningNode(NamedTuple):
    """The content of `status.json`: the node that runs on a state directory, or ran there last."""

    address: str
    pid: int
    node_id: str
    token_file: str = ""
    folder: Path = Path()

    @property
    def alive(self) -> bool:
        """Whether its process runs: it holds the lock of its directory. The system gives the id of a process that has
        ended to another one."""
        from p2pnode.directory_lock import is_locked  # not on every system

        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return is_locked(self.folder)


def status_file(address: str, pid: int, node_id: str, token_file: str = "") -> bytes:
    """The bytes of `status.json`. It contains the path of the token's file, never the token."""
    entry = {"address": address, "pid": pid, "id": node_id, "token_file": token_file}
    return json.dumps(entry).encode() + b"\n"


def find(state_folder: Path) -> RunningNode | None:
    """The node that runs on a state directory, or ran there last; None if `status.json` is missing or unreadable."""
    try:
        entry = json.loads((state_folder / STATUS_FILE).read_bytes())
        token_file = str(entry.get("token_file", ""))
        return RunningNode(str(entry["address"]), int(entry["pid"]), str(entry["id"]), token_file, state_folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def running_on(folder: Path) -> dict[Path, RunningNode]:
    """The nodes that run on a state directory, and those that `--local` started there, by directory."""
    found = {place: find(place) for place in (folder, *local_folders(folder))}
    return {place: node for place, node in found.items() if node is not None and node.alive}


class NotReachable(UserError):
    """No p2pnode answered at the address."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message, hint, ExitCode.NOT_REACHABLE)


class NodeClient:
    """Sends requests to one node. Methods raise `NotReachable`, or `UserError` with the node's refusal."""

    def __init__(self, address: str, *, token_file: str = "", timeout_s: float = TIMEOUT_S) -> None:
        """`token_file` is read when a request needs the token; without it such requests are refused."""
        self.address = address
        self._host, self._port = split_address(address)
        self._token_file = Path(token_file).expanduser() if token_file else None
        self._timeout_s = timeout_s

    @classmethod
    def of(cls, found: RunningNode, *, timeout_s: float = TIMEOUT_S) -> NodeClient:
        """A client for the node that `find` returned."""
        return cls(found.address, token_file=found.token_file, timeout_s=timeout_s)

    @property
    def token_file(self) -> Path | None:
        """Where the node's token is, if it is known."""
        return self._token_file

    def status(self) -> dict[str, Any]:
        answer = self._ask("GET", "/status")
        if not isinstance(answer, dict) or "schema" not in answer:
            raise self._foreign()
        return answer

    def peers(self) -> list[dict[str, Any]]:
        return self._listed("/peers")

    def steps(self, limit: int = 100) -> list[dict[str, Any]]:
        return self._listed(f"/steps?{urlencode({'limit': limit})}")

    def events(self, since: int = 0, *, limit: int = 2000) -> dict[str, Any]:
        """`{"events": […], "dropped": n, "last": n}`."""
        answer = self._ask("GET", f"/events?{urlencode({'since': since, 'limit': limit})}")
        if not isinstance(answer, dict):
            raise self._foreign()
        return answer

    def post(self, path: str) -> None:
        """One of `/leave`, `/pause`, `/resume`."""
        self._ask("POST", path)

    def _listed(self, path: str) -> list[dict[str, Any]]:
        answer = self._ask("GET", path)
        if not isinstance(answer, list):
            raise self._foreign()
        return answer

    def _ask(self, method: str, path: str) -> Any:
        import http.client  # not at the top: the daemon imports this module but sends no request

        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.request(method, path, headers=self._headers(method))
            response = connection.getresponse()
            body = response.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None
        finally:
            connection.close()
        if response.getheader(SCHEMA_HEADER) is None:
            raise self._foreign()
        try:
            answer = json.loads(body)
        except ValueError:
            raise self._foreign() from None
        if response.status >= 400:
            raise self._refusal(path, response.status, answer)
        return answer

    def _headers(self, method: str) -> dict[str, str]:
        headers = {CHANGE_HEADER: "1", "Accept": "application/json"}
        needs_token = method != "GET" or not is_loopback(self._host)
        if needs_token and self._token_file is not None:
            try:
                headers["Authorization"] = f"Bearer {api_token.read(self._token_file)}"
            except api_token.TokenNotReadable as error:
                raise UserError(
                    f"the token of the node at {self.address} cannot be read from {self._token_file}: {error}",
                    "run the command as the user that runs the node, or give another with --token-file",
                    ExitCode.NOT_REACHABLE,
                ) from None
        return headers

    def _refusal(self, path: str, status: int, answer: Any) -> UserError:
        fields = answer if isinstance(answer, dict) else {}
        hint = str(fields.get("hint", ""))
        if status == UNAUTHORIZED and self._token_file is None:
            hint = "give the node's token with --token-file, or name its state directory with --state-dir"
        return UserError(f"{self.address} refused {path}: {fields.get('error', status)}", hint)

    def _unreachable(self, error: Exception) -> NotReachable:
        if isinstance(error, TimeoutError):
            why = f"no answer within {self._timeout_s:g} s"
        else:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return NotReachable(
            f"no node reachable at {self.address}: {why}",
            "start one with `p2pnode start`, or name its address with --address HOST:PORT or --state-dir DIR",
        )

    def _foreign(self) -> NotReachable:
        return NotReachable(
            f"what answers at {self.address} is not a p2pnode",
            "another program uses that port: give the node's address with --address HOST:PORT or --state-dir DIR",
        )
