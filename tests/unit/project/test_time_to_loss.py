"""What the benchmark `time_to_loss` makes of notes and losses, and which runs its options ask for."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.__main__ import command_of, parser
from benchmarks.record import NotMeasured
from benchmarks.time_to_loss import learning, lockstep, pages, plan, results, runs
from benchmarks.time_to_loss.learning import Given, common_text, judged
from benchmarks.time_to_loss.picture import apart
from benchmarks.time_to_loss.results import Line, Result

LINE = Line(rates_mbit=(5.0,) * 4)
WITHOUT = Line(rates_mbit=(0.0,) * 4)


def result(contestant: str, losses: dict[int, float], line: Line = LINE, **fields: object) -> Result:
    return Result(contestant=contestant, line=line, wall_s=300.0, losses=losses, **fields)


TORCHFT = result("torchft", {60: 2.4, 300: 1.5}, shares=[0.9] * 4, sent_mb=[118.0] * 4)
OURS = result("p2p", {60: 2.0, 180: 1.6, 300: 1.4}, shares=[0.9, 0.95], sent_mb=[70.2, 40.1], ready_s=8.2, load=1.0)
JOINT = result("joint", {60: 1.9, 180: 1.5, 300: 1.3}, WITHOUT)


@pytest.mark.parametrize(
    ("loss", "second"), [(1.5, 240.0), (1.4, 300.0), (2.0, 60.0), (2.5, 60.0), (1.8, 120.0), (1.3, None)]
)
def test_the_second_of_a_loss_lies_on_a_line_between_two_snapshots(loss: float, second: float | None) -> None:
    """Before the first snapshot nothing is known, so the first second is said; a loss never reached has none."""
    found = results.seconds_to(loss, OURS.losses)

    assert found == pytest.approx(second) if second is not None else found is None


def test_others_are_compared_with_the_best_of_torchft_at_300_s() -> None:
    """A run that was killed is compared with the undisturbed one, and a shorter run of torchft by its last loss."""
    better = result("torchft", {60: 2.3, 300: 1.45}, options={"steps": 10})
    killed = Line(rates_mbit=LINE.rates_mbit, kill=True)

    assert results.reference_of([TORCHFT, OURS], LINE) == (300, 1.5)
    assert results.reference_of([TORCHFT, better], killed) == (300, 1.45)
    assert results.reference_of([result("torchft", {60: 2.4, 120: 2.0})], LINE) == (120, 2.0)
    assert results.reference_of([OURS], LINE) is None


def test_a_table_has_the_runs_of_a_line_and_those_without_a_network() -> None:
    """Rows begin with the limit, and seeds are beside each other; torchft's loss is that of the same seed."""
    another = result("torchft", {60: 2.4, 300: 1.7}, Line(rates_mbit=(5.0,) * 4, seed=1))
    text = results.tables([TORCHFT, OURS, JOINT, another, result("p2p", {60: 9.0}, Line(rates_mbit=(1.0,) * 4))])
    first, second = text.split("\n1 Mbit/s")

    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in first.splitlines() if row.startswith("|")]
    assert first.startswith("5 Mbit/s, 30 ms one way:")
    names = ["one process, the joint batch (the limit)", "p2pnode", "torchft 0.2.0", "torchft 0.2.0"]
    assert [row[0] for row in rows[2:]] == names
    assert rows[0][5] == "torchft's loss after, s"
    assert rows[3][1:] == [
        "0",
        "2.000",
        "1.600",
        "1.400",
        "240",
        "0.90 to 0.95",
        "40 to 70",
        "8",
        "0.0",
        "0",
        "1.0",
        "",
    ]
    assert [row[5] for row in rows[2:]] == ["180", "240", "300", "300"]
    assert {len(row) for row in rows} == {13}
    assert "9.000" in second


def test_results_are_kept_and_those_of_the_same_conditions_replaced(tmp_path: Path) -> None:
    """Another seed or setting is another result."""
    other = result("p2p", {60: 2.2}, settings=["exchange.codec=int8"])
    anew = result("p2p", {60: 2.1})
    results.write([OURS, other], tmp_path / "results.json")

    kept = results.merged(results.load(tmp_path / "results.json"), [anew])

    assert kept == [anew, other]


