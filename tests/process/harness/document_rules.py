"""How each kind of command of the documents is run: on which machine, after what, and what it prints.

Placeholders are replaced by what they stand for: the address of the founder, the HTTP API, a folder. The commands of
the README make a closed swarm of two nodes, which most other commands then ask. A rule recognizes a command by its
beginning, so the text of a command is in the documents alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.harness.project import documents
from tests.harness.project.documents import Shown
from tests.process.harness.documented import Home, programs, until
from tests.process.harness.free_port import free_port
from tests.process.harness.snippet_scripts import script_of

#: What the documents use for the founder and for a node's API.
FOUNDER, API, PLACE = "192.0.2.10:8468", "127.0.0.1:8080", "HOST:PORT"
STATE = ".local/state/p2pnode"
#: Small runs that end by themselves.
SMALL = {"P2PNODE_TRAINING__MAX_STEPS": "3", "P2PNODE_TRAINING__LOCAL_STEPS": "2", "P2PNODE_TRAINING__LINGER_S": "0"}
CHECKPOINTS = {"P2PNODE_TRAINING__CHECKPOINT_S": "1"}
#: When a command is run: the swarm trains as long as it lives, so what needs none comes first; what ends it comes last.
ALONE, FOUNDING, SWARM, ROTATION, LEAVING, AFTERWARDS = range(6)


class World:
    """The machines, and what has been run on them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._programs = programs(folder / "bin")
        self._homes: dict[str, Home] = {}
        self._done: set[str] = set()
        self._is_founded = False

    def home(self, name: str) -> Home:
        if name not in self._homes:
            self._homes[name] = Home(self._folder / name, self._programs)
        return self._homes[name]

    def run(self, command: str) -> None:
        """Run a command as its rule says, unless it has been run; before it, the ones that make the swarm."""
        rule = rule_of(command)
        assert rule is not None, command
        if rule.phase >= FOUNDING and not self._is_founded:
            self._is_founded = True
            for shown in founding():
                self.run(shown.text)
        if command in self._done:
            return
        self._done.add(command)
        rule.run(self, command)

    def placed(self, command: str) -> str:
        """The command with what its placeholders stand for."""
        if API in command:
            command = command.replace(API, self.home("A").node().address.removeprefix("http://"))
        command = command.replace("--port 8469", f"--port {free_port()}")
        return command.replace(FOUNDER, f"127.0.0.1:{self.home('A').port}")

    def end(self) -> None:
        for home in self._homes.values():
            home.end()


class Rule(NamedTuple):
    """Commands that begin like this, and how they are run."""

    begins: str
    run: Callable[[World, str], None]
    phase: int = SWARM


def ends(home: str, says: str = "", **options: object) -> Callable[[World, str], None]:
    """It ends with 0 and prints a line like this."""

    def run(world: World, command: str) -> None:
        environment, code = options.get("environment"), options.get("code", 0)
        assert environment is None or isinstance(environment, dict)
        assert isinstance(code, int)
        printed = world.home(home).do(world.placed(command), environment, code)
        assert re.search(says, printed, re.MULTILINE), f"{command}\n{printed}"

    return run


def serves(home: str, says: str = "") -> Callable[[World, str], None]:
    """It starts a node in the foreground, which trains, and ends with 0 when it is told to."""

    def run(world: World, command: str) -> None:
        printed = world.home(home).serve(world.placed(command))
        assert re.search(says, printed, re.MULTILINE), f"{command}\n{printed}"

    return run


def follows(home: str, says: str) -> Callable[[World, str], None]:
    """It prints lines like this until Ctrl-C."""

    def run(world: World, command: str) -> None:
        printed = world.home(home).follow(world.placed(command))
        assert re.search(says, printed, re.MULTILINE), f"{command}\n{printed}"

    return run


def invites(world: World, command: str) -> None:
    """The invitation is brought to the other machines."""
    ends("A")(world, command)
    for name in "BD":
        if not (world.home(name).folder / "invitation.txt").exists():
            world.home(name).take("invitation.txt", world.home("A"))


def joins(world: World, command: str) -> None:
    ends("B", environment=CHECKPOINTS)(world, command)
    homes = world.home("A"), world.home("B")
    until(
        lambda: all(home.status().get("population", {}).get("estimate") == 2 for home in homes),
        lambda: "\n".join(home.log for home in homes),
    )
    until(lambda: all(home.status()["step"] >= 1 for home in homes), lambda: "they train")


