"""Why a trainer process ended without saying so: from its exit code, its output and the counts of the kernel."""

from __future__ import annotations

import signal

from p2pnode.training.failures import cause_of
from p2pnode.training.supervisor import memory_group
from p2pnode.training.supervisor.process import OutputLog, TrainerProcess, name_of
from p2pnode.training.trainer_link.interface import TrainerFailed

#: Signals by which schedulers and people end a process: that is no failure of the script.
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def unexpected_end(process: TrainerProcess, output: OutputLog, *, is_fatal: bool) -> TrainerFailed:
    """The failure of a process that ended without a `Failed` message. `is_fatal`: a further start would end in the same
    way, unless a signal ended this one."""
    if process.returncode is None or process.returncode == 0:
        return TrainerFailed(
            "the training script ended before the swarm was done",
            "it has to call p2pnode.attach(model, optimizer) and swarm.step() until swarm.done, or p2pnode.engine(…)",
            fatal=process.returncode == 0,
        )
    code = output.printed_end.exit_code(process.returncode)
    if code == -signal.SIGKILL and process.memory_ran_out:
        return _killed_for_memory(memory_group.limit_bytes())
    exception, printed = output.printed_end.exception(code), output.last_lines
    # The last lines of a launcher are its banner.
    last = exception or (printed[-1] if printed and code == process.returncode else "")
    reason = f"the trainer ended with {name_of(code)}" + (f": {last}" if last else "")
    if not printed:
        reason += ": it printed nothing"
    # The terminal shows the script's traceback already.
    shown = f"what it printed is above and in {output.path}"
    lines = "".join(f"\n  {line}" for line in printed)
    hint = shown if output.is_shown else f"its last lines (more in {output.path}):{lines}"
    cause = "" if -code in FROM_OUTSIDE else cause_of(exception) or name_of(code)
    return TrainerFailed(reason, hint, fatal=is_fatal and code > 0, cause=cause)


def _killed_for_memory(limit_bytes: int | None) -> TrainerFailed:
    limit = "" if limit_bytes is None else f" of {limit_bytes / 1e6:,.0f} MB"
    return TrainerFailed(
        f"the kernel killed the trainer, because the memory limit{limit} of its control group was reached",
        "lower the batch size, the length of the sequences or the DataLoader's num_workers, or give the container more",
    )
