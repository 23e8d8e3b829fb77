"""The trainer's side of shared data, `swarm.sampler` and `swarm.shard`; `training.sharing` is the daemon's."""