def closed_start(world: World, command: str) -> None:
    """C has a key of its own, as the line before the command says."""
    [new] = [shown.text for shown in documents.commands() if shown.text.startswith("p2pnode key new")]
    world.home("C").do(new)
    serves("C")(world, command)


def later_start(world: World, command: str) -> None:
    """C has been started before, and remembers its run."""
    for shown in documents.commands():
        if shown.text.startswith(("p2pnode start --run digits --task", "python3 -c", "chmod")):
            world.run(shown.text)
    home = world.home("C")
    written = re.search(r"tracker=\w+:(\S+)", command)  # in the state directory

    def has_written() -> bool:
        if written is None:
            return True
        place = home.folder / STATE / "digits" / written[1]
        return any(path.stat().st_size for path in (place, *place.glob("**/*")) if path.is_file())

    home.serve(world.placed(command), has_worked=has_written)


def master(world: World, command: str) -> None:
    """A node of its own in the swarm, whose key it has been given."""
    world.home("M").take(f"{STATE}/digits/swarm.key", world.home("A"))
    home = world.home("M")
    home.serve(world.placed(command), {"P2PNODE_SWARM__RUN": "digits"})


def background(world: World, command: str) -> None:
    ends("E", "process")(world, command)
    assert world.home("E").status()["state"] in ("joining", "training")


def exports(world: World, command: str) -> None:
    """There is a checkpoint already."""
    home = world.home("A")
    until(lambda: bool([*home.folder.glob(f"{STATE}/digits/checkpoints/*")]), lambda: home.log)
    ends("A")(world, command)
    assert (home.folder / "backup.safetensors").stat().st_size > 1000


def pauses(world: World, command: str) -> None:
    ends("A", "accepted|paus")(world, command)
    until(lambda: world.home("A").status()["state"] == "paused", lambda: "it pauses")
    world.home("A").do("p2pnode resume")


def shows_status(world: World, command: str) -> None:
    """The answer has everything that the README shows of it."""
    printed = world.home("A").do(world.placed(command).replace("curl ", "curl --silent --show-error "))
    [shown] = documents.json_blocks("README.md")

    def missing(part: object, whole: object, place: str) -> list[str]:
        if not isinstance(part, dict):
            return []
        assert isinstance(whole, dict), place
        found = [f"{place}.{key}" for key in part if key not in whole]
        return found + [m for key in part if key in whole for m in missing(part[key], whole[key], f"{place}.{key}")]

    live = json.loads(printed)
    live["training"]["metrics"].setdefault("accuracy", 0.0)  # not evaluated yet
    assert missing(json.loads(shown), live, "") == []


def rotates(world: World, command: str) -> None:
    """On every node; `prepare` once, then its key file is brought to the others."""
    for name in "AB":
        if name == "B" and "prepare" in command:
            world.home("B").take(f"{STATE}/digits/swarm.key", world.home("A"))
        else:
            world.home(name).do(command)


def reopens(world: World, command: str) -> None:
    """The founder is lost; B has ended before."""
    world.home("A").do("p2pnode leave")
    serves("B")(world, command)


def forgets(world: World, command: str) -> None:
    """It lists what it would remove, and asks."""
    assert "identity.key" in world.home("E").answer(command, "digits")
    assert not (world.home("E").folder / STATE / "digits").exists()


def script(home: str, needle: str, name: str) -> Callable[[World, str], None]:
    """A run of a script of the documents, to its end."""

    def run(world: World, command: str) -> None:
        [shown] = [shown for shown in documents.snippets() if needle in shown.text]
        one = script_of(shown)
        assert one is not None
        (world.home(home).folder / name).write_text(one.whole(shown.text))
        world.home(home).do(world.placed(command), SMALL)

    return run


def workers(world: World, command: str) -> None:
    """The server runs already, on another machine, and ends after its workers."""
    server_home, worker_home = world.home("server"), world.home("worker")
    [shown] = [shown for shown in documents.snippets() if 'p2pnode.engine("server")' in shown.text]
    one = script_of(shown)
    assert one is not None
    for home in (server_home, worker_home):
        (home.folder / "script.py").write_text(one.whole(shown.text))
    [first] = [shown.text for shown in documents.commands() if "--set node.role=server" in shown.text]
    server = server_home.start(first, SMALL | {"P2PNODE_TRAINING__MIN_NODES": "2"})
    until(lambda: bool(server_home.status()) or server.poll() is not None, lambda: server_home.log)
    worker_home.do(command.replace(PLACE, f"127.0.0.1:{server_home.port}"), SMALL)
    assert server.wait(240) == 0, server_home.log


