"""A configuration as TOML: node.toml, docs/config.md, and what is read back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from p2pnode.config.load import Override, load
from p2pnode.config.settings import KEYS, Config
from p2pnode.config.toml import WHAT_MATTERS, node_toml, template, toml
from p2pnode.config.values import description_of
from tests.harness.project.repository import ROOT
from tools.config_page import config_page


@pytest.mark.parametrize(("name", "text"), [("node.toml", template()), ("docs/config.md", config_page())])
def test_generated_files_equal_the_code(name: str, text: str) -> None:
    """The file at hand is the one the code generates; `make generated` renews it."""
    assert (ROOT / name).read_text(encoding="utf-8") == text


@pytest.mark.parametrize("keys", [WHAT_MATTERS, list(KEYS)])
def test_a_file_to_start_from_explains_each_setting_and_sets_none(keys: Sequence[str], tmp_path: Path) -> None:
    """Each default stands in a comment below its explanation: read by accident, the file changes nothing."""
    path = tmp_path / "node.toml"
    path.write_text(template(keys), encoding="utf-8")

    lines = template(keys).splitlines()
    for key in keys:
        explanation = f"# {description_of(KEYS[key].type)}"
        assert lines[lines.index(explanation) + 1].startswith(f"# {key.split('.')[1]} = ")
    loaded = load(path)
    assert (loaded.config, loaded.origins, loaded.chosen) == (Config(), {}, frozenset())


def test_a_line_of_the_file_counts_without_its_mark(tmp_path: Path) -> None:
    """The default itself counts too, over what an earlier start has left."""
    path = tmp_path / "node.toml"
    path.write_text(
        "".join(line.removeprefix("# ") + "\n" for line in template().splitlines() if " = " in line or line[:1] == "[")
    )

    loaded = load(path, remembered=lambda *_: [Override("node.port", "1", "node.json")])

    assert loaded.config == Config()
    assert set(WHAT_MATTERS) == loaded.chosen


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

    path.write_text(node_toml(config), encoding="utf-8")
    assert load(path).config == config


def test_origins_are_shown_beside_the_values() -> None:
    """`config show --origin` prints the source of each value."""
    loaded = load(None, {"P2PNODE_NODE__PORT": "1"})

    text = node_toml(loaded.config, loaded.origins)

    assert "port = 1  # environment variable P2PNODE_NODE__PORT" in text
    assert 'host = "127.0.0.1"  # default' in text
