"""Deliberate breaks: for each promise of docs/faults.md a fault in the code, and a test that has to fail with it.

`make ledger-breaks` runs each test of `BREAKS` in a process of its own, with its fault, and fails where a test passes,
where nothing has called the faulty function, or where something else than an assertion has ended the test.
`make ledger-breaks ARGS="1 8"` breaks these promises alone.

As a plugin (`pytest -p tests.harness.project.breaks --break 8 TEST`) this module replaces one function or method, in
every module that has imported it, when the tests are collected. The faults are at public functions of small modules,
and the tests run everything in one process.
"""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps
from typing import Any, NamedTuple

import pytest

from p2pnode.training.settings import BarrierSettings
from tests.harness.project.ledger import numbers_of
from tests.harness.project.repository import ROOT

Function = Callable[..., Any]
#: Begins the line that a run prints about its break.
VERDICT = "break: "


class Break(NamedTuple):
    """`place`: module and qualified name. `fault` makes the faulty function of the right one."""

    place: str
    says: str
    fault: Callable[[Function], Function]
    test: str


def returns(value: Any) -> Callable[[Function], Function]:
    """Whatever is given to it."""
    return lambda _right: lambda *_arguments, **_options: value


def _adds_four_of_five(right: Function) -> Function:
    def apply(state: Any, identity: Any, weight: float, *rest: Any, **options: Any) -> Any:
        return right(state, identity, weight if identity.step % 5 else 0.0, *rest, **options)

    return apply


def _sends_all(_right: Function) -> Function:
    def decide(choice: Any, _facts: Any) -> bool:
        choice.codec = "float32"
        return False

    return decide


def _without_half_of_the_bits(values: Any) -> Any:
    return (values.view("u4") & 0xFFFF0000).view("f4")


def _adds_one_bit(right: Function) -> Function:
    def add(to: Any, rule: Any) -> Any:
        found = right(to, rule)
        to.value.view("u4")[:1] ^= 1
        return found

    return add


def _tolerates_all(right: Function) -> Function:
    def judge(quota: Any, contribution: Any, version: int) -> Any:
        quota.version_tolerance = version
        return right(quota, contribution, version)

    return judge


async def _nothing_is_left(*_arguments: Any) -> int:
    return 0


SIMULATED = "tests/simulated"
BREAKS: dict[int, Break] = {
    1: Break(
        "p2pnode.training.shards.state:ShardState.apply",
        "each fifth delta of a node is acknowledged and not added",
        _adds_four_of_five,
        f"{SIMULATED}/test_swarm_training.py::test_every_delta_is_in_the_model_once[pssp]",
    ),
    2: Break(
        "p2pnode.training.exchange.run_state:SwarmView.median_step",
        "a joiner begins at step 0",
        returns(0),
        f"{SIMULATED}/test_swarm_training.py::test_a_late_joiner_starts_where_the_others_are",
    ),
    3: Break(
        "p2pnode.training.exchange.run_state:SwarmView.is_gone",
        "no node ever counts as gone",
        returns(False),
        f"{SIMULATED}/test_swarm_training.py::test_a_killed_owner_loses_nothing_that_was_acknowledged",
    ),
    4: Break(
        "p2pnode.training.exchange.recovery.rebalancing:Rebalancer.leave",
        "a node that leaves hands nothing over",
        lambda _right: _nothing_is_left,
        f"{SIMULATED}/test_swarm_training.py::test_a_leave_is_known_at_once_and_moves_everything",
    ),
    5: Break(
        "p2pnode.training.exchange.store.records:compare",
        "after a split the log is not looked at",
        lambda right: lambda copy, winner, _log: right(copy, winner, ()),
        f"{SIMULATED}/test_exchange_faults.py::test_both_sides_of_a_split_end_in_one_model[False]",
    ),
    6: Break(
        "p2pnode.training.files.checkpoint:finish",
        "no checkpoint is ever complete",
        returns(None),
        f"{SIMULATED}/test_swarm_resume.py::test_stopped_in_order_the_swarm_goes_on_with_the_vector_it_had[61-pssp]",
    ),
    7: Break(
        "p2pnode.training.shards.robust:norm_of",
        "a delta with a NaN has a length",
        returns(1.0),
        f"{SIMULATED}/test_hostile_member.py::test_what_is_no_delta_is_refused_with_a_reason_and_changes_nothing",
    ),
    8: Break(
        "p2pnode.overlay.sealing.swarm_key:SwarmKey.derive",
        "every key gives the same secrets",
        lambda _right: lambda _key, _run, _purpose, size_bytes=32: bytes(size_bytes),
        f"{SIMULATED}/test_sealed_overlay.py::test_an_unauthenticated_peer_changes_nothing",
    ),
    9: Break(
        "p2pnode.training.barriers.predicates:quantile_of",
        "a barrier with a quantile lets everybody pass",
        returns(lambda _mine, _others: True),
        "tests/unit/training/barriers/test_predicates.py::test_quantile_passes_when_that_share_is_far_enough",
    ),
    10: Break(
        "p2pnode.training.encoding.codec_choice:CodecChoice.decide",
        "every delta is sent whole, whatever the line",
        _sends_all,
        f"{SIMULATED}/test_slow_start.py::test_behind_slow_lines_a_swarm_trains_from_its_first_step_on",
    ),
    11: Break(
        "p2pnode.training.encoding.codecs:as_bytes",
        "float32 travels with half of its bits",
        lambda right: lambda values: right(_without_half_of_the_bits(values)),
        f"{SIMULATED}/test_final_model.py::test_all_nodes_write_the_same_bytes",
    ),
    12: Break(
        "p2pnode.training.failures:Failures.are_too_many",
        "a crashed trainer is not started again",
        returns(True),
        f"{SIMULATED}/test_swarm_training.py::test_a_crashing_trainer_is_restarted",
    ),
    13: Break(
        "p2pnode.training.sharing.ledger:Ledger.is_trained",
        "what others have trained is drawn again",
        returns(False),
        f"{SIMULATED}/test_shared_data.py::test_a_join_a_leave_and_a_death_in_the_middle_of_an_epoch",
    ),
    14: Break(
        "p2pnode.training.dispatch.queue:TaskQueue.worker_gone",
        "the tasks of a dead worker do not come back",
        returns(0),
        f"{SIMULATED}/test_dispatch.py::test_leases_of_a_worker_that_dies_come_back_at_once",
    ),
    15: Break(
        "p2pnode.training.engines.server.acceptance:Quota.judge",
        "a gradient of any version is accepted",
        _tolerates_all,
        f"{SIMULATED}/test_parameter_server.py::test_no_stale_gradient_is_in_the_model_whatever_is_lost[2-0]",
    ),
    16: Break(
        "p2pnode.training.devices.cycle:CycleServer.lost",
        "a dead device is waited for",
        returns([]),
        "tests/unit/training/devices/test_cycle.py::test_workers_that_die_and_come_back_hang_nobody",
    ),
    17: Break(
        "p2pnode.training.simulation.plan:Plan.made_barrier",
        "simulated nodes wait for nobody",
        lambda right: lambda plan: right(replace(plan, barrier=BarrierSettings(method="asp"))),
        f"{SIMULATED}/test_simulator_agrees.py::test_the_simulator_agrees_with_whole_nodes",
    ),
    18: Break(
        "p2pnode.training.shards.outer_rule:add_in_blocks",
        "NumPy's sum has another last bit",
        _adds_one_bit,
        "tests/property/test_kernels.py::test_deltas_are_added_alike",
    ),
    19: Break(
        "p2pnode.status.report:StatusReport.peers",
        "`/peers` has rows of another form than its description",
        returns([{"node": 1}]),
        f"{SIMULATED}/test_status_description.py::test_every_answer_of_a_running_swarm_fits_its_description",
    ),
    20: Break(
        "p2pnode.directory_lock:locked",
        "a state directory has no lock",
        lambda _right: lambda folder: nullcontext(folder.mkdir(parents=True, exist_ok=True, mode=0o700)),
        "tests/unit/p2pnode/test_directory_lock.py::test_a_state_directory_has_one_node_at_a_time",
    ),
    21: Break(
        "p2pnode.training.trainer.model.contract:ModelContract.check",
        "nobody looks whether the model is still the one that is exchanged",
        returns(None),
        "tests/unit/training/trainer/model/test_contract.py::test_every_way_to_replace_a_parameter_is_named",
    ),
}


