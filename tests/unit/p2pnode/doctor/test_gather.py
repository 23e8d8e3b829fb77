"""The facts of this machine: real ones where that is cheap."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from p2pnode.config.settings import Config, StatusSettings
from p2pnode.doctor import gather
from p2pnode.overlay.settings import NodeSettings


def test_taken_ports_are_found(tmp_path: Path) -> None:
    """Each by its name, with how to take another one; free ones are not errors."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = Config(
            node=NodeSettings(port=port, state_dir=str(tmp_path)), status=StatusSettings(port=port, host="127.0.0.1")
        )
        checks = gather.port_checks(config)
    assert [check.level for check in checks] == ["error", "error"]
    assert str(port) in checks[0].what
    assert "--port" in checks[0].do
    assert "--status-port" in checks[1].do
    free = gather.port_checks(Config(node=NodeSettings(port=0), status=StatusSettings(port=0)))
    assert [check.level for check in free] == ["ok"]


def test_a_folder_that_is_not_there_has_the_space_of_its_disk(tmp_path: Path) -> None:
    """And its checkpoint is the newest one's."""
    assert gather.free_bytes(tmp_path / "a" / "b") == pytest.approx(gather.free_bytes(tmp_path), rel=0.1)
    for step, size in (("000001", 9), ("000002", 5)):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
        (tmp_path / "checkpoints" / step / "vector").write_bytes(bytes(size))
    assert gather.checkpoint_bytes(tmp_path) == 5
    assert gather.checkpoint_bytes(tmp_path / "none") == 0


def test_the_modes_of_secrets_are_read(tmp_path: Path) -> None:
    """Of those that there are, and of the key wherever the setting has it."""
    key = tmp_path / "my.key"
    key.write_text("")
    key.chmod(0o640)
    config = Config(node=NodeSettings(state_dir=str(tmp_path / "state")))
    config = Config(node=config.node, swarm=type(config.swarm)(key_file=str(key)))
    found = {file.what: file.mode for file in gather.secret_files(config)}
    assert found == {"identity": None, "token of the API": None, "swarm key": 0o640}


def test_a_torch_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that ends its process; a real one is imported by `p2pnode doctor` alone."""
    for program, expected in (
        ("raise SystemExit(3)", {"error": "its process ended with 3"}),
        ("print('no json')", None),
        ("print('{\"missing\": true}')", {"missing": True}),
    ):
        monkeypatch.setattr(gather, "_TORCH", program)
        found = gather.torch_facts()
        assert found == expected if expected else "error" in found


def test_the_kernel_says_whether_the_clock_is_set() -> None:
    """True or false on Linux, without any right; elsewhere it does not say."""
    assert gather.clock_is_set() in ((True, False) if sys.platform == "linux" else (True, False, None))
    assert gather.longest_delay_s() >= 0
    assert gather.file_limit() > 0
