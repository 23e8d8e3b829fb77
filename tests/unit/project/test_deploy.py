"""The files of deploy/, each read by the best tool at hand; their settings are read by the daemon's own code."""

from __future__ import annotations

import configparser
import fnmatch
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from p2pnode.config.load import load
from p2pnode.config.rules import check
from p2pnode.config.settings import Config
from p2pnode.errors import LASTING, ExitCode
from p2pnode.keys import api_token
from p2pnode.keys.key_files import read_key_file
from p2pnode.status.guard import OPEN_PATHS
from p2pnode.training.dispatch.etcd_store import EtcdStore
from p2pnode.training.dispatch.open_store import open_store
from p2pnode.training.settings import TrainingSettings
from tests.harness.environment.simulated import make_environment
from tests.harness.environment.virtual_loop import run as run_virtual
from tests.harness.project.repository import ROOT

DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
UNIT = DEPLOY / "p2pnode.service"
DROP_IN = DEPLOY / "p2pnode-gpu.conf"
DROP_INS = (DROP_IN, DEPLOY / "p2pnode-invite.conf", DEPLOY / "p2pnode-key.conf")
KUBERNETES = DEPLOY / "kubernetes"
SLURM = DEPLOY / "slurm" / "p2pnode.sbatch"
#: Of which the schemas are read; `policy/v1`, the newest API here, is older.
KUBERNETES_VERSION = "1.32.0"

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


def stage(name: str) -> str:
    """The lines of one stage of the Dockerfile."""
    [found] = re.findall(rf"^FROM [^\n]* AS {name}$.*?(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    return str(found)


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8")))


def config_of(service: str) -> Config:
    return load(environment=compose()["services"][service]["environment"]).config


def unit_settings() -> dict[str, list[str]]:
    return service_settings(UNIT)


def service_settings(path: Path) -> dict[str, list[str]]:
    """The [Service] section; systemd allows a key more than once."""
    found: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").partition("[Service]")[2].splitlines():
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
    """Both images end as a numbered, unprivileged user, which Kubernetes can check without reading /etc/passwd."""
    assert instructions("USER") == ["10001:10001"]
    for target in ("cpu", "cuda"):
        assert "USER" not in stage(target)
        assert stage(target).startswith("FROM node AS")


def test_images_are_pinned() -> None:
    """Base images have a full version, and no package is installed without the pins of constraints.txt."""
    bases = [line.split()[0] for line in instructions("FROM") if ":" in line]
    installs = [line for line in instructions("RUN") if "pip install" in line]

    assert re.fullmatch(r"3\.11\.\d+", dict(line.split("=") for line in instructions("ARG") if "=" in line)["PYTHON"])
    assert all(base.startswith("python:${PYTHON}-") for base in bases)
    assert len(installs) == 4
    assert all(" -c constraints.txt " in line for line in installs)


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

NODES = ("bootstrap", "node-1", "node-2", "node-3")
SECRETS = "secrets:/etc/p2pnode"


@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose-dispatch.yaml"]], ids=len)
def test_compose_accepts_the_file(files: list[str]) -> None:
    """`docker compose config` reads the files without complaint."""
    docker = tool("docker")
    if run(docker, "compose", "version").returncode != 0:
        pytest.skip("this docker client has no compose plugin")

    result = run(docker, "compose", *[f"--file=deploy/{name}" for name in files], "config", "--quiet")

    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("name", ["compose.yaml", "compose-dispatch.yaml"])
def test_compose_files_fit_the_specification(name: str) -> None:
    """The schema of the Compose specification, as check-jsonschema has it. Anchors are resolved first."""
    package = importlib.util.find_spec("check_jsonschema")
    if package is None or package.origin is None:
        pytest.skip("check-jsonschema is not installed: make test-deploy")
    schema = Path(package.origin).parent / "builtin_schemas" / "vendor" / "compose-spec.json"
    document = yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))

    errors = jsonschema_rs.validator_for(json.loads(schema.read_text(encoding="utf-8"))).iter_errors(document)

    assert [f"{error.instance_path}: {error.message}" for error in errors] == []


def test_compose_settings_are_settings() -> None:
    """The daemon accepts each service's environment; only the bootstrap has no node to join."""
    joining = {name: config_of(name).swarm.bootstrap for name in NODES}
    port = config_of("bootstrap").node.port

    assert joining == {
        "bootstrap": [],
        "node-1": [f"bootstrap:{port}"],
        "node-2": [f"bootstrap:{port}"],
        "node-3": [f"bootstrap:{port}"],
    }
    assert len({config_of(name).swarm.run for name in NODES}) == 1
    assert all(check(config_of(name)) == [] for name in NODES)


