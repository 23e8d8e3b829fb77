"""`p2pnode run -- python train.py`: the user's own loop in real daemons, to the end, and the message when it fails."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.harness.project.repository import ROOT
from tests.harness.runner.long_run import more
from tests.process.harness.script_run import Run
from tests.process.harness.swarm_world import START_S, until
from tests.process.harness.trainer_world import wait_until

STEPS = 20

#: The lines the README shows, word for word.
SNIPPET = """\
import p2pnode

swarm = p2pnode.attach(model, optimizer)
while not swarm.done:
    loss = train_one_batch(model, optimizer)
    swarm.step(samples=32, loss=loss.item())
"""

BEFORE = """\
import json
import sys
import torch
from torch import nn
from p2pnode.training.trainer.lazy_dynamo import import_later

import_later()  # torch's compiler, which no optimizer needs, is half of the start
torch.manual_seed(int(sys.argv[2]))  # Each node begins elsewhere, and has data of its own.
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
seen = []


def train_one_batch(model, optimizer):
    seen.append((swarm.step_number, swarm.done))
    inputs = torch.randn(32, 4)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    return loss


print("before attaching")
"""

AFTER = """\
with open(sys.argv[1], "w") as file:
    json.dump(
        {
            "done": swarm.done,
            "numbers": [number for number, _ in seen],
            "samples": swarm.samples_seen,
            "values": torch.cat([value.detach().flatten() for value in model.parameters()]).tolist(),
        },
        file,
    )
print("the swarm is done at step", swarm.step_number)
"""


#: What the joiner does after the swarm is done: longer than a process had before `training.finish_s` was introduced.
FINAL_EVALUATION = """\
import time

time.sleep(3.5)
torch.save(torch.zeros(5_000_000), sys.argv[1] + ".pt")
sys.exit(5)
"""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    started: list[Run] = []

    def start(script: str, *flags: str, launcher: Sequence[str] = ()) -> Run:
        number = len(started)
        started.append(Run(tmp_path / str(number), script, *flags, seed=number, launcher=launcher))
        return started[-1]

    yield start
    for run in started:
        run.kill()


def address_of(run: Run) -> str:
    """The address of a node, as soon as its status has one."""
    until(lambda: run.address != "", START_S, "it has an address", [run])
    return run.address


def test_the_readme_shows_the_script_that_is_tested() -> None:
    """The snippet of the README is the one below."""
    assert f"```python\n{SNIPPET}```" in (ROOT / "README.md").read_text()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("barrier", ["pssp", *more("bsp")])
def test_two_scripts_train_one_model(barrier: str, launch: Callable[..., Run]) -> None:
    """The README's loop in a founder and a joiner: what it prints arrives, `done` ends it, the step grows. Both end
    with the same model to the bit, in the script and in the file that the node names at its end. The joiner's long
    evaluation and saving afterwards complete, and its exit code is kept."""
    flags = [f"training.max_steps={STEPS}", "training.local_steps=5", "training.min_nodes=2", "training.linger_s=20"]
    settings = [part for flag in [*flags, f"barrier.method={barrier}"] for part in ("--set", flag)]
    script = BEFORE + SNIPPET + AFTER
    founder = launch(script, *settings)
    joiner = launch(script + FINAL_EVALUATION, "--bootstrap", address_of(founder), *settings)

    results = []
    models = []
    for run, code in ((founder, 0), (joiner, 5)):
        assert run.wait() == code, run.error
        assert "Traceback" not in run.error
        lines = run.out.splitlines()
        assert lines[:2] == ["before attaching", f"the swarm is done at step {STEPS}"]
        assert lines[2] == f"the run has ended after {STEPS} steps (max_steps)"
        file = lines[3].removeprefix("the model is in ").removesuffix("; load it with")
        models.append(Path(file).read_bytes())
        results.append(json.loads(run.result.read_text()))
    assert models[0] == models[1]
    for run, result in zip((founder, joiner), results, strict=True):
        numbers = result["numbers"]
        assert result["done"]
        # A late joiner may begin further on, never elsewhere.
        assert sorted(numbers) == numbers
        assert numbers[-1] == STEPS
        assert run is joiner or len(set(numbers)) > STEPS // 2
        assert result["samples"] == 32 * len(numbers)
    np.testing.assert_array_equal(results[0]["values"], results[1]["values"])
    assert joiner.result.with_name("result.json.pt").stat().st_size > 20_000_000


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            BEFORE + SNIPPET.replace("    swarm.step(", "    raise RuntimeError('a shape is wrong')\n    swarm.step("),
            "RuntimeError: a shape is wrong",
        ),
        *more(
            ("print('nothing to train')\n", "ended before the swarm was done"),
            (BEFORE + "import no_module_of_that_name\n", "No module named 'no_module_of_that_name'"),
        ),
    ],
    ids=["first turn", "no attach", "no module"],
)
def test_a_script_that_cannot_train_is_explained(script: str, words: str, launch: Callable[..., Run]) -> None:
    """Ended with code 0 without attaching, or crashed at once: exit code 8, one sentence, a hint, and one traceback."""
    run = launch(script, "--set", "training.local_steps=2")

    assert run.wait() == 8, run.error
    lines = run.error.splitlines()
    # The hint may quote the script's last lines, indented; a traceback of the node's own would not be indented.
    assert "Traceback (most recent call last):" not in lines
    assert '"exception"' not in run.error
    [at] = [number for number, line in enumerate(lines) if line.startswith("error:")]
    assert words in lines[at]
    assert lines[at + 1].startswith("hint: ")
    assert len(lines[at + 1]) > len("hint: ")
    assert all(line.startswith("  ") for line in lines[at + 2 :])
    assert (run.out + run.error).count("Traceback") == ("raise" in script or "no_module" in script)
    # What the script prints is passed on as it is, its own traceback included.
    assert run.out.startswith(script.partition('print("')[2].partition('"')[0] or "nothing to train")


@pytest.mark.timeout(600)
@pytest.mark.promise(12)
def test_a_script_that_returns_early_ends_its_node_cleanly(launch: Callable[..., Run]) -> None:
    """Seven calls, three turns: the node leaves with exit code 0 and one line that says why. What was trained while the
    last delta was exchanged is in none."""
    run = launch(
        BEFORE + SNIPPET.replace("while not swarm.done", "for _ in range(7)") + AFTER,
        *("--set", "training.local_steps=2", "--set", 'log.format="json"'),
    )

    assert run.wait() == 0, run.error
    events = [json.loads(line) for line in run.error.splitlines() if line.startswith("{")]
    [left] = [event for event in events if event["event"] == "script_left"]
    assert left["level"] == "info"
    assert left["steps"] in (2, 3)
    assert not [event for event in events if event["level"] == "error"]
    assert "the swarm is done at step" in run.out


#: Ends in each start, after two completed steps, as its command line says.
FAILS = """\
import os, pathlib, signal, p2pnode

