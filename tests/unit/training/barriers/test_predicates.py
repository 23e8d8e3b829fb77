"""The two predicates, what PSP hands them, and the golden pass probabilities of a sampled test."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from p2pnode.training.barriers.predicates import (
    Barrier,
    BarrierNotFound,
    asp,
    bsp,
    make_barrier,
    quantile_of,
    resample_after,
    sample_size,
    ssp,
)
from p2pnode.training.settings import BarrierMethod, BarrierSettings

MINE = 20


def barrier(method: str, **fields: object) -> Barrier:
    return make_barrier(BarrierSettings(method=method, **fields))  # type: ignore[arg-type]


def pass_probability(made: Barrier, population: int, laggards: int, beta: int) -> float:
    """Exact: the hypergeometric chance of each mixture in the sample, times the real predicate's word on it."""
    behind = MINE - 1 - (made.staleness or 0)
    chance = 0.0
    for drawn in range(max(0, beta - (population - laggards)), min(beta, laggards) + 1):
        ways = math.comb(laggards, drawn) * math.comb(population - laggards, beta - drawn)
        sample = [behind] * drawn + [MINE] * (beta - drawn)
        chance += made.passes(MINE, sample) * ways / math.comb(population, beta)
    return chance


# -- predicates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "passes"),
    [
        ([], True),
        ([5], True),
        ([4], False),
        ([5, 5, 5], True),
        ([5, 5, 4], False),
        ([6, 1000], True),
        ([1000, 4], False),
        ([0], False),
    ],
)
def test_bsp_passes_when_nobody_is_behind(others: list[int], passes: bool) -> None:
    """BSP requires that no peer has completed fewer steps than this node; those ahead never block."""
    assert bsp(5, others) is passes


@pytest.mark.parametrize(
    ("staleness", "others", "passes"),
    [
        (0, [5], True),
        (0, [4], False),
        (1, [4], True),
        (4, [1], True),
        (4, [0], False),
        (4, [1, 0], False),
        (4, [], True),
        (4, [10**9], True),
        (10**9, [0], True),
    ],
)
def test_ssp_counts_completed_steps(staleness: int, others: list[int], passes: bool) -> None:
    """SSP lets a peer lie exactly `s` completed steps behind and not one more (psp.md section 5)."""
    assert ssp(5, others, staleness) is passes


def test_asp_never_blocks() -> None:
    """ASP passes whatever it is given."""
    assert asp(10**9, [0, 0, 0])
    assert not barrier("asp").samples


@pytest.mark.parametrize("method", ["asp", "bsp", "ssp", "pbsp", "pssp"])
def test_nobody_to_look_at_passes(method: BarrierMethod) -> None:
    """An empty sample blocks no node: a single node passes."""
    for quantile in (0.01, 0.5, 1.0):
        assert barrier(method, quantile=quantile).passes(7, [])


def test_the_order_of_the_sample_does_not_matter() -> None:
    """Every ordering of a sample gets the same answer, with a quantile too."""
    rng = random.Random(1)
    for method, quantile in [("bsp", 1.0), ("pssp", 0.5), ("ssp", 0.75)]:
        made = barrier(method, quantile=quantile)  # type: ignore[arg-type]
        for _ in range(50):
            others = [rng.randrange(12) for _ in range(rng.randrange(1, 8))]
            answers = {made.passes(6, rng.sample(others, len(others))) for _ in range(6)}
            assert len(answers) == 1, others


# -- quantile ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantile", "behind", "passes"),
    [(0.75, 1, True), (0.75, 2, False), (0.5, 2, True), (0.5, 3, False), (0.01, 3, True), (0.01, 4, False)],
)
@pytest.mark.promise(9)
def test_quantile_passes_when_that_share_is_far_enough(quantile: float, behind: int, passes: bool) -> None:
    """Of four peers, ⌈quantile · 4⌉ must be far enough; which ones does not matter."""
    others = [MINE - 100] * behind + [MINE] * (4 - behind)

    assert barrier("bsp", quantile=quantile).passes(MINE, others) is passes


@pytest.mark.parametrize("hundredths", range(1, 101))
def test_quantile_is_exact_for_every_share_and_sample(hundredths: int) -> None:
    """Exactly ⌈q·n⌉ of n peers are needed for every two-digit q; 0.28 · 25 is 7.000000000000001 in floating point."""
    quorum = quantile_of(bsp, hundredths / 100)
    wrong = []
    for size in range(1, 51):
        needed = -(-hundredths * size // 100)
        enough = [1] * needed + [0] * (size - needed)
        one_less = [1] * (needed - 1) + [0] * (size - needed + 1)
        if not quorum(1, enough) or quorum(1, one_less):
            wrong.append(size)

    assert not wrong


# -- golden numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("population", "laggards", "golden"),
    [(1000, 50, 0.5973), (100, 5, 0.5838)],
)
@pytest.mark.parametrize("method", ["pbsp", "pssp"])
def test_pass_probability_of_a_sample_of_ten(
    method: BarrierMethod, population: int, laggards: int, golden: float
) -> None:
    """One test of β = 10 passes with C(P−m, β)/C(P, β): psp.md section 2."""
    chance = pass_probability(barrier(method), population, laggards, 10)

    assert chance == pytest.approx(golden, abs=5e-5)
    assert chance == pytest.approx(math.comb(population - laggards, 10) / math.comb(population, 10), rel=1e-12)