def test_a_pause_is_what_a_step_lasts_beyond_the_clock(tmp_path: Path) -> None:
    """Also before the first step and after the last; a line that is still written, and later steps, do not count."""
    file = tmp_path / "steps-0"
    file.write_text("0.6 0.05\n1.1 0.06\n4.1 0.7\n12 0.05\n4.")
    steps = runs.steps_of(file, 10.0)

    assert steps == [(0.6, 0.05), (1.1, 0.06), (4.1, 0.7)]
    assert runs.longest_pause(steps, 0.5, 5.0) == pytest.approx(2.5)
    assert runs.longest_pause(steps, 0.5, 10.0) == pytest.approx(5.4)
    assert runs.longest_pause([], 0.5, 10.0) == pytest.approx(9.5)


def asked(*words: str) -> list[runs.Order]:
    return plan.orders(parser().parse_args(["time_to_loss", "--torchft", "t", "--hivemind", "h", *words]), Path("text"))


def test_one_scenario_can_be_asked_for_alone() -> None:
    """The options name contestant, line, length and seed; the command that is recorded has them."""
    words = ["--only", "p2p", "--rate", "20", "--wall", "300", "--seed", "1", "--slow", "3:1", "--kill"]
    [order] = asked(*words, "--set", "exchange.codec=int8")

    assert order.contestant == "p2p"
    assert order.line == Line(rates_mbit=(20.0, 20.0, 20.0, 1.0), seed=1, kill=True)
    assert (order.wall_s, order.snapshot_s, order.settings) == (300.0, 60.0, ("exchange.codec=int8",))
    command = command_of("time_to_loss", parser().parse_args(["time_to_loss", *words]))
    assert command == 'make bench ARGS="time_to_loss --only p2p --rate 20 --slow 3:1 --wall 300 --seed 1 --kill"'
    with pytest.raises(NotMeasured, match="3:1"):
        asked("--slow", "7:1")
    [eight] = asked("--only", "p2p", "--nodes", "8")
    assert eight.line.name == "8 nodes, 5 Mbit/s, 30 ms one way"


@pytest.mark.parametrize(("words", "minutes"), [(["--quick"], 15), ([], 120)])
def test_the_runs_end_in_the_time_that_is_said(words: list[str], minutes: float) -> None:
    """A run over lines takes up to a minute beside its training; one without a network a fifth of it."""
    orders = asked(*words)

    seconds = sum(order.wall_s + 60 if order.has_network else order.wall_s / 5 for order in orders)
    assert seconds <= 60 * minutes
    assert {order.contestant for order in orders} == set(results.TITLES)


def test_torchft_averages_a_fragment_before_the_turn_of_the_next() -> None:
    """The fragments divide its steps, on every line."""
    for rate in (1.0, 5.0, 20.0, 100.0):
        rule = plan.options_of("torchft", Line(rates_mbit=(rate,) * 4))

        assert int(rule["steps"]) % int(rule["fragments"]) == 0
        assert rule["delay"] == int(rule["steps"]) / int(rule["fragments"]) - 1


def test_figures_have_a_value_for_each_seed() -> None:
    """The time to torchft's loss and the losses over others' are those of equal seeds; settings are not defaults."""
    seeded = Line(rates_mbit=LINE.rates_mbit, seed=1)
    slow = Line(rates_mbit=(5.0, 5.0, 5.0, 1.0))
    ours = [OURS, result("p2p", {60: 2.2, 300: 1.45}, seeded, shares=[0.8])]
    known = [*ours, TORCHFT, JOINT, result("torchft", {60: 2.2, 300: 1.5}, seeded)]
    known += [result("p2p", {60: 1.0}, settings=["exchange.codec=int8"]), result("p2p", {60: 2.1}, slow, shares=[0.9])]

    found = {series.name.removesuffix(", 5 Mbit/s, 30 ms one way"): series for series in plan.series(LINE, known)}

    assert found["time to torchft's loss, over torchft's time"].values == pytest.approx(
        [0.8, (60 + 240 * 0.7 / 0.75) / 300]
    )
    assert found["loss after 60 s, over torchft's"].values == pytest.approx([2.0 / 2.4, 1.0])
    assert found["loss after 300 s, over the joint batch's"].values == pytest.approx([1.4 / 1.3])
    assert found["lowest share of time in training"].values == [0.9, 0.8]
    [beside] = [series for series in plan.series(slow, known) if "equal lines" in series.name]
    assert beside.values == pytest.approx([2.1 / 2.0])
    assert plan.series(Line(rates_mbit=(1.0,) * 4), known) == []
    eight = Line(rates_mbit=(5.0,) * 8)
    [sooner] = [
        series
        for series in plan.series(eight, [*known, result("p2p", {60: 2.0, 120: 1.5}, eight, shares=[0.9])])
        if "of 4 nodes" in series.name
    ]
    assert sooner.values == pytest.approx([120 / 240])


