"""What a silent trainer is taken for, by its silence and its processor time."""

from __future__ import annotations

import pytest

from p2pnode.training.supervisor.silence import Limits, OrderPace, SilenceVerdict, TrainerSilence
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.interface import BusyWith, StepOrder

HANG_S = 10.0
KNOWN = Limits.of(HANG_S, pace_s=1.0)
FIRST = Limits.of(HANG_S, pace_s=None)
FILE = Limits.of(HANG_S, pace_s=None, writes_file=True)


def watch(
    limits: Limits, *, share: float | None, until_s: float, silence: TrainerSilence | None = None
) -> dict[SilenceVerdict, int]:
    """The verdicts of a trainer that is silent from 0 on and uses `share` of a core: the second of each first one."""
    silence = silence or TrainerSilence(0.0)
    seen: dict[SilenceVerdict, int] = {}
    now = 0.0
    while now < until_s:
        now += silence.next_check_s(now, limits)
        if silence.wants_sample(now, limits):
            silence.note_processor_time(now, None if share is None else share * now)
        verdict = silence.verdict(now, limits)
        seen.setdefault(verdict, round(now))
        if verdict in (SilenceVerdict.IDLE_TOO_LONG, SilenceVerdict.SILENT_TOO_LONG):
            break
    return seen


@pytest.mark.parametrize(
    ("limits", "share", "seen"),
    [
        (KNOWN, 0.0, {SilenceVerdict.WELL: 5, SilenceVerdict.STALLED: 10, SilenceVerdict.IDLE_TOO_LONG: 300}),
        (KNOWN, 0.01, {SilenceVerdict.WELL: 5, SilenceVerdict.STALLED: 10, SilenceVerdict.IDLE_TOO_LONG: 300}),
        (KNOWN, 0.9, {SilenceVerdict.WELL: 5, SilenceVerdict.STALLED: 10, SilenceVerdict.SILENT_TOO_LONG: 3600}),
        (KNOWN, None, {SilenceVerdict.WELL: 5, SilenceVerdict.STALLED: 10, SilenceVerdict.SILENT_TOO_LONG: 3600}),
        (FIRST, 0.0, {SilenceVerdict.WELL: 5, SilenceVerdict.STALLED: 10, SilenceVerdict.IDLE_TOO_LONG: 600}),
        (FIRST, 0.03, {SilenceVerdict.WELL: 5, SilenceVerdict.SILENT_TOO_LONG: 3600}),
        (FIRST, None, {SilenceVerdict.WELL: 5, SilenceVerdict.SILENT_TOO_LONG: 3600}),
        (FILE, 0.0, {SilenceVerdict.WELL: 50, SilenceVerdict.STALLED: 100, SilenceVerdict.IDLE_TOO_LONG: 600}),
        (FILE, 0.9, {SilenceVerdict.WELL: 50, SilenceVerdict.SILENT_TOO_LONG: 3600}),
    ],
    ids=[
        "idle",
        "nearly idle",
        "working",
        "unknown",
        "first idle",
        "first working",
        "first unknown",
        "file",
        "busy file",
    ],
)
def test_silence_stalls_and_idleness_kills(
    limits: Limits, share: float | None, seen: dict[SilenceVerdict, int]
) -> None:
    """Stalled after `hang_s`; killed after 30 times that without processor time, 360 times with it. The first turn is
    never stalled while it works, nor is one that writes a file; idle, both are killed after twice the time."""
    assert watch(limits, share=share, until_s=4000.0) == seen


def test_a_first_turn_is_not_stalled_while_the_machine_has_no_processor_for_it() -> None:
    """Whatever `hang_s` is: a second without processor time is no hang."""
    assert watch(Limits.of(0.1, pace_s=None), share=0.0, until_s=0.4).keys() == {SilenceVerdict.WELL}


def test_a_first_turn_that_works_again_is_no_longer_stalled() -> None:
    """It waited for another process for 20 s, and compiles since then."""
    silence, seen = TrainerSilence(0.0), []
    for now in range(5, 45, 5):
        silence.note_processor_time(float(now), max(0.0, 0.8 * (now - 20)))
        seen.append((now, silence.verdict(float(now), FIRST)))

    assert [now for now, verdict in seen if verdict is SilenceVerdict.STALLED] == [10, 15, 20]
    assert seen[-1][1] is SilenceVerdict.WELL


