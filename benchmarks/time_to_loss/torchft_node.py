"""torchft: its streaming DiLoCo with one replica group per node, over gloo. Run by the Python of its environment.

`options`: `steps` between two averages of the whole model, `fragments` that take turns, `delay` in optimiser steps
until a fragment's average must be there, and `momentum` of the outer optimiser.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from benchmarks.time_to_loss.learning import RATE, Clock, Given, Model, new_model, warm_up

PATIENCE = timedelta(seconds=60)
OUTER_RATE, MIX = 0.7, 0.5
STORE_PORT, MANAGER_PORT, LIGHTHOUSE_PORT = 29400, 19530, 29510


def fragments_of(model: Model, count: int) -> list[nn.Module]:
    """Of nearly equal size, made of whole modules in the order of the model."""
    units: list[list[nn.Module]] = [[model.bytes, model.places]]
    for block in model.blocks:
        units += [[block.norm1, block.attention, block.project], [block.norm2, block.up, block.down]]
    units.append([model.norm, model.out])
    total = sum(parameter.numel() for parameter in model.parameters())
    groups: list[list[nn.Module]] = [[] for _ in range(count)]
    before = 0
    for unit in units:
        size = sum(parameter.numel() for module in unit for parameter in module.parameters())
        groups[min(count - 1, int((before + size / 2) * count / total))] += unit
        before += size
    return [nn.ModuleList(group) for group in groups]


def main() -> None:
    given = Given.from_command_line()
    options = given.options
    model, clock = new_model(given), Clock(given)
    fragments = fragments_of(model, options["fragments"])
    inner = torch.optim.AdamW(model.parameters(), lr=RATE)
    momentum = options["momentum"]
    outer = [
        torch.optim.SGD(fragment.parameters(), lr=OUTER_RATE, momentum=momentum, nesterov=True)
        for fragment in fragments
    ]
    store = TCPStore(host_name=given.address, port=STORE_PORT, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE),
        min_replica_size=1,
        use_async_quorum=False,
        init_sync=False,
        replica_id=f"replica_{given.rank}",
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        store_addr=given.address,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=f"http://{given.founder}:{LIGHTHOUSE_PORT}",
        hostname=given.address,
        port=MANAGER_PORT,
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        connect_timeout=PATIENCE,
    )
    with DiLoCo(
        manager,
        fragments,
        inner,
        outer,
        sync_every=options["steps"],
        fragment_sync_delay=options["delay"],
        fragment_update_alpha=MIX,
        use_bucketization=True,
    ) as averaging:
        places = {
            id(parameter): (fragment, name)
            for fragment in averaging._fragments
            for name, parameter in fragment._model_fragment.named_parameters()
        }

        def shared() -> Tensor:
            """The values that all have after their last average."""
            found = (places[id(parameter)] for parameter in model.parameters())
            return torch.cat([fragment.original_parameters[name].flatten() for fragment, name in found])

        clock.begin()
        clock.save_in_background(shared)
        while clock.goes_on:
            clock.train(model, inner)
            # A node that comes back goes on with the rate of the others.
            others = manager.current_step() * options["steps"] // options["fragments"] if given.life else 0
            for group in inner.param_groups:
                group["lr"] = RATE * warm_up(max(clock.steps, others))
            inner.step()
            clock.ended()
    os._exit(0)  # its threads do not end


if __name__ == "__main__":
    main()
