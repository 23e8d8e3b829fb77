"""How values travel: codecs (float32, bfloat16, int8) and the frames that a body of a request consists of.

May import `training.kernels`. Pure. Only `frames` waits, for the stream it reads.
"""
