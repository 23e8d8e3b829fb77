"""Commands on files: `init`, `config show|default|check`, `export`. None of them needs a running node."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from p2pnode.commands.options import JsonOption, Place, takes
from p2pnode.commands.output import print_answer
from p2pnode.config.rules import check_start, warnings_for
from p2pnode.config.settings import KEYS, Config
from p2pnode.config.state_folders import local_folders
from p2pnode.config.toml import node_toml, template
from p2pnode.errors import ExitCode, UserError
from p2pnode.screen import ProgressBar, progress_bar

ForceOption = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]

config_app = typer.Typer(help="Show, explain and check the configuration.", rich_markup_mode=None)


def init(
    path: Annotated[Path, typer.Argument(help="File to write, or the folder to write node.toml in.")] = Path(
        "node.toml"
    ),
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> int:
    """Write a node.toml with the settings that matter, each with its default and a line of explanation.

    Example: p2pnode init && p2pnode start
    """
    if path.is_dir():
        path = path / "node.toml"
    with new_file(path, force) as draft:
        draft.write_text(template(), encoding="utf-8")
    text = f"wrote {path}; edit it, then: p2pnode start --config {path}"
    return print_answer(text, {"path": str(path)}, as_json=as_json)


@config_app.command("show")
@takes(Place)
def config_show(
    place: Place,
    origin: Annotated[bool, typer.Option("--origin", help="Print the source of each value.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Print the configuration with which a node would start here, with what its state directory remembers."""
    found = place.loaded()
    answer = {"config": msgspec.to_builtins(found.config)} | ({"origin": found.origins} if origin else {})
    text = node_toml(found.config, found.origins if origin else None).rstrip()
    return print_answer(text, answer, as_json=as_json)


@config_app.command("default")
def config_default(as_json: JsonOption = False) -> int:
    """Print every setting with its default and its explanation."""
    return print_answer(template(KEYS).rstrip(), {"config": msgspec.to_builtins(Config())}, as_json=as_json)


@config_app.command("check")
@takes(Place)
def config_check(place: Place, as_json: JsonOption = False) -> int:
    """Check the configuration without starting anything; exit code 4 if it cannot work."""
    found = place.loaded()
    for problem in check_start(found.config):
        raise UserError(problem.what, problem.do, ExitCode.CONFIGURATION)
    warnings = warnings_for(found.config)
    for problem in warnings if not as_json else []:
        sys.stderr.write(f"warning: {problem.what}\nhint: {problem.do}\n")
    answer = {"warnings": [problem._asdict() for problem in warnings]}
    return print_answer("the configuration is valid", answer, as_json=as_json)


@takes(Place)
def export(
    place: Place,
    path: Annotated[Path, typer.Argument(help="File to write: .safetensors, or .pt for a plain state_dict.")],
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> int:
    """Write the whole model of the newest checkpoint of a state directory, for a strict load_state_dict.

    Example: p2pnode export model.safetensors --state-dir ~/.local/state/p2pnode
    """
    if path.suffix not in (".safetensors", ".pt", ".pth"):
        hint = "end it in .safetensors or .pt"
        raise UserError(f"{path} does not end in a known format", hint, ExitCode.USAGE)
    folder, step, vector = newest_checkpoint(place.loaded().config.state_folder)
    from p2pnode.training.files.model_file import BadModelFile  # here: numpy is not needed by the other commands

    try:
        with new_file(path, force) as draft:
            _write_model(folder, vector, draft)
    except BadModelFile as error:
        hint = "start the node again for a moment, so that it writes what is missing"
        raise UserError(f"the model cannot be exported: {error}", hint, ExitCode.TRAINER) from None
    answer = {"path": str(path), "step": step, "checkpoint": str(vector.parent)}
    return print_answer(f"wrote {path}: the model of step {step}, from {vector.parent}", answer, as_json=as_json)


def _write_model(folder: Path, vector: Path, draft: Path) -> None:
    """Write the whole model of a checkpoint. Raises `BadModelFile`, `OSError`."""
    whole = draft if draft.suffix == ".safetensors" else draft.with_suffix(".safetensors")
    try:
        with progress_bar("export") as bar:
            with whole.open("wb") as file:
                total = vector.stat().st_size
                for piece in _model(folder, vector):
                    file.write(piece)
                    bar.show(min(file.tell(), total), total, "bytes")
            if whole != draft:
                _convert(whole, draft, bar)
    finally:
        if whole != draft:
            whole.unlink(missing_ok=True)


def _convert(whole: Path, draft: Path, bar: ProgressBar) -> None:
    """Make a plain `state_dict` of it, which takes the time to load PyTorch and as long as its file grows."""
    from p2pnode.lifecycle.model_export import convert

    total = whole.stat().st_size

    def tick() -> None:
        bar.show(min(draft.stat().st_size, total), total, "bytes", f"convert to {draft.suffix}")

    convert(whole, draft, tick)


def _model(folder: Path, vector: Path) -> Iterator[bytes | bytearray | memoryview]:
    """The pieces of the file; without a description that fits, the trained tensors alone, with a warning."""
    from p2pnode.lifecycle.model_export import checkpoint_pieces, read_description

    description = read_description(folder)
    written_for = json.loads((vector.parent / "state.json").read_text()).get("layout_digest", "")
    if description is not None and description.layout_digest == written_for:
        return checkpoint_pieces(folder, vector, description)
    what = "no description of the whole model" if description is None else "the description of another model"
    sys.stderr.write(
        f"warning: {folder} has {what}: the file has the trained tensors only\n"
        "hint: load it with strict=False, or start the node again for a step\n"
    )
    return iter([vector.read_bytes()])


def newest_checkpoint(state_folder: Path) -> tuple[Path, int, Path]:
    """State directory, step and vector file of the newest complete checkpoint. Nodes that `--local` started have their
    directories below this one: without a checkpoint of its own, that of the node with the highest step is taken. Raises
    `UserError` if there is none."""
    if (own := _newest(state_folder)) is not None:
        return state_folder, *own
    found = [(place, *theirs) for place in local_folders(state_folder) if (theirs := _newest(place)) is not None]
    if found:
        return max(found, key=lambda one: one[1])
    raise UserError(
        f"there is no checkpoint in {state_folder}",
        "name the node's state directory with --state-dir; a node writes checkpoints regularly and on leaving",
        ExitCode.STATE_DIRECTORY,
    )


def _newest(state_folder: Path) -> tuple[int, Path] | None:
    from p2pnode.overlay.system import FolderDisk  # here: asyncio is not needed by the other commands
    from p2pnode.training.files import checkpoint

    with contextlib.suppress(OSError):
        for folder in checkpoint.complete_folders(FolderDisk(state_folder)):
            vector = state_folder / folder / checkpoint.VECTOR_FILE
            if vector.is_file():
                return checkpoint.step_of(folder), vector
    return None


@contextlib.contextmanager
def new_file(path: Path, force: bool) -> Iterator[Path]:
    """A temporary file that replaces `path` if the block succeeds, and is removed otherwise.

    Raises `UserError` if the file exists and `force` is false, or if it cannot be written.
    """
    if path.exists() and not force:
        hint = "name another file, or replace it with --force"
        raise UserError(f"{path} exists already", hint, ExitCode.STATE_DIRECTORY)
    draft = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
        os.close(handle)
        draft = Path(name)
        yield draft
        draft.chmod(0o644)
        draft.replace(path)
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}"
        raise UserError(message, "check the folder and its permissions", ExitCode.STATE_DIRECTORY) from None
    finally:
        if draft is not None:
            draft.unlink(missing_ok=True)
