"""node.toml and docs/config.md equal the code, and a written configuration can be read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pnode.config.documentation import config_page, node_toml, toml
from p2pnode.config.load import Override, load
from p2pnode.config.settings import KEYS, Config
from p2pnode.config.values import description_of
from tests.harness.project.repository import ROOT


@pytest.mark.parametrize(("name", "text"), [("node.toml", node_toml()), ("docs/config.md", config_page())])
def test_generated_files_equal_the_code(name: str, text: str) -> None:
    """The file at hand is the one the code generates; `python -m p2pnode.config.documentation` renews it."""
    assert (ROOT / name).read_text(encoding="utf-8") == text


def test_node_toml_has_every_setting_with_its_default_and_one_line_of_explanation() -> None:
    """Each key is preceded by its explanation, and reading the file gives the defaults."""
    lines = node_toml().splitlines()
    for key, info in KEYS.items():
        name = key.split(".")[1]
        explanation = f"# {description_of(info.type)}"
        assert explanation in lines
        assert lines[lines.index(explanation) + 1].startswith((f"{name} = ", f"[{key}]"))
    assert load(ROOT / "node.toml").config == Config()


def test_every_configuration_survives_being_written(tmp_path: Path) -> None:
    """A configuration written as TOML and read again is the same, awkward texts and tables included."""
    awkward = 'quote " backslash \\ line\nbreak tab\t delete \x7f ümlaut 🎈'
    settings = [
        Override("training.data_dir", toml(awkward), "--set"),
        Override("training.options", '{part = 1, "two words" = [1, 2.5, true], nested = {a = "b"}}', "--set"),
        Override("swarm.bootstrap", "a:1,[::1]:2", "--set"),
        Override("exchange.outer_lr", "1e-3", "--set"),
    ]
    config = load(None, {}, settings).config
    path = tmp_path / "written.toml"

    for explain in (True, False):
        path.write_text(node_toml(config, explain=explain), encoding="utf-8")
        assert load(path).config == config


def test_origins_are_shown_beside_the_values() -> None:
    """`config show --origin` prints the source of each value."""
    loaded = load(None, {"P2PNODE_NODE__PORT": "1"})

    text = node_toml(loaded.config, loaded.origins, explain=False)

    assert "port = 1  # environment variable P2PNODE_NODE__PORT" in text
    assert 'host = "127.0.0.1"  # default' in text
