"""`p2pnode init`, `config` and `export`: files written, shown and converted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from p2pnode import cli
from p2pnode.config.load import load
from p2pnode.config.settings import Config
from tests.harness.project.repository import ROOT
from tests.harness.trainers.conversion import conversion_here

pytestmark = pytest.mark.usefixtures("own_folder")


def run(*arguments: str) -> int:
    return cli.main(list(arguments))


def test_init_writes_a_file_that_loads_and_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """init writes every default; a second time it refuses and leaves the file as it was, until --force."""
    assert run("init") == 0
    path = tmp_path / "node.toml"
    assert load(path).config == Config()
    path.write_text("[node]\nport = 1\n")

    assert run("init") == 7
    assert "exists already" in capsys.readouterr().err
    assert path.read_text() == "[node]\nport = 1\n"

    assert run("init", str(tmp_path), "--force") == 0
    assert load(path).config == Config()
    assert run("init", "absent/node.toml") == 7
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["node.toml"]


def test_config_show_prints_what_a_node_would_start_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """File, environment and --set are merged; --origin prints the source of each value; --json is for machines."""
    (tmp_path / "node.toml").write_text("[node]\nport = 5\n")

    assert run("config", "show", "--origin", "--set", "swarm.run=mine") == 0
    shown = capsys.readouterr().out
    assert "port = 5  # node.toml line 2" in shown
    assert "port = 1  # environment variable P2PNODE_STATUS__PORT" in shown
    assert 'run = "mine"  # --set swarm.run' in shown

    assert run("config", "show", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], answer["config"]["node"]["port"]) == (1, 5)


def test_config_default_and_check(capsys: pytest.CaptureFixture[str]) -> None:
    """default prints a whole file; check accepts it, with warnings on standard error."""
    assert run("config", "default") == 0
    assert "[exchange]" in capsys.readouterr().out
    assert run("config", "check", "--set", "exchange.outer_momentum=0.9", "--set", "exchange.codec=int8") == 0
    output = capsys.readouterr()
    assert output.out == "the configuration is valid\n"
    assert output.err.startswith("warning: exchange.outer_momentum = 0.9")
    assert run("config", "check", "--set", "exchange.outer_momentum=0.9", "--set", "exchange.codec=int8", "--json") == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["warnings"][0]["what"].startswith("exchange.outer_momentum = 0.9")
    assert output.err == ""


def test_export_takes_the_newest_whole_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint that was written whole last is exported; an existing file is not replaced."""
    for number, step, whole in [(1, 900, True), (2, 10, True), (3, 11, False)]:
        folder = tmp_path / "state" / "checkpoints" / f"{number:08d}-step-{step:010d}"
        folder.mkdir(parents=True)
        save_file({"weight": np.full((2, 2), step, np.float32)}, folder / "vector.safetensors")
        if whole:
            (folder / "state.json").write_text("{}")

    assert run("export", "model.safetensors") == 0
    assert "the model of step 10" in capsys.readouterr().out
    assert load_file("model.safetensors")["weight"].tolist() == [[10, 10], [10, 10]]
    assert run("export", "model.safetensors") == 7
    assert "exists already" in capsys.readouterr().err
    assert run("export", "model.safetensors", "--force") == 0
    assert run("export", "absent/model.safetensors") == 7
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model.safetensors", "state"]


def test_export_finds_the_nodes_that_local_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After `p2pnode run --local 2` the directory of the run has none of its own: the node with the highest step is
    taken, and its own checkpoint once there is one."""

    def write(place: str, step: int) -> None:
        folder = tmp_path / "state" / place / "checkpoints" / f"00000001-step-{step:010d}"
        folder.mkdir(parents=True)
        save_file({"weight": np.full(2, step, np.float32)}, folder / "vector.safetensors")
        (folder / "state.json").write_text("{}")

    (tmp_path / "state" / "local" / "3").mkdir(parents=True)
    assert run("export", "model.safetensors") == 7
    assert "there is no checkpoint" in capsys.readouterr().err
    for place, step in (("local/1", 20), ("local/2", 21), (".", 4)):
        write(place, step)
        assert run("export", "model.safetensors", "--force") == 0
        assert load_file("model.safetensors")["weight"].tolist() == [step, step]
        assert f"the model of step {step}" in capsys.readouterr().out


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory with one checkpoint; returns its vector file."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "state" / "checkpoints" / "00000001-step-0000000004"
    folder.mkdir(parents=True)
    save_file({"layer.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}, folder / "vector.safetensors")
    (folder / "state.json").write_text("{}")
    return folder / "vector.safetensors"


def test_pt_is_a_plain_state_dict(checkpoint: Path) -> None:
    """The file loads with weights_only, under the canonical names, with the values of the checkpoint."""
    torch = pytest.importorskip("torch")

    assert cli.main(["export", "model.pt", "--state-dir", "state"]) == 0

    state = torch.load("model.pt", weights_only=True)
    assert {name: value.tolist() for name, value in state.items()} == {"layer.weight": [[0, 1, 2], [3, 4, 5]]}


def test_the_conversion_shows_how_far_it_is(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the bytes that were copied, the bar is named after the conversion, of the same total."""
    shown: list[tuple[object, ...]] = []
    monkeypatch.setattr("p2pnode.screen.ProgressBar.show", lambda _bar, *given: shown.append(given))

    with conversion_here():
        assert cli.main(["export", "model.pt", "--state-dir", "state"]) == 0

    size = checkpoint.stat().st_size
    assert shown[-2:] == [(size, size, "bytes"), (0, size, "bytes", "convert to .pt")]
    assert Path("model.pt").exists()


def test_a_damaged_checkpoint_leaves_no_file(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed conversion reports its reason with exit code 8 and leaves no partial file."""
    checkpoint.write_bytes(b"damaged")

    with conversion_here():
        assert cli.main(["export", "model.pt", "--state-dir", "state"]) == 8

    assert "could not be converted" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
