"""The actions: what computes a data set and returns a value to the script."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from training.engines.mapreduce import stages
from training.engines.mapreduce.backends import Backend, StageTask
from training.engines.mapreduce.errors import function_failed
from training.engines.mapreduce.plan import Lineage, Planner
from training.engines.mapreduce.sinks import FolderSink, SaveFormat
from training.engines.mapreduce.stages import Block, Function, Stage, Transformation, chained, decoded, encoded

#: In errors, the process of the script has this partition: it combines what the others made.
OF_SCRIPT = -1


class Actions:
    """Computes data sets by a backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def _run(self, dataset: Lineage, run: Function, **constants: Any) -> list[Any]:
        tasks = [
            StageTask(partial(run, stage=ready.stage, **constants), ready.inputs, ready.stage.name)
            for ready in Planner(self._backend).ready(dataset)
        ]
        return self._backend.values(self._backend.run(tasks))

    def collect(self, dataset: Lineage) -> list[Any]:
        """All elements, partition after partition."""
        return list(chained(self._run(dataset, stages.collect)))

    def count(self, dataset: Lineage) -> int:
        """How many elements."""
        return sum(self._run(dataset, stages.count))

    def reduce(self, dataset: Lineage, function: Function, name: str) -> Any:
        """Combined, or None for no element."""
        blocks = self._run(dataset, stages.reduce, function=function, name=name)
        found = stages.reduced(chained(blocks), function, name, OF_SCRIPT)
        return found[0] if found else None

    def fold(self, dataset: Lineage, function: Function, initial: Any, combine: Function | None, name: str) -> Any:
        """Folded, the partitions one after the other; or at the same time, and then combined."""
        first = self._block([initial], name)
        if combine is not None:
            blocks = self._run(dataset, partial(stages.fold, before=first), function=function, name=name)
            state = initial
            for value in chained(blocks):
                try:
                    state = combine(state, value)
                except Exception as error:
                    raise function_failed(f"{name}: combine", value, OF_SCRIPT, error) from None
            return state
        for ready in Planner(self._backend).ready(dataset):
            task = partial(_fold, stage=ready.stage, function=function, name=name)
            (first,) = self._backend.run([StageTask(task, [first, ready.inputs], name)])
        (block,) = self._backend.values([first])
        return next(decoded(block))

    def save(self, dataset: Lineage, folder: str | Path, form: SaveFormat) -> int:
        """Written; returns the number of elements."""
        sink = FolderSink(folder, form)
        sink.begin()
        try:
            counts = self._run(dataset, stages.write, write_part=sink.write)
            sink.finish()
        except BaseException:
            sink.abandon()
            raise
        return sum(counts)

    def _block(self, items: list[Any], name: str) -> Block:
        return encoded(items, Stage(decoded, (Transformation("map", name, None),), OF_SCRIPT, self._backend.is_remote))


def _fold(inputs: list[Any], stage: Stage, function: Function, name: str) -> Block:
    before, own = inputs
    return stages.fold(own, before, stage, function, name)