def test_a_slow_trainer_has_longer() -> None:
    """Four of its own steps are no stall, and ten times that no hang."""
    limits = Limits.of(HANG_S, pace_s=60.0)

    assert (limits.stalled_s, limits.idle_s) == (240.0, 2400.0)
    assert limits.silent_s >= 10 * limits.idle_s


def test_a_pass_that_computed_and_then_hung_is_killed_from_its_last_work_on() -> None:
    """Idle time counts from the last processor time, not from the last message."""
    silence = TrainerSilence(0.0)
    for now in range(5, 200, 5):
        silence.note_processor_time(float(now), 0.5 * now)
    used_s = 0.5 * 195
    verdicts = {}
    for now in range(200, 600, 5):
        silence.note_processor_time(float(now), used_s)
        verdicts.setdefault(silence.verdict(float(now), KNOWN), now)

    assert verdicts == {SilenceVerdict.STALLED: 200, SilenceVerdict.IDLE_TOO_LONG: 195 + 300}


def test_every_message_begins_the_silence_anew() -> None:
    """`swarm.alive()` every nine seconds is never a stall."""
    silence = TrainerSilence(0.0)
    for now in range(9, 900, 9):
        assert silence.verdict(float(now), KNOWN) is SilenceVerdict.WELL
        silence.heard(float(now))


def test_a_busy_trainer_is_well_however_long_it_takes() -> None:
    """Between `Busy` and `Idle` no silence means anything, and its processor time is not even asked for."""
    silence = TrainerSilence(0.0)
    silence.busy = BusyWith("saving", 0.0)

    assert silence.verdict(1e6, KNOWN) is SilenceVerdict.WELL
    assert not silence.wants_sample(1e6, KNOWN)
    silence.busy = None
    silence.heard(1e6)
    assert watch(KNOWN, share=0.0, until_s=20.0, silence=TrainerSilence(0.0))[SilenceVerdict.STALLED] == 10
    assert silence.verdict(1e6 + 11, KNOWN) is SilenceVerdict.STALLED


def test_a_limit_of_zero_is_checked_no_more_often_than_is_useful() -> None:
    """`hang_s = 0` does not make the supervisor spin."""
    assert TrainerSilence(0.0).next_check_s(0.0, Limits.of(0.0, pace_s=0.0)) >= 0.05


TRAIN = messages.Train(1, StepOrder(1, 1, 1.0, True))
EVALUATE = messages.Evaluate(2, 1)


def test_the_limits_follow_the_longest_median_of_turns_and_evaluations() -> None:
    """The first order of a kind in a process has no pace; later ones have that of the slower kind."""
    pace = OrderPace(2.0)
    assert pace.limits(TRAIN) == Limits.of(2.0, None, writes_file=False)
    for seconds in (1.0, 9.0, 3.0):
        pace.note(TRAIN, seconds)
    assert pace.limits(TRAIN) == Limits.of(2.0, 3.0, writes_file=False)
    assert pace.limits(EVALUATE) == Limits.of(2.0, None, writes_file=False)
    pace.note(EVALUATE, 5.0)
    assert pace.limits(TRAIN) == pace.limits(EVALUATE) == Limits.of(2.0, 5.0, writes_file=False)


def test_a_new_process_may_be_slow_at_first_again() -> None:
    """What was measured is kept, but the first order of each kind may take long."""
    pace = OrderPace(2.0)
    pace.note(TRAIN, 3.0)
    pace.new_process()
    assert pace.limits(TRAIN) == Limits.of(2.0, None, writes_file=False)


def test_an_order_that_writes_a_file_has_no_pace() -> None:
    """A disk may be slow at any time, and what it takes is no measure of a turn."""
    pace = OrderPace(2.0)
    save = messages.Save(3, "/state")
    pace.note(save, 100.0)
    assert pace.limits(save) == Limits.of(2.0, None, writes_file=True)
