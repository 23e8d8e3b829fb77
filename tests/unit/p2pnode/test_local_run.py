"""What each of several nodes on one machine is told, and how their output and signals are passed on."""

from __future__ import annotations

import io
import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from p2pnode import local_run
from p2pnode.config.directory_record import RECORD_FILE, DirectoryRecord, encode
from p2pnode.config.load import Override, load
from p2pnode.directory_lock import locked
from p2pnode.errors import UserError
from p2pnode.local_run import LocalStart, PlannedNode, plan, run_local, with_count

NODE = PlannedNode(2, 0, 0, 4)


def start(home: Path, *overrides: str, **request: Any) -> LocalStart:
    """A start on this state directory."""
    given = [Override(*setting.split("=", 1), "--set") for setting in (f"node.state_dir={home}", *overrides)]
    return LocalStart(load(overrides=given), **{"nodes": 2, "arguments": [], "command": None, **request})


def told(request: LocalStart, *, known: list[str] | None = None, node: PlannedNode = NODE) -> dict[str, str]:
    """The settings on the command line of one node."""
    home = request.loaded.config.state_folder
    arguments = local_run._arguments(request, node, home / "local" / str(node.number), known or [])
    pairs = itertools.pairwise(arguments)
    return dict(value.split("=", 1) for flag, value in pairs if flag == "--set")


def record(folder: Path, *, founder: bool, **settings: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name.replace("__", "."): value for name, value in settings.items()}
    (folder / RECORD_FILE).write_bytes(encode(DirectoryRecord(run="digits", founder=founder, settings=kept)))


def test_each_node_has_its_own_directory_ports_and_threads(tmp_path: Path) -> None:
    """They go to the command line, with the run and the addresses of the nodes that are here."""
    found = told(start(tmp_path, "swarm.run=digits"), known=["127.0.0.1:20001"])

    assert found["node.state_dir"] == f'"{tmp_path / "local" / "2"}"'
    assert (found["node.port"], found["status.port"], found["training.threads"]) == ("0", "0", "4")
    assert (found["swarm.run"], found["swarm.bootstrap"]) == ('"digits"', '["127.0.0.1:20001"]')


@pytest.mark.parametrize(
    ("device", "gpus", "seen"),
    [
        ("auto", ["0", "1"], ["0", "1", "0"]),
        ("cuda", ["3", "GPU-5", "7"], ["3", "GPU-5", "7"]),
        ("auto", ["2"], [None] * 3),
        ("auto", [], [None] * 3),
        ("cuda:1", ["0", "1"], [None] * 3),
        ("cpu", ["0", "1"], [None] * 3),
        (["cuda:0", "cuda:1"], ["0", "1"], [None] * 3),
    ],
)
def test_each_node_sees_a_gpu_of_its_own(device: str | list[str], gpus: list[str], seen: list[str | None]) -> None:
    """Those of the machine in turn; a setting that names devices is left as it is."""
    assert [local_run.gpu_of(number, device, gpus).get("CUDA_VISIBLE_DEVICES") for number in (1, 2, 3)] == seen


