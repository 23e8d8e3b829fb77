"""The start of a trainer process: its environment variables, what it is told first (the settings, its seeds, and where
its records come from), and what it says of itself.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import p2pnode
from p2pnode.training.devices.gpus import SEE_DRIVER
from p2pnode.training.layout import Layout
from p2pnode.training.settings import TrainingSettings
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.engine_messages import EngineOpened
from p2pnode.training.trainer_link.interface import SAME_VALUES, TrainerFailed, TrainerHello
from p2pnode.training.trainer_link.record_messages import RecordSource

#: Settings for glibc's malloc. By default it returns the gradients' pages to the kernel at each optimiser step and
#: requests them again at the next, which halved the speed of small models on the CPU.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 * 1024 * 1024), "MALLOC_TRIM_THRESHOLD_": str(4 * 1024**3)}


def add_checkout(environment: dict[str, str]) -> None:
    """Let another Python find a checkout that is not installed, whatever its working directory."""
    root = Path(p2pnode.__file__).resolve().parent.parent
    # These must not come before the standard library.
    if root.name not in ("site-packages", "dist-packages"):
        paths = (str(root), environment.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


def environment_of(settings: TrainingSettings, *, is_script: bool) -> dict[str, str]:
    """Of a trainer process; a script is the user's own command, not the task class of the settings."""
    environment = dict(os.environ)
    environment[messages.DAEMON_VARIABLE] = str(os.getpid())
    if settings.threads:
        environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(settings.threads)
    if not is_script:
        add_checkout(environment)
    environment["PYTHONUNBUFFERED"] = "1"
    if not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in environment):
        environment |= KEEP_MEMORY
    return environment


class NodeStart(NamedTuple):
    """One start of a node; `incarnation` counts them. `records`: where its trainer gets records from. The trainer is
    number `device` of the `devices` of the node."""

    node_id: bytes
    incarnation: int
    records: RecordSource | None = None
    device: int = 0
    devices: int = 1


def start_message(settings: TrainingSettings, node: NodeStart, starts: int) -> messages.Start:
    """The daemon's first message at the start number `starts` of this node's trainer."""
    assert isinstance(settings.device, str), "training.devices.start names one"
    source = messages.trainer_id(node.node_id, node.device)
    return messages.Start(
        task=settings.task,
        data_dir=str(Path(settings.data_dir).expanduser().absolute()) if settings.data_dir else "",
        options=settings.options,
        device=settings.device,
        threads=settings.threads,
        seed=settings.seed,
        node_seed=messages.derive_node_seed(settings.seed, source),
        local_steps=settings.local_steps,
        start_seed=messages.derive_start_seed(settings.seed, source, node.incarnation, starts),
        records=node.records,
        device_index=node.device,
        device_count=node.devices,
    )


def hello_of(opened: messages.Hello | EngineOpened) -> TrainerHello:
    """The trainer as it describes itself. A script with an engine has an empty layout: it trains no model."""
    if isinstance(opened, messages.Hello):
        return opened.hello
    return TrainerHello(Layout(()), f"engine {opened.kind}", "1", "", "cpu", pid=opened.pid, engine=opened)


def refuse_another_model(before: TrainerHello, now: TrainerHello) -> None:
    """Raises `TrainerFailed` where a restarted trainer cannot go on from the shared values."""
    if before.layout != now.layout:
        raise TrainerFailed(
            "the restarted trainer built another model than before",
            "the model's code changed while the node ran: stop the node and start it again",
            fatal=True,
        )
    if name := before.differing(now):
        raise TrainerFailed(
            f"the tensor {name}, which is not exchanged, is another in the restarted trainer than before",
            SAME_VALUES,
            fatal=True,
        )
    if "cuda" in before.device and "cuda" not in now.device:
        raise TrainerFailed(
            f"the restarted trainer is on {now.device}, and the one before was on {before.device}: its GPU does not "
            "answer any more",
            SEE_DRIVER,
        )
