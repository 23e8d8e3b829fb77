"""p2pnode: a training loop of one's own with three lines more (docs/own-model.md)."""

from __future__ import annotations

import torch

import p2pnode
from benchmarks.time_to_loss.learning import BATCH, RATE, Clock, Given, new_model, vector_of, warm_up


def main() -> None:
    given = Given.from_command_line()
    model = new_model(given)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
    clock = Clock(given)
    swarm = p2pnode.attach(model, optimizer, schedule)
    with swarm.busy("waiting for the common start"):
        clock.begin(swarm.alive)
    while not swarm.done:
        clock.train(model, optimizer)
        optimizer.step()
        schedule.step()
        swarm.step(samples=BATCH, loss=clock.loss)
        clock.ended()
        if clock.is_snapshot_due:
            with swarm.shared_weights():
                shared = vector_of(model)
            clock.save(shared)


if __name__ == "__main__":
    main()
