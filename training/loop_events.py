"""What the step loop logs of a run's beginning and end. Pure."""

from __future__ import annotations

from p2pnode.overlay.environment import Log

NO_END = (
    "it trains until you stop it (`p2pnode leave`); set training.max_steps, training.max_seconds or training.until "
    "for a run that ends by itself and writes its model"
)


def note_start(log: Log, step: int, *, has_end: bool) -> None:
    """The run begins after `step`."""
    log.info("training_started", step=step)
    if not has_end:
        log.info("run_has_no_end", hint=NO_END)


def note_left(log: Log, reason: str, steps: int) -> None:
    """The script has ended its node, after so many steps of this start."""
    if steps:
        log.info("script_left", reason=reason, steps=steps)
    else:
        hint = "a step is local_steps calls of swarm.step(); the swarm has received nothing from this node"
        log.warning("script_left", reason=reason, steps=steps, hint=hint)
