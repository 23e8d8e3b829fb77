"""Models and checkpoints as files in the safetensors format.

May import `training.encoding`, `training.layout` and `training.trainer_link.interface`.
"""
