"""hivemind: its Optimizer with local updates, whose parameters are averaged. Run by the Python of its environment.

`options`: `steps` of each node between two averages, and the `codec`. `delay_state_averaging` is off: with it, a peer
can lock into another phase than the others.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import hivemind
import torch
from hivemind import compression

from benchmarks.time_to_loss.learning import BATCH, RATE, Clock, Given, new_model, vector_of, warm_up

CODECS = {
    "none": compression.NoCompression,
    "float16": compression.Float16Compression,
    "8bit": compression.Uniform8BitQuantization,
}


def network(given: Given) -> hivemind.DHT:
    """The founder's addresses are in a file."""
    file = Path(given.folder, "hivemind-peers")
    founds = given.rank == 0 and given.life == 0
    while not (founds or file.exists()):
        time.sleep(0.2)
    dht = hivemind.DHT(
        initial_peers=[] if founds else file.read_text().split(),
        start=True,
        host_maddrs=[f"/ip4/{given.address}/tcp/0"],
        nat_port_map=False,
        auto_nat=False,
        use_relay=False,
        use_auto_relay=False,
    )
    if founds:
        file.with_suffix(".part").write_text(" ".join(str(address) for address in dht.get_visible_maddrs()))
        file.with_suffix(".part").rename(file)
    return dht


def main() -> None:
    given = Given.from_command_line()
    model, clock = new_model(given), Clock(given)
    steps = given.options["steps"]
    optimizer = hivemind.Optimizer(
        dht=network(given),
        run_id="time-to-loss",
        batch_size_per_step=BATCH,
        target_batch_size=steps * given.nodes * BATCH,
        params=list(model.parameters()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=RATE),
        use_local_updates=True,
        average_state_every=1,
        delay_state_averaging=False,
        matchmaking_time=2.0,
        averaging_timeout=60.0,
        next_chunk_timeout=30.0,
        state_averaging_compression=CODECS[given.options["codec"]](),
        load_state_compression=compression.Float16Compression(),
        average_opt_statistics=(),
        averager_opts={"request_timeout": 1.5, "target_group_size": given.nodes},
        tracker_opts={"max_refresh_period": 2.0, "min_refresh_period": 0.5},
    )
    if given.life:
        optimizer.load_state_from_peers()
    clock.begin()
    clock.save_in_background(lambda: vector_of(model))
    while clock.goes_on:
        clock.train(model, optimizer)
        # A node that comes back goes on with the rate of the others.
        others = optimizer.local_epoch * steps if given.life else 0
        for group in optimizer.opt.param_groups:
            group["lr"] = RATE * warm_up(max(clock.steps, others))
        optimizer.step()
        clock.ended()
    os._exit(0)  # its processes do not end


if __name__ == "__main__":
    main()
