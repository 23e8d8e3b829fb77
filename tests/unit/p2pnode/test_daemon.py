"""The daemon's own parts: the lock on the state directory and the choice of a router."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlay.settings import NodeSettings
from p2pnode.config.settings import Config
from p2pnode.daemon import _gateway, _state_folder
from p2pnode.errors import ExitCode, UserError
from tests.harness.environment import SeededEntropy


def test_a_state_directory_has_one_node_at_a_time(tmp_path: Path) -> None:
    """The directory is private and locked; after the first node has ended, the next may start."""
    folder = tmp_path / "a" / "state"
    with _state_folder(folder):
        assert folder.stat().st_mode & 0o777 == 0o700
        with pytest.raises(UserError, match="another node runs") as refused, _state_folder(folder):
            pass
        assert refused.value.exit_code == ExitCode.STATE_DIRECTORY
    with _state_folder(folder):
        pass


def test_a_state_directory_below_a_file_is_refused(tmp_path: Path) -> None:
    """What cannot be created is an error of the user with the system's reason."""
    (tmp_path / "file").write_text("")

    with pytest.raises(UserError, match="cannot be used"), _state_folder(tmp_path / "file" / "state"):
        pass


def test_the_router_is_asked_only_on_request() -> None:
    """`node.nat = "off"` has no gateway."""
    entropy = SeededEntropy(1)

    assert _gateway(Config(), entropy) is None
    assert _gateway(Config(node=NodeSettings(nat="auto", host="0.0.0.0")), entropy) is not None
