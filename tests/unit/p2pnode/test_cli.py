"""The command line in this process: what is printed where, exit codes, files, and what is imported."""

from __future__ import annotations

import gc
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from p2pnode import cli, tables
from p2pnode.client import STATUS_FILE, find, status_file
from p2pnode.config.load import load
from p2pnode.config.settings import Config
from p2pnode.errors import MEANINGS, ExitCode, UserError
from tests.harness.repository import ROOT

np = pytest.importorskip("numpy")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No node.toml of the repository and no variable of the caller reaches these tests."""
    monkeypatch.chdir(tmp_path)
    for name in ("P2PNODE_NODE__PORT",):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("P2PNODE_STATUS__PORT", "1")
    monkeypatch.setenv("P2PNODE_NODE__STATE_DIR", str(tmp_path / "state"))


def run(*arguments: str) -> int:
    return cli.main(list(arguments))


def test_every_exit_code_is_documented() -> None:
    """Each code has its meaning, and none is given twice."""
    assert set(MEANINGS) == set(ExitCode)
    assert sorted(MEANINGS) == list(range(12))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["start", "--config", "absent.toml"], 4, "there is no configuration file absent.toml"),
        (["start", "--port", "high"], 4, '--port: node.port = "high" is not allowed'),
        (["start", "--set", "node.prot=1"], 4, "there is no setting node.prot"),
        (["start", "--set", "nonsense"], 4, "is not an assignment"),
        (["start", "--bootstrap", "10.0.0.5"], 4, '"10.0.0.5" has no port'),
        (["start", "--task", "digit"], 4, '"digit" is not a task'),
        (["start", "--status-port", "8468"], 4, "are both 8468"),
        (["run", "--", "no-such-program", "x"], 8, 'there is no program "no-such-program"'),
        (["run"], 2, "Missing argument"),
        (["start", "--prot", "1"], 2, "No such option: --prot"),
        (["dance"], 2, "No such command 'dance'"),
        (["status"], 9, "no node reachable at 127.0.0.1:1"),
        (["peers", "--address", "127.0.0.1:1"], 9, "no node reachable at 127.0.0.1:1"),
        (["watch", "--address", "127.0.0.1:1"], 9, "no node reachable"),
        (["leave", "--state-dir", "nowhere"], 9, "no node runs on the state directory nowhere"),
        (["pause", "--address", "nonsense"], 2, '--address: "nonsense" has no port'),
        (["export", "model.onnx"], 2, "does not end in a known format"),
        (["export", "model.pt"], 7, "there is no checkpoint in"),
        (["demo", "--nodes", "0"], 2, "--nodes"),
        (["demo", "--barrier", "psp"], 2, '"psp" is not a barrier'),
        (["demo", "--task", "text"], 2, "measures no accuracy"),
        (["demo", "--task", "digit"], 4, '"digit" is not a task'),
        (["demo", "--data-dir", "nowhere"], 8, "cannot read --data-dir"),
        (["config", "check", "--set", "node.host=0.0.0.0"], 4, "listens beyond this machine"),
    ],
)
def test_mistakes_get_a_sentence_a_hint_and_a_code(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One error, one hint, the documented code, nothing on standard output, no stack trace, nothing written."""
    assert run(*arguments) == code

    output = capsys.readouterr()
    assert output.out == ""
    lines = output.err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"]
    assert message in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_stack_traces_come_only_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    """--debug shows where an error came from, and keeps its code; after `--` it is the program's own flag."""
    assert run("start", "--debug", "--config", "absent.toml") == 4
    assert "Traceback" in capsys.readouterr().err

    assert run("run", "--", "no-such-program", "--debug") == 8
    assert "Traceback" not in capsys.readouterr().err


def test_an_unexpected_fault_is_one_line_with_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fault of ours is said to be one, without a stack trace."""

    def broken() -> None:
        raise ZeroDivisionError("by nought")

    monkeypatch.setattr("p2pnode.config.documentation.node_toml", broken)

    assert run("config", "default") == 1
    assert capsys.readouterr().err.startswith("error: unexpected ZeroDivisionError: by nought\nhint: run it again")


def test_help_and_version_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """--help lists the commands, no command at all prints the same and is a usage error."""
    assert run("--help") == 0
    listed = capsys.readouterr().out
    for name in [command.name or command.callback.__name__ for command in cli.app.registered_commands]:
        assert f"  {name} " in listed
    assert run() == 2
    assert capsys.readouterr().out == listed
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("p2pnode 0.")


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
    """File, environment and --set are merged; --origin says which gave what; --json is for machines."""
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
    """default prints a whole file; check says that all is well, warnings apart."""
    assert run("config", "default") == 0
    assert "[exchange]" in capsys.readouterr().out
    assert run("config", "check", "--set", "exchange.outer_momentum=0.9") == 0
    output = capsys.readouterr()
    assert output.out == "the configuration is valid\n"
    assert output.err.startswith("warning: exchange.outer_momentum = 0.9")


def test_start_hands_the_configuration_to_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags become settings, the command after -- is the user's, and the daemon's code is ours."""
    seen: list[tuple[Config, list[str] | None]] = []

    class Daemon:
        @staticmethod
        def run(config: Config, *, command: list[str] | None = None) -> int:
            seen.append((config, command))
            return 5

    monkeypatch.setitem(sys.modules, "p2pnode.daemon", Daemon)  # type: ignore[arg-type]
    monkeypatch.setattr("p2pnode.daemon", Daemon, raising=False)

    flags = ["--port", "7", "--status-port", "8", "--run", "2024", "-b", "a:1", "-b", "[::1]:2", "--state-dir", "true"]
    assert run("start", *flags, "--task", "mnist", "--set", "training.seed=3", "--debug") == 5
    assert run("run", "--port", "9", "--", sys.executable, "train.py", "--port", "1") == 5
    assert run("run", sys.executable, "train.py", "--debug") == 5

    config = seen[0][0]
    assert (config.node.port, config.status.port, config.swarm.run) == (7, 8, "2024")
    assert (config.swarm.bootstrap, config.node.state_dir) == (["a:1", "[::1]:2"], "true")
    assert (config.training.task, config.training.seed, config.log.level) == ("mnist", 3, "debug")
    assert seen[0][1] is None
    assert seen[1][0].node.port == 9
    assert seen[1][1] == [sys.executable, "train.py", "--port", "1"]
    assert seen[2][1] == [sys.executable, "train.py", "--debug"]


