"""Record files that a master leases to the nodes task by task: three passes over them, and every record is counted.

    p2pnode run --set dispatch.source=master --set node.role=peer+master --set 'dispatch.records=["squares-*.recordio"]' --set dispatch.passes=3 -- python examples/records.py --make

Start it on every machine, in a folder of its own; a joiner adds `--bootstrap HOST:PORT` or `--invite FILE`. The first
node serves the queue (docs/dispatch.md). `--make` writes the files, the same on every machine.
"""  # noqa: E501 - a command is one line

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from p2pnode.training.dispatch.recordio import create_records, decode_example, encode_example

FILES, RECORDS = 2, 1024


def make_files() -> None:
    """Numbers and their squares, in chunks of 16 records; files that are there already stay."""
    for number in range(FILES):
        path = Path(f"squares-{number}.recordio")
        if not path.exists():
            with create_records(path, records_per_chunk=16) as out:
                for index in range(RECORDS):
                    x = 2.0 * (number * RECORDS + index) / (FILES * RECORDS) - 1.0
                    out.write(encode_example({"x": x, "y": x * x}))


def sample(record: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    example: dict[str, Any] = decode_example(record)
    return torch.tensor([example["x"]], dtype=torch.float32), torch.tensor([example["y"]], dtype=torch.float32)


def main() -> None:
    import p2pnode

    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    swarm = p2pnode.attach(model, optimizer)
    loader = DataLoader(swarm.records(decode=sample), batch_size=32)
    trained = 0
    while not swarm.done:
        for x, y in loader:
            loss = functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trained += len(x)
            swarm.step(samples=len(x), loss=loss)
            if swarm.done:
                break
    x = torch.linspace(-1, 1, 101).unsqueeze(1)
    with torch.no_grad():
        error = float(functional.mse_loss(model(x), x * x))
    print(f"this node trained {trained} of the records; the shared model: mean squared error {error:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--make", action="store_true", help="write the record files first, if they are missing")
    if parser.parse_args().make:
        make_files()
    main()
