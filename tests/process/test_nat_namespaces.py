"""A daemon behind a real NAT, in network namespaces: two nodes outside, a router that masquerades, and one inside."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pnode.overlay.sealing.swarm_key import SwarmKey
from tests.process.harness.lan_world import LanNode, Machine, NotPermitted, attempt, run
from tests.process.harness.swarm_world import SHORT_STEPS, START_S, TRAINER, until

PORT = 8468
FIRST, SECOND, ROUTER, HIDDEN = "10.77.0.2", "10.77.0.3", "10.77.0.9", "192.168.77.2"


class Daemon(LanNode):
    """A daemon in a namespace, a member by the key in its environment."""

    def __init__(self, folder: Path, name: str, namespace: str, host: str, key: SwarmKey) -> None:
        super().__init__(
            folder,
            name,
            {**SHORT_STEPS, "node.port": PORT, "log.format": "json"},
            machine=Machine(namespace, host),
            script=TRAINER,
            bootstrap=f"{FIRST}:{PORT}" if host != FIRST else "",
            environment={"P2PNODE_SWARM_KEY": key.text},
        )

    def peers(self) -> dict[str, dict[str, Any]]:
        client = self.client()
        assert client is not None
        return {peer["id"]: peer for peer in self.machine.inside(client.peers)}


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
    run("ip", "netns", "exec", router, "nft", "-f", "-", given=rules)


@pytest.fixture
def net() -> Iterator[tuple[str, str, str]]:
    """(outside, router, inside)."""
    names = outside, router, within = [f"p2pt{os.getpid()}-{name}" for name in ("out", "nat", "in")]
    try:
        for name in names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        for left, right, name in ((outside, router, "wan"), (within, router, "lan")):
            run("ip", "-n", left, "link", "add", "up0", "type", "veth", "peer", "name", name, "netns", right)
            run("ip", "-n", left, "link", "set", "up0", "up")
            run("ip", "-n", right, "link", "set", name, "up")
        for host in (FIRST, SECOND):
            run("ip", "-n", outside, "address", "add", f"{host}/24", "dev", "up0")
        run("ip", "-n", router, "address", "add", f"{ROUTER}/24", "dev", "wan")
        run("ip", "-n", router, "address", "add", "192.168.77.1/24", "dev", "lan")
        run("ip", "-n", within, "address", "add", f"{HIDDEN}/24", "dev", "up0")
        run("ip", "-n", within, "route", "add", "default", "via", "192.168.77.1")
        run("ip", "netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        ports(router, 40000, 40999)
        yield outside, router, within
    except NotPermitted as error:
        pytest.skip(f"a NAT in network namespaces: {error}")
    finally:
        for name in names:
            attempt("ip", "netns", "delete", name)


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
        run("ip", "-n", router, "link", "set", "wan", "down")  # the kernel forgets what it masqueraded there
        run("ip", "-n", router, "link", "set", "wan", "up")

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
            node.kill()
            print(f"--- {node.name}, its end:\n{node.output()[-2500:]}")
