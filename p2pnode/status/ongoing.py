"""What takes long on a node, how far it is, and the time to go: `/status.progress`."""

from __future__ import annotations

from p2pnode.lifecycle.node import Node
from p2pnode.status.schema import Ongoing


def ongoing(node: Node, uptime_s: float) -> list[Ongoing]:
    """The join, the download of the state, nodes that are missing, the steps of the run, and the last checkpoint."""
    found = []
    if node.phase == "joining":
        found.append(_join(node, uptime_s))
    if node.state == "waiting_for_nodes":
        have, need = node.nodes_ready(), node.config.training.min_nodes
        found.append(Ongoing(what="nodes", done=min(have, need), total=need, unit="nodes", since_seconds=uptime_s))
    if (steps := _steps(node)) is not None:
        found.append(steps)
    if node.checkpoints is not None and (written := node.checkpoints.last_written) is not None:
        found.append(_bytes("last checkpoint", *written))
    return found


def awaits_script(node: Node) -> bool:
    """Whether the user's script runs and has neither called `attach` nor opened an engine: it may read data for
    minutes, or never do so."""
    return node.trainer.is_script and node.trainer.state == "starting"


def _join(node: Node, uptime_s: float) -> Ongoing:
    exchange = node.exchange
    if exchange is not None and (download := exchange.pull_client.download) is not None:
        return _bytes("download of the state", *download)
    if node.overlay.genesis is None:
        what = "join the swarm"
    elif node.manifest is None:
        what = "start the trainer" if not awaits_script(node) else "wait until the script calls p2pnode.attach"
    else:
        what = "join"
    return Ongoing(what=what, done=0, total=0, unit="", since_seconds=uptime_s)


def _steps(node: Node) -> Ongoing | None:
    """The steps of a run with an end, while it trains."""
    total, step, turn_s = node.config.training.max_steps, node.progress.step, node.progress.turn_seconds
    if not total or node.phase != "training":
        return None
    left_s = None if turn_s is None else round(max(0, total - step) * turn_s, 1)
    done_s = 0.0 if turn_s is None else round(step * turn_s, 1)
    return Ongoing(
        what="max_steps", done=min(step, total), total=total, unit="steps", since_seconds=done_s, left_seconds=left_s
    )


def _bytes(what: str, done: int, total: int, passed_s: float) -> Ongoing:
    """Work that is counted in bytes; the rest goes as the part that is done."""
    left_s = round((total - done) * passed_s / done, 1) if done > 0 else None
    return Ongoing(
        what=what, done=done, total=total, unit="bytes", since_seconds=round(passed_s, 3), left_seconds=left_s
    )
