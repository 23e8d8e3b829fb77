"""Configuration: precedence, types, errors that say where, what and what is allowed; and a configuration as TOML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta

from p2pnode.config.load import Override, load
from p2pnode.config.settings import KEYS, SECTIONS, Config, keys_of
from p2pnode.config.toml import WHAT_MATTERS, node_toml, template, toml
from p2pnode.config.values import allowed, description_of
from p2pnode.errors import ExitCode, UserError
from p2pnode.overlay.settings import NodeSettings
from tests.harness.project.repository import ROOT
from tools.config_page import config_page


def refused(path: Path | None = None, environment: dict[str, str] | None = None, *overrides: Override) -> UserError:
    """The error that loading raises; its exit code is always the configuration's."""
    with pytest.raises(UserError) as caught:
        load(path, environment, overrides)
    assert caught.value.exit_code == ExitCode.CONFIGURATION
    return caught.value


def written(folder: Path, text: str) -> Path:
    path = folder / "node.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_alone_are_sound() -> None:
    """Without a file, a variable or a flag a node has the documented defaults."""
    assert load().config == Config()


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    """Each source wins over the one before it, and the origin of each value is remembered."""
    path = written(tmp_path, "[node]\nport = 1\n[status]\nport = 2\n[training]\nseed = 3\n")
    environment = {"P2PNODE_STATUS__PORT": "20", "P2PNODE_TRAINING__SEED": "30"}

    loaded = load(path, environment, [Override("training.seed", "300", "--set training.seed")])

    config = loaded.config
    assert (config.node.port, config.status.port, config.training.seed) == (1, 20, 300)
    assert config.training.local_steps == Config().training.local_steps
    assert loaded.origins == {
        "node.port": f"{path} line 2",
        "status.port": "environment variable P2PNODE_STATUS__PORT",
        "training.seed": "--set training.seed",
    }


def test_what_somebody_chose_is_kept_over_an_invitation(tmp_path: Path) -> None:
    """Another value in the file, or any value of a flag, the default included, wins over what an earlier start left."""
    overrides = [Override("swarm.run", '"digits"', "swarm.json"), Override("swarm.key_file", '"/state/key"', "folder")]
    path = written(tmp_path, '[swarm]\nrun = "other"\nkey_file = ""\n')

    loaded = load(path, {}, [Override("swarm.key_file", '""', "--set")], remembered=lambda *_: overrides)

    assert (loaded.config.swarm.run, loaded.config.swarm.key_file) == ("other", "")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("training.seed", "7", 7),
        ("dispatch.shuffle", "false", False),
        ("exchange.outer_lr", "1", 1.0),
        ("swarm.run", "2024", "2024"),
        ("swarm.run", '"quoted"', "quoted"),
        ("swarm.run", "two words", "two words"),
        ("training.until", "accuracy>=0.95", "accuracy>=0.95"),
        ("barrier.method", "bsp", "bsp"),
        ("swarm.bootstrap", '["a:1", "b:2"]', ["a:1", "b:2"]),
        ("swarm.bootstrap", "a:1, b:2", ["a:1", "b:2"]),
        ("swarm.bootstrap", "", []),
        ("training.options.part", "2", {"part": 2}),
        ("training.options.a.b", "x", {"a": {"b": "x"}}),
        ("training.options", "{part = 2}", {"part": 2}),
    ],
)
def test_text_is_read_as_toml_where_the_key_wants_it(key: str, text: str, value: object) -> None:
    """Flags and variables give typed values; what is no TOML value, or names a text, stays text."""
    section, name = key.split(".")[:2]

    config = load(None, {}, [Override(key, text, "--set")]).config

    assert getattr(getattr(config, section), name) == value


def test_an_entry_of_a_table_is_added_to_the_file_s(tmp_path: Path) -> None:
    """P2PNODE_TRAINING__OPTIONS__PART sets one entry and leaves the others of the file."""
    path = written(tmp_path, "[training.options]\nparts = 4\npart = 0\n")

    config = load(path, {"P2PNODE_TRAINING__OPTIONS__PART": "3"}).config

    assert config.training.options == {"parts": 4, "part": 3}


def test_a_flag_cannot_smuggle_in_a_second_key() -> None:
    """A value with a line break is one text, not two TOML lines."""
    config = load(None, {}, [Override("training.data_dir", '"a"\nport = 1', "--data-dir")]).config

    assert config.training.data_dir == '"a"\nport = 1'


