"""Runs a script of torchtitan's on processors and gloo: `python -m tests.process.harness.torchtitan_on_cpu SCRIPT`.

torchtitan wants GPUs. What is replaced is what it asks a GPU for: its name and memory, attention by FlexAttention, a
sum that NCCL scales, and time-outs of its groups.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TORCH_COMPILE_DISABLE"] = "1"

import torch
import torch._utils


def attention(q: Any, k: Any, v: Any, *, scale: float | None, enable_gqa: bool, **_: Any) -> tuple[Any, None]:
    found = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, None, 0.0, True, scale=scale, enable_gqa=enable_gqa
    )
    return found, None


def main() -> None:
    torch._utils._get_available_device_type = lambda: "cpu"
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.components import metrics
    from torchtitan.distributed import utils
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.llama3 import parallelize

    memory = metrics.DeviceMemStats(*[0.0] * len(metrics.DeviceMemStats._fields))
    metrics.build_device_memory_monitor = lambda: SimpleNamespace(
        device_name="cpu", get_peak_stats=lambda: memory, reset_peak_stats=lambda: None
    )
    utils.set_pg_timeouts = lambda **_: None
    FlexAttention.compiled_flex_attn = staticmethod(attention)
    apply_fsdp = parallelize.apply_fsdp_to_decoder

    def apply(model: Any, *arguments: Any, **options: Any) -> None:
        apply_fsdp(model, *arguments, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    parallelize.apply_fsdp_to_decoder = apply
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
