"""Rows of the history: rates over some seconds, the shares of time of the steps since, and the script's metrics."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from p2pnode.status.history import History
from p2pnode.status.samples import COLUMNS, METRICS, Row, Sampler, shares
from p2pnode.status.schema import LineStatus, Status
from tests.process.harness.fake_node import STATUS
from training.progress import StepRow


def status(step: int = 0, samples: int = 0, sent: int = 0, **training: Any) -> Status:
    """A status of the fake node with other counters."""
    return msgspec.structs.replace(
        STATUS,
        step=step,
        training=msgspec.structs.replace(STATUS.training, samples=samples, step_seconds=0.0, **training),
        exchange=msgspec.structs.replace(STATUS.exchange, bytes_sent=sent, bytes_received=2 * sent),
    )


def test_the_first_look_has_no_rates() -> None:
    """Nothing is known of the time before; a share of no time is none either."""
    row = Sampler().row(1.0, status(step=9, samples=900), [{"step": 9, "train_seconds": 1.0}])

    assert row["step"] == 9
    assert not [name for name in row if name.endswith(("per_second", "_share")) and row[name] is not None]


def test_rates_are_means_over_ten_seconds() -> None:
    """A step of three seconds alternates no rate between nothing and much; what is older than ten seconds is out."""
    sampler = Sampler()
    rows: list[Row] = [
        sampler.row(float(second), status(samples=300 * (second // 3), sent=1000 * second), []) for second in range(31)
    ]

    for row in rows[10:]:
        assert row["samples_per_second"] == pytest.approx(100.0, rel=0.3)
        assert row["sent_bytes_per_second"] == pytest.approx(1000.0)
        assert row["received_bytes_per_second"] == pytest.approx(2000.0)
    late = [sampler.row(float(second), status(samples=3000, sent=30_000), []) for second in range(31, 45)]
    assert late[-1]["sent_bytes_per_second"] == 0.0


def test_long_steps_widen_the_span() -> None:
    """Four steps count, where they take longer than ten seconds."""
    sampler = Sampler()
    slow = [
        sampler.row(
            float(second),
            msgspec.structs.replace(
                status(),
                training=msgspec.structs.replace(STATUS.training, samples=600 * (second // 30), step_seconds=30.0),
            ),
            [],
        )
        for second in range(200)
    ]

    assert all(row["samples_per_second"] == pytest.approx(20.0, rel=0.26) for row in slow[120:])


def test_a_counter_that_falls_begins_anew() -> None:
    """An exchange that starts again counts from zero: that is no negative rate."""
    sampler = Sampler()
    sampler.row(1.0, status(sent=5000), [])
    after = sampler.row(2.0, status(sent=100), [])
    later = sampler.row(3.0, status(sent=400), [])

    assert "sent_bytes_per_second" not in after
    assert later["sent_bytes_per_second"] == 300.0


def test_steps_of_the_last_ten_seconds_divide_the_time() -> None:
    """The shares are those of the steps that ended since the first look and within ten seconds, and add up to one."""
    sampler = Sampler()
    first: StepRow = {"step": 4, "train_seconds": 100.0}
    second: StepRow = {
        "step": 5,
        "train_seconds": 2.0,
        "push_seconds": 1.0,
        "wait_seconds": 0.5,
        "pull_seconds": 0.5,
    }
    sampler.row(1.0, status(step=4), [first])
    row = sampler.row(2.0, status(step=5), [first, second])
    still = sampler.row(12.0, status(step=5), [first, second])
    nothing = sampler.row(12.1, status(step=5), [first, second])

    assert [row[f"{phase}_share"] for phase in ("train", "push", "wait", "pull")] == [0.5, 0.25, 0.125, 0.125]
    assert still["train_share"] == 0.5
    assert "train_share" not in nothing
    assert shares([{"step": 1}]) == {}


def test_metrics_have_places_and_names() -> None:
    """The first four metrics are kept under their names, the loss beside them; a fifth is left out."""
    sampler = Sampler()
    history = History(COLUMNS)
    named = {f"m{number}": float(number) for number in range(METRICS + 1)}
    row = sampler.row(1.0, status(metrics={"loss": 9.0, **named}), [])
    history.add(1.0, row)

    series = sampler.named(history.kept().series)
    shown = sampler.named_row(row)

    expected = {f"metric:m{number}": [float(number)] for number in range(METRICS)}
    assert {name: values for name, values in series.items() if name.startswith("metric")} == expected
    assert {name: value for name, value in shown.items() if name.startswith("metric")} == {
        name: values[0] for name, values in expected.items()
    }


def test_a_counted_swarm_has_no_interval() -> None:
    """Lower and upper bound and the second method belong to an estimate."""
    counted = Sampler().row(1.0, status(), [])
    population = msgspec.structs.replace(STATUS.population, exact=False, estimate=100.0, low=80.0, high=125.0)
    estimated = Sampler().row(1.0, msgspec.structs.replace(status(), population=population), [])

    assert (counted["population"], counted["population_low"], counted["population_high"]) == (2.0, None, None)
    assert (estimated["population_low"], estimated["population_high"]) == (80.0, 125.0)


def test_the_line_is_what_it_carries() -> None:
    """Measured rates are there, and none before."""
    line = LineStatus(
        upload_bytes_per_s=7,
        upload_at_least_bytes_per_s=None,
        download_bytes_per_s=None,
        capacity=0,
        codec="",
        codec_reason="",
        needed_bytes_per_step=None,
        carried_bytes_per_step=None,
    )
    row = Sampler().row(1.0, msgspec.structs.replace(status(), line=line), [])

    assert (row["upload_bytes_per_second"], row["download_bytes_per_second"]) == (7, None)


def test_every_figure_has_a_column() -> None:
    """A history takes every row that a status makes."""
    sampler = Sampler()
    history = History(COLUMNS)
    for second in range(3):
        history.add(float(second), sampler.row(float(second), status(step=second, metrics={"accuracy": 0.5}), []))

    assert history.kept().series["step"] == [0.0, 1.0, 2.0]
