"""Checks combinations of settings: contradictions, and legal combinations that are probably mistakes.

Pure. `check` finds what keeps a node from starting, `warnings_for` what deserves a warning; both depend on the
configuration only. Ranges of single values are in the settings structs.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import NamedTuple

from overlay.addresses import is_literal, is_loopback, split_address
from p2pnode.config.settings import Config
from p2pnode.config.tracker import FORMS, parse_tracker
from p2pnode.config.values import nearest
from training.devices.names import named_devices
from training.goal import Goal

#: Tasks that come with p2pnode; any other is named "package.module:Class".
BUILT_IN_TASKS = ("digits", "mnist", "text")
#: Above this momentum, deltas that are added without a barrier make training diverge.
MAX_ASYNCHRONOUS_MOMENTUM = 0.5

_STORE = re.compile(r"sqlite(:.+)?|etcds?://.+")
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class ConfigProblem(NamedTuple):
    """What is wrong, with the keys' names, and what to do about it."""

    what: str
    do: str

    def __str__(self) -> str:
        return f"{self.what}: {self.do}"


def check(config: Config) -> list[ConfigProblem]:
    """Everything that keeps a node from starting with this configuration; empty if there is nothing."""
    return [
        *_network(config),
        *_bootstrap(config),
        *_training(config),
        *_devices(config),
        *_barrier(config),
        *_dispatch(config),
    ]


def check_start(config: Config) -> list[ConfigProblem]:
    """What besides keeps a node from starting; commands that only read the configuration need not mind it."""
    hosts = [split_address(entry)[0] for entry in config.swarm.bootstrap]
    remote = [host for host in hosts if is_literal(host) and not is_loopback(host)]
    if not remote or len(remote) < len(hosts) or not is_loopback(config.node.host):
        return []
    return [
        ConfigProblem(
            f"node.host = {config.node.host} listens on this machine only, and the swarm is at "
            f"{', '.join(config.swarm.bootstrap)}",
            'set node.host = "0.0.0.0" (--set node.host=0.0.0.0), or one of this machine\'s own addresses',
        )
    ]


def warnings_for(config: Config) -> list[ConfigProblem]:
    """Settings that work but are probably mistakes; shown as warnings and under `health`."""
    found = []
    momentum = config.exchange.outer_momentum
    if config.barrier.method != "bsp" and momentum > MAX_ASYNCHRONOUS_MOMENTUM:
        found.append(
            ConfigProblem(
                f"exchange.outer_momentum = {momentum} with barrier.method = {config.barrier.method} may diverge",
                f"use at most {MAX_ASYNCHRONOUS_MOMENTUM}, or bsp, or plain SGD in the task",
            )
        )
    if config.exchange.weight == "sum" and momentum > 0:
        found.append(
            ConfigProblem(
                f"exchange.weight = sum with outer_momentum = {momentum} grows with the number of nodes",
                "set exchange.outer_momentum = 0 and outer_lr = 1 for the original algorithm",
            )
        )
    if not config.exchange.enabled:
        found.append(
            ConfigProblem("exchange.enabled = false: this node trains alone", "set it true to share the model")
        )
    if config.swarm.allow_open and not config.swarm.key_file and not is_loopback(config.node.host):
        found.append(
            ConfigProblem(
                f"anyone who can reach {config.node.host}:{config.node.port} can join this swarm",
                "create a swarm key with `p2pnode key new`, or restrict access by a firewall or a private network",
            )
        )
    if not is_loopback(config.status.host):
        found.append(
            ConfigProblem(
                f"status.host = {config.status.host}: the API's token and answers cross the network unencrypted",
                "put a TLS proxy in front, or listen on 127.0.0.1 and use a tunnel (ssh -L)",
            )
        )
    if config.barrier.custom and config.barrier.method != "custom":
        found.append(ConfigProblem("barrier.custom is set but not used", 'set barrier.method = "custom", or remove it'))
    return found


