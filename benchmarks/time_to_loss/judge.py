"""Losses as JSON: of a run's snapshots, or of a training without a network, on a perfect clock.

`python -m benchmarks.time_to_loss.judge snapshots|joint|alone FILE`. `joint` is one process with the batches of all
nodes, the limit; `alone` is one node with its own text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.nn.utils import vector_to_parameters

from benchmarks.time_to_loss.learning import (
    BATCH,
    JUDGED,
    RATE,
    Given,
    batch,
    common_text,
    judged,
    loss_of,
    new_model,
    own_text,
    warm_up,
)


def of_snapshots(given: Given) -> dict[int, dict[int, float]]:
    """By node and second."""
    model, text = new_model(given), common_text(given)
    losses: dict[int, dict[int, float]] = {}
    for rank in JUDGED:
        files = {int(file.name.split("-")[2]): file for file in Path(given.folder).glob(f"snapshot-{rank}-*[0-9]")}
        losses[rank] = {}
        for second, file in sorted(files.items()):
            vector_to_parameters(torch.load(file, weights_only=True), model.parameters())
            losses[rank][second] = round(judged(model, text), 4)
    return losses


def of_training(given: Given, ranks: range) -> dict[int, dict[int, float]]:
    """An optimiser step each `step_s`, with a batch of each of these nodes."""
    model, text = new_model(given), common_text(given)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    texts = [own_text(given, rank) for rank in ranks]
    generators = [torch.Generator().manual_seed(given.seed * 100 + rank) for rank in ranks]
    steps_per_snapshot = round(given.snapshot_s / given.step_s)
    losses: dict[int, float] = {}
    for step in range(round(given.wall_s / given.step_s)):
        for group in optimizer.param_groups:
            group["lr"] = RATE * warm_up(step)
        batches = [batch(one, generator, BATCH) for one, generator in zip(texts, generators, strict=True)]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        optimizer.step()
        if (step + 1) % steps_per_snapshot == 0:
            losses[round((step + 1) * given.step_s)] = round(judged(model, text), 4)
    return {0: losses}


def main() -> None:
    given = Given.from_command_line()
    way = sys.argv[1]
    losses = (
        of_snapshots(given) if way == "snapshots" else of_training(given, range(given.nodes if way == "joint" else 1))
    )
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
