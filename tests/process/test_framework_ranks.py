"""The callbacks of Hugging Face and Lightning with several ranks: torchrun's processes train as one node."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.harness.project.repository import ROOT

RANKS, STEPS, LOCAL_STEPS, BATCH = 2, 3, 2, 4

#: Both print, on every rank, the optimiser steps, the samples of the swarm, and the sum of the weights.
SCRIPTS = {
    "transformers": """
import os, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from p2pnode.integrations.transformers import SwarmCallback

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
tokens = torch.randint(0, 64, (256, 16), generator=torch.Generator().manual_seed(1))
rows = [{"input_ids": row, "labels": row} for row in tokens]
arguments = TrainingArguments(
    "out", max_steps=100, per_device_train_batch_size=4, eval_strategy="steps", eval_steps=4, save_strategy="no",
    report_to=[], use_cpu=True, disable_tqdm=True, ddp_backend="gloo",
)
callback = SwarmCallback()
trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:16], callbacks=[callback])
trainer.train()
steps = trainer.state.global_step
""",
    "lightning": """
import os, torch, lightning
from torch import nn
from p2pnode.integrations.lightning import SwarmCallback

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 1)
    def training_step(self, batch, index):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])
    def validation_step(self, batch, index):
        self.log("loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)

torch.manual_seed(0)
inputs = torch.randn(256, 8)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
callback, model = SwarmCallback(), Module()
trainer = lightning.Trainer(
    max_steps=100, callbacks=[callback], accelerator="cpu", devices=2, strategy="ddp", logger=False,
    enable_checkpointing=False, enable_progress_bar=False, val_check_interval=4,
)
trainer.fit(model, torch.utils.data.DataLoader(data, 4), torch.utils.data.DataLoader(data, 64))
steps = trainer.global_step
""",
}

REPORT = """
total = float(sum(value.double().sum() for value in model.parameters()))
divided = callback._data.samples(1, 0)  # samples of a batch, if the nodes divide the data
print(
    f"rank {os.environ['RANK']}: {steps} steps, {callback.swarm.samples_seen} samples, {divided} divided, {total!r}",
    flush=True,
)
"""


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("package", SCRIPTS)
def test_the_ranks_of_a_callback_train_as_one_node(package: str, tmp_path: Path) -> None:
    """Each rank makes the steps of the run on its part of the data, which the nodes divide, and has its last weights.
    The samples of both count; the node ends cleanly and writes the model."""
    if find_spec(package) is None:
        pytest.skip(f"{package} not installed: make test-frameworks installs it")
    (tmp_path / "train.py").write_text(SCRIPTS[package] + REPORT)
    settings = {"training.max_steps": STEPS, "training.local_steps": LOCAL_STEPS, "training.threads": 1}
    flags = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    node = [sys.executable, "-m", "p2pnode", "run", "--port", "0", "--status-port", "0", "--state-dir", "state", *flags]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "train.py"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("P2PNODE_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    done = subprocess.run(
        [*node, "--", *launch], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    # A rank's warnings may follow on the same line: all processes write to one pipe.
    found = re.findall(r"rank (\d): (\d+) steps, (\d+) samples, (\d+) divided, ([0-9.e+-]+)", done.stdout)
    assert sorted(rank for rank, *_ in found) == [str(rank) for rank in range(RANKS)]
    steps = STEPS * LOCAL_STEPS
    of_all = {tuple(map(int, numbers)) for _, *numbers, _ in found}
    assert of_all == {(steps, steps * RANKS * BATCH, BATCH)}
    assert len({total for *_, total in found}) == 1
    assert (tmp_path / "state" / "model.safetensors").is_file()
