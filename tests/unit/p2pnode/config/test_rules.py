"""Combinations of settings: what cannot start, what deserves a warning, and the small languages inside values."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from p2pnode.config.load import Override, load
from p2pnode.config.rules import check, check_start, warnings_for, warnings_for_script
from p2pnode.config.settings import Config
from p2pnode.config.tracker import PACKAGES, Tracker, parse_tracker
from p2pnode.errors import UserError
from p2pnode.overlay.settings import NodeSettings, SwarmSettings
from p2pnode.training.goal import Goal
from p2pnode.training.settings import TrainingSettings
from tests.harness.project.repository import ROOT


def overrides(*settings: str) -> list[Override]:
    return [Override(*setting.split("=", 1), "--set") for setting in settings]


@pytest.mark.parametrize(
    ("settings", "what", "do"),
    [
        (["node.host=0.0.0.0"], "listens beyond this machine", "swarm.allow_open = true"),
        (["node.host=::"], "listens beyond this machine", "swarm.allow_open = true"),
        (["node.host=myhost"], "is not an IP address", "0.0.0.0"),
        (["node.advertise=0.0.0.0"], "is not an address that others can dial", "leave it empty"),
        (["node.nat=auto"], "needs no port", 'node.host = "0.0.0.0"'),
        (
            ["node.nat=auto", "node.host=10.0.0.5", "swarm.allow_open=true", "node.client_only=true"],
            "node.client_only contradict",
            "not both",
        ),
        (
            ["node.nat=auto", "node.host=10.0.0.5", "swarm.allow_open=true", "node.advertise=1.2.3.4"],
            "node.advertise contradict",
            "not both",
        ),
        (["status.host=node1.example"], "is not an IP address", "status.names"),
        (["node.port=9000", "status.port=9000"], "node.port and status.port are both 9000", "different"),
        (["swarm.bootstrap=10.0.0.5"], '"10.0.0.5" has no port', "host:port"),
        (["swarm.bootstrap=10.0.0.5:99999"], "not a number from 1 to 65535", "host:port"),
        (["swarm.bootstrap=10.0.0.5:0"], "not a number from 1 to 65535", "host:port"),
        (["swarm.bootstrap=::1:8468"], "an IPv6 address needs brackets", "[2001:db8::1]:8468"),
        (["swarm.bootstrap=http://a:1"], "host:port", "host:port"),
        (["swarm.run= x"], "spaces at its ends", "letters"),
        (["training.task=digit"], '"digit" is not a task', "did you mean digits?"),
        (["training.task=xyz"], '"xyz" is not a task', "package.module:Class"),
        (["training.until=accuracy=0.9"], "is not of the form", "accuracy>=0.95"),
        (["training.until=accuracy>=high"], "is not of the form", "accuracy>=0.95"),
        (["training.until=accuracy>=nan"], "is not of the form", "accuracy>=0.95"),
        (["training.until=accuracy>=0.9", "training.eval_steps=0"], "eval_steps = 0 disables them", "eval_steps"),
        (["training.export=model.onnx"], "does not end in a known format", ".safetensors"),
        (["barrier.method=psp"], '"psp" is not a barrier', "did you mean pssp?"),
        (["barrier.method=custom"], '"custom" is not a barrier', "package.module:function"),
        (["training.device=cpu*0"], "the list is empty", '"cpu*4"'),
        (["training.device=gpu 0"], '"gpu 0" names no device', '["cuda:0", "cuda:1"]'),
        (["training.device=all,cpu"], "stands alone", '"all"'),
        (["training.device=cpu*65"], "at most 64 trainers", '"cpu*4"'),
        (["devices.period=3"], "does not divide training.local_steps = 10", "devices.period = 0"),
    ],
)
def test_impossible_combinations_are_refused(settings: list[str], what: str, do: str) -> None:
    """What cannot work is refused before anything starts, with what to do."""
    settings = [setting.replace("swarm.run= x", 'swarm.run=" x"') for setting in settings]

    with pytest.raises(UserError) as caught:
        load(None, {}, overrides(*settings))

    assert what in caught.value.message
    assert do in caught.value.hint
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    "settings",
    [
        ["barrier.method=bsp", "barrier.staleness=9"],
        ["barrier.method=asp", "barrier.sample=3", "barrier.quantile=0.5"],
        ["barrier.method=my.barriers:mine"],
        ["node.host=0.0.0.0", "swarm.allow_open=true", "node.advertise=192.0.2.1"],
        ["node.host=::1", "status.host=::1"],
        ["status.host=localhost"],
        ["status.host=0.0.0.0", "status.names=node1.example"],
        ["node.port=0", "status.port=0"],
        ["swarm.bootstrap=node1.example:8468,[2001:db8::1]:8468,10.0.0.5:8468"],
        ["training.task=my_package.tasks:Task"],
        ["training.until= loss <= 1e-3"],
        ["training.export=out/model.pt"],
    ],
)
def test_irrelevant_and_unusual_values_are_accepted(settings: list[str]) -> None:
    """A value that merely does nothing, or is rare, keeps nobody from starting."""
    assert check(load(None, {}, overrides(*settings)).config) == []


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (["exchange.outer_momentum=0.9", "exchange.codec=int8"], "may diverge"),
        (["exchange.outer_lr=0.3", "exchange.outer_momentum=0.1"], "exchange.outer_lr and outer_momentum with"),
        (["exchange.outer_lr=0.3", "exchange.codec=sparse"], 'exchange.codec = "sparse": the nodes measure'),
        (["exchange.weight=sum"], "grows with the number of nodes"),
        (["node.host=0.0.0.0", "swarm.allow_open=true"], "can join this swarm"),
        (["status.host=0.0.0.0"], "cross the network unencrypted"),
    ],
)
def test_regrettable_combinations_are_warned_of(settings: list[str], word: str) -> None:
    """A combination that works but is probably a mistake starts with a warning and a hint."""
    problems = warnings_for(load(None, {}, overrides(*settings)).config)

    assert any(word in problem.what and problem.do for problem in problems)


def test_defaults_need_no_warning() -> None:
    """The defaults are what we recommend; momentum 0.9 is fine under bsp, and a rate with a codec of all values."""
    assert warnings_for(Config()) == []
    assert warnings_for(load(None, {}, overrides("exchange.outer_lr=0.3", "exchange.codec=bfloat16")).config) == []
    assert warnings_for(load(None, {}, overrides("exchange.outer_momentum=0.9", "barrier.method=bsp")).config) == []


@pytest.mark.parametrize(
    "text",
    [
        "accuracy>=0.95",
        " loss <= 1e-3 ",
        "m.a>=-1",
        "m<=.5",
        "m>=5.",
        "m>1",
        "m=1",
        "m>=",
        "m>=1.2.3",
        ">=1",
        "m>=inf",
        "é>=1",
    ],
)
def test_until_is_accepted_where_the_step_loop_can_read_it(text: str) -> None:
    """What the configuration lets through is what the step loop parses, and nothing else."""
    config = msgspec.structs.replace(Config(), training=TrainingSettings(until=text))

    if check(config):
        with pytest.raises(ValueError):
            Goal.parse(text)
    else:
        assert Goal.parse(text) is not None


@pytest.mark.parametrize(
    ("host", "bootstrap", "is_refused"),
    [
        ("127.0.0.1", ["10.0.0.5:8468"], True),
        ("::1", ["10.0.0.5:8468", "[2001:db8::1]:1"], True),
        ("127.0.0.1", ["10.0.0.5:8468", "127.0.0.1:8469"], False),
        ("127.0.0.1", ["node.example:8468"], False),
        ("127.0.0.1", ["localhost:8469"], False),
        ("0.0.0.0", ["10.0.0.5:8468"], False),
        ("127.0.0.1", [], False),
    ],
)
def test_a_member_on_the_loopback_of_a_swarm_elsewhere_is_told_at_start(
    host: str, bootstrap: list[str], *, is_refused: bool
) -> None:
    """Where every bootstrap is on another machine, the start ends with both addresses and the setting to change; names
    are resolved later."""
    config = Config(node=NodeSettings(host=host), swarm=SwarmSettings(bootstrap=bootstrap, allow_open=True))

    assert check(config) == []
    problems = check_start(config)
    assert bool(problems) == is_refused
    for problem in problems:
        assert host in problem.what
        assert "10.0.0.5:8468" in problem.what
        assert 'node.host = "0.0.0.0"' in problem.do


def test_settings_without_effect_on_a_script_are_named_only_if_they_were_given() -> None:
    """Defaults are nobody's mistake; a task and a rhythm of evaluations are for `p2pnode start`."""
    found = load(overrides=overrides("training.task=mnist", "training.eval_steps=5"))

    problems = warnings_for_script(found.config, found.origins)

    assert ["training.task" in problems[0].what, "training.eval_steps" in problems[1].what] == [True, True]
    assert "swarm.evaluate" in problems[1].do
    assert warnings_for_script(Config(), load().origins) == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"source": "master"}, "names no file"),
        ({"store": "redis://here"}, "is no store"),
    ],
)
def test_contradictions_of_dispatch_are_refused(settings: dict[str, object], says: str) -> None:
    """Records without files, and a store of another kind."""
    found = check(msgspec.convert({"dispatch": settings}, Config))

    assert [says in str(problem) for problem in found] == [True]


