"""The HTTP API of a node: status, peers, steps, events, metrics, and their OpenAPI description.

May import everything but `p2pnode.commands` and `p2pnode.demo`. `server` is imported late, in a thread, at start.
"""
