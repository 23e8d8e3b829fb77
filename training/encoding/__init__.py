"""Encodes values for the wire: codecs, and the frames of a request body.

May import `training.kernels` and the settings. Pure.
"""
