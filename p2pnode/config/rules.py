"""Rules about combinations of settings: contradictions, and legal combinations that are probably mistakes.

Pure. `check` finds what keeps a node from starting, `warnings_for` what deserves a warning; both depend on the
configuration only. Ranges of single values are in the settings structs.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple, get_args

import msgspec

from p2pnode.config.settings import Config
from p2pnode.config.tracker import FORMS, parse_tracker
from p2pnode.config.values import nearest
from p2pnode.overlay.addresses import is_literal, is_loopback, split_address
from p2pnode.training.devices.gpus import named_devices
from p2pnode.training.encoding.table import CODECS
from p2pnode.training.goal import Goal
from p2pnode.training.settings import BarrierMethod, ExchangeSettings

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


class Rule(NamedTuple):
    """A rule that a configuration breaks where `broken` returns something. The texts name settings as
    `{section.key}`, and what `broken` returned as `{found}`."""

    broken: Callable[[Config], object]
    what: str
    do: str


def _unused_outer_rule(config: Config) -> str:
    """Sparse deltas have a rate of their own, but those of a weighted sum."""
    exchange, usual = config.exchange, ExchangeSettings()
    is_sparse = exchange.codec == "auto" or CODECS[exchange.codec].is_partial
    if config.barrier.method == "bsp" or exchange.weight == "sum" or not is_sparse:
        return ""
    return " and ".join(
        name for name in ("outer_lr", "outer_momentum") if getattr(exchange, name) != getattr(usual, name)
    )


def check(config: Config) -> list[ConfigProblem]:
    """Everything that keeps a node from starting with this configuration; empty if there is nothing."""
    return _problems(RULES, config)


def check_start(config: Config) -> list[ConfigProblem]:
    """What besides keeps a node from starting; commands that only read the configuration need not mind it."""
    return _problems(START_RULES, config)


def warnings_for(config: Config) -> list[ConfigProblem]:
    """Settings that work but are probably mistakes; shown as warnings and under `health`."""
    return _problems(WARNINGS, config)


def warnings_for_script(config: Config, given: Container[str]) -> list[ConfigProblem]:
    """Settings that were given, and have no effect under `p2pnode run`. `given` has the keys that are no default."""
    return _problems([rule for key, rule in SCRIPT_WARNINGS.items() if key in given], config)


def _problems(rules: Iterable[Rule], config: Config) -> list[ConfigProblem]:
    sections = msgspec.structs.asdict(config)
    return [
        ConfigProblem(rule.what.format(found=found, **sections), rule.do.format(found=found, **sections))
        for rule in rules
        if (found := rule.broken(config))
    ]


def _error(parse: Callable[[Any], object], *values: object) -> str:
    """What `parse` says against the values; empty where it takes all."""
    said = []
    for value in values:
        try:
            parse(value)
        except ValueError as error:
            said.append(str(error))
    return "; ".join(said)


def _elsewhere(config: Config) -> str:
    """The addresses of the swarm, if all of them are of other machines and this node listens on the loopback."""
    hosts = [split_address(entry)[0] for entry in config.swarm.bootstrap]
    remote = [host for host in hosts if is_literal(host) and not is_loopback(host)]
    unreached = remote and len(remote) == len(hosts) and is_loopback(config.node.host)
    return ", ".join(config.swarm.bootstrap) if unreached else ""


def _meant(name: str, known: tuple[str, ...]) -> str:
    """Which of the known names to write, if `name` is neither one of them nor the path of the user's own."""
    if name in known or _IMPORT_PATH.fullmatch(name):
        return ""
    close = nearest(name, list(known))
    return (f"did you mean {close}? " if close else "") + f"name one of {', '.join(known)}"


