"""The table of all settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pnode.config.settings import KEYS, SECTIONS, Config, keys_of
from p2pnode.overlay.settings import NodeSettings


def test_every_section_and_key_is_in_the_table() -> None:
    """Sections stand in the order of the file; each key belongs to its section."""
    assert list(SECTIONS)[:2] == ["node", "swarm"]
    assert keys_of("log") == ["level", "format"]
    assert sum(len(keys_of(section)) for section in SECTIONS) == len(KEYS)
    assert KEYS["node.port"].default == 8468


def test_the_home_directory_is_resolved_in_the_state_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`~` is the home directory; a relative path stays relative."""
    monkeypatch.setenv("HOME", "/home/someone")

    assert Config(node=NodeSettings(state_dir="~/state")).state_folder == Path("/home/someone/state")
    assert Config(node=NodeSettings(state_dir="state")).state_folder == Path("state")
