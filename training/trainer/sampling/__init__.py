"""The trainer's side of shared data: `swarm.sampler` and `swarm.shard`.

`draws` counts what is trained, `permutation` orders an epoch, and `link` asks the daemon for partitions
(`training.sharing`).
"""
