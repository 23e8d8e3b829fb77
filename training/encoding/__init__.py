"""Encodes values for the wire: codecs (float32, bfloat16, int8), and the frames of a request body.

May import `training.kernels` and the settings. Pure.
"""
