"""A daemon behind a real NAT, in network namespaces: two nodes outside, a router that masquerades, and one inside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pnode.client import NodeClient, find
from p2pnode.errors import UserError
from p2pnode.overlay.sealing.swarm_key import SwarmKey
from tests.harness.project.repository import ROOT
from tests.process.harness.namespaces import command, inside, missing, namespaces
from tests.process.harness.swarm_world import ANSWER_S, whole_entries
from tests.process.test_swarm_process import START_S, until
from tests.process.test_swarm_process import Daemon as LoopbackDaemon

PORT = 8468
FIRST, SECOND, ROUTER, HIDDEN = "10.77.0.2", "10.77.0.3", "10.77.0.9", "192.168.77.2"


class Daemon(LoopbackDaemon):
    """A daemon in a namespace, a member by the key in its environment."""

    def __init__(self, folder: Path, name: str, namespace: str, host: str, key: SwarmKey) -> None:
        self.namespace = namespace
        self.state_dir = folder / name
        self.log = folder / f"{name}.log"
        line = ["start", "--port", str(PORT), "--status-port", "0", "--state-dir", str(self.state_dir)]
        line += ["--bootstrap", f"{FIRST}:{PORT}"] if host != FIRST else []
        for setting in (f"node.host={host}", "training.threads=1", "training.local_steps=50", "log.format=json"):
            line += ["--set", setting]
        self._output = self.log.open("ab")
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, "-m", "p2pnode", *line],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "P2PNODE_SWARM_KEY": key.text},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _ask(self, what: str) -> Any:
        def ask() -> Any:
            found = find(self.state_dir)
            return getattr(NodeClient(found.address, timeout_s=ANSWER_S), what)() if found is not None else None

        try:
            return inside(self.namespace, ask)
        except UserError:
            return None

    def status(self) -> dict[str, Any]:
        return self._ask("status") or {}

    def peers(self) -> dict[str, dict[str, Any]]:
        return {peer["id"]: peer for peer in self._ask("peers") or ()}

    def events(self, name: str) -> list[dict[str, Any]]:
        return [entry for entry in whole_entries(self.log.read_text()) if entry.get("event") == name]


def ports(router: str, low: int, high: int) -> None:
    """Let the router choose the ports it gives from these. Existing mappings stay until its line was down."""
    rules = f"""
table ip p2pnode
delete table ip p2pnode
table ip p2pnode {{
  chain out {{
    type nat hook postrouting priority srcnat;
    oifname "wan" ip protocol udp masquerade to :{low}-{high} random
    oifname "wan" masquerade
  }}
  chain in {{
    type filter hook input priority filter;
    iifname "wan" ct state new drop
  }}
}}
"""
    command("ip", "netns", "exec", router, "nft", "-f", "-", given=rules)


@pytest.fixture
def net() -> Iterator[tuple[str, str, str]]:
    """(outside, router, inside)."""
    why = missing("nft")
    if why:
        pytest.skip(f"a NAT in network namespaces: {why}")
    with namespaces("out", "nat", "in") as (outside, router, within):
        for left, right, name in ((outside, router, "wan"), (within, router, "lan")):
            command("ip", "-n", left, "link", "add", "up0", "type", "veth", "peer", "name", name, "netns", right)
            command("ip", "-n", left, "link", "set", "up0", "up")
            command("ip", "-n", right, "link", "set", name, "up")
        for host in (FIRST, SECOND):
            command("ip", "-n", outside, "address", "add", f"{host}/24", "dev", "up0")
        command("ip", "-n", router, "address", "add", f"{ROUTER}/24", "dev", "wan")
        command("ip", "-n", router, "address", "add", "192.168.77.1/24", "dev", "lan")
        command("ip", "-n", within, "address", "add", f"{HIDDEN}/24", "dev", "up0")
        command("ip", "-n", within, "route", "add", "default", "via", "192.168.77.1")
        command("ip", "netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        try:
            ports(router, 40000, 40999)
        except OSError as error:
            pytest.skip(f"a NAT in network namespaces: {error}")
        yield outside, router, within


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_daemon_behind_a_nat(net: tuple[str, str, str], tmp_path: Path) -> None:
    """It joins, is found unreachable and names the three things to do, trains and owns nothing; its steps are known
    outside. When its router gives it another port, it continues, and no node declared it dead."""
    outside, router, within = net
    key = SwarmKey(os.urandom(32))
    first = Daemon(tmp_path, "first", outside, FIRST, key)
    daemons = [first]
    try:
        until(lambda: first.trains, START_S, "the founder trains")
        second = Daemon(tmp_path, "second", outside, SECOND, key)
        hidden = Daemon(tmp_path, "hidden", within, HIDDEN, key)
        daemons += [second, hidden]
        until(lambda: second.trains and hidden.trains, START_S, "all train")
        until(lambda: any("cannot be reached" in one["what"] for one in hidden.status()["health"]), 90, "it knows")
        status = hidden.status()
        own_id = status["node"]["id"]
        [finding] = [one for one in status["health"] if "cannot be reached" in one["what"]]
        print(finding)
        assert f"your port {PORT} cannot be reached from outside" in finding["what"]
        assert all(f"({number})" in finding["do"] for number in (1, 2, 3))
        for node in (first, second):
            until(lambda at=node: own_id in at.peers(), 90, "it is known outside")
            host, _, port = node.peers()[own_id]["address"].rpartition(":")
            assert host == ROUTER
            assert 40000 <= int(port) <= 40999
        step = hidden.step
        until(lambda: hidden.step >= step + 5, 90, "it trains on")
        until(lambda: second.peers()[own_id]["step"] >= step + 3, 90, "and is seen to")
        status = hidden.status()
        assert not status["node"]["eligible"]
        assert status["exchange"]["shards_owned"] == status["exchange"]["shards_backed"] == 0
        assert status["exchange"]["refused"] == 0
        until(
            lambda: first.status()["exchange"]["shards_owned"] + second.status()["exchange"]["shards_owned"] > 0,
            90,
            "they own shards",
        )

        ports(router, 50000, 50999)
        command("ip", "-n", router, "link", "set", "wan", "down")  # the kernel forgets what it masqueraded there
        command("ip", "-n", router, "link", "set", "wan", "up")

        def moved() -> bool:
            found = [node.peers().get(own_id) for node in (first, second)]
            return all(peer is not None and ":50" in peer["address"] for peer in found)

        took_s = until(moved, 90, "it is found at its new ports")
        print(f"found at its new ports within {took_s:.1f} s")
        step = hidden.step
        until(lambda: hidden.step >= step + 5, 90, "it trains on")
        until(lambda: second.peers()[own_id]["step"] >= step + 3, 90, "and is seen to")
        for node in daemons:
            assert not node.events("peer_dead")
    finally:
        for node in daemons:
            node.end()
            print(f"--- {node.log.name}, its end:\n{node.log.read_text()[-2500:]}")
