"""Dispatch of data: RecordIO files, and the queue by which a master hands out leased tasks made of their chunks.

`queue` and `draft` decide without I/O; `stored_queue` stores a batch of decisions, then applies it; `store` is the
interface of what keeps them.
"""
