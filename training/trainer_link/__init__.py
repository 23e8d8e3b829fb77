"""What a daemon and its trainer process share: the interface, the messages on the socket, the shared memory.

Both sides import it, so it imports neither of them and no torch.
"""