def test_a_master_and_a_worker_of_records_are_accepted() -> None:
    """A master needs no files; a worker names them."""
    worker = {"dispatch": {"source": "master", "records": ["a"], "store": "etcd://a:1,b:2/p"}}

    assert check(msgspec.convert({"node": {"role": "master"}, "dispatch": {"source": "master"}}, Config)) == []
    assert check(msgspec.convert(worker, Config)) == []


@pytest.mark.parametrize(
    ("text", "tracker"),
    [
        ("", None),
        ("csv:steps.csv", Tracker("csv", "steps.csv")),
        ("tensorboard:/runs/a:b", Tracker("tensorboard", "/runs/a:b")),
        ("trackio", Tracker("trackio", "")),
    ],
)
def test_trackers_are_named_with_their_place(text: str, tracker: Tracker | None) -> None:
    """A kind, and what follows the first colon."""
    assert parse_tracker(text) == tracker


@pytest.mark.parametrize("text", ["csv", "csv:", "tensorboard:", "wandb", "wandb:x", "trackio:x", "CSV:x", ":x"])
def test_what_is_no_tracker_keeps_the_node_from_starting(text: str) -> None:
    """The problem names the setting and the three forms."""
    [problem] = check(Config(training=TrainingSettings(tracker=text)))

    assert "training.tracker" in problem.what
    assert "csv:FILE" in problem.do


def test_a_relative_place_is_inside_the_state_directory() -> None:
    """An absolute one stays as it is."""
    assert Tracker("csv", "a.csv").path(Path("/state")) == Path("/state/a.csv")
    assert Tracker("csv", "/data/a.csv").path(Path("/state")) == Path("/data/a.csv")


def test_the_extra_of_a_tracker_has_its_package() -> None:
    """The hint for a missing package names the extra as the tracker; that extra installs the package."""
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

    for kind, package in PACKAGES.items():
        assert f'\n{kind} = ["{package}>=' in pyproject