def test_a_node_has_the_gpu_in_its_environment(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Beside what this process has."""
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], bool(os.environ['PATH']))"
    node = local_run.LocalNode(2, tmp_path, [sys.executable, "-c", code], more={"CUDA_VISIBLE_DEVICES": "7"})

    assert node.exit_code == 0
    node.end()
    assert capfd.readouterr().out == "[2] 7 True\n"


def test_chosen_threads_are_kept_and_a_program_stands_last(tmp_path: Path) -> None:
    """A number of threads given by hand counts for every node; the program of `run` follows --."""
    program = ["python", "train.py", "--local"]
    request = start(tmp_path, "training.threads=7", command=program, arguments=["--config", "x"])
    arguments = local_run._arguments(request, NODE, tmp_path / "local" / "2", [])

    assert "training.threads" not in told(request)
    assert arguments[:3] == ["run", "--config", "x"]
    assert arguments[-4:] == ["--", "python", "train.py", "--local"]


def test_programs_begin_when_all_nodes_are_there(tmp_path: Path) -> None:
    """With a program of the user each of several nodes waits for all of them, unless a number was chosen; a node that
    is added to others, or trains a task, waits for nobody."""
    program = ["python", "total.py"]

    assert told(start(tmp_path, command=program, nodes=3))["training.min_nodes"] == "3"
    assert told(start(tmp_path, "training.min_nodes=2", command=program, nodes=3)).get("training.min_nodes") != "3"
    assert "training.min_nodes" not in told(start(tmp_path, command=program, nodes=1))
    assert "training.min_nodes" not in told(start(tmp_path, nodes=3))


def test_a_planned_role_is_told_to_its_node(tmp_path: Path) -> None:
    """Server or worker; without a planned role nothing is said."""
    request = start(tmp_path, servers=1)

    assert told(request, node=NODE._replace(role="server"))["node.role"] == '"server"'
    assert told(request, node=NODE._replace(role="peer"))["node.role"] == '"peer"'
    assert "node.role" not in told(request)


def test_a_node_that_nobody_can_let_in_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """When all nodes that had joined have ended, the one that has not is told to end, with the reason; while another
    runs in the swarm, or it has joined, it is left alone."""
    states = {"2": "joining", "3": "training"}
    nodes = [local_run.LocalNode(number, tmp_path / str(number), ["sleep", "60"]) for number in (2, 3)]
    monkeypatch.setattr(local_run, "_is_joining", lambda folder: states[folder.name] == "joining")
    try:
        local_run._end_left_out(nodes)
        assert capsys.readouterr().err == ""
        nodes[1].process.kill()
        nodes[1].process.wait()
        local_run._end_left_out(nodes)
        assert nodes[0].process.wait(60) == -signal.SIGTERM
    finally:
        for node in nodes:
            node.process.kill()
            node.process.wait()
            for printer in node.printers:
                printer.join(60)
    assert capsys.readouterr().err.startswith("[2] the other nodes have ended before this one could join them")


def test_a_new_node_trains_what_the_nodes_here_train(tmp_path: Path) -> None:
    """A directory without a record takes over the settings of the first node of the run; one with a record has its
    own; the key of the run's directory is used by all."""
    record(tmp_path / "local" / "1", founder=True, training__task="mnist", training__local_steps=7, node__port=9)
    (tmp_path / "swarm.key").write_text("key")
    request = start(tmp_path, f"swarm.key_file={tmp_path / 'swarm.key'}", "training.local_steps=20")

    assert told(request)["training.task"] == '"mnist"'
    assert "training.local_steps" not in told(request), "it was chosen for this start"
    assert told(request)["node.port"] == "0"
    assert told(request)["swarm.key_file"] == f'"{tmp_path / "swarm.key"}"'
    record(tmp_path / "local" / "2", founder=False)
    assert "training.task" not in told(request)


def test_remembered_bootstraps_elsewhere_stay_and_those_here_are_renewed(tmp_path: Path) -> None:
    """Ports on this machine change with every start, so old ones are dropped; a founder alone gets none."""
    record(tmp_path / "local" / "2", founder=False, swarm__bootstrap=["10.0.0.5:8468", "127.0.0.1:1"])
    assert told(start(tmp_path), known=["127.0.0.1:2"])["swarm.bootstrap"] == '["127.0.0.1:2", "10.0.0.5:8468"]'

    record(tmp_path / "local" / "2", founder=True)
    assert "swarm.bootstrap" not in told(start(tmp_path))


def test_a_key_on_standard_input_is_for_one_process(tmp_path: Path) -> None:
    """It can be read once, so it is refused with what to do."""
    with pytest.raises(UserError, match="can be read once") as refused:
        told(start(tmp_path, "swarm.key_file=-"))

    assert "swarm.key_file" in refused.value.hint


def scripted(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Every node is a Python process with this code; its number and directory are its arguments."""

    def arguments(_start: LocalStart, node: PlannedNode, folder: Path, known: list[str]) -> list[str]:
        folder.mkdir(parents=True)
        return [code, str(node.number), str(folder), *known]

    monkeypatch.setattr(local_run, "_arguments", arguments)
    monkeypatch.setattr(local_run, "_address_of", lambda folder: f"of {folder.name}" if folder.name == "1" else "")
    real = local_run.subprocess.Popen

    def spawn(command: list[str], **options: Any) -> Any:
        return real([sys.executable, "-S", "-c", *command[3:]], **options)

    monkeypatch.setattr(local_run.subprocess, "Popen", spawn)


UP = """
import json, os, signal, sys, time
number, folder, *known = sys.argv[1:]
print("known", *known, flush=True)
print("to standard error", file=sys.stderr, flush=True)
open(folder + "/status.json", "w").write(json.dumps({"address": "127.0.0.1:1", "pid": os.getpid(), "id": ""}))
"""


#: None ends before the third is up: others would not be started.
ALL_UP = """
while not all(os.path.exists(f"{folder}/../{other}/status.json") for other in "123"): time.sleep(0.01)
"""


def test_output_gets_the_number_of_its_node_and_later_ones_know_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Whole lines, on the stream they were printed to; the exit code is that of the first node that failed."""
    scripted(monkeypatch, f"{UP}{ALL_UP}\nsys.exit(int(number) - 1)")

    assert run_local(start(tmp_path, nodes=3)) == 1
    sys.stderr.flush()

    printed = capfdbinary.readouterr()
    assert sorted(printed.out.splitlines()) == [b"[1] known", b"[2] known of 1", b"[3] known of 1"]
    assert b"[2] to standard error\n" in printed.err
    assert b"[3] ended with exit code 2" in printed.err  # which of them ends last is not known


def test_a_node_that_fails_is_told_of_while_the_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Nobody has to end the others to see why they wait: the line comes at once, and says how many go on."""
    begins = "import os, signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(0))\n"
    other = "folder + '/../3/status.json'"
    fails = f"if number == '2':\n    while not os.path.exists({other}): time.sleep(0.01)\n    sys.exit(3)\n"
    scripted(monkeypatch, f"{begins}{UP}\n{fails}time.sleep(60)")
    printed: list[str] = []

    def write(text: str) -> int:
        printed.append(text)
        if "exit code" in text:
            os.kill(os.getpid(), signal.SIGTERM)  # only then are the others ended
        return len(text)

    monkeypatch.setattr(local_run.sys.stderr, "write", write)

    assert run_local(start(tmp_path, nodes=3)) == 3
    assert printed == ["[2] ended with exit code 3; 2 of 3 nodes go on\n"]


def test_interrupts_reach_every_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C asks all to leave; the command ends when they have, with their exit code 0."""
    begins = "import signal, sys\nsignal.signal(15, lambda *_: sys.exit(0))\n"
    scripted(monkeypatch, f"{begins}{UP}\ntime.sleep(600)")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))

    def interrupt() -> None:
        while sys.stdout.buffer.getvalue().count(b"known") < 2:  # type: ignore[attr-defined]
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    code = run_local(start(tmp_path))
    thread.join()

    assert code == 0


