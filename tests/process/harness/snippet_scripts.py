"""The programs around the blocks of Python that the documents show: what a reader has before and after them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.harness.project.documents import Shown

#: A model, data and the functions that the blocks leave to the reader.
BEFORE = """\
import p2pnode
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from p2pnode.training.dispatch.recordio import decode_example
from p2pnode.training.trainer.lazy_dynamo import import_later

import_later()  # torch's compiler, which no optimizer needs, is half of the start
torch.manual_seed(0)
points = torch.rand(256, 2)
dataset = TensorDataset(points, (points.sum(1) > 1).long())
model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
trained = 0


def train_one_batch(model=model, optimizer=optimizer, inputs=None, labels=None):
    global trained
    chosen = torch.randint(256, (32,))
    inputs = dataset.tensors[0][chosen] if inputs is None else inputs
    labels = dataset.tensors[1][chosen] if labels is None else labels
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    trained += len(inputs)
    return loss


def accuracy(model):
    return (model(dataset.tensors[0]).argmax(1) == dataset.tensors[1]).float().mean()


def validate(model):
    accuracy(model)


def decode(record):
    example = decode_example(record)
    return torch.tensor([example["x"] / 1e3, example["y"] / 1e6], dtype=torch.float32), int(example["x"] > 500)


large_validation_set = [1, 2, 3]
"""
TRAINED = 'print("trained", trained, "samples; done:", swarm.done)\n'
ATTACHED = BEFORE + "swarm = p2pnode.attach(model, optimizer)\n"
#: For a block within a step: the steps around it.
STEPS = "\nwhile not swarm.done:\n    swarm.step(samples=32, loss=train_one_batch())\n" + TRAINED
RUN, ALONE = "p2pnode run -- python train.py", "python train.py"


def nothing(folder: Path) -> None:
    """The block needs no files."""


def texts(folder: Path) -> None:
    (folder / "texts").mkdir()
    (folder / "texts" / "one.txt").write_text("a b\nb c b\n")


def weights(folder: Path) -> None:
    """A file like the one that a run leaves."""
    names = {"0.weight": [4, 2], "0.bias": [4], "2.weight": [2, 4], "2.bias": [2]}
    header, at = {}, 0
    for name, shape in names.items():
        size = 4 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(header).encode()
    (folder / "…").mkdir()
    (folder / "…" / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(at))


def squares(folder: Path) -> None:
    """The file that another block of the page writes."""
    from p2pnode.training.dispatch.recordio import create_records, encode_example

    with create_records(folder / "squares.recordio", records_per_chunk=100) as out:
        for number in range(1000):
            out.write(encode_example({"x": number, "y": number * number}))


def table_and_pictures(folder: Path) -> None:
    """A table, and files of pictures as MNIST has them."""
    (folder / "table.csv").write_text("x,name\n1.5,one\n2.5,two\n")
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(bytes(16 + 2 * 28 * 28)))
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes(8 + 2)))


class Script(NamedTuple):
    """The block that has this text, the program around it, and what it prints."""

    has: str
    says: str
    before: str = ""
    after: str = ""
    command: str = RUN
    environment: Mapping[str, str] = {}
    prepare: Callable[[Path], None] = nothing

    def whole(self, block: str) -> str:
        return f"{self.before}\n{block}\n{self.after}"


SCRIPTS = [
    Script("train_one_batch(model, optimizer)\n", r"^trained [1-9]\d* samples; done: True", BEFORE, TRAINED),
    Script("swarm.sampler(dataset)", r"^trained [1-9]\d* samples; done: True", BEFORE, TRAINED),
    Script(
        "swarm.records(decode=decode)",
        "^trained 1000 samples; done: True",
        BEFORE,
        TRAINED,
        environment={
            "P2PNODE_DISPATCH__SOURCE": "master",
            "P2PNODE_NODE__ROLE": "peer+master",
            "P2PNODE_DISPATCH__RECORDS": '["squares.recordio"]',
            "P2PNODE_DISPATCH__PASSES": "1",
            "P2PNODE_TRAINING__MAX_STEPS": "0",
        },
        prepare=squares,
    ),
    Script(
        "import csv, gzip",
        r"^\(2, 28, 28\) \(2,\)$",
        after='found = np.load("mnist.npz")\nprint(found["images"].shape, found["labels"].shape)\n',
        command=ALONE,
        prepare=table_and_pictures,
    ),
    Script(
        "create_records(",
        "^1000 records in 10 chunks$(?s:.*)^{'x': 999, 'y': 998001} .'x', 'y'. 100$",
        after='print(example, sorted(batch), len(batch["x"]))\n',
        command=ALONE,
    ),
    Script('p2pnode.engine("p2p")', "^10$"),
    Script(
        "engine.register_barrier(",
        "^3$",
        'import p2pnode\n\nengine = p2pnode.engine("p2p")\n',
        "engine.register_stop(lambda ctx: ctx.step >= 3)\nprint(engine.start())\n",
    ),
    Script(
        'p2pnode.engine("server")',
        "ended",
        after='print("ended")\n',
        command="p2pnode run --local 2 --servers 1 -- python train.py",
    ),
    Script('p2pnode.engine("mapreduce"', r"'b', 3", after="print(counts)\n", command=ALONE, prepare=texts),
    Script("swarm.evaluate(accuracy=0.93", "^trained", ATTACHED, STEPS),
    Script("samples=1000)", "^trained", ATTACHED, STEPS),
    Script("swarm.evaluate(accuracy=accuracy(model))", "^trained", ATTACHED, STEPS),
    Script('swarm.busy("validation")', "^trained", ATTACHED, STEPS),
    Script("final.pt", "^trained", ATTACHED, 'import os\nassert os.path.getsize("final.pt") > 0\n' + TRAINED),
    Script("load_file(", "^0.0$", BEFORE, "print(float(model[0].weight.sum()))\n", command=ALONE, prepare=weights),
]


def script_of(shown: Shown) -> Script | None:
    return next((one for one in SCRIPTS if one.has in shown.text), None)