def test_variables_of_others_are_left_alone() -> None:
    """Only names with a double underscore are settings: P2PNODE_SOCKET may belong to a program."""
    assert load(None, {"P2PNODE_SOCKET": "x", "PATH": "y", "OTHER_NODE__PORT": "1"}).config == Config()


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[node]\nprot = 1\n", "line 2: there is no setting node.prot", "did you mean node.port?"),
        ("[nodes]\nport = 1\n", "line 1: there is no section [nodes]", "did you mean [node]?"),
        ("port = 1\n", "line 1: port is outside its section", "write it under [node]"),
        ("[node]\nseed = 1\n", "line 2: there is no setting node.seed", "did you mean training.seed?"),
        ("[log]\nxyzzy = 1\n", "line 2: there is no setting log.xyzzy", "[log] has level, format"),
        ("node = 1\n", "line 1: node is a section", "p2pnode config default"),
        (
            "[node]\n\nport = 99999\n",
            "line 3: node.port = 99999 is not allowed; it must be an integer from 0 to 65535",
            "",
        ),
        ('[node]\nport = "8468"\n', 'node.port = "8468" is not allowed; it must be an integer', ""),
        ("[node]\nport = true\n", "node.port = true is not allowed", ""),
        ("[dispatch]\nshuffle = 1\n", "dispatch.shuffle = 1 is not allowed; it must be true or false", ""),
        ("[exchange]\nouter_lr = inf\n", "exchange.outer_lr = inf is not allowed", ""),
        ("[training]\nmax_seconds = nan\n", "training.max_seconds = nan is not allowed", ""),
        ('[log]\nlevel = "warn"\n', "one of debug, info, warning, error (did you mean warning?)", ""),
        ("[swarm]\nbootstrap = [1]\n", "swarm.bootstrap = [1] is not allowed; it must be a list of texts", ""),
        ('[swarm]\nrun = ""\n', "a text of 1 to 64 characters", ""),
        ('[swarm]\nrun = "' + "x" * 500 + '"\n', "xxx… is not allowed", ""),
        ("[training]\noptions = 1\n", "training.options = 1 is not allowed; it must be a table", ""),
        ("[node\n", "is not valid TOML", "texts need quotes"),
    ],
)
def test_a_wrong_file_is_answered_with_place_value_and_remedy(
    tmp_path: Path, text: str, message: str, hint: str
) -> None:
    """Every mistake names its place, what was written, and what is allowed or probably meant."""
    error = refused(written(tmp_path, text))

    assert message in error.message
    assert hint in error.hint
    assert error.hint
    assert "\n" not in error.message


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    """Two mistakes make one error that lists both."""
    error = refused(written(tmp_path, "[node]\nprot = 1\n[log]\nlevel = 5\n"))

    assert error.message.startswith("2 settings cannot be used:")
    assert "node.prot (did you mean" not in error.message.splitlines()[0]
    assert "node.prot" in error.message
    assert "log.level" in error.message


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("P2PNODE_NODE__PROT", "1", "environment variable P2PNODE_NODE__PROT: there is no setting node.prot"),
        ("P2PNODE_NOD__PORT", "1", "there is no section [nod]"),
        ("P2PNODE_NODE__PORT", "high", 'node.port = "high" is not allowed'),
        ("P2PNODE_NODE__PORT__X", "1", "node.port has no settings below it"),
        ("P2PNODE_NODE__", "1", "node is a section, not a setting"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, value: str, message: str) -> None:
    """A mistake in the environment names the variable."""
    assert message in refused(None, {variable: value}).message


def test_a_missing_file_and_one_that_is_no_text_are_explained(tmp_path: Path) -> None:
    """A wrong path is reported with a hint on how to get a right one."""
    junk = tmp_path / "junk.toml"
    junk.write_bytes(b"\xff\xfe\x00")
    huge = tmp_path / "huge.toml"
    huge.write_bytes(b"#" * (1 << 20) + b"\n")

    assert "there is no configuration file" in refused(tmp_path / "absent.toml").message
    assert "p2pnode init" in refused(tmp_path / "absent.toml").hint
    assert "it is not UTF-8 text" in refused(junk).message
    assert "this is not a node.toml" in refused(huge).message
    assert "cannot read" in refused(tmp_path).message


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


Word = Literal["off", "auto"]


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (Word, "one of off, auto"),
        (Annotated[float, Meta(gt=0)], "a number, greater than 0"),
        (Annotated[list[str], Meta(max_length=3)], "a list of texts (at most 3)"),
        (Annotated[str, Meta(min_length=1, max_length=64)], "a text of 1 to 64 characters"),
        (dict[str, int], "a table"),
        (bool, "true or false"),
    ],
)
def test_a_type_is_described_in_words(annotation: Any, words: str) -> None:
    """Each kind of setting has a description for messages and docs/config.md."""
    assert allowed(annotation) == words


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