def test_a_failed_founder_starts_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others could only wait for it: its exit code is that of the command."""
    scripted(monkeypatch, "import sys; sys.exit(8)")

    assert run_local(start(tmp_path)) == 8
    assert [folder.name for folder in (tmp_path / "local").iterdir() if folder.is_dir()] == ["1"]


def test_two_starts_at_one_moment_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits until the first one's nodes are up, and finds them; it does not found too."""
    scripted(monkeypatch, UP)
    entered, early = threading.Event(), []

    def hold() -> None:
        with locked(tmp_path / "local"):
            entered.set()
            time.sleep(1.0)
            early.extend((tmp_path / "local").glob("[0-9]"))

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(60)
    assert run_local(start(tmp_path, nodes=1)) == 0
    thread.join()

    assert early == []
    assert (tmp_path / "local" / "1").is_dir()


def test_nodes_share_the_cores_and_take_free_ports() -> None:
    """Numbers from 1, free ports, and an equal share of the cores, of which each node has at least one."""
    assert plan(3, (), 8) == [PlannedNode(number, 0, 0, 2) for number in (1, 2, 3)]
    assert {node.threads for node in plan(4, (), 2)} == {1}


def test_a_node_beside_others_takes_the_lowest_free_number_and_its_share() -> None:
    """Directories of nodes that have ended are used again; running ones count for the cores."""
    assert plan(1, {1, 3}, 12) == [PlannedNode(2, 0, 0, 4)]
    assert [node.number for node in plan(2, {1, 3}, 12)] == [2, 4]


def test_a_port_is_the_first_of_a_row() -> None:
    """Node N takes the N-th from it on; a row that leaves the range, or meets the other one, is an error."""
    nodes = plan(2, {1}, 4, port=20000, status_port=30000)
    assert [(node.port, node.status_port) for node in nodes] == [(20001, 30001), (20002, 30002)]
    with pytest.raises(ValueError, match="node 2 would need port 65536"):
        plan(2, (), 4, port=65535)
    with pytest.raises(ValueError, match="port 20001 would be used twice"):
        plan(2, (), 4, port=20000, status_port=20001)


def test_the_first_nodes_to_start_are_the_servers(tmp_path: Path) -> None:
    """The founder of an earlier start is the first one, and the others are workers; without servers the settings
    decide."""
    record(tmp_path / "local" / "3", founder=True)

    nodes = local_run._planned(start(tmp_path, nodes=3, servers=1), ())

    assert [(node.number, node.role) for node in nodes] == [(3, "server"), (1, "peer"), (2, "peer")]
    assert {node.role for node in local_run._planned(start(tmp_path), ())} == {""}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--local"], ["--local", "1"]),
        (["--local", "3"], ["--local", "3"]),
        (["--local", "--task", "digits"], ["--local", "1", "--task", "digits"]),
        (["--run", "--local", "--local"], ["--run", "--local", "--local", "1"]),
        (["--local=3", "--debug"], ["--local=3", "--debug"]),
        (["--local", "--servers", "1", "train"], ["--local", "1", "--servers", "1", "train"]),
        (["--local", "-1"], ["--local", "-1"]),
        (["--local", "--", "train", "--local"], ["--local", "1", "--", "train", "--local"]),
        (["--local", "train", "--local"], ["--local", "1", "train", "--local"]),
        (["train", "--local"], ["train", "--local"]),
        (["--run"], ["--run"]),
        ([], []),
    ],
    ids=str,
)
def test_the_number_of_nodes_may_be_left_out(given: list[str], expected: list[str]) -> None:
    """Without a number one node is meant; values of other options and the arguments of a program stay as they are."""
    assert with_count(given, {"--run", "--task", "--servers"}, stops_at_program=True) == expected