def sources(world: World) -> Home:
    """Small files like those that the commands of `p2pnode records` read."""
    home = world.home("tools")
    if not (home.folder / "corpus").exists():
        (home.folder / "corpus").mkdir()
        for number in range(2):
            (home.folder / f"corpus/{number}.txt").write_text("one\ntwo\n")
        (home.folder / "more.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
        np.savez(home.folder / "mnist.npz", images=np.zeros((4, 2, 2), np.uint8), labels=np.zeros(4, np.uint8))
        (home.folder / "steps.json").write_text(json.dumps([0.1, 0.2, 0.3, 0.4]))
    return home


def tool(says: str) -> Callable[[World, str], None]:
    def run(world: World, command: str) -> None:
        sources(world)
        ends("tools", says)(world, command)

    return run


def asks(begins: str, says: str) -> Rule:
    return Rule(begins, ends("A", says))


TRAINS = r"^(training|waiting|joining|paused|exchanging)\b"
RULES = [
    Rule("p2pnode key new", ends("A", r"swarm\.key"), FOUNDING),
    Rule("p2pnode start --background .*--run", ends("A", "process", environment=CHECKPOINTS), FOUNDING),
    Rule("p2pnode key invite", invites, FOUNDING),
    Rule("p2pnode start --background .*--invite", joins, FOUNDING),
    asks("p2pnode status$", TRAINS),
    asks("p2pnode peers$", "training"),
    asks("p2pnode dashboard( --no-open)?$", "http://127.0.0.1:[0-9]+/swarm"),
    asks("p2pnode doctor$", "clock"),
    asks("p2pnode logs --level warning$", ""),
    Rule("p2pnode watch$", follows("A", "step")),
    Rule("p2pnode logs .*--follow$", follows("A", r"\w")),
    Rule("p2pnode leave$", ends("B", "has left"), LEAVING),
    Rule("p2pnode run -- python train.py$", script("script", "train_one_batch(model, optimizer)\n", "train.py"), ALONE),
    Rule(
        "p2pnode run --set 'training.device=",
        script("devices", "train_one_batch(model, optimizer)\n", "train.py"),
        ALONE,
    ),
    Rule(
        "p2pnode run .*examples/records.py --make$",
        ends("records", "this node trained", environment=SMALL),
        ALONE,
    ),
    Rule("p2pnode start --set node.role=master", master),
    Rule("p2pnode run --local 3 --servers 1 -- python script.py$", script("server3", '"server")', "script.py"), ALONE),
    Rule("p2pnode run --set node.role=server", lambda world, _: run_worker(world), ALONE),
    Rule("p2pnode run --bootstrap", workers, ALONE),
    Rule("curl http://.*/status$", shows_status),
    Rule("curl .*/pause$", pauses),
    Rule("p2pnode start --run digits --background", background, ALONE),
    Rule("p2pnode leave --run digits", ends("E", "has left"), ALONE),
    Rule("p2pnode forget", forgets, ALONE),
    Rule("python3 -c .* > status.token$", ends("C"), ALONE),
    Rule("chmod 640 status.token$", ends("C"), ALONE),
    Rule("p2pnode start --set status.host", later_start, ALONE),
    Rule("p2pnode start --set training.tracker", later_start, ALONE),
    Rule("p2pnode export", exports),
    Rule("p2pnode start --run digits --task", closed_start, ALONE),
    Rule("p2pnode start --set node.host=0.0.0.0 --invite", serves("D")),
    Rule("p2pnode key rotate", rotates, ROTATION),
    Rule("p2pnode start --reopen", reopens, AFTERWARDS),
    asks("p2pnode simulate advise", r"pssp|asp"),
    Rule("p2pnode simulate", tool("pssp"), ALONE),
    Rule("p2pnode records", tool(r"\w"), ALONE),
]


def run_worker(world: World) -> None:
    """The server's command is run together with its worker's."""
    [worker] = [shown.text for shown in documents.commands() if shown.text.startswith("p2pnode run --bootstrap")]
    world.run(worker)


def rule_of(command: str) -> Rule | None:
    return next((rule for rule in RULES if re.match(rule.begins, command)), None)


def founding() -> list[Shown]:
    """The commands of the README that make a swarm of two."""
    begin = ("p2pnode key new", "p2pnode start --background", "p2pnode key invite")
    return [shown for shown in documents.commands() if shown.document == "README.md" and shown.text.startswith(begin)]