RULES = (
    Rule(
        lambda c: not is_literal(c.node.host),
        'node.host = "{node.host}" is not an IP address',
        'give the address to listen on, such as "127.0.0.1" or "0.0.0.0"; names are for swarm.bootstrap',
    ),
    Rule(
        lambda c: (
            is_literal(c.node.host) and not is_loopback(c.node.host) and not (c.swarm.allow_open or c.swarm.key_file)
        ),
        "node.host = {node.host} listens beyond this machine, but this node has no swarm key",
        "create one with `p2pnode key new` or join with --invite; or set swarm.allow_open = true if anyone who can "
        "reach the port may join",
    ),
    Rule(
        lambda c: (
            (advertised := c.node.advertise)
            and (not is_literal(advertised) or ipaddress.ip_address(advertised).is_unspecified)
        ),
        'node.advertise = "{node.advertise}" is not an address that others can dial',
        "give the IP address at which other nodes reach this one, or leave it empty",
    ),
    Rule(
        lambda c: c.node.nat == "auto" and is_loopback(c.node.host),
        'node.nat = "auto" with node.host = {node.host}: a node on the loopback needs no port',
        'set node.host = "0.0.0.0", or node.nat = "off"',
    ),
    Rule(
        lambda c: (
            c.node.nat == "auto" and ("client_only" if c.node.client_only else "advertise" if c.node.advertise else "")
        ),
        'node.nat = "auto" and node.{found} contradict each other',
        "either ask the router for an address, or set how others reach this node, not both",
    ),
    Rule(
        lambda c: not is_literal(c.status.host) and c.status.host != "localhost",
        'status.host = "{status.host}" is not an IP address',
        'give the address to listen on, such as "127.0.0.1"; host names go to status.names',
    ),
    Rule(
        lambda c: c.node.port and c.node.port == c.status.port,
        "node.port and status.port are both {node.port}",
        "give them different ports; 0 takes a free one",
    ),
    Rule(
        lambda c: _error(split_address, *c.swarm.bootstrap),
        "swarm.bootstrap: {found}",
        'write "host:port", such as "10.0.0.5:8468", "node1.example:8468" or "[2001:db8::1]:8468"',
    ),
    Rule(
        lambda c: not c.swarm.run.isprintable() or c.swarm.run != c.swarm.run.strip(),
        "swarm.run has control characters or spaces at its ends",
        "name the run with letters, digits, '-' and '_'",
    ),
    Rule(
        lambda c: _meant(c.training.task, BUILT_IN_TASKS),
        'training.task = "{training.task}" is not a task',
        '{found}, or your own as "package.module:Class"',
    ),
    Rule(
        lambda c: _error(Goal.parse, c.training.until),
        'training.until = "{training.until}" is not of the form "metric>=number"',
        'write for example "accuracy>=0.95" or "loss<=0.1"',
    ),
    Rule(
        lambda c: c.training.until.strip() and not c.training.eval_steps,
        "training.until needs evaluations, but training.eval_steps = 0 disables them",
        "set training.eval_steps, to 10 for example, or leave until empty; under `p2pnode run` leave eval_steps as it "
        "is and call swarm.evaluate",
    ),
    Rule(
        lambda c: c.training.export and not c.training.export.endswith((".safetensors", ".pt", ".pth")),
        'training.export = "{training.export}" does not end in a known format',
        "end it in .safetensors or .pt",
    ),
    Rule(
        lambda c: _error(parse_tracker, c.training.tracker),
        'training.tracker = "{training.tracker}": {found}',
        f"write {FORMS}",
    ),
    Rule(
        lambda c: _error(named_devices, c.training.device),
        "training.device: {found}",
        'write "cuda:1", ["cuda:0", "cuda:1"], "cpu*4" for four trainers on the processor, or "all"; leave it out for '
        "one trainer",
    ),
    Rule(
        lambda c: (
            c.dispatch.source == "master"
            and not _error(named_devices, c.training.device)
            and len(named_devices(c.training.device)) > 1
        ),
        'training.device names several devices and dispatch.source = "master"',
        "a master dispatches tasks to nodes with one trainer: start a node per device, or set "
        'dispatch.source = "shared"',
    ),
    Rule(
        lambda c: c.devices.period and c.training.local_steps % c.devices.period,
        "devices.period = {devices.period} does not divide training.local_steps = {training.local_steps}",
        "a step of the swarm has whole periods: change one of the two, or set devices.period = 0",
    ),
    Rule(
        lambda c: _meant(c.barrier.method, get_args(BarrierMethod)),
        'barrier.method = "{barrier.method}" is not a barrier',
        '{found}, or your own as "package.module:function"',
    ),
    Rule(
        lambda c: c.dispatch.source != "local" and not c.dispatch.records and c.node.role != "master",
        'dispatch.source = "{dispatch.source}" and dispatch.records names no file',
        'set dispatch.records = ["train-*.recordio"], or dispatch.source = "local"',
    ),
    Rule(
        lambda c: not _STORE.fullmatch(c.dispatch.store),
        'dispatch.store = "{dispatch.store}" is no store',
        'write "sqlite", "sqlite:PATH" or "etcd://host:2379,host:2379/prefix"',
    ),
)

START_RULES = (
    Rule(
        _elsewhere,
        "node.host = {node.host} listens on this machine only, and the swarm is at {found}",
        'set node.host = "0.0.0.0" (--set node.host=0.0.0.0), or one of this machine\'s own addresses',
    ),
)

WARNINGS = (
    Rule(
        _unused_outer_rule,
        'nothing uses exchange.{found} with exchange.codec = "{exchange.codec}": the nodes measure the rate',
        'leave it out, or set a codec of all values, such as exchange.codec = "bfloat16"',
    ),
    Rule(
        lambda c: (
            c.barrier.method != "bsp"
            and c.exchange.outer_momentum > MAX_ASYNCHRONOUS_MOMENTUM
            and not _unused_outer_rule(c)
        ),
        "exchange.outer_momentum = {exchange.outer_momentum} with barrier.method = {barrier.method} may diverge",
        f"use at most {MAX_ASYNCHRONOUS_MOMENTUM}, or bsp, or plain SGD in the task",
    ),
    Rule(
        lambda c: c.exchange.weight == "sum" and c.exchange.outer_momentum > 0,
        "exchange.weight = sum with outer_momentum = {exchange.outer_momentum} grows with the number of nodes",
        "set exchange.outer_momentum = 0 and outer_lr = 1 for the original algorithm",
    ),
    Rule(
        lambda c: c.swarm.allow_open and not (c.swarm.key_file or is_loopback(c.node.host)),
        "anyone who can reach {node.host}:{node.port} can join this swarm",
        "create a swarm key with `p2pnode key new`, or restrict access by a firewall or a private network",
    ),
    Rule(
        lambda c: not is_loopback(c.status.host),
        "status.host = {status.host}: the API's token and answers cross the network unencrypted",
        "put a TLS proxy in front, or listen on 127.0.0.1 and use a tunnel (ssh -L)",
    ),
)

#: By the key of the setting.
SCRIPT_WARNINGS = {
    "training.task": Rule(
        lambda _: True,
        'training.task = "{training.task}" is ignored by `p2pnode run`, which trains your own program',
        "leave it out, or use `p2pnode start`",
    ),
    "training.eval_steps": Rule(
        lambda _: True,
        "training.eval_steps = {training.eval_steps} has no effect under `p2pnode run`: your program decides when it "
        "evaluates",
        "call swarm.evaluate(accuracy=…) in it when you like",
    ),
}
