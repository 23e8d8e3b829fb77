"""Reading why a script ended from what it printed."""

from __future__ import annotations

import pytest

from p2pnode.training.supervisor.printed_end import MAX_LINES_AFTER, PrintedEnd

SCRIPT = """
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    raise ValueError("wrong: 17")
          ^^^^^^^^^^^^^^^^^^^^^^^
ValueError: wrong: 17
"""

CHAINED = """
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 7, in <module>
[rank1]:     raise KeyError("inner")
[rank1]: KeyError: 'inner'

[rank1]: The above exception was the direct cause of the following exception:

[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 8, in <module>
[rank1]: ValueError: wrong: 17
"""

#: What the other rank of gloo says then.
SECONDARY = """
[rank0]: Traceback (most recent call last):
[rank0]:   File "train.py", line 9, in <module>
[rank0]:     dist.all_reduce(torch.ones(3))
[rank0]: RuntimeError: [/pytorch/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:36012.
"""


def torchrun(first: int, other: int = -15) -> str:
    """What torchrun prints at the end: exit codes of the rank that it has seen to fail first, and of the other one."""
    return f"""
W1127 00:17:43.535000 7193 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 7 closing signal
E1127 00:17:43.552000 7193 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {first}) \
local_rank: 1 (pid: 7198) of binary: /usr/bin/python
Traceback (most recent call last):
  File "/lib/python3.11/site-packages/torch/distributed/run.py", line 1032, in <module>
    main()
  File "/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : {other} (pid: 7197)
  traceback : Signal 15 (SIGTERM) received by PID 7197
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : {first} (pid: 7198)
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


def accelerate(how: str) -> str:
    return f"""
Traceback (most recent call last):
  File "/lib/python3.11/site-packages/accelerate/commands/launch.py", line 999, in simple_launcher
    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)
subprocess.CalledProcessError: Command '['/usr/bin/python', 'train.py']' {how}
"""


STOPPED = """
Traceback (most recent call last):
  File "/lib/python3.11/site-packages/torch/distributed/run.py", line 1032, in <module>
    main()
torch.distributed.elastic.multiprocessing.api.SignalException: Process 8857 got signal: 15
"""

OWN_CHILD = """
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    subprocess.run(["false"], check=True)
subprocess.CalledProcessError: Command '['false']' returned non-zero exit status 7.
"""

GROUP = """
  + Exception Group Traceback (most recent call last):
  |   File "train.py", line 3, in <module>
  | ExceptionGroup: two (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "train.py", line 2, in load
    | ValueError: wrong: 17
    +------------------------------------
"""

BOXED = """
╭─────────────── Traceback (most recent call last) ───────────────╮
│ /home/me/train.py:3 in <module>                                  │
╰──────────────────────────────────────────────────────────────────╯
ValueError: wrong: 17
"""

SYNTAX = """
  File "train.py", line 3
    loss =
          ^
SyntaxError: invalid syntax
"""

BAR = "  3%|▎         | 1/30 [00:00<00:05,  5.06it/s]"


def end_of(printed: str, code: int = 1) -> tuple[int, str]:
    """The exit code and the exception of the script, whose process or launcher ended with `code`."""
    found = PrintedEnd()
    for line in printed.splitlines():
        if line.strip():
            found.read(line.rstrip())
    own = found.exit_code(code)
    return own, found.exception(own)


WRONG = (1, "ValueError: wrong: 17")


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (SCRIPT, WRONG),
        (BAR + SCRIPT.lstrip(), WRONG),
        (SCRIPT + "wandb: synced 5 files\n", WRONG),
        (SCRIPT + torchrun(1), WRONG),
        (SCRIPT + SCRIPT + torchrun(1), WRONG),
        (CHAINED + SECONDARY + torchrun(1), WRONG),
        # Both fail before torchrun looks: it names the lower rank, which failed because of the other.
        (CHAINED + SECONDARY + torchrun(1, 1), WRONG),
        (SECONDARY + torchrun(1) + CHAINED + torchrun(1), WRONG),
        (SCRIPT + accelerate("returned non-zero exit status 1."), WRONG),
        (GROUP, WRONG),
        (BOXED, WRONG),
        (SYNTAX, (1, "SyntaxError: invalid syntax")),
        (OWN_CHILD, (1, OWN_CHILD.splitlines()[-1])),
    ],
)  # fmt: skip
def test_the_exception_of_the_script_is_found(printed: str, expected: tuple[int, str]) -> None:
    """With a launcher, several ranks, a chain or a group of exceptions, a progress bar, and words after it."""
    assert end_of(printed) == expected


@pytest.mark.parametrize(
    ("printed", "code", "expected"),
    [
        (torchrun(3), 1, 3),
        (SECONDARY + torchrun(-11), 1, -11),
        # The rank that failed because the other was gone is seen first.
        (SECONDARY + torchrun(1, -9), 1, -9),
        (STOPPED, 1, -15),
        (accelerate("returned non-zero exit status 3."), 1, 3),
        (accelerate("died with <Signals.SIGKILL: 9>."), 1, -9),
        ("epoch 3, loss 0.5\n", 3, 3),
        ("", 137, -9),
        ("", 255, 255),
        ("", -9, -9),
    ],
)
def test_the_exit_code_of_the_script_is_found_behind_launchers_and_shells(
    printed: str, code: int, expected: int
) -> None:
    """Minus the number of the signal that ended it, or one of its ranks; no exception is named then."""
    assert end_of(printed, code) == (expected, "")


def test_an_exception_that_was_caught_is_not_what_ended_the_script() -> None:
    """It has printed much since, or something, where it ended with an exit code of its own; an exit right after it
    belongs to it."""
    logged = SCRIPT + "epoch 3, loss 0.5\n" * (MAX_LINES_AFTER + 1)
    assert end_of(logged) == (1, "")
    assert end_of(SCRIPT + "giving up\n", 3) == (3, "")
    assert end_of(SCRIPT, 3) == (3, "ValueError: wrong: 17")
