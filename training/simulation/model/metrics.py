"""Figures of a run: spread of steps, queries, waiting, and two measures of inconsistency (`docs/psp.md`). Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2pnode.training.simulation.model.outcome import Outcome, Trace

#: The percentiles that the published figures show.
PERCENTILES = (2, 25, 50, 75, 95)


def summary(outcome: Outcome) -> dict[str, Any]:
    """All figures of one run, as plain data. A query is one peer queried, which costs two messages."""
    steps = outcome.steps
    updates = max(1, outcome.updates)
    passes = max(1, outcome.passes)
    nodes = max(1, steps.size)
    busy_s = outcome.plan.duration_s * nodes
    gap = outcome.gap_sum / passes
    return {
        "nodes": int(steps.size),
        "updates": outcome.updates,
        "mean_steps": float(steps.mean()) if steps.size else 0.0,
        "sd_steps": float(steps.std()) if steps.size else 0.0,
        "least_steps": int(steps.min()) if steps.size else 0,
        "most_steps": int(steps.max()) if steps.size else 0,
        "percentiles": {str(p): float(np.percentile(steps, p)) for p in PERCENTILES} if steps.size else {},
        "progress": float(steps.mean()) * outcome.plan.steps.mean_s / outcome.plan.duration_s if steps.size else 0.0,
        "queries_per_step": outcome.queries / updates,
        "messages_per_step": 2 * outcome.queries / updates,
        "tests_per_step": outcome.tests / updates,
        "waited_s_per_step": float(outcome.waited_s.sum()) / updates,
        "waiting_share": float(outcome.waited_s.sum()) / busy_s,
        "progress_inconsistency": gap / nodes,
        "progress_inconsistency_sd": float(np.sqrt(max(0.0, outcome.gap_squares / passes - gap * gap))) / nodes,
        "engine": outcome.engine,
    }


def sequence_inconsistency(trace: Trace, nodes: int) -> NDArray[np.float64]:
    """float64[n]: `|true[0:L] △ noisy[0:L]| / P` for every prefix L = 1 … n.

    The true sequence gives every node one step in turn: its element i is step `i div P + 1` of node `i mod P`. The
    noisy one is ordered by completion.
    """
    order = np.argsort(trace.node, kind="stable")
    counts = np.bincount(trace.node, minlength=nodes)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    step = np.empty(trace.node.size, np.int64)
    step[order] = np.arange(trace.node.size) - np.repeat(starts, counts)
    true_place = step * nodes + trace.node
    # An element belongs to both prefixes from the larger of its two positions on.
    both_from = np.maximum(true_place, np.arange(trace.node.size))
    within = both_from[both_from < trace.node.size]
    common = np.cumsum(np.bincount(within, minlength=trace.node.size))
    lengths = np.arange(1, trace.node.size + 1)
    return 2.0 * (lengths - common) / nodes


def progress_inconsistency(trace: Trace, nodes: int) -> NDArray[np.float64]:
    """float64[passes]: at each pass of a barrier, completions in the swarm since that node's last pass, over P.

    Steps never decrease, so the distance of two step vectors is the number of completions between them.
    """
    return trace.gaps / nodes
