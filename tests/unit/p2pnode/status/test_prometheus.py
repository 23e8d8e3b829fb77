"""The metrics page: what Prometheus' own parser makes of it."""

from __future__ import annotations

import math

from prometheus_client.parser import text_string_to_metric_families

from p2pnode.status.prometheus import counter, gauge, render


def parsed(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    return {
        sample.name: [(s.labels, s.value) for s in family.samples if s.name == sample.name]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_parser_reads_what_was_written() -> None:
    """Names, labels, values and kinds survive, whatever a label holds."""
    nasty = 'a "quote", a \\ backslash\nand a new line'
    page = render(
        [
            gauge("p2pnode_step", "Completed\nsteps \\ all.", 12),
            counter("p2pnode_dropped_total", "Dropped.", reason={nasty: 3, "b": 1.5}),
        ]
    )

    assert parsed(page) == {
        "p2pnode_step": [({}, 12.0)],
        "p2pnode_dropped_total": [({"reason": nasty}, 3.0), ({"reason": "b"}, 1.5)],
    }
    assert "# TYPE p2pnode_dropped_total counter" in page


def test_numbers_that_are_none_and_values_that_are_missing() -> None:
    """Infinite and undefined numbers have their names; None, and a family without values, are left out."""
    page = render(
        [
            gauge("a", "A.", math.inf),
            gauge("b", "B.", -math.inf),
            gauge("c", "C.", math.nan),
            gauge("d", "D.", None),
            gauge("e", "E.", []),
            gauge("f", "F.", True),
        ]
    )
    found = parsed(page)

    assert found["a"] == [({}, math.inf)]
    assert found["b"] == [({}, -math.inf)]
    assert math.isnan(found["c"][0][1])
    assert found["f"] == [({}, 1.0)]
    assert "d" not in found
    assert "# HELP e" not in page