swarm = p2pnode.attach(model, optimizer)
first = swarm.step_number
while swarm.step_number < first + 2:
    swarm.step(samples=32, loss=train_one_batch(model, optimizer))
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (
            "raise ValueError(f'a shape is wrong in step {swarm.step_number}')",
            "exit code 1: ValueError: a shape is wrong in step",
        ),
        *more(
            ("print('loss', torch.rand(())), sys.exit(3)", "exit code 3"),
            ("signal.raise_signal(signal.SIGSEGV)", "signal SIGSEGV"),
        ),
    ],
    ids=["exception", "code", "signal"],
)
@pytest.mark.promise(12)
def test_a_script_that_fails_in_each_start_is_given_up(end: str, reason: str, launch: Callable[..., Run]) -> None:
    """Each of five starts completes steps and ends in the same way: the fifth ends the node, with the exception, the
    code or the signal."""
    run = launch(BEFORE + FAILS + end, "--set", "training.local_steps=1")

    starts = ended_or(lambda: run.out.count("before attaching") > 5, run)
    assert (run.process.poll(), starts) == (8, False), run.error
    assert run.out.count("before attaching") == 5
    [error] = [line for line in run.error.splitlines() if line.startswith("error:")]
    assert f"the trainer ended with {reason}" in error
    assert "it has failed 5 times" in error


def ended_or(holds: Callable[[], bool], run: Run) -> bool:
    """Wait until it holds, or the node has ended; whether it holds."""
    end_s = time.monotonic() + START_S
    while not holds() and run.process.poll() is None:
        assert time.monotonic() < end_s, run.error
        time.sleep(0.05)
    return holds()


