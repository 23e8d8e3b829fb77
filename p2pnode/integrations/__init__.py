"""Callbacks that make the training loops of other libraries trainers of a node: `transformers`, `lightning`.

Training scripts import them, with `p2pnode.attach` inside; no other module does, because they import torch. Each names
its extra where its library is missing (`pip install "p2pnode[transformers]"`). Accelerate needs no callback:
`p2pnode.attach` accepts what `Accelerator.prepare` returns (docs/frameworks.md).
"""