def test_export_takes_the_newest_whole_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint with the highest step that was written whole is exported; an existing file is not replaced."""
    for step, whole in [(9, True), (10, True), (11, False)]:
        folder = tmp_path / "state" / "checkpoints" / f"step-{step:010d}"
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


def test_a_node_is_found_by_its_state_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """status.json leads to the node; one left by a dead process is said to be that."""
    folder = tmp_path / "state"
    folder.mkdir()
    assert find(folder) is None
    (folder / STATUS_FILE).write_bytes(b'{"address": "127.0.0.1:1"')
    assert find(folder) is None
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    (folder / STATUS_FILE).write_bytes(status_file("127.0.0.1:1", child.pid, "ab"))

    found = find(folder)

    assert found == ("127.0.0.1:1", child.pid, "ab", "")
    assert not found.alive
    assert run("status") == 9
    assert f"its process {child.pid} has ended" in capsys.readouterr().err


def test_light_commands_import_nothing_heavy() -> None:
    """`start` until the daemon begins, and every command that asks, load neither rich, aiohttp, structlog nor torch."""
    code = (
        "import sys, p2pnode.cli, p2pnode.client, p2pnode.tables\n"
        "p2pnode.cli.main(['config', 'check'])\n"
        "found = {'rich', 'aiohttp', 'structlog', 'torch', 'numpy', 'asyncio'} & set(sys.modules)\n"
        "sys.exit(f'imported {sorted(found)}' if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


def test_the_daemon_s_log_does_not_load_rich() -> None:
    """structlog is loaded without rich, and rich can still be imported afterwards."""
    code = (
        "import sys\n"
        "from p2pnode.config.settings import LogSettings\nfrom p2pnode.logs import configure\n"
        "configure(LogSettings(format='console')).info('event')\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'rich']\n"
        "import rich.table"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_status_is_said_in_sentences() -> None:
    """The summary comes first, then whether the node is connected, learns, waits, and what to do."""
    status = {
        "summary": "waiting for one",
        "node": {"id": "7f3a" * 10, "incarnation": 3, "address": "10.0.0.5:8468"},
        "run": "digits",
        "state": "waiting",
        "step": 412,
        "population": {"estimate": 23.8, "low": 20.1, "high": 28.2, "exact": False},
        "barrier": {"method": "pssp"},
        "waiting": {"since_seconds": 3.2, "behind": 1, "sampled": 10, "slowest": "19ab" * 10, "its_step": 407},
        "training": {"loss": 0.31, "metrics": {"accuracy": 0.93}, "evaluated_step": 410, "evaluated_samples": 360},
        "exchange": {"shards_owned": 17, "bytes_sent": 1_234_567, "bytes_received": 999, "refused": 0},
        "health": [{"level": "warning", "what": "port closed", "do": "open it"}],
    }

    text = tables.status_text(status)

    assert text.splitlines()[0] == "waiting for one"
    for words in (
        "about 24 nodes (20 to 28)",
        "waiting at step 412; loss 0.310, accuracy 0.930 at step 410 on 360 samples",
        "1 of 10 sampled peers, for 3.2 s; slowest 19ab19ab at step 407",
        "17 shards owned, 1.2 MB sent, 999 B received",
        "warning: port closed; open it",
    ):
        assert words in text


def test_half_a_status_is_shown_all_the_same() -> None:
    """A node that has just started has null where there is nothing yet."""
    for status in ({}, {"population": None, "training": {"loss": None}, "waiting": None, "health": []}):
        assert "nothing to report" in tables.status_text(status)
        assert tables.status_line(status)
        assert len(tables.demo_row("node-0", status)) == len(tables.DEMO_COLUMNS)
    assert len(tables.demo_row("node-0", None)) == len(tables.DEMO_COLUMNS)
    assert len(tables.peer_row({})) == len(tables.PEER_COLUMNS)


def test_tables_can_be_drawn() -> None:
    """The tables of watch and demo hold their rows, and say how many peers they leave out."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=160, record=True)
    console.print(tables.watch_table({"summary": "all well [x]"}, [{"id": "ab" * 20, "step": 7}] * 5, 3))
    console.print(tables.demo_table([tables.demo_row("node-0", {"step": 9})], "title"))
    text = console.export_text()

    for words in ("all well [x]", "abababab", "… 2 more", "node-0", "waits for"):
        assert words in text


def test_user_errors_are_whole_in_a_log() -> None:
    """As text a UserError has both halves."""
    assert str(UserError("a", "b", ExitCode.CONFIGURATION)) == "a (b)"
    assert str(UserError("a")) == "a"


def test_a_daemon_runs_with_its_garbage_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collection rests while the daemon's modules are imported, and goes on before it runs."""
    from p2pnode import daemon
    from p2pnode.commands import start

    collecting: list[bool] = []
    monkeypatch.setattr(daemon, "run", lambda _config, command: collecting.append(gc.isenabled()) or 0)

    assert start._daemon(Config(), None) == 0
    assert collecting == [True]
