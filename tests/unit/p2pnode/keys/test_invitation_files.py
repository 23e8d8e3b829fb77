"""The settings that follow from the environment and from an accepted invitation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2pnode.errors import ExitCode, UserError
from p2pnode.keys.invitation_files import (
    KEY_FILE,
    KEY_VARIABLE,
    SWARM_FILE,
    read_swarm,
    remembered_settings,
)


def settings(folder: Path, environment: dict[str, str] | None = None, *, joining: bool = False) -> dict[str, object]:
    found = remembered_settings(folder, environment or {}, joining=joining)
    return {override.key: json.loads(override.text) for override in found}


def accepted(folder: Path) -> Path:
    """A state directory with an accepted invitation."""
    (folder / KEY_FILE).write_text("key")
    (folder / SWARM_FILE).write_text(json.dumps({"run": "digits", "bootstrap": ["10.0.0.5:8468"]}))
    return folder


def test_an_empty_directory_gives_no_settings(tmp_path: Path) -> None:
    """Without key and invitation nothing follows; `joining` assumes the key file."""
    assert settings(tmp_path) == {}
    assert settings(tmp_path, joining=True) == {"swarm.key_file": str(tmp_path / KEY_FILE)}


def test_an_accepted_invitation_gives_key_run_and_addresses(tmp_path: Path) -> None:
    """The next start knows all three."""
    assert settings(accepted(tmp_path)) == {
        "swarm.key_file": str(tmp_path / KEY_FILE),
        "swarm.run": "digits",
        "swarm.bootstrap": ["10.0.0.5:8468"],
    }


def test_a_key_alone_gives_its_file(tmp_path: Path) -> None:
    """`p2pnode key new` writes a key file without an invitation."""
    (tmp_path / KEY_FILE).write_text("key")

    assert settings(tmp_path) == {"swarm.key_file": str(tmp_path / KEY_FILE)}


def test_a_key_in_the_environment_takes_precedence(tmp_path: Path) -> None:
    """Only the name of the variable becomes a setting, not the key in it."""
    found = settings(accepted(tmp_path), {KEY_VARIABLE: "secret"})

    assert found == {"swarm.key_file": f"${KEY_VARIABLE}"}


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"run": "a", "bootstrap": 1}'])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, content: str) -> None:
    """The error names the file and the way to replace it."""
    (tmp_path / SWARM_FILE).write_text(content)
    with pytest.raises(UserError, match="cannot read") as caught:
        read_swarm(tmp_path)

    assert caught.value.exit_code == ExitCode.STATE_DIRECTORY
    assert "p2pnode key join" in caught.value.hint


def test_no_invitation_is_an_empty_run(tmp_path: Path) -> None:
    """A directory without the file has no run and no addresses."""
    assert read_swarm(tmp_path) == ("", [])


def test_an_invitation_gives_a_founder_no_addresses(tmp_path: Path) -> None:
    """A founder that accepted an invitation to its own swarm still opens it alone: key and run count, addresses not."""
    found = remembered_settings(accepted(tmp_path), {}, founder=True)

    assert {override.key for override in found} == {"swarm.key_file", "swarm.run"}