def warnings_for_script(config: Config, origins: Mapping[str, str]) -> list[ConfigProblem]:
    """Settings that were given, and have no effect under `p2pnode run`. `origins` has the keys that are no default."""
    found = []
    if "training.task" in origins:
        found.append(
            ConfigProblem(
                f'training.task = "{config.training.task}" is ignored by `p2pnode run`, which trains your own program',
                "leave it out, or use `p2pnode start`",
            )
        )
    if "training.eval_steps" in origins:
        found.append(
            ConfigProblem(
                f"training.eval_steps = {config.training.eval_steps} has no effect under `p2pnode run`: your program "
                "decides when it evaluates",
                "call swarm.evaluate(accuracy=…) in it when you like",
            )
        )
    return found


def _network(config: Config) -> list[ConfigProblem]:
    found = []
    node, status = config.node, config.status
    if not is_literal(node.host):
        found.append(
            ConfigProblem(
                f'node.host = "{node.host}" is not an IP address',
                'give the address to listen on, such as "127.0.0.1" or "0.0.0.0"; names are for swarm.bootstrap',
            )
        )
    elif not is_loopback(node.host) and not config.swarm.allow_open and not config.swarm.key_file:
        found.append(
            ConfigProblem(
                f"node.host = {node.host} listens beyond this machine, but this node has no swarm key",
                "create one with `p2pnode key new` or join with --invite; or set swarm.allow_open = true if anyone who "
                "can reach the port may join",
            )
        )
    if node.advertise and (not is_literal(node.advertise) or ipaddress.ip_address(node.advertise).is_unspecified):
        found.append(
            ConfigProblem(
                f'node.advertise = "{node.advertise}" is not an address that others can dial',
                "give the IP address at which other nodes reach this one, or leave it empty",
            )
        )
    if node.nat == "auto" and is_loopback(node.host):
        found.append(
            ConfigProblem(
                f'node.nat = "auto" with node.host = {node.host}: a node on the loopback needs no port',
                'set node.host = "0.0.0.0", or node.nat = "off"',
            )
        )
    if node.nat == "auto" and (node.advertise or node.client_only):
        other = "node.client_only" if node.client_only else "node.advertise"
        found.append(
            ConfigProblem(
                f'node.nat = "auto" and {other} contradict each other',
                "either ask the router for an address, or set how others reach this node, not both",
            )
        )
    if not is_literal(status.host) and status.host != "localhost":
        found.append(
            ConfigProblem(
                f'status.host = "{status.host}" is not an IP address',
                'give the address to listen on, such as "127.0.0.1"; host names go to status.names',
            )
        )
    if node.port and node.port == status.port:
        found.append(
            ConfigProblem(
                f"node.port and status.port are both {node.port}",
                "give them different ports; 0 takes a free one",
            )
        )
    return found


def _bootstrap(config: Config) -> list[ConfigProblem]:
    found = []
    for entry in config.swarm.bootstrap:
        try:
            split_address(entry)
        except ValueError as error:
            found.append(
                ConfigProblem(
                    f"swarm.bootstrap: {error}",
                    'write "host:port", such as "10.0.0.5:8468", "node1.example:8468" or "[2001:db8::1]:8468"',
                )
            )
    if not config.swarm.run.isprintable() or config.swarm.run != config.swarm.run.strip():
        found.append(
            ConfigProblem(
                "swarm.run has control characters or spaces at its ends",
                "name the run with letters, digits, '-' and '_'",
            )
        )
    return found


