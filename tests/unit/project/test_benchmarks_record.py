"""The record of the benchmarks: figures, their file, the table of docs/figures.md, and the README's headlines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.__main__ import BY_NAME, STANDING, command_of, main, parser
from benchmarks.record import Figure, Outcome, Series

PAGE = "before\n<!-- figures: begin (written by `make bench`) -->\nold\n<!-- figures: end -->\nafter\n"


def figure(
    benchmark: str = "start", name: str = "joined", *, median: float = 2.0, aim: str = "≤ 5", command: str = ""
) -> Figure:
    return Figure(
        benchmark=benchmark,
        name=name,
        unit="s",
        median=median,
        spread=(1.0, 3.0),
        repetitions=3,
        aim=aim,
        command=command or f"make bench ARGS={benchmark}",
        conditions="on the loopback",
        machine="2 cores",
    )


def test_the_pages_show_the_committed_figures() -> None:
    """The table of docs/figures.md and the headlines of the README are what figures.json renders, to the letter."""
    page, readme = (path.read_text(encoding="utf-8") for path in (record.PAGE, record.README))

    assert record.renewed(page, record.table(record.load()), "figures.md") == page
    assert record.renewed(readme, record.headlines(record.load()), "README.md") == readme


def test_every_headline_was_measured() -> None:
    """The README shows six figures; each of them is in figures.json, with its baseline."""
    shown = record.headlines(record.load())

    assert len(record.HEADLINES) == 6
    for headline in record.HEADLINES:
        assert f"| {headline.shown} |" in shown
        assert headline.baseline


def test_every_figure_belongs_to_a_benchmark_there_is() -> None:
    """A figure of a benchmark that is gone would be one that no command prints."""
    figures = record.load()
    if not figures:
        pytest.skip("no figures.json yet: make bench")

    assert {entry.benchmark for entry in figures} <= {*STANDING, *BY_NAME}


def test_a_series_becomes_median_and_spread() -> None:
    """A figure is the median with the lowest and highest repetition, at four digits."""
    outcome = Outcome("start", "on the loopback", [Series("joined", "s", [3.0, 1.00004, 2.0], "≤ 5")])

    (entry,) = record.figures_of(outcome, "make bench ARGS=start")

    assert (entry.median, entry.spread, entry.repetitions) == (2.0, (1.0, 3.0), 3)
    assert "Python" in entry.machine


def test_an_aim_nobody_can_judge_is_refused() -> None:
    """An aim is "≤ x", "≥ x" or empty."""
    outcome = Outcome("start", "", [Series("joined", "s", [1.0], "fast")])

    with pytest.raises(ValueError, match="fast"):
        record.figures_of(outcome, "")


@pytest.mark.parametrize(
    ("median", "aim", "met"), [(5.0, "≤ 5", True), (5.1, "≤ 5", False), (-0.9, "≥ -1", True), (9.0, "", None)]
)
def test_an_aim_is_met_by_the_median(median: float, aim: str, met: bool | None) -> None:
    """The limit itself is met; without an aim there is nothing to meet."""
    assert figure(median=median, aim=aim).met is met


def test_the_json_line_is_one_line_with_all_that_was_measured() -> None:
    """Versions, machine, every value and the details are on the line."""
    line = record.json_line(figure(), Series("joined", "s", [1.0, 2.0, 3.0], details={"peers": 2}))

    entry = json.loads(line)
    assert "\n" not in line
    assert (entry["values"], entry["details"], entry["met"]) == ([1.0, 2.0, 3.0], {"peers": 2}, True)
    assert entry["machine"]["cores"] >= 1
    assert {"p2pnode", "torch", "uvloop"} <= set(entry["versions"])


def test_a_run_renews_its_own_figures_only() -> None:
    """Figures of other benchmarks stay, in order; those of one that ran with these arguments are all replaced."""
    known = [figure("start", "a"), figure("start", "b"), figure("steps", "c")]
    fresh = [figure("start", "d"), figure("wan", "e")]

    assert [entry.name for entry in record.merged(known, fresh)] == ["d", "c", "e"]


def test_a_run_with_other_arguments_renews_what_it_measured() -> None:
    """What only the other arguments measure stays; a figure that both measure is there once, the new one."""
    known = [figure("wan", "a", command="wan A"), figure("wan", "both", command="wan A"), figure("steps", "c")]
    fresh = [figure("wan", "both", median=9.0, command="wan B"), figure("wan", "b", command="wan B")]

    found = record.merged(known, fresh)
    assert [(entry.name, entry.command) for entry in found[:3]] == [("a", "wan A"), ("both", "wan B"), ("b", "wan B")]
    assert found[1].median == 9.0
    assert found[3].name == "c"


def test_two_figures_of_one_name_are_refused() -> None:
    """A table could not distinguish them."""
    with pytest.raises(ValueError, match="two figures named joined"):
        record.figures_of(Outcome("start", "", 2 * [Series("joined", "s", [1.0])]), "make bench")


def test_the_table_stands_between_its_markers() -> None:
    """Only what is between the markers changes, and writing twice changes nothing more."""
    once = record.renewed(PAGE, record.table([figure(median=7.0)]), "figures.md")

    assert once.startswith("before\n<!-- figures: begin")
    assert once.endswith("<!-- figures: end -->\nafter\n")
    assert "old" not in once
    assert "| joined | 7 s | 1 to 3, 3 times | ≤ 5 **missed** | `make bench ARGS=start` |" in once
    assert record.renewed(once, record.table([figure(median=7.0)]), "figures.md") == once


def test_a_missed_aim_does_not_look_reached() -> None:
    """A figure that rounds to its aim has a digit more."""
    (row,) = record.table([figure(median=5.004)]).splitlines()[2:3]

    assert "| 5.004 s |" in row
    assert "≤ 5 **missed**" in row


def test_a_bar_in_a_name_does_not_end_the_cell() -> None:
    """Each row has the five cells of the head."""
    rows = record.table([figure("start", "3 | 3")]).splitlines()

    assert "| 3 \\| 3 |" in rows[2]


def test_a_page_without_markers_is_refused() -> None:
    """Without markers nothing is inserted, and the message names the page."""
    with pytest.raises(ValueError, match=r"README.md has no lines <!-- figures: begin"):
        record.renewed("nothing here\n", record.table([figure()]), "README.md")


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    """figures.json holds the figures whole, docs/figures.md shows all of them, and the README the headlines."""
    file, page, readme = tmp_path / "figures.json", tmp_path / "figures.md", tmp_path / "README.md"
    page.write_text(PAGE, encoding="utf-8")
    readme.write_text(PAGE, encoding="utf-8")
    figures = [figure(), figure("start", "start of the process to first step done")]

    record.write(figures, file, page, readme)

    assert record.load(file) == figures
    assert record.table(figures) in page.read_text(encoding="utf-8")
    assert "| start of a daemon to its first step | 2 s | 5 s, the aim |" in readme.read_text(encoding="utf-8")
    assert "| joined |" not in readme.read_text(encoding="utf-8")


def test_an_unknown_benchmark_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that does not exist ends with exit code 2 and the names that do."""
    with pytest.raises(SystemExit) as ended:
        main(["speed"])

    assert ended.value.code == 2
    assert "there is no benchmark speed; there are start" in capsys.readouterr().err


def test_the_command_has_no_path_of_this_machine() -> None:
    """The command shown is what another person types; where his files lie is his own."""
    arguments = parser().parse_args(["devices", "--ways", "path", "--repetitions", "2", "--data-dir", "/data"])

    assert command_of("devices", arguments) == """make bench ARGS="devices --ways 'path' --repetitions 2\""""

    arguments = parser().parse_args(["exchange_history", "--nodes", "300", "--seed", "1"])

    expected = 'make bench ARGS="exchange_history --seed 1 --nodes 300"'
    assert command_of("exchange_history", arguments) == expected