def test_the_swarm_of_compose_is_closed() -> None:
    """Each node has the key that `setup` makes before it starts, and may only read it; nobody else has it but
    Prometheus, for the token beside it."""
    services = compose()["services"]

    for name in NODES:
        assert not config_of(name).swarm.allow_open
        assert config_of(name).swarm.key_file == "/etc/p2pnode/swarm.key"
        assert services[name]["depends_on"] == {"setup": {"condition": "service_completed_successfully"}}
        assert services[name]["volumes"][1] == f"{SECRETS}:ro"
    assert services["setup"]["volumes"] == [SECRETS]
    assert services["setup"]["network_mode"] == "none"
    assert {name for name, service in services.items() if any("secrets:" in mount for mount in service["volumes"])} == {
        *NODES,
        "setup",
        "prometheus",
    }
    assert services["prometheus"]["group_add"] == ["10001"]


def test_setup_makes_what_is_missing_and_keeps_what_is_there(tmp_path: Path) -> None:
    """The script of `setup`, run: a key and a token that the daemon accepts; a second run changes neither."""
    [script] = compose()["services"]["setup"]["command"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # This checkout's `p2pnode`, whichever one is installed.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "p2pnode").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m p2pnode "$@"\n')
    (tmp_path / "bin" / "p2pnode").chmod(0o755)
    folder = tmp_path / "etc"
    folder.mkdir()
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{path}", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    kept = []
    for _ in range(2):
        subprocess.run(
            ["sh", "-euc", script.replace("/etc/p2pnode", str(folder))],
            env=environment,
            check=True,
            capture_output=True,
        )
        kept.append([(folder / name).read_text() for name in ("swarm.key", "status.token")])

    assert kept[0] == kept[1]
    assert len(read_key_file(folder / "swarm.key").fingerprints) == 1
    assert api_token.read(folder / "status.token") == kept[0][1].strip()


def test_status_pages_are_for_this_machine_and_need_the_token() -> None:
    """What is published is published on the loopback; Prometheus asks each node by a name that the node accepts."""
    services = compose()["services"]
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    [job] = scraped["scrape_configs"]

    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert set(published) == {"bootstrap", "prometheus", "grafana"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    for name in NODES:
        status = config_of(name).status
        assert (status.host, status.token_file) == ("0.0.0.0", job["authorization"]["credentials_file"])
        assert f"{name}:{status.port}" in job["static_configs"][0]["targets"]
        assert name in status.names


def test_networks_of_compose() -> None:
    """The swarm's network has no way in or out; what publishes a port is in the other one too."""
    document = compose()

    assert document["networks"] == {"swarm": {"internal": True}, "outside": None}
    for name, service in document["services"].items():
        assert ("outside" in service.get("networks", ())) == ("ports" in service), name


def test_compose_takes_away_what_a_service_does_not_need() -> None:
    """No service has capabilities; a node has a read-only root too, and time to leave."""
    services = compose()["services"]
    for service in services.values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    for name in NODES:
        assert services[name]["read_only"] is True
        assert services[name]["stop_grace_period"] == "180s"


def test_what_compose_mounts_exists() -> None:
    """Each file of this folder that a service mounts is there, and images of others have a full version."""
    for service in compose()["services"].values():
        for mount in service["volumes"]:
            if mount.startswith("./"):
                assert (DEPLOY / mount.partition(":")[0]).is_file(), mount
        assert re.fullmatch(r"p2pnode:cpu|[\w/.]+:v?\d+\.\d+\.\d+", service["image"])


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
        assert (check(config), config.swarm.key_file) == ([], config_of("node-1").swarm.key_file)
        assert isinstance(run_virtual(opened(config.dispatch.store)), EtcdStore)
        assert "//etcd:2379/" in config.dispatch.store
        assert service["volumes"][1] == f"{SECRETS}:ro"
    for name in NODES:
        joined = compose()["services"][name]["environment"] | services[name]["environment"]
        assert load(environment=joined).config.dispatch.source == "master"
    for service in (*masters, services["etcd"]):
        assert service["networks"] == ["swarm"]
        assert "ports" not in service
    assert sorted(service["volumes"][0].partition(":")[0] for service in (*masters, services["etcd"])) == sorted(
        added["volumes"]
    )


# --- kubernetes

OVERLAYS = ("cpu", "gpu")


@functools.cache
def manifests(overlay: str) -> list[dict[str, Any]]:
    """What `kubectl apply -k` of the overlay would send, with a key and a token of the test beside the base."""
    kubectl = tool("kubectl")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(KUBERNETES, folder, dirs_exist_ok=True)
        for name in ("swarm.key", "status.token"):
            (Path(folder) / "base" / name).write_text(f"{name} of a test\n")
        result = run(kubectl, "kustomize", f"{folder}/{overlay}")
    assert result.returncode == 0, result.stderr
    return list(yaml.safe_load_all(result.stdout))


def manifest(overlay: str, kind: str) -> dict[str, Any]:
    [found] = [document for document in manifests(overlay) if document["kind"] == kind]
    return found


def container(overlay: str) -> dict[str, Any]:
    [found] = manifest(overlay, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    return dict(found)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_accepts_the_manifests(overlay: str) -> None:
    """Each manifest fits the API's own schema, with no key that the schema does not know."""
    validator = pytest.importorskip("kubernetes_validate")

    kinds = [document["kind"] for document in manifests(overlay)]
    for document in manifests(overlay):
        validator.validate(document, KUBERNETES_VERSION, strict=True)

    assert sorted(kinds) == ["PodDisruptionBudget", "Secret", "Service", "StatefulSet"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_selected_by_what_they_are_labelled_with(overlay: str) -> None:
    """Service, budget and set select the pods of the template; the set belongs to the service without an address."""
    spec = manifest(overlay, "StatefulSet")["spec"]
    labels = spec["template"]["metadata"]["labels"]

    assert labels
    assert spec["selector"]["matchLabels"] == labels
    assert manifest(overlay, "Service")["spec"]["selector"] == labels
    assert manifest(overlay, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert spec["serviceName"] == manifest(overlay, "Service")["metadata"]["name"]
    assert manifest(overlay, "Service")["spec"]["clusterIP"] == "None"
    assert manifest(overlay, "Service")["spec"]["publishNotReadyAddresses"] is True
    assert manifest(overlay, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_settings_are_settings(overlay: str) -> None:
    """The daemon accepts the environment: a closed swarm that joins through pod 0, at the ports that are declared."""
    spec, node = manifest(overlay, "StatefulSet")["spec"], container(overlay)
    config = load(environment={entry["name"]: entry["value"] for entry in node["env"]}).config
    secret = manifest(overlay, "Secret")

    assert check(config) == []
    assert not config.swarm.allow_open
    assert config.swarm.bootstrap == [f"p2pnode-0.{spec['serviceName']}:{config.node.port}"]
    assert {(port["containerPort"], port["protocol"]) for port in node["ports"]} == {
        (config.node.port, "UDP"),
        (config.node.port, "TCP"),
        (config.status.port, "TCP"),
    }
    folder = {mount["name"]: mount["mountPath"] for mount in node["volumeMounts"]}
    for path in (config.swarm.key_file, config.status.token_file):
        assert Path(path).parent == Path(folder["keys"])
        assert Path(path).name in secret["data"]
    # The image keeps its state directory there.
    assert folder["state"] == yaml.safe_load(instructions("VOLUME")[0])[0]
    assert config.training.device == {"cpu": "cpu", "gpu": "cuda"}[overlay]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_probes_ask_what_needs_no_token(overlay: str) -> None:
    """Restarts depend on /healthz alone; roll-outs on /readyz; the server answers both without a token."""
    node = container(overlay)
    paths = {name: node[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}

    assert paths == {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    assert set(paths.values()) <= OPEN_PATHS
    assert {node[name]["httpGet"]["port"] for name in paths} == {"status"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_well_guarded(overlay: str) -> None:
    """The "restricted" standard of Kubernetes: no root, no capabilities, no writable root; and the image's user."""
    pod = manifest(overlay, "StatefulSet")["spec"]["template"]["spec"]
    user, group = (int(number) for number in instructions("USER")[0].split(":"))

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsGroup"]) == (user, group)
    assert pod["securityContext"]["fsGroup"] == group
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(overlay)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    assert pod["terminationGracePeriodSeconds"] >= int(unit_settings()["TimeoutStopSec"][0])


def test_git_ignores_the_keys_of_kubernetes() -> None:
    """The two files that the Secret is made of cannot be committed by accident."""
    for name in ("swarm.key", "status.token"):
        assert run("git", "check-ignore", "--no-index", f"deploy/kubernetes/base/{name}").returncode == 0


# --- slurm


def test_shellcheck_finds_nothing_in_the_slurm_script() -> None:
    """shellcheck, at its strictest, has no complaint."""
    result = run(tool("shellcheck"), "--severity=style", str(SLURM))

    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize("program", ["", "python train.py --epochs 3"])
def test_slurm_starts_one_node_per_task(tmp_path: Path, program: str) -> None:
    """The script, run with stand-ins for Slurm's programs: every task has its own state directory, and the same key and
    port; it joins through the first machine; the daemon accepts its settings."""
    job = 4_242_424
    stand_in(tmp_path, "scontrol", 'test "$1 $2 $3" = "show hostnames node[1-3]"; printf "node1\\nnode2\\nnode3\\n"')
    stand_in(
        tmp_path,
        "srun",
        'while [ "${1#-}" != "$1" ]; do case $1 in --output) shift;; esac; shift; done\n'
        'for SLURM_PROCID in 0 1 2; do export SLURM_PROCID; "$@"; done',
    )
    stand_in(
        tmp_path,
        "p2pnode",
        f'case $1 in key) exec "{sys.executable}" -m p2pnode "$@";; esac\n'
        f'{{ echo "$@"; env | grep "^P2PNODE_"; }} > {tmp_path}/task-$SLURM_PROCID',
    )
    environment = {
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "PROGRAM": program,
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NODELIST": "node[1-3]",
        "SLURM_CPUS_PER_TASK": "4",
    }

    for _ in range(2):  # a later job with the same folder continues
        result = subprocess.run(["bash", str(SLURM)], env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr

    folders = set()
    for task in range(3):
        command, *lines = (tmp_path / f"task-{task}").read_text().splitlines()
        config = load(environment=dict(line.split("=", 1) for line in lines)).config
        assert command == (f"run -- {program}" if program else "start")
        assert (check(config), config.swarm.bootstrap) == ([], [f"node1:{config.node.port}"])
        assert 20_000 <= config.node.port < 40_000
        assert read_key_file(Path(config.swarm.key_file)).fingerprints
        assert config.training.threads == 4
        folders.add(config.node.state_dir)
    assert folders == {f"{tmp_path}/p2pnode/digits/nodes/{task}" for task in range(3)}


def stand_in(folder: Path, name: str, script: str) -> None:
    """A program of that name that the script finds first."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\nset -eu\n{script}\n")
    path.chmod(0o755)


# --- systemd


@pytest.mark.parametrize("drop_in", [None, *DROP_INS], ids=lambda path: path.stem if path else "alone")
def test_systemd_accepts_the_unit(tmp_path: Path, drop_in: Path | None) -> None:
    """`systemd-analyze verify` knows every key and value, of the unit and of each drop-in."""
    analyze = tool("systemd-analyze")
    folder = tmp_path / "etc" / "systemd" / "system"
    program = tmp_path / "opt" / "p2pnode" / "bin" / "p2pnode"
    folder.mkdir(parents=True)
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    shutil.copy(UNIT, folder)
    if drop_in is not None:
        (folder / "p2pnode.service.d").mkdir()
        shutil.copy(drop_in, folder / "p2pnode.service.d")

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
    assert never == {int(code) for code in LASTING}
    assert never == {2, 4, 5, 7, 11, 12}  # codes never change their meaning
    assert not LASTING & {ExitCode.OK, ExitCode.UNEXPECTED, ExitCode.RESTART, ExitCode.CANNOT_BIND, ExitCode.TRAINER}


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


def test_drop_in_only_opens_devices() -> None:
    """The GPU drop-in gives back /dev and locked memory; no other wall falls."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read_string(DROP_IN.read_text(encoding="utf-8"))

    assert parser.sections() == ["Service"]
    assert set(parser["Service"]) == {"PrivateDevices", "DeviceAllow", "LimitMEMLOCK"}


def test_an_invitation_reaches_the_service() -> None:
    """The drop-in replaces the command by one that reads the invitation as a credential: only root reads the file."""
    settings = service_settings(DROP_INS[1])
    name, _, path = settings["LoadCredential"][0].partition(":")
    cleared, command = settings["ExecStart"]

    assert cleared == ""
    assert command == f"{unit_settings()['ExecStart'][0]} --invite %d/{name}"
    assert path.startswith("/etc/p2pnode/")
    assert set(settings) == {"LoadCredential", "ExecStart"}


def test_a_key_reaches_the_service() -> None:
    """The drop-in of a founder names the credential as the key file, in a variable that is a setting."""
    settings = service_settings(DROP_INS[2])
    name = settings["LoadCredential"][0].partition(":")[0]
    variable, _, value = settings["Environment"][0].partition("=")

    assert value == f"%d/{name}"
    assert load(environment={variable: value}).config.swarm.key_file == value
    assert set(settings) == {"LoadCredential", "Environment"}