def test_pass_probability_with_a_quantile() -> None:
    """With quantile 0.8, two laggards of ten are let through: the sum of three hypergeometric terms."""
    expected = sum(math.comb(5, drawn) * math.comb(95, 10 - drawn) for drawn in range(3)) / math.comb(100, 10)

    assert pass_probability(barrier("pbsp", quantile=0.8), 100, 5, 10) == pytest.approx(expected, rel=1e-12)


# -- β ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("population", "expected"),
    [
        (0.0, 1),
        (-3.0, 1),
        (0.4, 1),
        (1.0, 1),
        (1.01, 2),
        (4.0, 2),
        (4.1, 3),
        (6.0, 3),
        (81.0, 9),
        (100.0, 10),
        (1e6, 10),
    ],
)
def test_sample_size_follows_the_population(population: float, expected: int) -> None:
    """β = clamp(⌈√N̂⌉, 1, 10), for estimates below one too."""
    assert sample_size(0, population) == expected


@pytest.mark.parametrize("configured", [1, 3, 10, 500])
def test_a_configured_sample_size_stands(configured: int) -> None:
    """A β that was set is taken as it is, whatever the population."""
    assert sample_size(configured, 4.0) == configured


# -- making -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "complete", "samples", "lag"),
    [
        ("asp", False, False, None),
        ("bsp", True, True, 0),
        ("ssp", True, True, 4),
        ("pbsp", False, True, 0),
        ("pssp", False, True, 4),
    ],
)
@pytest.mark.promise(9)
def test_the_table_of_methods(method: BarrierMethod, complete: bool, samples: bool, lag: int | None) -> None:
    """Consistency and completeness of each name are those of psp.md section 1; bsp and pbsp ignore `staleness`."""
    made = barrier(method, staleness=4)

    assert (made.complete, made.samples, made.staleness) == (complete, samples, lag)
    assert made.synchronous is (method == "bsp")


@pytest.mark.parametrize("method", ["bsp", "ssp", "pbsp", "pssp"])
def test_enough_agrees_with_the_predicate(method: BarrierMethod) -> None:
    """A peer at `enough(mine)` passes by itself and one step less does not: not asking it again is safe."""
    made = barrier(method, staleness=3)
    enough = made.enough(MINE)

    assert enough is not None
    assert made.passes(MINE, [enough])
    assert not made.passes(MINE, [enough - 1])


@pytest.mark.parametrize(("step_seconds", "expected"), [(0.0, 0.02), (0.1, 0.02), (2.0, 0.1)])
def test_resampling_follows_the_step_time(step_seconds: float, expected: float) -> None:
    """A twentieth of the median step, at least 20 ms."""
    assert resample_after(step_seconds) == pytest.approx(expected)


# -- custom -----------------------------------------------------------------------------------------------------------


def half_of_them(mine: int, others: Sequence[int]) -> int:
    """A user's predicate that gives a number where a bool is expected."""
    return sum(other >= mine for other in others) * 2 >= len(others)


not_callable = 7


def test_a_custom_barrier_is_called_with_the_sample() -> None:
    """`module:function` decides; its answer is taken for truth or falsehood; only it knows what is enough."""
    made = barrier(f"{__name__}:half_of_them")

    assert made.passes(5, [5, 0]) is True
    assert made.passes(5, [5, 0, 0]) is False
    assert made.enough(5) is None
    assert made.samples
    assert not made.complete


@pytest.mark.parametrize(
    "path",
    [
        "",
        ":",
        "nonsense",
        "no.such.module:function",
        "p2pnode.training.barriers.predicates:no_such_name",
        "p2pnode.training.barriers.predicates",
        ":bsp",
        "..:x",
    ],
)
def test_a_custom_barrier_that_does_not_import_names_its_path(path: str) -> None:
    """A wrong path is one clear error that repeats what was configured."""
    with pytest.raises(BarrierNotFound) as caught:
        barrier(path)

    assert repr(path) in str(caught.value)


@pytest.mark.parametrize("source", ["1 / 0", "def passes(:"])
def test_a_custom_barrier_whose_module_fails_names_its_path(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake in the user's own module is reported like any other path that does not import."""
    (tmp_path / "broken_barrier_module.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(BarrierNotFound, match="broken_barrier_module:passes"):
        barrier("broken_barrier_module:passes")


def test_a_custom_barrier_that_cannot_be_called_says_so() -> None:
    """A name that is found but is no function has another message than one that is not found."""
    with pytest.raises(BarrierNotFound, match="not callable"):
        barrier(f"{__name__}:not_callable")
