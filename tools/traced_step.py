"""Count the functions, classes and files of our packages that one training step passes. `tools.size` runs it.

The working directory is the root of a tree, and PYTHONPATH names it, so everything traced is that tree's code. Two
whole nodes train on the simulated network (`tests.harness`), in one process, with stub trainers. Functions of the
trainer process, of its supervisor and of real sockets are therefore not counted.

A step lasts from one delta of the first node to its next one: push, barrier, pull, and the order to train. A function
is on the way of a step if it is called in each of `WINDOWS` consecutive steps, on either node. Steps are short, so
what runs by a timer (rounds of the membership, placement) is left out. Lambdas and comprehensions belong to the
function around them. A class counts if one of its methods does.

Prints one JSON object: functions, classes, files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType

PACKAGES = ("overlay", "training", "p2pnode")
#: Steps that are not counted: by then the shards are placed and the codec is chosen.
WARM_UP = 20
WINDOWS = 8
#: Virtual seconds that the stub trains: shorter than the period of any timer.
STEP_S = 0.05
#: Values of the model.
SIZE = 4096


class TracedSteps(list[int]):
    """The steps of which a trainer has handed over the delta. Each `append` begins a window."""

    def __init__(self) -> None:
        super().__init__()
        self.windows: list[set[CodeType]] = []

    def append(self, step: int) -> None:
        super().append(step)
        if len(self) >= WARM_UP:
            self.windows.append(set())
            sys.setprofile(self._note)

    def __iadd__(self, steps: Iterable[int]) -> TracedSteps:  # type: ignore[misc,override]
        """Of one delta."""
        *others, last = steps
        self.extend(others)
        self.append(last)
        return self

    @property
    def is_over(self) -> bool:
        return len(self.windows) > WINDOWS

    def _note(self, frame: FrameType, event: str, _arg: object) -> None:
        if event == "call":
            self.windows[-1].add(frame.f_code)

    def passed(self) -> set[CodeType]:
        """What was called in each whole window."""
        return set.intersection(*self.windows[:WINDOWS])


def summary(codes: Iterable[CodeType], root: Path) -> dict[str, int]:
    """The counts of what belongs to the packages below `root`."""
    folders = tuple(f"{root / package}/" for package in PACKAGES)
    ours = [code for code in codes if code.co_filename.startswith(folders) and not code.co_name.startswith("<")]
    classes = set()
    for code in ours:
        outer = code.co_qualname.partition(".<locals>")[0] if ".<locals>" in code.co_qualname else code.co_qualname
        if "." in outer:
            classes.add((code.co_filename, outer.rpartition(".")[0]))
    return {"functions": len(ours), "classes": len(classes), "files": len({code.co_filename for code in ours})}


async def trained() -> TracedSteps:
    """Train until the windows are full."""
    from tests.harness.swarms.swarm import Swarm
    from tests.harness.trainers.stub_trainer import StubTrainer

    steps = TracedSteps()
    swarm = Swarm(
        seed=1,
        settings={"training.min_nodes": 2},
        make_trainer=lambda name: StubTrainer(name, SIZE, step_s=STEP_S),
    )
    try:
        first, _ = swarm.start_many(2)
        assert first.trainer is not None
        first.trainer.trained = steps
        await swarm.until(lambda: steps.is_over, within_s=600, what="the traced steps")
    finally:
        sys.setprofile(None)
        await swarm.stop()
    return steps


def main() -> None:
    from tests.harness.environment.virtual_loop import VirtualLoop

    steps: list[TracedSteps] = []

    async def run() -> None:
        steps.append(await trained())

    VirtualLoop().run(run(), limit_s=3600)
    print(json.dumps(summary(steps[0].passed(), Path.cwd())))


if __name__ == "__main__":
    main()