def found(place: str) -> tuple[Any, str, Function]:
    """The module or class of a place, the name in it, and the function. Raises `AttributeError` if it is not there."""
    module, _, path = place.partition(":")
    *classes, name = path.split(".")
    owner = importlib.import_module(module)
    for one in classes:
        owner = getattr(owner, one)
    return owner, name, inspect.getattr_static(owner, name)


class Breaking:
    """The plugin of one run: puts the fault of one promise in, and watches what it does."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.calls = 0
        self.failed: list[str] = []
        self.faults: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if any(self._number not in numbers_of(item) for item in session.items):
            self.faults.append(f"the test does not hold promise {self._number}")
        owner, name, right = found(BREAKS[self._number].place)
        wrong = BREAKS[self._number].fault(right)

        @wraps(right)
        def faulty(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            return wrong(*arguments, **options)

        setattr(owner, name, faulty)
        for module in list(sys.modules.values()):
            for imported, value in list(vars(module).items()):
                if value is right:
                    setattr(module, imported, faulty)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if call.excinfo is not None and not report.skipped:
            said = re.sub(r"\s+", " ", call.excinfo.exconly())[:160]
            is_assertion = call.excinfo.errisinstance((AssertionError, pytest.fail.Exception))
            (self.failed if call.when == "call" and is_assertion else self.faults).append(said)
        return report

    @property
    def wrong(self) -> list[str]:
        """Why this run does not show that the test holds the promise."""
        found = list(self.faults)
        if not self.calls:
            found.append("nothing has called it")
        if not self.failed:
            found.append("no assertion has failed")
        return found

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED if self.wrong else pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        verdict = f"NOT SHOWN: {'; '.join(self.wrong)}" if self.wrong else f"failed as it must: {self.failed[0]}"
        terminalreporter.write_line(f"{VERDICT}{verdict}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("breaks").addoption("--break", type=int, dest="broken", help="the promise to break")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.broken is not None:
        config.pluginmanager.register(Breaking(config.option.broken), "break-of-a-promise")


def main(chosen: list[str]) -> int:
    """Break the promises of these numbers, or all. Returns how many breaks no test has shown."""
    unseen = 0
    for number in map(int, chosen or BREAKS):
        each = BREAKS[number]
        print(f"{number:3}  {each.says} ({each.place})\n     {each.test}", flush=True)
        command = [sys.executable, "-m", "pytest", "-p", __spec__.name, f"--break={number}", "--tb=no", each.test]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        verdict = [line.removeprefix(VERDICT) for line in done.stdout.splitlines() if line.startswith(VERDICT)]
        print(f"     {verdict[0] if verdict else (done.stdout + done.stderr)[-2000:]}", flush=True)
        unseen += done.returncode != 0
    return unseen


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
