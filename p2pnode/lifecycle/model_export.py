"""Writes the model as a file of its own: at the end of a run, and from a checkpoint for `p2pnode export`.

While the node trains, the trainer's description of the model is kept in the state directory, in `model/`, with the
tensors that training never changes. Together with a checkpoint's vector that is the whole model
(`training.model_file`), so it can be written without the trainer.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from p2pnode.config.settings import Config
from p2pnode.lifecycle.environment import NodeEnvironment
from p2pnode.overlay.environment import Disk
from p2pnode.overlay.system import FolderDisk
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.errors import TrainingError
from p2pnode.training.layout import Layout
from p2pnode.training.model_file import BadModelFile, Piece, TensorFile, model_pieces, open_fixed
from p2pnode.training.supervisor.launch import add_checkout
from p2pnode.training.trainer_link.interface import ModelDescription, Trainer, TrainerFailed

FOLDER = "model"
DESCRIPTION = f"{FOLDER}/description.json"
#: Endings of a model's file: safetensors, or a plain `state_dict` as `torch.save` writes it.
SAFETENSORS, PICKLED = (".safetensors",), (".pt", ".pth")
#: While another process converts.
TICK_S = 0.1


class CannotExport(TrainingError):
    """The model's file could not be written; no partial file is left."""


class ModelExport:
    """The description of one node's model, and the file of its finished model."""

    def __init__(self, config: Config, environment: NodeEnvironment, trainer: Trainer) -> None:
        self._settings = config.training
        self._trainer = trainer
        self._clock = environment.clock
        self._disk = environment.disk
        self._executor = environment.executor
        self._log = environment.log
        path = environment.state_path
        self._state_path = None if path is None else path.absolute()
        self._described_s: float | None = None
        self._failing = False
        self.description: ModelDescription | None = None

    async def describe_if_due(self) -> None:
        """Renew the description on disk as often as checkpoints are written, the first time at once."""
        period_s = self._settings.checkpoint_s
        now = self._clock.monotonic()
        if not period_s or (self._described_s is not None and now - self._described_s < period_s):
            return
        self._described_s = now
        try:
            await self._describe(wait=False)
        except (TrainerFailed, OSError) as error:
            if not self._failing:
                self._log.warning("model_not_described", reason=str(error))
            self._failing = True
        else:
            self._failing = False

    async def _describe(self, *, wait: bool) -> None:
        folder = "" if self._state_path is None else str(self._state_path / FOLDER)
        self.description = await self._trainer.describe(folder, wait=wait)
        raw = msgspec.json.encode(self.description)
        await self._executor.run(self._disk.write, DESCRIPTION, raw)

    async def describe_last(self) -> ModelDescription | None:
        """The model at the end, its fixed tensors on disk; an earlier description if the trainer does not answer."""
        try:
            await self._describe(wait=True)
        except (TrainerFailed, OSError) as error:
            self._log.warning("model_not_described", reason=str(error))
        return self.description

    async def write(self, description: ModelDescription, layout: Layout, vector: Vector) -> tuple[str, str]:
        """Write the file that `training.export` names; returns its path and the hex SHA-256 of the model.

        The digest is that of the safetensors file, also for other endings. Raises `CannotExport`.
        """
        path = export_path(self._settings.export, self._state_path)
        try:
            return str(path), await self._executor.run(self._write, description, layout, vector, path)
        except (BadModelFile, OSError) as error:
            reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
            raise CannotExport(f"{path} could not be written: {reason}") from error

    def _write(self, description: ModelDescription, layout: Layout, vector: Vector, path: Path) -> str:
        entries = {entry.name: entry for entry in layout.entries}

        def values(name: str) -> Iterable[Vector]:
            entry = entries.get(name)
            return () if entry is None else (vector[entry.offset : entry.offset + entry.size],)

        with fixed_tensors(self._state_path, description) as fixed:
            pieces = model_pieces(description, values, fixed)
            if self._state_path is None:  # a simulated node
                return write_pieces(self._disk, path.name, pieces)
            if path.suffix in SAFETENSORS:
                return write_pieces(FolderDisk(path.parent), path.name, pieces)
            whole, pickled = path.with_name(f".{path.name}.safetensors"), path.with_name(f".{path.name}.part")
            try:
                digest = write_pieces(FolderDisk(whole.parent), whole.name, pieces)
                convert(whole, pickled)
                pickled.replace(path)
            finally:
                whole.unlink(missing_ok=True)
                pickled.unlink(missing_ok=True)
            return digest


def export_path(export: str, state_path: Path | None) -> Path:
    """Where `training.export` is: a relative path is inside the state directory."""
    path = Path(export).expanduser()
    return path if path.is_absolute() or state_path is None else state_path.absolute() / path


def write_pieces(disk: Disk, name: str, pieces: Iterable[Piece]) -> str:
    """Write a file whole or not at all; returns its hex SHA-256. Raises `OSError`, and as `pieces` does."""
    digest = hashlib.sha256()
    file = disk.create(name)
    try:
        for piece in pieces:
            digest.update(piece)
            file.write(memoryview(piece))
        file.commit()
    except BaseException:
        file.discard()
        raise
    return digest.hexdigest()


@contextlib.contextmanager
def fixed_tensors(state_path: Path | None, description: ModelDescription) -> Iterator[TensorFile | None]:
    """The tensors that training never changed, checked by their digest; None if there are none.

    Raises `BadModelFile`.
    """
    file = None if state_path is None else open_fixed(state_path / FOLDER, description)
    if file is None:
        yield None
        return
    with file:
        tensors = TensorFile.of(file)
        if tensors.digest() != description.fixed_digest:
            raise BadModelFile(f"{file.name} is damaged, or of another model: remove it while a node trains here")
        yield tensors


def read_description(state_path: Path) -> ModelDescription | None:
    """The description in a state directory; None if there is none. Raises `BadModelFile`."""
    try:
        return msgspec.json.decode((state_path / DESCRIPTION).read_bytes(), type=ModelDescription)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise BadModelFile(f"{state_path / DESCRIPTION} cannot be read: {error}") from error


def checkpoint_pieces(state_path: Path, checkpoint: Path, description: ModelDescription) -> Iterator[Piece]:
    """The whole model of a checkpoint, as a safetensors file; `checkpoint` is its vector. Raises `BadModelFile`."""
    try:
        with checkpoint.open("rb") as file, fixed_tensors(state_path, description) as fixed:
            yield from model_pieces(description, TensorFile.of(file).values, fixed)
    except OSError as error:
        raise BadModelFile(f"{checkpoint} cannot be read: {error.strerror or error}") from error


def convert(source: Path, target: Path, tick: Callable[[], None] = lambda: None) -> None:
    """Convert safetensors to a plain `state_dict`, in another process, because this one never imports torch.

    `tick` is called every `TICK_S` until it is done. Raises `BadModelFile`.
    """
    command = [sys.executable, "-m", "p2pnode.training.trainer.convert", str(source), str(target)]
    environment = dict(os.environ)
    add_checkout(environment)
    done = watched(command, environment, tick)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it printed no reason"]
        raise BadModelFile(f"the model could not be converted: {last[0]}")


def watched(
    command: list[str], environment: dict[str, str], tick: Callable[[], None]
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with what it prints as errors; it is killed if `tick` raises."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    _, errors = process.communicate(timeout=TICK_S)
                    return subprocess.CompletedProcess(command, process.returncode, "", errors)
                tick()
        except BaseException:
            process.kill()
            process.wait()
            raise
