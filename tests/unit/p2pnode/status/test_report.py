"""The status of simulated nodes: summary, readiness and peers."""

from __future__ import annotations

import asyncio
import hashlib
import itertools

from p2pnode.status.openapi import SCHEMAS, description
from p2pnode.status.report import LoopDelay
from p2pnode.training.goal import Best
from p2pnode.training.trainer_link.interface import Evaluation
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import played_by, run_by
from tests.harness.swarms.status_swarm import report, simulate
from tests.harness.swarms.swarm import Swarm


@played_by(simulate)
async def test_the_summary_follows_the_state(swarm: Swarm) -> None:
    """A joining node is not ready; a training one is, and its summary has step and company."""
    host = swarm.start("n0")
    joining = report(swarm, host)
    assert joining.ready() == (False, "joining: starting the trainer and looking for peers")
    assert joining.status().exchange.shards == 0
    await swarm.until(lambda: host.living.progress.step >= 2, within_s=30, what="it trains")

    training = report(swarm, host)
    step = host.living.progress.step
    assert training.ready() == (True, f"training at step {step} with 0 peers; waiting for no peer")
    status = training.status()
    assert status.exchange.shards_owned == status.exchange.shards_without_backup == status.exchange.shards > 0
    assert (status.swarm.closed, status.swarm.keys) == (True, ["ab12"])
    assert [row["step"] for row in training.steps(1)] == [step]


@played_by(simulate, training__min_nodes=2)
async def test_the_result_is_there_when_the_run_has_ended(swarm: Swarm) -> None:
    """Steps, the best metric in the direction of its name, the model, how to load it; null before."""
    host, other = swarm.start_many(2, training__max_steps=3)
    await swarm.until(lambda: host.living.progress.step >= 1, within_s=60, what="it trains")
    assert host.trainer is not None
    for step, loss in ((1, 0.5), (2, 0.7)):
        host.trainer.measured.append(Evaluation(step, {"loss": loss}, 10))
    before = report(swarm, host).status().result
    await swarm.until(lambda: host.living.result is not None, within_s=60, what="the end")

    result = report(swarm, host).status().result

    assert before is None
    assert result is not None
    assert (result.reason, result.steps, result.may_differ) == ("max_steps", 3, None)
    assert result.best == Best(metric="loss", value=0.5, step=1)
    assert result.model == "model.safetensors"
    assert result.sha256 == hashlib.sha256(host.disk.files["model.safetensors"]).hexdigest()
    assert len(result.load) == 2
    assert other.task is not None


@played_by(simulate)
async def test_the_best_metric_is_there_during_the_run(swarm: Swarm) -> None:
    """Null until something is evaluated; then the best so far, not the last."""
    host = swarm.start("n0")
    await swarm.until(lambda: host.living.progress.step >= 1, within_s=60, what="it trains")
    assert host.trainer is not None
    before = report(swarm, host).status().training.best
    for step, accuracy in ((1, 0.75), (2, 0.5)):
        host.trainer.measured.append(Evaluation(step, {"accuracy": accuracy}, 10))
    await swarm.until(lambda: host.living.progress.step >= 4, within_s=60, what="more steps")

    assert before is None
    assert report(swarm, host).status().training.best == Best(metric="accuracy", value=0.75, step=1)


class LateClock:
    """Every second reading is 100 ms and a given delay after the reading before."""

    def __init__(self, delays_s: list[float]) -> None:
        self._delays_s = itertools.cycle(delays_s)
        self._now = 0.0
        self._due = False

    def monotonic(self) -> float:
        if self._due:
            self._now += 0.1 + next(self._delays_s)
        self._due = not self._due
        return self._now

    def wall(self) -> float:
        return self._now


@run_by(run)
async def test_the_report_has_median_and_maximum_in_milliseconds() -> None:
    """Before the first measurement there is no figure; then the quantiles follow the delays."""
    delay = LoopDelay(LateClock([0.0, 0.0, 0.0, 0.25]))
    assert delay.report().delay_ms_p50 is None
    task = asyncio.create_task(delay.run())
    await asyncio.sleep(2.05)
    task.cancel()

    report = delay.report()
    assert (report.delay_ms_p50, report.delay_ms_max) == (0.0, 250.0)
    assert report.tasks == 2


def test_a_key_that_is_always_sent_is_required() -> None:
    """A default does not make a key optional."""
    for name in ("ExchangeStatus", "Status"):
        assert set(SCHEMAS[name]["required"]) == set(SCHEMAS[name]["properties"])


def test_counters_of_the_overlay_are_keys_of_any_name() -> None:
    """The counters stand beside the other keys, as `/status` shows them."""
    overlay = SCHEMAS["OverlayReport"]

    assert overlay["additionalProperties"] == {"type": "integer"}
    assert "counters" not in overlay["properties"]
    assert "counters" not in overlay["required"]


def test_changes_need_a_token_and_the_header() -> None:
    """Each POST declares the token and the header that other sites' pages cannot send."""
    paths = description()["paths"]
    changes = {path: entry["post"] for path, entry in paths.items() if "post" in entry}

    assert set(changes) == {"/leave", "/pause", "/resume"}
    for operation in changes.values():
        assert operation["security"] == [{"token": []}]
        assert [parameter["name"] for parameter in operation["parameters"]] == ["X-P2PNode"]
