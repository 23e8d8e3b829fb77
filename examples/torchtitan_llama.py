"""torchtitan's own Trainer in a swarm, by a subclass. Needs `pip install torchtitan==0.3.0 triton`, and GPUs.

    p2pnode run --set training.max_steps=60 -- torchrun --nproc-per-node 2 examples/torchtitan_llama.py

Its small Llama reads the source of Python's standard library, byte by byte. torchtitan divides the model among the
processes (`config.parallelism`), on each node as its owner likes.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

import p2pnode


class Bytes(BaseDataLoader):
    """Windows of the text, drawn at random."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        self.text = torch.frombuffer(bytearray().join(map(Path.read_bytes, files)), dtype=torch.uint8).long()
        self.rank, self.length, self.rows, self.generator = dp_rank, seq_len, local_batch_size, torch.Generator()

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            starts = torch.randint(len(self.text) - self.length, (self.rows, 1), generator=self.generator)
            windows = self.text[starts + torch.arange(self.length + 1)]
            positions = torch.arange(self.length).expand(self.rows, -1)
            yield {"input": windows[:, :-1], "positions": positions}, windows[:, 1:]

    state_dict = load_state_dict = lambda *_: {}


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, **_: Any) -> None:
        super().__init__()

    encode = decode = get_vocab_size = lambda *_: None


class SwarmTrainer(Trainer):
    def __init__(self, config: Trainer.Config) -> None:
        super().__init__(config)
        self.swarm = p2pnode.attach(self.model_parts[0], list(self.optimizers))
        self.dataloader.generator.manual_seed(self.swarm.seed + self.dataloader.rank)

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        self.swarm.step(samples=self.config.training.local_batch_size)

    def should_continue_training(self) -> bool:
        return not self.swarm.done


config = llama3_debugmodel()
config.dataloader, config.tokenizer = Bytes.Config(), NoTokenizer.Config()
config.training.local_batch_size, config.training.seq_len = 8, 64
config.validator.enable = config.checkpoint.enable = False
config.training.disable_cuda_graphs = True
config.parallelism.spmd_backend = "partial_dtensor"
trainer = SwarmTrainer(config)
trainer.train()
trainer.close()