@pytest.mark.timeout(600)
def test_a_script_that_is_killed_from_outside_goes_on(launch: Callable[..., Run]) -> None:
    """More often than a failing one is restarted, after completed steps: nobody is to blame, and it is started soon."""
    end = """\
count = pathlib.Path("count")
count.write_text(count.read_text() + "x" if count.exists() else "x")
if len(count.read_text()) < 7:
    os.kill(os.getpid(), signal.SIGKILL)
"""
    run = launch(BEFORE + FAILS + end, "--set", "training.local_steps=1")

    assert run.wait() == 0, run.error
    assert run.out.count("before attaching") == 7


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "launcher",
    [["-m", "torch.distributed.run", "--nproc-per-node", "2"], ["-m", "accelerate.commands.launch", "--cpu"]],
    ids=lambda launcher: launcher[1].partition(".")[0],
)
def test_the_reason_of_a_script_is_its_exception_behind_a_launcher(
    launcher: list[str], launch: Callable[..., Run]
) -> None:
    """Not the launcher's banner, nor what another rank says because the first to fail is gone."""
    pytest.importorskip(launcher[1].partition(".")[0])
    script = """\
import os, torch
ranks = int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    torch.distributed.init_process_group("gloo")
if int(os.environ.get("RANK", "0")) == ranks - 1:
    raise ValueError("a shape is wrong")
torch.distributed.all_reduce(torch.ones(1))
"""
    run = launch(script, launcher=launcher)

    assert run.wait() == 8, run.error
    [error] = [line for line in run.error.splitlines() if line.startswith("error:")]
    assert error.endswith("the trainer ended with exit code 1: ValueError: a shape is wrong")


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group of 500 MB below that of the tests; only root can make one, and not everywhere."""
    own, limit = Path("/sys/fs/cgroup"), "memory.max"
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            own, limit = Path("/sys/fs/cgroup/memory") / path.lstrip("/"), "memory.limit_in_bytes"
    group = own / f"p2pnode-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(500 << 20))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group: {error}")
    yield group
    for pid in (group / "cgroup.procs").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    wait_until(lambda: not (group / "cgroup.procs").read_text(), 10.0)
    group.rmdir()


#: Without torch, which would read its own files again and again below the limit.
GREEDY = """\
import sys
from tests.process.harness.plain_trainer import PlainTrainer
from tests.process.harness.torchless_trainer import serve_daemon

class Greedy(PlainTrainer):
    def train(self, turn, order):
        self.kept = bytearray(1 << 30) if order.step > 2 else None
        return super().train(turn, order)

sys.exit(serve_daemon(lambda connection: Greedy(connection, 0.01)))
"""


@pytest.mark.timeout(600)
def test_a_script_that_is_killed_for_memory_says_so(memory_group: Path, tmp_path: Path) -> None:
    """The kernel's SIGKILL is told from any other, with the limit and what to lower."""
    (tmp_path / "train.py").write_text(GREEDY)
    enter = ["sh", "-c", f'echo $$ > {memory_group}/cgroup.procs && exec "$@"', "sh"]
    node = [sys.executable, "-m", "p2pnode", "run", "--port", "0", "--status-port", "0", "--state-dir", "state"]
    settings = ["--set", "training.threads=1", "--set", "training.local_steps=1"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("P2PNODE_")}

    done = subprocess.run(
        [*enter, *node, *settings, "--", sys.executable, "train.py", "result", "0"],
        cwd=tmp_path, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=START_S,
        check=False,
    )  # fmt: skip

    assert done.returncode == 8, done.stderr
    assert "because the memory limit of 524 MB of its control group was reached" in done.stderr
    assert "lower the batch size" in done.stderr


#: Draws its batches with the seed that it is given.
SEEDED = """\
import sys, time, torch, p2pnode
from torch import nn
from p2pnode.training.trainer.lazy_dynamo import import_later

import_later()
torch.manual_seed(1337)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
swarm = p2pnode.attach(model, optimizer)
torch.manual_seed(int(SEED))
while not swarm.done:
    inputs = torch.randn(16, 32)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), inputs.relu().sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    swarm.step(samples=16, loss=loss)
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("seed", "told"), [("1337", True), *more(("sys.argv[2]", False))], ids=["same", "own"])
def test_scripts_that_train_on_the_same_batches_are_told(seed: str, told: bool, launch: Callable[..., Run]) -> None:
    """With the default codecs, which round the first weights of the node that joins. Own seeds are no finding."""
    script = SEEDED.replace("SEED", seed)
    flags = ["--set", "training.min_nodes=2", "--set", "training.max_steps=40", "--set", 'log.format="json"']
    flags += ["--set", 'barrier.method="bsp"']  # with steps of some milliseconds pssp leaves them apart
    founder = launch(script, *flags)
    joiner = launch(script, "--bootstrap", address_of(founder), *flags)

    for run in (founder, joiner):
        assert run.wait() == 0, run.error
        assert run.error.count('"event": "same_data"') == told, run.error


@pytest.mark.timeout(600)
def test_weights_in_bfloat16_that_hardly_change_are_a_finding(launch: Callable[..., Run]) -> None:
    """With the type and the rate, after some steps; the loss alone would look like training."""
    script = SEEDED.replace("optimizer = torch", "model = model.bfloat16()\noptimizer = torch").replace("1e-3", "1e-5")
    script = script.replace("SEED", "0").replace("torch.randn(16, 32)", "torch.randn(16, 32).bfloat16()")
    run = launch(script)

    def said() -> list[str]:
        return [found["what"] for found in run.status().get("health", []) if "rounded away" in found["what"]]

    assert ended_or(lambda: bool(said()), run), run.error
    [what] = said()
    assert "of the bfloat16 weights change in a step at a learning rate of 1e-05" in what
