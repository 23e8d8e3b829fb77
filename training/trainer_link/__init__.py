"""Shared by a daemon and its trainer process: the interface, the messages on the socket, the shared memory.

Both processes import it, so it imports neither side and no torch.
"""
