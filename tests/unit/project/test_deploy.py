"""The files of deploy/, each read by the best tool at hand; their settings are read by the daemon's own code."""

from __future__ import annotations

import configparser
import fnmatch
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from p2pnode.config.load import load
from p2pnode.config.rules import check
from p2pnode.config.settings import Config
from p2pnode.errors import ExitCode
from tests.harness.environment import make_environment
from tests.harness.repository import ROOT
from tests.harness.virtual_loop import run as run_virtual
from training.dispatch.etcd_store import EtcdStore
from training.dispatch.open_store import open_store
from training.settings import TrainingSettings

DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
UNIT = DEPLOY / "p2pnode.service"
DROP_IN = DEPLOY / "p2pnode-gpu.conf"

#: Of ten, as `systemd-analyze security` counts; what is left is the network, and machine code made at run time.
MOST_EXPOSURE = 2.0


def run(*command: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)


def tool(name: str) -> str:
    """The path of a program beside this Python or on the path; skips the test where there is none."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def instructions(name: str) -> list[str]:
    """The arguments of each instruction of that name, continued lines joined, comments left out."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    return re.findall(rf"^{name} (.*)$", text, re.MULTILINE)


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8")))


def config_of(service: str) -> Config:
    return load(environment=compose()["services"][service]["environment"]).config


def unit_settings() -> dict[str, list[str]]:
    """The [Service] section; systemd allows a key more than once."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text(encoding="utf-8").partition("[Service]")[2].splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


# --- Dockerfile


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    """hadolint, at its strictest, has no complaint."""
    result = run(tool("hadolint"), "--failure-threshold", "style", "deploy/Dockerfile")

    assert (result.returncode, result.stdout) == (0, "")


def test_image_does_not_run_as_root() -> None:
    """The last stage ends as a numbered, unprivileged user, which Kubernetes can check without reading /etc/passwd."""
    assert instructions("USER") == ["10001:10001"]


def test_signals_reach_the_daemon() -> None:
    """Entry point and command are in exec form: no shell stands between SIGTERM and the daemon."""
    assert instructions("ENTRYPOINT") == ['["p2pnode"]']
    assert instructions("CMD") == ['["start"]']
    assert instructions("STOPSIGNAL") == ["SIGTERM"]


def test_health_check_is_valid_python() -> None:
    """The health check asks /healthz at the port the image sets, with nothing but the standard library."""
    [check] = instructions("HEALTHCHECK")
    command = yaml.safe_load(check.partition("CMD ")[2])

    compile(command[2], "HEALTHCHECK", "exec")
    assert command[:2] == ["python", "-c"]
    assert "/healthz" in command[2]
    assert "P2PNODE_STATUS__PORT" in command[2]


def test_image_settings_are_settings() -> None:
    """The variables the image sets are understood by the daemon, and the state is in the volume."""
    variables = dict(re.findall(r"(P2PNODE_\w+__\w+)=(\S+)", " ".join(instructions("ENV"))))
    volumes = yaml.safe_load(instructions("VOLUME")[0])

    config = load(environment=variables).config

    assert Path(config.node.state_dir).is_relative_to(volumes[0])
    assert instructions("EXPOSE") == [f"{config.node.port}/udp {config.node.port}/tcp"]


def test_image_has_no_build_tools() -> None:
    """The final stage copies the environment from the first and installs no package."""
    final = DOCKERFILE.rpartition("\nFROM ")[2]

    assert "COPY --from=build /opt/p2pnode /opt/p2pnode" in final
    assert not re.search(r"\b(apt-get|pip) ", final)


def test_build_context_holds_the_sources_and_no_more() -> None:
    """.dockerignore lets through what setuptools needs, and neither tests, environments nor keys."""
    lines = [
        line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line and line[0] != "#"
    ]
    allowed = {line[1:] for line in lines if line.startswith("!")}

    assert lines[0] == "*"
    assert allowed == {"LICENSE", "README.md", "constraints.txt", "pyproject.toml", "overlay", "p2pnode", "training"}
    assert not any(
        fnmatch.fnmatch(name, pattern) for name in (".venv", "state", ".git", "tests") for pattern in allowed
    )


# --- compose.yaml


def test_compose_accepts_the_file() -> None:
    """`docker compose config` reads the file without complaint."""
    docker = tool("docker")
    if run(docker, "compose", "version").returncode != 0:
        pytest.skip("this docker client has no compose plugin")

    result = run(docker, "compose", "-f", "deploy/compose.yaml", "config", "--quiet")

    assert (result.returncode, result.stderr) == (0, "")


def test_compose_has_a_bootstrap_and_three_nodes() -> None:
    """One service founds the swarm and three join through it, each with a volume of its own."""
    services = compose()["services"]
    mounts = [mount.partition(":")[0] for service in services.values() for mount in service["volumes"]]

    assert sorted(services) == ["bootstrap", "node-1", "node-2", "node-3"]
    assert sorted(mounts) == sorted(compose()["volumes"])


def test_compose_settings_are_settings() -> None:
    """The daemon accepts each service's environment; only the bootstrap has no node to join."""
    services = compose()["services"]
    joining = {name: config_of(name).swarm.bootstrap for name in services}
    port = config_of("bootstrap").node.port

    assert joining == {
        "bootstrap": [],
        "node-1": [f"bootstrap:{port}"],
        "node-2": [f"bootstrap:{port}"],
        "node-3": [f"bootstrap:{port}"],
    }
    assert len({config_of(name).swarm.run for name in services}) == 1


