"""A Hugging Face fine-tune with LoRA: the nodes exchange the adapters alone. Needs `p2pnode[transformers]` and peft.

    p2pnode run --set training.max_steps=50 -- python examples/huggingface_lora.py --steps 500

The model is a small random GPT-2, so that nothing is downloaded; `--model gpt2` takes a trained one. Every node needs
the same base model, and the same text, which they divide. `--steps` is the length of the learning rate's schedule:
training.max_steps times training.local_steps.
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from p2pnode.integrations.transformers import SwarmCallback

CONTEXT = 32


class Windows(torch.utils.data.Dataset):
    """Windows of a text's bytes, as input and label."""

    def __init__(self, text: bytes) -> None:
        self.windows = torch.tensor(list(text)).unfold(0, CONTEXT, CONTEXT // 2)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


parser = argparse.ArgumentParser()
parser.add_argument("--model", default="", help="a trained model's name; empty: a small random one")
parser.add_argument("--text", default=__file__)
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--out", default="adapters")
arguments = parser.parse_args()

torch.manual_seed(0)
if arguments.model:
    base = AutoModelForCausalLM.from_pretrained(arguments.model)
else:
    base = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2))
model = get_peft_model(base, LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"))
data = Windows(Path(arguments.text).read_bytes())
training, held_out = torch.utils.data.random_split(data, [0.9, 0.1], torch.Generator().manual_seed(0))
trainer = Trainer(
    model,
    TrainingArguments(
        arguments.out,
        max_steps=arguments.steps,
        learning_rate=2e-3,
        per_device_train_batch_size=8,
        eval_strategy="steps",
        eval_steps=50,
        save_strategy="no",
        report_to=[],
    ),
    train_dataset=training,
    eval_dataset=held_out,
    callbacks=[SwarmCallback()],
)
trainer.train()
model.save_pretrained(arguments.out)
print(f"the adapters are in {arguments.out}; loss {trainer.evaluate()['eval_loss']:.3f}")