def _training(config: Config) -> list[ConfigProblem]:
    found = []
    training = config.training
    if training.task not in BUILT_IN_TASKS and not _IMPORT_PATH.fullmatch(training.task):
        close = nearest(training.task, list(BUILT_IN_TASKS))
        found.append(
            ConfigProblem(
                f'training.task = "{training.task}" is not a task',
                (f"did you mean {close}? " if close else "")
                + f'name one of {", ".join(BUILT_IN_TASKS)}, or your own as "package.module:Class"',
            )
        )
    try:
        goal = Goal.parse(training.until)
    except ValueError:
        goal = None
        found.append(
            ConfigProblem(
                f'training.until = "{training.until}" is not of the form "metric>=number"',
                'write for example "accuracy>=0.95" or "loss<=0.1"',
            )
        )
    if goal is not None and not training.eval_steps:
        found.append(
            ConfigProblem(
                "training.until needs evaluations, but training.eval_steps = 0 disables them",
                "set training.eval_steps, to 10 for example, or leave until empty; under `p2pnode run` leave "
                "eval_steps as it is and call swarm.evaluate",
            )
        )
    if training.export and not training.export.endswith((".safetensors", ".pt", ".pth")):
        found.append(
            ConfigProblem(
                f'training.export = "{training.export}" does not end in a known format',
                "end it in .safetensors or .pt",
            )
        )
    try:
        parse_tracker(training.tracker)
    except ValueError as error:
        found.append(ConfigProblem(f'training.tracker = "{training.tracker}": {error}', f"write {FORMS}"))
    liveness = config.liveness
    if liveness.probe_timeout_s > liveness.probe_interval_s:
        found.append(
            ConfigProblem(
                f"liveness.probe_timeout_s = {liveness.probe_timeout_s} is longer than "
                f"probe_interval_s = {liveness.probe_interval_s}",
                "a probe must end before the next one begins: make the interval longer or the timeout shorter",
            )
        )
    return found


def _devices(config: Config) -> list[ConfigProblem]:
    found, training, period = [], config.training, config.devices.period
    try:
        if len(named_devices(training.devices)) > 1 and config.dispatch.source == "master":
            found.append(
                ConfigProblem(
                    'training.devices names several devices and dispatch.source = "master"',
                    "a master dispatches tasks to nodes with one trainer: start a node per device, or set "
                    'dispatch.source = "shared"',
                )
            )
    except ValueError as error:
        found.append(
            ConfigProblem(
                f"training.devices: {error}",
                'write ["cuda:0", "cuda:1"], "cpu*4" for four trainers on the processor, or "auto"; leave it out for '
                "one trainer",
            )
        )
    if config.devices.merge == "collective" and config.devices.step == "leader":
        found.append(
            ConfigProblem(
                'devices.merge = "collective" and devices.step = "leader" do not go together',
                'leader steps are made in shared memory: leave devices.merge out, or use devices.step = "average"',
            )
        )
    if period and training.local_steps % period:
        found.append(
            ConfigProblem(
                f"devices.period = {period} does not divide training.local_steps = {training.local_steps}",
                "a step of the swarm has whole periods: change one of the two, or set devices.period = 0",
            )
        )
    return found


def _barrier(config: Config) -> list[ConfigProblem]:
    barrier = config.barrier
    if barrier.method == "custom" and not _IMPORT_PATH.fullmatch(barrier.custom):
        return [
            ConfigProblem(
                f'barrier.method = "custom" needs a function, and barrier.custom is "{barrier.custom}"',
                'set barrier.custom = "package.module:function"',
            )
        ]
    return []


def _dispatch(config: Config) -> list[ConfigProblem]:
    found = []
    dispatch = config.dispatch
    if dispatch.source != "local" and not dispatch.records and config.node.role != "master":
        found.append(
            ConfigProblem(
                f'dispatch.source = "{dispatch.source}" and dispatch.records names no file',
                'set dispatch.records = ["train-*.recordio"], or dispatch.source = "local"',
            )
        )
    if dispatch.lease_floor_s > dispatch.lease_ceiling_s:
        found.append(
            ConfigProblem(
                f"dispatch.lease_floor_s = {dispatch.lease_floor_s} is longer than "
                f"lease_ceiling_s = {dispatch.lease_ceiling_s}",
                "make the ceiling the longer one",
            )
        )
    if not _STORE.fullmatch(dispatch.store):
        found.append(
            ConfigProblem(
                f'dispatch.store = "{dispatch.store}" is no store',
                'write "sqlite", "sqlite:PATH" or "etcd://host:2379,host:2379/prefix"',
            )
        )
    return found