def test_the_pages_and_the_picture_show_the_recorded_results() -> None:
    """They are what recorded.json renders, to the letter: `make bench ARGS="time_to_loss --picture"`."""
    for file, text in pages.rendered(results.load()).items():
        assert file.read_text(encoding="utf-8") == text, file


def test_a_picture_has_a_line_and_a_label_for_each_contestant() -> None:
    """It is well-formed, a lower loss is lower in it, and labels of equal losses do not cover each other."""
    equal = result("hivemind", dict(TORCHFT.losses), late_steps=200)
    root = ElementTree.fromstring(pages.picture([OURS, TORCHFT, JOINT, equal]))
    curves = [
        element.get("points").split()
        for element in root.findall(".//{*}polyline")
        if element.get("stroke-width") == "2.5"
    ]
    labels = {element.text: float(element.get("y")) for element in root.findall(".//{*}text")}

    assert [len(points) for points in curves] == [2, 2, 3, 3]
    ends = [float(points[-1].split(",")[1]) for points in curves]
    assert ends[0] == ends[1] < ends[2] < ends[3]
    shown = ["four, hivemind (busy machine)", "four, torchft", "four, p2pnode", "limit: one machine, all data"]
    heights = [labels[name] for name in shown]
    assert all(lower - upper >= 16.9 for upper, lower in pairwise(heights))


def test_labels_stay_where_they_have_room() -> None:
    """Those that are too near share the place around their middle, also with a neighbour that this reaches."""
    assert apart([10.0, 100.0]) == [10.0, 100.0]
    assert apart([100.0, 100.0]) == [91.5, 108.5]
    assert apart([84.0, 100.0, 100.0]) == pytest.approx([77.67, 94.67, 111.67], abs=0.01)


def test_no_node_trains_on_what_all_are_judged_by(tmp_path: Path) -> None:
    """Each byte of the text is of one quarter, or of the common part; a fifth node has the first one's quarter."""
    file = tmp_path / "text"
    file.write_bytes(bytes(range(224)))
    given = learning.Given(0, 5, 0, 0.5, 300.0, 60.0, str(tmp_path), str(file), "", "")
    parts = [learning.own_text(given, rank).tolist() for rank in range(4)] + [learning.common_text(given).tolist()]

    assert [len(part) for part in parts] == [54, 54, 54, 54, 6]
    assert len({byte for part in parts for byte in part}) == 222
    assert learning.own_text(given, 4).tolist() == parts[0]


def test_in_lockstep_one_node_that_exchanges_all_at_once_trains_as_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared model is its own of a step before, for what is cut arrives in the next one; with a rate of 0 it stays
    what it was."""
    monkeypatch.setattr(learning, "VALIDATION_BATCHES", 1)
    text = tmp_path / "text"
    text.write_bytes(bytes(range(32, 127)) * 40)
    given = Given(0, 1, 0, lockstep.STEP_S, 2.0, 1.0, str(tmp_path), str(text), "", "")
    alone = lockstep._Node(given, 0)
    expected = {}
    for step in range(1, 5):
        if step % 2 == 0:
            expected[step // 2] = round(judged(alone.model, common_text(given)), 3)
        alone.train(step - 1)
    way = {"steps": 1, "delta": 0, "change": 0, "age": 0}

    assert lockstep.played(given, **way, rate=1.0) == pytest.approx(expected, abs=2e-3)
    assert len(set(lockstep.played(given, **way, rate=0.0).values())) == 1


def test_of_each_block_the_largest_values_are_kept() -> None:
    """Of a last block that is shorter, too."""
    values = torch.arange(-3.0, 4100.0)
    kept = lockstep.largest(values, 2)
    assert kept.nonzero().flatten().tolist() == [4094, 4095, 4101, 4102]
    assert torch.equal(lockstep.largest(values, 0), values)
