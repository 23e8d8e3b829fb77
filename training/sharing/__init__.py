"""How the nodes of a swarm share a data set: who trains which partition of which epoch.

`member` decides without I/O; `service` sends its statements to the other nodes and its claims to the trainer.
"""
