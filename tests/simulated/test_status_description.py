"""The published description of the HTTP API, compared with the real answers of a node in every state.

The answers of `p2pnode.status.report` for nodes on the simulated network are validated against the OpenAPI schemas. The
schemas must describe every key: an answer with a key that `p2pnode.status.openapi` lacks fails here.
"""

from __future__ import annotations

import asyncio
import functools
import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from p2pnode.status.events import EventRing
from p2pnode.status.live import History
from p2pnode.status.openapi import SCHEMAS, description
from p2pnode.status.prometheus import render
from p2pnode.status.report import LoopDelay, StatusReport
from p2pnode.status.schema import Status, Update
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.project import exposition
from tests.harness.swarms.swarm import Host, Swarm
from tests.harness.trainers.stub_trainer import StubTrainer, exponential

SEED = 41


@functools.cache
def validator(name: str) -> jsonschema_rs.Draft202012Validator:
    document = description() | {"$ref": f"#/components/schemas/{name}"}
    return jsonschema_rs.Draft202012Validator(document)


def undescribed(value: Any, schema: dict[str, Any], place: str) -> Iterator[str]:
    """Keys of a value that its schema neither names nor allows under any name."""
    schema = next((one for one in schema.get("anyOf", ()) if one != {"type": "null"}), schema)
    schema = SCHEMAS[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if isinstance(value, dict):
        other = schema.get("additionalProperties")
        for key, entry in value.items():
            known = schema.get("properties", {}).get(key, other)
            if known is None:
                yield f"{place}.{key}"
            elif known is not True:
                yield from undescribed(entry, known, f"{place}.{key}")
    elif isinstance(value, list):
        for entry in value:
            yield from undescribed(entry, schema["items"], f"{place}[]")


def checked(name: str, value: Any) -> list[str]:
    """What does not fit, as sentences."""
    plain = json.loads(msgspec.json.encode(value, enc_hook=str))
    wrong = [f"{name}{error.instance_path}: {error.message}" for error in validator(name).iter_errors(plain)]
    return wrong + list(undescribed(plain, SCHEMAS[name], name))


def reported(swarm: Swarm, host: Host) -> StatusReport:
    return StatusReport(host.living, EventRing(), LoopDelay(swarm.clock))


def complaints(report: StatusReport, status: Status) -> list[str]:
    peers = report.peers()
    sample = History().look(1.0, status, report.steps(5))
    # It has the status and every peer in it, each with its own schema.
    update = Update(schema=1, time=1.0, status=status, peers=peers, peers_known=len(peers), sample=sample)
    found = checked("Update", update)
    # A row is added every second or so and looked at twice a second, so each is among the newest once.
    for step in report.steps(4):
        found += checked("StepRow", step)
    return found


def phases(page: str) -> dict[str, float]:
    return {
        sample.labels["phase"]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "p2pnode_phase_seconds_total"
    }


@pytest.mark.promise(19)
def test_every_answer_of_a_running_swarm_fits_its_description() -> None:
    """From joining to leaving, with a waiting barrier, a hung trainer and an unreachable node, every answer fits its
    schema. The metrics page of each state keeps Prometheus' rules, and promtool accepts it where there is one."""
    print(f"seed {SEED}")
    states: dict[str, None] = {}
    problems: dict[str, None] = {}
    pages: list[str] = []

    async def scenario() -> None:
        swarm = Swarm(
            seed=SEED,
            settings={
                "training.min_nodes": 3,
                "training.eval_steps": 2,
                "barrier.method": "ssp",
                "barrier.staleness": 1,
            },
            make_trainer=lambda name: StubTrainer(name, step_s=exponential(1.0), start_s=0.3, hang_s=2.0),
        )

        def look() -> None:
            for host in swarm.running():
                report = reported(swarm, host)
                status = report.status()
                if status.state not in states:
                    pages.append(render(report.metrics()))
                states.setdefault(status.state)
                problems.update(dict.fromkeys(complaints(report, status)))

        async def watch(seconds: float, every_s: float = 0.5) -> None:
            until = swarm.clock.monotonic() + seconds
            while swarm.clock.monotonic() < until:
                look()
                await asyncio.sleep(every_s)

        try:
            swarm.start("n0")
            await watch(1.0)
            swarm.start("n1", bootstrap="n0")
            swarm.start("n2", bootstrap="n0", node__client_only=True)
            swarm.network.unreachable(swarm.hosts["n1"].address)
            await watch(15.0)
            swarm.hosts["n1"].trainer.hang()
            await watch(8.0)
            swarm.hosts["n1"].trainer.resume()
            swarm.hosts["n0"].living.pause()
            await watch(4.0)
            pages.append(render(reported(swarm, swarm.hosts["n0"]).metrics()))
            swarm.hosts["n2"].living.leave()
            await watch(2.0, 0.05)
        finally:
            await swarm.stop()

    VirtualLoop().run(scenario(), limit_s=600)

    assert not problems, "\n".join(problems)
    assert {"joining", "waiting_for_nodes", "training", "waiting", "stalled", "paused", "leaving"} <= set(states)
    assert [complaint for page in pages for complaint in exposition.complaints(page)] == []
    last = next(page for page in reversed(pages) if 'p2pnode_state{state="paused"} 1' in page)
    names = {family.name for page in pages for family in text_string_to_metric_families(page)}
    values = {sample.name: sample.value for family in text_string_to_metric_families(last) for sample in family.samples}
    assert values["p2pnode_deltas_merged_total"] > 0
    assert values["p2pnode_ready"] == 1
    assert sum(count for phase, count in phases(last).items() if phase in ("train", "idle", "wait")) > 3.0
    if (promtool := shutil.which("promtool")) is not None:
        result = subprocess.run([promtool, "check", "metrics"], input=last, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stdout + result.stderr) == (0, "")
    assert {
        "p2pnode_step",
        "p2pnode_phase_seconds",
        "p2pnode_ready",
        "p2pnode_health_findings",
        "p2pnode_deltas_merged",
        "p2pnode_nodes",
        "p2pnode_population",
        "p2pnode_datagrams",
        "p2pnode_exchange_bytes",
        "p2pnode_shards",
        "p2pnode_workers",
        "p2pnode_reachable",
    } <= names