def test_open_swarm_stays_in_a_private_network() -> None:
    """Every service listens beyond the loopback, so the network has no way in and no port is published."""
    document = compose()

    assert document["networks"] == {"swarm": {"internal": True}}
    for name, service in document["services"].items():
        assert config_of(name).swarm.allow_open
        assert service["networks"] == ["swarm"]
        assert "ports" not in service


def test_compose_takes_away_what_a_node_does_not_need() -> None:
    """Every service has a read-only root, no capabilities, and time to leave."""
    for service in compose()["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["stop_grace_period"] == "180s"


async def opened(spec: str) -> object:
    return open_store(spec, Path(), make_environment())


def test_compose_adds_etcd_and_two_masters() -> None:
    """The second file's masters are masters on the etcd beside them, in the same private network; nodes draw from them.
    No record file or store is shared by accident: each has a volume of its own."""
    added = yaml.safe_load((DEPLOY / "compose-dispatch.yaml").read_text(encoding="utf-8"))
    services = added["services"]
    masters = [services["master-1"], services["master-2"]]

    for service in masters:
        config = load(environment=service["environment"]).config
        assert (config.node.role, config.swarm.run) == ("master", config_of("node-1").swarm.run)
        assert check(config) == []
        assert isinstance(run_virtual(opened(config.dispatch.store)), EtcdStore)
        assert "//etcd:2379/" in config.dispatch.store
    for name in ("bootstrap", "node-1", "node-2", "node-3"):
        joined = compose()["services"][name]["environment"] | services[name]["environment"]
        assert load(environment=joined).config.dispatch.source == "master"
    for service in (*masters, services["etcd"]):
        assert service["networks"] == ["swarm"]
        assert "ports" not in service
    assert sorted(service["volumes"][0].partition(":")[0] for service in (*masters, services["etcd"])) == sorted(
        added["volumes"]
    )


# --- systemd


@pytest.mark.parametrize("with_drop_in", [False, True])
def test_systemd_accepts_the_unit(tmp_path: Path, with_drop_in: bool) -> None:
    """`systemd-analyze verify` knows every key and value, of the unit and of the drop-in for GPUs."""
    analyze = tool("systemd-analyze")
    folder = tmp_path / "etc" / "systemd" / "system"
    program = tmp_path / "opt" / "p2pnode" / "bin" / "p2pnode"
    folder.mkdir(parents=True)
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    shutil.copy(UNIT, folder)
    if with_drop_in:
        (folder / "p2pnode.service.d").mkdir()
        shutil.copy(DROP_IN, folder / "p2pnode.service.d" / "gpu.conf")

    # Not the units it names: the root of the test has none of them.
    result = run(analyze, "verify", "--recursive-errors=no", f"--root={tmp_path}", "p2pnode.service")
    if "unrecognized option" in result.stderr:
        pytest.skip("this systemd-analyze cannot verify a unit outside the running system")

    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_systemd_calls_the_unit_well_guarded() -> None:
    """`systemd-analyze security` counts an exposure of at most 2.0 of 10."""
    result = run(tool("systemd-analyze"), "security", "--offline=true", "--no-pager", str(UNIT))
    if "unrecognized option" in result.stderr:
        pytest.skip("this systemd-analyze cannot judge a unit that is not loaded")
    exposure = re.search(r"Overall exposure level for p2pnode.service: ([0-9.]+)", result.stdout)

    assert exposure is not None, result.stderr
    assert float(exposure[1]) <= MOST_EXPOSURE


def test_unit_knows_the_exit_codes() -> None:
    """A wanted restart restarts; a mistake that no restart corrects does not; the rest is tried again."""
    settings = unit_settings()
    never = {int(code) for code in settings["RestartPreventExitStatus"][0].split()}

    assert settings["Restart"] == ["on-failure"]
    assert settings["RestartForceExitStatus"] == [str(int(ExitCode.RESTART))]
    # Command line, configuration, another swarm, state directory, identity, a script cut short: codes never change
    # their meaning.
    assert never == {2, 4, 5, 7, 11, 12}
    assert never <= {int(code) for code in ExitCode}


def test_unit_lets_a_trainer_die_alone() -> None:
    """The daemon gets SIGTERM first and alone, time to leave, and survives a trainer killed for memory."""
    settings = unit_settings()

    assert settings["KillMode"] == ["mixed"]
    assert settings["OOMPolicy"] == ["continue"]
    assert int(settings["TimeoutStopSec"][0]) > TrainingSettings().stop_s + 5


def test_unit_settings_are_settings() -> None:
    """The unit's variables are understood by the daemon, and the state is where systemd lets it write."""
    settings = unit_settings()
    variables = dict(value.split("=", 1) for value in settings["Environment"])

    config = load(environment=variables).config

    assert config.node.state_dir == f"/var/lib/{settings['StateDirectory'][0]}"


def test_unit_allows_machine_code_made_at_run_time() -> None:
    """MemoryDenyWriteExecute would kill torch.compile and CUDA."""
    assert "MemoryDenyWriteExecute" not in unit_settings()


def test_settings_of_the_unit_have_a_reason() -> None:
    """Each setting is below a comment, which covers at most six in a row."""
    lines = UNIT.read_text(encoding="utf-8").partition("[Service]\n")[2].partition("\n[Install]")[0].splitlines()
    unexplained = []
    since_comment = 7
    for line in lines:
        since_comment = (
            since_comment + 1 if "=" in line and not line.startswith("#") else 0 if line.startswith("# ") else 7
        )
        if since_comment > 6 and line and not line.startswith("#"):
            unexplained.append(line)

    assert unexplained == []


def test_drop_in_only_opens_devices() -> None:
    """The GPU drop-in gives back /dev and locked memory; no other wall falls."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(DROP_IN.read_text(encoding="utf-8"))

    assert parser.sections() == ["Service"]
    assert set(parser["Service"]) == {"PrivateDevices", "DeviceAllow", "LimitMEMLOCK"}


# --- all of them


@pytest.mark.parametrize(
    "path",
    sorted(path for path in DEPLOY.iterdir() if path.is_file() and path.suffix != ".md"),
    ids=lambda path: path.name,
)
def test_each_file_says_how_to_start_it(path: Path) -> None:
    """The comment at the top of each file holds an indented command, and the README of the folder names the file."""
    head = path.read_text(encoding="utf-8").partition("\n\n")[0]

    assert re.search(r"^#   (docker|cp|python3|mkdir|systemctl) ", head, re.MULTILINE)
    assert f"({path.name})" in (DEPLOY / "README.md").read_text(encoding="utf-8")
